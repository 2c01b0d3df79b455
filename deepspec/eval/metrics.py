"""Acceptance length and its companions with bootstrap intervals over prompts. Pure: records in, numbers out.

Knows nothing of models, data sets' names or files. Every definition is written out in docs/evaluation.md.
Shape letters here: P prompts, G block size, W bootstrap resamples.
"""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspec.eval.records import Record
from deepspec.eval.rounds import known_outcome

Array = NDArray[np.float64]
RESAMPLES = 2000
LEVEL = 0.95

# metric → (numerator, denominator); each is the ratio of two sums over prompts, so prompts weigh by their rounds
RATIOS: dict[str, tuple[str, str]] = {
    "tau": ("committed", "rounds"),
    "verify_rate": ("committed", "verified"),  # the paper's acceptance rate: bonus and correction tokens count
    "draft_acceptance_rate": ("kept_all", "offered_all"),
    "proposal_length": ("proposed", "rounds"),
    "tokens_per_second": ("tokens", "wall"),
    "proposals_per_second": ("rounds", "wall"),
    "prefill_share": ("prefill", "wall"),
    "draft_share": ("draft", "wall"),
    "verify_share": ("verify", "wall"),
    "other_share": ("other", "wall"),
}
VECTORS: dict[str, tuple[str, str]] = {
    "conditional_acceptance": ("kept", "reached"),
    "survival": ("kept", "offered"),
    "accepted_lengths": ("lengths", "rounds"),
}


@dataclass(frozen=True)
class Tally:
    """Sums per prompt: ``columns[name]`` is [P] or, for offered, reached and kept, [P, G]; lengths is [P, G+1]."""

    block: int
    columns: dict[str, Array]

    @property
    def prompts(self) -> int:
        """Number of prompts P."""
        return len(self.columns["rounds"])


def tally(records: Sequence[Record], block: int) -> Tally:
    """Count the rounds of each record.

    A draft position k of a round is *offered* when it was verified and its outcome is known (``known_outcome``),
    *reached* when all positions before it were accepted, *kept* when it was accepted itself.
    """
    P = len(records)
    owner = np.repeat(np.arange(P), [len(record.rounds) for record in records])
    rounds = np.array([item for record in records for item in record.rounds], dtype=np.int64).reshape(-1, 3)
    proposed, accepted, committed = rounds.T
    offered, kept = known_outcome(proposed, accepted, committed)
    reached = np.minimum(offered, kept + 1)

    def total(values: NDArray[Any]) -> Array:
        return np.bincount(owner, weights=values, minlength=P).astype(np.float64)

    def histogram(values: NDArray[Any], bins: int) -> Array:
        return np.bincount(owner * bins + values, minlength=P * bins).reshape(P, bins).astype(np.float64)

    def at_least(values: NDArray[Any]) -> Array:
        """[P, G]: rounds whose value is at least 1, 2, … G."""
        return histogram(values, block + 1)[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]

    columns = {"proposed": total(proposed), "committed": total(committed), "verified": total(offered + 1)}
    columns["rounds"] = total(np.ones(len(rounds)))
    columns |= {"kept": at_least(kept), "offered": at_least(offered), "reached": at_least(reached)}
    columns |= {"kept_all": total(kept), "offered_all": total(offered)}
    columns["lengths"] = histogram(np.maximum(committed, 1) - 1, block + 1)
    columns["tokens"] = np.array([len(record.tokens) for record in records], dtype=np.float64)
    for name in ("wall", "prefill", "draft", "verify", "other"):
        columns[name] = np.array([getattr(record, name) for record in records], dtype=np.float64)
    return Tally(block, columns)


def seed_of(name: str, seed: int) -> int:
    """Bootstrap seed of a data set: the same prompts are drawn for every variant, so that differences are paired."""
    return (zlib.crc32(name.encode()) + seed) % 2**32


@functools.lru_cache(maxsize=32)
def resamples(prompts: int, seed: int, count: int = RESAMPLES) -> Array:
    """Multiplicities of a bootstrap over prompts, [W, P]: each row sums to P. The same for the same seed and P."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=count).astype(np.float64)


def divide(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, NaN where that is not positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), np.nan)


def ratio(counts: Tally, names: tuple[str, str], weights_WP: Array | None) -> tuple[Array, Array | None]:
    """Value and replicates [W] (or [W, G]) of one ratio of sums; NaN where the denominator is zero."""
    top, bottom = (counts.columns[name] for name in names)
    if top.ndim == 2 and bottom.ndim == 1:
        bottom = bottom[:, None]
    value = divide(top.sum(axis=0), bottom.sum(axis=0))
    return value, None if weights_WP is None else divide(weights_WP @ top, weights_WP @ bottom)


def interval(value: Array, replicates: Array | None) -> dict[str, Any]:
    """JSON form {value, low, high} with a percentile interval; None where undefined (no data, or a single prompt)."""
    low = high = np.full_like(value, np.nan)
    if replicates is not None:
        tail = (1 - LEVEL) / 2
        # an all-NaN column (a position never reached) stays undefined rather than warning
        undefined = np.isnan(value) | np.isnan(replicates).all(axis=0)
        filled = np.where(undefined, 0.0, replicates)
        quantile = np.nanquantile if np.isnan(filled).any() else np.quantile
        low, high = np.where(undefined, np.nan, quantile(filled, (tail, 1 - tail), axis=0))
    return {"value": _plain(value), "low": _plain(low), "high": _plain(high)}


def _plain(value: Array) -> Any:
    if value.ndim:
        return [_plain(item) for item in value]
    return None if np.isnan(value) else round(float(value), 6)


def summarise(counts: Tally, seed: int | None) -> dict[str, Any]:
    """All metrics of one data set: totals, and {value, low, high} per ratio. Without a seed there are no intervals."""
    weights_WP = resamples(counts.prompts, seed) if seed is not None and counts.prompts > 1 else None
    totals = {name: counts.columns[name].sum() for name in ("rounds", "proposed", "committed", "tokens", "wall")}
    summary: dict[str, Any] = {"prompts": counts.prompts}
    summary |= {name: int(total) for name, total in totals.items() if name != "wall"}
    summary["seconds"] = round(float(totals["wall"]), 4)
    for name, columns in (RATIOS | VECTORS).items():
        summary[name] = interval(*ratio(counts, columns, weights_WP))
    return summary


def macro(tallies: Sequence[Tally], seeds: Sequence[int]) -> dict[str, Any]:
    """Unweighted mean over data sets of every metric, those by position too; undefined where it is in any of them.

    The interval resamples prompts within every data set.
    """
    out: dict[str, Any] = {}
    for name, columns in (RATIOS | VECTORS).items():
        values, replicates = [], []
        for counts, seed in zip(tallies, seeds, strict=True):
            weights_WP = resamples(counts.prompts, seed) if counts.prompts > 1 else None
            value, copies = ratio(counts, columns, weights_WP)
            values.append(value)
            replicates.append(copies)
        known = [copies for copies in replicates if copies is not None]
        spread = np.mean(known, axis=0) if len(known) == len(tallies) else None
        out[name] = interval(np.mean(values, axis=0), spread)
    return out
