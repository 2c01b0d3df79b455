"""Capture: which responses, in which batches, with which states; the target in process equals a lossless cache."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspec.data import cache_build, record
from deepspec.data import capture as capture_module
from deepspec.data.cache import CacheMismatchError
from deepspec.data.cache_build import build_cache
from deepspec.data.cache_reader import CacheReader
from deepspec.data.capture import capture, probe, to_sample, with_normalisers
from deepspec.data.capture_plan import (
    EncodeSettings,
    Responses,
    batches,
    check_usable,
    encode_rows,
)
from deepspec.data.codecs import CODECS, codec_named
from deepspec.data.loader import DataConfig, Loader
from deepspec.data.recombine import merge
from deepspec.data.responses import Response, ResponsesError, write_part
from deepspec.data.training_data import open_cache, open_online, prove_head
from deepspec.files import write_json
from deepspec.models.drafter import build
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.train.objectives import LossWeights, denominators, objective
from tests.data.little_chat import TEMPLATE, answered, built, chat_target, chat_tokenizer, pipeline

SETTINGS = EncodeSettings(thinking=False, max_length=4096, keep_truncated=True)


def conversations(target, count=9):
    kept, dropped = encode_rows(target.tokenizer, answered(count), SETTINGS)
    assert not dropped
    return kept


@pytest.mark.parametrize("family_taps", [None, [-1, 2]])
def test_states_equal_a_plain_forward_of_each_conversation(family_taps):
    target = chat_target(taps=family_taps)
    found = conversations(target)
    for conversation, row in zip(found, capture(target, found), strict=True):
        tokens_1T = torch.tensor([conversation.tokens])
        hidden = target.model(input_ids=tokens_1T, output_hidden_states=True, use_cache=False).hidden_states
        # hidden_states[0] is the embedding, so the output of layer l is at l + 1
        expected_SF = torch.cat([hidden[tap + 1][0] for tap in target.taps], -1)
        torch.testing.assert_close(row.taps_SF.float(), expected_SF, rtol=2**-7, atol=1e-3)
        (start, end) = conversation.spans[-1]
        assert conversation.tokens[start:end] == row.tokens[start:end]
        torch.testing.assert_close(row.last_ID.float(), hidden[-1][0, start - 1 : end - 1], rtol=2**-7, atol=1e-3)
        assert row.last_ID.shape[0] == end - start


@torch.no_grad()
@pytest.mark.parametrize("codec", CODECS)
def test_p_of_every_codec_sums_to_one(tmp_path, codec):
    """exp(logit − log Z) over the whole vocabulary, of what a reader gets; the head by hand, in float64."""
    target = chat_target()
    built(tmp_path, target=target, codec=codec, log_normaliser=True)
    reader = CacheReader(tmp_path / "cache")
    assert not reader.manifest.origin.stale_normalisers
    head_VD = target.model.get_output_embeddings().weight.double()
    for number in range(len(reader)):
        sample = reader.sample(number)
        logits_IV = sample.last_ID.double() @ head_VD.T
        mass_I = (logits_IV - sample.log_z_I.double()[:, None]).exp().sum(-1)
        torch.testing.assert_close(mass_I, torch.ones_like(mass_I), rtol=0, atol=1e-5)
        chosen_I = logits_IV.gather(-1, sample.top_I[:, None])[:, 0]
        torch.testing.assert_close(chosen_I, logits_IV.amax(-1), rtol=0, atol=1e-5)


def older_lossy_cache(folder, target, monkeypatch):
    """An int4 cache as earlier versions wrote it: version 2 records with normalisers of the exact states."""

    def of_exact_states(rows, head, codec):
        lossless = codec_named("bf16")
        return [replace(row, last_block=None) for row in with_normalisers(rows, head, lossless)]

    monkeypatch.setattr(capture_module, "with_normalisers", of_exact_states)
    monkeypatch.setattr(record, "OF_DECODED", record.OF_CAPTURED)
    built(folder, target=target, codec="int4", log_normaliser=True)
    monkeypatch.undo()
    manifest = folder / "cache" / "manifest.json"
    plain = json.loads(manifest.read_text())
    del plain["origin"]["normaliser_states"]
    manifest.write_text(json.dumps(plain))


def test_normalisers_of_an_older_lossy_cache_are_ignored_and_named(tmp_path, monkeypatch, capsys):
    target = chat_target()
    older_lossy_cache(tmp_path, target, monkeypatch)
    data = DataConfig(path=str(tmp_path / "cache"), anchors=8, global_batch=3)
    source = open_cache(data, pipeline(tmp_path).target)
    assert source.reader.manifest.origin.stale_normalisers
    shown = capsys.readouterr().out
    assert "earlier version" in shown
    assert "cache.replace=true" in shown
    batch = Loader(source, data, block_size=4).step(0)[0]
    assert batch.log_z_L is batch.top_L is None


def test_caches_with_normalisers_of_different_states_are_not_merged(tmp_path, monkeypatch):
    target = chat_target()
    older_lossy_cache(tmp_path / "older", target, monkeypatch)
    built(tmp_path / "newer", target=target, codec="int4", log_normaliser=True)
    with pytest.raises(CacheMismatchError, match="normaliser_states"):
        merge([tmp_path / "older" / "cache", tmp_path / "newer" / "cache"], tmp_path / "both")


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_loss_of_a_lossy_cache_is_that_of_its_decoded_states(tmp_path, codec):
    """With the stored normalisers and a reduced draft vocabulary, as without them, where p is a full softmax."""
    target = chat_target()
    built(tmp_path, target=target, codec=codec, log_normaliser=True)
    data = DataConfig(path=str(tmp_path / "cache"), anchors=6, global_batch=4)
    batch = Loader(open_cache(data, pipeline(tmp_path).target), data, block_size=4).step(0)[0]
    batch = batch.to("cpu", torch.float32)
    config = DrafterConfig(kind="dspark", layers=1, block_size=4, markov_rank=8, draft_vocab_size=40)
    head = FrozenHead.of(target)
    model = build(config, target.config, head, target.taps, draft_ids=list(range(0, 80, 2)))
    weights = LossWeights()
    total = denominators(batch, config, weights)
    with_z, _ = objective(model, batch, weights, total)
    without, _ = objective(model, replace(batch, log_z_L=None, top_L=None), weights, total)
    torch.testing.assert_close(with_z, without, rtol=1e-5, atol=1e-6)


def test_probe_is_the_models_own_next_token():
    target = chat_target()
    row = capture(target, conversations(target)[:1])[0]
    own = target.model(input_ids=torch.tensor([row.tokens])).logits[0].argmax(-1)
    start = row.spans[0][0]
    found = probe(target, row)
    agree = sum(own[start - 1 + state].item() == token for state, token in zip(found.states, found.tokens, strict=True))
    assert len(found.tokens) == min(16, len(row.last_ID))
    assert agree == len(found.tokens)
    assert probe(target, replace(row, last_ID=torch.zeros_like(row.last_ID))) == found, "not read from the states"


def test_batches_hold_every_row_once_within_budget_and_padding():
    draw = random.Random(0)
    for _ in range(50):
        lengths = [min(4096, int(draw.lognormvariate(6, 1)) + 1) for _ in range(draw.randint(0, 300))]
        budget = draw.choice([512, 4096, 16384])
        groups = batches(lengths, budget, 0.05)
        assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
        for group in groups:
            padded = max(lengths[index] for index in group) * len(group)
            assert len(group) == 1 or padded <= budget
            assert padded - sum(lengths[index] for index in group) <= 0.05 * padded
    assert len(batches([100] * 10, 1000, 0.05)) == 1


def test_responses_are_read_in_order_across_parts(tmp_path):
    rows = answered(11)
    cfg = pipeline(tmp_path, rows)
    found = Responses(cfg.responses_dir)
    assert found.ids == [row.id for row in rows]
    assert [row.tokens for row in found.rows(3, 9)] == [row.tokens for row in rows[3:9]]
    assert found.digest(0, 4) != found.digest(4, 8)
    assert len(Responses(cfg.responses_dir, limit=7)) == 7
    write_part(cfg.responses_dir / "part-000-000002.parquet", rows[:1])
    with pytest.raises(ResponsesError, match="'r000' twice"):
        Responses(cfg.responses_dir)


def test_answers_to_held_out_prompts_are_left_out(tmp_path):
    rows = answered(11)
    cfg = pipeline(tmp_path, rows)
    cfg.prompts_dir.mkdir()
    heldout = cfg.prompts_dir / "heldout.jsonl"
    heldout.write_text("".join(f'{{"id": "{id}"}}\n' for id in ("r001", "r005", "r010", "never answered")))
    found = Responses(cfg.responses_dir)
    kept = [row for row in rows if row.id not in ("r001", "r005", "r010")]
    assert (found.left_out, found.ids) == (3, [row.id for row in kept])
    assert [row.tokens for row in found.rows(0, 8)] == [row.tokens for row in kept]
    assert len(Responses(cfg.responses_dir, limit=7)) == 7
    heldout.write_text("".join(f'{{"id": "{row.id}"}}\n' for row in rows))
    with pytest.raises(ResponsesError, match=r"all 11 answers are to held-out prompts.*regenerate"):
        Responses(cfg.responses_dir)


def test_answers_of_another_target_are_refused(tmp_path):
    cfg = pipeline(tmp_path, answered(4))
    write_json(cfg.responses_dir / "manifest.json", {"stamp": {"target": "other", "thinking": False}})
    with pytest.raises(ResponsesError, match=r"answers of other, this run's target is tiny-chat.*target=other"):
        build_cache(cfg, chat_target())
    online = DataConfig(source="online", path=str(cfg.responses_dir), max_length=100)
    with pytest.raises(ResponsesError, match="answers of other"):
        open_online(online, chat_target(), thinking=False)
    cfg.target.name = "other"
    assert build_cache(cfg, chat_target()).rows == 4


def test_unusable_responses_are_counted_by_reason():
    tokenizer = chat_target().tokenizer
    good = answered(3)
    cut = Response("cut", good[0].messages, "length", False, {}, [5, 6, 7], "s")
    long = Response("long", [{"role": "user", "content": "x" * 90}], "stop", False, {}, [5, 1], "s")
    settings = EncodeSettings(thinking=False, max_length=80, keep_truncated=False)
    kept, dropped = encode_rows(tokenizer, [*good, cut, long], settings)
    assert dropped == Counter({"truncated": 1, "nothing supervised": 1})
    assert [row.id for row in kept] == [row.id for row in good]
    kept, _ = encode_rows(tokenizer, [cut], SETTINGS)
    assert kept[0].tokens[-3:] == [5, 6, 7]  # no end of turn is made up
    with pytest.raises(ResponsesError, match=r"9 of 12.*preview"):
        check_usable(3, Counter({"nothing supervised": 9}), Path("responses"))


@pytest.mark.parametrize("pack_tokens", [None, 256])
def test_online_batches_equal_those_of_the_lossless_cache(tmp_path, pack_tokens):
    target = chat_target()
    cfg = built(tmp_path, target=target)
    options = {"max_length": 100, "anchors": 8, "global_batch": 6, "micro_tokens": 300, "heldout": 0.2, "seed": 3}
    cached = DataConfig(path=f"{cfg.out}/cache", pack_tokens=pack_tokens, **options)
    online = DataConfig(source="online", path=str(cfg.responses_dir), pack_tokens=pack_tokens, **options)
    a = Loader(open_cache(cached, cfg.target), cached, block_size=4)
    b = Loader(open_online(online, target, thinking=False), online, block_size=4)
    assert (a.steps_per_epoch, a.heldout_rows) == (b.steps_per_epoch, b.heldout_rows)
    for step in range(2 * a.steps_per_epoch):
        for mine, theirs in zip(a.step(step), b.step(step), strict=True):
            assert mine.ids == theirs.ids
            for name in ("tokens_BS", "positions_BS", "segments_BS", "supervised_BS", "last_row_BS", "anchors_BN"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
            torch.testing.assert_close(mine.taps_BSF, theirs.taps_BSF, rtol=2**-7, atol=1e-3)
            torch.testing.assert_close(mine.last_LD, theirs.last_LD, rtol=2**-7, atol=1e-3)


def test_a_cache_with_log_normalisers_hands_them_to_the_batch(tmp_path):
    target = chat_target()
    cfg = built(tmp_path, target=target, log_normaliser=True)
    data = DataConfig(path=f"{cfg.out}/cache", anchors=8, global_batch=3)
    loader = Loader(open_cache(data, cfg.target), data, block_size=4)
    assert loader.source.reader.manifest.origin.log_normaliser
    for batch in loader.step(0):
        log_z_L, top_L = FrozenHead.of(target).log_normaliser(batch.last_LD)
        torch.testing.assert_close(batch.log_z_L, log_z_L)
        assert torch.equal(batch.top_L, top_L)


def test_opening_for_training_proves_the_head(tmp_path):
    target = chat_target()
    cfg = built(tmp_path, target=target)
    head, config = FrozenHead.of(target), DataConfig(path=f"{cfg.out}/cache")
    open_cache(config, cfg.target, head=head, text_config=target.config)
    assert prove_head(CacheReader(config.path), head) > 0.95
    other = chat_target(seed=5)
    with pytest.raises(CacheMismatchError, match="head fingerprint"):
        open_cache(config, cfg.target, head=FrozenHead.of(other))
    with pytest.raises(CacheMismatchError, match="chat template"):
        open_cache(config, cfg.target, tokenizer=chat_tokenizer(TEMPLATE.replace("</s>", "</s></s>")))
    open_cache(config, cfg.target, tokenizer=target.tokenizer, fingerprint=target.fingerprint)
    cfg.target.taps = [0, 2]
    with pytest.raises(CacheMismatchError, match=r"taps \[0, 1, 2\]"):
        open_cache(config, cfg.target, head=head)


def test_states_that_are_not_the_heads_inputs_are_found_out(tmp_path, monkeypatch):
    target = chat_target()

    def other_states(target, found, **options):
        return [replace(row, last_ID=row.last_ID.flip(-1)) for row in capture(target, found, **options)]

    monkeypatch.setattr(cache_build, "capture", other_states)
    cfg = built(tmp_path, target=target)
    with pytest.raises(CacheMismatchError, match=r"reproduces \d+ of \d+.*before the final norm"):
        open_cache(DataConfig(path=f"{cfg.out}/cache"), cfg.target, head=FrozenHead.of(target))


def test_captured_rows_are_valid_samples():
    target = chat_target()
    for row in capture(target, conversations(target)):
        to_sample(row).check()
