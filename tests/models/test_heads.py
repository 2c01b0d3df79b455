"""Markov and confidence heads against the formulas of DSpark (arXiv 2607.05147), written out again."""

import pytest
import torch

from deepspec.models.drafter_config import DrafterConfigError
from deepspec.models.heads import ConfidenceHead, MarkovHead

VOCAB, DRAFT_VOCAB, RANK, WIDTH, G = 11, 9, 3, 5, 4


def make(kind, dtype=torch.float64):
    torch.manual_seed(0)
    head = MarkovHead(kind, VOCAB, DRAFT_VOCAB, RANK, WIDTH).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=dtype))
    return head


def draws(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    tokens_BG = torch.randint(VOCAB, (2, G), generator=generator)
    return tokens_BG, torch.randn(2, G, WIDTH, generator=generator, dtype=dtype)


def expected_m(head, tokens_BG, hidden_BGD):
    """The paper's formulas, one block and one position at a time."""
    out = torch.zeros(*tokens_BG.shape, RANK, dtype=hidden_BGD.dtype)
    for b in range(len(tokens_BG)):
        s = torch.zeros(RANK, dtype=hidden_BGD.dtype)
        for k in range(G):
            w1, h = head.markov_w1.weight[tokens_BG[b, k]], hidden_BGD[b, k]
            if head.kind == "vanilla":
                out[b, k] = w1
            elif head.kind == "gated":
                gate = head.gate_proj.weight @ torch.cat([h, w1]) + head.gate_proj.bias
                out[b, k] = torch.sigmoid(gate) * w1
            else:
                z = head.joint_proj.weight @ torch.cat([s, w1, h]) + head.joint_proj.bias
                g, c, o = z[:RANK], z[RANK : 2 * RANK], z[2 * RANK :]
                s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
                out[b, k] = torch.tanh(o)
    return out


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_formula_and_steps(kind):
    head, (tokens_BG, hidden_BGD) = make(kind), draws()
    m_BGR = head(head.embed(tokens_BG), hidden_BGD)
    torch.testing.assert_close(m_BGR, expected_m(head, tokens_BG, hidden_BGD))
    state = None
    for k in range(G):
        m_BR, state = head.step(head.embed(tokens_BG[:, k]), hidden_BGD[:, k], state)
        torch.testing.assert_close(m_BR, m_BGR[:, k])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_later_tokens_do_not_reach_earlier_positions(kind):
    head, (tokens_BG, hidden_BGD) = make(kind), draws()
    before = head(head.embed(tokens_BG), hidden_BGD)
    tokens_BG[:, 2] = (tokens_BG[:, 2] + 1) % VOCAB
    after = head(head.embed(tokens_BG), hidden_BGD)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_starts_at_the_plain_backbone_and_learns(kind):
    head, (tokens_BG, hidden_BGD) = MarkovHead(kind, VOCAB, DRAFT_VOCAB, RANK, WIDTH), draws(torch.float32)
    bias = head(head.embed(tokens_BG), hidden_BGD) @ head.markov_w2.weight.T
    assert bias.shape == (2, G, DRAFT_VOCAB)
    assert not bias.any()
    bias[0, 0, 0].backward()
    if kind != "rnn":
        assert head.markov_w2.weight.grad.any()


def test_tensor_names_are_the_published_ones():
    assert set(make("vanilla").state_dict()) == {"markov_w1.weight", "markov_w2.weight"}
    gated = make("gated").state_dict()
    assert gated["gate_proj.weight"].shape == (RANK, WIDTH + RANK)
    rnn = make("rnn").state_dict()
    assert rnn["joint_proj.weight"].shape == (3 * RANK, 2 * RANK + WIDTH)
    assert rnn["markov_w1.weight"].shape == (VOCAB, RANK)
    assert rnn["markov_w2.weight"].shape == (DRAFT_VOCAB, RANK)


def test_unknown_kind_is_named():
    with pytest.raises(DrafterConfigError, match="'lstm'"):
        MarkovHead("lstm", VOCAB, VOCAB, RANK, WIDTH)


@pytest.mark.parametrize("rank", [0, RANK])
def test_confidence_is_affine_and_starts_undecided(rank):
    head, (_, hidden_BGD) = ConfidenceHead(WIDTH, rank).double(), draws()
    previous = torch.ones(2, G, rank, dtype=torch.float64) if rank else None
    assert not head(hidden_BGD, previous).any()
    with torch.no_grad():
        head.proj.weight.copy_(torch.arange(WIDTH + rank))
        head.proj.bias.fill_(0.5)
    expected = hidden_BGD @ torch.arange(WIDTH).double() + 0.5 + sum(range(WIDTH, WIDTH + rank))
    torch.testing.assert_close(head(hidden_BGD, previous), expected)


def test_heads_start_as_docs_scaling_says():
    """Rows of W1 have length 1 on average, W2 is zero, and every confidence is one half."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = MarkovHead("vanilla", 500, 500, 64, 16)
        confidence = ConfidenceHead(16, 64)
    lengths = head.markov_w1.weight.square().sum(-1)
    assert float(lengths.mean()) == pytest.approx(1.0, abs=0.05)
    assert not head.markov_w2.weight.any()
    hidden, previous = torch.randn(3, 16), torch.randn(3, 64)
    assert torch.sigmoid(confidence(hidden, previous)).tolist() == [0.5, 0.5, 0.5]
