"""Verification rounds as arrays: what a drafter proposed, its confidences, what the target accepted. Knows no model.

Shapes: N rounds, G block size, P prompts. A record folder is what the evaluator writes; a file is one JSON object a
line.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepspec.eval import records
from deepspec.eval.records import Record
from deepspec.files import atomic_write, read_json

_Round = tuple[int, int, list[float] | None]  # offered, kept, confidences of the block


class RoundsError(ValueError):
    """Records that cannot be read or do not hold what is asked of them; names file, line and field."""


def known_outcome(
    proposed_N: np.ndarray, accepted_N: np.ndarray, committed_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draft tokens of each round whose outcome is known, and how many of these were accepted: (offered_N, kept_N).

    All that were proposed, except in a round that was cut, which committed no more than it accepted: a stop token lies
    among the accepted ones. Up to and including it they were accepted; what follows is neither accepted nor rejected.
    """
    cut_N = committed_N <= accepted_N
    kept_N = np.minimum(accepted_N, committed_N)
    return np.where(cut_N, kept_N, proposed_N), kept_N


def known_rounds(rounds: Sequence[Sequence[int]], confidence: Sequence[list[float]] | None) -> list[_Round]:
    """(offered, kept, confidences) of each recorded (proposed, accepted, committed).

    Raises ValueError or TypeError where they are not threes of integers, or not as many as the confidences.
    """
    counts_N3 = np.asarray(rounds, dtype=np.int64).reshape(len(rounds), 3)
    offered_N, kept_N = known_outcome(*counts_N3.T)
    confidences: Sequence[list[float] | None] = confidence or [None] * len(rounds)
    return list(zip(offered_N.tolist(), kept_N.tolist(), confidences, strict=True))


@dataclass(frozen=True)
class Rounds:
    """Rounds of many prompts, those of one prompt adjacent and in order.

    prompt_N: index of the prompt; proposed_N: draft tokens offered to the target; accepted_N: how many it accepted
    (≤ proposed); confidence_NG: P(position accepted | its prefix accepted) of the whole block, NaN where unknown.
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
            confidences.append(tuple(confidence or ()))
    block = max((*proposed, *map(len, confidences)), default=0)
    confidence_NG = np.full((len(owner), block), np.nan, dtype=np.float32)
    for row, values in enumerate(confidences):
        confidence_NG[row, : len(values)] = values
    return Rounds(
        np.asarray(owner, np.int64), np.asarray(proposed, np.int64), np.asarray(accepted, np.int64), confidence_NG
    )


def rounds_of(answers: Iterable[Record]) -> Rounds:
    """Rounds of the evaluator's records, each a prompt."""
    return from_prompts(known_rounds(record.rounds, record.confidence) for record in answers)


def write_rounds(path: str | Path, rounds: Rounds) -> None:
    """One line for each prompt, in the evaluator's layout (``read_rounds``); atomic."""
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for prompt in rounds.prompts:
            own = rounds.select(rounds.prompt_N == prompt)
            triples = zip(own.proposed_N.tolist(), own.accepted_N.tolist(), (own.accepted_N + 1).tolist(), strict=True)
            confidences = [
                [round(float(value), 6) for value in values if not np.isnan(value)] for values in own.confidence_NG
            ]
            line = {"prompt": str(prompt), "rounds": [list(triple) for triple in triples], "confidence": confidences}
            stream.write(json.dumps(line) + "\n")


def read_rounds(path: str | Path, run: str | None = None) -> Rounds:
    """Read a records file, or every *.jsonl below the folder of an evaluation, in name order.

    A line is one prompt: "rounds", a list of [proposed, accepted, committed], and "confidence", a list as long with the
    confidences of each round's block; "dataset", "prompt" and "turn" name the prompt, the first line of a name counts.
    A run is named by its file ("records-NAME-rank0.jsonl" is NAME) and, where a file holds several, by "settings" too.
    Only runs with confidences are considered, and if more than one is left, ``run`` must choose: a name, else the
    beginning of one. A round that a stop token cut counts as far as it was kept.
    Raises RoundsError naming file and line.
    """
    path = Path(path)
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise RoundsError(f"{path}: no records; pass a .jsonl file or the folder an evaluation wrote (--output)")
    runs: dict[str, dict[tuple[str, ...], list[_Round]]] = {}
    for name, key, rounds in _lines(files):
        if any(confidence for _, _, confidence in rounds):
            runs.setdefault(name, {}).setdefault(key, rounds)
    runs = {name: runs[name] for name in named(runs, run)}
    if not runs:
        chosen = f" in a run named {run}…" if run else ""
        raise RoundsError(
            f"{path}: no rounds with confidences{chosen}; evaluate with a drafter that has a confidence head"
        )
    if len(runs) > 1:
        counts = ", ".join(f"{name} ({len(prompts)} prompts)" for name, prompts in runs.items())
        raise RoundsError(f"{path} holds several runs: choose one with --run NAME: {counts}")
    return from_prompts(next(iter(runs.values())).values())


def named(names: Iterable[str], run: str | None) -> list[str]:
    """The names that ``run`` means: those equal to it but for an ``@SETTINGS``, else those that begin with it."""
    known, wanted = list(names), run or ""
    return [name for name in known if name == wanted or name.startswith(f"{wanted}@")] or [
        name for name in known if name.startswith(wanted)
    ]


def drafter_of(records: Path, run: str | None) -> Mapping[str, Any]:
    """What results.json beside the records says of their drafter; {} where it is silent or ambiguous."""
    file = (records if records.is_dir() else records.parent) / "results.json"
    if not file.is_file():
        return {}
    known = {
        str(item["id"]): item["drafter"]
        for item in read_json(file).get("variants", [])
        if (item.get("drafter") or {}).get("confidence")
    }
    drafters = [known[name] for name in named(known, (run or "").split("@")[0])]
    folders = {drafter["folder"] for drafter in drafters}
    return drafters[0] if len(folders) == 1 else {}


def _lines(files: list[Path]) -> Iterator[tuple[str, tuple[str, ...], list[_Round]]]:
    for file in files:
        try:
            for number, line in records.lines(file):
                if "rounds" in line:  # else no record: a failure, a log
                    yield _parsed(line, file, number)
        except records.RecordError as error:
            raise RoundsError(str(error)) from error


def _parsed(line: Mapping[str, Any], file: Path, number: int) -> tuple[str, tuple[str, ...], list[_Round]]:
    """Run, prompt and rounds of one line."""
    try:
        rounds = known_rounds(line["rounds"], line.get("confidence"))
    except (AttributeError, TypeError, ValueError) as error:
        raise RoundsError(
            f'{file}, line {number}: {error}; a line is {{"prompt": "7", "rounds": [[proposed, accepted, committed]], '
            '"confidence": [[0.9, …]]} with as many of the one as of the other'
        ) from error
    key = tuple(str(line.get(name, "")) for name in ("dataset", "prompt", "turn"))
    run = re.sub(r"^records-|-rank\d+$", "", file.stem)
    return f"{run}@{line['settings']}" if "settings" in line else run, key, rounds
