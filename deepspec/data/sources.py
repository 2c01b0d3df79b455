"""Rows of prompts from the hub, local files or this project, whatever their shape. Knows no filters and no limits."""

import glob
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".jsonl.zst", ".ndjson", ".json", ".parquet")
ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "bing": "assistant", "bard": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool", "function_response": "tool",
}  # fmt: skip
# The column that holds the conversation, in order of preference, and what shape it is read as.
SHAPES = {
    "messages": "messages", "conversations": "messages", "conversation": "messages", "turns": "turns",
    "instruction": "prompt", "prompt": "prompt", "question": "prompt", "query": "prompt", "problem": "prompt",
}  # fmt: skip
CARRIED = ("id", "source", "split", "tools", "system", "input")


class SourceError(ValueError):
    """A source that cannot be read at all; the message names it and the remedy."""


class RowError(ValueError):
    """One row that is not a usable conversation: the reason it is counted under, and what shows it."""

    def __init__(self, reason: str, example: str | None = None) -> None:
        super().__init__(reason)
        self.example = example


@dataclass
class SourceConfig:
    """One source of conversations.

    ``path`` is ``demo`` (the project's own prompts), a hub data set id, or a local file, folder or glob of JSONL,
    JSONL.zst or Parquet. ``columns`` maps ``messages``, ``turns``, ``prompt``, ``instruction``, ``input``, ``system``,
    ``tools``, ``id``, ``source`` or ``split`` to columns of the data; what is not given is inferred and printed.
    ``files`` selects files of a hub data set. ``weight`` is the share of ``prompts.limit``; ``limit`` bounds rows read.
    """

    path: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    files: str | None = None
    streaming: bool = True
    columns: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot work."""
        known = {*SHAPES, *CARRIED}
        if unknown := set(self.columns) - known:
            raise ValueError(f"columns of source '{self.path}': unknown {sorted(unknown)}; known are {sorted(known)}")
        if self.weight <= 0:
            raise ValueError(f"weight of source '{self.path}' is {self.weight}: give more than 0, or remove the source")


@dataclass(frozen=True)
class Columns:
    """Which column is read as what. ``shape`` is messages, turns or prompt; ``body`` its column."""

    shape: str
    body: str
    carried: dict[str, str]

    def __str__(self) -> str:
        parts = [f"{self.shape} ← {self.body}", *(f"{name} ← {column}" for name, column in self.carried.items())]
        return ", ".join(parts)


def is_local(config: SourceConfig) -> bool:
    """Whether all rows can be read cheaply: files, or the project's own prompts."""
    return config.path == "demo" or bool(local_files(config.path)) or config.path.endswith(SUFFIXES)


def local_files(path: str) -> list[Path]:
    """Files of a path, folder or glob, sorted; empty when there are none."""
    if Path(path).is_dir():
        return sorted(file for file in Path(path).rglob("*") if file.name.endswith(SUFFIXES))
    return sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file())


def read(config: SourceConfig, seed: int | None = None) -> Iterator[Row]:
    """Raw rows of a source, in order; a streamed hub data set is shuffled within a buffer when ``seed`` is given.

    Raises SourceError when the source does not exist or cannot be read.
    """
    if config.path == "demo":
        from deepspec.data.demo_prompts import generate

        yield from generate()
        return
    files = local_files(config.path)
    if files:
        for file in files:
            yield from read_file(file)
        return
    if config.path.endswith(SUFFIXES) or config.path.startswith((".", "/", "~")):
        raise SourceError(f"no file matches '{config.path}': check the path (relative to {Path.cwd()})")
    yield from _hub(config, seed)


def read_file(file: Path) -> Iterator[Row]:
    """Rows of one JSONL, JSONL.zst, JSON or Parquet file; raises SourceError naming file and line."""
    if file.name.endswith(".parquet"):
        import pyarrow.parquet as parquet

        for batch in parquet.ParquetFile(file).iter_batches(1024):
            yield from batch.to_pylist()
        return
    if file.name.endswith(".json"):
        try:
            rows = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise SourceError(f"{file} is not JSON ({error}): if it has one object per line, name it .jsonl") from error
        rows = rows if isinstance(rows, list) else [rows]
        if (odd := next((n for n, row in enumerate(rows, 1) if not isinstance(row, dict)), None)) is not None:
            raise SourceError(f"{file} entry {odd} is not an object: give a list of objects, or one per line as .jsonl")
        yield from rows
        return
    for number, line in enumerate(_lines(file), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise SourceError(f"{file} line {number} is not JSON ({error}): fix or remove that line") from error
            if not isinstance(row, dict):
                raise SourceError(f"{file} line {number} is a {type(row).__name__}: each line must be a JSON object")
            yield row


def _lines(file: Path) -> Iterator[str]:
    with file.open("rb") as raw:
        if file.name.endswith(".zst"):
            import zstandard

            yield from io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(raw), encoding="utf-8")
        else:
            yield from io.TextIOWrapper(raw, encoding="utf-8")


def _hub(config: SourceConfig, seed: int | None) -> Iterator[Row]:
    import datasets

    try:
        rows = datasets.load_dataset(
            config.path, config.subset, split=config.split, revision=config.revision, data_files=config.files,
            streaming=config.streaming,
        )  # fmt: skip
    except Exception as error:  # datasets raises many types; all mean the same to the user
        raise SourceError(
            f"data set '{config.path}' cannot be loaded ({type(error).__name__}: {error}): check its name, subset, "
            "split and the network, or give a local file"
        ) from error
    if seed is not None:
        rows = rows.shuffle(seed=seed, buffer_size=10_000) if config.streaming else rows.shuffle(seed=seed)
    yield from rows


def infer(row: Row, columns: Mapping[str, str], name: str) -> Columns:
    """The column mapping of a source from its first row and what the recipe gives; raises SourceError."""
    for given, column in columns.items():
        if column not in row:
            raise SourceError(f"source '{name}': column '{column}' (for {given}) is not among {sorted(row)}")
    carried = {key: columns.get(key, key) for key in CARRIED if key in columns or row.get(key) is not None}
    # A foreign id column need not be unique; only an explicit one, or one of a file this project wrote, is used.
    if "id" not in columns and not {"messages", "source"} <= set(row):
        carried.pop("id", None)
    for candidate, shape in SHAPES.items():
        column = columns.get(candidate, candidate)
        if row.get(column) is None:
            continue
        if shape == "prompt" and isinstance(row[column], list):
            shape = "messages"
        if shape in ("messages", "turns") and isinstance(row[column], list):
            roles = any(isinstance(x, Mapping) and (x.get("role") or x.get("from")) for x in row[column])
            texts = all(isinstance(x, str) for x in row[column])
            shape = "messages" if roles else "turns" if texts else shape
        if shape != "prompt" or candidate != "instruction":
            carried.pop("input", None)
        return Columns(shape, column, carried)
    raise SourceError(
        f"source '{name}': no conversation among the columns {sorted(row)}; "
        f"name one, e.g. prompts.sources.{name}.columns.prompt=<column>"
    )


def conversation(row: Row, mapping: Columns) -> list[dict[str, Any]]:
    """Messages of a row in role/content form; raises RowError with the reason when it is not a conversation."""
    body = row.get(mapping.body)
    if body is None or body == "" or body == []:
        raise RowError("empty")
    if mapping.shape == "prompt":
        if not isinstance(body, str):
            raise RowError("prompt is not text")
        extra = row.get(mapping.carried["input"]) if "input" in mapping.carried else None
        messages = [{"role": "user", "content": f"{body}\n\n{extra}" if extra else body}]
    elif mapping.shape == "turns":
        questions = [_text(turn.get("content") if isinstance(turn, Mapping) else turn) for turn in body]
        # An answer belongs between two questions; every recorded answer gives way to the target's own.
        messages = [{"role": "user", "content": questions[0]}]
        for question in questions[1:]:
            messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": question}]
    else:
        messages = [_message(turn) for turn in body]
    system = row.get(mapping.carried["system"]) if "system" in mapping.carried else None
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowError("a message is not an object")
    role = turn.get("role") or turn.get("from")
    if role not in ROLES:
        raise RowError(f"unknown role {role!r}")
    message: dict[str, Any] = {"role": ROLES[role]}
    message["content"] = _text(turn.get("content") if turn.get("content") is not None else turn.get("value"))
    for key in ("reasoning_content", "tool_call_id", "name"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    if turn.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in turn["tool_calls"]]
    return message


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in content):
            raise RowError("content is not only text")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RowError("content is not text")
    return content


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, the form templates render, and its id if it has one."""
    function = dict(call.get("function") or call) if isinstance(call, Mapping) else {}
    if not isinstance(function.get("name"), str):
        raise RowError("a tool call has no name")
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except json.JSONDecodeError as error:
            raise RowError("a tool call's arguments are not JSON") from error
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", "function": function, **identity}
