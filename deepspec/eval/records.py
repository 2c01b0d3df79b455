"""One prompt's decoding by one variant as a line of records-*.jsonl: what resume, metrics and reports are made from.

Knows the line format and how to append it safely; not what the numbers mean.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class RecordError(ValueError):
    """A records file that cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Record:
    """A decoded prompt. ``rounds`` holds (proposed, accepted, committed) per verification, tokens.

    ``prompt_digest`` names the prompt's token ids: a record answers these and no others.
    ``accepted`` is the verified prefix, ``committed`` what the answer kept of it and of the target's own token;
    it differs from accepted + 1 only in a round that a stop token or the token limit cut. The token that the prompt's
    own forward yields belongs to no round. ``wall`` and its parts ``prefill`` … ``other`` are the prompt's share of the
    seconds of the run: every step's are shared by the rows active in it, so sums over records are totals, also after a
    resume and at any batch size. ``session`` names the run of the command that measured them, None in records older
    than this field: seconds of different sessions were measured at different times, and need not compare.
    ``revision`` is the git revision of the program that decoded, None where it is not known.
    """

    dataset: str
    prompt: str
    turn: int
    prompt_digest: str
    prompt_tokens: int
    tokens: list[int]
    finish: str
    rounds: list[tuple[int, int, int]]
    confidence: list[list[float]] | None
    wall: float
    prefill: float
    draft: float
    verify: float
    other: float
    session: str | None = None
    revision: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """What a resume compares: data set, prompt id, turn."""
        return self.dataset, self.prompt, self.turn

    @staticmethod
    def parse(value: dict[str, Any]) -> "Record":
        """The record of a parsed line; raises KeyError or TypeError when fields are missing."""
        value = {"session": None, "revision": None, **value}
        fields = {name: value[name] for name in Record.__dataclass_fields__}
        fields["rounds"] = [tuple(item) for item in fields["rounds"]]
        return Record(**fields)


class Recorder:
    """Appends records under a settings key; each line is flushed, so a kill loses at most the line being written."""

    def __init__(self, path: Path, settings: str, revision: str | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)
        self._stream = path.open("a", encoding="utf-8")
        self._settings = settings
        self._revision = revision

    def add(self, record: Record) -> None:
        """Append one record."""
        line = {"settings": self._settings, **asdict(record), "revision": self._revision}
        self._stream.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Flush to disk and close."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()


def read(paths: Iterable[Path], settings: str) -> dict[tuple[str, str, int], Record]:
    """Records written under ``settings`` by key; the first one wins, lines of other settings are skipped.

    A last line without its end (an interrupted write) is ignored; any other damaged line raises RecordError.
    """
    found: dict[tuple[str, str, int], Record] = {}
    for path in sorted(paths):
        for record in _records(path, settings):
            found.setdefault(record.key, record)
    return found


def _records(path: Path, settings: str) -> Iterator[Record]:
    for number, value in lines(path):
        try:
            if value["settings"] == settings:
                yield Record.parse(value)
        except (KeyError, TypeError) as error:
            raise _damaged(path, number, error) from error


def lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of each line of a JSONL file, blank ones left out. The only reader of record files.

    A last line that is not whole (an interrupted write) is ignored; any other damaged line raises RecordError.
    """
    texts = path.read_text(encoding="utf-8").split("\n")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            if number >= len(texts) - 1:
                return
            raise _damaged(path, number, error) from error
        if not isinstance(value, dict):
            raise _damaged(path, number, "no JSON object")
        yield number, value


def _damaged(path: Path, number: int, why: object) -> RecordError:
    return RecordError(f"{path} line {number} is damaged ({why}): delete that line and run again")


def _end_last_line(path: Path) -> None:
    """Drop a half-written last line, so that the next record starts on its own line."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as stream:
        content = stream.read()
        if not content.endswith(b"\n"):
            stream.truncate(content.rfind(b"\n") + 1)
