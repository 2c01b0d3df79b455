"""Paired comparisons: speed-ups over plain decoding, gains of one drafter over another, and the best block length.

Every figure has a bootstrap interval over prompts. The same prompts are drawn for both sides of a comparison (the seed
is the data set's), so what varies from prompt to prompt alike in both cancels. An average over data sets resamples the
prompts within each of them. Seconds belong to prompts at any batch size: a round's are shared by the rows active in it.
Shape letters here: W bootstrap resamples.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepspec.eval import metrics
from deepspec.eval.metrics import Array, Tally, resamples, seed_of

PLAIN = "plain"
BASELINE = "ngram"  # prompt lookup: what a user has for free
Tallies = Mapping[str, Tally]  # data set → counts


@dataclass(frozen=True)
class Resampled:
    """A figure with its bootstrap replicates [W]; None where there are too few prompts to resample."""

    value: float
    replicates_W: Array | None

    def interval(self) -> dict[str, Any]:
        """{value, low, high}, as in results.json."""
        return metrics.interval(np.asarray(self.value), self.replicates_W)

    def over(self, other: "Resampled") -> "Resampled":
        """self / other, resample by resample."""
        value = self.value / other.value if other.value else float("nan")
        if self.replicates_W is None or other.replicates_W is None:
            return Resampled(value, None)
        return Resampled(value, metrics.divide(self.replicates_W, other.replicates_W))

    def shifted(self, by: float) -> "Resampled":
        """self + by."""
        replicates_W = None if self.replicates_W is None else self.replicates_W + by
        return Resampled(self.value + by, replicates_W)


def estimate(counts: Tally, ratio: str, seed: int) -> Resampled:
    """One of metrics.RATIOS of a data set."""
    weights_WP = resamples(counts.prompts, seed) if counts.prompts > 1 else None
    value, replicates_W = metrics.ratio(counts, metrics.RATIOS[ratio], weights_WP)
    return Resampled(float(value), replicates_W)


def mean(estimates: Iterable[Resampled]) -> Resampled:
    """Unweighted mean over data sets."""
    parts = list(estimates)
    value = float(np.mean([part.value for part in parts]))
    replicates = [part.replicates_W for part in parts if part.replicates_W is not None]
    if len(replicates) < len(parts):
        return Resampled(value, None)
    return Resampled(value, np.mean(replicates, axis=0))


def speed_up(counts: Tally, plain: Tally, seed: int) -> Resampled:
    """Tokens per second over plain decoding's on the same prompts."""
    fast = estimate(counts, "tokens_per_second", seed)
    slow = estimate(plain, "tokens_per_second", seed)
    return fast.over(slow)


def mean_speed_up(tallies: Tallies, plain: Tallies, names: Sequence[str], seed: int) -> Resampled:
    """Mean over data sets of ``speed_up``."""
    return mean(speed_up(tallies[name], plain[name], seed_of(name, seed)) for name in names)


def gain(ours: Tallies, theirs: Tallies, names: Sequence[str], seed: int) -> dict[str, Any] | None:
    """Relative gain in τ, mean(ours) / mean(theirs) − 1 over data sets, as in the paper's Table 1.

    {value, low, high}; None where a data set has no rounds to compare.
    """
    mine = mean(estimate(ours[name], "tau", seed_of(name, seed)) for name in names)
    other = mean(estimate(theirs[name], "tau", seed_of(name, seed)) for name in names)
    change = mine.over(other).shifted(-1.0)
    return None if np.isnan(change.value) else change.interval()


def shows_difference(change: Mapping[str, Any] | None) -> bool | None:
    """Whether an interval of a gain excludes 0; None where there is no interval to tell."""
    if change is None or change.get("low") is None:
        return None
    return change["low"] > 0 or change["high"] < 0


def comparison(variants: Sequence[dict[str, Any]], tallies: Mapping[str, Tallies], seed: int) -> dict[str, Any]:
    """Gains in τ of the best headline variant over each other one, and of every drafter over prompt lookup.

    ``tallies`` are by variant id. {} with fewer than two variants to compare.
    """
    compared = [item for item in variants if item["headline"] and item["kind"] != PLAIN]
    if len(compared) < 2:
        return {}
    best = max(compared, key=lambda item: item["macro"]["tau"]["value"] or 0.0)
    others = [item for item in compared if item is not best]
    out: dict[str, Any] = {"best": best["label"]}
    out["gains"] = {item["label"]: _gains(best, item, tallies, seed) for item in others}
    baseline = next((item for item in compared if item["kind"] == BASELINE), None)
    if baseline is not None:
        drafters = [item for item in compared if item is not baseline]
        out["baseline"] = baseline["label"]
        out["over_baseline"] = {item["label"]: _gains(item, baseline, tallies, seed) for item in drafters}
    return out


def _gains(ours: dict[str, Any], theirs: dict[str, Any], tallies: Mapping[str, Tallies], seed: int) -> dict[str, Any]:
    """By domain, and "macro" for the mean over all data sets."""
    mine, other = tallies[ours["id"]], tallies[theirs["id"]]
    by_domain = {domain: gain(mine, other, facts["members"], seed) for domain, facts in ours["domains"].items()}
    return {"macro": gain(mine, other, list(ours["datasets"]), seed), **by_domain}


def best_blocks(variants: Sequence[dict[str, Any]], tallies: Mapping[str, Tallies], seed: int) -> list[dict[str, Any]]:
    """Speed-up of each block length that ran, by drafter and batch size, and the fastest block.

    ``clear`` says whether the fastest one's lead over the second is more than the prompts' spread explains; None where
    that cannot be told.
    """
    plain = {item["batch"]: tallies[item["id"]] for item in variants if item["kind"] == PLAIN}
    groups: dict[tuple[str, int], dict[int, Resampled]] = {}
    for item in variants:
        if item["kind"] != PLAIN and item["batch"] in plain:
            mine = tallies[item["id"]]
            speed = mean_speed_up(mine, plain[item["batch"]], list(item["datasets"]), seed)
            groups.setdefault((item["label"], item["batch"]), {})[item["block"]] = speed
    return [_best_block(label, batch, speeds) for (label, batch), speeds in groups.items()]


def _best_block(label: str, batch: int, speeds: Mapping[int, Resampled]) -> dict[str, Any]:
    fastest_first = sorted(speeds, key=lambda block: -speeds[block].value)
    best = fastest_first[0]
    second = fastest_first[1] if len(fastest_first) > 1 else None
    clear = None
    if second is not None:
        clear = shows_difference(speeds[best].over(speeds[second]).shifted(-1.0).interval())
    blocks = []
    for block in sorted(speeds):
        interval = speeds[block].interval()
        blocks.append({"block": block, "speed_up": interval["value"], "low": interval["low"], "high": interval["high"]})
    return {
        "label": label,
        "batch": batch,
        "blocks": blocks,
        "best": best,
        "speed_up": speeds[best].interval()["value"],
        "second": second,
        "clear": clear,
    }
