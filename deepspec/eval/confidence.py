"""Measures of confidences: ECE, ROC-AUC, Brier score and reliability by position, and what a threshold would do. Pure.

The one home of these definitions, for evaluation and calibration alike. Position k of a round is *observed* when it was
offered and its outcome is known. Its *label* is that the first k tokens were accepted, its *prediction* the survival
a_k = Π_{i≤k} c_i. A round counts at every position it observed, and headlines are means over positions. What is said
of c_k alone, over rounds whose first k − 1 tokens were accepted, is called conditional.
Shapes: N rounds, n observed rounds of a position, G block size, P prompts, W bootstrap resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepspec.eval import metrics
from deepspec.eval.rounds import Rounds
from deepspec.models.verify import CONDITIONAL, Threshold, survival

BINS = 20
ECE = f"ece_{BINS}"
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))


def _bin(predicted_n: np.ndarray, bins: int) -> np.ndarray:
    """Index of the equal-width bin of each prediction; 1 belongs to the last."""
    return np.minimum((predicted_n * bins).astype(np.int64), bins - 1)


def ece(predicted_n: np.ndarray, label_n: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error of one position: Σ_b n_b/n · |mean prediction_b − mean label_b|, equal-width bins.

    NaN without samples.
    """
    if not len(predicted_n):
        return float("nan")
    gap_b = np.bincount(_bin(predicted_n, bins), weights=predicted_n - label_n, minlength=bins)
    return float(np.abs(gap_b).sum() / len(predicted_n))


def ece_floor(predicted_n: np.ndarray, bins: int = BINS) -> float:
    """The ECE to expect of ``predicted_n`` if it is exactly right, from the chance of the labels alone.

    The gap of a bin is then normal with variance Σ p (1 − p), and E|gap| = √(2/π) of its standard deviation.
    """
    if not len(predicted_n):
        return float("nan")
    variance_n = predicted_n * (1 - predicted_n)
    variance_b = np.bincount(_bin(predicted_n, bins), weights=variance_n, minlength=bins)
    return float(np.sqrt(2 / np.pi) * np.sqrt(variance_b).sum() / len(predicted_n))


def brier(predicted_n: np.ndarray, label_n: np.ndarray) -> float:
    """Mean squared error of the probability."""
    return float(np.mean((predicted_n - label_n) ** 2)) if len(predicted_n) else float("nan")


def auc(score_n: np.ndarray, label_n: np.ndarray, weight_n: np.ndarray | None = None) -> float:
    """ROC-AUC: chance that an accepted sample scores above a rejected one, ties half; NaN with one class only."""
    order = np.argsort(score_n, kind="stable")
    ranking = _Ranking(score_n[order], label_n[order])
    return _auc_sorted(ranking, None if weight_n is None else weight_n[order])


@dataclass(frozen=True)
class _Ranking:
    """Samples sorted by score, so that many weightings of them are cheap."""

    score: np.ndarray
    label: np.ndarray


def _auc_sorted(ranking: _Ranking, weight_n: np.ndarray | None) -> float:
    positive_n = ranking.label if weight_n is None else ranking.label * weight_n
    negative_n = (1.0 - ranking.label) if weight_n is None else weight_n - positive_n
    starts = np.flatnonzero(np.diff(ranking.score, prepend=np.nan) != 0)
    positives, negatives = np.add.reduceat(positive_n, starts), np.add.reduceat(negative_n, starts)
    below = np.cumsum(negatives) - negatives
    pairs = positives.sum() * negatives.sum()
    wins = (positives * (below + 0.5 * negatives)).sum()
    return float(wins / pairs) if pairs > 0 else float("nan")


@dataclass(frozen=True)
class Position:
    """One position's samples: which rounds (rows into Rounds), and whether their prefix up to here was accepted."""

    rows: np.ndarray
    label: np.ndarray


def observed(rounds: Rounds, position: int) -> Position:
    """Rounds that offered ``position`` (0-based), with float labels."""
    offered_N = rounds.proposed_N > position
    confident_N = ~np.isnan(rounds.confidence_NG[:, position])
    rows = np.flatnonzero(offered_N & confident_N)
    return Position(rows, (rounds.accepted_N[rows] > position).astype(np.float64))


def reached(rounds: Rounds, position: int) -> Position:
    """The observed rounds whose earlier positions were all accepted: where c_k itself is a prediction."""
    samples = observed(rounds, position)
    keep = rounds.accepted_N[samples.rows] >= position
    return Position(samples.rows[keep], samples.label[keep])


def survivals(confidence_NG: np.ndarray) -> np.ndarray:
    """``survival`` in float64, whatever the type of the confidences: the predictions of every position."""
    return survival(np.asarray(confidence_NG, dtype=np.float64))


def errors_of(rounds: Rounds, confidence_NG: np.ndarray, bins: int = BINS) -> list[float]:
    """ECE at each position, NaN where nothing was observed."""
    survival_NG = survivals(confidence_NG)
    samples = (observed(rounds, k) for k in range(rounds.block_size))
    return [ece(survival_NG[each.rows, k], each.label, bins) for k, each in enumerate(samples)]


def floors_of(rounds: Rounds, confidence_NG: np.ndarray, bins: int = BINS) -> list[float]:
    """``ece_floor`` at each position."""
    survival_NG = survivals(confidence_NG)
    rows = (observed(rounds, k).rows for k in range(rounds.block_size))
    return [ece_floor(survival_NG[each, k], bins) for k, each in enumerate(rows)]


def mean_over_positions(values: Sequence[float]) -> float:
    """The headline: the mean of the positions where the figure is defined, NaN where it is nowhere."""
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")


def mean_ece(rounds: Rounds, confidence_NG: np.ndarray, bins: int = BINS) -> float:
    """The ECE of these rounds: the mean over positions."""
    return mean_over_positions(errors_of(rounds, confidence_NG, bins))


def curve(rounds: Rounds, confidence_NG: np.ndarray, position: int, bins: int = BINS) -> dict[str, list[float]]:
    """Reliability of one position (paper Figure 6): mean survival, share accepted and count of each filled bin."""
    samples = observed(rounds, position)
    predicted_n = survivals(confidence_NG)[samples.rows, position]
    bin_n = _bin(predicted_n, bins)
    count_b = np.bincount(bin_n, minlength=bins)
    filled = count_b > 0
    mean_b, share_b = (
        np.bincount(bin_n, weights=values_n, minlength=bins)[filled] / count_b[filled]
        for values_n in (predicted_n, samples.label)
    )
    return {"predicted": mean_b.tolist(), "observed": share_b.tolist(), "count": count_b[filled].tolist()}


def reliability(rounds: Rounds) -> dict[str, Any] | None:
    """Figures of the recorded confidences for results.json, None where there are none.

    {"bins", ECE and "auc" (means over positions), "positions": [{"position", "rounds", ECE, "auc", curve…}]}.
    """
    if not rounds.block_size or np.isnan(rounds.confidence_NG).all():
        return None
    survival_NG = survivals(rounds.confidence_NG)
    errors = errors_of(rounds, rounds.confidence_NG)
    areas, positions = [], []
    for k, error in enumerate(errors):
        samples = observed(rounds, k)
        areas.append(auc(survival_NG[samples.rows, k], samples.label))
        figures = {"position": k + 1, "rounds": len(samples.rows), ECE: plain(error), "auc": plain(areas[-1])}
        shape = curve(rounds, rounds.confidence_NG, k)
        positions.append(figures | {name: [plain(value) for value in shape[name]] for name in shape})
    headline = {ECE: plain(mean_over_positions(errors)), "auc": plain(mean_over_positions(areas))}
    return {"bins": BINS, **headline, "positions": positions}


def plain(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return None if np.isnan(value) else round(value, 6)


def judge(rounds: Rounds, confidence_NG: np.ndarray, *, resamples: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """For each position ECE, "auc" and "brier" of the survival, and the same of c_k with the ending _conditional.

    Each is {"value", "low", "high"} as in results.json. Intervals resample prompts, not rounds: rounds of one prompt
    are alike. The bootstrap of an ECE is biased upwards, so an interval may lie above its value when rounds are few.
    """
    prompts, owner_N = np.unique(rounds.prompt_N, return_inverse=True)
    weight_WP = metrics.resamples(len(prompts), seed, resamples)
    confidence_NG = np.asarray(confidence_NG, dtype=np.float64)
    kinds = (("", observed, survivals(confidence_NG)), ("_conditional", reached, confidence_NG))
    result = []
    for k in range(rounds.block_size):
        entry: dict[str, Any] = {}
        for ending, samples_of, values_NG in kinds:
            samples = samples_of(rounds, k)
            predicted_n, owner_n = values_NG[samples.rows, k], owner_N[samples.rows]
            entry[ECE + ending] = _ece_interval(predicted_n, samples.label, owner_n, weight_WP)
            entry["auc" + ending] = _auc_interval(predicted_n, samples.label, owner_n, weight_WP)
            entry["brier" + ending] = _brier_interval(predicted_n, samples.label, owner_n, weight_WP)
        result.append(entry)
    return result


def _interval(value: float, draws_W: np.ndarray) -> dict[str, Any]:
    return metrics.interval(np.asarray(value), draws_W)


def _brier_interval(
    predicted_n: np.ndarray, label_n: np.ndarray, owner_n: np.ndarray, weight_WP: np.ndarray
) -> dict[str, Any]:
    prompts = weight_WP.shape[1]
    sum_P = np.bincount(owner_n, weights=(predicted_n - label_n) ** 2, minlength=prompts)
    count_P = np.bincount(owner_n, minlength=prompts)
    draws_W = (weight_WP @ sum_P) / np.maximum(weight_WP @ count_P, 1)
    return _interval(brier(predicted_n, label_n), draws_W)


def _ece_interval(
    predicted_n: np.ndarray, label_n: np.ndarray, owner_n: np.ndarray, weight_WP: np.ndarray
) -> dict[str, Any]:
    """Gaps are summed for each prompt and bin once; a resample is then a matrix product."""
    prompts = weight_WP.shape[1]
    cell_n = owner_n * BINS + _bin(predicted_n, BINS)
    gap_Pb = np.bincount(cell_n, weights=predicted_n - label_n, minlength=prompts * BINS).reshape(prompts, BINS)
    count_P = np.bincount(owner_n, minlength=prompts)
    gap_W = np.abs(weight_WP @ gap_Pb).sum(axis=1)
    return _interval(ece(predicted_n, label_n), gap_W / np.maximum(weight_WP @ count_P, 1))


def _auc_interval(
    predicted_n: np.ndarray, label_n: np.ndarray, owner_n: np.ndarray, weight_WP: np.ndarray
) -> dict[str, Any]:
    order = np.argsort(predicted_n, kind="stable")
    ranking, owner_n = _Ranking(predicted_n[order], label_n[order]), owner_n[order]
    draws_W = np.array([_auc_sorted(ranking, weight_P[owner_n]) for weight_P in weight_WP])
    return _interval(_auc_sorted(ranking, None), draws_W)


def threshold_sweep(
    rounds: Rounds,
    confidence_NG: np.ndarray | None = None,
    *,
    on: str = CONDITIONAL,
    thresholds: Sequence[float] = THRESHOLDS,
) -> list[dict[str, Any]]:
    """What ``--confidence-threshold`` would have given (paper Figure 5), from rounds verified in full; [] without any.

    ``confidence_NG`` replaces the recorded confidences. The schedule keeps ℓ leading positions of a round, of which
    min(accepted, ℓ) are accepted. "verify_rate", the paper's acceptance rate: Σ (accepted + 1) / Σ (ℓ + 1);
    "draft_acceptance_rate": Σ accepted / Σ ℓ, None where nothing is kept; "tau": 1 + mean accepted; "proposal_length":
    mean ℓ. Rounds are taken where they started in the recorded run, which a thresholded run would shift: a what-if,
    exact for each round.
    """
    values_NG = rounds.confidence_NG if confidence_NG is None else confidence_NG
    whole_N = rounds.proposed_N == rounds.block_size
    full_N = whole_N & ~np.isnan(values_NG).any(axis=1)
    if not rounds.block_size or not full_N.any():
        return []
    rows = []
    for threshold in thresholds:
        length_n = Threshold(threshold, on)(values_NG[full_N])
        accepted_n = np.minimum(rounds.accepted_N[full_N], length_n)
        verified, accepted = int(length_n.sum()), int(accepted_n.sum())
        row: dict[str, Any] = {"threshold": float(threshold), "on": on}
        row["verify_rate"] = round((accepted + len(length_n)) / (verified + len(length_n)), 6)
        row["draft_acceptance_rate"] = round(accepted / verified, 6) if verified else None
        row["tau"] = round(float(1 + accepted_n.mean()), 6)
        row["proposal_length"] = round(float(length_n.mean()), 6)
        rows.append(row)
    return rows
