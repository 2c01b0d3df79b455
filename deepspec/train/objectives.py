"""Training objectives of the drafters: which rows count, with which weights and terms, and the metrics of a step.

Losses sum over rows and are divided by a denominator that the caller has summed over the whole global batch, so they
do not depend on ranks or micro-batches. Each objective is normalised as its reference does it:

    block drafters   Σ w over all rows of the global batch                       w_k = exp(−(k−1)/gamma_decay)
    EAGLE-3          the number of sequences of the global batch; rows weigh     w_i = step_decay^i / T
                     1/T, T the tokens of their own sequence, and steps add up

EAGLE-3's is the "local mean" of its public trainers: a mean over the B·T positions of each step. With a mean over all
supervised tokens instead, long sequences own the gradient, and acceptance falls again later in training. T counts the
sequence's own tokens, without padding or neighbours in a packed row.

An EAGLE-3 position is a block too: index t of its output drafts after the anchor t+1 with the taps up to t as context,
so every position is an anchor, and step i is position i + 1 of its block.

Shapes: B rows of a batch, S tokens, N anchors, G positions of a block (γ, or EAGLE-3's training-time test steps),
X = B·N·G.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from deepspec.data.anchors import block_valid, gather_tokens, position_weights
from deepspec.data.batch import DraftBatch
from deepspec.models.drafter_config import DrafterConfig
from deepspec.train.losses import Coefficients, KnownTarget, LogitsHead, RowLosses, fused_loss
from deepspec.train.row_plan import RowPlan

# Raise it when the same options give another loss: a run is not continued across versions.
# 2: EAGLE-3 is normalised per sequence and step, and its steps add up (1: by Σw over all tokens of the global batch).
OBJECTIVE_SEMANTICS = 2

# (draft tokens of a block, gamma_decay) of DFlash, arXiv 2602.06036, appendix A.1, whose blocks of 8, 10 and 16 tokens
# count the anchor.
_DECAYS = ((7, 4.0), (9, 5.0), (15, 7.0))


def position_decay(block_size: int) -> float:
    """gamma_decay of a block of so many draft tokens: DFlash's values, and the line through the nearest two elsewhere.

    7, 9 and 15 draft tokens give 4, 5 and 7; 5 give 3, 11 give 5.67, 21 give 9.
    """
    below, above = _DECAYS[:2] if block_size <= _DECAYS[1][0] else _DECAYS[1:]
    slope = (above[1] - below[1]) / (above[0] - below[0])
    return below[1] + slope * (block_size - below[0])


@dataclass
class LossWeights:
    """Weights of the terms; 0 leaves a term out.

    ce           cross-entropy with the next token                            block drafters
    tv           total variation ‖q − p‖₁                                     block drafters
    lk           −log of the acceptance 1 − ½‖q − p‖₁                         block drafters
    confidence   BCE of the confidence head against the acceptance            block drafters that have one
    feature      squared distance of the state before the head from the target's last state, relative to the latter's
    gamma_decay  w_k = exp(−(k−1)/gamma_decay) of position k; None: from the block size, see position_decay
    soft         cross-entropy with the target's distribution                 EAGLE-3
    step_decay   w_i = step_decay^i of step i = 0, 1, …                       EAGLE-3
    Sources: DSpark (arXiv 2607.05147), EAGLE-3 (arXiv 2503.01840); feature: the regression term of EAGLE
    (arXiv 2401.15077, §4.2), made scale-free. While q and p hardly overlap, total variation has almost no gradient;
    the states do.
    """

    ce: float = 0.1
    tv: float = 0.9
    lk: float = 0.0
    confidence: float = 1.0
    feature: float = 0.0
    gamma_decay: float | None = None
    soft: float = 1.0
    step_decay: float = 0.8

    def __post_init__(self) -> None:
        for name in ("ce", "tv", "lk", "confidence", "feature", "soft"):
            if getattr(self, name) < 0:
                raise ValueError(f"loss.{name}={getattr(self, name)} must not be negative; 0 leaves the term out")
        for name in ("gamma_decay", "step_decay"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"loss.{name}={value} must be positive")

    def resolved(self, config: DrafterConfig) -> "LossWeights":
        """The same weights with every value that follows from the drafter written out."""
        if self.gamma_decay is not None or config.kind == "eagle3":
            return self
        return replace(self, gamma_decay=position_decay(config.block_size))


@dataclass(frozen=True)
class Rows:
    """Per block and position: whether it counts, its label x_k, the last-state row of its p (−1: none), its weight."""

    valid_BNG: torch.Tensor
    labels_BNG: torch.Tensor
    index_BNG: torch.Tensor
    weights_BNG: torch.Tensor


def rows_of(batch: DraftBatch, config: DrafterConfig, weights: LossWeights) -> Rows:
    """The rows of a batch, from the batch alone. Absent anchors and positions past the supervised run weigh zero."""
    device = batch.tokens_BS.device
    if config.kind == "eagle3":
        size = config.ttt_length
        steps_G = torch.arange(size, dtype=torch.float32, device=device)
        anchors_BN = every_anchor(batch)
        weights_BNG = weights.step_decay**steps_G * inverse_lengths(batch)[:, :, None]
    else:
        size = config.block_size
        anchors_BN = batch.anchors_BN
        decay = weights.resolved(config).gamma_decay
        assert decay is not None
        weights_BNG = position_weights(size, decay, device)
    valid_BNG = block_valid(batch.supervised_BS, batch.segments_BS, anchors_BN, size)
    before_BNG = anchors_BN.clamp(min=0)[:, :, None] + torch.arange(size, device=anchors_BN.device)
    before_BNG = before_BNG.clamp(max=batch.tokens_BS.shape[1] - 2).clamp(min=0)
    after_BNG = (before_BNG + 1).clamp(max=batch.tokens_BS.shape[1] - 1)
    index_BNG = gather_tokens(batch.last_row_BS, before_BNG)
    valid_BNG = valid_BNG & (index_BNG >= 0)
    return Rows(
        valid_BNG=valid_BNG,
        labels_BNG=gather_tokens(batch.tokens_BS, after_BNG),
        index_BNG=torch.where(valid_BNG, index_BNG, -1),
        weights_BNG=valid_BNG * weights_BNG,
    )


def inverse_lengths(batch: DraftBatch) -> torch.Tensor:
    """1/T for every token, T the tokens of its own sequence, [B, S] float32; 0 on padding."""
    real_BS = batch.segments_BS >= 0
    document_BS = batch.segments_BS.clamp(min=0)
    tokens_of = torch.bincount(document_BS.flatten(), weights=real_BS.flatten().float(), minlength=1)
    return real_BS / tokens_of[document_BS].clamp(min=1)


def every_anchor(batch: DraftBatch) -> torch.Tensor:
    """anchors_BS of EAGLE-3: index t drafts after anchor t+1 where tokens t and t+1 share a document, else −1.

    As for drawn anchors, the anchor itself must be supervised; its next token is checked with the block.
    """
    anchors_BS = torch.full_like(batch.segments_BS, -1)
    follows = (batch.segments_BS[:, 1:] == batch.segments_BS[:, :-1]) & (batch.segments_BS[:, 1:] >= 0)
    positions = torch.arange(1, batch.segments_BS.shape[1], device=anchors_BS.device)
    anchors_BS[:, :-1] = torch.where(follows & batch.supervised_BS[:, 1:], positions, -1)
    return anchors_BS


def denominators(batch: DraftBatch, config: DrafterConfig, weights: LossWeights) -> torch.Tensor:
    """What one micro-batch adds to the global denominator, a float32 scalar: Σw, for EAGLE-3 the number of sequences.

    Sum it over micro-batches and ranks before the forward. Every term is normalised by the same sum.
    """
    if config.kind == "eagle3":
        return torch.tensor(float(len(batch.ids)), device=batch.tokens_BS.device)
    return rows_of(batch, config, weights).weights_BNG.sum()


def objective(
    drafter: Any,
    batch: DraftBatch,
    weights: LossWeights,
    denominator: torch.Tensor,
    *,
    chunk_bytes: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics) of one micro-batch.

    drafter: a BlockDrafter or Eagle3Drafter, or an engine around one. denominator: the global sum of ``denominators``.
    The losses of all micro-batches and ranks sum to the global loss, so an engine that averages over ranks or
    accumulation steps needs it multiplied back. chunk_bytes: memory for the loss's logits, see fused_loss. Metrics are
    float32 tensors whose first index is (numerator, denominator): sum both, then divide.
        ce, tv, lk or soft, confidence, feature   means weighted by w
        loss                                   what is minimised, normalised as above
        acceptance                             [2, G]: 1 − ½‖q − p‖₁ per position, unweighted
        top1                                   share of positions where q's largest is p's most likely token
        tau                                    1 + Σ_j Π_{i≤j} acceptance_i, over complete blocks only: blocks whose G
                                               positions are all supervised (an answer's last blocks are left out)
        confidence_error                       mean |c − acceptance|, unweighted
    """
    rows = rows_of(batch, drafter.config, weights)
    plan = RowPlan.of(rows.index_BNG.flatten(), rows.valid_BNG.flatten())
    output = drafter(batch)
    scale = 1 / denominator.clamp(min=torch.finfo(torch.float32).tiny).to(torch.float32)
    hidden_BNGD, markov_BNGR, confidence_BNG = _outputs(output, drafter.config)
    w_X = rows.weights_BNG.flatten()
    losses = fused_loss(
        hidden_BNGD.flatten(0, 2),
        _logits_head(drafter),
        batch.last_LD,
        rows.index_BNG.flatten(),
        rows.labels_BNG.flatten(),
        _coefficients(drafter.config, weights, w_X * scale),
        m_XR=None if markov_BNGR is None else markov_BNGR.flatten(0, 2),
        w2_VR=None if markov_BNGR is None else drafter.markov_weight_VR,
        known=None if batch.log_z_L is None or batch.top_L is None else KnownTarget(batch.log_z_L, batch.top_L),
        plan=plan,
        chunk_bytes=chunk_bytes,
    )
    loss, metrics = losses.total, _metrics(losses, rows, drafter.config, weights)
    if weights.feature:
        term = _feature(hidden_BNGD, batch.last_LD, rows, plan.order_X)
        loss = loss + weights.feature * scale * term
        metrics["feature"] = torch.stack([term.detach(), w_X.sum()])
    if confidence_BNG is not None:
        term, own = _confidence(confidence_BNG, losses.accept_X.view_as(rows.valid_BNG), rows)
        loss = loss + weights.confidence * scale * term
        metrics |= own
    # (this part's share of the global loss · D, this part's share of D): summed and divided, the global loss
    share = denominators(batch, drafter.config, weights)
    metrics["loss"] = torch.stack([loss.detach() / scale, share.to(scale.device)])
    return loss, metrics


def _outputs(output: Any, config: DrafterConfig) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(hidden_BNGD, markov_BNGR, confidence_BNG) of a training forward; EAGLE-3's steps are a block's positions."""
    if config.kind == "eagle3":
        return output.hidden_IBSD.permute(1, 2, 0, 3), None, None
    return output.hidden_BNGD, output.markov_BNGR, output.confidence_logits_BNG


def _logits_head(drafter: Any) -> LogitsHead:
    head, ids_V = drafter.head, drafter.draft_ids_V
    sliced = None if ids_V is None else drafter.vocabulary.head(head).head_VD
    return LogitsHead(head.head_VD, head.softcap, ids_V, sliced)


def _coefficients(config: DrafterConfig, weights: LossWeights, w_X: torch.Tensor) -> Coefficients:
    if config.kind == "eagle3":
        return Coefficients(soft_X=weights.soft * w_X)
    return Coefficients(
        ce_X=weights.ce * w_X if weights.ce else None,
        tv_X=weights.tv * w_X if weights.tv else None,
        lk_X=weights.lk * w_X if weights.lk else None,
    )


def _feature(hidden_BNGD: torch.Tensor, last_LD: torch.Tensor, rows: Rows, order_A: torch.Tensor) -> torch.Tensor:
    """Σ w ‖h − last‖² / ‖last‖² over the rows that count, which are the plan's."""
    last_AD = last_LD[rows.index_BNG.flatten()[order_A]].float()
    distance_A = (hidden_BNGD.flatten(0, 2)[order_A].float() - last_AD).square().sum(-1)
    return (rows.weights_BNG.flatten()[order_A] * distance_A / last_AD.square().sum(-1)).sum()


def _confidence(
    logits_BNG: torch.Tensor, accept_BNG: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Σ w BCE(c, acceptance) with the acceptance as a constant soft label, and its metrics."""
    logits_BNG = logits_BNG.float().masked_fill(~rows.valid_BNG, 0)
    bce_BNG = F.binary_cross_entropy_with_logits(logits_BNG, accept_BNG.float(), reduction="none")
    term = (rows.weights_BNG * bce_BNG).sum()
    error_BNG = (logits_BNG.detach().sigmoid() - accept_BNG).abs() * rows.valid_BNG
    return term, {
        "confidence": torch.stack([term.detach(), rows.weights_BNG.sum()]),
        "confidence_error": torch.stack([error_BNG.sum(), rows.valid_BNG.sum().float()]),
    }


def _metrics(losses: RowLosses, rows: Rows, config: DrafterConfig, weights: LossWeights) -> dict[str, torch.Tensor]:
    shape, w_X = rows.valid_BNG.shape, rows.weights_BNG.flatten()
    valid_BNG = rows.valid_BNG.float()
    count, total = valid_BNG.sum(), w_X.sum()
    accept_BNG = losses.accept_X.view(shape).float()
    complete_BN = valid_BNG[:, :, -1]
    tau_BN = (1 + accept_BNG.cumprod(-1).sum(-1)) * complete_BN
    means = {"ce": losses.ce_X, "tv": losses.tv_X}
    if config.kind == "eagle3":
        means["soft"] = losses.soft_X
    elif weights.lk:
        means["lk"] = -losses.accept_X.clamp(min=1e-6).log()
    return {name: torch.stack([(w_X * value_X).sum(), total]) for name, value_X in means.items()} | {
        "acceptance": torch.stack([accept_BNG.sum((0, 1)), valid_BNG.sum((0, 1))]),
        "top1": torch.stack([losses.top1_X.sum(), count]),
        "tau": torch.stack([tau_BN.sum(), complete_BN.sum()]),
    }
