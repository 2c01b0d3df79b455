"""Which samples a step trains on, split over ranks and micro batches, and read ahead. Knows no model."""

from dataclasses import dataclass


@dataclass
class DataConfig:
    """What training reads.

    ``source`` "cache" reads the target cache in ``path``; "online" reads the responses in ``path`` and runs the frozen
    target in the training process. ``global_batch`` counts sequences over all ranks; ``micro_tokens`` bounds the padded
    tokens of one forward of one rank. ``heldout`` is the share of samples, chosen by a hash of their id, that is kept
    for the held-out loss (at most ``heldout_max`` of them are used). ``prefetch`` is the number of global steps read
    ahead.
    """

    source: str = "cache"
    path: str = "cache"
    max_length: int = 4096
    anchors: int = 512
    pack_tokens: int | None = None
    global_batch: int = 512
    micro_tokens: int = 16384
    seed: int = 0
    heldout: float = 0.02
    heldout_max: int = 256
    prefetch: int = 2
    threads: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot work, naming both when two contradict."""
        if self.source not in ("cache", "online"):
            raise ValueError(f"data.source is {self.source!r}: give 'cache' or 'online'")
        for name in ("max_length", "anchors", "global_batch", "micro_tokens", "prefetch", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} is {getattr(self, name)}: give at least 1")
        if not 0.0 <= self.heldout < 1.0:
            raise ValueError(f"data.heldout is {self.heldout}: give a share in [0, 1)")
        if self.pack_tokens is not None and self.pack_tokens < self.max_length:
            raise ValueError(
                f"data.pack_tokens ({self.pack_tokens}) is below data.max_length ({self.max_length}): a long sample "
                "would fit no row; raise the first or lower the second"
            )
