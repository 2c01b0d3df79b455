"""Prompt lookup against a search over the text; the small model's cache against recomputation."""

import pytest
import torch

from deepspec.models.baselines import BaselineError, CausalDrafter, PromptLookup
from deepspec.models.decode import generate
from deepspec.models.sampling import Sampling
from tests.tiny import VOCAB, tiny_target


def lookup_by_search(text, length, sizes):
    """What followed the latest earlier occurrence of the longest suffix, by scanning."""
    for size in reversed(sizes):
        if size > len(text):
            continue
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + length]
    return []


def test_lookup_equals_a_search():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 4, (80,), generator=generator).tolist()
    drafter = PromptLookup(VOCAB, block_size=5, max_ngram=3)
    state = drafter.start(2, 100)
    state.add(1)
    at = 0
    while at < 70:
        count = int(torch.randint(1, 6, (), generator=generator))
        drafter.extend(state, torch.tensor([text[at : at + count + 1]]), None, torch.tensor([count]))
        at += count
        proposal = drafter.propose(state, torch.tensor([text[at]]), Sampling(), torch.zeros(1, 5), 5)
        want = lookup_by_search(text[: at + 1], 5, range(1, 4))
        assert proposal.tokens_BG[0, : proposal.lengths_B[0]].tolist() == want
        assert proposal.q.greedy


def test_lookup_rows_move_with_their_text():
    drafter = PromptLookup(VOCAB, block_size=2)
    state = drafter.start(3, 10)
    state.add(3)
    rows = torch.tensor([[1, 2, 1, 0], [3, 4, 3, 0], [5, 6, 5, 0]])
    drafter.extend(state, rows, None, torch.tensor([3, 3, 3]), rows=slice(0, 3))
    state.remove(0)
    proposal = drafter.propose(state, torch.tensor([6, 4]), Sampling(), torch.zeros(2, 2), 2)
    assert proposal.tokens_BG.tolist() == [[5, 6], [3, 4]]


def test_lookup_accepts_a_repeated_text():
    """A target that repeats itself is where lookup shines: fewer rounds than tokens."""
    target = tiny_target("qwen3")
    prompt = [7, 8, 9, 10] * 6
    plain = next(iter(generate(target, [prompt], max_new_tokens=60, stop_ids=())))
    lookup = next(iter(generate(target, [prompt], max_new_tokens=60, stop_ids=(), drafter=PromptLookup(VOCAB, 6))))
    assert lookup.tokens == plain.tokens
    assert len(lookup.rounds) < 59


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_causal_proposals_equal_recomputation(family):
    """After any mix of accepted lengths, joins and removals the proposals are those of the model on the whole text."""
    model = tiny_target(family, seed=1, tie_word_embeddings=False)
    drafter = CausalDrafter(model, VOCAB, 3)
    generator = torch.Generator().manual_seed(0)
    state = drafter.start(3, 60)
    texts = torch.randint(3, VOCAB, (3, 60), generator=generator).tolist()
    at = [5, 2]
    state.add(2)
    rows = torch.tensor([text[:6] for text in texts[:2]])
    drafter.extend(state, rows, None, torch.tensor(at), rows=slice(0, 2))

    def expected(text):
        ids = list(text)
        for _ in range(3):
            ids.append(int(model.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(text) :]

    for step in range(8):
        anchors = torch.tensor([text[n] for text, n in zip(texts, at, strict=False)])
        proposal = drafter.propose(state, anchors, Sampling(), torch.zeros(len(at), 3), 3)
        want = [expected(text[: n + 1]) for text, n in zip(texts, at, strict=False)]
        assert proposal.tokens_BG.tolist() == want
        counts = []
        for b, n in enumerate(at):
            accepted = int(torch.randint(0, 4, (), generator=generator))
            texts[b][n + 1 : n + 1 + accepted] = want[b][:accepted]
            counts.append(accepted + 1)
        padded = torch.tensor([text[n : n + 5] for text, n in zip(texts, at, strict=False)])
        drafter.extend(state, padded, None, torch.tensor(counts))
        at = [n + count for n, count in zip(at, counts, strict=True)]
        if step == 2:
            state.add(1)
            drafter.extend(state, torch.tensor([texts[2][:8]]), None, torch.tensor([7]), rows=slice(2, 3))
            at.append(7)
        if step == 5:
            state.remove(0)
            texts, at = [texts[2], texts[1]], [at[2], at[1]]


def test_padded_vocabularies_may_differ_but_not_tokenizers():
    target = tiny_target("qwen3")
    want = [c.tokens for c in generate(target, [[5, 6]], max_new_tokens=6, stop_ids=())]
    for size in (64, 128):
        drafter = CausalDrafter(tiny_target("llama", vocab_size=size), VOCAB, 2)
        done = list(generate(target, [[5, 6]], max_new_tokens=6, stop_ids=(), drafter=drafter))
        assert [c.tokens for c in done] == want
        sampled = list(
            generate(target, [[90, 96]], max_new_tokens=6, stop_ids=(), drafter=drafter, sampling=Sampling(1.0))
        )
        assert len(sampled[0].tokens) == 6
    with pytest.raises(BaselineError, match="same tokenizer"):
        CausalDrafter(target, 40_000)


def test_options():
    with pytest.raises(BaselineError, match="n-gram"):
        PromptLookup(VOCAB, max_ngram=1, min_ngram=2)
    with pytest.raises(BaselineError, match="block_size"):
        PromptLookup(VOCAB, block_size=0)
