"""Losslessness by enumeration: every draft and every cell of the uniforms, no sampling.

All probabilities are eighths and quarters, so each decision changes only on multiples of 1/24 (1/168 for the final draw
after a one-hot proposal) and midpoint grids integrate exactly.
"""

import itertools

import numpy as np
import pytest
import torch

from deepspec.models.sampling import Distribution
from deepspec.models.verify import SURVIVAL, THRESHOLD_RULES, ScheduleError, Static, Threshold, survival, verify

V, K = 3, 2
_P = torch.tensor([1.0, 3.0, 4.0]) / 8
_Q = torch.tensor([2.0, 1.0, 1.0]) / 4


def p_after(prefix):
    """Target distribution after a prefix: a rotation of (1, 3, 4)/8 that depends on it."""
    return _P.roll(sum((i + 1) * token for i, token in enumerate(prefix)))


def q_after(prefix):
    return _Q.roll(2 * sum(prefix))


def grid(cells):
    axes = [(torch.arange(n) + 0.5) / n for n in cells]
    return torch.cartesian_prod(*axes)


def dense(rows):
    return Distribution(V, logits=torch.stack(rows).log())


def enumerate_output(propose, length_of, cells, lie=False):
    """Distribution of the next K + 1 tokens: what a round commits, continued by the target itself."""
    uniforms = grid(cells)
    total = torch.zeros(V, V, V, dtype=torch.float64)
    for draft, weight, q_rows in propose():
        p = dense([p_after(draft[:k]) for k in range(K + 1)])
        q = Distribution.one_hot(torch.tensor(draft), V) if q_rows is None else dense(q_rows)
        if lie:
            q = dense([torch.full((V,), 1 / 3)] * K)
        rows = len(uniforms)
        wide_p = Distribution(V, logits=p.logits.expand(rows, -1, -1))
        wide_q = (
            Distribution.one_hot(q.ids.expand(rows, -1), V)
            if q.greedy
            else Distribution(V, logits=q.logits.expand(rows, -1, -1))
        )
        lengths = torch.full((rows,), length_of(draft))
        accepted, following = verify(wide_p, torch.tensor([draft]).expand(rows, -1), wide_q, lengths, uniforms)
        counts = torch.bincount(accepted * V + following, minlength=(K + 1) * V).tolist()
        for outcome, count in enumerate(counts):
            n, token = divmod(outcome, V)
            committed = (*draft[:n], token)
            for rest in itertools.product(range(V), repeat=K + 1 - len(committed)):
                full = (*committed, *rest)
                chance = weight * count / rows
                for i in range(len(committed), K + 1):
                    chance *= float(p_after(full[:i])[full[i]])
                total[full] += chance
    return total


def expected():
    total = torch.zeros(V, V, V, dtype=torch.float64)
    for full in itertools.product(range(V), repeat=K + 1):
        total[full] = torch.tensor([float(p_after(full[:i])[full[i]]) for i in range(K + 1)]).double().prod()
    return total


def probabilistic():
    for draft in itertools.product(range(V), repeat=K):
        rows = [q_after(draft[:k]) for k in range(K)]
        yield draft, float(rows[0][draft[0]] * rows[1][draft[1]]), rows


def one_hot():
    first = int(q_after(()).argmax())
    yield (first, int(q_after((first,)).argmax())), 1.0, None


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize(("propose", "cells"), [(probabilistic, (24, 24, 24)), (one_hot, (8, 8, 168))])
def test_output_distribution_is_exactly_the_targets(propose, cells, length):
    torch.testing.assert_close(enumerate_output(propose, lambda _: length, cells), expected(), atol=1e-7, rtol=0)


def test_causal_length_is_lossless_and_a_retrospective_one_is_not():
    def causal(draft):  # whether x_2 is offered depends on x_1 only
        return 2 if draft[0] == 1 else 1

    def retrospective(draft):  # whether x_2 is offered depends on x_2
        return 2 if draft[1] == 1 else 1

    cells = (24, 24, 24)
    torch.testing.assert_close(enumerate_output(probabilistic, causal, cells), expected(), atol=1e-7, rtol=0)
    assert (enumerate_output(probabilistic, retrospective, cells) - expected()).abs().max() > 1e-2


def test_a_wrong_q_biases_the_output():
    biased = enumerate_output(probabilistic, lambda _: 2, (24, 24, 24), lie=True)
    assert (biased - expected()).abs().max() > 1e-2


def test_greedy_accepts_the_argmax_prefix():
    p = Distribution.one_hot(torch.tensor([[4, 5, 6, 7]] * 4), 9)
    draft = torch.tensor([[4, 5, 6], [4, 0, 6], [0, 5, 6], [4, 5, 6]])
    accepted, following = verify(
        p, draft, Distribution.one_hot(draft, 9), torch.tensor([3, 3, 3, 1]), torch.zeros(4, 4)
    )
    assert accepted.tolist() == [3, 1, 0, 1]
    assert following.tolist() == [7, 5, 4, 5]


def test_no_proposals_is_plain_sampling():
    p = Distribution(3, logits=torch.tensor([[[0.25, 0.25, 0.5]]]).log().expand(4, -1, -1))
    uniforms = torch.tensor([[0.1], [0.3], [0.6], [0.9]])
    accepted, following = verify(p, torch.empty(4, 0, dtype=torch.long), p[:, :0], torch.zeros(4).long(), uniforms)
    assert accepted.tolist() == [0, 0, 0, 0]
    assert following.tolist() == [0, 1, 2, 2]


def test_survival_is_the_product_of_the_confidences():
    confidence = np.array([[0.9, 0.9, 0.9], [0.5, 1.0, 1.0]])
    np.testing.assert_allclose(survival(confidence), [[0.9, 0.81, 0.729], [0.5, 0.5, 0.5]])


CONFIDENCE = torch.tensor([[0.9, 0.9, 0.9], [0.5, 1.0, 1.0], [0.9, 0.5, 0.99]])


def test_the_papers_threshold_ends_at_the_first_unsure_token():
    """DSpark's Figure 5: the first c_k below the threshold, whatever the product of those before it."""
    assert Threshold(0.8)(CONFIDENCE).tolist() == [3, 0, 1]
    assert Threshold(0.0)(CONFIDENCE).tolist() == [3, 3, 3]
    assert Threshold(0.95)(CONFIDENCE).tolist() == [0, 0, 0]


def test_a_threshold_on_the_survival_cuts_earlier():
    assert Threshold(0.8, SURVIVAL)(CONFIDENCE).tolist() == [2, 0, 1]
    assert Threshold(0.0, SURVIVAL)(CONFIDENCE).tolist() == [3, 3, 3]
    assert Threshold(1.0, SURVIVAL)(CONFIDENCE).tolist() == [0, 0, 0]


def test_static_lengths_and_what_is_refused():
    assert Static(2)(CONFIDENCE).tolist() == [2, 2, 2]
    assert Static(2)(torch.tensor([[0.9, 0.0, 0.9]])).tolist() == [1], "a request offers tokens before its first 0"
    for made in (lambda: Threshold(1.5), lambda: Threshold(0.5, "product"), lambda: Static(-1)):
        with pytest.raises(ScheduleError):
            made()
    with pytest.raises(ScheduleError, match="request 1"):
        Threshold(0.5)(torch.tensor([[0.5], [1.5]]))


@pytest.mark.parametrize("rule", THRESHOLD_RULES)
def test_threshold_decides_about_a_token_before_it_is_drawn(rule):
    """The length reaches j or not whatever c_{j+1}… are: they depend on x_j."""
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(64, 5, generator=generator)
    lengths = Threshold(0.3, rule)(confidence)
    for j in range(1, 5):
        changed = confidence.clone()
        changed[:, j:] = torch.rand(64, 5 - j, generator=generator)
        assert np.array_equal(Threshold(0.3, rule)(changed).clip(max=j), lengths.clip(max=j))
