"""Distributions against naive float64 and transformers' own filters."""

import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from deepspec.models.sampling import Distribution, Sampling, SamplingError, inverse_cdf, rising


def logits_of(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.7),
        Sampling(1.3, top_k=5),
        Sampling(0.9, top_p=0.8),
        Sampling(1.0, min_p=0.1),
        Sampling(0.8, top_k=9, top_p=0.9, min_p=0.05),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_p=1e-6),
    ],
)
def test_probabilities_equal_transformers_filters(sampling):
    logits = logits_of(64, 33)
    expected = logits.double() / sampling.temperature
    if sampling.top_k:
        expected = TopKLogitsWarper(sampling.top_k)(None, expected)
    if sampling.top_p < 1:
        expected = TopPLogitsWarper(sampling.top_p)(None, expected)
    if sampling.min_p > 0:
        expected = MinPLogitsWarper(sampling.min_p)(None, expected)
    p = Distribution.of(logits, sampling)
    dense = p.probs()
    torch.testing.assert_close(dense.double(), expected.softmax(-1), atol=1e-6, rtol=1e-5)
    tokens = torch.arange(64) % 33
    torch.testing.assert_close(p.prob(tokens), dense[torch.arange(64), tokens])
    assert torch.equal(p.argmax(), logits.argmax(-1))


def test_bfloat16_logits_are_used_in_float32():
    logits = logits_of(4, 11).bfloat16()
    p = Distribution.of(logits, Sampling(1.0))
    assert p.probs().dtype == torch.float32
    torch.testing.assert_close(p.probs(), logits.float().softmax(-1))


def test_inverse_cdf_is_exact_on_a_grid():
    """Weights in eighths: each token gets exactly its share of 800 equally spaced uniforms, boundaries included."""
    weights = torch.tensor([0.0, 3.0, 0.0, 4.0, 1.0, 0.0]) / 8
    drawn = inverse_cdf(weights.expand(800, -1), torch.arange(800) / 800)
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 300, 0, 400, 100, 0]
    assert drawn.tolist() == sorted(drawn.tolist())


def test_extreme_uniforms_never_draw_a_zero_weight():
    weights = torch.tensor([[0.0, 1e-30, 0.3, 0.1, 0.0, 0.0]])
    almost_one = 1 - 2**-24
    for u, token in ((0.0, 1), (almost_one, 3)):
        assert inverse_cdf(weights, torch.tensor([u])).item() == token
    wide = torch.zeros(1, 150_000)
    wide[0, ::2] = 1.0
    drawn = inverse_cdf(wide.expand(512, -1), torch.linspace(0, almost_one, 512))
    assert bool((drawn % 2 == 0).all())


def test_sums_that_wobble_where_nothing_is_added_draw_no_zero_weight():
    """What a tree-shaped sum on an accelerator may return."""
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.0, 0.75, 0.0]], dtype=torch.float64)
    wobble = torch.tensor([[0.0, 0.0, 1e-7, -1e-7, 0.0, 1e-7]], dtype=torch.float64)
    steps = rising(weights.cumsum(-1) + wobble, weights)
    assert steps.tolist() == [[0.0, 0.25, 0.25, 0.25, 1.0, 1.0]]


def test_sampling_frequencies_follow_the_distribution():
    p = Distribution.of(logits_of(1, 7), Sampling(0.8, top_k=5))
    uniforms = (torch.arange(100_000) + 0.5) / 100_000
    drawn = Distribution.of(logits_of(1, 7).expand(100_000, -1), Sampling(0.8, top_k=5)).sample(uniforms)
    torch.testing.assert_close(torch.bincount(drawn, minlength=7) / 1e5, p.probs()[0], atol=1e-4, rtol=0)


def test_greedy_holds_no_vocabulary():
    logits = logits_of(3, 4, 9)
    p = Distribution.of(logits, Sampling())
    assert p.greedy
    assert p.logits is None
    assert p.shape == (3, 4)
    assert torch.equal(p.sample(torch.rand(3, 4)), logits.argmax(-1))
    assert torch.equal(p.probs().argmax(-1), logits.argmax(-1))
    assert p.probs().sum() == 12
    assert torch.equal(p.prob(logits.argmax(-1)), torch.ones(3, 4))


def test_index_stack_and_argmax_only():
    logits = logits_of(2, 3, 5)
    whole = Distribution.of(logits, Sampling(0.9))
    parts = [Distribution.of(logits[:, k], Sampling(0.9)) for k in range(3)]
    stacked = Distribution.stack(parts)
    torch.testing.assert_close(stacked.probs(), whole.probs())
    torch.testing.assert_close(whole[:, 1].probs(), parts[1].probs())
    rows = torch.arange(2)
    torch.testing.assert_close(whole[rows, torch.tensor([2, 0])].probs()[1], whole.probs()[1, 0])
    one_hot = whole.argmax_only()
    assert one_hot.greedy
    assert torch.equal(one_hot.ids, logits.argmax(-1))
    assert torch.equal(Distribution.stack([part.argmax_only() for part in parts]).ids, one_hot.ids)
    with pytest.raises(SamplingError, match="one-hot"):
        Distribution.stack([parts[0], parts[1].argmax_only()])


def test_residual():
    p = Distribution(3, logits=torch.tensor([[0.5, 0.3, 0.2]]).log())
    q = Distribution(3, logits=torch.tensor([[0.2, 0.5, 0.3]]).log())
    torch.testing.assert_close(p.residual(q), torch.tensor([[0.3, 0.0, 0.0]]))
    torch.testing.assert_close(p.residual(Distribution.one_hot(torch.tensor([0]), 3)), torch.tensor([[0.0, 0.3, 0.2]]))
    torch.testing.assert_close(p.residual(p), p.probs())  # nothing left: p itself


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", 2.0)]
)
def test_ranges(field, value):
    with pytest.raises(SamplingError, match=field):
        Sampling(**{field: value})


EXTREMES = [
    Sampling(1.0, top_p=1e-50),
    Sampling(1.0, top_p=1e-300),
    Sampling(1.0, min_p=1.0),
    Sampling(1.0, min_p=1e-300),
    Sampling(1e-5),
    Sampling(1e-5, top_k=3, top_p=1e-45, min_p=1.0),
    Sampling(1e30),
    Sampling(1e30, top_k=2, top_p=0.5),
    Sampling(0.5, top_k=10**9),
]


@pytest.mark.parametrize("sampling", EXTREMES, ids=str)
def test_extreme_values_still_give_a_distribution_that_holds_the_argmax(sampling):
    logits = logits_of(16, 33) * 50
    logits[:, 5] = -torch.inf  # as a reduced draft vocabulary rules tokens out
    p = Distribution.of(logits, sampling)
    dense = p.probs()
    assert bool(dense.isfinite().all())
    torch.testing.assert_close(dense.sum(-1), torch.ones(16))
    assert bool((dense[:, 5] == 0).all())
    assert bool((dense.gather(-1, logits.argmax(-1, keepdim=True)) > 0).all())
    drawn = p.sample(torch.linspace(0, 1 - 2**-24, 16))
    assert bool((dense[torch.arange(16), drawn] > 0).all())


@pytest.mark.parametrize("temperature", [1e-40, 1e-300, 5e-324, 9e-6])
def test_temperatures_too_small_to_divide_by_are_greedy(temperature):
    logits = logits_of(8, 33)
    p = Distribution.of(logits, Sampling(temperature, top_p=0.9))
    assert p.greedy
    assert torch.equal(p.sample(torch.rand(8)), logits.argmax(-1))


def test_the_smallest_temperature_that_samples_is_the_public_code_s():
    assert Sampling(9.99e-6).greedy
    assert not Sampling(1e-5).greedy


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_nan_is_no_setting(name):
    with pytest.raises(SamplingError, match=name):
        Sampling(**{"temperature": 1.0, name: float("nan")})


@pytest.mark.parametrize("temperature", [1e31, 1e308, float("inf"), -1e-9])
def test_temperatures_that_cannot_be_divided_by_are_refused(temperature):
    with pytest.raises(SamplingError, match="temperature must be 0"):
        Sampling(temperature)
