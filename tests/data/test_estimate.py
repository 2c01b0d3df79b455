"""Estimates against hand counts, real models and a real cache."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from deepspec.data.cache_reader import CacheReader
from deepspec.data.codecs import codec_named
from deepspec.data.estimate import describe, estimate, estimate_from, human_bytes, sizes_of, state_bytes
from tests.data.little_chat import built, pipeline
from tests.tiny import tiny_config, tiny_model

QWEN3_4B = dict(
    model_type="qwen3",
    hidden_size=2560,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=9728,
    vocab_size=151936,
    tie_word_embeddings=True,
)


def qwen3_4b():
    fields = dict(QWEN3_4B)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def test_the_published_numbers_of_qwen3_4b():
    result = estimate_from(qwen3_4b(), taps=5, samples=1_300_000, mean_tokens=950)
    assert result.raw_bytes == 30_720 * result.tokens
    assert 37e12 < result.raw_bytes < 39e12
    assert result.bytes["bf16"] < 0.69 * result.raw_bytes
    assert result.bytes["int8"] < 0.43 * result.raw_bytes
    assert result.bytes["int4"] < 0.24 * result.raw_bytes
    assert sizes_of(qwen3_4b()).total == pytest.approx(4.02e9, rel=0.02)
    text = "\n".join(describe(result, "qwen3-4b", "assumed"))
    assert "30720 bytes per token" in text
    assert "H100" in text


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "mistral"])
def test_parameters_equal_a_real_models_but_for_norms_and_biases(family):
    model = tiny_model(family)
    counted = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "norm" not in name
        and "bias" not in name
        and "gate.weight" not in name.replace("mlp.gate.weight", "gate.weight")
    )
    assert sizes_of(tiny_config(family)).total == pytest.approx(counted, rel=0.01)


def test_active_parameters_of_experts_are_those_one_token_uses():
    sizes = sizes_of(tiny_config("qwen3_moe"))
    expert = 3 * 32 * 24
    assert sizes.total - sizes.active - 2 * 97 * 32 == 4 * (4 - 2) * expert


def test_state_bytes_foretells_a_real_cache(tmp_path):
    for codec in ("bf16", "int8", "int4"):
        reader = CacheReader(Path(built(tmp_path / codec, codec=codec).out) / "cache")
        states = sum(int(count) for count in reader.states)
        expected = state_bytes(codec_named(codec), 32, 3, reader.manifest.tokens, states)
        stored = sum(len(reader.record(row)) for row in range(len(reader)))
        assert 0.9 * expected < stored < 1.6 * expected  # tiny rows pay for headers that real ones do not notice


def test_command_counts_what_exists(tmp_path, capsys):
    qwen3_4b().save_pretrained(tmp_path / "target")
    cfg = pipeline(tmp_path)
    cfg.target.path = str(tmp_path / "target")
    assert estimate(cfg).samples == 100_000
    cfg.cache.limit = 500
    assert estimate(cfg).samples == 500
    cfg.prompts_dir.mkdir(parents=True)
    (cfg.prompts_dir / "train.jsonl").write_text("{}\n" * 40)
    assert estimate(cfg).samples == 40
    assert "prompts counted" in capsys.readouterr().out


def test_human_bytes():
    assert [human_bytes(size) for size in (7, 1500, 12_345_678, 3.8e13, 2e15)] == [
        "7 B",
        "1.5 kB",
        "12.3 MB",
        "38.0 TB",
        "2.0 PB",
    ]
