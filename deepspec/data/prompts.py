"""From sources to two prompt files, train and held-out. Knows reasons for dropping a row, not models or templates.

Every row read is either written or counted under one reason: read == train + heldout + Σ dropped.
"""

import hashlib
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from deepspec.data.decontaminate import Copies, Evaluation
from deepspec.data.sources import (
    Columns,
    RowError,
    SourceConfig,
    SourceError,
    conversation,
    infer,
    is_local,
    read,
    read_file,
)
from deepspec.files import atomic_write, provenance, read_json, sha256_file, write_json

Message = dict[str, Any]
SPLITS = ("train", "heldout")


@dataclass
class PromptsConfig:
    """What goes into ``${out}/prompts``.

    ``heldout`` prompts are set aside by the seed; ``turns`` is ``all`` (whole conversations, answered turn by turn) or
    ``first`` (only the first user turn). ``near_duplicates`` is the estimated Jaccard similarity of word 5-grams from
    which a prompt counts as a copy (0 switches it off). ``decontaminate`` lists files or folders of evaluation prompts;
    a conversation with a question that shares an ``ngram``-word run with one, or is a shorter one as a whole, is
    dropped. ``max_chars`` bounds one conversation's text.
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
        if self.heldout < 0:
            raise ValueError(f"prompts.heldout is {self.heldout}: give 0 or more")
        for name in ("ngram", "max_chars"):
            if getattr(self, name) < 1:
                raise ValueError(f"prompts.{name} is {getattr(self, name)}: give at least 1")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"prompts.limit is {self.limit}: give at least 1, or null for everything")


def prompt_id(messages: Sequence[Message], tools: Any = None) -> str:
    """Stable id of a prompt: 20 hex digits of the SHA-256 of its canonical JSON."""
    canonical = json.dumps([list(messages), tools or None], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:20]


def as_prompt(messages: list[Message], turns: str) -> list[Message]:
    """The part of a conversation that asks: it ends in a user (or tool) turn. Raises RowError.

    Answers before the first question and after the last are cut off; ``turns`` = first keeps one question.
    """
    system = [message for message in messages if message["role"] == "system"]
    if len(system) > 1 or (system and messages[0]["role"] != "system"):
        raise RowError("system message not first, or several")
    rest = messages[len(system) :]
    while rest and rest[0]["role"] == "assistant":
        rest = rest[1:]
    while rest and rest[-1]["role"] == "assistant":
        rest = rest[:-1]
    if turns == "first":
        rest = rest[:1]
    if not rest:
        raise RowError("no question")
    if rest[0]["role"] != "user":
        raise RowError("starts with a tool result")
    for before, after in pairwise(rest):
        if before["role"] == after["role"] == "user" or {before["role"], after["role"]} == {"tool", "user"}:
            raise RowError("two questions in a row")
        if before["role"] == after["role"] == "assistant":
            raise RowError("two answers in a row")
        if after["role"] == "tool" and before["role"] == "assistant" and not before.get("tool_calls"):
            raise RowError("tool result without a call")
    if any(message["role"] == "user" and not message["content"].strip() for message in rest):
        raise RowError("empty question")
    return system + rest


class Filter:
    """Turns rows into prompt records, or counts why not; keeps a few examples of each reason."""

    EXAMPLES = 3

    def __init__(self, config: PromptsConfig) -> None:
        self.config = config
        self.evaluation = Evaluation(config.decontaminate, config.ngram) if config.decontaminate else None
        self.copies = Copies(config.near_duplicates)
        self.ids: set[str] = set()
        self.read: Counter[str] = Counter()
        self.dropped: dict[str, Counter[str]] = {}
        self.examples: dict[str, list[str]] = {}

    def drop(self, source: str, reason: str, example: str, count: int = 1) -> None:
        """Count rows that are not kept."""
        self.dropped.setdefault(source, Counter())[reason] += count
        shown = self.examples.setdefault(reason, [])
        if len(shown) < self.EXAMPLES:
            shown.append(example[:300])

    def records(self, name: str, columns: Columns, rows: Iterator[Any]) -> Iterator[dict[str, Any]]:
        """Kept records {"id", "messages", "source"[, "tools"][, "split"]} of one source."""
        for row in rows:
            self.read[name] += 1
            try:
                yield self._record(name, columns, row)
            except RowError as error:
                self.drop(name, str(error), error.example or json.dumps(row, ensure_ascii=False, default=str))

    def _record(self, name: str, columns: Columns, row: Any) -> dict[str, Any]:
        messages = as_prompt(conversation(row, columns), self.config.turns)
        if sum(len(message["content"]) for message in messages) > self.config.max_chars:
            raise RowError(f"longer than {self.config.max_chars} characters")
        values = {key: row.get(column) for key, column in columns.carried.items()}
        tools = _tools(values.get("tools"))
        record: dict[str, Any] = {"id": str(values.get("id") or prompt_id(messages, tools)), "messages": messages}
        record["source"] = str(values.get("source") or name)
        if tools:
            record["tools"] = tools
        if values.get("split") in SPLITS:
            record["split"] = values["split"]
        questions = "\n".join(message["content"] for message in messages if message["role"] == "user")
        context = messages[0]["content"] + "\n" if messages[0]["role"] == "system" else ""
        for message in messages:
            if message["role"] == "user" and (found := self._evaluation_prompt(message["content"])) is not None:
                raise RowError("contaminated", found)
        if (reason := self.copies.seen(context + questions)) is not None:
            raise RowError(reason)
        if record["id"] in self.ids:
            raise RowError("duplicate id")
        self.ids.add(record["id"])
        return record

    def _evaluation_prompt(self, question: str) -> str | None:
        return None if self.evaluation is None else self.evaluation.match(question)


def _tools(value: Any) -> list[Any] | None:
    """Tool descriptions of a row, which some data sets keep as JSON text; None for none. Raises RowError."""
    try:
        tools = json.loads(value or "[]") if value is None or isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise RowError("tools are not JSON") from error
    if not isinstance(tools, list):
        raise RowError("tools are not a list")
    return tools or None


class Spool:
    """Records on disk until the choice is made; memory holds only where each one starts."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def put(self, record: dict[str, Any]) -> int:
        """Store a record, returning its address."""
        address = self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        return address

    def line(self, address: int) -> bytes:
        """The stored record as a JSON line."""
        self._file.seek(address)
        return self._file.readline()


def build(config: PromptsConfig, folder: Path) -> dict[str, Any]:
    """Write train.jsonl, heldout.jsonl and summary.json into ``folder``; returns the summary.

    A folder made from the same configuration is left as it is. Raises SourceError when a source cannot be read.
    """
    if not config.sources:
        raise SourceError(
            "no prompt source: give data=<recipe>, or data=custom prompts.sources.custom.path=<file or data set>"
        )
    described = asdict(config)
    if (found := _existing(folder, described)) is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    filter_ = Filter(config)
    with tempfile.TemporaryFile(dir=folder) as file:
        spool = Spool(file)
        chosen, heldout, columns = _choose(config, filter_, spool)
        files = {}
        for split, addresses in (("train", chosen), ("heldout", heldout)):
            with atomic_write(folder / f"{split}.jsonl") as temporary, temporary.open("wb") as out:
                for address in addresses:
                    out.write(spool.line(address))
            files[split] = {"rows": len(addresses), "sha256": sha256_file(folder / f"{split}.jsonl")}
    read_rows, dropped = filter_.read.total(), sum(sum(c.values()) for c in filter_.dropped.values())
    assert read_rows == len(chosen) + len(heldout) + dropped, (read_rows, len(chosen), len(heldout), dropped)
    summary = {
        "config": described,
        "read": dict(filter_.read),
        "columns": {name: str(mapping) for name, mapping in columns.items()},
        "files": files,
        "dropped": {name: dict(counts) for name, counts in filter_.dropped.items()},
        "examples": filter_.examples,
        "provenance": provenance(),
    }
    write_json(folder / "summary.json", summary)
    return summary


def _existing(folder: Path, described: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of a complete folder made from the same configuration."""
    if not (folder / "summary.json").is_file():
        return None
    summary = read_json(folder / "summary.json")
    if summary.get("config") != described:
        return None
    for split in SPLITS:
        file = folder / f"{split}.jsonl"
        if not file.is_file() or sha256_file(file) != summary["files"][split]["sha256"]:
            return None
    return {**summary, "reused": True}


def _choose(config: PromptsConfig, filter_: Filter, spool: Spool) -> tuple[list[int], list[int], dict[str, Columns]]:
    """Addresses of the training and held-out records, by source weight, limit and seed."""
    columns: dict[str, Columns] = {}
    streams: dict[str, Iterator[int]] = {}
    fixed: dict[str, list[int]] = {"train": [], "heldout": []}
    for name, source in config.sources.items():
        streams[name] = _addresses(config, name, source, filter_, spool, columns, fixed["heldout"])
    wanted = None if config.limit is None else config.limit + config.heldout
    pools: dict[str, list[int]] = {name: [] for name in streams}
    for name, source in config.sources.items():
        if wanted is None or is_local(source) or not source.streaming:
            pools[name].extend(streams[name])
            if config.shuffle:
                random.Random(f"{config.seed}/{name}").shuffle(pools[name])
    quotas = _quotas(config, pools, streams, wanted)
    kept: list[int] = []
    for name, pool in pools.items():
        kept += pool[: quotas[name]]
        if surplus := len(pool) - quotas[name]:
            filter_.drop(name, "over prompts.limit", f"{surplus} rows of {name}", surplus)
    if config.shuffle:
        random.Random(f"{config.seed}/all").shuffle(kept)
    kept = kept if wanted is None else kept[:wanted]
    heldout = min(config.heldout, len(kept) // 2)
    return kept[heldout:], fixed["heldout"] + kept[:heldout], columns


def _quotas(
    config: PromptsConfig, pools: dict[str, list[int]], streams: dict[str, Iterator[int]], wanted: int | None
) -> dict[str, int]:
    """Rows to take from each source: ``wanted`` shared by weight; what one source lacks, the others give.

    Streamed sources are read just as far as needed, into their pools.
    """
    if wanted is None:
        return {name: len(pool) for name, pool in pools.items()}
    taken = dict.fromkeys(pools, 0)
    open_sources = [name for name in pools]
    while open_sources and (missing := wanted - sum(taken.values())) > 0:
        total = sum(config.sources[name].weight for name in open_sources)
        for name in list(open_sources):
            share = max(1, round(missing * config.sources[name].weight / total))
            share = min(share, wanted - sum(taken.values()))
            while len(pools[name]) < taken[name] + share and (address := next(streams[name], None)) is not None:
                pools[name].append(address)
            got = min(share, len(pools[name]) - taken[name])
            taken[name] += got
            if got < share:
                open_sources.remove(name)
    return taken


def _addresses(
    config: PromptsConfig,
    name: str,
    source: SourceConfig,
    filter_: Filter,
    spool: Spool,
    columns: dict[str, Columns],
    heldout: list[int],
) -> Iterator[int]:
    """Spool the kept records of one source; records that say they are held out go to ``heldout``."""
    rows = read(source, config.seed if config.shuffle and config.limit is not None else None)
    first = next(rows, None)
    if first is None:
        raise SourceError(f"source '{name}' ({source.path}) has no rows")
    columns[name] = infer(first, source.columns, name)
    print(f"{name}: {columns[name]}", flush=True)

    def limited() -> Iterator[Any]:
        yield first
        if source.limit is None:
            yield from rows
        else:
            yield from (row for row, _ in zip(rows, range(source.limit - 1), strict=False))

    for record in filter_.records(name, columns[name], limited()):
        split = record.pop("split", "train")
        address = spool.put(record)
        if split == "heldout":
            heldout.append(address)
        else:
            yield address


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Records of a prompt file; raises SourceError when it is missing, naming the command that writes it."""
    if not file.is_file():
        raise SourceError(f"{file} is not there: run python -m deepspec.data prompts with the same options first")
    return [dict(row) for row in read_file(file)]


def describe(summary: dict[str, Any], folder: Path) -> str:
    """The accounting of a summary as a few lines of text."""
    lines = []
    for name, count in summary["read"].items():
        dropped = summary["dropped"].get(name, {})
        reasons = "".join(f" + {number} {reason}" for reason, number in sorted(dropped.items(), key=lambda x: -x[1]))
        lines.append(f"{name}: {count} read = {count - sum(dropped.values())} kept{reasons}")
    for reason in ("contaminated", "near copy"):
        lines += [f"  {reason}: {example}" for example in summary["examples"].get(reason, [])]
    if any(summary["dropped"].values()):
        lines.append(f"  examples of every reason are in {folder / 'summary.json'}")
    files = summary["files"]
    lines.append(
        f"{folder}: {files['train']['rows']} training and {files['heldout']['rows']} held-out prompts"
        + (" (made before from the same options; delete the folder to make them again)" if "reused" in summary else "")
    )
    return "\n".join(lines)
