"""Proof of losslessness at temperature 0: every token must be the target's maximum given its own prefix.

Plain decoding's answers go through the same scoring. They are the control: what is excused in them is the base rate of
ties, and the rounding that excuses a token is measured on their positions. Knows no drafters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from deepspec.eval import verdict
from deepspec.eval.records import Record
from deepspec.eval.run import Ask
from deepspec.eval.scoring import PARTS, Scores, Text, score
from deepspec.models.target import Target

FACTOR = 2.0  # of the largest rounding measured on a sample, for the positions outside it
NOISE_POSITIONS = 1024  # about as many plain positions are computed in two shapes
LEAST_NOISE_POSITIONS = 32  # fewer say nothing about the largest rounding

PromptIds = Callable[[Record], Sequence[int]]  # the prompt tokens that a record answered
Key = tuple[str, str, int]


@dataclass(frozen=True)
class Rules:
    """How an answer must end: at its first stop token, or with exactly ``max_new_tokens`` tokens.

    ``stops_shown`` is False for engines that leave the stop token out of the answer: then a stop token must be the
    maximum after the answer's last token.
    """

    stop_ids: tuple[int, ...]
    max_new_tokens: int
    stops_shown: bool = True


@dataclass(frozen=True)
class Difference:
    """The first position (0-based, in the answer) where two answers differ; a token is None past an answer's end.

    ``gap`` is logit(plain's token) − logit(drafter's token) given the common prefix; None at an answer's end.
    ``tie`` says that the whole of the drafter's answer stands, not this position alone.
    """

    prompt: str
    turn: int
    position: int
    plain: int | None
    drafter: int | None
    gap: float | None
    tolerance: float | None
    tie: bool


@dataclass(frozen=True)
class Offence:
    """A position that speaks against an answer, in words too. ``gap``: how far below the maximum, None for its end."""

    prompt: str
    turn: int
    position: int
    token: int | None
    best: int | None
    gap: float | None
    text: str


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first differing token, the shorter length when one is a prefix of the other, None when equal."""
    for position, (ours, theirs) in enumerate(zip_longest(plain, other, fillvalue=None)):
        if ours != theirs:
            return position
    return None


def ending_fault(record: Record, rules: Rules, stop_gap: float, tolerance: float) -> tuple[int, str] | None:
    """(position, what is wrong) where an answer does not end as ``rules`` ask, None where it does.

    ``stop_gap``: largest logit minus the largest of a stop token, after the answer's last token.
    """
    tokens = record.tokens
    stops = [at for at, token in enumerate(tokens) if token in rules.stop_ids]
    if stops and stops[0] < len(tokens) - 1:
        return stops[0] + 1, "goes on after its stop token"
    if len(tokens) > rules.max_new_tokens:
        return rules.max_new_tokens, f"is longer than the limit of {rules.max_new_tokens} tokens"
    says_limit, says_stop = record.finish == "length", record.finish == "stop"
    if stops:
        return (len(tokens) - 1, "is said to be cut, but has a stop token") if says_limit else None
    if says_stop and rules.stops_shown:
        return len(tokens), "is said to end at a stop token, but has none"
    if len(tokens) == rules.max_new_tokens:
        return None
    if rules.stops_shown or stop_gap > tolerance:
        return len(tokens), "ends without a stop token and before the limit"
    return None


class Control:
    """Plain decoding's answers, scored once for all variants: the null run, and the rounding of this run."""

    def __init__(
        self,
        target: Target,
        plain: Sequence[Record],
        prompt_ids: PromptIds,
        rules: Rules,
        *,
        foreign: bool = False,
        say_token: Callable[[int], str] = str,
    ) -> None:
        """``foreign``: the answers come from another program, whose rounding is not the target's. Then the plain
        answers' own gaps belong to the measured rounding. ``say_token`` shows a token id in messages."""
        self.target, self.prompt_ids, self.rules = target, prompt_ids, rules
        self.say_token = say_token
        self.plain = {record.key: record for record in plain}
        self.scores = self._score(list(self.plain.values()))
        self.noise: dict[str, Any] = {"positions": 0, "largest": None, "near_ties": 0, "excused": 0}
        self.tolerance = self._measure(foreign)

    @classmethod
    def of_run(
        cls,
        target: Target,
        plain: Mapping[str, Sequence[Record]],
        asks: Mapping[str, Sequence[Ask]],
        rules: Rules,
    ) -> "Control":
        """The control of an evaluation: plain answers and prompts by data set, pooled."""
        ids = {ask.key: ask.ids for group in asks.values() for ask in group}
        records = [record for group in plain.values() for record in group]

        def say_token(token: int) -> str:
            return repr(target.tokenizer.decode([token]))

        return cls(target, records, lambda record: ids[record.key], rules, say_token=say_token)

    def _score(self, records: Sequence[Record]) -> dict[Key, Scores]:
        texts = [Text(tuple(self.prompt_ids(item)), tuple(item.tokens)) for item in records]
        scores = score(self.target, texts, self.rules.stop_ids)
        return {item.key: line for item, line in zip(records, scores, strict=True)}

    def _measure(self, foreign: bool) -> float | None:
        """The tolerance: FACTOR times the largest change that another shape of the forward makes to the distance of
        a position's two largest logits. None where too few positions could be measured.

        Only plain answers are looked at: a drafter cannot widen its own tolerance.
        """
        positions = sum(len(record.tokens) for record in self.plain.values())
        sample = list(self.plain.values())[:: max(1, positions // NOISE_POSITIONS)]
        texts = [Text(tuple(self.prompt_ids(item)), tuple(item.tokens)) for item in sample]
        whole = [self.scores[item.key] for item in sample]
        pairs = [line.pair_A2 for line in whole]
        parts = score(self.target, texts, self.rules.stop_ids, PARTS, pairs)
        lead_A = _joined([line.lead_A for line in whole])
        other_A = _joined([line.lead_A for line in parts])
        self.noise["positions"] = len(lead_A)
        if len(lead_A) < LEAST_NOISE_POSITIONS:
            return None
        noise = float((lead_A - other_A).abs().max())
        # Where the sample happens to round alike, a logit's own resolution still counts.
        resolution = torch.finfo(self.target.dtype).eps * max(line.largest for line in whole)
        measured = [noise, resolution / FACTOR]
        if foreign:
            measured.append(float(_joined([line.gap_A for line in self.scores.values()]).max()))
        tolerance = FACTOR * max(measured)
        self.noise["largest"] = noise
        self.noise["near_ties"] = int((lead_A <= tolerance).sum())
        # What decoding in the other shape would have chosen: a second null run, with a verification's shape.
        self.noise["excused"] = int(((other_A < 0) & (lead_A <= tolerance) & (lead_A > 0)).sum())
        return tolerance

    def check(self, others: Sequence[Record]) -> dict[str, Any]:
        """The ``identity`` of answers to the same prompts, as docs/evaluation.md describes it; those without a plain
        answer are left out. Answers equal to plain's have plain's scores and cost nothing."""
        shared = [record for record in others if record.key in self.plain]
        changed = [record for record in shared if record.tokens != self.plain[record.key].tokens]
        scores = {record.key: self.scores[record.key] for record in shared} | self._score(changed)
        offences = {record.key: self._offence(record, scores[record.key]) for record in changed}
        broken = [key for key, found in offences.items() if found is not None and found.gap is None]
        wrong = [record for record in changed if offences[record.key] is not None]
        nulls = [self.plain[record.key] for record in shared]
        excused = _largest_excused(scores.values(), self.tolerance)
        check: dict[str, Any] = {
            "prompts": len(shared),
            "identical": len(shared) - len(changed),
            "ties": len(changed) - len(wrong),
            "different": len(wrong),
            "first_difference": self._difference(changed, wrong, scores),
            **self._counts(list(scores.values())),
            "broken": len(broken),
            "largest_excused_gap": excused,
            "tolerance": self.tolerance,
            "noise": self.noise,
            "null": self._null(nulls),
        }
        offence = self._shown_offence(changed, wrong, scores, offences)
        check["offence"] = None if offence is None else asdict(offence)
        check["verdict"] = verdict.wording(check)
        return check

    def _counts(self, scores: Sequence[Scores]) -> dict[str, int]:
        """Positions, near-ties (two largest logits within the tolerance), excused ones, and those beyond it."""
        positions = sum(len(line.gap_A) for line in scores)
        if self.tolerance is None or not scores:
            return {"positions": positions, "near_ties": 0, "excused": 0, "beyond": 0}
        gap_A = _joined([line.gap_A for line in scores])
        lead_A = _joined([line.lead_A for line in scores])
        return {
            "positions": positions,
            "near_ties": int((lead_A <= self.tolerance).sum()),
            "excused": int(((gap_A > 0) & (gap_A <= self.tolerance)).sum()),
            "beyond": int((gap_A > self.tolerance).sum()),
        }

    def _null(self, records: Sequence[Record]) -> dict[str, int]:
        """The same counts of plain answers; ``prompts`` of them, ``broken`` ones that do not end as they must."""
        scores = [self.scores[record.key] for record in records]
        endings = [self._ending(record, self.scores[record.key]) for record in records]
        broken = sum(ending is not None for ending in endings)
        return {"prompts": len(records), **self._counts(scores), "broken": broken}

    def _ending(self, record: Record, scores: Scores) -> tuple[int, str] | None:
        return ending_fault(record, self.rules, scores.stop_gap, self.tolerance or 0.0)

    def _offence(self, record: Record, scores: Scores) -> Offence | None:
        """What is wrong with an answer: its first token beyond the tolerance, else its end."""
        beyond: Tensor = scores.gap_A > (float("inf") if self.tolerance is None else self.tolerance)
        ending = self._ending(record, scores)
        if ending is not None:
            position, fault = ending
            text = f"{record.prompt}, token {position}: the answer {fault}"
            return Offence(record.prompt, record.turn, position, None, None, None, text)
        if not bool(beyond.any()):
            return None
        return self._below(record, scores, int(beyond.nonzero()[0, 0]))

    def _below(self, record: Record, scores: Scores, position: int) -> Offence:
        """A token that is not the maximum, in words."""
        token, best = record.tokens[position], int(scores.pair_A2[position, 0])
        gap = float(scores.gap_A[position])
        text = (
            f"{record.prompt}, token {position}: {self.say_token(token)} is {gap:.3g} logits below the maximum "
            f"{self.say_token(best)} (tolerance {self.tolerance:.2g})"
        )
        return Offence(record.prompt, record.turn, position, token, best, gap, text)

    def _shown_offence(
        self,
        changed: Sequence[Record],
        wrong: Sequence[Record],
        scores: dict[Key, Scores],
        offences: dict[Key, Offence | None],
    ) -> Offence | None:
        """The first wrong answer's offence, else the first excused position."""
        if wrong:
            return offences[wrong[0].key]
        for record in changed:
            excused = (scores[record.key].gap_A > 0).nonzero()
            if len(excused) and self.tolerance is not None:
                return self._below(record, scores[record.key], int(excused[0, 0]))
        return None

    def _difference(
        self, changed: Sequence[Record], wrong: Sequence[Record], scores: dict[Key, Scores]
    ) -> dict[str, Any] | None:
        """Of the wrong answers, else of all that differ from plain's: the difference with the largest gap."""
        tie = not wrong
        listed = []
        for record in wrong or changed:
            plain = self.plain[record.key]
            position = first_difference(plain.tokens, record.tokens)
            assert position is not None
            ours, theirs = (item.tokens[position] if position < len(item.tokens) else None for item in (plain, record))
            gap = None
            if ours is not None and theirs is not None:
                plain_gap = self.scores[record.key].gap_A[position]
                gap = float(scores[record.key].gap_A[position] - plain_gap)
            where = (record.prompt, record.turn, position)
            listed.append(Difference(*where, ours, theirs, gap, self.tolerance, tie))
        shown = max(listed, key=lambda item: abs(item.gap or 0.0), default=None)
        return None if shown is None else asdict(shown)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.float() for part in parts]) if parts else torch.zeros(0)


def _largest_excused(scores: Any, tolerance: float | None) -> float | None:
    """The largest gap within the tolerance that is not 0."""
    gap_A = _joined([line.gap_A for line in scores])
    excused = gap_A[(gap_A > 0) & (gap_A <= (tolerance or 0.0))]
    return float(excused.max()) if len(excused) else None
