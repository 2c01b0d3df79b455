"""What a calibration did, as plain values: before and after by position, rivals, threshold sweep, and words. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from deepspec.eval import calibration
from deepspec.eval.rounds import Rounds, RoundsError
from deepspec.models.confidence_scale import ConfidenceScale

METHODS = ("platt", "sts", "single")  # those that keep the order of confidences and so may be stored
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))
Table = dict[str, Any]


def calibrate(
    rounds: Rounds, *, method: str | None = None, seed: int = 0, test_share: float = 0.5, resamples: int = 200
) -> Table:
    """Fit every method on some prompts and judge it on the others.

    Returns "method" (the one asked for, or that of METHODS which ``choose`` finds best without the judging prompts)
    with its "temperatures" and "shifts", "scales" (those of every method), "positions" (before and after with
    intervals), "comparison" (mean ECE of the survivals by method), "floor" (the mean ECE that chance alone gives exact
    confidences on so many rounds), "best", "reliability", "sweep" and the counts. Raises RoundsError when there is too
    little to fit.
    """
    fit, test = rounds.split(seed, test_share)
    calibration.check(fit)
    calibration.check(test)
    scales = fit_scales(fit)
    raw_NG = np.asarray(test.confidence_NG, dtype=np.float64)
    methods = {
        "raw": raw_NG,
        **{name: calibration.scale(raw_NG, scale) for name, scale in scales.items()},
        "isotonic": calibration.fit_isotonic(fit)(raw_NG),
    }
    comparison: dict[str, dict[str, Any]] = {}
    for name, values_NG in methods.items():
        errors = calibration.errors_of(test, values_NG)
        comparison[name] = {"mean_ece": float(np.mean(errors)), "ece": errors}
    chosen = method or choose(fit, seed)
    after_NG = methods[chosen]
    judged = [calibration.judge(test, each, resamples=resamples, seed=seed) for each in (raw_NG, after_NG)]
    return {
        "method": chosen,
        **scales[chosen].fields(),
        "scales": {name: scale.fields() for name, scale in scales.items()},
        "counts": {
            name: {"prompts": len(part.prompts), "rounds": len(part)} for name, part in (("fit", fit), ("test", test))
        },
        "positions": [
            {
                "position": k + 1,
                "temperature": scales[chosen].temperatures[k],
                "shift": scales[chosen].shifts[k],
                "fitted": calibration.identified(fit, k),
                **{
                    side: {name: _plain(interval) for name, interval in entries[k].items()}
                    for side, entries in zip(("before", "after"), judged, strict=True)
                },
            }
            for k in range(rounds.block_size)
        ],
        "comparison": comparison,
        "floor": float(np.mean(calibration.floors_of(test, after_NG))),
        "best": min(comparison, key=lambda name: comparison[name]["mean_ece"]),
        "reliability": [
            {"position": k + 1, "before": reliability(test, raw_NG, k), "after": reliability(test, after_NG, k)}
            for k in range(rounds.block_size)
        ],
        "sweep": {"before": sweep(test, raw_NG), "after": sweep(test, after_NG)},
    }


def fit_scales(rounds: Rounds) -> dict[str, ConfidenceScale]:
    """The scale of each of METHODS."""
    return {
        "platt": calibration.fit_platt(rounds),
        "sts": ConfidenceScale(calibration.fit_sts(rounds)),
        "single": ConfidenceScale((calibration.fit_single(rounds),) * rounds.block_size),
    }


def choose(fit: Rounds, seed: int) -> str:
    """The method of least mean ECE on half of the fitting prompts when fitted on the others.

    Where either part is too small for that, on the fitting prompts themselves.
    """
    try:
        inner, judging = fit.split(seed)
        calibration.check(inner)
        calibration.check(judging)
    except RoundsError:
        inner = judging = fit
    raw_NG = np.asarray(judging.confidence_NG, dtype=np.float64)
    errors = {
        name: float(np.mean(calibration.errors_of(judging, calibration.scale(raw_NG, scale))))
        for name, scale in fit_scales(inner).items()
    }
    return min(METHODS, key=errors.__getitem__)


def _plain(interval: calibration.Interval) -> dict[str, float | None]:
    """For JSON, which has no NaN: an AUC of one class only is null."""
    return {name: None if math.isnan(value) else value for name, value in asdict(interval).items()}


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def reliability(rounds: Rounds, confidence_NG: np.ndarray, position: int, bins: int = calibration.BINS) -> Table:
    """Mean survival, share accepted and count of every bin that holds rounds."""
    samples = calibration.observed(rounds, position)
    predicted = np.cumprod(confidence_NG, axis=1)[samples.rows, position]
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    count = np.bincount(index, minlength=bins)
    filled = count > 0
    sums = [np.bincount(index, weights=values, minlength=bins) for values in (predicted, samples.outcome)]
    means = [values[filled] / count[filled] for values in sums]
    return {"predicted": means[0].tolist(), "observed": means[1].tolist(), "count": count[filled].tolist()}


def sweep(rounds: Rounds, confidence_NG: np.ndarray, thresholds: Sequence[float] = THRESHOLDS) -> list[Table]:
    """Verify only the prefix whose survival reaches a threshold (paper Figure 5): a what-if, exact for each round.

    "acceptance_rate": accepted share of the verified draft tokens; "length": how many are verified; "tau". Rounds are
    taken where they started in the recorded run, full blocks only.
    """
    full = rounds.proposed_N == rounds.block_size
    survival_NG = np.cumprod(confidence_NG[full], axis=1)
    accepted_N = rounds.accepted_N[full]
    rows = []
    for threshold in thresholds:
        length_N = (survival_NG >= threshold).sum(axis=1)
        taken_N = np.minimum(accepted_N, length_N)
        rate = float(taken_N.sum() / length_N.sum()) if length_N.sum() else None
        row = {"threshold": threshold, "acceptance_rate": rate, "length": float(length_N.mean())}
        rows.append({**row, "tau": float(1 + taken_N.mean())})
    return rows


def render(report: Table) -> str:
    """The report as text."""
    title = f"{report['method']} on the test prompts:"
    lines = [title, "position  temperature   shift  ECE before → after [95 %]              Brier            AUC of c_k"]
    for row in report["positions"]:
        before, after = row["before"], row["after"]
        ece, mark = after["ece"], " " if row["fitted"] else "*"
        areas = [_number(side["auc_conditional"]["value"], ".4f") for side in (before, after)]
        lines.append(
            f"{row['position']:>8}  {row['temperature']:>11.3f}{mark} {row['shift']:>+6.2f}  "
            f"{before['ece']['value']:>8.2%} → {ece['value']:.2%} "
            f"[{_number(ece['low'], '.2%')}, {_number(ece['high'], '.2%')}]   "
            f"{before['brier']['value']:.4f} → {after['brier']['value']:.4f}   "
            f"{areas[0]} → {areas[1]}"
        )
    if not all(row["fitted"] for row in report["positions"]):
        lines.append("* reached by too few rounds for values of its own: those of the position before")
    means = {name: values["mean_ece"] for name, values in report["comparison"].items()}
    lines.append("mean ECE on the test prompts: " + ", ".join(f"{name} {value:.2%}" for name, value in means.items()))
    tested = report["counts"]["test"]["rounds"]
    lines.append(f"exact confidences would show {report['floor']:.2%} on {tested} rounds; more prompts lower that")
    if report["best"] != "sts":
        best = report["best"]
        lines.append(
            f"note: STS is not the best here: {best} has {means[best]:.2%} against {means['sts']:.2%}"
            + (" (but ties confidences and changes their order)" if best == "isotonic" else "")
        )
    return "\n".join(lines)


def render_sweep(report: Table) -> str:
    """The threshold sweep as text, calibrated confidences."""
    lines = ["threshold  acceptance  verified  tau"]
    for row in report["sweep"]["after"]:
        rate = _number(row["acceptance_rate"], ".1%")
        lines.append(f"{row['threshold']:>9.2f}  {rate:>10}  {row['length']:>8.2f}  {row['tau']:.2f}")
    return "\n".join(lines)
