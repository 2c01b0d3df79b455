"""The fused, chunked loss over (anchor, offset) rows: every term, its metrics and its gradients in one pass.

Shapes: X rows, A active rows in the plan's order, L rows with a last state, V (draft) vocabulary, T target vocabulary,
D hidden size, R Markov rank, U target positions and C rows of a chunk or tile. It knows rows only: no batches, anchors
or drafters. The matmuls over the vocabulary dominate, so memory is bounded by chunks of rows and p is computed once per
target position, not once per row; the elementwise passes run over cache-sized tiles of a chunk.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from deepspec.train.row_plan import RowPlan

CPU_CHUNK_BYTES = 128 << 20
DEVICE_CHUNK_BYTES = 1024 << 20
CPU_TILE_BYTES = 4 << 20
LEAST_ACCEPTANCE = 1e-6  # floor under −log(acceptance) and its gradient

# rows of the results; the first four are the terms, in the order of Coefficients
CE, TV, SOFT, LK, ACCEPT, TOP1 = range(6)


@dataclass(frozen=True)
class LogitsHead:
    """The frozen lm_head as the loss needs it: logits = cap(h @ headᵀ), cap(x) = softcap · tanh(x / softcap).

    draft_ids_V are the target's ids of a reduced draft vocabulary: q lives on those rows of the head (``draft_VD``,
    sliced here when not given), while p keeps its normaliser over all T tokens. None: the whole vocabulary, V = T.
    """

    head_TD: torch.Tensor
    softcap: float | None = None
    draft_ids_V: torch.Tensor | None = None
    draft_VD: torch.Tensor | None = None


class KnownTarget(NamedTuple):
    """What is known of p at every last state: its log-normaliser over all T tokens and its most likely token."""

    log_z_L: torch.Tensor
    top_L: torch.Tensor


@dataclass(frozen=True)
class Coefficients:
    """Weight of each term per row (already divided by the denominator), None for a term that is not used.

    ce: −log q(label); a label outside the draft vocabulary adds nothing.  tv: ‖q − p‖₁.
    soft: −Σ p log q over the draft vocabulary (EAGLE-3).  lk: −log(1 − ½‖q − p‖₁), the log of the acceptance.
    """

    ce_X: torch.Tensor | None = None
    tv_X: torch.Tensor | None = None
    soft_X: torch.Tensor | None = None
    lk_X: torch.Tensor | None = None

    def terms(self) -> list[torch.Tensor | None]:
        """The weights in the order ce, tv, soft, lk."""
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class RowLosses:
    """``total`` = Σ_rows Σ_terms coefficient · term, differentiable; the rest is detached and zero on skipped rows.

    accept = 1 − ½‖q − p‖₁; top1 is 1 where q is largest at p's most likely token, else 0; soft is zero unless weighted.
    """

    total: torch.Tensor
    ce_X: torch.Tensor
    tv_X: torch.Tensor
    soft_X: torch.Tensor
    accept_X: torch.Tensor
    top1_X: torch.Tensor


def fused_loss(
    h_XD: torch.Tensor,
    head: LogitsHead,
    last_LD: torch.Tensor,
    index_X: torch.Tensor,
    labels_X: torch.Tensor,
    coefficients: Coefficients,
    *,
    m_XR: torch.Tensor | None = None,
    w2_VR: torch.Tensor | None = None,
    known: KnownTarget | None = None,
    plan: RowPlan | None = None,
    chunk_bytes: int | None = None,
) -> RowLosses:
    """Losses of rows with logits_X = cap(h_X @ headᵀ) + m_X @ W2ᵀ against p = softmax(cap(last[index_X] @ headᵀ)).

    Gradients flow to h, m and W2 only. index_X: row of last_LD, −1 for none; labels_X: target token ids. Only the
    plan's rows are computed; by default those with a target and a weight that is not zero. Memory: ``chunk_bytes``
    (128 MiB on the CPU, 1 GiB elsewhere) for the logits of q and p and what is made of them, half as much again with a
    softcap, plus the gradient of W2. ``known`` spares p the logits outside a reduced draft vocabulary, and is not
    needed without one. Raises ValueError when only one of ``m_XR`` and ``w2_VR`` is given.
    """
    if (m_XR is None) != (w2_VR is None):
        raise ValueError("the Markov head needs both m_XR and w2_VR: give both or neither")
    if plan is None:
        plan = RowPlan.of(index_X, _active(index_X, coefficients))
    if chunk_bytes is None:
        chunk_bytes = CPU_CHUNK_BYTES if h_XD.device.type == "cpu" else DEVICE_CHUNK_BYTES
    known = None if head.draft_ids_V is None else known
    inputs = _Inputs(head, last_LD.detach(), labels_X, coefficients, known, plan, chunk_bytes, torch.is_grad_enabled())
    return RowLosses(*_FusedLoss.apply(h_XD, m_XR, w2_VR, inputs))


def _active(index_X: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    active_X = torch.zeros_like(index_X, dtype=torch.bool)
    for weight_X in coefficients.terms():
        if weight_X is not None:
            active_X |= weight_X != 0
    return active_X & (index_X >= 0)


class _Inputs(NamedTuple):
    head: LogitsHead
    last_LD: torch.Tensor
    labels_X: torch.Tensor
    coefficients: Coefficients
    known: KnownTarget | None
    plan: RowPlan
    chunk_bytes: int
    grad: bool


class _FusedLoss(torch.autograd.Function):
    """Gradients are made in forward, where the logits are, and scaled in backward."""

    @staticmethod
    def forward(ctx, h_XD, m_XR, w2_VR, inputs: _Inputs):
        work = _Pass(h_XD, m_XR, w2_VR, inputs)
        work.run()
        results_6X = h_XD.new_zeros(6, h_XD.shape[0], dtype=work.dtype)
        results_6X[:, inputs.plan.order_X] = work.results_6A
        ctx.gradients = (_scatter(work.dh_AD, h_XD, work), _scatter(work.dm_AR, m_XR, work), work.dw2_VR)
        ctx.dtypes = [None if x is None else x.dtype for x in (h_XD, m_XR, w2_VR)]
        rows = [results_6X[slot] for slot in (CE, TV, SOFT, ACCEPT, TOP1)]
        ctx.mark_non_differentiable(*rows)
        return work.total(), *rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_total, *_):
        if ctx.gradients is None:
            raise RuntimeError("the fused loss gives its gradients away in backward: compute the loss again")
        scaled = [
            None if gradient is None else gradient.mul_(grad_total).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        ctx.gradients = None
        return *scaled, None


class _Pass:
    """One pass over the chunks, in the plan's order: buffers, results per active row and gradients."""

    def __init__(self, h_XD, m_XR, w2_VR, inputs: _Inputs) -> None:
        self.plan, self.head, self.last_LD = inputs.plan, inputs.head, inputs.last_LD
        order = self.plan.order_X
        self.q_head_VD, self.slots_T = _draft_head(inputs.head)
        self.known = inputs.known
        self.p_head = inputs.head.head_TD if self.known is None else self.q_head_VD
        self.dtype = torch.promote_types(self.q_head_VD.dtype, torch.float32)
        self.h_AD = h_XD[order].to(self.q_head_VD.dtype)
        self.m_AR = None if m_XR is None else m_XR[order]
        self.w2_VR = w2_VR
        labels_A = inputs.labels_X[order]
        self.labels_A = labels_A if self.slots_T is None else self.slots_T[labels_A]
        weights = [None if w is None else w[order].to(self.dtype) for w in inputs.coefficients.terms()]
        self.weights_A = weights
        self.results_6A = h_XD.new_zeros(6, len(order), dtype=self.dtype)
        wants = [inputs.grad and x is not None and x.requires_grad for x in (h_XD, m_XR, w2_VR)]
        self.dh_AD, self.dm_AR, self.dw2_VR = (
            torch.zeros_like(x, dtype=self.dtype) if wanted else None
            for x, wanted in zip((self.h_AD, self.m_AR, w2_VR), wants, strict=True)
        )
        self.wants_gradient = any(wants)
        self._allocate(inputs.chunk_bytes)

    def _allocate(self, chunk_bytes: int) -> None:
        """Plan the chunks; buffers for the largest: z_CV (logits, then q, then gradient), p_UT and the tiles' two."""
        words, targets = len(self.q_head_VD), len(self.p_head)
        size = self.dtype.itemsize
        on_cpu = self.h_AD.device.type == "cpu"
        rows = max(1, chunk_bytes // (size * (words * (1 if on_cpu else 3) + targets)))  # elsewhere a tile is a chunk
        tile_rows = max(1, CPU_TILE_BYTES // (size * words)) if on_cpu else rows
        self.chunks = self.plan.chunks(rows, tile_rows)
        most = max((chunk.x1 - chunk.x0 for chunk in self.chunks), default=0)
        most_targets = max((chunk.u1 - chunk.u0 for chunk in self.chunks), default=0)
        most_tile = max((tile.x1 - tile.x0 for chunk in self.chunks for tile in chunk.tiles), default=0)
        new = self.results_6A.new_empty
        self.z_CV, self.p_UT = new(most, words), new(most_targets, targets)
        self.tiles_2CV = new(2, most_tile, words)
        self.gate_CV = new(most if self.head.softcap and self.wants_gradient else 0, words)

    def run(self) -> None:
        """Every chunk: two matmuls for the logits of p and q, elementwise work by tiles, the gradient matmuls."""
        for chunk in self.chunks:
            rows = slice(chunk.x0, chunk.x1)
            p_UT, z_CV = self.p_UT[: chunk.u1 - chunk.u0], self.z_CV[: chunk.x1 - chunk.x0]
            last_UD = self.last_LD[self.plan.targets_U[chunk.u0 : chunk.u1]].to(self.p_head.dtype)
            _matmul(last_UD, self.p_head.T, p_UT)
            _matmul(self.h_AD[rows], self.q_head_VD.T, z_CV)
            gate_CV = self._softcap(z_CV)
            if self.m_AR is not None:
                _accumulate(z_CV, self.m_AR[rows], self.w2_VR.T)
            for tile in chunk.tiles:
                part = slice(tile.x0, tile.x1)
                p_UV, top_U = self._target(p_UT[tile.u0 : tile.u1], slice(chunk.u0 + tile.u0, chunk.u0 + tile.u1))
                self._tile(z_CV[part], p_UV, top_U, slice(rows.start + tile.x0, rows.start + tile.x1))
            if self.wants_gradient:
                self._backpropagate(z_CV, gate_CV, rows)

    def _softcap(self, z_CV: torch.Tensor) -> torch.Tensor | None:
        """Cap logits in place; returns the derivative 1 − tanh² when a gradient will need it."""
        cap, gate_CV = self.head.softcap, None
        if cap:
            z_CV.div_(cap).tanh_()
            if self.wants_gradient:
                gate_CV = torch.mul(z_CV, z_CV, out=self.gate_CV[: len(z_CV)]).neg_().add_(1)
            z_CV.mul_(cap)
        return gate_CV

    def _target(self, z_UT: torch.Tensor, positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(p over the draft vocabulary, slot of p's most likely token or −1) of raw target logits, in place.

        ``positions`` are theirs in the plan. With a known normaliser the logits are of the draft vocabulary alone.
        """
        if self.head.softcap:
            z_UT.div_(self.head.softcap).tanh_().mul_(self.head.softcap)
        if self.known is not None and self.slots_T is not None:
            states_U = self.plan.targets_U[positions]
            z_UT.sub_(self.known.log_z_L[states_U, None]).exp_()
            return z_UT, self.slots_T[self.known.top_L[states_U]]
        top_U = z_UT.argmax(-1)
        torch.softmax(z_UT, -1, out=z_UT)
        if self.slots_T is None:
            return z_UT, top_U
        return z_UT[:, self.head.draft_ids_V], self.slots_T[top_U]

    def _tile(self, z_CV: torch.Tensor, p_UV: torch.Tensor, top_U: torch.Tensor, rows: slice) -> None:
        """Results of the rows whose logits are in z_CV; leaves d total / d logits there when a gradient is wanted.

        With M = [q > p] and Q = Σ M q: ½‖q − p‖₁ = Σ relu(q − p), also for q on a draft vocabulary as it sums to 1.
        """
        count = len(z_CV) // len(p_UV)
        z_UGV, p_U1V = z_CV.view(len(p_UV), count, -1), p_UV[:, None]
        d_CV, t_CV = self.tiles_2CV[:, : len(z_CV)].unbind()
        d_UGV = d_CV.view_as(z_UGV)
        results_6C = self.results_6A[:, rows]

        labels_C = self.labels_A[rows]
        label_C1, known_C = labels_C.clamp(min=0)[:, None], labels_C >= 0
        z_label_C, z_max_C = z_CV.gather(1, label_C1)[:, 0], z_CV.amax(-1)
        soft = self.weights_A[SOFT] is not None
        cross_C = torch.mul(z_UGV, p_U1V, out=d_UGV).sum(-1).flatten() if soft else None
        torch.softmax(z_CV, -1, out=z_CV)
        q_max_C = z_CV.amax(-1)
        normaliser_C = z_max_C - q_max_C.log()
        results_6C[CE] = (normaliser_C - z_label_C) * known_C
        top_C = top_U.repeat_interleave(count)
        results_6C[TOP1] = (z_CV.gather(1, top_C.clamp(min=0)[:, None])[:, 0] >= q_max_C) & (top_C >= 0)

        torch.sub(z_UGV, p_U1V, out=d_UGV)
        # M q in one vectorised pass: q where d > 0, else 0
        torch.ops.aten.threshold_backward.grad_input(z_CV, d_CV, 0, grad_input=t_CV)
        over_C, half_C = t_CV.sum(-1), d_CV.clamp_min_(0).sum(-1)
        results_6C[TV], results_6C[ACCEPT] = 2 * half_C, (1 - half_C).clamp(min=0)
        if self.weights_A[LK] is not None:
            # 1 − half cancels where the acceptance is small, which is where its logarithm matters
            results_6C[ACCEPT] = torch.minimum(z_UGV, p_U1V, out=d_UGV).sum(-1).flatten()
            results_6C[LK] = -results_6C[ACCEPT].clamp(min=LEAST_ACCEPTANCE).log()
        mass_C = None
        if cross_C is not None:
            mass_C = p_UV.sum(-1).repeat_interleave(count)
            results_6C[SOFT] = normaliser_C * mass_C - cross_C
        if self.wants_gradient:
            self._to_gradient(z_CV, t_CV, p_U1V, over_C, mass_C, rows)
            ce_A = self.weights_A[CE]
            if ce_A is not None:
                z_CV.scatter_add_(1, label_C1, -(ce_A[rows] * known_C)[:, None])

    def _to_gradient(self, q_CV, t_CV, p_U1V, over_C, mass_C, rows: slice) -> None:
        """q_CV becomes d total / d logits, but for CE's −a at the label.

        CE: a (q − onehot); total variation: 2b q (M − Q); soft cross-entropy: c (mass q − p); log acceptance is a total
        variation of weight e / (2 acceptance). Together q (a + c mass − 2b Q) + 2b M q − c p − a onehot.
        """
        ce_C, tv_C, soft_C, lk_C = (None if w is None else w[rows] for w in self.weights_A)
        slope_C = torch.zeros_like(over_C) if tv_C is None else 2 * tv_C
        if lk_C is not None:
            slope_C = slope_C + lk_C / self.results_6A[ACCEPT, rows].clamp(min=LEAST_ACCEPTANCE)
        scale_C = -slope_C * over_C
        if ce_C is not None:
            scale_C = scale_C + ce_C * (self.labels_A[rows] >= 0)
        if soft_C is not None:
            scale_C = scale_C + soft_C * mass_C
        q_CV.mul_(scale_C[:, None])
        if tv_C is not None or lk_C is not None:
            q_CV.addcmul_(t_CV, slope_C[:, None])
        if soft_C is not None:
            q_UGV = q_CV.view(len(p_U1V), -1, q_CV.shape[1])
            q_UGV.addcmul_(p_U1V, soft_C.view(len(p_U1V), -1, 1), value=-1)

    def _backpropagate(self, g_CV: torch.Tensor, gate_CV: torch.Tensor | None, rows: slice) -> None:
        """From d total / d logits to the gradients of m, W2 and h; overwrites g_CV."""
        if self.m_AR is not None:
            words_CV = g_CV.to(self.w2_VR.dtype)
            if self.dm_AR is not None:
                _matmul(words_CV, self.w2_VR, self.dm_AR[rows])
            if self.dw2_VR is not None:
                _accumulate(self.dw2_VR, words_CV.T, self.m_AR[rows])
        if self.dh_AD is not None:
            if gate_CV is not None:
                g_CV.mul_(gate_CV)
            _matmul(g_CV.to(self.q_head_VD.dtype), self.q_head_VD, self.dh_AD[rows])

    def total(self) -> torch.Tensor:
        """Σ over rows and terms of weight · term, a scalar."""
        total = self.results_6A.new_zeros(())
        for weight_A, term_A in zip(self.weights_A, self.results_6A, strict=False):
            if weight_A is not None:
                total = total + (weight_A * term_A).sum()
        return total


def _draft_head(head: LogitsHead) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(rows of the head that q uses, slot of each target id in the draft vocabulary with −1 for none)."""
    if head.draft_ids_V is None:
        return head.head_TD, None
    ids_V = head.draft_ids_V
    slots_T = ids_V.new_full((len(head.head_TD),), -1)
    slots_T[ids_V] = torch.arange(len(ids_V), device=ids_V.device)
    return head.head_TD[ids_V] if head.draft_VD is None else head.draft_VD, slots_T


def _scatter(gradient: torch.Tensor | None, like: torch.Tensor | None, work: _Pass) -> torch.Tensor | None:
    """A gradient in the plan's order put at its rows; zero elsewhere."""
    if gradient is None or like is None:
        return None
    placed = torch.zeros_like(like, dtype=work.dtype)
    placed[work.plan.order_X] = gradient
    return placed


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b; half-precision inputs give float32 results, unrounded where the device can."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif out.device.type == "cuda":
        torch.mm(a, b, out.dtype, out=out)
    else:
        out.copy_(torch.mm(a, b))


def _accumulate(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a @ b, in place where the types allow."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out.add_(torch.mm(a, b))
