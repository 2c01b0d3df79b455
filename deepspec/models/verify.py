"""Verification: how many proposals each row offers, which of them the target accepts, and the token it adds. Pure.

Acceptance is that of Leviathan et al. (arXiv 2211.17192), exact. Lengths here depend on confidences alone; those that
depend on the load too are in deepspec/eval/scheduler.py. Letters: B rows (R requests), k proposals offered at most,
G block.
"""

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspec.models.sampling import Distribution, inverse_cdf

CONDITIONAL, SURVIVAL = "conditional", "survival"
THRESHOLD_RULES = (CONDITIONAL, SURVIVAL)


class ScheduleError(ValueError):
    """Confidences or options that no verification length can be chosen from."""


def verify(
    p: Distribution, draft_Bk: Tensor, q: Distribution, lengths_B: Tensor, uniforms_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept x_j while u_j·q(x_j) < p(x_j); at the first rejection draw from norm(max(p − q, 0)), else from p.

    p: [B, k+1] target distributions after the anchor and each proposal; q: [B, k] what the proposals were drawn from;
    lengths_B: proposals really offered to each row, 0…k, chosen without looking at the proposals they cut;
    uniforms_B: [B, k+1] in [0, 1), independent of the draft: one per proposal and one (the last) for the final draw.
    Returns (accepted_B in 0…length, next_B). Commits accepted + 1 tokens per row.
    """
    rows, k = draft_Bk.shape
    row_B = torch.arange(rows, device=draft_Bk.device)
    if k == 0:
        accepted_B = torch.zeros_like(row_B)
        return accepted_B, p[:, 0].sample(uniforms_B[:, -1])
    offered_Bk = torch.arange(k, device=draft_Bk.device) < lengths_B[:, None]
    if p.greedy:
        keep_Bk = p.argmax()[:, :k] == draft_Bk
    else:
        keep_Bk = uniforms_B[:, :k] * q.prob(draft_Bk) < p[:, :k].prob(draft_Bk)
    accepted_B = (keep_Bk & offered_Bk).cumprod(-1).sum(-1)
    last = p[row_B, accepted_B]
    if p.greedy:
        return accepted_B, last.argmax()
    residual_BV = last.residual(q[row_B, accepted_B.clamp_max(k - 1)])
    rejected_B1 = (accepted_B < lengths_B)[:, None]
    return accepted_B, inverse_cdf(torch.where(rejected_B1, residual_BV, last.probs()), uniforms_B[:, -1])


def survival(confidence_RG: np.ndarray) -> np.ndarray:
    """a[r, j] = Π_{i≤j} c[r, i], the probability that the prefix up to j is accepted, in the type of ``confidence_RG``.

    NaN from the first unknown confidence of a row on. The result lies position-major in memory, ``survival(c).T`` is
    contiguous: a multiplication for each position is faster than one for each request.
    """
    survival_GR = np.array(confidence_RG.T, order="C")
    for before_R, here_R in itertools.pairwise(survival_GR):
        np.multiply(here_R, before_R, out=here_R)
    return survival_GR.T


def probabilities(confidence_RG: Any) -> np.ndarray:
    """Confidences (an array or a CPU tensor) as float32. Raises ScheduleError outside [0, 1]."""
    values_RG = np.asarray(confidence_RG, dtype=np.float32)
    # The negated form also catches NaN, which compares false with everything.
    if values_RG.size and not (values_RG.min() >= 0.0 and values_RG.max() <= 1.0):
        valid_R = ((values_RG >= 0.0) & (values_RG <= 1.0)).all(axis=1)
        bad = int(np.argmin(valid_R))
        raise ScheduleError(
            f"request {bad}: confidences {values_RG[bad]} must be probabilities in [0, 1]; "
            "check the drafter's confidence head and its calibration"
        )
    return values_RG


def _leading(passes_RG: np.ndarray) -> np.ndarray:
    """How many positions pass before the first that does not, [R]."""
    prefix_RG = np.logical_and.accumulate(passes_RG, axis=1)
    return np.add.reduce(prefix_RG, axis=1, dtype=np.int64)


class Static:
    """The same length for every request; 0 is plain decoding. Lossless: nothing of the draft decides.

    Confidences only say how many tokens a request can offer: those before its first confidence of 0.
    """

    def __init__(self, length: int) -> None:
        if length < 0:
            raise ScheduleError(f"static length is {length}, must be ≥ 0")
        self.name = f"static-{length}" if length else "none"
        self.length = length

    def __call__(self, confidence_RG: Any) -> np.ndarray:
        """confidence_RG, 0 where a request offers no token → lengths [R]."""
        return np.minimum(_leading(probabilities(confidence_RG) > 0), self.length)


class Threshold:
    """The prefix before the first token that is too unsure. One number, blind to the load.

    on="conditional" (the rule of DSpark's Figure 5): the first c_k < threshold ends the prefix. on="survival": the
    first a_k = c_1 ⋯ c_k < threshold does, which cuts earlier at the same threshold. A confidence of 0 is never
    admitted.

    Both are lossless. Whether x_k is offered depends on c_1 … c_k (each a_k is a function of them), and c_k is known
    before x_k is drawn: it is a function of x_1 … x_{k−1}. A token that is offered is thus a draw from q made after
    the decision to verify it, and one that is not leaves its place to a later round.
    """

    name = "threshold"

    def __init__(self, threshold: float, on: str = CONDITIONAL) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ScheduleError(f"confidence threshold is {threshold}, must be in [0, 1]")
        if on not in THRESHOLD_RULES:
            raise ScheduleError(f"threshold on {on!r}: choose {' or '.join(THRESHOLD_RULES)}")
        self.threshold, self.on = threshold, on

    def __call__(self, confidence_RG: Any) -> np.ndarray:
        """confidence_RG, 0 where a request offers no token → lengths [R]."""
        values_RG = probabilities(confidence_RG)
        if self.on == SURVIVAL:
            values_RG = survival(values_RG)
        return _leading((values_RG >= self.threshold) & (values_RG > 0))
