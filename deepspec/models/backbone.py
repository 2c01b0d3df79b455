"""Draft layers and backbone of the block drafters (DFlash, arXiv 2602.06036, section 3).

The target's hidden states enter every draft layer as extra keys and values:

    taps [B, S, F] → fc → hidden_norm → H_ctx ──┬── layer 0: k_proj, v_proj ──▶ context keys and values of layer 0
                                                ├── layer 1: k_proj, v_proj ──▶ context keys and values of layer 1
                                                └── …
    block inputs [B, Q, D] → layer 0 → layer 1 → … → norm → hidden states for the head
                             each layer attends to its context keys and to the keys of the query's own block

Norms, MLPs and rotary embeddings are those of the target's family, borrowed from transformers; only the attention over
injected context is new. One forward trains on N anchors and drafts one block.

Shapes: B rows, S context tokens, Q = N·G draft queries, D hidden size, F = M·D taps, H query heads, K key-value heads,
C head dimension.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from deepspec.models.attention import attend
from deepspec.models.draft_config import style_of
from deepspec.models.masks import Blocks

Rope = tuple[Tensor, Tensor]
KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Style:
    """What a family's decoder layer is made of. A sandwich layer also norms what it adds to the residual."""

    norm: Callable[..., nn.Module]
    mlp: Callable[[Any], nn.Module]
    rotary: Callable[[Any], nn.Module]
    sandwich: bool = False
    by_layer_type: bool = False  # rotary embedding takes the layer type
    value_norm: bool = False  # values are normed without a weight
    scalar: bool = False  # the layer's output is multiplied by a stored constant


@functools.cache
def layer_style(name: str) -> Style:
    """The row of a style name (draft_config.style_of); its modelling file is imported here, and only its own."""
    if name == "gemma3":
        from transformers.models.gemma3 import modeling_gemma3 as gemma3

        classes = (gemma3.Gemma3RMSNorm, gemma3.Gemma3MLP, gemma3.Gemma3RotaryEmbedding)
        return Style(*classes, sandwich=True, by_layer_type=True)
    if name == "gemma4":
        from transformers.models.gemma4 import modeling_gemma4 as gemma4

        return Style(
            gemma4.Gemma4RMSNorm,
            lambda config: gemma4.Gemma4TextMLP(config, 0),
            gemma4.Gemma4TextRotaryEmbedding,
            sandwich=True,
            by_layer_type=True,
            value_norm=True,
            scalar=True,
        )
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    return Style(qwen3.Qwen3RMSNorm, qwen3.Qwen3MLP, qwen3.Qwen3RotaryEmbedding)


class Rotary:
    """cos and sin at absolute positions, scaling inherited from the target. Holds its frequencies outside the module
    tree, so that converting a drafter to bfloat16 never rounds them."""

    def __init__(self, config: PretrainedConfig, style: Style) -> None:
        self._module = style.rotary(config)
        self._arguments = (config.layer_types[0],) if style.by_layer_type else ()

    @torch.no_grad()
    def __call__(self, like: Tensor, positions_BT: Tensor) -> Rope:
        """[B, T, C] each, in the dtype and on the device of ``like``."""
        if next(self._module.buffers()).device != like.device:
            self._module.to(like.device)  # once, not a copy at every call
        return self._module(like, positions_BT, *self._arguments)


def rotate(x_BTHC: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of all heads."""
    cos, sin = (part.unsqueeze(2) for part in rope)
    first, second = x_BTHC.chunk(2, -1)
    return x_BTHC * cos + torch.cat([-second, first], -1) * sin


class DraftAttention(nn.Module):
    """Projections, norms and rotary of one layer; ``inputs`` is the width of what it projects (2·D in EAGLE-3)."""

    def __init__(self, config: Any, style: Style, inputs: int, qk_norm: bool = True) -> None:
        super().__init__()
        layer = config.per_layer_config[0] if style.scalar else config
        self.head_dim = layer.head_dim
        self.kv_heads = layer.num_key_value_heads
        self.heads = config.num_attention_heads
        self.scale = _attention_scale(config, style, self.head_dim)

        bias = bool(config.attention_bias)
        query_width = self.heads * self.head_dim
        key_width = self.kv_heads * self.head_dim
        # Gemma 4's full-attention layers use the keys as values.
        keys_are_values = style.scalar and config.attention_k_eq_v and config.layer_types[0] == "full_attention"
        self.q_proj = nn.Linear(inputs, query_width, bias=bias)
        self.k_proj = nn.Linear(inputs, key_width, bias=bias)
        self.v_proj = None if keys_are_values else nn.Linear(inputs, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=bias)

        eps = config.rms_norm_eps
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.v_norm: nn.Module = nn.Identity()
        if qk_norm:
            self.q_norm = style.norm(self.head_dim, eps=eps)
            self.k_norm = style.norm(self.head_dim, eps=eps)
        if style.value_norm:
            self.v_norm = style.norm(self.head_dim, eps=eps, with_scale=False)

    def queries(self, x_BTE: Tensor, rope: Rope) -> Tensor:
        """Queries [B, T, H, C] at the positions of ``rope``."""
        queries_BTHC = self.q_proj(x_BTE).unflatten(-1, (self.heads, self.head_dim))
        return rotate(self.q_norm(queries_BTHC), rope)

    def keys_values(self, x_BTE: Tensor, rope: Rope) -> KeysValues:
        """Keys and values [B, T, K, C] at the positions of ``rope``."""
        shape = (self.kv_heads, self.head_dim)
        keys_BTKC = self.k_proj(x_BTE).unflatten(-1, shape)
        values_BTKC = keys_BTKC
        if self.v_proj is not None:
            values_BTKC = self.v_proj(x_BTE).unflatten(-1, shape)
        return rotate(self.k_norm(keys_BTKC), rope), self.v_norm(values_BTKC)

    def attend(self, q_BQHC: Tensor, context: KeysValues, own: KeysValues, blocks: Blocks) -> Tensor:
        """Attention over context [B, K, S, C] and own keys [B, O, K, C], projected to [B, Q, D]."""
        out_BQHC = attend(q_BQHC, *context, *own, blocks, self.scale)
        return self.o_proj(out_BQHC.flatten(2))


def _attention_scale(config: Any, style: Style, head_dim: int) -> float:
    if style.scalar:
        return 1.0
    return float(getattr(config, "query_pre_attn_scalar", None) or head_dim) ** -0.5


class DraftLayer(nn.Module):
    """One decoder layer. A fused layer (EAGLE-3) attends from [norm(embedding) ; norm(hidden)], 2·D wide."""

    def __init__(self, config: Any, style: Style, fused: bool = False, qk_norm: bool = True) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.sandwich = style.sandwich
        self.self_attn = DraftAttention(config, style, inputs=2 * width if fused else width, qk_norm=qk_norm)
        self.mlp = style.mlp(config)
        self.input_layernorm = style.norm(width, eps=eps)
        self.post_attention_layernorm = style.norm(width, eps=eps)
        if fused:
            self.hidden_norm = style.norm(width, eps=eps)
        if style.sandwich:
            self.pre_feedforward_layernorm = style.norm(width, eps=eps)
            self.post_feedforward_layernorm = style.norm(width, eps=eps)
        self.register_buffer("layer_scalar", torch.ones(1) if style.scalar else None)

    def forward(self, x_BQD: Tensor, rope: Rope, context: KeysValues, blocks: Blocks) -> Tensor:
        """Draft queries ``x_BQD`` see ``context`` keys and those of their own block."""
        attention = self.self_attn
        normed_BQD = self.input_layernorm(x_BQD)
        queries_BQHC = attention.queries(normed_BQD, rope)
        own = attention.keys_values(normed_BQD, rope)
        attended_BQD = attention.attend(queries_BQHC, context, own, blocks)
        return self.finish(x_BQD, attended_BQD)

    def fuse(self, embedded_BTD: Tensor, hidden_BTD: Tensor) -> Tensor:
        """A fused layer's attention input [norm(embedding) ; norm(hidden)], [B, T, 2·D]."""
        return torch.cat([self.input_layernorm(embedded_BTD), self.hidden_norm(hidden_BTD)], -1)

    def finish(self, residual_BQD: Tensor, attended_BQD: Tensor) -> Tensor:
        """Everything after the attention: residuals, norms, MLP."""
        if self.sandwich:
            x_BQD = residual_BQD + self.post_attention_layernorm(attended_BQD)
            mlp_BQD = self.mlp(self.pre_feedforward_layernorm(x_BQD))
            out_BQD = x_BQD + self.post_feedforward_layernorm(mlp_BQD)
        else:
            x_BQD = residual_BQD + attended_BQD
            out_BQD = x_BQD + self.mlp(self.post_attention_layernorm(x_BQD))
        if self.layer_scalar is None:
            return out_BQD
        return out_BQD * self.layer_scalar


class Backbone(nn.Module):
    """fc, its norm, the draft layers and the final norm; tensor names are those of the published checkpoints."""

    def __init__(self, config: PretrainedConfig, taps: int) -> None:
        super().__init__()
        style = layer_style(style_of(config))
        width = config.hidden_size
        self.fc = nn.Linear(taps * width, width, bias=False)
        self.hidden_norm = style.norm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, style) for _ in range(config.num_hidden_layers))
        self.norm = style.norm(width, eps=config.rms_norm_eps)
        self.rotary = Rotary(config, style)
        initialise(self, config.initializer_range)

    def context(self, taps_BSF: Tensor, positions_BS: Tensor) -> list[KeysValues]:
        """Keys and values [B, K, S, C] of every layer for target features at absolute ``positions_BS``.

        H_ctx = hidden_norm(fc(taps)) goes through each layer's own projections without a layer norm.
        """
        features_BSD = self.hidden_norm(self.fc(taps_BSF))
        rope = self.rotary(features_BSD, positions_BS)
        contexts = []
        for layer in self.layers:
            keys_BSKC, values_BSKC = layer.self_attn.keys_values(features_BSD, rope)  # type: ignore
            contexts.append((keys_BSKC.transpose(1, 2), values_BSKC.transpose(1, 2)))
        return contexts

    def forward(
        self,
        x_BQD: Tensor,
        positions_BQ: Tensor,
        contexts: Sequence[KeysValues],
        blocks: Blocks,
        recompute: bool = False,
    ) -> Tensor:
        """Hidden states [B, Q, D] after the final norm (the head's input) of block inputs at absolute positions.

        ``recompute`` keeps only the layers' inputs for backward, see ``recomputed``.
        """
        rope = self.rotary(x_BQD, positions_BQ)
        for layer, context in zip(self.layers, contexts, strict=True):
            arguments = (x_BQD, rope, context, blocks)
            x_BQD = recomputed(layer, *arguments) if recompute else layer(*arguments)
        return self.norm(x_BQD)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` whose activations are not kept but made again in backward; no randomness inside."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def initialise(module: nn.Module, std: float) -> None:
    """Linear weights from N(0, std²), biases zero; norms keep the neutral values they are built with."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
