"""The validator: every finding appears for its fault, and without the fault it does not."""

import pytest
import torch

from deepspec.models.export import ENGINES, validate
from deepspec.models.export import checkpoint as folders
from tests.models.exporting import DRAFT_IDS, KINDS, saved
from tests.tiny import VOCAB

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
