"""What each reader asserts to be in a config.json or GGUF file, held against what is written for it."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from deepspec.models import drafter as drafters
from deepspec.models.export import RefusedError, export, imports
from deepspec.models.export import checkpoint as folders
from deepspec.models.export.__main__ import main
from tests.models.drafting import drafter
from tests.models.exporting import KINDS, outputs, saved, write_target_gguf
from tests.tiny import tiny_model

# Fields that the modules of the public DeepSpec's classes read from config.json, the ones asserted in __init__ last.
_LAYERS = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
_LAYERS += " rms_norm_eps max_position_embeddings rope_parameters attention_bias attention_dropout initializer_range"
_LAYERS += " layer_types tie_word_embeddings num_target_layers target_layer_ids"
_GEMMA4 = " hidden_activation attention_k_eq_v enable_moe_block hidden_size_per_layer_input num_kv_shared_layers"
_GEMMA4 += " use_double_wide_mlp num_global_key_value_heads global_head_dim"
_BLOCK = " block_size mask_token_id num_anchors enable_confidence_head markov_rank"
_EAGLE3 = " ttt_length step_loss_decay draft_num_hidden_layers"
# Engines read the layers' fields as transformers' classes spell them, old and new names of the rope among them.
_ENGINE = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
_ENGINE += " rms_norm_eps max_position_embeddings rope_parameters tie_word_embeddings attention_bias"
_ENGINE_BLOCK = " block_size mask_token_id target_layer_ids num_target_layers sample_from_anchor markov_rank"
_ENGINE_BLOCK += " markov_head_type enable_confidence_head num_anchors layer_types"
_ENGINE_EAGLE3 = (
    " eagle_aux_hidden_state_layer_ids eagle_config norm_before_residual norm_before_fc norm_output fc_norm"
)
REQUIRED = {
    ("deepspec", "Qwen3DSparkModel"): _LAYERS + " hidden_act" + _BLOCK,
    ("deepspec", "Qwen3Eagle3Model"): _LAYERS + " hidden_act" + _EAGLE3,
    ("deepspec", "Gemma4DSparkModel"): _LAYERS + _GEMMA4 + _BLOCK,
    ("deepspec", "Gemma4Eagle3Model"): _LAYERS + _GEMMA4 + _EAGLE3,
    ("vllm", "Qwen3DSparkModel"): _ENGINE + " rope_theta" + _ENGINE_BLOCK,
    ("vllm", "Gemma4DSparkModel"): _ENGINE + _ENGINE_BLOCK,
    ("vllm", "LlamaForCausalLMEagle3"): _ENGINE + " rope_theta" + _ENGINE_EAGLE3,
    ("sglang", "Qwen3DSparkModel"): _ENGINE + " rope_theta" + _ENGINE_BLOCK,
    ("sglang", "LlamaForCausalLMEagle3"): _ENGINE + " rope_theta" + _ENGINE_EAGLE3,
}
# llama.cpp's loader throws without these; {arch} is general.architecture.
_GGUF = "{arch}.context_length {arch}.embedding_length {arch}.block_count {arch}.feed_forward_length"
_GGUF += " {arch}.attention.head_count {arch}.attention.layer_norm_rms_epsilon {arch}.target_layers"
_GGUF += " tokenizer.ggml.model tokenizer.ggml.tokens"
REQUIRED_GGUF = {
    "dflash": _GGUF + " {arch}.block_size {arch}.sample_from_anchor tokenizer.ggml.mask_token_id",
    "eagle3": _GGUF + " {arch}.target_hidden_size",
}
CASES = [(kind, family) for kind in KINDS for family in ("qwen3", "llama_rope3", "gemma4")]


def missing(reader, config):
    """Names that the reader needs and the config has not, or has as null."""
    architecture = config["architectures"][0]
    needed = REQUIRED[reader, architecture].split()
    if config.get("markov_rank"):
        needed.append("markov_head_type")
    if config.get("enable_confidence_head"):
        needed.append("confidence_head_with_markov")
    return [name for name in needed if config.get(name) is None]


def written(folder):
    return json.loads((Path(folder) / "config.json").read_text())


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_every_config_holds_what_its_reader_needs(kind, family, tmp_path):
    _, source = saved(tmp_path / "trained", family=family, **KINDS[kind])
    assert missing("deepspec", written(tmp_path / "trained")) == []  # what training writes is that layout already
    for engine in ("deepspec", "vllm", "sglang"):
        try:
            export(source, engine, tmp_path / engine)
        except RefusedError:  # the golden file says who refuses what
            assert engine != "deepspec"
            continue
        assert missing(engine, written(tmp_path / engine)) == [], engine


@pytest.mark.parametrize("kind", ["dspark", "confidence alone", "dflash", "eagle3"])
def test_every_gguf_file_holds_what_llama_cpp_needs(kind, tmp_path):
    write_target_gguf(tmp_path / "target.gguf")
    _, source = saved(tmp_path / "drafter", **KINDS[kind])
    made = export(source, "gguf", tmp_path / "gguf", target_gguf=tmp_path / "target.gguf")
    fields = gguf.GGUFReader(made.path).fields
    arch = fields["general.architecture"].contents()
    assert [name for name in REQUIRED_GGUF[arch].format(arch=arch).split() if name not in fields] == []


def test_the_run_s_own_values_are_published_and_survive_loading(tmp_path):
    drafters.save(drafter(), tmp_path / "block", num_anchors=24, step_loss_decay=0.5)
    drafters.save(drafter(kind="eagle3", ttt_length=3), tmp_path / "eagle3", num_anchors=24, step_loss_decay=0.5)
    assert written(tmp_path / "block")["num_anchors"] == 24
    assert "step_loss_decay" not in written(tmp_path / "block")
    eagle = written(tmp_path / "eagle3")
    assert (eagle["ttt_length"], eagle["step_loss_decay"]) == (3, 0.5)
    head = drafter().head
    drafters.save(drafters.load(tmp_path / "block", head), tmp_path / "again")
    assert written(tmp_path / "again")["num_anchors"] == 24


@pytest.mark.parametrize(
    ("options", "old"), [({}, {"num_anchors"}), ({"kind": "eagle3"}, {"step_loss_decay", "ttt_length"})]
)
def test_checkpoints_from_before_get_the_papers_values(options, old, tmp_path):
    model = drafter(**options)
    drafters.save(model, tmp_path / "old")
    fields = written(tmp_path / "old")
    stripped = {name: value for name, value in fields.items() if name not in old}
    (tmp_path / "old" / "config.json").write_text(json.dumps(stripped))
    export(imports.read(tmp_path / "old"), "deepspec", tmp_path / "new")
    drafters.save(drafters.load(tmp_path / "old", model.head), tmp_path / "saved")
    paper = {"num_anchors": 512, "step_loss_decay": 0.8, "ttt_length": 7}
    for folder in ("new", "saved"):
        assert {name: written(tmp_path / folder)[name] for name in old} == {name: paper[name] for name in old}


def test_an_eagle3_export_keeps_the_run_s_values_on_the_way_back(tmp_path):
    drafters.save(drafter(kind="eagle3", qk_norm=False, ttt_length=3), tmp_path / "mine", step_loss_decay=0.5)
    export(imports.read(tmp_path / "mine"), "vllm", tmp_path / "vllm")
    back = imports.read(tmp_path / "vllm").config
    assert (back["ttt_length"], back["step_loss_decay"]) == (3, 0.5)


# --- the embedding and the head ------------------------------------------------------------------------------------


def with_target(folder, **options):
    """A saved target, and a drafter that says where it is: (target, drafter)."""
    target = tiny_model("qwen3")
    target.save_pretrained(folder / "target")
    model = drafter(**options)
    drafters.save(model, folder / "drafter", target_name="tiny", target_path=str(folder / "target"))
    return target, model


def test_the_deepspec_layout_is_written_with_embedding_and_head_by_default(tmp_path, capsys):
    target, _ = with_target(tmp_path)
    where = ["--drafter", str(tmp_path / "drafter"), "--to", "deepspec", "--output"]
    assert main([*where, str(tmp_path / "recorded")]) == 0  # the target that the checkpoint names
    assert main([*where, str(tmp_path / "given"), "--target", str(tmp_path / "target")]) == 0
    assert "at random" not in capsys.readouterr().out
    for folder in ("recorded", "given"):
        stored = load_file(tmp_path / folder / "model.safetensors")
        assert torch.equal(stored["embed_tokens.weight"], target.model.embed_tokens.weight.bfloat16())
        assert torch.equal(stored["lm_head.weight"], target.lm_head.weight.bfloat16())
    assert main([*where, str(tmp_path / "bare"), "--no-include-head"]) == 0
    assert "embed_tokens.weight and lm_head.weight: not in the file" in capsys.readouterr().out
    assert not {folders.EMBED, folders.HEAD} & load_file(tmp_path / "bare" / "model.safetensors").keys()
    again = drafters.load(tmp_path / "recorded")
    assert torch.equal(again.head.head_VD, target.lm_head.weight.bfloat16().float())
    assert outputs(again).isfinite().all()


def test_other_engines_still_share_the_target_s(tmp_path):
    with_target(tmp_path)
    assert main(["--drafter", str(tmp_path / "drafter"), "--to", "vllm", "--output", str(tmp_path / "vllm")]) == 0
    assert not {folders.EMBED, folders.HEAD} & load_file(tmp_path / "vllm" / "model.safetensors").keys()


def test_without_a_target_the_deepspec_layout_is_refused_with_the_remedy(tmp_path, capsys):
    saved(tmp_path / "nowhere")
    drafters.save(drafter(), tmp_path / "gone", target_name="gone", target_path=str(tmp_path / "no such folder"))
    for name, reason in (("nowhere", "does not say where its target is"), ("gone", "cannot be read")):
        where = ["--drafter", str(tmp_path / name), "--to", "deepspec", "--output", str(tmp_path / "out")]
        assert main(where) == 2
        said = capsys.readouterr().err
        assert reason in said
        assert "--no-include-head" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        (KINDS["reduced"], "draft_vocab_size", "no reduced vocabulary"),
        (dict(learned_mask=True), "mask_embedding", "learned mask"),
        (dict(sliding_window=8), "layer_types", "whole context"),
        (KINDS["eagle3"], "qk_norm", "add q/k norms"),
        (dict(family="gemma3"), "architectures", "no Gemma3DSparkModel"),
    ],
)
def test_what_the_public_classes_would_get_wrong_is_a_warning(options, field, words, tmp_path):
    _, source = saved(tmp_path / "drafter", **options)
    done = export(source, "deepspec", tmp_path / "out")
    warnings = {finding.field: finding.message for finding in done.findings if finding.level == "warning"}
    assert words in warnings[field]
    model = drafters.load(tmp_path / "out", drafter(**options).head)  # this project reads it all the same
    assert model.block_size == 4
