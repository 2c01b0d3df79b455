"""Records of all variants into results.json: per data set, per domain, macro average, speed-ups, gains.

Knows the schema that docs/evaluation.md documents. Does not decode and does not draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from deepspec.eval import compare, confidence, metrics
from deepspec.eval.compare import PLAIN as PLAIN
from deepspec.eval.metrics import Tally, seed_of
from deepspec.eval.records import Record
from deepspec.eval.rounds import rounds_of
from deepspec.models.verify import SURVIVAL

FORMAT, VERSION = "deepspec-eval", 2  # 1: gains without intervals, averages with pooled vectors; see upgraded


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


def tallies_of(decoded: Decoded, block: int) -> dict[str, Tally]:
    """Counts of every data set."""
    return {name: metrics.tally(records, block) for name, records in decoded.items()}


def variant_results(
    variant: Variant, decoded: Decoded, plain: Decoded | None, domains: Mapping[str, str], seed: int
) -> dict[str, Any]:
    """Everything results.json says of one variant except the identity check."""
    tallies = tallies_of(decoded, variant.block)
    plain_tallies = tallies_of(plain or {}, 0)
    out: dict[str, Any] = {"id": variant.id, **asdict(variant), "datasets": {}, "domains": {}}
    for name, counts in tallies.items():
        out["datasets"][name] = _one(counts, decoded[name], plain_tallies.get(name), seed_of(name, seed), variant)
        if "speed_up" in out["datasets"][name]:
            out["datasets"][name]["sessions"] = _sessions(decoded[name], (plain or {})[name])
    for domain in dict.fromkeys(domains[name] for name in tallies):
        members = [name for name in tallies if domains[name] == domain]
        records = [record for name in members for record in decoded[name]]
        average = {"members": members, **_average(tallies, plain_tallies, members, seed, variant)}
        out["domains"][domain] = average | {"pooled": _pooled(records, variant)}
    everything = [record for records in decoded.values() for record in records]
    average = _average(tallies, plain_tallies, list(tallies), seed, variant)
    out["macro"] = average | {"pooled": _pooled(everything, variant)}
    return out


def _one(counts: Tally, records: Sequence[Record], plain: Tally | None, seed: int, variant: Variant) -> dict[str, Any]:
    summary = metrics.summarise(counts, seed)
    summary["empty"] = sum(_is_empty(record) for record in records)
    summary["truncated"] = sum(record.finish == "length" for record in records)
    if plain is not None and variant.kind != PLAIN:
        summary["speed_up"] = compare.speed_up(counts, plain, seed).interval()
        summary["plain_tokens_per_second"] = metrics.summarise(plain, None)["tokens_per_second"]["value"]
    return summary


def _sessions(ours: Sequence[Record], plain: Sequence[Record]) -> int:
    """Runs of the command that timed both sides of a prompt: 2 where some prompt's sides are of different runs."""
    pairs = zip(ours, plain, strict=True)
    return 2 if any(record.session != other.session for record, other in pairs) else 1


def _is_empty(record: Record) -> bool:
    """Whether the target ended its turn at once."""
    return not record.tokens or (len(record.tokens) == 1 and record.finish == "stop")


def _average(
    tallies: Mapping[str, Tally],
    plain: Mapping[str, Tally],
    members: Sequence[str],
    seed: int,
    variant: Variant,
) -> dict[str, Any]:
    """Unweighted mean over data sets, of every column; ``prompts`` is their number."""
    average: dict[str, Any] = {"prompts": sum(tallies[name].prompts for name in members)}
    average |= metrics.macro([tallies[name] for name in members], [seed_of(name, seed) for name in members])
    if variant.kind != PLAIN and all(name in plain for name in members):
        average["speed_up"] = compare.mean_speed_up(tallies, plain, members, seed).interval()
    return average


def _pooled(records: Sequence[Record], variant: Variant) -> dict[str, Any]:
    """Figures over all rounds together, where a data set weighs by its rounds: shown only as pooled."""
    summary = metrics.summarise(metrics.tally(records, variant.block), seed=None)
    pooled: dict[str, Any] = {key: summary[key] for key in ("prompts", "rounds", *metrics.VECTORS)}
    rounds = rounds_of(records)
    diagram = confidence.reliability(rounds)
    if diagram is not None:
        pooled["reliability"] = diagram
        pooled["threshold_sweep"] = confidence.threshold_sweep(rounds)
    return pooled


def upgraded(results: dict[str, Any]) -> dict[str, Any]:
    """results.json of an earlier version in today's terms: old figures under names that say what they are.

    There "acceptance_rate" was of draft tokens, averages held pooled vectors, reliability was of c_k in ten bins over
    all positions, and thresholds were on the survival. ECE and AUC by position cannot be made from it. What was
    "verify_efficiency" counted all proposed tokens of rounds that a stop token cut: no metric of today does.
    """
    for item in results["variants"]:
        averages = [item["macro"], *item["domains"].values()]
        for figures in (*item["datasets"].values(), *averages):
            if "acceptance_rate" in figures:
                figures["draft_acceptance_rate"] = figures.pop("acceptance_rate")
        for average in averages:
            if "pooled" not in average:
                names = average.get("members", list(item["datasets"]))
                _unpool(average, [item["datasets"][name] for name in names])
    return results


def _unpool(average: dict[str, Any], datasets: Sequence[dict[str, Any]]) -> None:
    """Move pooled figures of an old average aside and take the means of its data sets instead."""
    moved = ("rounds", *metrics.VECTORS, "reliability", "threshold_sweep")
    pooled = {name: average.pop(name) for name in moved if name in average}
    average["pooled"] = pooled
    for name in metrics.VECTORS:
        values = np.array([data[name]["value"] for data in datasets], dtype=float)  # None becomes NaN
        average[name] = metrics.interval(values.mean(axis=0), None)
    if "reliability" in pooled:
        pooled["reliability"] = _conditional_diagram(pooled["reliability"])
    for row in pooled.get("threshold_sweep", []):
        row["on"] = SURVIVAL
        row["draft_acceptance_rate"] = row.pop("acceptance_rate")
        row["verify_rate"] = round(row["tau"] / (row["proposal_length"] + 1), 6)


def _conditional_diagram(old: dict[str, Any]) -> dict[str, Any]:
    """One panel for all positions, without the name of today's ECE."""
    bins = len(old["count"])
    filled = [bin for bin, count in enumerate(old["count"]) if count]
    names = {"predicted": "confidence", "observed": "accepted", "count": "count"}
    curve = {new: [old[name][bin] for bin in filled] for new, name in names.items()}
    panel = {"position": None, "rounds": old["positions"], **curve}
    return {"bins": bins, f"ece_{bins}_conditional": old["ece"], "auc_conditional": old["auc"], "positions": [panel]}
