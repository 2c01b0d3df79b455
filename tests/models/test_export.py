"""Exports by drafter kind, engine and family: golden names, shapes, fields; what the files compute; the command."""

import json
import os
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from deepspec.models import drafter as drafters
from deepspec.models.export import ENGINES, ExportError, RefusedError, export, imports
from deepspec.models.export import checkpoint as folders
from deepspec.models.export.__main__ import main
from tests.models.drafting import TAPS, drafter, frozen_head, samples
from tests.models.exporting import KINDS, outputs, saved, write_target_gguf
from tests.tiny import VOCAB, tiny_model

GOLDEN = Path(__file__).parent / "golden" / "export.json"
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


@pytest.fixture(scope="session")
def target_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_target_gguf(path)
    return path


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


# --- the command ---------------------------------------------------------------------------------------------------


def test_command_writes_every_engine_and_its_serve_command(tmp_path, target_gguf, capsys):
    saved(tmp_path / "drafter")
    drafters.update_metadata(tmp_path / "drafter", temperatures=[1.0, 1.5, 2.0, 2.5], shifts=[-0.5, 0.0, 0.1, 0.0])
    everything = ["--drafter", str(tmp_path / "drafter"), "--all", "--target-gguf", str(target_gguf)]
    assert main([*everything, "--no-include-head"]) == 0
    said = capsys.readouterr().out
    made = tmp_path / "drafter" / "export"
    assert '"method": "dspark"' in said
    assert f'"model": "{made / "vllm"}", "num_speculative_tokens": 4' in said
    assert "--speculative-algorithm DSPARK" in said
    assert "--speculative-dspark-block-size 4" in said
    assert f"llama-server -m {target_gguf} -md {made / 'gguf' / 'drafter-bf16.gguf'}" in said
    assert "vllm: warning: temperatures" in said
    for engine in ("vllm", "sglang", "gguf", "deepspec"):
        calibration = json.loads((made / engine / folders.CALIBRATION).read_text())
        assert calibration["temperatures"] == [1.0, 1.5, 2.0, 2.5]
        assert calibration["shifts"] == [-0.5, 0.0, 0.1, 0.0]
    assert main(["--drafter", str(made / "vllm"), "--to", "vllm", "--check"]) == 0
    assert main(["--drafter", str(made / "vllm"), "--to", "vllm", "--check", "--num-speculative-tokens", "3"]) == 2


def test_command_takes_a_training_run(tmp_path, capsys):
    """Its best checkpoint, else its last; the export lies in the folder that was named."""
    run = tmp_path / "dspark"
    saved(run / "last")
    assert main(["--drafter", str(run), "--to", "vllm", "--check"]) == 0
    saved(run / "best", block_size=3)
    assert main(["--drafter", str(run), "--to", "vllm"]) == 0
    assert f'"model": "{run / "export" / "vllm"}", "num_speculative_tokens": 3' in capsys.readouterr().out


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


def test_commands_name_the_target_s_place_not_our_word_for_it(tmp_path):
    model = drafter()
    drafters.save(model, tmp_path / "d", target_name="qwen3-4b", target_path="Qwen/Qwen3-4B")
    source = imports.read(tmp_path / "d")
    for engine, words in (("vllm", "vllm serve"), ("sglang", "--model-path"), ("deepspec", "--target")):
        assert f"{words} Qwen/Qwen3-4B" in export(source, engine, tmp_path / engine).command
    assert "serve other " in export(source, "vllm", tmp_path / "vllm", target_name="other").command


def test_several_engines_are_written_all_or_none(tmp_path, capsys):
    saved(tmp_path / "drafter")
    where = ["--drafter", str(tmp_path / "drafter"), "--output", str(tmp_path / "out"), "--to", "vllm", "gguf"]
    assert main(where) == 2
    assert "--target-gguf" in capsys.readouterr().err
    assert main([*where, "--target-gguf", str(tmp_path / "none.gguf")]) == 2
    assert not (tmp_path / "out").exists()


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
