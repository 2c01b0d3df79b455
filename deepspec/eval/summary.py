"""Records of all variants into results.json: per data set, per domain, macro average, speed-ups, gains.

Knows the schema that docs/evaluation.md documents. Does not decode and does not draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deepspec.eval import compare, confidence, metrics
from deepspec.eval.compare import PLAIN as PLAIN
from deepspec.eval.metrics import Tally, seed_of
from deepspec.eval.records import Record

FORMAT, VERSION = "deepspec-eval", 2  # 1: gains without intervals


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
        out["domains"][domain] = average | _pooled(records, variant)
    out["macro"] = _average(tallies, plain_tallies, list(tallies), seed, variant)
    everything = [record for records in decoded.values() for record in records]
    out["macro"] |= _pooled(everything, variant)
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
    """Unweighted mean over data sets."""
    average = metrics.macro([tallies[name] for name in members], [seed_of(name, seed) for name in members])
    if variant.kind != PLAIN and all(name in plain for name in members):
        average["speed_up"] = compare.mean_speed_up(tallies, plain, members, seed).interval()
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
