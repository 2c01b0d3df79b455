"""Which responses go into which shard, and each as token ids. Reads response files; knows no weights and no states.

Shards are slices of the response files in their order, so the plan is the same for any number of processes and a file
added later changes only the last shard.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from deepspec.data.chat import ChatError, encode, encode_response

PARTS: Final = "part-*.parquet"
COLUMNS: Final = ("id", "source", "messages", "finish_reason", "thinking", "tokens")
MAX_UNUSABLE: Final = 0.05  # share of rows without a supervised token above which the template must be wrong


class ResponsesError(ValueError):
    """Responses that are missing, of another thinking mode, or mostly unusable."""


@dataclass(frozen=True)
class Conversation:
    """One response as the target sees it; ``spans`` are half-open ranges of supervised tokens."""

    id: str
    source: str
    tokens: list[int]
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
    """The response files of a folder, in order of their names. Ids must be unique."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self.parts = sorted(folder.glob(PARTS))
        if not self.parts:
            raise ResponsesError(
                f"{folder} holds no {PARTS}: run `python -m deepspec.data regenerate` with the same target and out"
            )
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
        if limit is not None:
            self.ids, self._places = self.ids[:limit], self._places[:limit]
        self._table: tuple[int, pa.Table] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Responses ``start`` … ``stop − 1`` as plain values; keeps one part in memory."""
        found: list[dict[str, Any]] = []
        while start < min(stop, len(self)):
            part, first = self._places[start]
            if self._table is None or self._table[0] != part:
                schema = pq.read_schema(self.parts[part])
                present = [name for name in COLUMNS if name in schema.names]
                self._table = (part, pq.read_table(self.parts[part], columns=present))
            count = min(stop, len(self)) - start
            taken = self._table[1].slice(first, count).to_pylist()
            found += taken
            start += len(taken)
        return found

    def digest(self, start: int, stop: int) -> str:
        """Fingerprint of the content that rows ``start`` … ``stop − 1`` come from."""
        parts = sorted({part for part, _ in self._places[start:stop]})
        text = "\n".join([self.digests[part] for part in parts] + self.ids[start:stop])
        return hashlib.sha256(text.encode()).hexdigest()


def encode_row(tokenizer: Any, row: dict[str, Any], settings: EncodeSettings) -> Conversation | str:
    """A response as a Conversation, or the reason why it cannot be used.

    Generated token ids are taken as they are; a response without them (from a server) is tokenised from its text, and
    when it was cut gets no end of turn. Raises ResponsesError for a response made in the other thinking mode.
    """
    if row.get("thinking") is not None and bool(row["thinking"]) != settings.thinking:
        raise ResponsesError(
            f"response {row['id']} was made with thinking={str(bool(row['thinking'])).lower()}, this run has "
            f"target.thinking={str(settings.thinking).lower()}: set target.thinking, or regenerate the responses"
        )
    truncated = row.get("finish_reason") == "length"
    if truncated and not settings.keep_truncated:
        return "truncated"
    messages = row["messages"] if isinstance(row["messages"], list) else json.loads(row["messages"])
    try:
        if row.get("tokens"):
            encoded = encode_response(
                tokenizer, messages, row["tokens"], thinking=settings.thinking, max_length=settings.max_length
            )
        else:
            encoded = encode(
                tokenizer,
                messages,
                thinking=settings.thinking,
                max_length=settings.max_length,
                truncated=truncated,
            )
    except ChatError:
        return "template"
    conversation = Conversation(row["id"], row.get("source") or "", encoded.tokens, encoded.spans)
    return conversation if conversation.states > 0 else "nothing supervised"


def encode_rows(
    tokenizer: Any, rows: Sequence[dict[str, Any]], settings: EncodeSettings
) -> tuple[list[Conversation], Counter[str]]:
    """Usable conversations in order, and how many rows were dropped for which reason."""
    kept: list[Conversation] = []
    dropped: Counter[str] = Counter()
    for row in rows:
        result = encode_row(tokenizer, row, settings)
        if isinstance(result, str):
            dropped[result] += 1
        else:
            kept.append(result)
    return kept, dropped


def check_usable(kept: int, dropped: Counter[str], folder: Path) -> None:
    """Raise ResponsesError when so many rows have no supervised token that the template must be wrong (trap 7)."""
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
