"""``python -m deepspec.eval.profile``: measure SPS(B), the target's steps per second against the tokens of a step.

One step is what a verification is: the target's pass over B new tokens behind a context, logits of all of them, argmax.
With ``--drafter`` also what drafting adds to a round, by the number of requests. The table feeds the schedulers and the
simulator; ``--import`` turns a CSV measured elsewhere into the same file.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspec.eval.sps import SPSProfile, SPSTable, load_profile
from deepspec.files import provenance
from deepspec.models import drafter as checkpoints
from deepspec.models.decode import Timings, generate
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.kv_cache import KVCache
from deepspec.models.target import Target

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ROUNDS = 12  # rounds in which drafting is timed


@dataclass(frozen=True)
class Measuring:
    """sizes: tokens of a step; contexts: cached tokens of each request; width: tokens a request brings at most (γ + 1),
    so a step of B tokens has ⌈B / width⌉ requests; repeats: rounds over all sizes; seconds: least time of one sample.
    """

    sizes: tuple[int, ...] = SIZES
    contexts: tuple[int, ...] = (256,)
    width: int = 8
    repeats: int = 7
    seconds: float = 0.05

    def __post_init__(self) -> None:
        for name in ("sizes", "contexts"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)) or values[0] < (1 if name == "sizes" else 0):
                raise ValueError(f"{name} is {values}: give ascending positive numbers")
        if self.width < 1 or self.repeats < 1:
            raise ValueError(f"width ({self.width}) and repeats ({self.repeats}) must be at least 1")


def measure(target: Target, how: Measuring, progress: Callable[[str], None] = lambda _: None) -> SPSProfile:
    """Time every size at every context.

    Sizes are taken in turn, ``repeats`` times over, so that a slow minute of the machine touches all of them; the
    median of a size counts, and its spread (half the interquartile range over the median) is kept. Tables are made
    non-increasing (``SPSTable.envelope``): what a larger step does faster, padding gives the smaller one.
    """
    limit = target.config.max_position_embeddings
    if how.contexts[-1] + how.width > limit:
        raise ValueError(
            f"context {how.contexts[-1]} and {how.width} tokens exceed the {limit} positions of {target.name}"
        )
    tables, measured, prefill = [], [], 0.0
    for context in how.contexts:
        steps = _Steps(target, how, context)
        prefill = max(prefill, steps.prefill_rate)
        samples: dict[int, list[float]] = {size: [] for size in how.sizes}
        for turn in range(how.repeats):
            for size in how.sizes:
                samples[size].append(steps.seconds(size))
            progress(f"context {context}: round {turn + 1} of {how.repeats}")
        medians = {size: statistics.median(values) for size, values in samples.items()}
        rates = tuple(1.0 / medians[size] for size in how.sizes)
        tables.append(SPSTable(how.sizes, rates, context, source=f"profile of {target.name}").envelope())
        measured += [
            {"context": context, "tokens": size, "seconds": medians[size], "spread": _spread(samples[size])}
            for size in how.sizes
        ]
    details = {
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "device": _device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "width": how.width,
        "repeats": how.repeats,
        "prefill_tokens_per_second": prefill,
        "measured": measured,
        "provenance": provenance(),
    }
    return SPSProfile(tuple(tables), details)


def measure_drafting(target: Target, drafter: Any, how: Measuring) -> dict[str, Any]:
    """What a round of the decoder takes besides the target's pass: proposing, taking in what was verified, bookkeeping.

    Timed in ``generate`` itself, for 1, 2, 4, … requests up to those of the largest step, behind the longest context.
    Returns ``draft_seconds`` and ``draft_row_seconds`` (``fit_drafting``) and the points they come from, ``drafting``.
    """
    most, tokens = -(-how.sizes[-1] // how.width), (_ROUNDS + 1) * (drafter.block_size + 1)
    limit = target.config.max_position_embeddings
    if tokens >= limit:
        raise ValueError(
            f"{_ROUNDS} rounds of block {drafter.block_size} need {tokens} positions, {target.name} has {limit}: "
            "profile without --drafter"
        )
    context = max(1, min(how.contexts[-1], limit - tokens))
    counts = sorted({*(2**power for power in range(most.bit_length()) if 2**power < most), most})
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, target.vocab_size, (most, context), generator=generator).tolist()
    points = []
    for requests in counts:
        turns = range(1 + max(1, how.repeats // 2))  # the first warms up
        samples = [_drafting_seconds(target, drafter, prompts[:requests], tokens) for _ in turns]
        points.append({"requests": requests, "seconds": statistics.median(samples[1:])})
    base, each = fit_drafting(points)
    return {"draft_seconds": base, "draft_row_seconds": each, "drafting": points}


class _EnoughError(Exception):
    """Ends a decoding that has been timed."""


def _drafting_seconds(target: Target, drafter: Any, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Mean of the first rounds; ``tokens`` are so many that no row ends in them and every row drafts whole blocks."""
    timings = Timings()

    def watch(_: int) -> None:
        if timings.rounds == _ROUNDS:
            raise _EnoughError

    try:
        for _ in generate(
            target,
            prompts,
            drafter=drafter,
            batch_size=len(prompts),
            max_new_tokens=tokens,
            stop_ids=(),
            timings=timings,
            progress=watch,
        ):
            pass
    except _EnoughError:
        pass
    return (timings.draft + timings.other) / timings.rounds


def fit_drafting(points: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of a step and of each request in it: least squares over the points, neither negative."""
    requests = np.array([point["requests"] for point in points], dtype=float)
    seconds = np.array([point["seconds"] for point in points])
    each, base = np.polyfit(requests, seconds, 1) if len(points) > 1 else (0.0, seconds[0])
    if each < 0:
        return float(seconds.mean()), 0.0
    if base < 0:
        return 0.0, float(requests @ seconds / (requests @ requests))
    return float(base), float(each)


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class _Steps:
    """Verification steps of any size behind contexts of one length."""

    def __init__(self, target: Target, how: Measuring, context: int) -> None:
        self.target, self.how, self.context = target, how, context
        self.rows = -(-how.sizes[-1] // how.width)
        self.cache: KVCache = target.new_cache(self.rows, context + how.width)
        self.generator = torch.Generator().manual_seed(0)
        self.cache.add(self.rows)
        self.prefill_rate = 0.0
        for _ in range(2 if context else 0):  # the first warms up
            self.cache.truncate([0] * self.rows)
            self.prefill_rate = self._prefill()
        for size in how.sizes:  # warm-up: kernels, allocator
            self._step(size)

    @torch.inference_mode()
    def _prefill(self) -> float:
        """Fill the contexts a few rows at a time; returns tokens/s."""
        at_once = max(1, 2048 // self.context)
        start = time.perf_counter()
        for first in range(0, self.rows, at_once):
            last = min(first + at_once, self.rows)
            view = self.cache.rows_view(first, last)
            self.target(self._tokens(last - first, self.context), cache=view, taps=True)
        self._wait()
        return self.rows * self.context / (time.perf_counter() - start)

    def seconds(self, size: int) -> float:
        """Mean time of a step over at least ``how.seconds``."""
        count, start = 0, time.perf_counter()
        while True:
            self._step(size)
            count += 1
            elapsed = time.perf_counter() - start
            if elapsed >= self.how.seconds:
                return elapsed / count

    @torch.inference_mode()
    def _step(self, size: int) -> None:
        width = min(size, self.how.width)
        rows = -(-size // width)
        counts = [width] * (rows - 1) + [size - width * (rows - 1)]
        view = self.cache.rows_view(0, rows)
        states = self.target(self._tokens(rows, width), lengths_B=counts, cache=view, taps=True)
        kept = states.last_BTD.flatten(0, 1)[:size]  # padding is at the end: only the last row may be short
        self.target.logits(kept).argmax(-1)
        view.truncate(torch.full((rows,), self.context))
        self._wait()

    def _tokens(self, rows: int, width: int) -> torch.Tensor:
        tokens = torch.randint(0, self.target.vocab_size, (rows, width), generator=self.generator)
        return tokens.to(self.target.device)

    def _wait(self) -> None:
        if self.target.device.type != "cpu":
            torch.accelerator.synchronize(self.target.device)


def render(profile: SPSProfile) -> str:
    """Tables as text: tokens of a step, steps/s, ms, tokens/s, spread."""
    spreads = {(row["context"], row["tokens"]): row["spread"] for row in profile.details.get("measured", [])}
    lines = []
    for table in profile.tables:
        lines.append(f"context {table.context}\n  tokens   steps/s   ms/step  tokens/s  spread")
        for size, rate in zip(table.tokens, table.steps_per_second, strict=True):
            spread = spreads.get((table.context, size))
            shown = "" if spread is None else f"{spread:>7.1%}"
            lines.append(f"{size:>8}{rate:>10.2f}{1e3 / rate:>10.2f}{rate * size:>10.0f} {shown}")
    if "drafting" in profile.details:
        shown = ", ".join(
            f"{1e3 * point['seconds']:.1f} ({point['requests']})" for point in profile.details["drafting"]
        )
        lines.append(f"drafting with {profile.details['drafter']}, ms a step (requests): {shown}")
    return "\n".join(lines)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    """The options."""
    out = argparse.ArgumentParser(prog="python -m deepspec.eval.profile", description=__doc__)
    out.add_argument("--target", help="recipe, folder or hub id")
    out.add_argument("--drafter", metavar="DIR", help="time drafting too; its target is the default")
    out.add_argument("--import", dest="imported", type=Path, metavar="CSV", help="take a table measured elsewhere")
    out.add_argument("--sizes", type=_numbers, default=SIZES, metavar="1,2,4", help="tokens of a step")
    out.add_argument("--contexts", type=_numbers, default=(256,), metavar="256,1024", help="cached tokens")
    out.add_argument("--width", type=int, default=8, help="tokens of a request at most: γ + 1 (default 8)")
    out.add_argument("--repeats", type=int, default=7)
    out.add_argument("--output", type=Path, help=".json or .csv; default runs/TARGET/sps.json")
    out.add_argument("--device")
    out.add_argument("--dtype", default="auto")
    return out


def run(options: argparse.Namespace) -> SPSProfile:
    """Measure or import, print, write."""
    if (options.target is None and options.drafter is None) == (options.imported is None):
        raise ValueError(
            "pass --target NAME (or --drafter DIR, whose target it is) to measure, or --import CSV to take a table "
            "measured elsewhere"
        )
    output: Path | None = options.output
    if options.imported is not None:
        profile = load_profile(options.imported)
        output = output or options.imported.with_suffix(".json")
    else:
        from deepspec.eval import choose

        how = Measuring(options.sizes, options.contexts, options.width, options.repeats)
        chosen = [] if options.drafter is None else choose.candidates([options.drafter])
        cfg: Any = choose.target_config(options.target, chosen, options.dtype, False)
        target = Target.load(cfg, options.device)
        for candidate in chosen:
            choose.check_fit(candidate, target, bool(candidate.thinking), allow_mismatch=False)
        output = output or Path("runs") / cfg.name / "sps.json"
        profile = measure(target, how, lambda text: print(text, file=sys.stderr))
        profile.save(output)  # before drafting, which may need more memory
        for candidate in chosen:
            drafter = checkpoints.load(candidate.folder, FrozenHead.of(target))
            print(f"drafting of {candidate.label}", file=sys.stderr)
            timed = measure_drafting(target, drafter, how)
            profile = replace(profile, details={**profile.details, "drafter": candidate.label, **timed})
    print(render(profile))
    profile.save(output)
    print(f"wrote {output}")
    return profile


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    try:
        run(parser().parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
