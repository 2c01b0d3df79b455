"""Objectives against loops written from the definitions: rows by hand, terms, gradients, metrics, normalisation."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from deepspec.data.batch import collate, empty_batch
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.train.objectives import LossWeights, denominators, objective, position_decay, rows_of
from tests.models.drafting import TAPS, WIDTH, batch, drafter, logits, samples
from tests.tiny import VOCAB

DRAFT_IDS = [token for token in range(VOCAB) if token % 3 != 1]
KINDS = {
    "dspark": dict(),
    "rnn": dict(markov_head="rnn"),
    "dflash": dict(kind="dflash"),
    "softcap": dict(family="gemma4"),
    "reduced": dict(draft_ids=DRAFT_IDS),
}


def exact(**options):
    """A float64 drafter, so that references differ by the float32 weights alone."""
    model = drafter(**options).double()
    model.head = model.head.to(dtype=torch.float64)
    return model


def naive(model, b, weights: LossWeights, denominator: float):
    """Loss and metrics, one position at a time over dense probabilities of the whole target vocabulary."""
    out, g = model(b), model.block_size
    ids = torch.arange(VOCAB) if model.draft_ids_V is None else model.draft_ids_V
    z_BNGV = logits(model, out.hidden_BNGD, out.markov_BNGR)
    sums = dict.fromkeys(("ce", "tv", "confidence", "confidence_error", "w", "count", "tau", "blocks"), 0.0)
    accepts = torch.zeros(2, g, dtype=torch.float64)
    for row, anchors in enumerate(b.anchors_BN.tolist()):
        for n, anchor in enumerate(anchors):
            if anchor < 0:
                continue
            chain, tau = 1.0, 1.0
            for k in range(1, g + 1):
                at = anchor + k
                if at >= b.tokens_BS.shape[1] or not b.supervised_BS[row, at]:
                    break
                if b.segments_BS[row, at] != b.segments_BS[row, anchor]:
                    break
                w = math.exp(-(k - 1) / weights.gamma_decay)
                label = int(b.tokens_BS[row, at])
                log_q = torch.log_softmax(z_BNGV[row, n, k - 1], -1)
                q = torch.zeros(VOCAB, dtype=log_q.dtype).index_put((ids,), log_q.exp())
                last = b.last_LD[b.last_row_BS[row, at - 1]].double()
                p = torch.softmax(model.head.logits(last), -1)
                tv = (q - p).abs().sum()
                accept = float(1 - tv.detach() / 2)
                sums["w"] += w
                sums["count"] += 1
                sums["ce"] = sums["ce"] - (w * log_q[(ids == label).nonzero()[0, 0]] if label in ids else 0)
                sums["tv"] = sums["tv"] + w * tv
                if out.confidence_logits_BNG is not None:
                    c = torch.sigmoid(out.confidence_logits_BNG[row, n, k - 1])
                    bce = -accept * torch.log(c) - (1 - accept) * torch.log(1 - c)
                    sums["confidence"] = sums["confidence"] + w * bce
                    sums["confidence_error"] += abs(float(c.detach()) - accept)
                accepts[:, k - 1] += torch.tensor([accept, 1.0])
                chain *= accept
                tau += chain
            else:
                sums["tau"] += tau
                sums["blocks"] += 1
    loss = (weights.ce * sums["ce"] + weights.tv * sums["tv"] + weights.confidence * sums["confidence"]) / denominator
    return loss, {name: torch.as_tensor(value).detach().item() for name, value in sums.items()}, accepts


def made_batch(model, pack_tokens=None, anchors=5, **options):
    return batch(samples(**options), anchors=anchors, block_size=model.block_size, pack_tokens=pack_tokens)


def parameter_gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(mine, reference, **tolerance):
    assert mine.keys() == reference.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(
            gradient, reference[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def close(value, expected):
    torch.testing.assert_close(value.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_loss_gradients_and_metrics_equal_the_definitions(options):
    model = exact(**options)
    b = made_batch(model, pack_tokens=32)
    weights = LossWeights(ce=0.3, tv=0.9, confidence=0.7, gamma_decay=3.0)
    total = denominators(b, model.config, weights)
    expected, sums, accepts = naive(model, b, weights, float(total))
    loss, metrics = objective(model, b, weights, total)
    close(total, sums["w"])
    close(loss.detach(), expected.detach())
    close(metrics["ce"], [sums["ce"], sums["w"]])
    close(metrics["tv"], [sums["tv"], sums["w"]])
    close(metrics["loss"][0] / metrics["loss"][1], expected.detach())
    close(metrics["acceptance"], accepts)
    close(metrics["tau"], [sums["tau"], sums["blocks"]])
    assert sums["blocks"] > 3
    assert metrics["top1"][1] == sums["count"]
    if model.config.confidence:
        close(metrics["confidence"], [sums["confidence"], sums["w"]])
        close(metrics["confidence_error"], [sums["confidence_error"], sums["count"]])
    else:
        assert "confidence" not in metrics
    assert_same_gradients(parameter_gradients(model, loss), parameter_gradients(model, expected), rtol=1e-5, atol=1e-7)


def test_log_acceptance_term():
    model = exact(confidence=False)
    b, weights = made_batch(model), LossWeights(ce=0, tv=0, lk=1.0)
    total = denominators(b, model.config, weights)
    loss, metrics = objective(model, b, weights, total)
    rows, out = rows_of(b, model.config, weights), model(b)
    q = torch.softmax(logits(model, out.hidden_BNGD, out.markov_BNGR), -1)
    p = torch.softmax(model.head.logits(b.last_LD.double()), -1)[rows.index_BNG.clamp(min=0)]
    expected = -(rows.weights_BNG * torch.log(torch.minimum(q, p).sum(-1))).sum() / total
    close(loss.detach(), expected.detach())
    close(metrics["lk"][0] / metrics["lk"][1], expected.detach())
    assert_same_gradients(parameter_gradients(model, loss), parameter_gradients(model, expected), rtol=1e-5, atol=1e-7)


def test_feature_term():
    model = exact(confidence=False)
    b, weights = made_batch(model), LossWeights(ce=0, tv=0, feature=0.5)
    total = denominators(b, model.config, weights)
    loss, metrics = objective(model, b, weights, total)
    rows, hidden_BNGD = rows_of(b, model.config, weights), model(b).hidden_BNGD
    expected = 0.0
    for place in rows.valid_BNG.nonzero():
        last_D = b.last_LD[rows.index_BNG[tuple(place)]].double()
        distance = (hidden_BNGD[tuple(place)] - last_D) @ (hidden_BNGD[tuple(place)] - last_D)
        expected = expected + rows.weights_BNG[tuple(place)] * distance / (last_D @ last_D)
    close(loss.detach(), (0.5 * expected / total).detach())
    close(metrics["feature"][0] / metrics["feature"][1], (expected / total).detach())
    reference = parameter_gradients(model, 0.5 * expected / total)
    mine = parameter_gradients(model, loss)
    assert_same_gradients({name: mine[name] for name in reference}, reference, rtol=1e-5, atol=1e-7)


def test_rows_by_hand():
    made = samples(lengths=(9,))[0]
    made = dataclasses.replace(
        made, tokens_S=torch.arange(20, 29), supervised_S=torch.tensor([0, 0, 1, 1, 1, 1, 0, 1, 1]).bool()
    )
    made.last_ID = torch.zeros(6, WIDTH)
    b = collate([made], anchors_per_sample=5, block_size=3, seed=0, epoch=0)
    assert b.anchors_BN.tolist() == [[2, 3, 4, 7]]
    b.anchors_BN = F.pad(b.anchors_BN, (0, 1), value=-1)  # a fuller neighbour would leave this row an absent one
    # labels are tokens 2 3 4 5 7 8, so their p come from positions 1 2 3 4 6 7 = rows 0…5
    rows = rows_of(b, DrafterConfig(kind="dflash", block_size=3), LossWeights())
    assert rows.valid_BNG[0].int().tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert rows.labels_BNG[0, 0].tolist() == [23, 24, 25]
    assert rows.index_BNG[0].tolist() == [[1, 2, 3], [2, 3, -1], [3, -1, -1], [5, -1, -1], [-1, -1, -1]]
    torch.testing.assert_close(rows.weights_BNG[0, 1], torch.tensor([1.0, math.exp(-0.5), 0.0]))


def test_p_of_a_label_is_the_head_of_the_state_before_it():
    """The label's own state, or its successor's, would give another p: a target that is certain tells them apart."""
    head = FrozenHead(torch.eye(VOCAB)[:, :WIDTH].contiguous() * 50)
    made = samples(lengths=(12,), vocab=WIDTH)[0]
    made.last_ID = F.one_hot(made.tokens_S[made.supervised_S], WIDTH).float()  # last[t] points at token t+1
    b = collate([made], anchors_per_sample=8, block_size=3, seed=0, epoch=0)
    config = DrafterConfig(kind="dflash", block_size=3)
    rows = rows_of(b, config, LossWeights())
    states = head.embed_VD[rows.labels_BNG]  # a drafter that predicts every label with certainty
    perfect = SimpleNamespace(config=config, head=head, draft_ids_V=None)
    stand_in = Standin(perfect, hidden_BNGD=states, markov_BNGR=None, confidence_logits_BNG=None)
    _, metrics = objective(stand_in, b, LossWeights(), denominators(b, config, LossWeights()))
    close(metrics["acceptance"][0], metrics["acceptance"][1])
    close(metrics["tau"][0] / metrics["tau"][1], 4.0)
    close(metrics["ce"][0], 0.0)
    assert metrics["top1"][0] == metrics["top1"][1] > 0


class Standin:
    """A drafter whose training forward is given."""

    def __init__(self, like, **output):
        self.config, self.head, self.draft_ids_V = like.config, like.head, like.draft_ids_V
        self.output = SimpleNamespace(**output)

    def __call__(self, b):
        return self.output


def test_eagle3_equals_a_loop_over_positions_and_steps():
    config, weights = DrafterConfig(kind="eagle3", ttt_length=3), LossWeights(soft=2.0, step_decay=0.8)
    b = batch(samples(), pack_tokens=32)
    rows, length = b.tokens_BS.shape
    head = FrozenHead(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0)).double())
    hidden_IBSD = torch.randn(3, rows, length, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    hidden_IBSD.requires_grad_()
    expected, weighed, accepts = 0.0, 0.0, torch.zeros(2, 3, dtype=torch.float64)
    total = len(b.ids)
    for row in range(rows):
        for t in range(length):
            for i in range(3):
                inside = range(t + 1, t + 3 + i)  # the anchor t+1 … the label t+2+i
                if inside[-1] >= length or b.segments_BS[row, t] < 0:
                    continue
                if not all(b.supervised_BS[row, s] and b.segments_BS[row, s] == b.segments_BS[row, t] for s in inside):
                    continue
                p = torch.softmax(head.logits(b.last_LD[b.last_row_BS[row, t + 1 + i]].double()), -1)
                log_q = torch.log_softmax(head.logits(hidden_IBSD[i, row, t]), -1)
                tokens = int((b.segments_BS == b.segments_BS[row, t]).sum())  # of this sequence, in this row or not
                expected = expected - 2.0 * 0.8**i / tokens * (p * log_q).sum()
                weighed += 0.8**i / tokens
                accepts[:, i] += torch.stack([torch.minimum(p, log_q.exp()).sum(), torch.tensor(1.0)]).detach()
    denominator = denominators(b, config, weights)
    stand_in = Standin(SimpleNamespace(config=config, head=head, draft_ids_V=None), hidden_IBSD=hidden_IBSD)
    loss, metrics = objective(stand_in, b, weights, denominator)
    close(denominator, total)
    close(loss.detach(), (expected / total).detach())
    close(metrics["acceptance"], accepts)
    close(metrics["soft"][0] / metrics["soft"][1], (expected / weighed / 2).detach())
    close(metrics["loss"][0] / metrics["loss"][1], (expected / total).detach())
    mine, reference = (torch.autograd.grad(value, hidden_IBSD)[0] for value in (loss, expected / total))
    torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-8)


def gradient_of_sequences(lengths, *, prompt):
    """Size of EAGLE-3's gradient at each of two sequences, by hidden state, when every row's own gradient is alike."""
    made = samples(lengths=lengths)
    for sample in made:
        supervised_S = torch.arange(len(sample)) >= prompt
        sample.supervised_S = supervised_S
        # one and the same state everywhere, so that p and q, and with them the rows' gradients, do not differ
        sample.last_ID = torch.ones(int(supervised_S[1:].sum()), WIDTH)
    b = batch(made)
    config, weights = DrafterConfig(kind="eagle3", ttt_length=3), LossWeights()
    head = FrozenHead(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0)).double())
    hidden_IBSD = torch.zeros(3, *b.tokens_BS.shape, WIDTH, dtype=torch.float64).requires_grad_()
    stand_in = Standin(SimpleNamespace(config=config, head=head, draft_ids_V=None), hidden_IBSD=hidden_IBSD)
    loss, _ = objective(stand_in, b, weights, denominators(b, config, weights))
    (gradient,) = torch.autograd.grad(loss, hidden_IBSD)
    return [float(gradient[:, row].norm(dim=-1).sum()) for row in range(2)]


def test_eagle3_weighs_sequences_alike():
    """Fully supervised sequences of 40 and 10 tokens have (T − 2 − i) rows at step i, each weighing 0.8^i / T.

    Normalised over all tokens, the long one would own 112 of 134.4 parts, 0.83 of the gradient.
    """
    long, short = gradient_of_sequences((40, 10), prompt=0)
    share = sum(0.8**i * (40 - 2 - i) for i in range(3)) / 40
    other = sum(0.8**i * (10 - 2 - i) for i in range(3)) / 10
    assert long / (long + short) == pytest.approx(share / (share + other), rel=1e-6)
    assert share / (share + other) < 0.58


def test_decay_follows_the_block():
    """DFlash, arXiv 2602.06036, appendix A.1: 4, 5 and 7 for blocks of 8, 10 and 16 tokens, the anchor included."""
    assert [position_decay(draft_tokens) for draft_tokens in (7, 9, 15)] == [4.0, 5.0, 7.0]
    assert position_decay(5) == pytest.approx(3.0)
    assert position_decay(12) == pytest.approx(6.0)
    assert position_decay(21) == pytest.approx(9.0)
    config = DrafterConfig(kind="dflash", block_size=15)
    assert LossWeights().resolved(config).gamma_decay == 7.0
    assert LossWeights(gamma_decay=4.0).resolved(config).gamma_decay == 4.0


def test_absent_anchors_and_unread_states_count_nowhere():
    model = exact()
    b = made_batch(model, anchors=14)
    assert (b.anchors_BN < 0).any()
    weights = LossWeights()
    total = denominators(b, model.config, weights)
    fewer = dataclasses.replace(b, anchors_BN=b.anchors_BN.clone())
    fewer.anchors_BN[1:] = -1  # only the first document keeps its anchors …
    changed = copy.deepcopy(fewer)
    changed.tokens_BS[1:] = 7  # … so what the others hold is nobody's business
    changed.taps_BSF[1:] *= -3
    changed.last_LD[b.last_row_BS[1][b.last_row_BS[1] >= 0]] += 5
    (one, one_metrics), (other, other_metrics) = (objective(model, x, weights, total) for x in (fewer, changed))
    assert torch.equal(one.detach(), other.detach())
    assert all(torch.equal(one_metrics[name], other_metrics[name]) for name in one_metrics)
    assert_same_gradients(parameter_gradients(model, one), parameter_gradients(model, other), rtol=0, atol=0)
    alone = batch(samples()[:1], anchors=14, block_size=model.block_size)
    close(objective(model, alone, weights, total)[0].detach(), one.detach())


@pytest.mark.parametrize("options", [dict(), dict(kind="eagle3", ttt_length=3)], ids=["dspark", "eagle3"])
def test_micro_batches_and_ranks_sum_to_the_whole_batch(options):
    """World-size invariance: any split of the samples, uneven and with an idle rank, gives the same sums."""
    model, weights, made = exact(**options), LossWeights(), samples(lengths=(19, 11, 26, 8, 31))
    whole = batch(made, anchors=6, block_size=model.block_size)
    total = denominators(whole, model.config, weights)
    loss, metrics = objective(model, whole, weights, total)
    expected = parameter_gradients(model, loss)
    idle = empty_batch(len(TAPS) * WIDTH, WIDTH)
    for parts in ([made[:1], made[1:]], [made[:3], made[3:4], made[4:]]):
        batches = [batch(part, anchors=6, block_size=model.block_size, pack_tokens=40) for part in parts] + [idle]
        close(sum(denominators(x, model.config, weights) for x in batches), total)
        done = [objective(model, x, weights, total) for x in batches]
        split = sum(value for value, _ in done)
        close(split.detach(), loss.detach())
        for name, value in metrics.items():
            close(sum(part[name] for _, part in done), value)
        assert_same_gradients(parameter_gradients(model, split), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [dict(), dict(kind="eagle3", ttt_length=3)], ids=["dspark", "eagle3"])
def test_an_idle_rank_has_zero_gradients_for_everything_that_trains(options):
    model = exact(**options)
    loss, metrics = objective(model, empty_batch(len(TAPS) * WIDTH, WIDTH), LossWeights(), torch.tensor(0.0))
    assert loss == 0
    assert all(value.abs().max() == 0 for value in metrics.values())
    busy = parameter_gradients(model, objective(model, made_batch(model), LossWeights(), torch.tensor(9.0))[0])
    idle = parameter_gradients(
        model, objective(model, empty_batch(len(TAPS) * WIDTH, WIDTH), LossWeights(), torch.tensor(9.0))[0]
    )
    assert idle.keys() == busy.keys()
    assert all(gradient.abs().max() == 0 for gradient in idle.values())


def test_the_confidence_label_is_a_constant():
    """With only the confidence term, nothing but what feeds the confidence logits moves: W2 does not."""
    model = exact()
    b = made_batch(model)
    loss, _ = objective(model, b, LossWeights(ce=0, tv=0), torch.tensor(10.0))
    gradients = parameter_gradients(model, loss)
    assert gradients["confidence_head.proj.weight"].abs().max() > 0
    assert gradients["markov_head.markov_w2.weight"].abs().max() == 0


def test_the_head_stays_as_it_is():
    model = exact()
    before = model.head.head_VD.clone(), model.head.embed_VD.clone()
    loss, metrics = objective(model, made_batch(model), LossWeights(), torch.tensor(3.0))
    loss.backward()
    assert model.head.head_VD.grad is None
    assert torch.equal(model.head.head_VD, before[0])
    assert torch.equal(model.head.embed_VD, before[1])
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(("field", "value"), [("ce", -0.1), ("gamma_decay", 0.0), ("step_decay", -1.0)])
def test_weights_are_checked(field, value):
    with pytest.raises(ValueError, match=rf"loss\.{field}={value}"):
        LossWeights(**{field: value})
