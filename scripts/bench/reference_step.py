"""An independent eager DSpark training step for scripts/bench/train_step.py: full logits, dense masks.

Full logits of every (anchor, offset), the target's softmax per (anchor, offset), attention over the joined keys of the
context and of all blocks under a dense mask. It shares no code with deepspec, only the names of its weights, so that
both can start from the same ones and must give the same loss. Two manners: "eager" as public trainers are written
(attention spelled out; total variation and acceptance are functions of logits that take their own softmaxes), and
"lean" (torch's attention kernel, every softmax taken once), the least that eager code can do.
Shapes: B rows, S context tokens, N anchors, G block size, Q = N·G, T = S + Q keys, H/K heads, C head dim, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """What the weights do not tell."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    block_size: int
    mask_token: int
    decay: float = 4.0


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x_BTHC: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    """Rotary embedding, half-split layout."""
    half = x_BTHC.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions_BT[:, :, None, None] * frequencies
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    first, second = x_BTHC.chunk(2, -1)
    return x_BTHC * cos + torch.cat([-second, first], -1) * sin


def eager_attention(q_BQHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, mask_B1QT: Tensor) -> Tensor:
    """softmax(q kᵀ / √C + mask) v with repeated key-value heads, [B, Q, H, C]."""
    groups = q_BQHC.shape[2] // k_BTKC.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BQHC, k_BTKC, v_BTKC))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores_BHQT = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    scores_BHQT = scores_BHQT.masked_fill(~mask_B1QT, -torch.inf)
    return (torch.softmax(scores_BHQT, -1) @ v).transpose(1, 2)


def sdpa_attention(q_BQHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, mask_B1QT: Tensor) -> Tensor:
    """The same through torch's kernel, the mask still dense."""
    q, k, v = (x.transpose(1, 2) for x in (q_BQHC, k_BTKC, v_BTKC))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1QT, enable_gqa=True).transpose(1, 2)


ATTENTION = {"eager": eager_attention, "lean": sdpa_attention}


def dense_mask(segments_BS: Tensor, anchors_BN: Tensor, g: int) -> Tensor:
    """Visible keys [B, 1, Q, T]: own document strictly before the anchor, and the own block."""
    rows, length = segments_BS.shape
    blocks = anchors_BN.shape[1]
    at_BQ = anchors_BN.clamp(min=0).repeat_interleave(g, 1)
    same = segments_BS[:, None, :] == segments_BS.gather(1, at_BQ)[:, :, None]
    context = same & (torch.arange(length) < at_BQ[:, :, None])
    block_Q = torch.arange(blocks).repeat_interleave(g)
    own = (block_Q[:, None] == block_Q).expand(rows, -1, -1)
    return torch.cat([context, own], 2)[:, None]


def backbone(weights: dict[str, Tensor], shape: Shape, embed_VD: Tensor, batch, attention) -> Tensor:
    """Hidden states [B, Q, D] of all blocks after the final norm."""
    g, (rows, blocks) = shape.block_size, batch.anchors_BN.shape
    at_BN = batch.anchors_BN.clamp(min=0)
    tokens_BNG = torch.full((rows, blocks, g), shape.mask_token)
    tokens_BNG[:, :, 0] = batch.tokens_BS.gather(1, at_BN)
    x = embed_VD[tokens_BNG.flatten(1)]
    positions_BQ = (batch.positions_BS.gather(1, at_BN)[:, :, None] + torch.arange(g)).flatten(1)
    positions_BT = torch.cat([batch.positions_BS, positions_BQ], 1)
    mask = dense_mask(batch.segments_BS, batch.anchors_BN, g)
    context = rms_norm(batch.taps_BSF @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    for layer in range(shape.layers):
        w = {n.removeprefix(f"layers.{layer}."): v for n, v in weights.items() if n.startswith(f"layers.{layer}.")}
        normed = rms_norm(x, w["input_layernorm.weight"])
        both = torch.cat([context, normed], 1)
        q, k, v = (
            (states @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, shape.head_dim))
            for name, states in (("q", normed), ("k", both), ("v", both))
        )
        q = rotate(rms_norm(q, w["self_attn.q_norm.weight"]), positions_BQ, shape.rope_theta)
        k = rotate(rms_norm(k, w["self_attn.k_norm.weight"]), positions_BT, shape.rope_theta)
        x = x + attention(q, k, v, mask).flatten(2) @ w["self_attn.o_proj.weight"].T
        normed = rms_norm(x, w["post_attention_layernorm.weight"])
        gated = F.silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
        x = x + gated @ w["mlp.down_proj.weight"].T
    return rms_norm(x, weights["norm.weight"])


def labels(batch, g: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(label tokens, previous tokens, last-state rows, weights-to-be mask), [B, N, G] each."""
    length = batch.tokens_BS.shape[1]
    at = batch.anchors_BN.clamp(min=0)[:, :, None] + torch.arange(1, g + 1)
    inside = (at < length) & (batch.anchors_BN >= 0)[:, :, None]
    at = at.clamp(max=length - 1)

    def pick(values_BS: Tensor, where: Tensor) -> Tensor:
        return values_BS.gather(1, where.flatten(1)).view(where.shape)

    home = pick(batch.segments_BS, batch.anchors_BN.clamp(min=0)[:, :, None])
    good = inside & pick(batch.supervised_BS, at) & (pick(batch.segments_BS, at) == home)
    kept = good.int().cumprod(-1).bool()
    return pick(batch.tokens_BS, at), pick(batch.tokens_BS, at - 1), pick(batch.last_row_BS, at - 1), kept


def total_variation(logits: Tensor, target: Tensor) -> Tensor:
    """‖q − p‖₁ over the last dimension."""
    return (torch.softmax(logits, -1) - torch.softmax(target, -1)).abs().sum(-1)


def loss_of(
    weights: dict[str, Tensor], shape: Shape, head_VD: Tensor, hidden_BQD: Tensor, batch, manner: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """0.1 CE + 0.9 ‖q − p‖₁ + BCE(c, 1 − ½‖q − p‖₁), divided by Σw of this batch; and the metrics of a step."""
    g = shape.block_size
    hidden = hidden_BQD.unflatten(1, (-1, g))
    label, previous, row, kept = labels(batch, g)
    before = weights["markov_w1.weight"][previous]
    logits = hidden @ head_VD.T + before @ weights["markov_w2.weight"].T
    target = batch.last_LD[row.clamp(min=0)] @ head_VD.T
    w = kept * torch.exp(-torch.arange(g, dtype=torch.float32) / shape.decay)
    distance = total_variation(logits, target)
    ce = F.cross_entropy(logits.flatten(0, 2), label.flatten(), reduction="none").view_as(w)
    with torch.no_grad():
        accept = 1 - (distance if manner == "lean" else total_variation(logits, target)) / 2
        top1 = (logits.argmax(-1) == target.argmax(-1)) * kept
    features = torch.cat([hidden, before], -1)
    confidence = (features @ weights["proj.weight"].T).squeeze(-1) + weights["proj.bias"]
    bce = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    metrics = {"acceptance": (accept * kept).sum((0, 1)), "top1": top1.sum(), "count": kept.sum()}
    return (w * (0.1 * ce + 0.9 * distance + bce)).sum() / w.sum(), metrics
