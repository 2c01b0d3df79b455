"""Measures of confidences against counts by hand and brute force: by position, on survivals (DSpark's Figure 6)."""

import itertools

import numpy as np
import pytest

from deepspec.eval import confidence
from deepspec.eval.confidence import ECE, judge, observed, reached, reliability, threshold_sweep
from deepspec.eval.records import Record
from deepspec.eval.rounds import known_outcome, rounds_of
from deepspec.models.verify import SURVIVAL


def record(rounds, confidences, prompt="p"):
    return Record(
        "d", prompt, 0, "", 1, [1], "stop", [tuple(item) for item in rounds], confidences, 1.0, 0.0, 0.0, 0.0, 1.0
    )


def random_rounds(count: int, block: int, seed: int):
    """Full blocks whose tokens are accepted with a chance near their confidence."""
    draw = np.random.default_rng(seed)
    records = []
    for prompt in range(count):
        values = draw.uniform(0.05, 0.99, size=(6, block)).round(3)
        accepted = np.cumprod(draw.uniform(size=(6, block)) < values**1.5, axis=1).sum(axis=1)
        rounds = [(block, int(taken), int(taken) + 1) for taken in accepted]
        records.append(record(rounds, values.tolist(), f"p{prompt}"))
    return rounds_of(records)


@pytest.mark.parametrize(
    ("proposed", "accepted", "committed", "offered", "kept"),
    [(5, 2, 3, 5, 2), (5, 5, 6, 5, 5), (5, 3, 2, 2, 2), (5, 3, 3, 3, 3), (0, 0, 1, 0, 0)],
)
def test_the_cut_rule(proposed, accepted, committed, offered, kept):
    """A round that committed no more than it accepted was cut by a stop token: what follows has no outcome."""
    counts = known_outcome(np.array([proposed]), np.array([accepted]), np.array([committed]))
    assert [int(values[0]) for values in counts] == [offered, kept]


def test_positions_with_a_known_outcome_by_hand():
    # accepted 1 of 3; all 3; all 3, but the second was a stop token, so the third has no outcome
    rounds = rounds_of([record([(3, 1, 2), (3, 3, 4), (3, 3, 2)], [[0.9, 0.2, 0.1], [0.8, 0.7, 0.6], [0.5, 0.4, 0.3]])])
    assert observed(rounds, 0).label.tolist() == [1, 1, 1]
    assert observed(rounds, 1).label.tolist() == [0, 1, 1]
    assert observed(rounds, 2).label.tolist() == [0, 1], "the prefix failed at position 2, so it failed at 3 as well"
    assert reached(rounds, 1).label.tolist() == [0, 1, 1]
    assert reached(rounds, 2).label.tolist() == [1], "c_3 says nothing where position 2 was rejected"


def test_ece_and_auc_of_the_survival_by_hand():
    """Two rounds of two tokens: survivals 0.95, 0.95 and 0.1425, 0.475; accepted 1 and 0 tokens."""
    rounds = rounds_of([record([(2, 1, 2), (2, 0, 1)], [[0.95, 0.15], [0.95, 0.5]])])
    diagram = reliability(rounds)
    first, second = diagram["positions"]
    assert first[ECE] == pytest.approx(abs(0.95 - 0.5), abs=1e-6), "both are in the last of 20 bins"
    assert second[ECE] == pytest.approx((0.1425 + 0.475) / 2, abs=1e-6), "neither prefix of two was accepted"
    assert diagram[ECE] == pytest.approx((first[ECE] + second[ECE]) / 2, abs=1e-6)
    assert (first["auc"], second["auc"]) == (0.5, None), "equal scores; one class only"
    assert diagram["auc"] == 0.5
    assert (diagram["bins"], ECE) == (20, "ece_20")


def test_ece_and_auc_against_brute_force():
    rounds = random_rounds(40, 4, seed=0)
    errors, areas = [], []
    for k in range(4):
        pairs = [
            (float(np.prod(values[: k + 1].astype(np.float64))), float(accepted > k))
            for values, accepted in zip(rounds.confidence_NG, rounds.accepted_N, strict=True)
        ]
        gap = 0.0
        for bin in range(20):
            inside = [(p, y) for p, y in pairs if min(int(p * 20), 19) == bin]
            gap += abs(sum(p - y for p, y in inside))
        errors.append(gap / len(pairs))
        wins = [
            (a > b) + 0.5 * (a == b) for (a, yes), (b, no) in itertools.product(pairs, pairs) if yes == 1 and no == 0
        ]
        areas.append(np.mean(wins))
    diagram = reliability(rounds)
    assert [panel[ECE] for panel in diagram["positions"]] == pytest.approx(errors, abs=1e-6)
    assert [panel["auc"] for panel in diagram["positions"]] == pytest.approx(areas, abs=1e-6)
    assert diagram[ECE] == pytest.approx(np.mean(errors), abs=1e-6)


def test_report_and_calibration_show_the_same_error_on_the_same_rounds():
    rounds = random_rounds(20, 3, seed=1)
    shown = [panel[ECE] for panel in reliability(rounds)["positions"]]
    judged = [entry[ECE]["value"] for entry in judge(rounds, rounds.confidence_NG, resamples=20)]
    fitted_by = confidence.errors_of(rounds, rounds.confidence_NG)
    assert shown == pytest.approx(judged, abs=1e-6)
    assert shown == pytest.approx(fitted_by, abs=1e-6)


def test_no_confidence_is_none_and_an_empty_sweep():
    rounds = rounds_of([record([(2, 1, 2)], None)])
    assert reliability(rounds) is None
    assert threshold_sweep(rounds) == []


def test_the_sweep_by_hand():
    """The paper's rate counts the target's own token in both sums: (1 + 1) + (1 + 1) of (1 + 1) + (2 + 1) at 0.5."""
    rounds = rounds_of([record([(3, 3, 4), (3, 1, 2)], [[0.9, 0.4, 0.95], [0.8, 0.7, 0.1]])])
    rows = {row["threshold"]: row for row in threshold_sweep(rounds, thresholds=(0.0, 0.5, 0.99))}
    assert rows[0.0]["verify_rate"] == pytest.approx((4 + 2) / (4 + 4))
    assert rows[0.0]["draft_acceptance_rate"] == pytest.approx(4 / 6)
    assert rows[0.5]["verify_rate"] == pytest.approx(4 / 5)
    assert rows[0.5]["draft_acceptance_rate"] == pytest.approx(2 / 3, abs=1e-6)
    assert (rows[0.5]["tau"], rows[0.5]["proposal_length"]) == (2.0, 1.5)
    assert rows[0.99] == {
        "threshold": 0.99,
        "on": "conditional",
        "verify_rate": 1.0,
        "draft_acceptance_rate": None,
        "tau": 1.0,
        "proposal_length": 0.0,
    }


def test_a_sweep_on_the_survival_is_another_one():
    """0.9 · 0.7 = 0.63 passes 0.6 by either rule, 0.9 · 0.7 · 0.9 = 0.567 only by the conditional one."""
    rounds = rounds_of([record([(3, 3, 4)], [[0.9, 0.7, 0.9]])])
    lengths = {rule: threshold_sweep(rounds, on=rule, thresholds=(0.6,))[0]["proposal_length"] for rule in RULES}
    assert lengths == {"conditional": 3.0, "survival": 2.0}


RULES = ("conditional", SURVIVAL)
