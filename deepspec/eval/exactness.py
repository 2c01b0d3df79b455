"""Proof of losslessness at temperature 0: each answer against plain greedy decoding's, token by token.

A difference is shown with the logit gap between the two tokens; where the gap is within what the arithmetic cannot
resolve it counts as a tie, not as a fault. Knows no drafters.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch

from deepspec.eval.records import Record
from deepspec.models.target import Target

# Logits of one position computed in two batch shapes differ by rounding in the order of sums; two tokens closer than
# this have no defined order. Absolute, in logits; the measurements behind them are in docs/evaluation.md.
TIE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 1.0}

PromptIds = Callable[[Record], Sequence[int]]  # the prompt tokens that a record answered


@dataclass(frozen=True)
class Difference:
    """The first position (0-based, in the answer) where two answers differ; a token is None past an answer's end.

    ``gap`` is logit(plain's token) − logit(drafter's token) given the common prefix; None at an answer's end.
    """

    prompt: str
    turn: int
    position: int
    plain: int | None
    drafter: int | None
    gap: float | None
    tolerance: float
    tie: bool


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first differing token, the shorter length when one is a prefix of the other, None when equal."""
    for position, (ours, theirs) in enumerate(zip_longest(plain, other, fillvalue=None)):
        if ours != theirs:
            return position
    return None


def check(target: Target, plain: Sequence[Record], others: Sequence[Record], prompt_ids: PromptIds) -> dict[str, Any]:
    """Identity of the answers to the same prompts: {prompts, identical, ties, different, first_difference}.

    ``different`` counts answers that differ by more than the arithmetic's resolution: it must be 0. The difference
    shown is a real one if there is any, else the tie with the largest gap.
    """
    reference = {record.key: record for record in plain}
    shared = [record for record in others if record.key in reference]
    found: list[Difference] = []
    for record in shared:
        position = first_difference(reference[record.key].tokens, record.tokens)
        if position is not None:
            found.append(_explain(target, reference[record.key], record, position, prompt_ids(record)))
    real = [item for item in found if not item.tie]
    shown = max(real or found, key=lambda item: abs(item.gap or 0.0), default=None)
    return {
        "prompts": len(shared),
        "identical": len(shared) - len(found),
        "ties": len(found) - len(real),
        "different": len(real),
        "first_difference": None if shown is None else asdict(shown),
    }


@torch.inference_mode()
def _explain(target: Target, plain: Record, other: Record, position: int, prompt: Sequence[int]) -> Difference:
    """Score both tokens with one forward over the common prefix."""
    tolerance = TIE[target.dtype]
    ours, theirs = (record.tokens[position] if position < len(record.tokens) else None for record in (plain, other))
    gap = None
    if ours is not None and theirs is not None:
        tokens_1T = torch.tensor([[*prompt, *plain.tokens[:position]]], device=target.device)
        logits_V = target.logits(target(tokens_1T, taps=False).last_BTD[0, -1])
        gap = float(logits_V[ours] - logits_V[theirs])
    tie = gap is not None and abs(gap) <= tolerance
    return Difference(other.prompt, other.turn, position, ours, theirs, gap, tolerance, tie)
