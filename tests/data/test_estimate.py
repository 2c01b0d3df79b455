"""Estimates against hand counts, real models and a real cache."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig

from deepspec.data.cache import MANIFEST, DiskSpaceError, shard_name
from deepspec.data.cache_reader import CacheReader
from deepspec.data.codecs import codec_named
from deepspec.data.estimate import (
    GPUS,
    TRAIN_SHARE,
    EstimateConfig,
    describe,
    estimate,
    estimate_from,
    human_bytes,
    sizes_of,
    state_bytes,
)
from deepspec.models.drafter_config import DrafterConfig
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


def test_hours_and_memory_of_qwen3_4b_by_hand():
    """1.3 M samples of 950 tokens: 1.235 G tokens, 864.5 M of them supervised.

    Attention has 2·2560·4096 + 2·2560·1024 = 26 214 400 parameters, the MLP 3·2560·9728 = 74 711 040, the embedding
    151 936·2560 = 388 956 160; a layer has 100 925 440 and 36 of them 3 633 315 840.
    """
    tied = estimate_from(qwen3_4b(), taps=5, samples=1_300_000, mean_tokens=950)
    assert (tied.tokens, tied.states) == (1_235_000_000, 864_500_000)
    # 2 · 3 633 315 840 · 1.235e9 = 8.9743e18 operations, at 40 % of the peak
    hours = {"B200": 2.7699, "H200": 6.3015, "H100": 6.3015, "A100": 19.975, "L40S": 17.216, "RTX 4090": 37.771}
    assert tied.capture_hours == pytest.approx(hours, rel=1e-4)
    # 2 · (3 633 315 840 + 388 956 160) · 864.5e6 = 6.9545e18 operations, at 2 % of the peak
    hours = {"B200": 42.929, "H200": 97.665, "H100": 97.665, "A100": 309.58, "L40S": 266.82, "RTX 4090": 585.40}
    assert tied.generate_hours == pytest.approx(hours, rel=1e-4)
    # 5 · 100 925 440 + 5 · 2560² parameters of 16 bytes, and 2 bytes of an embedding that is also the head
    assert tied.drafter_parameters == 537_395_200
    assert tied.drafter_bytes == {"weights and AdamW": 8_598_323_200, "frozen embedding and head": 777_912_320}
    fields = {**QWEN3_4B, "tie_word_embeddings": False}
    untied = estimate_from(AutoConfig.for_model(fields.pop("model_type"), **fields), taps=5, samples=1, mean_tokens=950)
    assert untied.drafter_bytes["frozen embedding and head"] == 1_555_824_640


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


def published(**more):
    return estimate_from(qwen3_4b(), taps=5, samples=1_300_000, mean_tokens=950, **more)


def test_training_hours_and_weights_are_those_of_the_scaling_page():
    result = published(markov_rank=256, epochs=10)
    assert result.drafter_parameters == pytest.approx(0.62e9, rel=0.01)
    assert result.drafter_parameters - published().drafter_parameters == 2 * 151936 * 256
    assert result.drafter_bytes["weights and AdamW"] == 16 * result.drafter_parameters
    assert result.train_hours["H100"] == pytest.approx(192, rel=0.01)
    assert result.train_hours["A100"] == pytest.approx(608, rel=0.01)
    assert result.train_hours["H100"] == pytest.approx(10 * published(markov_rank=256).train_hours["H100"])


def test_work_of_training_is_the_formula_of_the_plan():
    from deepspec.train.plan import STEP_SHARE

    hidden, vocab, keys = 2560, 151936, 1024
    layer = 2 * hidden * 4096 + 2 * hidden * keys + 3 * hidden * 9728
    context = 5 * hidden * hidden + 2 * 2 * hidden * keys
    parameters = 5 * hidden * hidden + 2 * layer + 2 * vocab * 64
    result = estimate_from(
        qwen3_4b(), taps=5, samples=10, mean_tokens=100, layers=2, markov_rank=64, block_size=4, anchors=50, epochs=3
    )
    a_sample = 50 * 4 * (6 * (parameters - context) + 4 * vocab * hidden) + 2 * vocab * hidden * 70 + 6 * context * 100
    assert TRAIN_SHARE == STEP_SHARE
    assert result.train_hours["A100"] == pytest.approx(3 * 10 * a_sample / (312e12 * STEP_SHARE) / 3600)
    more = estimate_from(qwen3_4b(), taps=5, samples=10, mean_tokens=100, anchors=70)
    most = estimate_from(qwen3_4b(), taps=5, samples=10, mean_tokens=100, anchors=512)
    assert more.train_hours == most.train_hours  # there are no more anchors than supervised tokens


def test_hours_of_the_cards_that_are_asked_for():
    result = published(markov_rank=256, epochs=10)
    lines = describe(result, "qwen3-4b", "assumed", EstimateConfig("H100", 8))
    (hours,) = [line for line in lines if "responses" in line]
    assert hours.startswith("  8 × H100")
    assert hours.endswith("training 24.0 h")
    assert sum("2 × " in line for line in describe(result, "a", "b", EstimateConfig(gpus=2))) == len(GPUS)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gpu": "H1000"}, r"estimate\.gpu is H1000: give one of .*H200"), ({"gpus": 0}, r"estimate\.gpus is 0")],
)
def test_cards_that_cannot_be_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        EstimateConfig(**options)


def test_the_recipe_command_line_and_the_drafters_defaults_agree(tmp_path, capsys):
    from deepspec import recipes
    from deepspec.data.config import DataPipelineConfig

    qwen3_4b().save_pretrained(tmp_path / "target")
    cfg = recipes.load(
        "data",
        [f"target={tmp_path}/target", f"out={tmp_path}", "estimate.gpu=B200", "estimate.gpus=8", "prompts.limit=9"],
        DataPipelineConfig,
    )
    result, defaults = estimate(cfg), DrafterConfig()
    assert result.layers == defaults.layers
    shape = {"markov_rank": defaults.markov_rank, "block_size": defaults.block_size}
    assert (
        result.drafter_parameters
        == estimate_from(qwen3_4b(), taps=5, samples=9, mean_tokens=950, **shape).drafter_parameters
    )
    assert "  8 × B200" in capsys.readouterr().out


def full(monkeypatch, tmp_path, free: int) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))


def test_a_cache_that_would_not_fit_is_an_error_once_samples_are_counted_and_a_note_before(
    tmp_path, monkeypatch, capsys
):
    qwen3_4b().save_pretrained(tmp_path / "target")
    cfg = pipeline(tmp_path / "run", codec="int4")
    cfg.target.path = str(tmp_path / "target")
    needed = estimate_from(qwen3_4b(), taps=5, samples=40, mean_tokens=950).bytes["int4"]
    full(monkeypatch, tmp_path, needed)  # enough, but for what is to spare
    assert estimate(cfg).samples == 100_000
    assert "would not fit: " in capsys.readouterr().out
    cfg.prompts_dir.mkdir(parents=True)
    (cfg.prompts_dir / "train.jsonl").write_text("{}\n" * 40)
    with pytest.raises(DiskSpaceError, match=r"cache needs about .*cache=int4 .*cache\.ignore_disk_space"):
        estimate(cfg)
    assert "40 samples" in capsys.readouterr().out  # the figures are printed before the error
    cfg.cache.ignore_disk_space = True
    assert estimate(cfg).samples == 40
    cfg.cache.ignore_disk_space = False
    full(monkeypatch, tmp_path, int(1.06 * needed))
    assert estimate(cfg).samples == 40
    assert "would not fit" not in capsys.readouterr().out


def test_shards_that_are_there_need_no_room_a_second_time(tmp_path, monkeypatch):
    qwen3_4b().save_pretrained(tmp_path / "target")
    cfg = pipeline(tmp_path / "run")
    cfg.target.path = str(tmp_path / "target")
    cfg.prompts_dir.mkdir(parents=True)
    (cfg.prompts_dir / "train.jsonl").write_text("{}\n")
    full(monkeypatch, tmp_path, 1000)
    with pytest.raises(DiskSpaceError):
        estimate(cfg)
    shard = Path(cfg.cache_path) / shard_name(0)
    shard.parent.mkdir()
    with shard.open("wb") as file:
        file.truncate(estimate_from(qwen3_4b(), taps=5, samples=1, mean_tokens=950).bytes["bf16"])
    estimate(cfg)
    shard.unlink()
    (shard.parent / MANIFEST).write_text("{}")  # the build of a finished cache asks for itself
    estimate(cfg)
