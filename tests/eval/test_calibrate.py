"""Temperatures against brute force, metrics against their definitions, files and command line."""

import itertools
import json
import math
import time

import numpy as np
import pytest

from deepspec.eval import calibration
from deepspec.eval.replay import Difficulty, record, synthetic
from deepspec.eval.rounds import Rounds, RoundsError, from_prompts, read_rounds, write_rounds


def random_rounds(seed: int, prompts: int = 40, per_prompt: int = 30, block: int = 3, sharpness: float = 2.0) -> Rounds:
    """Acceptances drawn from probabilities whose logits the drafter exaggerates by ``sharpness``."""
    random = np.random.default_rng(seed)
    count = prompts * per_prompt
    logits = random.normal(1.0, 1.5, (count, block))
    accepted = np.cumprod(random.random((count, block)) < 1 / (1 + np.exp(-logits)), axis=1).sum(axis=1)
    confidence = (1 / (1 + np.exp(-sharpness * logits))).astype(np.float32)
    return Rounds(np.repeat(np.arange(prompts), per_prompt), np.full(count, block), accepted, confidence)


def plain_ece(predicted: list[float], outcome: list[float], bins: int) -> float:
    """Σ_b n_b/n · |mean confidence − share accepted|, as one reads it."""
    members: list[list[int]] = [[] for _ in range(bins)]
    for i, value in enumerate(predicted):
        members[min(int(value * bins), bins - 1)].append(i)
    total = 0.0
    for each in members:
        if each:
            mean = sum(predicted[i] for i in each) / len(each)
            share = sum(outcome[i] for i in each) / len(each)
            total += len(each) / len(predicted) * abs(mean - share)
    return total


def test_metrics_are_their_definitions() -> None:
    random = np.random.default_rng(0)
    predicted = np.round(random.random(200), 2)  # ties
    outcome = (random.random(200) < predicted).astype(float)
    assert calibration.ece(predicted, outcome, 7) == pytest.approx(plain_ece(predicted.tolist(), outcome.tolist(), 7))
    pairs = [
        1.0 if good > bad else 0.5 if good == bad else 0.0
        for good, bad in itertools.product(predicted[outcome == 1], predicted[outcome == 0])
    ]
    assert calibration.auc(predicted, outcome) == pytest.approx(np.mean(pairs))
    assert calibration.brier(predicted, outcome) == pytest.approx(np.mean((predicted - outcome) ** 2))
    assert math.isnan(calibration.auc(predicted, np.ones(200)))
    weight = random.integers(0, 3, 200)
    repeated = np.repeat(np.arange(200), weight)
    assert calibration.auc(predicted, outcome, weight.astype(float)) == pytest.approx(
        calibration.auc(predicted[repeated], outcome[repeated])
    )


def test_sts_is_the_sequential_grid_search() -> None:
    rounds = random_rounds(1)
    grid = np.array([0.5, 1.0, 1.5, 2.0, 3.0])
    found: list[float] = []
    for k in range(3):
        errors = {}
        for candidate in grid.tolist():
            survival = np.ones(len(rounds))
            for i, temperature in enumerate([*found, candidate]):
                c = rounds.confidence_NG[:, i].astype(float)
                survival *= 1 / (1 + ((1 - c) / c) ** (1 / temperature))
            outcome = (rounds.accepted_N > k).astype(float)
            errors[candidate] = plain_ece(survival.tolist(), outcome.tolist(), calibration.BINS)
        found.append(min(errors, key=errors.__getitem__))
    assert calibration.fit_sts(rounds, grid) == tuple(found)


def test_sts_recovers_the_exaggeration_and_keeps_the_order() -> None:
    fit, test = random_rounds(2, prompts=300, per_prompt=100).split(seed=1)
    temperatures = calibration.fit_sts(fit)
    assert temperatures == pytest.approx((2.0, 2.0, 2.0), rel=0.25)
    scaled = calibration.scale(test.confidence_NG, temperatures)
    before = calibration.errors_of(test, test.confidence_NG)
    after = calibration.errors_of(test, scaled)
    assert np.mean(after) < 0.015 < np.mean(before)
    for k in range(3):
        samples = calibration.reached(test, k)
        raw = calibration.auc(test.confidence_NG[samples.rows, k], samples.outcome)
        assert calibration.auc(scaled[samples.rows, k], samples.outcome) == pytest.approx(raw, abs=1e-6)


def test_positions_that_were_not_offered_do_not_count() -> None:
    rounds = from_prompts([[(1, 1, [0.9, 0.8, 0.7]), (3, 1, [0.6, 0.5, 0.4])], [(0, 0, [0.3, 0.3, 0.3])]])
    assert rounds.block_size == 3
    assert calibration.observed(rounds, 0).rows.tolist() == [0, 1]
    assert calibration.observed(rounds, 1).rows.tolist() == [1]
    assert calibration.observed(rounds, 1).outcome.tolist() == [0.0]
    assert calibration.reached(rounds, 1).rows.tolist() == [1]
    assert calibration.reached(rounds, 2).rows.tolist() == []


def test_isotonic_is_the_least_squares_step_function() -> None:
    random = np.random.default_rng(3)
    score = np.round(random.random(60), 1)
    outcome = (random.random(60) < score).astype(float)
    knots, levels = calibration.isotonic(score, outcome)
    assert (np.diff(levels) >= 0).all()
    from scipy.optimize import isotonic_regression

    means = [outcome[score == knot].mean() for knot in knots]
    counts = [float((score == knot).sum()) for knot in knots]
    assert levels == pytest.approx(isotonic_regression(means, weights=counts).x)


def test_a_hundred_thousand_records_fit_in_seconds() -> None:
    rounds = random_rounds(4, prompts=1000, per_prompt=100, block=7)
    start = time.process_time()
    calibration.fit_sts(rounds)
    assert time.process_time() - start < 10


def test_intervals_resample_prompts() -> None:
    """Prompts that are all alike inside: resampling rounds would claim a certainty that is not there."""
    random = np.random.default_rng(5)
    accepted = np.repeat(random.random(20) < 0.7, 50).astype(np.int64)
    rounds = Rounds(
        np.repeat(np.arange(20), 50), np.ones(1000, np.int64), accepted, np.full((1000, 1), 0.7, np.float32)
    )
    entry = calibration.judge(rounds, rounds.confidence_NG, resamples=400)[0]
    brier = entry["brier"]
    assert brier.low < brier.value < brier.high
    assert brier.high - brier.low > 0.1  # ± 1.96 · 0.4 · √(.7·.3/20), halved; by rounds it would be 0.02
    assert math.isclose(entry["ece"].value, abs(0.7 - accepted.mean()), abs_tol=1e-6)


def test_split_is_by_prompt() -> None:
    fit, test = random_rounds(6).split(seed=3, test_share=0.25)
    assert not set(fit.prompts) & set(test.prompts)
    assert len(test.prompts) == 10
    assert len(fit) + len(test) == 1200
    with pytest.raises(RoundsError, match="two prompts"):
        random_rounds(6, prompts=1).split()


def test_records_files(tmp_path) -> None:
    rounds = record(synthetic(3, tokens=20, difficulty=Difficulty(), seed=1))
    write_rounds(tmp_path / "records.jsonl", rounds)
    again = read_rounds(tmp_path)
    assert np.array_equal(again.accepted_N, rounds.accepted_N)
    assert np.allclose(again.confidence_NG, rounds.confidence_NG, atol=1e-6)
    line = {"settings": "abc", "prompt": "p", "turn": 0, "rounds": [[3, 3, 2], [2, 2, 3]]}
    line["confidence"] = [[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]]
    plain = {"settings": "plain", "prompt": "p", "turn": 0, "rounds": [[0, 0, 1]], "confidence": None}
    text = "\n".join(json.dumps(each) for each in (line, line, plain, {"failure": "no rounds here"}))
    (tmp_path / "records.jsonl").write_text(text + "\n")
    cut = read_rounds(tmp_path / "records.jsonl")  # the second line of a prompt is a repetition
    assert (cut.proposed_N.tolist(), cut.accepted_N.tolist()) == ([2, 2], [2, 2])  # a stop token cut the first round
    (tmp_path / "more.jsonl").write_text(json.dumps({**line, "settings": "xyz"}) + "\n")
    with pytest.raises(RoundsError, match=r"--run NAME: more@xyz \(1 prompts\), records@abc"):
        read_rounds(tmp_path)
    assert len(read_rounds(tmp_path, "more")) == 2
    (tmp_path / "more.jsonl").write_text('{"rounds": [[1, 1]], "confidence": [[0.5]]}\n')
    with pytest.raises(RoundsError, match="line 1"):
        read_rounds(tmp_path)
    with pytest.raises(RoundsError, match="accepted 3 of 2"):
        from_prompts([[(2, 3, [0.5, 0.5])]])
