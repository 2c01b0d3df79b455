"""Verification rounds as arrays: what a drafter proposed, its confidences, what the target accepted. Knows no model.

Shapes: N rounds, G block size, P prompts. A record folder is what the evaluator writes; a file is one JSON object a
line.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepspec.files import atomic_write


class RoundsError(ValueError):
    """Records that cannot be read or do not hold what is asked of them; names file, line and field."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of many prompts, those of one prompt adjacent and in order.

    prompt_N: index of the prompt; proposed_N: draft tokens offered to the target; accepted_N: how many it accepted
    (≤ proposed); confidence_NG: P(position accepted | its prefix accepted), NaN where nothing was proposed.
    """

    prompt_N: np.ndarray
    proposed_N: np.ndarray
    accepted_N: np.ndarray
    confidence_NG: np.ndarray

    def __post_init__(self) -> None:
        if np.any(self.accepted_N > self.proposed_N) or np.any(self.accepted_N < 0):
            bad = int(np.argmax((self.accepted_N > self.proposed_N) | (self.accepted_N < 0)))
            raise RoundsError(
                f"round {bad}: accepted {self.accepted_N[bad]} of {self.proposed_N[bad]} proposed; these are no rounds"
            )

    def __len__(self) -> int:
        return len(self.prompt_N)

    @property
    def block_size(self) -> int:
        """G: the widest proposal."""
        return self.confidence_NG.shape[1]

    @property
    def prompts(self) -> np.ndarray:
        """Distinct prompt indices, ascending."""
        return np.unique(self.prompt_N)

    def select(self, keep_N: np.ndarray) -> "Rounds":
        """The rounds that a boolean mask or an index array picks."""
        return Rounds(
            self.prompt_N[keep_N], self.proposed_N[keep_N], self.accepted_N[keep_N], self.confidence_NG[keep_N]
        )

    def split(self, seed: int = 0, test_share: float = 0.5) -> tuple["Rounds", "Rounds"]:
        """Two disjoint sets by prompt (never by round): (fit, test). Raises RoundsError with fewer than two prompts."""
        prompts = self.prompts
        if len(prompts) < 2:
            raise RoundsError("splitting needs rounds of at least two prompts; evaluate more prompts")
        shuffled = np.random.default_rng(seed).permutation(prompts)
        count = min(max(round(len(prompts) * test_share), 1), len(prompts) - 1)
        in_test = np.isin(self.prompt_N, shuffled[:count])
        return self.select(~in_test), self.select(in_test)


def from_prompts(prompts: Iterable[Iterable[tuple[int, int, Iterable[float] | None]]]) -> Rounds:
    """Rounds from, for each prompt, its (proposed, accepted, confidences) in order, rounds that offered nothing too."""
    owner, proposed, accepted, confidences = [], [], [], []
    for index, rounds in enumerate(prompts):
        for offered, taken, confidence in rounds:
            owner.append(index)
            proposed.append(offered)
            accepted.append(taken)
            confidences.append(tuple(confidence or ())[:offered])
    block = max(proposed, default=0)
    confidence_NG = np.full((len(owner), block), np.nan, dtype=np.float32)
    for row, values in enumerate(confidences):
        confidence_NG[row, : len(values)] = values
    return Rounds(
        np.asarray(owner, np.int64), np.asarray(proposed, np.int64), np.asarray(accepted, np.int64), confidence_NG
    )


def write_rounds(path: str | Path, rounds: Rounds) -> None:
    """One line for each prompt: {"prompt": i, "rounds": [{"proposed", "accepted", "confidence"}, …]}; atomic."""
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for prompt in rounds.prompts:
            rows = np.flatnonzero(rounds.prompt_N == prompt)
            listed = [
                {
                    "proposed": int(rounds.proposed_N[row]),
                    "accepted": int(rounds.accepted_N[row]),
                    "confidence": [
                        round(float(value), 6) for value in rounds.confidence_NG[row] if not np.isnan(value)
                    ],
                }
                for row in rows
            ]
            stream.write(json.dumps({"prompt": int(prompt), "rounds": listed}) + "\n")


def read_rounds(path: str | Path) -> Rounds:
    """Read a JSONL file, or every *.jsonl below a folder (an evaluation's output), in name order.

    Each line is an object with "rounds", a list of {"proposed", "accepted", "confidence"}; other keys are ignored.
    Raises RoundsError naming file and line.
    """
    path = Path(path)
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise RoundsError(f"{path}: no records; pass a .jsonl file or the folder an evaluation wrote (--output)")
    rounds = from_prompts(_prompts(files))
    if not len(rounds):
        raise RoundsError(f"{path}: no rounds in {len(files)} file(s); evaluate with a drafter to record some")
    return rounds


def _prompts(files: list[Path]) -> Iterator[list[tuple[int, int, list[float] | None]]]:
    for file in files:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield from _rounds_of(line, f"{file}, line {number}")


def _rounds_of(line: str, where: str) -> Iterator[list[tuple[int, int, list[float] | None]]]:
    try:
        record: dict[str, Any] = json.loads(line)
        if "rounds" in record:
            yield [
                (int(entry["proposed"]), int(entry["accepted"]), entry.get("confidence")) for entry in record["rounds"]
            ]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise RoundsError(
            f'{where}: {error}; a line is {{"rounds": [{{"proposed": 7, "accepted": 3, "confidence": [0.9, …]}}, …]}}'
        ) from error
