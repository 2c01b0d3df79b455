"""Verdicts of losslessness from counts: what was checked, how much of it was excused, against which control.

Knows the numbers in results.json only, neither models nor answers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import gammaln

Check = dict[str, Any]  # the ``identity`` of a data set in results.json, or the sum of several

IDENTICAL, CONSISTENT = "identical", "consistent"
NOT_LOSSLESS, NOT_PROVEN = "NOT lossless", "not proven"

ODDS = 2.0  # a verified block rounds otherwise than single tokens: up to these odds are not held against a drafter
LEVEL = 1e-3  # of the exact test
ENOUGH_POSITIONS = 300  # none of 300 wrong: with 95 % confidence at most 1 % of all are
RESOLVED_SHARE = 0.25  # of the control's positions, whose two largest logits are further apart than the tolerance

_OLD_KEYS = ("prompts", "identical", "ties", "different")
_SUMMED: tuple[str, ...] = (*_OLD_KEYS, "positions", "near_ties", "excused", "beyond", "broken")


def excess(count: int, of: int, control: int, control_of: int, odds: float = ODDS) -> float:
    """Fisher's exact one-sided test: chance of ``count`` of ``of`` or more, given that ``control`` of ``control_of``
    were counted in the control, and that the odds of being counted are ``odds`` times the control's.

    P(x) ∝ C(of, x) · C(control_of, total − x) · odds^x (Fisher's noncentral hypergeometric distribution).
    """
    total = count + control
    x = np.arange(max(0, total - control_of), min(of, total) + 1)
    logs = _log_choose(of, x) + _log_choose(control_of, total - x) + x * np.log(odds)
    weights = np.exp(logs - logs.max())
    return float(weights[x >= count].sum() / weights.sum())


def _log_choose(n: int, k: np.ndarray) -> np.ndarray:
    return np.asarray(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def judge(check: Check) -> tuple[str, str]:
    """One of the four verdicts without its figures, and why; the rules are in docs/evaluation.md."""
    if not check["prompts"]:
        return NOT_PROVEN, "no answer has a plain one to be compared with"
    if check["identical"] == check["prompts"]:
        return IDENTICAL, "every answer is equal bit for bit"
    null = check["null"]
    if check["broken"] and not null["broken"]:
        return NOT_LOSSLESS, f"{check['broken']} answers do not end as they must"
    if check["tolerance"] is None:
        return NOT_PROVEN, "too few plain positions to measure the rounding of this run"
    resolved = null["positions"] - null["near_ties"]
    if resolved < RESOLVED_SHARE * null["positions"]:
        return NOT_PROVEN, "the arithmetic rounds as much as the two largest logits differ"
    if check["beyond"] and not null["beyond"]:
        return NOT_LOSSLESS, f"{check['beyond']} positions are beyond measured rounding"
    if _more(check, "beyond", "positions", [null]) or _more(check, "broken", "prompts", [null]):
        return NOT_LOSSLESS, "far more positions or endings are wrong than in the null run"
    if _more(check, "excused", "near_ties", [null, check["noise"]]):
        return NOT_LOSSLESS, "far more tokens below the maximum at near-ties than rounding explains"
    if check["beyond"] or check["broken"]:
        return NOT_PROVEN, "the null run itself is not greedy decoding of this target"
    if not check["identical"] and check["positions"] < ENOUGH_POSITIONS:
        return NOT_PROVEN, "no answer is equal bit for bit and too few positions were checked"
    return CONSISTENT, "every token is the maximum given its own prefix, or within measured rounding of it"


def _more(check: Check, counted: str, of: str, controls: Sequence[Check]) -> bool:
    """Whether more was counted than in every control, beyond chance and ODDS.

    A control so small that nothing could exceed it significantly is not asked.
    """
    share = check[counted], check[of]
    everything = check[of], check[of]
    shares = [(control[counted], control[of]) for control in controls]
    able = [control for control in shares if excess(*everything, *control) < LEVEL]
    return bool(able) and all(excess(*share, *control) < LEVEL for control in able)


def wording(check: Check) -> str:
    """The verdict as it is printed and stored."""
    verdict, _ = judge(check)
    if verdict != CONSISTENT:
        return verdict
    share = f"{check['excused']} of {check['positions']} positions"
    return f"{CONSISTENT} ({share} within measured rounding, null run {check['null']['excused']})"


def proven(check: Check) -> bool:
    """Whether the verdict is one of the two good ones."""
    return judge(check)[0] in (IDENTICAL, CONSISTENT)


def failed(check: Check | None) -> bool:
    """Whether the check ran and found the answers not lossless."""
    return check is not None and judge(check)[0] == NOT_LOSSLESS


def is_old(check: Check) -> bool:
    """Whether the check was written before verdicts: it holds prompts, identical, ties and different alone."""
    return "null" not in check


def total(checks: Sequence[Check]) -> Check:
    """The sum of the checks of several data sets under one control. Old checks sum their four figures."""
    if any(is_old(check) for check in checks):
        return {key: sum(check[key] for check in checks) for key in _OLD_KEYS}
    summed: Check = {key: sum(check[key] for check in checks) for key in _SUMMED}
    keys = checks[0]["null"] if checks else ()
    summed["null"] = {key: sum(check["null"][key] for check in checks) for key in keys}
    excused = [check["largest_excused_gap"] for check in checks]
    summed["largest_excused_gap"] = max((gap for gap in excused if gap is not None), default=None)
    summed["tolerance"] = checks[0]["tolerance"] if checks else None  # of the run, like the noise
    summed["noise"] = checks[0]["noise"] if checks else None
    offences = [check["offence"] for check in checks if check["offence"] is not None]
    summed["offence"] = offences[0] if offences else None
    return summed


def lines(check: Check) -> list[str]:
    """What the verdict rests on, in words; the first line begins with the verdict."""
    verdict, why = judge(check)
    head = wording(check)
    out = [head if verdict in (IDENTICAL, CONSISTENT) else f"{head}: {why}"]
    out.append(f"{check['identical']} of {check['prompts']} answers equal bit for bit")
    if check["tolerance"] is not None:
        null = check["null"]
        out[-1] += f", {check['positions']} positions checked"
        out.append(
            f"{check['excused']} excused ({_percent(check['excused'], check['near_ties'])} of "
            f"{check['near_ties']} near-ties), null run {null['excused']} of {null['positions']} "
            f"({_percent(null['excused'], null['near_ties'])} of {null['near_ties']} near-ties)"
        )
        gap = check["largest_excused_gap"]
        largest = "" if gap is None else f", largest excused gap {gap:.2g}"
        out.append(f"tolerance {check['tolerance']:.2g} logits{largest}")
    if check["offence"] is not None:
        name = "first excused position" if verdict == CONSISTENT else "first offence"
        out.append(f"{name}: {check['offence']['text']}")
    return out


def closing_lines(label: str, check: Check | None) -> list[str]:
    """The verdict on a variant at temperature 0 and what it rests on; ``check`` is None without a plain run."""
    begin = f"{label}: against plain greedy decoding:"
    if check is None:
        return [f"{begin} {NOT_PROVEN}: there is no plain run to compare with (leave out --no-plain)"]
    first, *rest = lines(check)
    return [f"{begin} {first}", *(f"    {line}" for line in rest)]


def _percent(count: int, of: int) -> str:
    return f"{100 * count / of:.1f} %" if of else "–"
