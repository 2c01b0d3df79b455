"""What scheduling costs and what it brings on this machine; the figures in docs/scheduling.md come from here.

python scripts/bench/scheduler.py overhead            microseconds for a step of 256 requests × γ 7
python scripts/bench/scheduler.py million             wall-clock of a million simulated requests
python scripts/bench/scheduler.py decode --drafter FOLDER --sps FILE [--batch-sizes 1,4,16,32]
    tokens/s of the real decoder under every schedule while its batch is full, greedy output compared with plain
    decoding, and beside each static length what the simulator predicts from the profile (made with `--drafter`) and the
    rounds recorded with full blocks
"""

import argparse
import json
import sys
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepspec.eval.replay import DOMAINS, stream_of, synthetic
from deepspec.eval.rounds import from_prompts
from deepspec.eval.scheduler import make_schedule
from deepspec.eval.simulation import Serving, policy_of, simulate
from deepspec.eval.sps import SPSProfile, SPSTable, load_profile, roofline
from deepspec.models.verify import SURVIVAL

SCHEDULES = ("static", "threshold", "causal", "plateau", "async")


def overhead(requests: int = 256, block: int = 7) -> dict[str, float]:
    """Best and median µs of one call, on confidences like a drafter's."""
    stream = synthetic(64, block=block, difficulty=DOMAINS["mix"])
    confidence_RG = stream.confidence_TG[:requests].copy()
    found = {}
    for name in SCHEDULES:
        scheduler = make_schedule(name, sps=roofline(), length=3)
        samples = [
            value / 20 * 1e6 for value in timeit.repeat(lambda s=scheduler: s(confidence_RG), number=20, repeat=500)
        ]
        found[name] = {"best_us": min(samples), "median_us": float(np.median(samples))}
        print(f"{name:<10} best {min(samples):6.1f} µs   median {np.median(samples):6.1f} µs")
    return found


def million(requests: int = 1_000_000, concurrency: int = 256, tokens: int = 64) -> dict[str, float]:
    """Wall-clock of simulating a million requests of about ``tokens`` tokens for the costliest policy, async."""
    stream, table = synthetic(5000, tokens=tokens, difficulty=DOMAINS["mix"]), roofline()
    serving = Serving(requests=requests, concurrency=concurrency)
    start = time.perf_counter()
    scheduler = policy_of("async", table, length=7, threshold=0.5)
    outcome = simulate(stream, "async", table, serving, scheduler=scheduler)
    seconds = time.perf_counter() - start
    each = seconds / outcome.steps * 1e6
    print(f"{requests} requests, {outcome.steps} steps of {concurrency}: {seconds:.1f} s, {each:.0f} µs each")
    return {"seconds": seconds, "steps": outcome.steps}


@dataclass
class Decoded:
    """One decoding run: tokens/s without prefill while every row was busy, mean ms of a step's parts, the answers."""

    rate: float
    parts: dict[str, float]
    completions: list[Any]

    @property
    def answers(self) -> dict[int, list[int]]:
        """Tokens by prompt."""
        return {each.index: each.tokens for each in self.completions}


def decode_once(
    target: Any, prompts: Sequence[Sequence[int]], drafter: Any, batch: int, tokens: int, schedule: Any
) -> Decoded:
    """Greedy decoding of all prompts, every one to ``tokens`` tokens.

    The clock stops when the last prompts are in and a first row runs out of work: a server is not measured by how its
    queue ends.
    """
    from deepspec.models.decode import Timings, generate

    timings, full = Timings(), Timings()
    options = {} if drafter is None else {"drafter": drafter, "schedule": schedule}
    found = []
    for each in generate(
        target, prompts, max_new_tokens=tokens, batch_size=batch, stop_ids=(), timings=timings, **options
    ):
        found.append(each)
        if len(found) == len(prompts) - batch + 1:
            full = replace(timings)
    busy = full.draft + full.verify + full.other
    parts = {name: 1e3 * getattr(full, name) / full.rounds for name in ("draft", "verify", "other")}
    return Decoded((full.tokens - len(prompts)) / busy, parts, found)


def decode(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every schedule at every batch size, with the simulator's prediction for the static ones."""
    from deepspec.data.chat import render_prompt
    from deepspec.eval import choose, suites
    from deepspec.eval.__main__ import demo_file
    from deepspec.models import drafter as checkpoints
    from deepspec.models.frozen_head import FrozenHead
    from deepspec.models.target import Target

    candidate = choose.candidates([options.drafter])[0]
    cfg = choose.target_config(options.target, [candidate], "auto", bool(candidate.thinking))
    target = Target.load(cfg)
    drafter: Any = checkpoints.load(candidate.folder, FrozenHead.of(target))
    loaded = suites.load(options.suite, demo_file=demo_file([candidate], cfg.name), limit=None, seed=0)
    in_turn = zip_longest(*(item.prompts for item in loaded))  # a small batch sees every data set
    turns = [prompt.turns[0] for group in in_turn for prompt in group if prompt is not None]
    profile = load_profile(options.sps)
    rows = []
    for batch in options.batch_sizes:
        count = max(6, 2 * batch)
        chosen = (turns * (1 + count // len(turns)))[:count]
        prompts = [
            render_prompt(target.tokenizer, [{"role": "user", "content": turn}], cfg.thinking) for turn in chosen
        ]
        context = int(np.mean([len(prompt) for prompt in prompts])) + options.tokens // 2
        plain = decode_once(target, prompts, None, batch, options.tokens, None)
        show(rows, {"batch": batch, "schedule": "plain", "rate": plain.rate, **plain.parts})
        full = None
        lengths = sorted({drafter.block_size, 5, 3, 1} & set(range(1, drafter.block_size + 1)), reverse=True)
        for name in (*(f"static-{length}" for length in lengths), *SCHEDULES[1:]):
            policy, _, length = name.partition("-")
            if policy not in options.schedules:
                continue
            seen = profile.rounds_at(context, batch)
            schedule = make_schedule(policy, sps=seen, length=int(length or 0), threshold=0.2, threshold_on=SURVIVAL)
            found = decode_once(target, prompts, drafter, batch, options.tokens, schedule)
            full = full or found
            row = {"batch": batch, "schedule": name, "rate": found.rate, **found.parts}
            row["speed_up"] = found.rate / plain.rate
            row["identical"] = sum(found.answers[i] == plain.answers[i] for i in plain.answers)
            row["tau"] = float(np.mean([one.accepted + 1 for each in found.completions for one in each.rounds]))
            if length:
                row["predicted"] = predict(full, profile, context, batch, int(length))
                row["error"] = row["predicted"] / found.rate - 1
            show(rows, row)
    return rows


def show(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Keep and print one line."""
    rows.append(row)
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
    print(json.dumps(rounded), flush=True)


def predict(full: Decoded, profile: SPSProfile, context: int, batch: int, length: int) -> float:
    """Tokens/s that the simulator expects of a static length, from the rounds recorded with full blocks."""
    rounds = from_prompts(
        [(one.proposed, one.accepted, one.confidence) for one in each.rounds if one.confidence is not None]
        for each in full.completions
    )
    # many, as requests are drawn from the few prompts: 20 of 6 need not be the mix that was decoded
    serving = Serving(requests=2000, concurrency=batch, draft_seconds=profile.drafting(batch), draft_row_seconds=0)
    table = unpadded(profile, context)
    scheduler = policy_of("static", table, length=length, threshold=0.5)
    return simulate(stream_of(rounds), "static", table, serving, scheduler=scheduler).throughput


def unpadded(profile: SPSProfile, context: int) -> SPSTable:
    """The steps as they were timed: this decoder never pads a step to a larger size that happens to be faster."""
    context = profile.at(context).context
    rows = [row for row in profile.details["measured"] if row["context"] == context]
    return SPSTable(tuple(row["tokens"] for row in rows), tuple(1 / row["seconds"] for row in rows), context)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "million", "decode"))
    parser.add_argument("--drafter")
    parser.add_argument("--target")
    parser.add_argument("--sps", type=Path)
    parser.add_argument("--suite", nargs="+", default=["demo"])
    parser.add_argument(
        "--batch-sizes", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 32]
    )
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, help="JSON")
    options = parser.parse_args()
    if options.what == "decode" and (options.drafter is None or options.sps is None):
        parser.error("decode needs --drafter and --sps")
    if options.what == "decode" and "drafting" not in load_profile(options.sps).details:
        parser.error(f"{options.sps} has no drafting: profile with --drafter {options.drafter}")
    result: Any = {"overhead": overhead, "million": million}.get(options.what, lambda: decode(options))()
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
