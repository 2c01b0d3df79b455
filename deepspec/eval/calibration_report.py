"""Report of a calibration: before and after by position, every method, threshold sweep, as plain values and as text.

Measures are those of confidence.py.
"""

from typing import Any

import numpy as np

from deepspec.eval import calibration, confidence
from deepspec.eval.confidence import ECE
from deepspec.eval.rounds import Rounds, RoundsError
from deepspec.models.confidence_scale import ConfidenceScale

METHODS = ("platt", "sts", "single")  # those that keep the order of confidences and so may be stored
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
        errors = confidence.errors_of(test, values_NG)
        comparison[name] = {"mean_ece": confidence.mean_over_positions(errors), ECE: errors}
    chosen = method or choose(fit, seed)
    after_NG = methods[chosen]
    before = confidence.judge(test, raw_NG, resamples=resamples, seed=seed)
    after = confidence.judge(test, after_NG, resamples=resamples, seed=seed)
    return {
        "method": chosen,
        "bins": confidence.BINS,
        **scales[chosen].fields(),
        "scales": {name: scale.fields() for name, scale in scales.items()},
        "counts": {
            name: {"prompts": len(part.prompts), "rounds": len(part)} for name, part in (("fit", fit), ("test", test))
        },
        "positions": _positions(fit, scales[chosen], before, after),
        "comparison": comparison,
        "floor": confidence.mean_over_positions(confidence.floors_of(test, after_NG)),
        "best": min(comparison, key=lambda name: comparison[name]["mean_ece"]),
        "reliability": [
            {
                "position": k + 1,
                "before": confidence.curve(test, raw_NG, k),
                "after": confidence.curve(test, after_NG, k),
            }
            for k in range(rounds.block_size)
        ],
        "sweep": {
            "before": confidence.threshold_sweep(test, raw_NG),
            "after": confidence.threshold_sweep(test, after_NG),
        },
    }


def _positions(fit: Rounds, scale: ConfidenceScale, before: list[Table], after: list[Table]) -> list[Table]:
    """The chosen scale at each position, and the measures of the test prompts before and after it."""
    return [
        {
            "position": k + 1,
            "temperature": scale.temperatures[k],
            "shift": scale.shifts[k],
            "fitted": calibration.identified(fit, k),
            "before": before[k],
            "after": after[k],
        }
        for k in range(fit.block_size)
    ]


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
        name: confidence.mean_ece(judging, calibration.scale(raw_NG, scale))
        for name, scale in fit_scales(inner).items()
    }
    return min(METHODS, key=errors.__getitem__)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def render(report: Table) -> str:
    """The report as text."""
    title = f"{report['method']} on the test prompts:"
    bins = f"ECE ({confidence.BINS} bins)"
    lines = [title, f"position  temperature   shift  {bins} before → after [95 %]     Brier            AUC of c_k"]
    for row in report["positions"]:
        before, after = row["before"], row["after"]
        ece, mark = after[ECE], " " if row["fitted"] else "*"
        areas = [_number(side["auc_conditional"]["value"], ".4f") for side in (before, after)]
        lines.append(
            f"{row['position']:>8}  {row['temperature']:>11.3f}{mark} {row['shift']:>+6.2f}  "
            f"{_number(before[ECE]['value'], '.2%'):>8} → {_number(ece['value'], '.2%')} "
            f"[{_number(ece['low'], '.2%')}, {_number(ece['high'], '.2%')}]   "
            f"{_number(before['brier']['value'], '.4f')} → {_number(after['brier']['value'], '.4f')}   "
            f"{areas[0]} → {areas[1]}"
        )
    if not all(row["fitted"] for row in report["positions"]):
        lines.append("* reached by too few rounds for values of its own: those of the position before")
    means = {name: values["mean_ece"] for name, values in report["comparison"].items()}
    lines.append(
        f"mean {bins} on the test prompts: " + ", ".join(f"{name} {value:.2%}" for name, value in means.items())
    )
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
    """The threshold sweep as text (paper Figure 5), calibrated confidences."""
    lines = ["threshold  acceptance rate  drafts accepted  verified drafts  tau"]
    for row in report["sweep"]["after"]:
        drafts = _number(row["draft_acceptance_rate"], ".1%")
        lines.append(
            f"{row['threshold']:>9.2f}  {row['verify_rate']:>15.1%}  {drafts:>15}  {row['proposal_length']:>15.2f}  "
            f"{row['tau']:.2f}"
        )
    lines.append("acceptance rate: tokens committed over tokens verified, the target's own token counted in both")
    return "\n".join(lines)
