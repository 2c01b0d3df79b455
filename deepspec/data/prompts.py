"""From sources to two prompt files, train and held-out. Knows reasons for dropping a row, not models or templates."""

from dataclasses import dataclass, field


@dataclass
class SourceConfig:
    """One source of conversations.

    ``path`` is ``demo`` (the project's own prompts), a hub data set id, or a local file, folder or glob of JSONL,
    JSONL.zst or Parquet. ``columns`` maps the names ``messages``, ``prompt``, ``instruction``, ``input``, ``turns``,
    ``system``, ``tools``, ``id`` or ``source`` to columns of the data; what is not given is inferred and printed.
    ``weight`` is the source's share of ``prompts.limit``; ``limit`` bounds the rows read.
    """

    path: str = ""
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = True
    columns: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0
    limit: int | None = None


@dataclass
class PromptsConfig:
    """What goes into ``${out}/prompts``.

    ``heldout`` prompts are set aside by the seed; ``turns`` is ``all`` (whole conversations, answered turn by turn) or
    ``first`` (only the first user turn). ``near_duplicates`` is the estimated Jaccard similarity of word 5-grams from
    which a prompt counts as a copy (0 switches it off). ``decontaminate`` lists files or folders of evaluation prompts;
    a prompt sharing an ``ngram``-word run with one is dropped. ``max_chars`` bounds one prompt's text.
    """

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    limit: int | None = None
    heldout: int = 256
    turns: str = "all"
    shuffle: bool = True
    seed: int = 0
    max_chars: int = 32768
    near_duplicates: float = 0.0
    decontaminate: list[str] = field(default_factory=list)
    ngram: int = 13

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot work."""
        if self.turns not in ("all", "first"):
            raise ValueError(f"prompts.turns is '{self.turns}': give all or first")
        if not 0.0 <= self.near_duplicates <= 1.0:
            raise ValueError(f"prompts.near_duplicates is {self.near_duplicates}: give a similarity in [0, 1]")
        for name in ("heldout", "ngram", "max_chars"):
            if getattr(self, name) < 0:
                raise ValueError(f"prompts.{name} is {getattr(self, name)}: give 0 or more")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"prompts.limit is {self.limit}: give at least 1, or null for everything")
