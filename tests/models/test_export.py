"""Exports of every drafter kind, engine and family: golden names, shapes and fields, and what the files compute."""

import json
import math
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deepspec.models import drafter as drafters
from deepspec.models.export import ENGINES, ExportError, RefusedError, export, imports, llama_cpp, validate
from deepspec.models.export import checkpoint as folders
from deepspec.models.export.__main__ import main
from deepspec.models.sampling import Sampling
from tests.models.drafting import TAPS, batch, drafter, forced_proposal, frozen_head, logits, samples
from tests.tiny import VOCAB, tiny_config, tiny_model

GOLDEN = Path(__file__).parent / "golden" / "export.json"
DRAFT_IDS = [token for token in range(VOCAB) if token % 3 != 1]
KINDS = {
    "dspark": dict(),
    "gated": dict(markov_head="gated"),
    "rnn": dict(markov_head="rnn", confidence_with_markov=False),
    "confidence alone": dict(markov_rank=0),
    "dflash": dict(kind="dflash"),
    "reduced": dict(draft_ids=DRAFT_IDS),
    "eagle3": dict(kind="eagle3", qk_norm=False),
    "eagle3 reduced": dict(kind="eagle3", qk_norm=False, draft_ids=DRAFT_IDS),
    "eagle3 with qk norms": dict(kind="eagle3"),
}
FAMILIES = ("qwen3", "llama_rope3", "gemma3", "gemma4")
# What the engines read of config.json.
FIELDS = (
    *("architectures", "model_type", "num_hidden_layers", "layer_types", "tie_word_embeddings", "attention_bias"),
    *("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
    *("rope_parameters", "rope_theta", "rope_scaling", "dtype", "torch_dtype", "block_size", "mask_token_id"),
    *("target_layer_ids", "num_target_layers", "sample_from_anchor", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov", "draft_vocab_size", "eagle_config", "qk_norm"),
    *("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"),
    *("target_hidden_size", "num_aux_hidden_states"),
)


def saved(folder, dtype=torch.bfloat16, **options):
    """A tiny drafter on disk as training saves it: (model, checkpoint)."""
    model = drafter(**options)
    drafters.save(model, folder, target_name="tiny", dtype=dtype)
    return model, imports.read(folder)


@pytest.fixture(scope="session")
def target_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def outputs(model, made=None):
    """The drafter's logits of a training batch."""
    with torch.no_grad():
        out = model.training_forward(batch(made, block_size=model.block_size))
        if model.config.kind == "eagle3":
            return logits(model, out.hidden_IBSD)
        return logits(model, out.hidden_BNGD, out.markov_BNGR)


def snapshot(made):
    """Names, dtypes, shapes and fields of an export, as JSON."""
    if made.path.suffix == ".gguf":
        reader = gguf.GGUFReader(made.path)
        tensors = {t.name: f"{t.tensor_type.name} {[int(n) for n in reversed(t.shape)]}" for t in reader.tensors}
        prefixes = ("dflash.", "eagle3.", "tokenizer.ggml.mask", "general.architecture", "general.file_type")
        fields = {name: f.contents() for name, f in reader.fields.items() if name.startswith(prefixes)}
        return {"tensors": tensors, "fields": fields}
    stored = load_file(made.path / "model.safetensors")
    config = json.loads((made.path / "config.json").read_text())
    tensors = {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in sorted(stored.items())}
    return {"tensors": tensors, "fields": {name: config[name] for name in FIELDS if name in config}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_golden(kind, family, tmp_path, target_gguf):
    """DEEPSPEC_WRITE_GOLDEN=1 with one process rewrites the file; read its diff."""
    _, source = saved(tmp_path / "drafter", family=family, **KINDS[kind])
    made = {}
    for engine in ENGINES:
        try:
            done = export(source, engine, tmp_path / engine, target_gguf=target_gguf)
            made[engine] = snapshot(done)
        except RefusedError as error:
            made[engine] = {"refused": sorted(f.field for f in error.findings if f.level == "error")}
            assert not (tmp_path / engine).exists()
    made = json.loads(json.dumps(made))
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("DEEPSPEC_WRITE_GOLDEN"):
        golden[f"{kind}, {family}"] = made
        lines = (f"{json.dumps(name)}: {json.dumps(golden[name], sort_keys=True)}" for name in sorted(golden))
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert made == golden[f"{kind}, {family}"]


# --- what the files compute ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["deepspec", "vllm", "sglang"])
@pytest.mark.parametrize("kind", ["dspark", "dflash", "confidence alone", "eagle3", "eagle3 reduced"])
def test_exported_files_compute_the_same(kind, engine, tmp_path):
    model, source = saved(tmp_path / "drafter", torch.float32, **KINDS[kind])
    export(source, engine, tmp_path / "out")
    folders.write(imports.read(tmp_path / "out"), tmp_path / "back")
    again = drafters.load(tmp_path / "back", model.head)
    assert torch.equal(outputs(again), outputs(model))
    assert again.block_size == model.block_size
    assert again.taps == TAPS


def test_learned_mask_becomes_a_row_of_the_embedding(tmp_path):
    mask = VOCAB - 1  # exact where no text contains the mask token
    made = samples(vocab=mask)
    for family in ("qwen3", "gemma4"):
        options = dict(family=family, learned_mask=True, markov_rank=6, mask_token_id=mask)
        model, source = saved(tmp_path / family, torch.float32, **options)
        with pytest.raises(RefusedError, match="learned"):
            export(source, "vllm", tmp_path / "no")
        export(source, "vllm", tmp_path / f"{family}-out", head=model.head)
        again = drafters.load(tmp_path / f"{family}-out", model.head)
        assert again.mask_embedding is None
        torch.testing.assert_close(outputs(again, made), outputs(model, made))
        with pytest.raises(RefusedError, match="always takes the target's embedding"):
            export(source, "sglang", tmp_path / "no", head=model.head)


def test_included_head_stands_alone(tmp_path):
    model, source = saved(tmp_path / "drafter", torch.float32)
    export(source, "vllm", tmp_path / "out", head=model.head)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], model.head.embed_VD)
    assert torch.equal(stored["lm_head.weight"], model.head.head_VD)
    assert torch.equal(outputs(drafters.load(tmp_path / "out")), outputs(model))
    with pytest.raises(ExportError, match="the target's head is 50 x 32"):
        export(source, "vllm", tmp_path / "no", head=frozen_head(vocab=50))


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def half_split_rope(x_HC, position, theta):
    size = x_HC.shape[-1] // 2
    angle = position * theta ** -(torch.arange(size, dtype=torch.float64) / size)
    first, second = x_HC[:, :size], x_HC[:, size:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


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
        mixed = []
        for h in range(heads):
            group = h // (heads // kv)
            scores = torch.stack([key[group] @ q[h] for key in keys]) / math.sqrt(size)
            mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        hidden = hidden + w[at + "self_attn.o_proj.weight"] @ torch.cat(mixed)
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


# --- the validator -------------------------------------------------------------------------------------------------

TARGET = dict(hidden_size=32, vocab_size=VOCAB, num_hidden_layers=4, rope_theta=10000.0)
# name: (kind, engine, config changes, tensor changes, keywords of validate, level, field)
WRONG = {
    "architecture": ("dspark", "vllm", dict(architectures=["DSparkModel"]), {}, {}, "error", "architectures"),
    "gemma in sglang": (
        "dspark",
        "sglang",
        dict(architectures=["Gemma4DSparkModel"]),
        {},
        {},
        "error",
        "architectures",
    ),
    "anchor": ("dspark", "vllm", dict(sample_from_anchor=False), {}, {}, "error", "sample_from_anchor"),
    "anchor unsaid": ("dspark", "vllm", dict(sample_from_anchor=None), {}, {}, "warning", "sample_from_anchor"),
    "taps descend": ("dspark", "vllm", dict(target_layer_ids=[2, 1, 0]), {}, {}, "error", "target_layer_ids"),
    "last layer": ("dspark", "vllm", dict(target_layer_ids=[0, 1, 3]), {}, {}, "error", "target_layer_ids"),
    "two taps": ("dspark", "vllm", dict(target_layer_ids=[0, 1]), {}, {}, "error", "fc.weight"),
    "aux offset": (
        *("eagle3", "vllm", dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), {}, {}, "error"),
        "eagle_aux_hidden_state_layer_ids",
    ),
    "embedding tap": ("dspark", "gguf", dict(target_layer_ids=[-1, 1, 2]), {}, {}, "warning", "target_layer_ids"),
    "padded rows": ("dspark", "vllm", dict(vocab_size=VOCAB + 7), {}, {}, "error", "markov_head.markov_w1.weight"),
    "padded target": ("dspark", "vllm", {}, {}, dict(target=TARGET | dict(vocab_size=104)), "error", "vocab_size"),
    "mask": ("dspark", "vllm", dict(mask_token_id=VOCAB), {}, {}, "error", "mask_token_id"),
    "no d2t": ("reduced", "vllm", {}, {"d2t": None}, {}, "error", "d2t"),
    "absolute d2t": ("reduced", "vllm", {}, {"d2t": torch.tensor(DRAFT_IDS)}, {}, "error", "d2t"),
    "no head": ("reduced", "vllm", {}, {"lm_head.weight": None}, {}, "error", "lm_head.weight"),
    "reduced": ("reduced", "sglang", {}, {}, {}, "error", "draft_vocab_size"),
    "gated": ("dspark", "vllm", dict(markov_head_type="gated"), {}, {}, "error", "markov_head_type"),
    "rank 0": (
        *("dflash", "sglang", dict(markov_rank=0)),
        *({"markov_head.markov_w1.weight": None, "markov_head.markov_w2.weight": None}, {}, "error", "markov_rank"),
    ),
    "confidence off": ("dspark", "vllm", dict(enable_confidence_head=False), {}, {}, "error", "enable_confidence_head"),
    "confidence width": (
        *("dspark", "vllm", dict(confidence_head_with_markov=False), {}, {}, "error"),
        "confidence_head.proj.weight",
    ),
    "confidence alone": ("confidence alone", "gguf", {}, {}, {}, "warning", "confidence_head.proj.weight"),
    "temperatures": ("dspark", "vllm", dict(deepspec={"temperatures": [1.0]}), {}, {}, "warning", "temperatures"),
    "sliding": ("dspark", "vllm", dict(layer_types=["sliding_attention"] * 2), {}, {}, "error", "layer_types"),
    "window": ("dspark", "gguf", dict(deepspec={"sliding_window": 8}), {}, {}, "error", "layer_types"),
    "bias": ("dspark", "sglang", dict(attention_bias=True), {}, {}, "error", "attention_bias"),
    "qk norms": ("eagle3 with qk norms", "vllm", {}, {}, {}, "error", "qk_norm"),
    "mask tensor": ("dspark", "vllm", {}, {"mask_embedding": torch.zeros(32)}, {}, "error", "mask_embedding"),
    "own embedding": (
        "dspark",
        "sglang",
        dict(deepspec={"own_embedding": True}),
        {},
        {},
        "error",
        "embed_tokens.weight",
    ),
    "own embedding, gguf": (
        "dspark",
        "gguf",
        dict(deepspec={"own_embedding": True}),
        {},
        {},
        "error",
        "lm_head.weight",
    ),
    "rope type": (
        "dspark",
        "gguf",
        dict(rope_parameters=dict(rope_type="longrope")),
        {},
        {},
        "error",
        "rope_parameters",
    ),
    "rope": ("dspark", "vllm", {}, {}, dict(target=TARGET | dict(rope_theta=5e5)), "warning", "rope_parameters"),
    "fewer tokens": ("dspark", "vllm", {}, {}, dict(draft_tokens=3), "error", "num_speculative_tokens"),
    "more tokens": ("dspark", "gguf", {}, {}, dict(draft_tokens=5), "error", "num_speculative_tokens"),
    "more steps": ("eagle3", "vllm", {}, {}, dict(draft_tokens=9), "warning", "num_speculative_tokens"),
    "width": ("dspark", "vllm", {}, {}, dict(target=TARGET | dict(hidden_size=64)), "error", "hidden_size"),
    "depth": ("eagle3", "vllm", {}, {}, dict(target=TARGET | dict(num_hidden_layers=9)), "error", "num_target_layers"),
    "quantised": (
        *("dspark", "vllm", {}, {}, dict(target=TARGET | dict(quantization_config={"bits": 4})), "warning"),
        "target",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_validator(name, tmp_path):
    kind, engine, fields, tensors, keywords, level, field = WRONG[name]
    _, source = saved(tmp_path, **KINDS[kind])
    row = ENGINES[engine]
    right = row.layout(source)
    wrong = right.replaced(tensors, **fields)
    found = {(f.level, f.field) for f in validate(wrong, row, **{"target": TARGET, **keywords})}
    assert (level, field) in found
    if fields or tensors or keywords:  # and only because of the change
        assert (level, field) not in {(f.level, f.field) for f in validate(right, row, target=TARGET)}


def test_two_eagle3_taps_fit_vllm_alone(tmp_path):
    _, source = saved(tmp_path, **KINDS["eagle3"])
    narrow = source.replaced({"fc.weight": source.tensors["fc.weight"][:, :64]}, target_layer_ids=[0, 2])
    made = ENGINES["vllm"].layout(narrow)
    assert made.config["num_aux_hidden_states"] == 2
    assert not [f for f in validate(made, ENGINES["vllm"]) if f.level == "error"]
    for name in ("sglang", "gguf"):
        row = ENGINES[name]
        assert "exactly 3" in validate(row.layout(narrow), row)[0].message


def test_rope_of_older_files_is_found(tmp_path):
    _, source = saved(tmp_path)
    made = ENGINES["vllm"].layout(source)
    config = {name: value for name, value in made.config.items() if not name.startswith("rope")}
    bare = folders.Checkpoint(config, made.tensors)
    assert "rope_parameters" in {f.field for f in validate(bare, ENGINES["vllm"]) if f.level == "error"}
    old = bare.replaced(rope_theta=10000.0, rope_scaling=dict(type="yarn", factor=2.0))
    assert folders.rope_fields(old.config) == dict(rope_type="yarn", rope_theta=10000.0, factor=2.0)


# --- import --------------------------------------------------------------------------------------------------------


def speculators(source, kind="dspark", **changes):
    """``source`` as speculators writes it: nested layer config, aux ids k + 1, the verifier's copies beside it."""
    layer = {name: source.config[name] for name in imports._LAYER_FIELDS if name in source.config}
    config = dict(
        architectures=["DSparkDraftModel"],
        speculators_model_type=kind,
        transformer_layer_config=layer | dict(model_type="qwen3", rope_parameters=source.config["rope_parameters"]),
        aux_hidden_state_layer_ids=[tap + 1 for tap in TAPS],
        draft_vocab_size=source.draft_vocab_size,
        sample_from_anchor=True,
        **{name: source.config[name] for name in imports._HEAD_FIELDS if name in source.config},
    )
    tensors = source.tensors | {"verifier_norm.weight": torch.ones(32), "mask_embedding": torch.zeros(32)}
    return folders.Checkpoint(config | changes, tensors)


@pytest.mark.parametrize("kind", ["dspark", "gated", "rnn", "dflash", "reduced"])
def test_speculators_layout_is_imported(kind, tmp_path):
    model, source = saved(tmp_path / "drafter", torch.float32, **KINDS[kind])
    folders.write(speculators(source, "dflash" if kind == "dflash" else "dspark"), tmp_path / "theirs")
    assert main(["--drafter", str(tmp_path / "theirs"), "--to", "deepspec", "--output", str(tmp_path / "ours")]) == 0
    again = drafters.load(tmp_path / "ours", model.head)
    assert again.taps == TAPS
    assert torch.equal(outputs(again), outputs(model))
    assert {k: v.tolist() for k, v in load_file(tmp_path / "ours" / "model.safetensors").items()} == {
        k: v.tolist() for k, v in source.tensors.items()
    }


def test_speculators_eagle3(tmp_path):
    model, source = saved(tmp_path / "drafter", torch.float32, **KINDS["eagle3 reduced"])
    made = speculators(
        source, "eagle3", eagle_aux_hidden_state_layer_ids=[1, 2, 3], norm_before_residual=False, block_size=4
    )
    folders.write(made, tmp_path / "theirs")
    folders.write(imports.read(tmp_path / "theirs"), tmp_path / "ours")
    assert torch.equal(outputs(drafters.load(tmp_path / "ours", model.head)), outputs(model))


def zlab(source, **changes):
    nested = dict(mask_token_id=source.config["mask_token_id"], target_layer_ids=list(TAPS))
    fields = {
        name: source.config[name] for name in (*imports._LAYER_FIELDS, "rope_parameters") if name in source.config
    }
    config = fields | dict(architectures=["DFlashDraftModel"], model_type="qwen3", block_size=4, dflash_config=nested)
    nested |= changes
    return folders.Checkpoint(config, source.tensors)


def test_dflash_layout(tmp_path):
    model, source = saved(tmp_path / "drafter", torch.float32, kind="dflash")
    folders.write(zlab(source, sample_from_anchor=True), tmp_path / "same")
    folders.write(imports.read(tmp_path / "same"), tmp_path / "ours")
    assert torch.equal(outputs(drafters.load(tmp_path / "ours", model.head)), outputs(model))
    for name, changes in (("silent", {}), ("false", dict(sample_from_anchor=False))):
        folders.write(zlab(source, **changes), tmp_path / name)
        with pytest.raises(ExportError, match="the anchor predicts nothing"):
            imports.read(tmp_path / name)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3 reduced"])
def test_published_eagle3_round_trip_is_the_identity(kind, engine, tmp_path):
    _, source = saved(tmp_path / "drafter", **KINDS[kind])
    export(source, engine, tmp_path / "one")
    plain = json.loads((tmp_path / "one" / "config.json").read_text())
    del plain["deepspec"]  # as others publish it
    (tmp_path / "one" / "config.json").write_text(json.dumps(plain))
    with pytest.raises(ExportError, match="--taps K K K"):
        imports.read(tmp_path / "one")
    back = imports.read(tmp_path / "one", taps=TAPS)
    assert back.taps == TAPS
    export(back, engine, tmp_path / "two")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((tmp_path / "two" / "config.json").read_text())["eagle_config"] == plain["eagle_config"]


REFUSED = {
    "anchor": (dict(sample_from_anchor=False), "the anchor predicts nothing"),
    "no anchor field": (dict(sample_from_anchor=None), "absent"),
    "type": (dict(speculators_model_type="peagle"), "peagle"),
    "sliding": (
        dict(transformer_layer_config=dict(num_hidden_layers=2, layer_types=["sliding_attention"])),
        "causal inside a block",
    ),
    "bias": (dict(transformer_layer_config=dict(attention_bias=True)), "attention_bias"),
    "family": (dict(transformer_layer_config=dict(model_type="gpt_oss")), "gpt_oss"),
    "no mask": (dict(mask_token_id=None), "no 'mask_token_id'"),
    "no norm rule": (
        dict(speculators_model_type="eagle3", eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        "norm_before_residual",
    ),
    "norms": (
        dict(speculators_model_type="eagle3", eagle_aux_hidden_state_layer_ids=[1, 2, 3], norm_before_residual=True),
        "norm_before_residual is true",
    ),
    "no taps": (dict(speculators_model_type="eagle3"), "the taps are unknown"),
    "unknown": (dict(speculators_model_type=None, architectures=["MedusaModel"]), "MedusaModel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_imported(name, tmp_path):
    changes, message = REFUSED[name]
    _, source = saved(tmp_path / "drafter")
    made = speculators(source, **changes)
    if name == "unknown":
        del made.config["speculators_model_type"]
    folders.write(made, tmp_path / "theirs")
    with pytest.raises(ExportError, match=message):
        imports.read(tmp_path / "theirs")


def test_a_trained_head_is_not_lost_in_silence(tmp_path):
    model, source = saved(tmp_path / "drafter", **KINDS["reduced"])
    assert imports.head_error(source, model.head) is None
    other = source.replaced({"lm_head.weight": source.tensors["lm_head.weight"] + 1})
    assert "lm_head.weight is not the target's" in imports.head_error(other, model.head)


# --- the command ---------------------------------------------------------------------------------------------------


def test_command_writes_every_engine_and_its_serve_command(tmp_path, target_gguf, capsys):
    saved(tmp_path / "drafter")
    drafters.update_metadata(tmp_path / "drafter", temperatures=[1.0, 1.5, 2.0, 2.5])
    assert main(["--drafter", str(tmp_path / "drafter"), "--all", "--target-gguf", str(target_gguf)]) == 0
    said = capsys.readouterr().out
    made = tmp_path / "drafter" / "export"
    assert '"method": "dspark"' in said
    assert f'"model": "{made / "vllm"}", "num_speculative_tokens": 4' in said
    assert "--speculative-algorithm DSPARK" in said
    assert "--speculative-dspark-block-size 4" in said
    assert f"llama-server -m {target_gguf} -md {made / 'gguf' / 'drafter-bf16.gguf'}" in said
    assert "vllm: warning: temperatures" in said
    for engine in ("vllm", "sglang", "gguf", "deepspec"):
        assert json.loads((made / engine / folders.CALIBRATION).read_text())["temperatures"] == [1.0, 1.5, 2.0, 2.5]
    assert main(["--drafter", str(made / "vllm"), "--to", "vllm", "--check"]) == 0
    assert main(["--drafter", str(made / "vllm"), "--to", "vllm", "--check", "--num-speculative-tokens", "3"]) == 2


def test_command_compares_with_the_target(tmp_path, capsys):
    target = tiny_model("qwen3")
    target.save_pretrained(tmp_path / "target")
    saved(tmp_path / "drafter")
    where = ["--drafter", str(tmp_path / "drafter"), "--to", "vllm", "--target", str(tmp_path / "target")]
    assert main([*where, "--include-head"]) == 0
    assert f"vllm serve {tmp_path / 'target'} --speculative-config" in capsys.readouterr().out
    stored = load_file(tmp_path / "drafter" / "export" / "vllm" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], target.lm_head.weight.bfloat16())
    tiny_model("qwen3", vocab_size=104).save_pretrained(tmp_path / "target")
    assert main(where) == 2
    assert "vocab_size" in capsys.readouterr().err
    assert main([*where[:-1], str(tmp_path / "nowhere")]) == 2


def test_command_refuses(tmp_path, capsys):
    saved(tmp_path / "drafter", markov_head="gated")
    where = ["--drafter", str(tmp_path / "drafter")]
    assert main([*where, "--to", "vllm"]) == 2
    assert "markov_head_type" in capsys.readouterr().err
    assert main([*where, "--all"]) == 0  # the others
    assert "vllm: not written" in capsys.readouterr().out
    assert main([*where, "--to", "deepspec", "--include-head"]) == 2
    assert main(["--drafter", str(tmp_path / "none"), "--to", "vllm"]) == 2
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"damaged")
    assert main([*where, "--to", "vllm"]) == 2
    assert "damaged" in capsys.readouterr().err
