"""Which responses go into which shard, and each as token ids. Reads response files; knows no weights and no states.

Shards are slices of the response files in the order of ``part_files``, so the plan is the same for any number of
processes, and what a later run of ``regenerate`` adds, on any ranks, changes only a last shard that was not full.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from deepspec.data.chat import ChatError
from deepspec.data.prompts import read_prompts
from deepspec.data.responses import (
    Response,
    ResponsesError,
    encode_row,
    from_plain,
    part_files,
    part_provenance,
    require_semantics,
)
from deepspec.files import read_json

MAX_UNUSABLE: Final = 0.05  # share of rows without a supervised token above which the template must be wrong


@dataclass(frozen=True)
class Conversation:
    """One response as the target sees it; ``spans`` are half-open ranges of supervised tokens."""

    id: str
    source: str
    tokens: Sequence[int]
    spans: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def states(self) -> int:
        """Number of positions whose next token is supervised."""
        return sum(end - max(start, 1) for start, end in self.spans)


@dataclass(frozen=True)
class EncodeSettings:
    """What decides how a response becomes tokens."""

    thinking: bool
    max_length: int
    keep_truncated: bool


class Responses:
    """The response files of a folder, in the order of ``part_files``. Ids must be unique.

    Answers to prompts that ``../prompts/heldout.jsonl`` holds out are left out (``left_out`` counts them), so that an
    evaluation prompt is never trained on. Raises ResponsesError for a folder that says it holds another target's
    answers than those of ``target`` (a name; None does not ask).
    """

    def __init__(self, folder: Path, limit: int | None = None, target: str | None = None) -> None:
        self.folder = folder
        self.parts = part_files(folder)
        if not self.parts:
            raise ResponsesError(
                f"{folder} holds no responses: run `python -m deepspec.data regenerate` with the same target and out"
            )
        _check_target(folder, target)
        require_semantics(folder)
        self.digests: list[str] = []
        self._places: list[tuple[int, int]] = []
        self.ids: list[str] = []
        for number, part in enumerate(self.parts):
            content = part.read_bytes()
            self.digests.append(xxhash.xxh3_128_hexdigest(content))
            ids = pq.read_table(pa.BufferReader(content), columns=["id"])["id"].to_pylist()
            self.ids += ids
            self._places += [(number, row) for row in range(len(ids))]
        if len(set(self.ids)) != len(self.ids):
            twice = next(id for id, count in Counter(self.ids).items() if count > 1)
            raise ResponsesError(f"{folder} answers {twice!r} twice: remove one of the part files")
        self._leave_out(_heldout_ids(folder))
        if limit is not None:
            self.ids, self._places = self.ids[:limit], self._places[:limit]
        self._table: tuple[int, pa.Table] | None = None

    @property
    def revisions(self) -> list[str]:
        """Git revisions of the code that made the answers, each once; "unknown" for parts that do not say theirs."""
        stated = [part_provenance(part).get("git_revision") for part in self.parts]
        return sorted({revision or "unknown" for revision in stated})

    def _leave_out(self, unwanted: set[str]) -> None:
        kept = [row for row, id in enumerate(self.ids) if id not in unwanted]
        self.left_out = len(self.ids) - len(kept)
        if not kept and self.left_out:
            raise ResponsesError(
                f"{self.folder}: all {self.left_out} answers are to held-out prompts, and those are not trained on: "
                "run `python -m deepspec.data regenerate`, which answers the training prompts"
            )
        self.ids, self._places = [self.ids[row] for row in kept], [self._places[row] for row in kept]

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, start: int, stop: int) -> list[Response]:
        """Responses ``start`` … ``stop − 1``; keeps one part in memory."""
        found: list[Response] = []
        while start < min(stop, len(self)):
            part, first = self._places[start]
            if self._table is None or self._table[0] != part:
                self._table = (part, pq.read_table(self.parts[part]))
            count = 1
            while start + count < min(stop, len(self)) and self._places[start + count] == (part, first + count):
                count += 1
            found += [from_plain(row) for row in self._table[1].slice(first, count).to_pylist()]
            start += count
        return found

    def digest(self, start: int, stop: int) -> str:
        """Fingerprint of the content that rows ``start`` … ``stop − 1`` come from."""
        parts = sorted({part for part, _ in self._places[start:stop]})
        text = "\n".join([self.digests[part] for part in parts] + self.ids[start:stop])
        return hashlib.sha256(text.encode()).hexdigest()


def _check_target(folder: Path, target: str | None) -> None:
    """Raise ResponsesError if the folder's manifest, which ``regenerate`` writes, names another target."""
    file = folder / "manifest.json"
    if target is None or not file.is_file():
        return
    made_by = read_json(file).get("stamp", {}).get("target")
    if made_by not in (None, target):
        raise ResponsesError(
            f"{folder} holds the answers of {made_by}, this run's target is {target}: a drafter learns from its own "
            f"target's answers; give target={made_by}, another out=…, or regenerate (target.name={made_by} if they are "
            "one model)"
        )


def _heldout_ids(folder: Path) -> set[str]:
    file = folder.parent / "prompts" / "heldout.jsonl"
    return {prompt["id"] for prompt in read_prompts(file)} if file.is_file() else set()


def to_conversation(tokenizer: Any, row: Response, settings: EncodeSettings) -> Conversation | str:
    """A response as the target sees it, or the reason why it cannot be used.

    Raises ResponsesError for a response made in the other thinking mode.
    """
    if row.thinking != settings.thinking:
        raise ResponsesError(
            f"response {row.id} was made with thinking={str(row.thinking).lower()}, this run has "
            f"target.thinking={str(settings.thinking).lower()}: set target.thinking, or regenerate the responses"
        )
    if row.truncated and not settings.keep_truncated:
        return "truncated"
    try:
        encoded = encode_row(tokenizer, row, max_length=settings.max_length)
    except ChatError:
        return "template"
    conversation = Conversation(row.id, row.source or "", encoded.tokens, encoded.spans)
    return conversation if conversation.states > 0 else "nothing supervised"


def encode_rows(
    tokenizer: Any, rows: Sequence[Response], settings: EncodeSettings
) -> tuple[list[Conversation], Counter[str]]:
    """Usable conversations in order, and how many rows were dropped for which reason."""
    kept: list[Conversation] = []
    dropped: Counter[str] = Counter()
    for row in rows:
        result = to_conversation(tokenizer, row, settings)
        if isinstance(result, str):
            dropped[result] += 1
        else:
            kept.append(result)
    return kept, dropped


def check_usable(kept: int, dropped: Counter[str], folder: Path) -> None:
    """Raise ResponsesError when so many rows have no supervised token that the template must be wrong."""
    unusable = dropped["nothing supervised"] + dropped["template"]
    if unusable > MAX_UNUSABLE * (kept + unusable) and unusable > 1:
        raise ResponsesError(
            f"{unusable} of {kept + unusable} responses in {folder} have no supervised token or cannot be rendered: "
            "look at them with `python -m deepspec.data preview`, or raise cache.max_length"
        )


def batches(lengths: Sequence[int], budget: int, max_padding: float) -> list[list[int]]:
    """Indices grouped by length, longest first, so that rows × longest ≤ budget and padding ≤ ``max_padding``.

    A row longer than the budget is a batch of its own. Every index occurs once.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    real = 0
    for index in order:
        length = lengths[index]
        if groups:
            padded = (len(groups[-1]) + 1) * lengths[groups[-1][0]]
            if padded <= budget and padded - real - length <= max_padding * padded:
                groups[-1].append(index)
                real += length
                continue
        groups.append([index])
        real = length
    return groups
