"""Two-part softmax of block attention: context keys by interval, own-block keys by block, one normaliser.

A query of block n sees an interval of context keys and all keys of its own block, and no other block's:

                 context keys (S)              own keys (J)
                 lo   clear_from  clear_to  hi
    query 0      · · ░ █ █ █ █ █ █ █ · · ·     █ █ █ █
    query 1      · · · ░ █ █ █ █ █ █ · · ·     █ █ █ █        █ visible to every query of the chunk
    query 2      · · · · █ █ █ █ █ █ ░ · ·     █ █ █ █        ░ visible to some: needs a mask
                       └ no mask ┘                            · never visible: not computed outside [lo, hi)

Forward and backward walk over chunks of blocks and keep only what one chunk needs. Memory is therefore bounded, and
the cost is linear in the number of blocks and in the visible context. The scores of both parts are never concatenated:
each part is exponentiated against the common maximum, and the two sums are added.

Shapes: B rows, K key-value heads, E = B·K, N blocks, r = H/K query heads of a key-value head, G queries of a block,
C head dimension, S context keys, s context keys of a chunk, J own keys of a block. Queries are packed as
[E, N, r·G, C], so that the keys of a group of heads are never copied.
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
    rows, _, heads, dim = q_BQHC.shape
    kv_heads = k_BKSC.shape[1]
    groups = heads // kv_heads
    count, queries, own = blocks.count, blocks.queries, blocks.own

    # Query heads of one key-value head become further queries of that head.
    q_BNGKrC = q_BQHC.view(rows, count, queries, kv_heads, groups, dim)
    q_BKNrGC = (q_BNGKrC * scale).permute(0, 3, 1, 4, 2, 5)
    q_ENQC = q_BKNrGC.reshape(rows * kv_heads, count, groups * queries, dim)
    own_k_ENJC = own_k_BOKC.view(rows, count, own, kv_heads, dim).permute(0, 3, 1, 2, 4).flatten(0, 1)
    own_v_ENJC = own_v_BOKC.view(rows, count, own, kv_heads, dim).permute(0, 3, 1, 2, 4).flatten(0, 1)

    inputs = (q_ENQC, k_BKSC, v_BKSC, own_k_ENJC, own_v_ENJC, blocks.first_BNG(), blocks.end_BN)
    # The custom operator costs a few microseconds that a decoding step need not pay.
    differentiable = torch.is_grad_enabled() or torch.compiler.is_compiling()
    out_ENQC, _ = _block_attention(*inputs) if differentiable else _forward(*inputs)

    out_BKNrGC = out_ENQC.view(rows, kv_heads, count, groups, queries, dim)
    return out_BKNrGC.permute(0, 2, 4, 1, 3, 5).reshape(rows, count * queries, heads, dim)


def _chunks(rows: int, per_block: int, context: int, first_BNG: Tensor, end_BN: Tensor) -> Iterator[_Chunk]:
    """Cut the work into chunks of about so many scores; ``per_block`` = K·r·G scores per context key."""
    count = end_BN.shape[1]
    budget = _CHUNK_SCORES if end_BN.device.type == "cpu" else _DEVICE_CHUNK_SCORES
    rows_per_chunk = budget // max(1, count * per_block * context)
    if rows_per_chunk:
        # Several whole rows fit: take them untrimmed, so that no bound is read back from the device.
        for row0 in range(0, rows, rows_per_chunk):
            row1 = min(rows, row0 + rows_per_chunk)
            yield _Chunk(row0, row1, n0=0, n1=count, lo=0, hi=context, clear_from=0, clear_to=0)
        return
    blocks_per_chunk = max(1, budget // (per_block * max(context, 1)))
    for row in range(rows):
        for n0 in range(0, count, blocks_per_chunk):
            n1 = min(count, n0 + blocks_per_chunk)
            first_NG = first_BNG[row, n0:n1]
            end_N = end_BN[row, n0:n1]
            # One transfer for the four bounds.
            bounds = torch.stack([first_NG.min(), end_N.max(), first_NG.max(), end_N.min()])
            lo, hi, clear_from, clear_to = bounds.tolist()
            # Empty intervals collapse to hi, so that every slice below has a length of at least 0.
            lo = min(lo, hi)
            clear_from = min(clear_from, hi)
            clear_to = max(clear_to, clear_from)
            yield _Chunk(row, row + 1, n0, n1, lo, hi, clear_from, clear_to)


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
        """Masked context scores [E, n·r·G, s] and own scores [E, n, r·G, J] of the chunk's E and n."""
        context = torch.bmm(self.q.flatten(1, 2), self.k.transpose(1, 2))
        own = torch.matmul(self.q, self.own_k.transpose(2, 3))
        chunk = self.chunk
        if chunk.clear_from < chunk.clear_to:
            # Keys in the middle are visible to all: only the two ends need a mask.
            self._hide(context, chunk.lo, chunk.clear_from)
            self._hide(context, chunk.clear_to, chunk.hi)
        else:
            self._hide(context, chunk.lo, chunk.hi)
        return context, own

    def _hide(self, scores: Tensor, start: int, stop: int) -> None:
        """Set the invisible scores of keys [start, stop) to −inf."""
        if start >= stop:
            return
        rows, count, queries = self.first_BNG.shape
        keys_S = torch.arange(start, stop, device=scores.device)
        too_early_BNGS = keys_S < self.first_BNG[..., None]
        too_late_BN1S = keys_S >= self.end_BN[:, :, None, None]
        hidden_BNGS = too_early_BNGS | too_late_BN1S
        part = scores[..., start - self.chunk.lo : stop - self.chunk.lo]
        # A view as [rows, K, n, r, G, keys]: the mask is the same for all heads.
        by_head = part.unflatten(0, (rows, self.kv_heads)).unflatten(2, (count, -1, queries))
        by_head.masked_fill_(hidden_BNGS[:, None, :, None], float("-inf"))


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
        context_ENQs = context.unflatten(1, by_block)  # a view: the in-place steps below change ``context``

        peak = _peak(context_ENQs, own)
        context_ENQs.sub_(peak).exp_()
        own.sub_(peak).exp_()

        total = context_ENQs.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
        context_value = torch.bmm(context, work.v).unflatten(1, by_block)
        own_value = torch.matmul(own, work.own_v)
        out[work.rows, work.blocks] = ((context_value + own_value) / total).to(out.dtype)
        lse[work.rows, work.blocks] = (peak + total.log()).squeeze(-1)
    return out, lse


def _peak(context: Tensor, own: Tensor) -> Tensor:
    """Largest score of each query over both parts, either of which may have no keys."""
    peaks = [part.amax(-1, keepdim=True) for part in (context, own) if part.shape[-1]]
    if len(peaks) == 1:
        return peaks[0]
    return torch.maximum(*peaks)


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
    """Gradients of q, k, v, own_k and own_v.

    A chunk's weights are recomputed from the stored log-sum-exp: P = exp(S − lse). With dP = dO Vᵀ, the gradient of
    the scores is dS = P ∘ (dP − ⟨dO, O⟩), as in FlashAttention (arXiv 2205.14135, appendix B.2).
    """
    dq = torch.empty_like(q)
    d_own_k = torch.empty_like(own_k)
    d_own_v = torch.empty_like(own_v)
    # Several chunks add to the gradient of one context key: sum them in the softmax's dtype.
    dk = torch.zeros(k.shape, dtype=lse.dtype, device=k.device)
    dv = torch.zeros_like(dk)
    dk_ESC = dk.flatten(0, 1)
    dv_ESC = dv.flatten(0, 1)
    for chunk in _chunks(k.shape[0], k.shape[1] * q.shape[2], k.shape[2], first_BNG, end_BN):
        work = _Work(chunk, q, k, v, own_k, own_v, first_BNG, end_BN)
        at = (work.rows, work.blocks)
        d_out = grad[at].to(work.dtype)
        inner = (d_out * out[at]).sum(-1, keepdim=True)  # ⟨dO, O⟩
        flat_d_out = d_out.flatten(1, 2)

        # P, in place of the scores.
        context, own = work.scores()
        by_block = own.shape[1:3]
        shift = lse[at][..., None]
        context.unflatten(1, by_block).sub_(shift).exp_()
        own.sub_(shift).exp_()

        # dV = Pᵀ dO
        dv_ESC[work.rows, work.keys].baddbmm_(context.transpose(1, 2), flat_d_out)
        d_own_v[at] = torch.matmul(own.transpose(2, 3), d_out).to(d_own_v.dtype)

        # dS = P ∘ (dP − ⟨dO, O⟩)
        d_context = torch.bmm(flat_d_out, work.v.transpose(1, 2))
        d_context.unflatten(1, by_block).sub_(inner)
        d_context.mul_(context)
        d_own = torch.matmul(d_out, work.own_v.transpose(2, 3))
        d_own.sub_(inner).mul_(own)

        # dK = dSᵀ Q and dQ = dS K
        dk_ESC[work.rows, work.keys].baddbmm_(d_context.transpose(1, 2), work.q.flatten(1, 2))
        d_own_k[at] = torch.matmul(d_own.transpose(2, 3), work.q).to(d_own_k.dtype)
        dq_context = torch.bmm(d_context, work.k).unflatten(1, by_block)
        dq_own = torch.matmul(d_own, work.own_k)
        dq[at] = (dq_context + dq_own).to(dq.dtype)
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
