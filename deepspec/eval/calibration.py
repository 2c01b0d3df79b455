"""Fitting and judging confidences: Sequential Temperature Scaling, Platt scaling, other rivals; ECE, AUC, Brier. Pure.

Position k of a round is *observed* when it was offered; its *outcome* is that the first k tokens were accepted. The
survival a_k = Π_{i≤k} c_i predicts the outcome over all observed rounds; c_k alone predicts it over rounds whose first
k − 1 tokens were accepted. Shapes: N rounds, G block size, P prompts, W bootstrap resamples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from deepspec.eval.rounds import Rounds, RoundsError
from deepspec.models.confidence_scale import ConfidenceScale

BINS = 15
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


def ece(predicted: np.ndarray, outcome: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: Σ_b |Σ_{i in b} (predicted − outcome)| / n over equal-width bins."""
    if not len(predicted):
        return float("nan")
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    return float(np.abs(np.bincount(index, weights=predicted - outcome, minlength=bins)).sum() / len(predicted))


def ece_floor(predicted: np.ndarray, bins: int = BINS) -> float:
    """The ECE to expect of ``predicted`` if it is exactly right, from the chance of the outcomes alone.

    The gap of a bin is then normal with variance Σ p (1 − p), and E|gap| = √(2/π) of its standard deviation.
    """
    if not len(predicted):
        return float("nan")
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    variance = np.bincount(index, weights=predicted * (1 - predicted), minlength=bins)
    return float(np.sqrt(2 / np.pi) * np.sqrt(variance).sum() / len(predicted))


def brier(predicted: np.ndarray, outcome: np.ndarray) -> float:
    """Mean squared error of the probability."""
    return float(np.mean((predicted - outcome) ** 2)) if len(predicted) else float("nan")


def auc(score: np.ndarray, outcome: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Chance that an accepted sample scores above a rejected one, ties half; NaN with one class only."""
    order = np.argsort(score, kind="stable")
    return _auc_sorted(_Ranking(score[order], outcome[order]), None if weight is None else weight[order])


@dataclass(frozen=True)
class _Ranking:
    """Samples sorted by score, so that many weightings of them are cheap."""

    score: np.ndarray
    outcome: np.ndarray


def _auc_sorted(ranking: _Ranking, weight: np.ndarray | None) -> float:
    positive = ranking.outcome if weight is None else ranking.outcome * weight
    negative = (1.0 - ranking.outcome) if weight is None else weight - positive
    starts = np.flatnonzero(np.diff(ranking.score, prepend=np.nan) != 0)
    wins, ties = np.add.reduceat(positive, starts), np.add.reduceat(negative, starts)
    below = np.cumsum(ties) - ties
    total = wins.sum() * ties.sum()
    return float((wins * (below + 0.5 * ties)).sum() / total) if total > 0 else float("nan")


@dataclass(frozen=True)
class Position:
    """One position's samples: which rounds (rows into Rounds), and whether their prefix up to here was accepted."""

    rows: np.ndarray
    outcome: np.ndarray


def observed(rounds: Rounds, position: int) -> Position:
    """Rounds that offered ``position`` (0-based), with float outcomes."""
    known = (rounds.proposed_N > position) & ~np.isnan(rounds.confidence_NG[:, position])
    rows = np.flatnonzero(known)
    return Position(rows, (rounds.accepted_N[rows] > position).astype(np.float64))


def reached(rounds: Rounds, position: int) -> Position:
    """The observed rounds whose earlier positions were all accepted: where c_k itself is a prediction."""
    all_of_them = observed(rounds, position)
    keep = rounds.accepted_N[all_of_them.rows] >= position
    return Position(all_of_them.rows[keep], all_of_them.outcome[keep])


def identified(rounds: Rounds, position: int) -> bool:
    """Whether enough rounds reached a position, with either outcome, for a temperature of its own."""
    outcome = reached(rounds, position).outcome
    return bool(min(outcome.sum(), (1.0 - outcome).sum()) >= LEAST)


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
    """Sequential Temperature Scaling (dspark.md §6).

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
        outcome = samples.outcome.astype(np.float32)
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
            fitted = _logistic(logit(rounds.confidence_NG[samples.rows, k].astype(np.float64)), samples.outcome)
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
        return int(np.argmin([np.mean(errors_of(rounds, confidence_NG, bins)) for confidence_NG in scaled]))

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
        steps.append(isotonic(rounds.confidence_NG[samples.rows, k], samples.outcome) if len(samples.rows) else None)

    def apply(confidence_NG: np.ndarray) -> np.ndarray:
        result = np.array(confidence_NG, dtype=np.float64)
        for k, step in enumerate(steps):
            if step is not None:
                knots, levels = step
                index = np.clip(np.searchsorted(knots, confidence_NG[:, k], side="right") - 1, 0, len(knots) - 1)
                result[:, k] = np.where(np.isnan(confidence_NG[:, k]), np.nan, levels[index])
        return result

    return apply


def errors_of(rounds: Rounds, confidence_NG: np.ndarray, bins: int = BINS) -> list[float]:
    """ECE of the survival at each position."""
    survival_NG = np.cumprod(confidence_NG, axis=1)
    samples = (observed(rounds, k) for k in range(rounds.block_size))
    return [ece(survival_NG[each.rows, k], each.outcome, bins) for k, each in enumerate(samples)]


def floors_of(rounds: Rounds, confidence_NG: np.ndarray, bins: int = BINS) -> list[float]:
    """``ece_floor`` of the survival at each position."""
    survival_NG = np.cumprod(confidence_NG, axis=1)
    return [ece_floor(survival_NG[observed(rounds, k).rows, k], bins) for k in range(rounds.block_size)]


@dataclass(frozen=True)
class Interval:
    """A value with the 2.5 % and 97.5 % quantiles over resampled prompts."""

    value: float
    low: float
    high: float


def judge(
    rounds: Rounds, confidence_NG: np.ndarray, *, resamples: int = 200, bins: int = BINS, seed: int = 0
) -> list[dict[str, Interval]]:
    """For each position: ECE and Brier of the survival, AUC of the survival, and AUC, ECE of c_k where it was reached.

    Intervals resample prompts, not rounds: rounds of one prompt are alike. The bootstrap of an ECE is biased upwards,
    so an interval may lie above its value when there are few rounds.
    """
    prompts, owner_N = np.unique(rounds.prompt_N, return_inverse=True)
    generator = np.random.default_rng(seed)
    weight_WP = generator.multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), size=resamples)
    survival_NG = np.cumprod(confidence_NG, axis=1)
    result = []
    for k in range(rounds.block_size):
        entry: dict[str, Interval] = {}
        for name, samples, values_NG in (
            ("", observed(rounds, k), survival_NG),
            ("_conditional", reached(rounds, k), confidence_NG),
        ):
            predicted = np.asarray(values_NG[samples.rows, k], dtype=np.float64)
            owner = owner_N[samples.rows]
            entry["ece" + name] = _ece_interval(predicted, samples.outcome, owner, weight_WP, bins)
            entry["auc" + name] = _auc_interval(predicted, samples.outcome, owner, weight_WP)
            entry["brier" + name] = _mean_interval((predicted - samples.outcome) ** 2, owner, weight_WP)
        result.append(entry)
    return result


def _interval(value: float, draws: np.ndarray) -> Interval:
    draws = draws[~np.isnan(draws)]
    low, high = np.quantile(draws, (0.025, 0.975)) if len(draws) else (float("nan"), float("nan"))
    return Interval(value, float(low), float(high))


def _mean_interval(values: np.ndarray, owner: np.ndarray, weight_WP: np.ndarray) -> Interval:
    sums = np.bincount(owner, weights=values, minlength=weight_WP.shape[1])
    counts = np.bincount(owner, minlength=weight_WP.shape[1])
    value = float(values.mean()) if len(values) else float("nan")
    return _interval(value, (weight_WP @ sums) / np.maximum(weight_WP @ counts, 1))


def _ece_interval(
    predicted: np.ndarray, outcome: np.ndarray, owner: np.ndarray, weight_WP: np.ndarray, bins: int
) -> Interval:
    """Gaps are summed for each prompt and bin once; a resample is then a matrix product."""
    prompts = weight_WP.shape[1]
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    cells = np.bincount(owner * bins + index, weights=predicted - outcome, minlength=prompts * bins)
    counts = np.bincount(owner, minlength=prompts)
    gaps_Wb = np.abs(weight_WP @ cells.reshape(prompts, bins)).sum(axis=1)
    return _interval(ece(predicted, outcome, bins), gaps_Wb / np.maximum(weight_WP @ counts, 1))


def _auc_interval(predicted: np.ndarray, outcome: np.ndarray, owner: np.ndarray, weight_WP: np.ndarray) -> Interval:
    order = np.argsort(predicted, kind="stable")
    ranking, owner = _Ranking(predicted[order], outcome[order]), owner[order]
    draws = np.array([_auc_sorted(ranking, weight[owner].astype(np.float64)) for weight in weight_WP])
    return _interval(_auc_sorted(ranking, None), draws)
