"""Records of all variants into results.json: per data set, per domain, macro average, speed-ups, gains.

Knows the schema that docs/evaluation.md documents. Does not decode and does not draw.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from deepspec.eval import confidence, metrics
from deepspec.eval.metrics import Tally
from deepspec.eval.records import Record

FORMAT, VERSION = "deepspec-eval", 1
PLAIN = "plain"


@dataclass(frozen=True)
class Variant:
    """One way of decoding: ``plain``, a baseline or a drafter, with a block length (0 for plain) and a batch size."""

    label: str
    kind: str
    block: int
    batch: int
    headline: bool = True  # False for the other blocks and batch sizes of a sweep
    draft: str = "probabilistic"  # or greedy: the argmax is proposed, q one-hot
    drafter: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Unique within a run, and usable in a file name."""
        return f"{self.label}-k{self.block}-b{self.batch}"


Decoded = Mapping[str, Sequence[Record]]  # data set → records, the same prompts in the same order for every variant


def seed_of(name: str, seed: int) -> int:
    """Bootstrap seed of a data set: the same prompts are drawn for every variant, so that differences are paired."""
    return (zlib.crc32(name.encode()) + seed) % 2**32


def variant_results(
    variant: Variant, decoded: Decoded, plain: Decoded | None, domains: Mapping[str, str], seed: int
) -> dict[str, Any]:
    """Everything results.json says of one variant except the identity check."""
    tallies = {name: metrics.tally(records, variant.block) for name, records in decoded.items()}
    plain_tallies = {name: metrics.tally(records, 0) for name, records in (plain or {}).items()}
    out: dict[str, Any] = {"id": variant.id, **asdict(variant), "datasets": {}, "domains": {}}
    for name, counts in tallies.items():
        out["datasets"][name] = _one(counts, decoded[name], plain_tallies.get(name), seed_of(name, seed), variant)
        if "speed_up" in out["datasets"][name]:
            compared = (*decoded[name], *(plain or {})[name])
            out["datasets"][name]["sessions"] = len({record.session for record in compared})
    for domain in dict.fromkeys(domains[name] for name in tallies):
        members = [name for name in tallies if domains[name] == domain]
        records = [record for name in members for record in decoded[name]]
        average = {"members": members, **_average(out, tallies, members, seed)}
        out["domains"][domain] = average | _pooled(records, variant)
    out["macro"] = _average(out, tallies, list(tallies), seed)
    everything = [record for records in decoded.values() for record in records]
    out["macro"] |= _pooled(everything, variant)
    return out


def _one(counts: Tally, records: Sequence[Record], plain: Tally | None, seed: int, variant: Variant) -> dict[str, Any]:
    summary = metrics.summarise(counts, seed)
    summary["empty"] = sum(_is_empty(record) for record in records)
    summary["truncated"] = sum(record.finish == "length" for record in records)
    if plain is not None and variant.kind != PLAIN:
        summary["speed_up"] = metrics.speed_up(counts, plain, seed, paired=variant.batch == 1)
        summary["plain_tokens_per_second"] = metrics.summarise(plain, None)["tokens_per_second"]["value"]
    return summary


def _is_empty(record: Record) -> bool:
    """Whether the target ended its turn at once."""
    return not record.tokens or (len(record.tokens) == 1 and record.finish == "stop")


def _average(out: dict[str, Any], tallies: Mapping[str, Tally], members: Sequence[str], seed: int) -> dict[str, Any]:
    """Unweighted mean over data sets."""
    average = metrics.macro([tallies[name] for name in members], [seed_of(name, seed) for name in members])
    gains = [out["datasets"][name].get("speed_up", {}).get("value") for name in members]
    known = [gain for gain in gains if gain is not None]
    if known and len(known) == len(gains):
        average["speed_up"] = {"value": round(float(np.mean(known)), 6), "low": None, "high": None}
    return average


def _pooled(records: Sequence[Record], variant: Variant) -> dict[str, Any]:
    """Position-wise figures over all rounds together, for curves and histograms."""
    summary = metrics.summarise(metrics.tally(records, variant.block), seed=None)
    pooled: dict[str, Any] = {key: summary[key] for key in ("prompts", "rounds", *metrics.VECTORS)}
    diagram = confidence.reliability(records)
    if diagram is not None:
        pooled["reliability"] = diagram
        pooled["threshold_sweep"] = confidence.threshold_sweep(records)
    return pooled


def comparison(variants: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Relative gains in τ of the best headline drafter over each other one, macro averages (the paper's Table 1)."""
    rivals = [item for item in variants if item["headline"] and item["kind"] != PLAIN]
    if len(rivals) < 2:
        return {}
    best = max(rivals, key=lambda item: item["macro"]["tau"]["value"] or 0.0)
    gains = {}
    for rival in rivals:
        if rival is not best:
            gain = {"macro": _gain(best, rival, list(best["datasets"]))}
            for domain in best["domains"]:
                gain[domain] = _gain(best, rival, best["domains"][domain]["members"])
            gains[rival["label"]] = gain
    return {"best": best["label"], "gains": gains}


def _gain(best: dict[str, Any], rival: dict[str, Any], names: Sequence[str]) -> float | None:
    pairs = [(best["datasets"][name]["tau"]["value"], rival["datasets"][name]["tau"]["value"]) for name in names]
    if any(ours is None or theirs is None for ours, theirs in pairs):
        return None
    return round(metrics.relative_gain([ours for ours, _ in pairs], [theirs for _, theirs in pairs]), 6)


def best_blocks(variants: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per drafter and batch size: speed-up of each block length that ran, and the block that was fastest."""
    groups: dict[tuple[str, int], dict[int, float]] = {}
    for item in variants:
        speed = item["macro"].get("speed_up", {}).get("value")
        if item["kind"] != PLAIN and speed is not None:
            groups.setdefault((item["label"], item["batch"]), {})[item["block"]] = speed
    rows = []
    for (label, batch), speeds in groups.items():
        block = max(speeds, key=lambda k: speeds[k])
        ordered = [{"block": k, "speed_up": speeds[k]} for k in sorted(speeds)]
        rows.append({"label": label, "batch": batch, "blocks": ordered, "best": block, "speed_up": speeds[block]})
    return rows
