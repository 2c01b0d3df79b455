"""How well a drafter's confidences predict acceptance, and what a threshold on them would do. Pure.

Knows records only. Fitting is calibrate's work.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepspec.eval.records import Record
from deepspec.models.verify import ThresholdSchedule

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))


def outcomes(records: Sequence[Record]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Pairs (confidence, accepted) of every draft position whose outcome is known.

    A position counts when all before it were accepted: its confidence is conditional on that prefix. Positions after
    a cut (stop token, token limit) have no outcome.
    """
    confidence: list[float] = []
    accepted: list[bool] = []
    for record in records:
        for (proposed, kept, committed), values in zip(record.rounds, record.confidence or [], strict=False):
            known = min(proposed, kept + 1, len(values)) if committed > kept else min(kept, committed)
            confidence += values[:known]
            accepted += [k < kept for k in range(min(known, len(values)))]
    return np.asarray(confidence, dtype=np.float64), np.asarray(accepted, dtype=bool)


def reliability(records: Sequence[Record], bins: int = 10) -> dict[str, Any] | None:
    """Reliability diagram: per bin of confidence its mean, the share accepted and the count; ECE and ROC-AUC.

    None when no confidence was recorded. ECE = Σ_b n_b/n · |mean confidence_b − share accepted_b|.
    """
    confidence, accepted = outcomes(records)
    if not len(confidence):
        return None
    index = np.minimum((confidence * bins).astype(int), bins - 1)
    count = np.bincount(index, minlength=bins)
    total = np.maximum(count, 1)
    mean = np.bincount(index, weights=confidence, minlength=bins) / total
    share = np.bincount(index, weights=accepted, minlength=bins) / total
    return {
        "count": count.tolist(),
        "confidence": [round(float(x), 6) for x in mean],
        "accepted": [round(float(x), 6) for x in share],
        "ece": round(float((count * np.abs(mean - share)).sum() / count.sum()), 6),
        "auc": _auc(confidence, accepted),
        "positions": int(count.sum()),
    }


def _auc(score: NDArray[np.float64], label: NDArray[np.bool_]) -> float | None:
    """Probability that an accepted position scores above a rejected one, ties half; None when one class is absent."""
    positives, negatives = int(label.sum()), int((~label).sum())
    if not positives or not negatives:
        return None
    _, inverse, count = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[inverse]
    return round(float((ranks[label].sum() - positives * (positives + 1) / 2) / (positives * negatives)), 6)


def threshold_sweep(records: Sequence[Record], thresholds: Sequence[float] = THRESHOLDS) -> list[dict[str, float]]:
    """What ``--confidence-threshold`` would have given, from proposals that were verified in full.

    The schedule keeps ℓ leading positions; min(accepted, ℓ) of them are accepted. Rounds are taken where they started
    in the recorded run, which a thresholded run would shift slightly: a what-if, exact per round. Rounds that a stop
    token or the limit cut are left out. Empty when no confidence was recorded.
    """
    accepted: list[int] = []
    proposals: list[int] = []
    confidences: list[list[float]] = []
    for record in records:
        for (proposed, kept, committed), values in zip(record.rounds, record.confidence or [], strict=False):
            if committed > kept and proposed and len(values) >= proposed:
                accepted.append(kept)
                proposals.append(proposed)
                confidences.append(values[:proposed])
    if not accepted:
        return []
    rows = []
    width = max(map(len, confidences))
    # zeros stand for positions that were not proposed; the minimum below keeps them out at any threshold
    confidence_NG = torch.tensor([[*values, *[0.0] * (width - len(values))] for values in confidences])
    for threshold in thresholds:
        lengths = np.minimum(ThresholdSchedule(threshold)(confidence_NG).numpy(), proposals)
        taken = np.minimum(accepted, lengths)
        rows.append(
            {
                "threshold": float(threshold),
                "acceptance_rate": round(float(taken.sum() / max(lengths.sum(), 1)), 6),
                "tau": round(float(1 + taken.mean()), 6),
                "proposal_length": round(float(lengths.mean()), 6),
            }
        )
    return rows
