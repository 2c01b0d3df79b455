"""Reliability, ROC-AUC and the threshold what-if against naive counts."""

import numpy as np
import pytest

from deepspec.eval.confidence import outcomes, reliability, threshold_sweep
from deepspec.eval.records import Record


def record(rounds, confidence):
    return Record(
        "d", "p", 0, "", 1, [1], "stop", [tuple(item) for item in rounds], confidence, 1.0, 0.0, 0.0, 0.0, 1.0
    )


def test_only_positions_with_a_known_outcome_count():
    one = record([(3, 1, 2), (3, 3, 4), (3, 3, 2)], [[0.9, 0.2, 0.1], [0.8, 0.7, 0.6], [0.5, 0.4, 0.3]])
    confidence, accepted = outcomes([one])
    assert confidence.tolist() == [0.9, 0.2, 0.8, 0.7, 0.6, 0.5, 0.4]
    assert accepted.tolist() == [True, False, True, True, True, True, True]


def test_reliability_by_hand():
    one = record([(2, 1, 2), (2, 0, 1)], [[0.95, 0.15], [0.95, 0.5]])
    diagram = reliability([one])
    assert diagram["count"] == [0, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert diagram["accepted"][9] == 0.5
    assert diagram["ece"] == pytest.approx((2 * 0.45 + 0.15) / 3, abs=1e-6)


def test_auc_is_the_probability_of_the_right_order():
    generator = np.random.default_rng(0)
    values = np.round(generator.uniform(size=300), 2)  # rounding makes ties
    labels = generator.uniform(size=300) < values
    records = [record([(1, int(label), int(label) + 1)], [[float(v)]]) for v, label in zip(values, labels, strict=True)]
    wins = [(a > b) + 0.5 * (a == b) for a in values[labels] for b in values[~labels]]
    assert reliability(records)["auc"] == pytest.approx(np.mean(wins), abs=1e-6)


def test_no_confidence_is_none_and_an_empty_sweep():
    assert reliability([record([(2, 1, 2)], None)]) is None
    assert threshold_sweep([record([(2, 1, 2)], None)]) == []


def test_threshold_cuts_before_the_first_low_confidence():
    one = record([(3, 3, 4), (3, 1, 2)], [[0.9, 0.4, 0.95], [0.8, 0.7, 0.1]])
    rows = {row["threshold"]: row for row in threshold_sweep([one], (0.0, 0.5, 0.99))}
    assert rows[0.0] == {"threshold": 0.0, "acceptance_rate": pytest.approx(4 / 6), "tau": 3.0, "proposal_length": 3.0}
    # lengths 1 and 2, accepted 1 and 1
    assert rows[0.5] == {"threshold": 0.5, "acceptance_rate": pytest.approx(2 / 3), "tau": 2.0, "proposal_length": 1.5}
    assert rows[0.99]["tau"] == 1.0
    assert rows[0.99]["acceptance_rate"] == 0.0
