"""Learning rates against closed forms."""

import math

import pytest

from deepspec.train.schedule import factor


def test_cosine_is_half_a_cosine_after_a_linear_warm_up():
    total, warm = 250, 10
    for step in range(total):
        expected = (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
        assert factor(step, total, schedule="cosine", warmup=0.04) == pytest.approx(expected, abs=1e-12)


def test_wsd_is_flat_and_then_linear():
    total = 100
    values = [factor(step, total, schedule="wsd", warmup=0.1, decay=0.2) for step in range(total)]
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert values[10:81] == [1.0] * 71
    assert values[80:] == pytest.approx([(100 - step) / 20 for step in range(80, 100)])


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_bounds_hold_at_any_length(schedule):
    for total in (1, 2, 3, 7, 50):
        values = [factor(step, total, schedule=schedule, warmup=0.04, decay=0.3, final=0.1) for step in range(total)]
        assert all(0.1 <= value <= 1.0 for value in values)
        assert max(values) == pytest.approx(1.0)
        assert factor(total, total, schedule=schedule, warmup=0.04, final=0.1) == pytest.approx(0.1)


def test_warm_up_of_the_whole_run_never_divides_by_zero():
    assert factor(9, 10, schedule="wsd", warmup=1.0, decay=0.0) == 1.0
    assert factor(9, 10, schedule="cosine", warmup=1.0) == 1.0
