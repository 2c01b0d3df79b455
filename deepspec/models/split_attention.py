"""The two-part softmax: context keys by intervals, own-block keys by block, joined through one normaliser.

Forward and backward walk over chunks of blocks and keep only what one chunk needs, so memory is bounded and the cost
is linear in blocks and in visible context. Packed inside as [B·K, N, r·G, C] (r = H/K), so grouped keys never repeat.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from deepspec.models.masks import Blocks

# Scores held at a time: large enough for the matrix product, small enough for the CPU's cache. An accelerator wants
# few large kernels and no bounds read back: 256 MB in float32.
_CHUNK_SCORES = 1 << 20
_DEVICE_CHUNK_SCORES = 1 << 26


class _Chunk(NamedTuple):
    """Rows [row0, row1), blocks [n0, n1) and the context keys [lo, hi) that any of them sees."""

    row0: int
    row1: int
    n0: int
    n1: int
    lo: int
    hi: int
    clear_from: int  # keys in [clear_from, clear_to) are visible to every query of the chunk
    clear_to: int


def split_attention(
    q_BQHC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    own_k_BOKC: Tensor,
    own_v_BOKC: Tensor,
    blocks: Blocks,
    scale: float,
) -> Tensor:
    """Attention over ``blocks`` (see masks.Blocks), [B, Q, H, C]; differentiable in queries, keys and values.

    Softmax runs in float32 or wider. A query that sees no key at all gives NaN: a block drafter always sees itself.
    """
    heads, kv_heads, n = q_BQHC.shape[2], k_BKSC.shape[1], blocks.count
    groups, queries, own = heads // kv_heads, blocks.queries, blocks.own
    rows, dim = q_BQHC.shape[0], q_BQHC.shape[3]
    q = q_BQHC.view(rows, n, queries, kv_heads, groups, dim).permute(0, 3, 1, 4, 2, 5)
    q_ENGC = (q * scale).reshape(rows * kv_heads, n, groups * queries, dim)
    own_k = own_k_BOKC.view(rows, n, own, kv_heads, dim).permute(0, 3, 1, 2, 4)
    own_v = own_v_BOKC.view(rows, n, own, kv_heads, dim).permute(0, 3, 1, 2, 4)
    inputs = (q_ENGC, k_BKSC, v_BKSC, own_k.flatten(0, 1), own_v.flatten(0, 1), blocks.first_BNG(), blocks.end_BN)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        out_ENGC, _ = _block_attention(*inputs)
    else:
        out_ENGC, _ = _forward(*inputs)
    out = out_ENGC.view(rows, kv_heads, n, groups, queries, dim).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(rows, n * queries, heads, dim)


def _chunks(rows: int, per_block: int, context: int, first_BNG: Tensor, end_BN: Tensor) -> Iterator[_Chunk]:
    """Cut the work into chunks of about so many scores; ``per_block`` = K·r·G scores per context key."""
    count = end_BN.shape[1]
    scores = _CHUNK_SCORES if end_BN.device.type == "cpu" else _DEVICE_CHUNK_SCORES
    whole = scores // max(1, count * per_block * context)
    if whole:  # small rows go together, untrimmed: no value is read back from the device
        for b in range(0, rows, whole):
            yield _Chunk(b, min(rows, b + whole), 0, count, 0, context, 0, 0)
        return
    first_BN, last_first_BN = first_BNG.amin(-1), first_BNG.amax(-1)
    size = max(1, scores // (per_block * max(context, 1)))
    for b in range(rows):
        for n0 in range(0, count, size):
            n1 = min(count, n0 + size)
            ends = end_BN[b, n0:n1]
            bounds = torch.stack([
                first_BN[b, n0:n1].min(), ends.max(), last_first_BN[b, n0:n1].max(), ends.min()
            ])  # fmt: skip
            lo, hi, clear_from, clear_to = bounds.tolist()
            lo = min(lo, hi)
            clear_from = min(clear_from, hi)
            yield _Chunk(b, b + 1, n0, n1, lo, hi, clear_from, max(clear_to, clear_from))


class _Work:
    """Tensors of one chunk in the softmax's dtype, and its exponentials."""

    def __init__(self, chunk: _Chunk, q, k, v, own_k, own_v, first_BNG, end_BN) -> None:
        self.chunk = chunk
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        kv_heads = k.shape[1]
        self.rows = slice(chunk.row0 * kv_heads, chunk.row1 * kv_heads)
        self.blocks = slice(chunk.n0, chunk.n1)
        self.keys = slice(chunk.lo, chunk.hi)
        self.kv_heads = kv_heads
        self.q = q[self.rows, self.blocks].to(self.dtype)
        self.k = k.flatten(0, 1)[self.rows, self.keys].to(self.dtype)
        self.v = v.flatten(0, 1)[self.rows, self.keys].to(self.dtype)
        self.own_k = own_k[self.rows, self.blocks].to(self.dtype)
        self.own_v = own_v[self.rows, self.blocks].to(self.dtype)
        self.first_BNG = first_BNG[chunk.row0 : chunk.row1, self.blocks]
        self.end_BN = end_BN[chunk.row0 : chunk.row1, self.blocks]

    def scores(self) -> tuple[Tensor, Tensor]:
        """Masked context scores [E, n·r·G, s] and own scores [E, n, r·G, J]; E = rows·K."""
        context = torch.bmm(self.q.flatten(1, 2), self.k.transpose(1, 2))
        chunk = self.chunk
        self._hide(context, chunk.lo, chunk.clear_from if chunk.clear_from < chunk.clear_to else chunk.hi)
        if chunk.clear_from < chunk.clear_to:
            self._hide(context, chunk.clear_to, chunk.hi)
        return context, torch.matmul(self.q, self.own_k.transpose(2, 3))

    def _hide(self, scores: Tensor, start: int, stop: int) -> None:
        """Set the invisible scores of keys [start, stop) to −inf."""
        if start >= stop:
            return
        rows, n, queries = self.first_BNG.shape
        key = torch.arange(start, stop, device=scores.device)
        hidden_BNGS = (key < self.first_BNG[..., None]) | (key >= self.end_BN[:, :, None, None])
        part = scores[..., start - self.chunk.lo : stop - self.chunk.lo]
        part = part.unflatten(0, (rows, self.kv_heads)).unflatten(2, (n, -1, queries))
        part.masked_fill_(hidden_BNGS[:, None, :, None], float("-inf"))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, first_BNG: Tensor, end_BN: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [E, N, r·G, C] in q's dtype and log-normaliser [E, N, r·G] in the softmax's dtype."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for chunk in _chunks(k.shape[0], k.shape[1] * q.shape[2], k.shape[2], first_BNG, end_BN):
        work = _Work(chunk, q, k, v, own_k, own_v, first_BNG, end_BN)
        context, own = work.scores()
        by_block = own.shape[1:3]
        peak = _peak(context.unflatten(1, by_block), own)
        context.unflatten(1, by_block).sub_(peak).exp_()
        own.sub_(peak).exp_()
        total = context.unflatten(1, by_block).sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
        value = torch.bmm(context, work.v).unflatten(1, by_block) + torch.matmul(own, work.own_v)
        out[work.rows, work.blocks] = (value / total).to(out.dtype)
        lse[work.rows, work.blocks] = (peak + total.log()).squeeze(-1)
    return out, lse


def _peak(context: Tensor, own: Tensor) -> Tensor:
    peaks = [part.amax(-1, keepdim=True) for part in (context, own) if part.shape[-1]]
    return peaks[0] if len(peaks) == 1 else torch.maximum(*peaks)


def _backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    first_BNG: Tensor,
    end_BN: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, own_k, own_v: recompute a chunk's weights P from lse, then dS = P ∘ (dP − ⟨dO, O⟩)."""
    dq, d_own_k, d_own_v = torch.empty_like(q), torch.empty_like(own_k), torch.empty_like(own_v)
    dk = torch.zeros(k.shape, dtype=lse.dtype, device=k.device)
    dv = torch.zeros_like(dk)
    dk_ESC, dv_ESC = dk.flatten(0, 1), dv.flatten(0, 1)
    for chunk in _chunks(k.shape[0], k.shape[1] * q.shape[2], k.shape[2], first_BNG, end_BN):
        work = _Work(chunk, q, k, v, own_k, own_v, first_BNG, end_BN)
        at = work.rows, work.blocks
        d_out = grad[at].to(work.dtype)
        shift, inner = lse[at][..., None], (d_out * out[at]).sum(-1, keepdim=True)
        context, own = work.scores()
        by_block = own.shape[1:3]
        context.unflatten(1, by_block).sub_(shift).exp_()
        own.sub_(shift).exp_()
        flat_q, flat_d = work.q.flatten(1, 2), d_out.flatten(1, 2)
        dv_ESC[work.rows, work.keys].baddbmm_(context.transpose(1, 2), flat_d)
        d_own_v[at] = torch.matmul(own.transpose(2, 3), d_out).to(d_own_v.dtype)
        d_context = torch.bmm(flat_d, work.v.transpose(1, 2))
        d_context.unflatten(1, by_block).sub_(inner)
        d_context.mul_(context)
        d_own = torch.matmul(d_out, work.own_v.transpose(2, 3)).sub_(inner).mul_(own)
        dk_ESC[work.rows, work.keys].baddbmm_(d_context.transpose(1, 2), flat_q)
        d_own_k[at] = torch.matmul(d_own.transpose(2, 3), work.q).to(d_own_k.dtype)
        d_q = torch.bmm(d_context, work.k).unflatten(1, by_block) + torch.matmul(d_own, work.own_k)
        dq[at] = d_q.to(dq.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), d_own_k, d_own_v


# One opaque operator for each direction: torch.compile sees no data-dependent loop, eager autograd no graph of chunks.
_block_attention = torch.library.custom_op("deepspec::block_attention", _forward, mutates_args=())
_block_attention_backward = torch.library.custom_op("deepspec::block_attention_backward", _backward, mutates_args=())


@_block_attention.register_fake
def _(q, k, v, own_k, own_v, first_BNG, end_BN):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@_block_attention_backward.register_fake
def _(grad, out, lse, q, k, v, own_k, own_v, first_BNG, end_BN):
    return (
        torch.empty_like(q),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        torch.empty_like(own_k),
        torch.empty_like(own_v),
    )


def _remember(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx, grad, _):
    *inputs, out, lse = ctx.saved_tensors
    return (*_block_attention_backward(grad, out, lse, *inputs), None, None)


_block_attention.register_autograd(_gradients, setup_context=_remember)
