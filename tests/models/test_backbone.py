"""Draft layers against the transformers layers they are made of, and the backbone's context."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from deepspec.models.backbone import Backbone, DraftLayer, Rotary, layer_style
from deepspec.models.draft_config import draft_config, style_of
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.masks import Blocks, training_blocks
from tests.models.drafting import TAPS, WIDTH, batch, drafter, shake
from tests.tiny import VOCAB, tiny_config

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
CASES = {
    "qwen3": (Qwen3DecoderLayer, "qwen3", {}),
    "llama3 rope": (Qwen3DecoderLayer, "llama_rope3", {}),
    "yarn": (Qwen3DecoderLayer, "qwen3", dict(rope_parameters=YARN)),
    "gemma3": (Gemma3DecoderLayer, "gemma3", {}),
    "gemma4": (Gemma4TextDecoderLayer, "gemma4", {}),
    "gemma4 keys are values": (Gemma4TextDecoderLayer, "gemma4", dict(attention_k_eq_v=True)),
}


def config_of(family, overrides, **options):
    cfg = DrafterConfig(kind="dflash", layers=2, block_size=4, **options)
    config = draft_config(cfg, tiny_config(family, **overrides), TAPS, VOCAB)
    config._attn_implementation = "eager"
    return config


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_layer_without_context_is_the_family_layer(name):
    """One block over a whole sequence and no context: the family's own decoder layer, attending both ways."""
    layer_class, family, overrides = CASES[name]
    config = config_of(family, overrides)
    style = layer_style(style_of(config))
    theirs = shake(layer_class(config, 0).eval())
    mine = DraftLayer(config, style).eval()
    mine.load_state_dict(theirs.state_dict())
    x_BTD = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))
    positions_BT = torch.arange(6).expand(2, -1) + torch.tensor([[3], [90]])
    rope = Rotary(config, style)(x_BTD, positions_BT)
    mask = torch.zeros(2, 1, 6, 6)
    extra = {"shared_kv_states": {}} if family == "gemma4" else {}
    expected = theirs(x_BTD, position_embeddings=rope, attention_mask=mask, **extra)
    zero = torch.zeros(2, 1, dtype=torch.long)
    attention = mine.self_attn
    empty = torch.zeros(2, attention.kv_heads, 0, attention.head_dim)
    out = mine(x_BTD, rope, (empty, empty), Blocks(zero, zero, queries=6, own=6))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_context_is_projected_without_a_layer_norm():
    """K, V of the context come from hidden_norm(fc(taps)) alone (DFlash, arXiv 2602.06036).

    The layer's input norm must not matter.
    """
    backbone = shake(Backbone(config_of("qwen3", {}), len(TAPS)))
    b = batch()
    before = backbone.context(b.taps_BSF, b.positions_BS)
    features = backbone.hidden_norm(b.taps_BSF @ backbone.fc.weight.T)
    values = features @ backbone.layers[1].self_attn.v_proj.weight.T
    torch.testing.assert_close(before[1][1].transpose(1, 2).flatten(2), values)
    for layer in backbone.layers:
        layer.input_layernorm.weight.mul_(3)
    for (k0, v0), (k1, v1) in zip(before, backbone.context(b.taps_BSF, b.positions_BS), strict=True):
        assert torch.equal(k0, k1)
        assert torch.equal(v0, v1)


@torch.no_grad()
def test_only_relative_positions_matter():
    backbone = shake(Backbone(config_of("qwen3", {}), len(TAPS)))
    b = batch()
    blocks = training_blocks(b.segments_BS, b.anchors_BN, 4)
    x_BQD = torch.randn(3, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    at_BQ = (b.positions_BS.gather(1, b.anchors_BN.clamp(min=0))[..., None] + torch.arange(4)).flatten(1)
    near = backbone(x_BQD, at_BQ, backbone.context(b.taps_BSF, b.positions_BS), blocks)
    far = backbone(x_BQD, at_BQ + 200, backbone.context(b.taps_BSF, b.positions_BS + 200), blocks)
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)
    moved = backbone(x_BQD, at_BQ + 3, backbone.context(b.taps_BSF, b.positions_BS), blocks)
    assert not torch.allclose(near, moved, atol=1e-3)


def test_tensor_names_are_the_published_ones():
    names = set(Backbone(config_of("qwen3", {}), len(TAPS)).state_dict())
    layer = {f"self_attn.{n}_proj.weight" for n in "qkvo"} | {f"self_attn.{n}_norm.weight" for n in "qk"}
    layer |= {f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert names == expected | {f"layers.{i}.{name}" for i in range(2) for name in layer}


def test_training_step_compiles_without_graph_breaks():
    model, reference, b = drafter(markov_head="rnn"), drafter(markov_head="rnn"), batch()

    def loss(module, run):
        out = run(b)
        total = out.hidden_BNGD.square().mean() + out.markov_BNGR.sum() + out.confidence_logits_BNG.sum()
        total.backward()
        return [parameter.grad for parameter in module.parameters()]

    compiled = torch.compile(model.training_forward, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(loss(model, compiled), loss(reference, reference.training_forward), strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
