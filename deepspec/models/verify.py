"""Which proposals the target accepts, and the token it adds: Leviathan et al. 2211.17192, exact. Pure.

Letters: B rows, k proposals offered at most, G block.
"""

import torch
from torch import Tensor

from deepspec.models.sampling import Distribution, inverse_cdf


class ThresholdError(ValueError):
    """A confidence threshold outside [0, 1]."""


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


def survival(confidence_BG: Tensor) -> Tensor:
    """a_j = Π_{i≤j} c_i: probability that the prefix up to j is accepted (dspark.md §6)."""
    return confidence_BG.cumprod(-1)


class StaticSchedule:
    """Offer the same number of proposals every round."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, confidence_BG: Tensor) -> Tensor:
        """lengths_B."""
        rows, block = confidence_BG.shape
        return torch.full((rows,), min(self.length, block), dtype=torch.long, device=confidence_BG.device)


class ThresholdSchedule:
    """Offer the longest prefix whose survival stays at or above a threshold. Causal: whether x_j is offered depends on
    c_1…c_j, and c_j is a function of x_1…x_{j−1}."""

    def __init__(self, threshold: float) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ThresholdError(f"confidence threshold must be in [0, 1], got {threshold}")
        self.threshold = threshold

    def __call__(self, confidence_BG: Tensor) -> Tensor:
        """lengths_B."""
        return (survival(confidence_BG) >= self.threshold).cumprod(-1).sum(-1)
