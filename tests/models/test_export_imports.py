"""Import of other layouts: the drafters compute the same, round trips are the identity, the rest is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from deepspec.models import drafter as drafters
from deepspec.models.export import ExportError, export, imports
from deepspec.models.export import checkpoint as folders
from deepspec.models.export.__main__ import main
from tests.models.drafting import TAPS, frozen_head
from tests.models.exporting import KINDS, outputs, saved, speculators, zlab


@pytest.mark.parametrize("kind", ["dspark", "gated", "rnn", "dflash", "reduced"])
def test_speculators_layout_is_imported(kind, tmp_path):
    model, source = saved(tmp_path / "drafter", torch.float32, **KINDS[kind])
    folders.write(speculators(source, "dflash" if kind == "dflash" else "dspark"), tmp_path / "theirs")
    where = ["--drafter", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours")]
    assert main([*where, "--to", "deepspec", "--no-include-head"]) == 0
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
    with pytest.raises(ExportError, match=r"mean the taps \[\d, \d, \d\] or \[-?\d, \d, \d\], not \[0, 2, 3\]"):
        imports.read(tmp_path / "one", taps=(0, 2, 3))
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


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["dflash", "confidence alone"])
def test_the_zeros_of_an_export_are_no_markov_head(kind, engine, tmp_path):
    model, source = saved(tmp_path / "drafter", torch.float32, **KINDS[kind])
    export(source, engine, tmp_path / "theirs")
    again, own = (drafters.load(tmp_path / name, model.head) for name in ("theirs", "drafter"))
    assert again.config == own.config
    back = imports.read(tmp_path / "theirs")
    assert back.tensors.keys() == source.tensors.keys()


def test_a_model_that_is_no_drafter_is_refused_by_its_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(architectures=["Qwen3ForCausalLM"])))
    (tmp_path / "model.safetensors").write_bytes(b"gigabytes")
    for read in (imports.read, drafters.load, drafters.read_config):
        with pytest.raises(ValueError, match="no drafter layout that is known"):
            read(tmp_path)


@pytest.mark.parametrize("kind", ["dspark", "rnn", "dflash", "reduced", "eagle3", "eagle3 reduced"])
def test_other_layouts_load_without_a_conversion(kind, tmp_path):
    model, source = saved(tmp_path / "drafter", torch.float32, **KINDS[kind])
    if kind.startswith("eagle3"):
        export(source, "vllm", tmp_path / "theirs")
        fields = json.loads((tmp_path / "theirs" / "config.json").read_text())
        (tmp_path / "theirs" / "config.json").write_text(json.dumps({**fields, "deepspec": {}}))
    else:
        folders.write(zlab(source, sample_from_anchor=True) if kind == "dflash" else speculators(source),
                      tmp_path / "theirs")  # fmt: skip
    again = drafters.load(tmp_path / "theirs", model.head, taps=TAPS)
    assert torch.equal(outputs(again), outputs(model))
    assert drafters.read_config(tmp_path / "theirs", taps=TAPS)["architectures"] == source.config["architectures"]
    with pytest.raises(drafters.CheckpointError, match="is of another layout"):
        drafters.update_metadata(tmp_path / "theirs", temperatures=[1.0])
    if "reduced" in kind:  # the only kinds whose files hold rows of a head
        with pytest.raises(drafters.WrongTargetError, match="not the target's"):
            drafters.load(tmp_path / "theirs", frozen_head(seed=9), taps=TAPS)


def test_a_trained_head_is_not_lost_in_silence(tmp_path):
    model, source = saved(tmp_path / "drafter", **KINDS["reduced"])
    assert imports.head_error(source, model.head) is None
    other = source.replaced({"lm_head.weight": source.tensors["lm_head.weight"] + 1})
    assert "lm_head.weight is not the target's" in imports.head_error(other, model.head)
