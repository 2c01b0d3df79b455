"""``python -m deepspec.eval.simulate``: what each verification policy buys under load, from recorded rounds.

Replays records (or synthetic requests) through the serving model of ``simulation`` at many concurrencies and writes
simulation.json, frontier.svg (paper Figure 7) and budget.svg (Figure 8). Knows no model and needs no accelerator.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepspec.eval.calibration import scale
from deepspec.eval.replay import DOMAINS, Stream, record, stream_of, synthetic
from deepspec.eval.rounds import drafter_of, read_rounds
from deepspec.eval.simulation import POLICIES, Outcome, Serving, policy_of, simulate
from deepspec.eval.sps import SPSProfile, SPSTable, load_profile, roofline
from deepspec.files import provenance, read_json, write_json
from deepspec.models.confidence_scale import ConfidenceScale

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
COSTS = ("draft_seconds", "draft_row_seconds", "mtp_draft_seconds", "prefill_tokens_per_second")
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


def sweep(
    stream: Stream,
    table: SPSTable,
    serving: Serving,
    *,
    policies: Sequence[str] = POLICIES,
    concurrencies: Iterable[int] = CONCURRENCIES,
    lengths: Sequence[int] | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
) -> list[dict[str, Any]]:
    """Outcomes of every policy at every concurrency.

    "static" and "threshold" appear as the best of ``lengths`` (default 1..γ) and ``thresholds`` at that concurrency,
    named in "choice": rivals tuned with hindsight. Schedulers see the table with the drafting time of a full batch
    added.
    """
    lengths = range(1, stream.block_size + 1) if lengths is None else lengths
    found = []
    for concurrency in concurrencies:
        load = replace(serving, concurrency=concurrency, requests=max(serving.requests, 6 * concurrency))
        seen = table.with_overhead(load.draft_seconds + load.draft_row_seconds * concurrency)
        for policy in policies:
            choices: Sequence[float] = {"static": lengths, "threshold": thresholds}.get(policy, (0,))
            tried = [(_run(stream, policy, table, seen, load, choice), choice) for choice in choices]
            outcome, choice = max(tried, key=lambda pair: pair[0].throughput)
            found.append({**asdict(outcome), "choice": choice if len(choices) > 1 else None})
    return found


def _run(stream: Stream, policy: str, table: SPSTable, seen: SPSTable, load: Serving, choice: float) -> Outcome:
    scheduler = policy_of(policy, seen, length=int(choice), threshold=choice if policy == "threshold" else 0.5)
    return simulate(stream, policy, table, load, scheduler=scheduler)


def speed_at(outcomes: Sequence[dict[str, Any]], policy: str, throughput: float) -> float | None:
    """User speed on a policy's frontier at a server throughput, tokens/s; None where it does not get that far."""
    points = sorted((item["throughput"], item["user_speed"]) for item in outcomes if item["policy"] == policy)
    if not points or throughput > points[-1][0]:
        return None
    rates, speeds = np.array(points).T
    best = np.maximum.accumulate(speeds[::-1])[::-1]  # more throughput at more speed is reachable by doing less
    return float(np.interp(throughput, rates, best))


def comparison(outcomes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At each concurrency: gains over the best static length, and user speed over MTP-1 at MTP-1's throughput."""
    rows = []
    for concurrency in sorted({item["concurrency"] for item in outcomes}):
        at = {item["policy"]: item for item in outcomes if item["concurrency"] == concurrency}
        row: dict[str, Any] = {"concurrency": concurrency}
        if "static" in at:
            row["over_static"] = {
                name: at[name]["throughput"] / at["static"]["throughput"] - 1
                for name in ("threshold", "causal", "plateau", "async")
                if name in at
            }
        if "mtp-1" in at:
            rival = at["mtp-1"]
            row["speed_over_mtp_1"] = {
                name: None
                if (speed := speed_at(outcomes, name, rival["throughput"])) is None
                else speed / rival["user_speed"] - 1
                for name in ("static", "causal", "plateau", "async")
                if name in at
            }
        rows.append(row)
    return rows


def render(outcomes: Sequence[dict[str, Any]]) -> str:
    """Throughput, user speed and budget of each policy by concurrency, as a text table."""
    policies = list(dict.fromkeys(item["policy"] for item in outcomes))
    lines = ["tokens/s of the server / of a user, and draft tokens verified per request and step"]
    lines.append("".join([f"{'load':>6}", *(f"{name:>24}" for name in policies)]))
    for concurrency in sorted({item["concurrency"] for item in outcomes}):
        cells = [
            f"{item['throughput']:>9.0f} /{item['user_speed']:>6.1f} ·{item['budget']:>5.2f}"
            for item in outcomes
            if item["concurrency"] == concurrency
        ]
        lines.append("".join([f"{concurrency:>6}", *(f"{cell:>24}" for cell in cells)]))
    return "\n".join(lines)


def _stream(options: argparse.Namespace) -> tuple[Stream, str]:
    """The requests to replay, and where they come from."""
    if options.records is None:
        if options.calibration is not None:
            raise ValueError(
                "--calibration is of recorded confidences, and these requests are synthetic: add --records"
            )
        stream = synthetic(
            options.sources, block=options.block, difficulty=DOMAINS[options.synthetic], seed=options.seed
        )
        if options.sparse:
            stream = stream_of(record(stream), prompt_length=options.prompt_tokens)
        return stream, f"synthetic {options.synthetic}"
    rounds = read_rounds(options.records, options.run)
    if options.calibration is not None:
        if drafter_of(options.records, options.run).get("calibrated"):
            raise ValueError(
                f"the confidences in {options.records} are calibrated already (its results.json): drop --calibration"
            )
        found = ConfidenceScale.of(read_json(options.calibration))
        if found is None:
            raise ValueError(f"{options.calibration} has no temperatures: give the calibration.json of calibrate")
        rounds = replace(rounds, confidence_NG=scale(rounds.confidence_NG, found).astype(np.float32))
    return stream_of(rounds, prompt_length=options.prompt_tokens, seed=options.seed), str(options.records)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepspec.eval.simulate", description=__doc__)
    source = parser.add_argument_group("requests")
    source.add_argument("--records", type=Path, help="records of an evaluation with full blocks (folder or .jsonl)")
    source.add_argument("--run", help="which run, if the records hold several")
    source.add_argument("--calibration", type=Path, help="calibration.json to apply to the recorded confidences")
    source.add_argument("--synthetic", choices=sorted(DOMAINS), default="mix", help="without --records: kind of text")
    source.add_argument("--sources", type=int, default=2000, help="synthetic requests to draw from")
    source.add_argument("--block", type=int, default=7, help="synthetic block size γ")
    source.add_argument("--sparse", action="store_true", help="synthetic: keep only what a recording would hold")
    source.add_argument("--prompt-tokens", type=int, default=256, help="prompt length of recorded requests")
    server = parser.add_argument_group("server")
    server.add_argument("--sps", type=Path, help="SPS table (.json or .csv); default: the roofline demonstration table")
    server.add_argument("--context", type=int, default=0, help="context length, where the table has several")
    server.add_argument("--requests", type=int, default=1000, help="requests at each point (at least 6 × concurrency)")
    server.add_argument("--concurrency", type=_numbers, default=list(CONCURRENCIES), metavar="1,2,4")
    server.add_argument("--arrival-rate", type=float, default=0.0, help="requests/s; 0: always more than fit")
    defaults = Serving()
    for name in COSTS:
        default = f"default: the profile's, else {getattr(defaults, name):g}"
        server.add_argument(f"--{name.replace('_', '-')}", type=float, help=default)
    server.add_argument("--padded", action="store_true", help="a step costs its rectangle (DeepSpec's own decoder)")
    policy = parser.add_argument_group("policies")
    policy.add_argument("--policies", default=",".join(POLICIES), help="comma-separated")
    policy.add_argument("--lengths", type=_numbers, help="static lengths to try; default 1..γ")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for simulation.json, frontier.svg, budget.svg")
    return parser


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulate, print, and write the output folder if there is one."""
    policies = options.policies.split(",")
    if unknown := [name for name in policies if name not in POLICIES]:
        raise ValueError(f"unknown policies {', '.join(unknown)}; choose from {', '.join(POLICIES)}")
    stream, source = _stream(options)
    profile = SPSProfile((roofline(),)) if options.sps is None else load_profile(options.sps)
    table = profile.at(options.context)
    serving = Serving(
        requests=options.requests,
        arrival_rate=options.arrival_rate,
        padded=options.padded,
        seed=options.seed,
        **_costs(options, profile),
    )
    outcomes = sweep(
        stream, table, serving, policies=policies, concurrencies=options.concurrency, lengths=options.lengths
    )
    print(render(outcomes))
    if options.output is not None:
        _write(options.output, outcomes, {"requests": source, "sps": table.source, "serving": asdict(serving)})
    return outcomes


def _costs(options: argparse.Namespace, profile: SPSProfile) -> dict[str, Any]:
    """Costs beside the target's steps: what the command line says, else what was profiled."""
    given = {name: getattr(options, name) for name in COSTS}
    costs = {
        name: float(value if value is not None else profile.details[name])
        for name, value in given.items()
        if value is not None or name in profile.details
    }
    if "draft_seconds" in costs and "mtp_draft_seconds" not in costs:  # not profiled: a layer of five, as by default
        costs["mtp_draft_seconds"] = costs["draft_seconds"] * Serving.mtp_draft_seconds / Serving.draft_seconds
    return costs


def _write(folder: Path, outcomes: list[dict[str, Any]], about: dict[str, Any]) -> None:
    from deepspec.eval import plots_serving

    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("frontier", plots_serving.frontier), ("budget", plots_serving.budget)):
        (folder / f"{name}.svg").write_text(draw(outcomes), encoding="utf-8")
    summary = {"outcomes": outcomes, "comparison": comparison(outcomes), "provenance": provenance()}
    write_json(folder / "simulation.json", {"format_version": 1, **about, **summary})
    print(f"wrote {folder}/simulation.json, frontier.svg, budget.svg")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    try:
        run(_parser().parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
