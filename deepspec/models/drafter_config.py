"""What a drafter is, apart from its target: kind, depth, block size, heads. Knows no tensors."""

from dataclasses import dataclass

KINDS = ("dspark", "dflash", "eagle3")
MARKOV_HEADS = ("vanilla", "gated", "rnn")


class DrafterConfigError(ValueError):
    """Options of a drafter that contradict each other or lie outside their range."""


@dataclass
class DrafterConfig:
    """Options of a drafter; None means: derived from ``kind`` (and, for the mask token, from the target).

    kind               "dspark" (block drafter with heads), "dflash" (block drafter, no heads) or "eagle3"
    layers             draft decoder layers; 5 for block drafters, 1 for EAGLE-3
    block_size         γ, the number of draft tokens of a round
    markov_rank        R; 256 for dspark, 0 (no Markov head) otherwise
    markov_head        "vanilla", "gated" or "rnn"
    confidence         confidence head; on for dspark, off otherwise
    confidence_with_markov  feed W1[x_{k-1}] to the confidence head; on where there is a Markov head
    mask_token_id      input id of the block positions after the anchor
    learned_mask       a trained mask embedding instead of the target's row of ``mask_token_id`` (block drafters)
    own_embedding      a trained copy of the target's embedding instead of sharing the frozen one
    sliding_window     the context a query sees reaches back fewer than this many positions; None: all of it
    draft_vocab_size   size of a reduced draft vocabulary; None: the target's vocabulary
    ttt_length         steps of EAGLE-3's training-time test
    qk_norm            q/k norms of the EAGLE-3 layer; off is the layout other engines serve
    """

    kind: str = "dspark"
    layers: int | None = None
    block_size: int = 7
    markov_rank: int | None = None
    markov_head: str = "vanilla"
    confidence: bool | None = None
    confidence_with_markov: bool | None = None
    mask_token_id: int | None = None
    learned_mask: bool = False
    own_embedding: bool = False
    sliding_window: int | None = None
    draft_vocab_size: int | None = None
    ttt_length: int = 7
    qk_norm: bool = True

    def __post_init__(self) -> None:
        _one_of("drafter.kind", self.kind, KINDS)
        _one_of("drafter.markov_head", self.markov_head, MARKOV_HEADS)
        if self.layers is None:
            self.layers = 1 if self.kind == "eagle3" else 5
        if self.markov_rank is None:
            self.markov_rank = 256 if self.kind == "dspark" else 0
        if self.confidence is None:
            self.confidence = self.kind == "dspark"
        if self.confidence_with_markov is None:
            self.confidence_with_markov = self.confidence and self.markov_rank > 0
        self._check_ranges()
        self._check_contradictions()

    def _check_ranges(self) -> None:
        for name in ("layers", "block_size", "ttt_length", "sliding_window", "draft_vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DrafterConfigError(f"drafter.{name}={value} must be at least 1")
        for name in ("markov_rank", "mask_token_id"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise DrafterConfigError(f"drafter.{name}={value} must not be negative")

    def _check_contradictions(self) -> None:
        kind = f"drafter.kind={self.kind}"
        block = self.kind != "eagle3"
        contradictions = (
            (self.kind != "dspark" and self.markov_rank != 0, f"drafter.markov_rank={self.markov_rank}", kind),
            (self.kind != "dspark" and bool(self.confidence), "drafter.confidence=true", kind),
            (
                self.kind == "dspark" and self.markov_rank == 0 and not self.confidence,
                "drafter.markov_rank=0 with drafter.confidence=false (that is drafter.kind=dflash)",
                kind,
            ),
            (
                bool(self.confidence_with_markov) and not self.confidence,
                "drafter.confidence_with_markov=true",
                "drafter.confidence=false",
            ),
            (
                bool(self.confidence_with_markov) and self.markov_rank == 0,
                "drafter.confidence_with_markov=true",
                "drafter.markov_rank=0",
            ),
            (not block and self.layers != 1, f"drafter.layers={self.layers}", kind),
            (not block and self.learned_mask, "drafter.learned_mask=true", kind),
            (not block and self.mask_token_id is not None, f"drafter.mask_token_id={self.mask_token_id}", kind),
            (not block and self.sliding_window is not None, f"drafter.sliding_window={self.sliding_window}", kind),
            (
                self.sliding_window is not None and self.sliding_window < self.block_size,
                f"drafter.sliding_window={self.sliding_window} (a block must see itself)",
                f"drafter.block_size={self.block_size}",
            ),
            (block and not self.qk_norm, "drafter.qk_norm=false", kind),
        )
        for wrong, first, second in contradictions:
            if wrong:
                raise DrafterConfigError(f"{first} contradicts {second}: change one of the two")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise DrafterConfigError(f"{name}={value!r} is unknown: choose one of {', '.join(known)}")
