"""The embedding and the head alone, against the whole model."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from deepspec.models import frozen_head
from deepspec.models.frozen_head import FrozenHeadError
from deepspec.models.target import FrozenHead, Target
from tests.tiny import VOCAB, tiny_model


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4"])
@pytest.mark.parametrize("sharded", [False, True])
def test_equals_the_targets_own(family, sharded, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    index = tmp_path / "model.safetensors.index.json"
    assert sharded == index.exists()
    if sharded:  # nothing but the shards of the two is read
        shards = json.loads(index.read_text())["weight_map"]
        needed = {file for name, file in shards.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
        others = set(shards.values()) - needed
        assert len(others) > 2
        for file in others:
            (tmp_path / file).unlink()
    head = FrozenHead.load(str(tmp_path))
    target = Target.from_model(model, taps=(-1,))
    tokens = torch.arange(VOCAB)[None]
    states = target(tokens)
    torch.testing.assert_close(head.embed(tokens), states.taps_BTF, atol=0, rtol=1e-6)
    torch.testing.assert_close(head.logits(states.last_BTD), target.logits(states.last_BTD))
    assert head.tied == (family != "mistral")
    assert (head.vocab_size, head.hidden_size) == (VOCAB, 32)
    of = FrozenHead.of(target)
    assert of.tied == head.tied
    assert of.embed_VD.data_ptr() == target.embedding.weight.data_ptr()
    assert torch.equal(of.head_VD, head.head_VD)


def test_bfloat16_scale_is_rounded_as_in_the_model(tmp_path):
    model = tiny_model("gemma3", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    head = FrozenHead.load(str(tmp_path), torch.bfloat16)
    tokens = torch.arange(VOCAB)
    assert torch.equal(head.embed(tokens), model.model.embed_tokens(tokens))


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bfloat16_checkpoint_used_in_a_wider_dtype_has_the_scale_of_that_dtype(tmp_path, family, dtype):
    """√2560 = 50.596 is 50.5 in bfloat16: training, which reads the head alone, and decoding must not differ by it."""
    model = tiny_model(family, hidden_size=80, head_dim=16, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tokens = torch.arange(VOCAB)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).get_input_embeddings()(tokens)
    torch.testing.assert_close(FrozenHead.load(str(tmp_path), dtype).embed(tokens), expected, rtol=1e-6, atol=0)
    moved = FrozenHead.load(str(tmp_path), torch.bfloat16).to(dtype=dtype)
    torch.testing.assert_close(moved.embed(tokens), expected, rtol=1e-6, atol=0)


def test_to_keeps_ties_and_gradients_reach_only_the_input():
    head = FrozenHead(torch.randn(7, 4), softcap=2.0)
    assert head.to(dtype=torch.float64).tied
    hidden = torch.randn(3, 4, requires_grad=True)
    head.logits(hidden).sum().backward()
    assert hidden.grad is not None
    assert not head.head_VD.requires_grad


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_normaliser_is_that_of_the_unrounded_logits(softcap, dtype, monkeypatch):
    monkeypatch.setattr(frozen_head, "NORMALISER_ROWS", 4)
    head = FrozenHead(torch.randn(50, 8).to(dtype), softcap=softcap)
    hidden_ND = (torch.randn(11, 8) / 2).to(dtype)
    log_z_N, top_N = head.log_normaliser(hidden_ND)
    logits_NV = head.to(dtype=torch.float64).logits(hidden_ND.double())
    torch.testing.assert_close(log_z_N.double(), logits_NV.logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert torch.equal(top_N, logits_NV.argmax(-1))
    assert [len(part) for part in head.log_normaliser(hidden_ND[:0])] == [0, 0]


def test_missing_head_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_model("mistral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "lm_head.weight"}, file)
    with pytest.raises(FrozenHeadError, match="tie_word_embeddings"):
        FrozenHead.load(str(tmp_path))
    file.unlink()
    with pytest.raises(FrozenHeadError, match="neither"):
        FrozenHead.load(str(tmp_path))


def test_gguf_folder(tmp_path):
    gguf = pytest.importorskip("gguf")
    embed = np.random.default_rng(0).standard_normal((VOCAB, 32)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(VOCAB)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_tensor("token_embd.weight", embed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    head = FrozenHead.load(str(tmp_path))
    assert head.tied
    assert torch.equal(head.embed_VD, torch.from_numpy(embed))
