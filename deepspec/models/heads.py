"""The sequential heads of DSpark: a low-rank Markov bias on the logits, and the confidence of each position.

A Markov head gives m so that the logits of position k are U_k + m_k W2ᵀ: the bias itself is left to whoever holds the
head, so that a loss can stay chunked. Teacher-forced (all positions) and step-wise forms are equal.
Source: DSpark (arXiv 2607.05147); equations: docs/algorithms.md#dspark.
Shapes: B rows, N blocks, G positions, D hidden size, R rank, V vocabulary.
"""

import math

import torch
from torch import Tensor, nn

from deepspec.models.drafter_config import MARKOV_HEADS, DrafterConfigError


class MarkovHead(nn.Module):
    """m_k from the previous token x_{k-1} and the hidden state h_k; ``kind`` is vanilla, gated or rnn (DSpark)."""

    def __init__(self, kind: str, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        if kind not in MARKOV_HEADS:
            raise DrafterConfigError(f"markov_head_type={kind!r} is unknown: it must be one of {MARKOV_HEADS}")
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)
        self._initialise()

    def _initialise(self) -> None:
        """W2 = 0, so that training starts at the plain backbone; rows of W1 have unit length on average."""
        nn.init.normal_(self.markov_w1.weight, std=1 / math.sqrt(self.rank))
        nn.init.zeros_(self.markov_w2.weight)
        for name in ("gate_proj", "joint_proj"):
            if hasattr(self, name):
                nn.init.normal_(getattr(self, name).weight, std=0.02)
                nn.init.zeros_(getattr(self, name).bias)

    def embed(self, tokens: Tensor) -> Tensor:
        """W1[x], [..., R]."""
        return self.markov_w1(tokens)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """m [..., G, R] of whole blocks: ``previous`` = W1[x_{k-1}] [..., G, R], ``hidden`` = h_k [..., G, D]."""
        if self.kind != "rnn":
            return self.step(previous, hidden, None)[0]
        state, outputs = None, []
        for k in range(previous.shape[-2]):
            output, state = self.step(previous[..., k, :], hidden[..., k, :], state)
            outputs.append(output)
        return torch.stack(outputs, -2)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """m_k and the state after it, for one position: ``previous`` [..., R], ``hidden`` [..., D]; None is s_0 = 0."""
        if self.kind == "vanilla":
            return previous, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], -1))) * previous, None
        state = torch.zeros_like(previous) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, previous, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output), state


class ConfidenceHead(nn.Module):
    """Logit of P(x_k accepted | x_{<k} accepted) from [h_k ; W1[x_{k-1}]], or from h_k alone (``rank`` 0)."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """Logits [...] of ``hidden`` [..., D] and, where the head has Markov input, ``previous`` [..., R]."""
        features = hidden if previous is None else torch.cat([hidden, previous], -1)
        return self.proj(features).squeeze(-1)
