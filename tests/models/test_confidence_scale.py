"""The scale against plain arithmetic, back and forth, through files, and what it refuses."""

import math

import pytest
import torch

from deepspec.models.confidence_scale import ConfidenceScale

SCALE = ConfidenceScale((2.0, 0.5, 1.25), (-0.3, 0.0, 0.7))


def test_logits_are_stretched_then_shifted_position_by_position():
    logits = torch.tensor([[1.0, -2.0, 3.0], [0.0, 0.5, -1.0]], dtype=torch.float64)
    expected = [
        [value / t + s for value, t, s in zip(row, (2.0, 0.5, 1.25), (-0.3, 0.0, 0.7), strict=True)]
        for row in logits.tolist()
    ]
    torch.testing.assert_close(SCALE.logits(logits), torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0)
    assert torch.equal(SCALE.logits(logits[:, :2]), SCALE.logits(logits)[:, :2])
    assert math.isclose(float(SCALE.logits(torch.zeros(1, 1))), -0.3, abs_tol=1e-7), "one half moves by the shift alone"


def test_inverse_takes_it_back():
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(SCALE.inverse().logits(SCALE.logits(logits)), logits)


def test_fields_of_files():
    assert ConfidenceScale.of(SCALE.fields()) == SCALE
    assert ConfidenceScale.of({"temperatures": [1.5, 2.0]}) == ConfidenceScale((1.5, 2.0), (0.0, 0.0))
    for silent in ({}, {"temperatures": None, "shifts": None}):
        assert ConfidenceScale.of(silent) is None


@pytest.mark.parametrize("wrong", [((1.0, 2.0), (0.5,)), ((1.0, 0.0), ()), ((-1.0,), (0.0,))])
def test_wrong_values_are_refused(wrong):
    with pytest.raises(ValueError, match="calibrate again"):
        ConfidenceScale(*wrong)
    with pytest.raises(ValueError, match="3 temperatures for 4 positions"):
        SCALE.logits(torch.zeros(2, 4))
