"""EAGLE-3: step-wise attention against a recomputation, and step i of training against i drafted tokens."""

import pytest
import torch

from deepspec.data.batch import collate
from deepspec.models.sampling import Sampling
from tests.models.drafting import (
    TAPS,
    WIDTH,
    batch,
    drafter,
    forced_proposal,
    frozen_head,
    gradients_and_kept,
    samples,
)
from tests.tiny import VOCAB

DRAFT_IDS = [token for token in range(VOCAB) if token % 3 != 1]
DRAFTERS = {
    "qwen3": dict(),
    "no q/k norm": dict(qk_norm=False),
    "llama3 rope": dict(family="llama_rope3"),
    "gemma3": dict(family="gemma3"),
    "gemma4": dict(family="gemma4"),
    "own embedding": dict(own_embedding=True),
    "reduced": dict(draft_ids=DRAFT_IDS),
}
STEPS = 4


def eagle(name="qwen3", **options):
    return drafter(kind="eagle3", ttt_length=STEPS, **DRAFTERS[name], **options)


def collated(made, **options):
    return collate(made, anchors_per_sample=1, block_size=STEPS, seed=0, epoch=0, **options)


def naive_steps(model, sample):
    """Hidden states [I, S, D] of one document: every index and step redone by itself, over an explicit key list."""
    layer, attention = model.layers[0], model.layers[0].self_attn
    length = len(sample)
    tokens = torch.cat([sample.tokens_S, sample.tokens_S[-1:].expand(STEPS)])
    groups = attention.heads // attention.kv_heads

    def fused(token, hidden):
        return layer.fuse(model.embed(token)[None, None], hidden[None, None])

    def rope(position):
        return model.rotary(sample.taps_SF, torch.tensor([[position]]))

    features = model.fc(sample.taps_SF)
    step0 = [attention.keys_values(fused(tokens[t + 1], features[t]), rope(t)) for t in range(length)]
    out = torch.zeros(STEPS, length, WIDTH)
    for t in range(length):
        keys = [step0[s][0][0, 0] for s in range(t + 1)]
        values = [step0[s][1][0, 0] for s in range(t + 1)]
        hidden = features[t]
        for i in range(STEPS):
            x, at = fused(tokens[t + 1 + i], hidden), rope(t + i)
            if i:
                k, v = attention.keys_values(x, at)
                keys.append(k[0, 0])
                values.append(v[0, 0])
            query = attention.queries(x, at)[0, 0]
            heads = []
            for h in range(attention.heads):
                key = torch.stack([k[h // groups] for k in keys])
                value = torch.stack([v[h // groups] for v in values])
                heads.append((key @ query[h] * attention.scale).softmax(0) @ value)
            hidden = layer.finish(hidden[None, None], attention.o_proj(torch.cat(heads))[None, None])[0, 0]
            out[i, t] = model.norm(hidden)
    return out


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_steps_equal_a_naive_recomputation(name):
    model, made = eagle(name), samples((9, 12))
    expected = [naive_steps(model, sample) for sample in made]
    for options in ({}, {"pack_tokens": 24}):
        b = collated(made, **options)
        hidden = model.training_forward(b).hidden_IBSD
        for document, sample in enumerate(made):
            row, at = (b.segments_BS == document).nonzero().unbind(1)
            mine = hidden[:, row, at]
            for i in range(STEPS):
                inside = len(sample) - 1 - i  # later indices read tokens beyond the document
                torch.testing.assert_close(mine[i, :inside], expected[document][i, :inside], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_step_i_equals_i_drafted_tokens(name):
    model, sample = eagle(name), samples((15,))[0]
    hidden = model.training_forward(collated([sample])).hidden_IBSD[:, 0]
    for context in (1, 4, 10):  # index t = context − 1 drafts after the anchor x_context
        state = model.start(1, 32)
        state.add(1)
        for start, stop in [(0, 1), (1, context)]:  # in two pieces
            if start < stop:
                tokens, taps = sample.tokens_S[None, start : stop + 1], sample.taps_SF[None, start:stop]
                model.extend(state, tokens, taps, [stop - start])
        seen, _ = forced_proposal(model, state, sample.tokens_S[context : context + 1], sample.tokens_S[context + 1 :])
        expected = model.base_logits(hidden[:, context - 1])
        torch.testing.assert_close(seen, expected, atol=2e-4, rtol=2e-4)


def test_ragged_rows_equal_states_made_from_scratch():
    model, made = eagle(), samples((20, 20, 20))
    state = model.start(3, 32)
    state.add(2)

    def extend(rows, starts, counts, where=None):
        tokens = torch.zeros(len(rows), max(counts) + 1, dtype=torch.long)
        taps = torch.full((len(rows), max(counts), len(TAPS) * WIDTH), 9.0)
        for i, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            tokens[i, : count + 1] = made[row].tokens_S[start : start + count + 1]
            taps[i, :count] = made[row].taps_SF[start : start + count]
        model.extend(state, tokens, taps, torch.tensor(counts), rows=where)

    warm = Sampling(temperature=1.0)
    extend([0, 1], [0, 0], [5, 8])
    anchors = torch.tensor([made[0].tokens_S[5], made[1].tokens_S[8]])
    model.propose(state, anchors, warm, torch.rand(2, STEPS), STEPS)  # leaves nothing behind
    extend([0, 1], [5, 8], [3, 1])
    state.add(1)
    extend([2], [0], [6], where=slice(2, 3))
    assert state.remove(0) == 2
    extend([2, 1], [6, 9], [2, 4])
    assert state.lengths.tolist() == [8, 13]
    uniforms = torch.rand(2, STEPS, generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([made[2].tokens_S[8], made[1].tokens_S[13]])
    together = model.propose(state, anchors, warm, uniforms, STEPS)
    for i, (row, length) in enumerate([(2, 8), (1, 13)]):
        alone = model.start(1, 32)
        alone.add(1)
        model.extend(alone, made[row].tokens_S[None, : length + 1], made[row].taps_SF[None, :length], [length])
        single = model.propose(alone, anchors[i : i + 1], warm, uniforms[i : i + 1], STEPS)
        assert torch.equal(single.tokens_BG[0], together.tokens_BG[i])
        torch.testing.assert_close(single.q.probs()[0], together.q.probs()[i], atol=1e-5, rtol=1e-4)


def test_reduced_vocabulary_stays_inside():
    model, sample = eagle("reduced"), samples((15,))[0]
    state = model.start(1, 32)
    state.add(1)
    model.extend(state, sample.tokens_S[None, :10], sample.taps_SF[None, :9], [9])
    proposal = model.propose(state, sample.tokens_S[9:10], Sampling(temperature=1.0), torch.rand(1, STEPS), 3)
    assert proposal.tokens_BG.shape == (1, 3)
    assert set(proposal.tokens_BG.flatten().tolist()) <= set(DRAFT_IDS)
    kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.tensor(DRAFT_IDS), True)
    assert not proposal.q.probs()[..., ~kept].any()
    assert proposal.confidence_BG is None


def test_gradients_reach_every_weight_and_not_the_head():
    model, before = eagle(), frozen_head().head_VD
    out = model.training_forward(batch(block_size=STEPS))
    model.base_logits(out.hidden_IBSD).square().mean().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())
    assert torch.equal(model.head.head_VD, before)
    assert model.head.head_VD.grad is None


def test_later_steps_train_through_earlier_ones():
    """Training-time test: the loss of the last step alone must reach fc, through the drafter's own hidden states."""
    model = eagle()
    out = model.training_forward(batch(block_size=STEPS))
    out.hidden_IBSD[-1].square().mean().backward()
    assert bool(model.fc.weight.grad.any())


def test_recomputed_steps_keep_less_and_change_no_gradient():
    model, b = eagle(), batch(block_size=STEPS)
    whole, kept = gradients_and_kept(model, b, lambda out: out.hidden_IBSD)
    model.recompute = True
    again, less = gradients_and_kept(model, b, lambda out: out.hidden_IBSD)
    assert whole.keys() == again.keys()
    for name, value in whole.items():
        torch.testing.assert_close(again[name], value, msg=name)
    assert less < 0.7 * kept
