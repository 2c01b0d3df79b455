"""The block drafter: N-anchor training equals N decoding calls, packing changes nothing, frozen parts stay frozen."""

import pytest
import torch

from deepspec.models.confidence_scale import ConfidenceScale
from deepspec.models.draft_vocabulary import most_frequent
from deepspec.models.sampling import Sampling
from tests.models.drafting import (
    TAPS,
    WIDTH,
    batch,
    drafter,
    forced_proposal,
    gradients_and_kept,
    logits,
    samples,
)
from tests.tiny import VOCAB

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
DRAFT_IDS = [token for token in range(VOCAB) if token % 3 != 1]
DRAFTERS = {
    "vanilla": dict(),
    "gated": dict(markov_head="gated"),
    "rnn": dict(markov_head="rnn"),
    "confidence without markov": dict(confidence_with_markov=False),
    "no confidence": dict(confidence=False),
    "confidence alone": dict(markov_rank=0),
    "dflash": dict(kind="dflash"),
    "window": dict(sliding_window=6),
    "learned mask": dict(learned_mask=True),
    "own embedding": dict(own_embedding=True),
    "reduced": dict(draft_ids=DRAFT_IDS),
    "reduced dflash": dict(draft_ids=DRAFT_IDS, kind="dflash"),
    "llama3 rope": dict(family="llama_rope3"),
    "yarn rope": dict(config_overrides=dict(rope_parameters=YARN)),
    "gemma3": dict(family="gemma3"),
    "gemma3 window": dict(family="gemma3", sliding_window=6),
    "gemma4": dict(family="gemma4"),
    "gemma4 window": dict(family="gemma4", sliding_window=6),
    "gemma4 keys are values": dict(family="gemma4", config_overrides=dict(attention_k_eq_v=True)),
    "moe target": dict(family="qwen3_moe"),
    "deep": dict(layers=3, block_size=6),
}


@torch.no_grad()
def trained(model, made, **options):
    """Per document, per anchor position: (logits_GV, confidence_G) of the training forward."""
    b = batch(made, block_size=model.block_size, **options)
    out = model.training_forward(b)
    all_logits = logits(model, out.hidden_BNGD, out.markov_BNGR)
    found = {}
    for row, anchors in enumerate(b.anchors_BN.tolist()):
        for n, anchor in enumerate(anchors):
            if anchor < 0:
                continue
            document, position = int(b.segments_BS[row, anchor]), int(b.positions_BS[row, anchor])
            confidence = None if out.confidence_logits_BNG is None else out.confidence_logits_BNG[row, n].sigmoid()
            found[document, position] = all_logits[row, n], confidence
    return found


@torch.no_grad()
def decoded(model, sample, anchor, cuts=()):
    """(logits_GV, confidence_G) of one decoding call at ``anchor``, its draws forced to the document's tokens.

    The context arrives in the pieces that ``cuts`` make of it.
    """
    state = model.start(1, 64)
    state.add(1)
    for start, stop in zip((0, *cuts), (*cuts, anchor), strict=True):
        if start < stop:
            tokens = sample.tokens_S[None, start : stop + 1]
            model.extend(state, tokens, sample.taps_SF[None, start:stop], [stop - start])
    found, proposal = forced_proposal(model, state, sample.tokens_S[anchor : anchor + 1], sample.tokens_S[anchor + 1 :])
    return found, None if proposal.confidence_BG is None else proposal.confidence_BG[0]


def compare(model, made, found, cuts=()):
    """Valid positions only: beyond the document's end the teacher-forced tokens are another document's."""
    for (document, anchor), (expected, confidence) in found.items():
        mine, mine_confidence = decoded(model, made[document], anchor, cuts=[cut for cut in cuts if cut < anchor])
        inside = min(model.block_size, len(made[document]) - anchor)
        torch.testing.assert_close(mine[:inside], expected[:inside], atol=2e-4, rtol=2e-4)
        if confidence is not None:
            torch.testing.assert_close(mine_confidence[:inside], confidence[:inside], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", DRAFTERS)
def test_n_anchor_training_equals_n_decoding_calls(name):
    made = samples()
    model = drafter(**DRAFTERS[name])
    found = trained(model, made, pack_tokens=48)
    assert len(found) == 12
    compare(model, made, found, cuts=(5, 6))


@pytest.mark.parametrize("name", ["rnn", "window", "gemma4"])
def test_packed_equals_unpacked_equals_padded(name):
    made = samples()
    model = drafter(**DRAFTERS[name])
    packed, padded = trained(model, made, pack_tokens=64), trained(model, made)
    alone = {}
    for index, sample in enumerate(made):
        alone |= {(index, position): value for (_, position), value in trained(model, [sample]).items()}
    assert packed.keys() == padded.keys() == alone.keys()
    for key, (expected, confidence) in alone.items():
        inside = min(model.block_size, len(made[key[0]]) - key[1])
        for other in (packed, padded):
            torch.testing.assert_close(other[key][0][:inside], expected[:inside], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(other[key][1][:inside], confidence[:inside], atol=1e-5, rtol=1e-4)


def propose(model, state, anchors_B, sampling=None, seed=1, **options):
    uniforms = torch.rand(len(anchors_B), model.block_size, generator=torch.Generator().manual_seed(seed))
    return model.propose(state, anchors_B, sampling or Sampling(), uniforms, model.block_size, **options)


def test_states_of_ragged_rows_equal_states_made_from_scratch():
    """Extend by different counts, roll back, swap-remove, prefill newcomers: as if each row had been alone."""
    model, made = drafter(markov_head="rnn"), samples((20, 20, 20))
    state = model.start(3, 32)
    state.add(2)

    def extend(rows, starts, counts, where=None):
        width = max(counts)
        tokens = torch.zeros(len(rows), width + 1, dtype=torch.long)
        taps = torch.full((len(rows), width, len(TAPS) * WIDTH), 9.0)  # padding must not matter
        for i, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            tokens[i, : count + 1] = made[row].tokens_S[start : start + count + 1]
            taps[i, :count] = made[row].taps_SF[start : start + count]
        model.extend(state, tokens, taps, torch.tensor(counts), rows=where)

    extend([0, 1], [0, 0], [5, 8])
    extend([0, 1], [5, 8], [4, 1])
    state.truncate([7, 9])
    extend([0, 1], [7, 9], [1, 3])
    assert state.add(1) == slice(2, 3)
    extend([2], [0], [6], where=slice(2, 3))
    assert state.lengths.tolist() == [8, 12, 6]
    assert state.remove(0) == 2
    extend([2, 1], [6, 12], [2, 1])
    assert state.lengths.tolist() == [8, 13]
    anchors = torch.tensor([made[2].tokens_S[8], made[1].tokens_S[13]])
    together = propose(model, state, anchors, Sampling(temperature=1.0))
    for i, (row, length) in enumerate([(2, 8), (1, 13)]):
        alone = model.start(1, 32)
        alone.add(1)
        model.extend(alone, made[row].tokens_S[None, : length + 1], made[row].taps_SF[None, :length], [length])
        uniforms = torch.rand(2, model.block_size, generator=torch.Generator().manual_seed(1))[i : i + 1]
        single = model.propose(alone, anchors[i : i + 1], Sampling(temperature=1.0), uniforms, model.block_size)
        assert torch.equal(single.tokens_BG[0], together.tokens_BG[i])
        torch.testing.assert_close(single.q.probs()[0], together.q.probs()[i], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(single.confidence_BG[0], together.confidence_BG[i])


def context(model, sample, length=9):
    state = model.start(1, 32)
    state.add(1)
    model.extend(state, sample.tokens_S[None, : length + 1], sample.taps_SF[None, :length], [length])
    return state, sample.tokens_S[length : length + 1]


@pytest.mark.parametrize("name", ["vanilla", "dflash", "reduced", "reduced dflash"])
def test_proposals(name):
    model, sample = drafter(**DRAFTERS[name]), samples()[2]
    state, anchor = context(model, sample)
    greedy = propose(model, state, anchor)
    assert greedy.q.greedy
    assert torch.equal(greedy.tokens_BG, greedy.q.argmax())
    warm = propose(model, state, anchor, Sampling(temperature=1.0))
    assert not warm.q.greedy
    assert warm.q.probs().shape == (1, 4, VOCAB)
    torch.testing.assert_close(warm.q.probs().sum(-1), torch.ones(1, 4))
    assert bool((warm.q.prob(warm.tokens_BG) > 0).all())
    forced = propose(model, state, anchor, Sampling(temperature=1.0), greedy=True)
    assert torch.equal(forced.tokens_BG, greedy.tokens_BG)
    assert forced.q.greedy
    short = model.propose(state, anchor, Sampling(), torch.zeros(1, 4), 2)
    assert torch.equal(short.tokens_BG, greedy.tokens_BG[:, :2])
    if "reduced" in name:
        kept = torch.tensor([token in DRAFT_IDS for token in range(VOCAB)])
        assert not warm.q.probs()[..., ~kept].any()
        assert set(greedy.tokens_BG.flatten().tolist()) <= set(DRAFT_IDS)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_shortlist_is_q_cut_to_the_tokens_the_backbone_likes_most(head):
    model, sample = drafter(markov_head=head), samples()[2]
    state, anchor = context(model, sample)
    whole, _ = forced_proposal(model, state, anchor, sample.tokens_S[10:])
    model.shortlist = 0
    assert torch.equal(forced_proposal(model, state, anchor, sample.tokens_S[10:])[0], whole)
    model.shortlist = 10
    cut, _ = forced_proposal(model, state, anchor, sample.tokens_S[10:])
    assert cut.isfinite().sum(-1).tolist() == [10] * 4
    kept = cut.isfinite()
    torch.testing.assert_close(cut[kept], whole[kept], atol=1e-4, rtol=1e-4)
    proposal = propose(model, state, anchor, Sampling(temperature=1.0))
    assert bool((proposal.q.prob(proposal.tokens_BG) > 0).all())
    assert (proposal.q.probs() > 0).sum(-1).max() <= 10


def test_q_is_over_the_whole_vocabulary_on_every_device_unless_a_shortlist_is_given():
    """τ at temperature above 0 depends on q: what it is must not follow from the device or the vocabulary's size."""
    model = drafter()
    assert model.shortlist == 0
    model.vocabulary.target_size = 200_000
    assert model._shortlist_size() == 200_000


def test_a_shortlist_works_in_float64():
    model, sample = drafter(), samples()[2]
    model = model.double()
    model.head = model.head.to(dtype=torch.float64)
    model.shortlist = 10
    state, anchor = context(model, sample)
    proposal = propose(model, state, anchor, Sampling(temperature=1.0))
    assert (proposal.q.probs() > 0).sum(-1).max() <= 10


def test_temperature_is_the_drafters_too():
    model, sample = drafter(), samples()[2]
    state, anchor = context(model, sample)
    cold = propose(model, state, anchor, Sampling(temperature=0.05)).q.probs().amax(-1)
    hot = propose(model, state, anchor, Sampling(temperature=20.0)).q.probs().amax(-1)
    assert bool((cold[:, 0] > 0.9).all())
    assert bool((hot < 0.2).all())


def test_confidences_are_scaled_by_position():
    model, sample = drafter(), samples()[2]
    state, anchor = context(model, sample)
    raw = propose(model, state, anchor).confidence_BG
    model.confidence_scale = ConfidenceScale((2.0, 1.0, 0.5, 4.0), (0.0, -0.5, 0.25, 0.0))
    scaled = propose(model, state, anchor).confidence_BG
    expected = raw.logit() / torch.tensor([2.0, 1.0, 0.5, 4.0]) + torch.tensor([0.0, -0.5, 0.25, 0.0])
    torch.testing.assert_close(scaled.logit(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gated", "learned mask", "own embedding", "reduced"])
def test_gradients_reach_the_drafter_and_never_the_frozen_head(name):
    model = drafter(**DRAFTERS[name])
    embed, head = model.head.embed_VD.clone(), model.head.head_VD.clone()
    owned = {parameter.data_ptr() for parameter in model.parameters()}
    assert not owned & {model.head.embed_VD.data_ptr(), model.head.head_VD.data_ptr()}
    out = model.training_forward(batch())
    loss = logits(model, out.hidden_BNGD, out.markov_BNGR).square().mean() + out.confidence_logits_BNG.square().mean()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert model.head.embed_VD.grad is None
    assert torch.equal(model.head.embed_VD, embed)
    assert torch.equal(model.head.head_VD, head)


@pytest.mark.parametrize("name", ["vanilla", "gemma4", "window"])
def test_recomputed_layers_keep_less_and_change_no_gradient(name):
    model, b = drafter(**DRAFTERS[name]), batch(anchors=8)
    whole, kept = gradients_and_kept(model, b, lambda out: out.hidden_BNGD)
    model.recompute = True
    again, less = gradients_and_kept(model, b, lambda out: out.hidden_BNGD)
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert less < 0.6 * kept


def test_absent_anchors_give_no_gradient_trouble():
    model = drafter()
    b = batch(anchors=30)
    assert bool((b.anchors_BN < 0).any())
    out = model.training_forward(b)
    assert bool(out.hidden_BNGD.isfinite().all())
    (out.hidden_BNGD * (b.anchors_BN >= 0)[..., None, None]).square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_bfloat16_keeps_exact_rotary_frequencies():
    model = drafter()
    model.bfloat16()
    inv_freq = model.backbone.rotary._module.inv_freq
    assert inv_freq.dtype == torch.float32
    assert model.training_forward(batch()).hidden_BNGD.dtype == torch.bfloat16


def test_most_frequent_tokens():
    assert most_frequent(torch.tensor([3, 9, 9, 0, 4]), 3) == [1, 2, 4]
