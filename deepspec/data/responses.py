"""The responses folder: Parquet parts that appear whole, failures, and rows as token ids. Knows no engine.

Columns of ``part-*.parquet``: id, messages (JSON, the answer last), finish_reason (stop or length), thinking, sampling
(JSON), tokens (ids of the last answer as generated, end-of-turn token included; null when a server did not tell them),
source, tools (JSON or null).
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from deepspec.data.chat import Encoded, encode, encode_response
from deepspec.files import atomic_write, provenance, read_json

_MADE = b"deepspec"  # key of the schema's metadata
_PART = re.compile(r"part-(?P<rank>\d+)-(?P<number>\d+)")
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.string()),
        ("finish_reason", pa.string()),
        ("thinking", pa.bool_()),
        ("sampling", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("source", pa.string()),
        ("tools", pa.string()),
    ]
)


# Version of the rules by which answers are made: how prompts are rendered (chat.py), tokens drawn (models/sampling.py,
# engines.draw_index) and ends trimmed (engines.py, servers.py). Raise it when a change to one of them gives the same
# prompt, target and options another answer: answers of before are then refused. 1 is also the version of folders that
# do not say one.
ANSWER_SEMANTICS = 1


class ResponsesError(ValueError):
    """A responses folder that cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True)
class Response:
    """One answered conversation, see the module's columns."""

    id: str
    messages: list[dict[str, Any]]
    finish_reason: str
    thinking: bool
    sampling: dict[str, Any]
    tokens: list[int] | None
    source: str
    tools: list[dict[str, Any]] | None = None

    @property
    def truncated(self) -> bool:
        """Whether the answer was cut before its end."""
        return self.finish_reason == "length"


def write_part(file: Path, responses: Iterable[Response]) -> None:
    """Write one part, atomically: a reader sees all of it or nothing."""
    rows = [
        {
            "id": row.id,
            "messages": _json(row.messages),
            "finish_reason": row.finish_reason,
            "thinking": row.thinking,
            "sampling": _json(row.sampling),
            "tokens": row.tokens,
            "source": row.source,
            "tools": _json(row.tools) if row.tools else None,
        }
        for row in responses
    ]
    made = {"semantics": ANSWER_SEMANTICS, **provenance()}
    schema = SCHEMA.with_metadata({_MADE: json.dumps(made)})
    with atomic_write(file) as temporary:
        parquet.write_table(pa.Table.from_pylist(rows, schema), temporary, compression="zstd")


def _json(value: Any) -> str:
    # Lone surrogates, which some data sets hold, are no valid UTF-8: they are written as escapes.
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    return text


def part_files(folder: Path) -> list[Path]:
    """Parts by number, then rank: those of a later run come after all that were there. Other names come last."""
    return sorted(folder.glob("part-*.parquet"), key=_place)


def next_part(folder: Path) -> int:
    """The first part number above those of all ranks."""
    numbers = [_PART.fullmatch(file.stem) for file in folder.glob("part-*.parquet")]
    return max((int(match["number"]) + 1 for match in numbers if match), default=0)


def _place(file: Path) -> tuple[float, int, str]:
    match = _PART.fullmatch(file.stem)
    return (int(match["number"]), int(match["rank"]), "") if match else (math.inf, 0, file.name)


def part_provenance(file: Path) -> dict[str, Any]:
    """What code wrote a part: its ``semantics``, versions and ``git_revision``; {} for parts that do not say it."""
    metadata = _open(file).schema_arrow.metadata or {}
    return json.loads(metadata.get(_MADE, b"{}"))


def require_semantics(folder: Path) -> None:
    """Raise ResponsesError unless the folder's answers were made by this version's rules; no manifest says nothing."""
    file = folder / "manifest.json"
    if not file.is_file():
        return
    version = read_json(file).get("stamp", {}).get("semantics", 1)
    if version != ANSWER_SEMANTICS:
        raise ResponsesError(
            f"{folder} holds answers made by version {version} of the rules for rendering, sampling and trimming, this "
            f"deepspec has version {ANSWER_SEMANTICS}, by which the same prompts are answered otherwise: answer them "
            "again with another out=… (or delete the folder), or use the deepspec that made them"
        )


def part_name(rank: int, number: int) -> str:
    """File name of a part; ranks never share one."""
    return f"part-{rank:03d}-{number:06d}.parquet"


def _open(file: Path) -> parquet.ParquetFile:
    try:
        return parquet.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise ResponsesError(
            f"{file} is damaged ({error}): delete it and run regenerate again; only its rows are made anew"
        ) from error


def answered_ids(folder: Path) -> set[str]:
    """Ids of all rows; raises ResponsesError when an id occurs twice."""
    ids: set[str] = set()
    for file in part_files(folder):
        found = _open(file).read(columns=["id"]).column("id").to_pylist()
        if len(set(found)) < len(found) or not ids.isdisjoint(found):
            raise ResponsesError(f"{file} repeats ids of another part: it was copied here; delete it")
        ids.update(found)
    return ids


def read_responses(folder: Path) -> Iterator[Response]:
    """Rows of all parts, in the order of parts and rows. Raises ResponsesError."""
    if not part_files(folder):
        raise ResponsesError(f"no responses in {folder}: run python -m deepspec.data regenerate first")
    for file in part_files(folder):
        for batch in _open(file).iter_batches(1024):
            for row in batch.to_pylist():
                yield from_plain(row)


def from_plain(row: dict[str, Any]) -> Response:
    """A row of a part, as Parquet gives it, with its JSON columns parsed."""
    parsed = {
        name: json.loads(row[name]) if row[name] is not None else None for name in ("messages", "sampling", "tools")
    }
    return Response(**{**row, **parsed})


def encode_row(tokenizer: Any, row: Response, *, max_length: int | None = None) -> Encoded:
    """Token ids and supervised spans of a response: generated ids where known, else through the template.

    A truncated answer has no end of turn. Raises ChatError.
    """
    if row.tokens is not None:
        return encode_response(
            tokenizer, row.messages, row.tokens, thinking=row.thinking, max_length=max_length, tools=row.tools
        )
    return encode(
        tokenizer,
        row.messages,
        thinking=row.thinking,
        max_length=max_length,
        truncated=row.truncated,
        tools=row.tools,
    )


def read_failures(path: Path) -> dict[str, str]:
    """Reason by id, from one failures file or all of a folder; a line cut off by a kill is ignored (it runs again)."""
    reasons: dict[str, str] = {}
    for file in sorted(path.glob("failures*.jsonl")) if path.is_dir() else [path]:
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                reasons[entry["id"]] = entry["reason"]
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
    return reasons
