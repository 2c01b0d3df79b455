"""Confidences for drafters without a confidence head: the largest probability of q at each position.

It is known before the token is drawn, so scheduling by it is lossless; the probability of the drawn token is not.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspec.models.confidence_scale import ConfidenceScale
from deepspec.models.protocol import Drafter, Proposal
from deepspec.models.sampling import Distribution, Sampling

METADATA = "max_probability"  # its scale in a checkpoint's ``deepspec`` object
_NEARLY_GREEDY = 1e-4
_EDGE = 1e-6


class MaxProbability:
    """A drafter with c_k = max_v q_k(v) in front of another one; ``scale`` is that of ``calibrate``.

    Where drafts are greedy, q is one-hot and says nothing. The inner drafter then draws at a temperature so low that
    only the argmax is drawn, which leaves its logits to be read back at temperature 1; the proposal stays one-hot.
    """

    def __init__(self, drafter: Drafter, scale: ConfidenceScale | None = None) -> None:
        self.drafter, self.scale = drafter, scale
        self.block_size = drafter.block_size
        self.taps = getattr(drafter, "taps", None)

    def start(self, rows: int, max_length: int) -> Any:
        """The inner drafter's state."""
        return self.drafter.start(rows, max_length)

    def extend(
        self, state: Any, tokens_BT1: Tensor, taps_BTF: Tensor | None, counts_B: Tensor, rows: slice | None = None
    ) -> None:
        """New context of the inner drafter."""
        self.drafter.extend(state, tokens_BT1, taps_BTF, counts_B, rows)

    def propose(
        self, state: Any, anchor_B: Tensor, sampling: Sampling, uniforms_BG: Tensor, length: int, greedy: bool = False
    ) -> Proposal:
        """The inner proposal with confidences. Raises ValueError for a drafter without probabilities (look-ups)."""
        one_hot = greedy or sampling.greedy
        inner = Sampling(_NEARLY_GREEDY) if one_hot else sampling
        proposal = self.drafter.propose(state, anchor_B, inner, uniforms_BG, length, False)
        logits_BGV = proposal.q.logits
        if logits_BGV is None:
            raise ValueError("this drafter has no probabilities to take confidences from")
        if one_hot:
            confidence_BG = torch.softmax(logits_BGV * _NEARLY_GREEDY, dim=-1).amax(-1)
            proposal = replace(proposal, q=Distribution.one_hot(proposal.tokens_BG, proposal.q.vocab_size))
        else:
            confidence_BG = proposal.q.probs().amax(-1)
        if self.scale is not None:
            confidence_BG = torch.sigmoid(self.scale.logits(torch.logit(confidence_BG, _EDGE)))
        return replace(proposal, confidence_BG=confidence_BG)
