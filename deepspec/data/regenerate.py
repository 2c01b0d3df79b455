"""The target's own answers to the prompts: work list, resume by id, exactly-once accounting. Knows no templates."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RegenerateConfig:
    """How responses are made.

    ``engine`` is ``transformers`` (in this process) or ``openai`` (the ``servers``). Sampling values that are null come
    from the model's generation_config (greedy when it says nothing). A part file is written every
    ``flush_completions`` answers or ``flush_seconds``, whichever is first: the most a kill can lose.
    """

    engine: str = "transformers"
    max_new_tokens: int = 2048
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    limit: int | None = None
    batch_size: int = 32
    flush_completions: int = 256
    flush_seconds: float = 60.0
    retry_failures: bool = True
    servers: list[str] = field(default_factory=list)
    model: str | None = None
    concurrency: int = 64
    timeout: float = 600.0
    attempts: int = 5
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot work."""
        if self.engine not in ("transformers", "openai"):
            raise ValueError(f"regenerate.engine is '{self.engine}': give transformers or openai")
        if self.engine == "openai" and not self.servers:
            raise ValueError("regenerate.engine=openai needs regenerate.servers=[http://host:port/v1,…]")
        for name in ("max_new_tokens", "batch_size", "flush_completions", "concurrency", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"regenerate.{name} is {getattr(self, name)}: give at least 1")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"regenerate.limit is {self.limit}: give at least 1, or null for everything")
