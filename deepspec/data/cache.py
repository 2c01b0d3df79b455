"""The target cache's format: configuration, Parquet schema, manifest. Knows no models and reads no hidden states."""

from dataclasses import dataclass


@dataclass
class CacheConfig:
    """How a target cache is built. Lengths and sizes count tokens unless they say rows.

    ``shard_rows`` is the unit of resume: a killed build loses at most one shard per rank. ``batch_tokens`` bounds one
    target forward (padding included) and ``max_padding`` the share of it that may be padding.
    """

    folder: str = "cache"
    codec: str = "bf16"
    max_length: int = 4096
    shard_rows: int = 256
    batch_tokens: int = 16384
    max_padding: float = 0.05
    limit: int | None = None
    keep_truncated: bool = True
    queue_batches: int = 2
    ignore_disk_space: bool = False
    remove_damaged: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot work."""
        for name in ("max_length", "shard_rows", "batch_tokens", "queue_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"cache.{name} is {getattr(self, name)}: give at least 1")
        if not 0.0 <= self.max_padding < 1.0:
            raise ValueError(f"cache.max_padding is {self.max_padding}: give a share in [0, 1)")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"cache.limit is {self.limit}: give at least 1, or null for everything")
