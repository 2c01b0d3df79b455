"""Exported files under forwards written anew from what the engines document, and what a GGUF file holds."""

import json
import math

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deepspec.models.export import ExportError, export, llama_cpp
from deepspec.models.sampling import Sampling
from tests.models.drafting import TAPS, forced_proposal, samples
from tests.models.exporting import DRAFT_IDS, KINDS, saved, write_target_gguf
from tests.tiny import VOCAB, tiny_config


@pytest.fixture(scope="session")
def target_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_target_gguf(path)
    return path


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def half_split_rope(x_HC, position, theta):
    size = x_HC.shape[-1] // 2
    angle = position * theta ** -(torch.arange(size, dtype=torch.float64) / size)
    first, second = x_HC[:, :size], x_HC[:, size:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def attend(q_HC, keys, values, heads, kv):
    """One query per head over lists of keys and values [K, C]; [H·C]."""
    mixed = []
    for h in range(heads):
        group = h // (heads // kv)
        scores = torch.stack([key[group] @ q_HC[h] for key in keys]) / math.sqrt(q_HC.shape[-1])
        mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
    return torch.cat(mixed)


def published_dspark_logits(files, config, head, sample, context):
    """Greedy drafts of a DSpark file in float64, as the released layout's engines document it.

    Keys of the context are projections of hidden_norm(fc(taps)); the block [anchor, mask, …] sees it and all of itself;
    then the Markov chain runs left to right from the anchor.
    """
    w = {name: tensor.double() for name, tensor in files.items() if tensor.is_floating_point()}
    eps, theta, block = config["rms_norm_eps"], config["rope_theta"], config["block_size"]
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    features = [rms(w["fc.weight"] @ row.double(), w["hidden_norm.weight"], eps) for row in sample.taps_SF[:context]]
    inputs = [int(sample.tokens_S[context])] + [config["mask_token_id"]] * (block - 1)
    hidden = [head.embed_VD[token].double() for token in inputs]
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}.self_attn."
        normed = [rms(h, w[f"layers.{i}.input_layernorm.weight"], eps) for h in hidden]

        def key(x, position, at=at):
            return half_split_rope(
                rms((w[at + "k_proj.weight"] @ x).view(kv, size), w[at + "k_norm.weight"], eps), position, theta
            )

        seen = features + normed
        keys = [key(x, position) for position, x in enumerate(seen)]
        values = [(w[at + "v_proj.weight"] @ x).view(kv, size) for x in seen]
        for k, x in enumerate(normed):
            q = rms((w[at + "q_proj.weight"] @ x).view(heads, size), w[at + "q_norm.weight"], eps)
            mixed = attend(half_split_rope(q, context + k, theta), keys, values, heads, kv)
            hidden[k] = hidden[k] + w[at + "o_proj.weight"] @ mixed
            fed = rms(hidden[k], w[f"layers.{i}.post_attention_layernorm.weight"], eps)
            gate = torch.nn.functional.silu(w[f"layers.{i}.mlp.gate_proj.weight"] @ fed)
            hidden[k] = hidden[k] + w[f"layers.{i}.mlp.down_proj.weight"] @ (
                gate * (w[f"layers.{i}.mlp.up_proj.weight"] @ fed)
            )
    rows, confidences, previous = [], [], inputs[0]
    for h in hidden:
        h = rms(h, w["norm.weight"], eps)
        markov = w["markov_head.markov_w1.weight"][previous]
        rows.append(head.head_VD.double() @ h + w["markov_head.markov_w2.weight"] @ markov)
        if config["enable_confidence_head"]:
            logit = w["confidence_head.proj.weight"] @ torch.cat([h, markov]) + w["confidence_head.proj.bias"]
            confidences.append(logit.sigmoid())
        previous = int(rows[-1].argmax())
    return torch.stack(rows), torch.cat(confidences) if confidences else None


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_dspark_forward_on_the_exported_file(engine, kind, tmp_path):
    model, source = saved(tmp_path / "drafter", torch.float32, **KINDS[kind])
    export(source, engine, tmp_path / "out")
    files = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    sample = samples()[0]
    expected, confidence = published_dspark_logits(files, config, model.head, sample, context=9)
    state = model.start(1, 32)
    state.add(1)
    model.extend(state, sample.tokens_S[None, :10], sample.taps_SF[None, :9], [9])
    proposal = model.propose(state, sample.tokens_S[9:10], Sampling(), torch.zeros(1, 4), 4)
    assert proposal.tokens_BG[0].tolist() == expected.argmax(-1).tolist()
    rows, _ = forced_proposal(model, state, sample.tokens_S[9:10], expected.argmax(-1))
    torch.testing.assert_close(rows.double(), expected, rtol=1e-3, atol=1e-3)
    if kind == "dspark":
        torch.testing.assert_close(proposal.confidence_BG[0].double(), confidence, rtol=1e-3, atol=1e-4)


def published_eagle3_logits(files, config, head, sample, context, length):
    """Greedy drafts of a published EAGLE-3 file, token by token in float64: what its engines document.

    Input of position t is token t + 1 and, first, fc of the taps of t; later the layer's own output before the norm.
    """
    w = {name: tensor.double() for name, tensor in files.items() if tensor.is_floating_point()}
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    at = "midlayer."
    keys, values, tokens, out, hidden = [], [], sample.tokens_S.tolist()[: context + 1], [], None
    offsets = files.get("d2t")
    for position in range(context + length - 1):
        if position < context:
            hidden = w["fc.weight"] @ sample.taps_SF[position].double()
        embedded = rms(head.embed_VD[tokens[position + 1]].double(), w[at + "input_layernorm.weight"], eps)
        x = torch.cat([embedded, rms(hidden, w[at + "hidden_norm.weight"], eps)])
        q, k, v = (w[at + f"self_attn.{n}_proj.weight"] @ x for n in "qkv")
        keys.append(half_split_rope(k.view(kv, size), position, theta))
        values.append(v.view(kv, size))
        q = half_split_rope(q.view(heads, size), position, theta)
        mixed = attend(q, keys, values, heads, kv)
        hidden = hidden + w[at + "self_attn.o_proj.weight"] @ mixed
        fed = rms(hidden, w[at + "post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(w[at + "mlp.gate_proj.weight"] @ fed)
        hidden = hidden + w[at + "mlp.down_proj.weight"] @ (gate * (w[at + "mlp.up_proj.weight"] @ fed))
        if position >= context - 1:
            row = (w["lm_head.weight"] if offsets is not None else head.head_VD.double()) @ rms(
                hidden, w["norm.weight"], eps
            )
            out.append(row)
            best = int(row.argmax())
            tokens.append(best if offsets is None else best + int(offsets[best]))
    return torch.stack(out), tokens[context + 1 :]


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 reduced"])
def test_published_eagle3_forward_on_the_exported_file(kind, tmp_path):
    model, source = saved(tmp_path / "drafter", torch.float32, **KINDS[kind])
    export(source, "vllm", tmp_path / "out")
    files = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    sample = samples()[0]
    expected, drafted = published_eagle3_logits(files, config, model.head, sample, context=9, length=4)
    state = model.start(1, 32)
    state.add(1)
    model.extend(state, sample.tokens_S[None, :10], sample.taps_SF[None, :9], [9])
    proposal = model.propose(state, sample.tokens_S[9:10], Sampling(), torch.zeros(1, 4), 4)
    assert proposal.tokens_BG[0].tolist() == drafted
    rows, _ = forced_proposal(model, state, sample.tokens_S[9:10], torch.tensor(drafted))
    torch.testing.assert_close(rows.double(), expected, rtol=1e-3, atol=1e-3)


# --- GGUF ----------------------------------------------------------------------------------------------------------


def read_gguf(path):
    """Tensors in float32 (ids as they are), and fields."""
    reader, out = gguf.GGUFReader(path), {}
    for tensor in reader.tensors:
        data = tensor.data if tensor.tensor_type.name == "I64" else gguf.dequantize(tensor.data, tensor.tensor_type)
        out[tensor.name] = torch.from_numpy(data.copy())
    return out, {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 0), ("bf16", 0), ("f16", 1e-3), ("q8_0", 2e-2)])
def test_gguf_values(kind, tolerance, tmp_path, target_gguf):
    _, source = saved(tmp_path / "drafter", confidence_with_markov=False)
    made = export(source, "gguf", tmp_path / "out", gguf_type=kind, target_gguf=target_gguf)
    tensors, fields = read_gguf(made.path)
    for ours, theirs in (
        ("fc.weight", "fc.weight"),
        ("layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"),
        ("layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ("hidden_norm.weight", "enc.output_norm.weight"),
        ("markov_head.markov_w2.weight", "markov_w2.weight"),
        ("confidence_head.proj.bias", "conf_proj.bias"),
    ):
        expected = source.tensors[ours].float()
        assert (tensors[theirs] - expected).abs().max() <= tolerance * expected.abs().max()
    wide = tensors["conf_proj.weight"]
    assert wide.shape == (1, 32 + 6)
    assert torch.equal(wide[:, :32], source.tensors["confidence_head.proj.weight"].float())
    assert not wide[:, 32:].any()
    assert fields["dflash.target_layers"] == [tap + 1 for tap in TAPS]
    assert fields["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(VOCAB)]
    assert fields["tokenizer.ggml.mask_token_id"] == source.config["mask_token_id"]
    assert "--spec-type draft-dspark --spec-draft-n-max 4" in made.command


def test_gguf_reduced_vocabulary_has_absolute_ids(tmp_path, target_gguf):
    for options in (KINDS["reduced"], KINDS["eagle3 reduced"]):
        _, source = saved(tmp_path / "drafter", **options)
        tensors, _ = read_gguf(export(source, "gguf", tmp_path / "out", target_gguf=target_gguf).path)
        assert tensors["d2t"].tolist() == DRAFT_IDS
        assert tensors["output.weight"].shape == (len(DRAFT_IDS), 32)


def test_permuted_rows_turn_half_split_rope_into_interleaved():
    """Scores of interleaved rotary on permuted projections equal half-split rotary on the original ones."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(3 * 8, 5, generator=generator), torch.randn(5, generator=generator)
    angle = 2.0 * 10000.0 ** -(torch.arange(4) / 4)
    pairs = (llama_cpp.permute(weight, 3) @ x).view(3, 4, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], -1)
    expected = half_split_rope((weight @ x).view(3, 8), 2.0, 10000.0).float()
    torch.testing.assert_close(torch.cat([turned[..., 0], turned[..., 1]], -1), expected)


def test_llama3_rope_factors_are_those_of_transformers(tmp_path):
    _, source = saved(tmp_path, family="llama_rope3")
    config = tiny_config("llama_rope3")
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(llama_cpp.rope_factors(source.config), plain / inverse)
    assert (plain / inverse)[-1] > 1


def test_gguf_needs_the_targets_tokenizer(tmp_path, target_gguf):
    _, source = saved(tmp_path / "drafter")
    with pytest.raises(ExportError, match="--target-gguf"):
        export(source, "gguf", tmp_path / "out")
    with pytest.raises(ExportError, match="does not exist"):
        export(source, "gguf", tmp_path / "out", target_gguf=tmp_path / "none.gguf")
    other = source.replaced(vocab_size=96)
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        other.tensors[name] = other.tensors[name][:96]
    with pytest.raises(ExportError, match="has 97 tokens, the drafter's vocabulary 96"):
        export(other, "gguf", tmp_path / "out", target_gguf=target_gguf)
    assert not list((tmp_path / "out").glob("*"))
