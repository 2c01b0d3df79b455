"""Targets against forwards run by hand, with and without ragged caches; the norm-stage proof; loading."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepspec.models.families import RopeError, UnknownFamilyError
from deepspec.models.target import (
    NormStageError,
    Target,
    TargetConfig,
    TargetError,
    check_norm_stage,
    resolve,
)
from tests.tiny import FAMILIES, VOCAB, tiny_config, tiny_model, tiny_target


def tokens_of(rows, width, seed=0):
    return torch.randint(3, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def by_hand(model, windows, tokens):
    """Embedding output and every layer's output, one layer at a time with masks built here."""
    decoder, width = model.model, tokens.shape[1]
    hidden = decoder.embed_tokens(tokens)
    position = torch.arange(width)
    distance = position[:, None] - position[None]
    shared: dict = {}
    outputs = [hidden]
    for index, layer in enumerate(decoder.layers):
        allowed = distance >= 0
        if windows[index] is not None:
            allowed &= distance < windows[index]
        by_type = model.config.model_type.startswith("gemma")
        kind = (model.config.layer_types[index],) if by_type else ()
        extra = {"shared_kv_states": shared} if model.config.model_type.startswith("gemma4") else {}
        hidden = layer(
            hidden,
            attention_mask=allowed[None, None],
            position_ids=position[None],
            position_embeddings=decoder.rotary_emb(hidden, position[None], *kind),
            **extra,
        )
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        outputs.append(hidden)
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_and_last_equal_a_forward_by_hand(family):
    target = tiny_target(family, taps=(-1, 0, 2))
    tokens = tokens_of(2, 15)
    outputs = by_hand(target.model, target.windows, tokens)
    states = target(tokens)
    torch.testing.assert_close(states.taps_BTF, torch.cat([outputs[i] for i in (0, 1, 3)], -1), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states.last_BTD, target.decoder.norm(outputs[4]), atol=2e-5, rtol=1e-4)
    own = target.model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(target.logits(states.last_BTD), own, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_cached_decoding_equals_full_forward(family):
    """Prefill, ragged rounds, rollback, swap-remove and a row that joins later, against one uncached forward each."""
    target = tiny_target(family)
    text = tokens_of(4, 24)
    full = target(text)
    cache = target.new_cache(4, 24)

    def check(rows, starts, counts, states):
        for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            want = slice(start, start + count)
            torch.testing.assert_close(states.last_BTD[b, :count], full.last_BTD[row, want], atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(states.taps_BTF[b, :count], full.taps_BTF[row, want], atol=1e-4, rtol=1e-3)
            assert not states.last_BTD[b, count:].any()

    def feed(rows, counts, view=None, junk=0):
        """Feed the next real tokens of each row, then ``junk`` wrong ones that are rolled back."""
        view = cache if view is None else view
        starts = view.host_lengths.tolist()
        padded = torch.zeros(len(rows), max(counts) + junk, dtype=torch.long)
        for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            padded[b, :count] = text[row, start : start + count]
            padded[b, count : count + junk] = 5
        states = target(padded, lengths_B=[count + junk for count in counts], cache=view)
        view.truncate([start + count for start, count in zip(starts, counts, strict=True)])
        for b, count in enumerate(counts):
            states.last_BTD[b, count:] = 0
        check(rows, starts, counts, states)

    cache.add(3)
    feed([0, 1, 2], [9, 4, 7])
    feed([0, 1, 2], [1, 1, 1])
    feed([0, 1, 2], [3, 1, 2], junk=2)
    feed([0, 1, 2], [2, 2, 2], junk=1)
    assert cache.remove(0) == 2  # row 2 moves into slot 0
    feed([2, 1], [1, 4])
    new = cache.add(2)
    feed([0, 3], [5, 11], view=cache.rows_view(new.start, new.stop))
    feed([2, 1, 0, 3], [2, 1, 4, 3], junk=1)
    feed([2, 1, 0, 3], [1, 1, 1, 1])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padded_rows_equal_single_rows(family):
    target = tiny_target(family)
    tokens, lengths = tokens_of(3, 50), [50, 1, 13]
    states = target(tokens, lengths_B=lengths)
    for b, length in enumerate(lengths):
        alone = target(tokens[b : b + 1, :length])
        torch.testing.assert_close(states.last_BTD[b, :length], alone.last_BTD[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states.taps_BTF[b, :length], alone.taps_BTF[0], atol=1e-5, rtol=1e-4)
        assert not states.taps_BTF[b, length:].any()


def test_prefill_of_new_rows_leaves_old_ones_untouched():
    target = tiny_target("qwen3")
    cache = target.new_cache(3, 20)
    cache.add(2)
    target(tokens_of(2, 8), cache=cache)
    before = [slab[:2].clone() for slab in cache.keys]
    new = cache.add(1)
    target(tokens_of(1, 12, seed=1), cache=cache.rows_view(new.start, new.stop))
    assert all(torch.equal(slab[:2], old) for slab, old in zip(cache.keys, before, strict=True))
    assert cache.lengths.tolist() == [8, 8, 12]


@pytest.mark.parametrize("family", FAMILIES)
def test_norm_stage_proof_refuses_states_before_the_norm(family):
    target = tiny_target(family)
    tokens = tokens_of(1, 8)
    outputs = by_hand(target.model, target.windows, tokens)
    check_norm_stage(target, tokens, target.decoder.norm(outputs[4]))
    with pytest.raises(NormStageError, match="after the final norm"):
        check_norm_stage(target, tokens, outputs[4])
    with pytest.raises(NormStageError):
        check_norm_stage(target, tokens, target.decoder.norm(target.decoder.norm(outputs[4])))


def test_norm_stage_proof_refuses_a_family_that_scales_its_logits():
    model = tiny_model("llama")
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out

    model.forward = scaled
    with pytest.raises(NormStageError, match="families"):
        Target.from_model(model)


def test_taps_false_and_other_taps():
    target = tiny_target("qwen3", taps=(1,))
    tokens = tokens_of(1, 6)
    assert target(tokens, taps=False).taps_BTF is None
    both = target(tokens, taps=(0, 1)).taps_BTF
    torch.testing.assert_close(both[..., 32:], target(tokens).taps_BTF)


def test_errors_name_the_remedy():
    target = tiny_target("qwen3")
    with pytest.raises(TargetError, match="lengths"):
        target(tokens_of(2, 4), lengths_B=[4, 0])
    cache = target.new_cache(1, 6)
    cache.add(1)
    with pytest.raises(TargetError, match="max_length 6"):
        target(tokens_of(1, 7), cache=cache)
    with pytest.raises(TargetError, match="active rows"):
        target(tokens_of(2, 3), cache=cache)
    with pytest.raises(TargetError, match="tokenizer="):
        _ = target.tokenizer
    with pytest.raises(TargetError, match="dtype"):
        TargetConfig("x", "y", dtype="int3")


def test_load_resolve_and_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPSPEC_TARGETS", str(tmp_path))
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "tiny")
    cfg = TargetConfig("tiny", "somewhere/else", taps=[0, 2], dtype="float32")
    assert resolve(cfg) == str(tmp_path / "tiny")
    assert resolve(TargetConfig("other", "somewhere/else")) == "somewhere/else"
    (tmp_path / "given").mkdir()
    assert resolve(TargetConfig("tiny", str(tmp_path / "given"))) == str(tmp_path / "given")  # not another of its name
    target = Target.load(cfg, device="cpu")
    assert (target.taps, target.dtype, target.num_layers, target.vocab_size) == ((0, 2), torch.float32, 4, VOCAB)
    half = Target.load(TargetConfig("tiny", "", dtype="bfloat16"), device="cpu")
    assert half.dtype == torch.bfloat16
    assert half.fingerprint == target.fingerprint  # the same checkpoint in another dtype
    assert tiny_target("qwen3", seed=1).fingerprint != target.fingerprint  # the same shape, other weights
    assert set(tiny_target("qwen3").stop_ids) == {1}


def test_load_refuses_an_unknown_family_before_reading_weights(tmp_path):
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(UnknownFamilyError):
        Target.load(TargetConfig("x", str(tmp_path)), device="cpu")


def test_load_refuses_a_varying_rope_before_reading_weights(tmp_path):
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    tiny_config("llama", rope_parameters=rope).save_pretrained(tmp_path)  # there are no weights to read
    with pytest.raises(RopeError, match="dynamic"):
        Target.load(TargetConfig("t", str(tmp_path)), "cpu")


def test_threads_that_share_a_target_get_their_own_taps():
    """A run that reads ahead online captures in one thread while another evaluates: here inside the first layer."""
    target, tokens = tiny_target(), tokens_of(2, 9)
    wanted = [target(tokens, taps=taps).taps_BTF for taps in ((0, 1, 2), (-1, 2))]
    inside, entered = threading.Event(), threading.Event()

    def meet(*_):
        (entered if inside.is_set() else inside).set()
        entered.wait(0.3)  # passes at once where the second forward came in, and for want of it with the lock

    target.layers[0].register_forward_hook(meet)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(target, tokens, taps=(0, 1, 2))
        inside.wait()
        second = target(tokens, taps=(-1, 2))
    assert torch.equal(first.result().taps_BTF, wanted[0])
    assert torch.equal(second.taps_BTF, wanted[1])
