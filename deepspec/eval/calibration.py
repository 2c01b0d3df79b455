"""Fits of confidences to outcomes: Sequential Temperature Scaling, Platt scaling and their rivals. Pure.

What is fitted, and by which error, is defined in deepspec/eval/confidence.py. Shapes: N rounds, G block size.
"""

from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize

from deepspec.eval.confidence import BINS, ece, mean_ece, observed, reached
from deepspec.eval.rounds import Rounds, RoundsError
from deepspec.models.confidence_scale import ConfidenceScale

GRID = np.geomspace(0.1, 10.0, 161)  # temperatures, 2.9 % apart; 1 is among them
LEAST = 10  # rounds of either outcome that a position's own temperature needs
_EDGE = 1e-6


def logit(probability: np.ndarray) -> np.ndarray:
    """Log-odds, with probabilities kept off 0 and 1."""
    clipped = np.clip(probability, _EDGE, 1 - _EDGE)
    return np.log(clipped) - np.log1p(-clipped)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x), by the tangent, which cannot overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * values)


def scale(confidence_NG: np.ndarray, by: ConfidenceScale) -> np.ndarray:
    """σ(logit(c_k) / T_k + s_k) for each position k; NaN stays NaN. Keeps the order within each position."""
    count = confidence_NG.shape[1]
    if len(by.temperatures) < count:
        raise ValueError(f"{len(by.temperatures)} temperatures for {count} positions; calibrate again")
    return sigmoid(logit(confidence_NG) / np.asarray(by.temperatures)[:count] + np.asarray(by.shifts)[:count])


def identified(rounds: Rounds, position: int) -> bool:
    """Whether enough rounds reached a position, with either outcome, for a temperature of its own."""
    label = reached(rounds, position).label
    return bool(min(label.sum(), (1.0 - label).sum()) >= LEAST)


def check(rounds: Rounds, minimum: int = 50) -> None:
    """Raise RoundsError when there is too little to fit."""
    if not rounds.block_size or np.isnan(rounds.confidence_NG).all():
        raise RoundsError("no confidences were recorded; use a drafter with a confidence head, or --max-probability")
    count = len(observed(rounds, rounds.block_size - 1).rows)
    if count < minimum:
        raise RoundsError(
            f"only {count} rounds offered position {rounds.block_size}; at least {minimum} are needed, best some "
            "thousands: use more prompts and record full blocks"
        )


def fit_sts(rounds: Rounds, grid: np.ndarray = GRID, bins: int = BINS) -> tuple[float, ...]:
    """Sequential Temperature Scaling (the DSpark paper).

    For k = 1..γ in order, T_k is the grid value whose Π_{i≤k} σ(logit c_i / T_i) has the least ECE as a prediction of
    "the first k were accepted", earlier temperatures fixed; ties go to the value nearest 1. A position that is not
    ``identified`` takes the temperature before it: there, least ECE would push the value to the end of the grid.
    """
    logits = logit(rounds.confidence_NG).astype(np.float32)
    before = np.ones(len(rounds), dtype=np.float32)
    temperatures: list[float] = []
    candidates = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    for k in range(rounds.block_size):
        if not identified(rounds, k):
            temperatures.append(temperatures[-1] if temperatures else 1.0)
            before *= sigmoid(logits[:, k] / np.float32(temperatures[-1]))
            continue
        samples = observed(rounds, k)
        own, prefix = logits[samples.rows, k], before[samples.rows]
        outcome = samples.label.astype(np.float32)
        errors = [ece(prefix * sigmoid(own / np.float32(value)), outcome, bins) for value in candidates]
        temperatures.append(float(candidates[int(np.argmin(errors))]))
        before *= sigmoid(logits[:, k] / np.float32(temperatures[-1]))
    return tuple(temperatures)


def fit_platt(rounds: Rounds) -> ConfidenceScale:
    """Platt scaling of every position: the (T_k, s_k) of maximum likelihood on the rounds that reached it.

    A temperature stretches log-odds about zero and so cannot move a confidence of one half; a shift can. Targets are
    smoothed as in Platt (1999), (n₊ + 1) / (n₊ + 2) and 1 / (n₋ + 2), and T_k stays within the grid of STS. A position
    that is not ``identified`` takes the values before it.
    """
    temperatures, shifts = [1.0], [0.0]
    for k in range(rounds.block_size):
        samples = reached(rounds, k)
        fitted = (1 / temperatures[-1], shifts[-1])
        if identified(rounds, k):
            fitted = _logistic(logit(rounds.confidence_NG[samples.rows, k].astype(np.float64)), samples.label)
        temperatures.append(1 / fitted[0])
        shifts.append(fitted[1])
    return ConfidenceScale(tuple(temperatures[1:]), tuple(shifts[1:]))


def _logistic(logit_n: np.ndarray, outcome_n: np.ndarray) -> tuple[float, float]:
    """Slope and intercept that make σ(slope · logit + intercept) most likely."""
    positive = float(outcome_n.sum())
    high, low = (positive + 1) / (positive + 2), 1 / (len(outcome_n) - positive + 2)
    wanted_n = np.where(outcome_n > 0.5, high, low)

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        value_n = point[0] * logit_n + point[1]
        slope_n = sigmoid(value_n) - wanted_n
        nll = np.mean(np.logaddexp(0.0, value_n) - wanted_n * value_n)
        return float(nll), np.array([np.mean(slope_n * logit_n), np.mean(slope_n)])

    found = minimize(loss, (1.0, 0.0), jac=True, method="L-BFGS-B", bounds=((1 / GRID[-1], 1 / GRID[0]), (None, None)))
    return float(found.x[0]), float(found.x[1])


def fit_single(rounds: Rounds, grid: np.ndarray = GRID, bins: int = BINS) -> float:
    """One temperature for all positions: the least mean ECE of the survivals on a coarse grid, then on a fine one."""

    def best(values: np.ndarray) -> int:
        scales = (ConfidenceScale((float(value),) * rounds.block_size) for value in values)
        scaled = (scale(rounds.confidence_NG, each) for each in scales)
        return int(np.argmin([mean_ece(rounds, confidence_NG, bins) for confidence_NG in scaled]))

    step = 8
    near = best(grid[::step]) * step
    fine = grid[max(near - step + 1, 0) : near + step]
    return float(fine[best(fine)])


def isotonic(score: np.ndarray, outcome: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Non-decreasing step function of least squares (pool adjacent violators): ascending scores and their levels."""
    knots, inverse = np.unique(score, return_inverse=True)
    count = np.bincount(inverse).astype(np.float64)
    total = np.bincount(inverse, weights=outcome)
    sums: list[float] = []
    sizes: list[float] = []
    spans: list[int] = []
    for value, size in zip(total.tolist(), count.tolist(), strict=True):
        sums.append(value)
        sizes.append(size)
        spans.append(1)
        while len(sums) > 1 and sums[-2] * sizes[-1] >= sums[-1] * sizes[-2]:
            value, size, span = sums.pop(), sizes.pop(), spans.pop()
            sums[-1] += value
            sizes[-1] += size
            spans[-1] += span
    return knots, np.repeat(np.asarray(sums) / np.asarray(sizes), spans)


def fit_isotonic(rounds: Rounds) -> Callable[[np.ndarray], np.ndarray]:
    """Isotonic regression of each position's c_k on the rounds that reached it; returns confidences → calibrated."""
    steps = []
    for k in range(rounds.block_size):
        samples = reached(rounds, k)
        steps.append(isotonic(rounds.confidence_NG[samples.rows, k], samples.label) if len(samples.rows) else None)

    def apply(confidence_NG: np.ndarray) -> np.ndarray:
        result = np.array(confidence_NG, dtype=np.float64)
        for k, step in enumerate(steps):
            if step is not None:
                knots, levels = step
                index = np.clip(np.searchsorted(knots, confidence_NG[:, k], side="right") - 1, 0, len(knots) - 1)
                result[:, k] = np.where(np.isnan(confidence_NG[:, k]), np.nan, levels[index])
        return result

    return apply
