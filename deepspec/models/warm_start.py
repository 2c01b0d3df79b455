"""Start a block drafter from its target's own late layers instead of noise. Knows no training.

At the start fc passes the deepest tap through and draft layer j is the target's layer tap + 1 + j, so layer 0's context
keys and values are exactly those the target itself would compute there; layer norms' weights are folded into the
projections, because H_ctx enters every draft layer without a norm of its own.
Shapes: D hidden size, F = M·D taps.
"""

import torch
from torch import Tensor

from deepspec.models.block_drafter import BlockDrafter
from deepspec.models.draft_config import style_of
from deepspec.models.frozen_head import PREFIXES
from deepspec.models.stored_weights import StoredWeights

_COPIED = ("self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
           "post_attention_layernorm.weight")  # fmt: skip
_PROJECTED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


class WarmStartError(ValueError):
    """A drafter whose layers are not its target's, or a target whose layers cannot be found."""


def source_layers(taps: tuple[int, ...], draft_layers: int, target_layers: int) -> list[int]:
    """The target layers that follow the deepest tap, or the last ones when fewer follow it."""
    first = min(taps[-1] + 1, target_layers - draft_layers)
    return list(range(first, first + draft_layers))


@torch.no_grad()
def warm_start(drafter: object, path: str, revision: str | None = None) -> list[int]:
    """Copy the layers in place; returns which. ``path`` is the target's folder or hub id, with safetensors.

    Raises WarmStartError for EAGLE-3 and for families whose layers are not Llama-like.
    """
    if not isinstance(drafter, BlockDrafter) or style_of(drafter.hf_config) != "qwen3":
        raise WarmStartError(
            "train.warm_start=true needs a block drafter (dspark, dflash) of a Llama- or Qwen-like dense target: "
            "set train.warm_start=false"
        )
    stored = StoredWeights(path, revision)
    backbone, width = drafter.backbone, drafter.hf_config.hidden_size
    layers = source_layers(drafter.taps, len(backbone.layers), drafter.hf_config.num_target_layers)

    def read(name: str, required: bool = True) -> Tensor | None:
        found = stored.first(prefix + name for prefix in PREFIXES)
        if found is None and required:
            raise WarmStartError(f"{path} has no tensor {name}: set train.warm_start=false for this target")
        return None if found is None else found.float()

    backbone.fc.weight.zero_()
    backbone.fc.weight[:, -width:] = torch.eye(width)
    final = read("norm.weight")
    assert final is not None
    _copy(backbone.norm.weight, final, path)
    for layer, number in zip(backbone.layers, layers, strict=True):
        names = dict(layer.named_parameters())
        norm_D = read(f"layers.{number}.input_layernorm.weight")
        assert norm_D is not None
        for name in _PROJECTED:
            weight = read(f"layers.{number}.{name}.weight")
            assert weight is not None
            _copy(names[f"{name}.weight"], weight * norm_D, path)
            bias = read(f"layers.{number}.{name}.bias", required=False)
            if bias is not None and f"{name}.bias" in names:
                _copy(names[f"{name}.bias"], bias, path)
        for name in (*_COPIED, *_HEAD_NORMS):
            weight = read(f"layers.{number}.{name}", required=name in _COPIED)
            if weight is not None:
                _copy(names[name], weight, path)
    return layers


def _copy(parameter: object, value: Tensor, path: str) -> None:
    assert isinstance(parameter, Tensor)
    if parameter.shape != value.shape:
        raise WarmStartError(
            f"{path}: a target layer has a weight of shape {list(value.shape)} where the drafter's has "
            f"{list(parameter.shape)}: set train.warm_start=false"
        )
    parameter.copy_(value)
