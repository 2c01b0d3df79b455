import pytest
import torch

from deepspec.models import drafter as drafters
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.warm_start import WarmStartError, source_layers, warm_start
from tests.tiny import tiny_target


def test_layers_follow_the_deepest_tap():
    assert source_layers((1, 8, 14, 21, 27), 2, 30) == [28, 29]
    assert source_layers((1, 8, 14, 21, 27), 5, 30) == [25, 26, 27, 28, 29]
    assert source_layers((0, 1), 1, 4) == [2]


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_first_layer_sees_the_target_layers_own_keys_and_values(tmp_path, family):
    target = tiny_target(family)
    with torch.no_grad():
        for layer in target.layers:  # random models have neutral norms, which would hide a missing fold
            layer.input_layernorm.weight.uniform_(0.5, 2.0)
    target.model.save_pretrained(tmp_path)
    taps = (0, 1)
    drafter = drafters.build(DrafterConfig(kind="dflash", layers=1), target.config, FrozenHead.of(target), taps)
    assert warm_start(drafter, str(tmp_path)) == [2]

    tokens = torch.arange(12).remainder(target.vocab_size)[None]
    positions = torch.arange(12)[None]
    seen = {}
    layer = target.layers[2]
    hooks = [
        target.layers[tap].register_forward_hook(
            lambda _m, _i, out, tap=tap: seen.__setitem__(tap, out[0] if isinstance(out, tuple) else out)
        )
        for tap in taps
    ]
    hooks.append(layer.self_attn.v_proj.register_forward_hook(lambda _m, _i, out: seen.__setitem__("v", out)))
    with torch.no_grad():
        target.model(tokens)
        for hook in hooks:
            hook.remove()
        taps_BSF = torch.cat([seen[tap] for tap in taps], -1)
        keys, values = drafter.backbone.context(taps_BSF, positions)[0]
    torch.testing.assert_close(values.transpose(1, 2).flatten(2), seen["v"], rtol=1e-4, atol=1e-5)
    if family == "qwen3":  # the target has key norms too, so the keys agree as well
        with torch.no_grad():
            normed = layer.self_attn.k_proj(layer.input_layernorm(taps_BSF[..., -target.hidden_size :]))
            heads = layer.self_attn.k_norm(normed.unflatten(-1, (-1, layer.self_attn.head_dim)))
            cos, sin = target.decoder.rotary_emb(normed, positions)
            rotated = (
                heads * cos[:, :, None]
                + torch.cat([-heads[..., heads.shape[-1] // 2 :], heads[..., : heads.shape[-1] // 2]], -1)
                * sin[:, :, None]
            )
        torch.testing.assert_close(keys.transpose(1, 2), rotated, rtol=1e-4, atol=1e-5)


def test_eagle3_and_gemma_are_refused(tmp_path):
    for family, kind in (("qwen3", "eagle3"), ("gemma3", "dflash")):
        target = tiny_target(family)
        drafter = drafters.build(DrafterConfig(kind=kind, layers=1), target.config, FrozenHead.of(target), (0, 1))
        with pytest.raises(WarmStartError, match=r"train\.warm_start=false"):
            warm_start(drafter, str(tmp_path))
