"""SPS(B): engine steps per second when one step carries B tokens, as a step-wise table. Knows no engine and no policy.

Real curves have steps (captured graph sizes, kernel tiles), so a table is looked up, never fitted: a step of B tokens
costs what the next measured size costs, because that is what an engine that pads does.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepspec.files import atomic_write, read_json, write_json

FORMAT_VERSION = 1
KIND = "deepspec-sps"


class SPSTableError(ValueError):
    """A table of steps per second that cannot be used; names the source and the row."""


@dataclass(frozen=True)
class SPSTable:
    """Steps per second at one context length.

    tokens: ascending step sizes B; steps_per_second: the measured SPS of each. Between two sizes the larger one counts
    (padding up). Beyond the last size the token rate stays what it was: SPS(B) = SPS(B_last) · B_last / B. overhead:
    seconds that every step takes besides, whatever its size (``with_overhead``); files do not hold it.
    """

    tokens: tuple[int, ...]
    steps_per_second: tuple[float, ...]
    context: int = 0
    source: str = "table"
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.steps_per_second):
            raise SPSTableError(
                f"{self.source}: {len(self.tokens)} token counts and {len(self.steps_per_second)} rates; "
                "give one steps_per_second for each tokens, and at least one row"
            )
        for row, (tokens, rate) in enumerate(zip(self.tokens, self.steps_per_second, strict=True)):
            if tokens != int(tokens) or tokens < 1:
                raise SPSTableError(f"{self.source}, row {row}: tokens is {tokens}, must be a whole number ≥ 1")
            if not math.isfinite(rate) or rate <= 0:
                raise SPSTableError(f"{self.source}, row {row}: steps_per_second is {rate}, must be a positive number")
            if row and tokens <= self.tokens[row - 1]:
                raise SPSTableError(
                    f"{self.source}, row {row}: tokens {tokens} does not exceed {self.tokens[row - 1]} of the row "
                    "before; sort the rows and keep one for each size"
                )

    def curve(self, limit: int) -> np.ndarray:
        """Dense lookup: float64 array of limit + 1 values whose entry B is SPS(B) in steps/s (entry 0 is SPS(1))."""
        sizes = np.asarray(self.tokens)
        rates = np.asarray(self.steps_per_second, dtype=np.float64)
        wanted = np.arange(limit + 1)
        looked_up = rates[np.minimum(np.searchsorted(sizes, wanted), len(sizes) - 1)]
        alone = np.where(wanted > sizes[-1], rates[-1] * sizes[-1] / np.maximum(wanted, 1), looked_up)
        return 1.0 / (1.0 / alone + self.overhead) if self.overhead else alone

    def __call__(self, tokens: int) -> float:
        """SPS of one step size, in steps/s."""
        return float(self.curve(tokens)[tokens])

    def envelope(self) -> "SPSTable":
        """The same table made non-increasing: where a larger step is faster, an engine may pad up to it."""
        rates = np.maximum.accumulate(np.asarray(self.steps_per_second)[::-1])[::-1]
        return replace(self, steps_per_second=tuple(rates.tolist()))

    def with_overhead(self, seconds: float) -> "SPSTable":
        """The table of an engine whose every step takes ``seconds`` more, drafting for instance."""
        return replace(self, overhead=self.overhead + seconds)

    def hull(self) -> "SPSTable":
        """The largest curve under which seconds per step is convex in B and nowhere above this table's.

        On it the goodput of the ranked candidates is unimodal, so a greedy walk cannot be trapped at the edge of a
        step. The result has an entry for every B from 1 to the last measured size.
        """
        limit = self.tokens[-1]
        seconds = 1.0 / replace(self, overhead=0.0).curve(limit)[1:]  # a constant does not change what is convex
        hull: list[int] = []
        for size in range(limit):
            while len(hull) > 1 and _above(seconds, hull[-2], hull[-1], size):
                hull.pop()
            hull.append(size)
        convex = np.interp(np.arange(limit), hull, seconds[hull])
        return replace(self, tokens=tuple(range(1, limit + 1)), steps_per_second=tuple((1.0 / convex).tolist()))


def _above(seconds: np.ndarray, left: int, middle: int, right: int) -> bool:
    """Whether the middle point lies on or above the chord from left to right."""
    return (seconds[middle] - seconds[left]) * (right - left) >= (seconds[right] - seconds[left]) * (middle - left)


@dataclass(frozen=True)
class SPSProfile:
    """Tables of one target on one device, at ascending context lengths; ``details`` says how they were made."""

    tables: tuple[SPSTable, ...]
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tables:
            raise SPSTableError("an SPS profile needs at least one table")
        contexts = [table.context for table in self.tables]
        if contexts != sorted(set(contexts)):
            raise SPSTableError(f"contexts {contexts} must ascend without repeats")

    def at(self, context: int) -> SPSTable:
        """The table of the smallest measured context that covers ``context``, else the longest one."""
        return next((table for table in self.tables if table.context >= context), self.tables[-1])

    def drafting(self, requests: int) -> float:
        """Seconds that drafting adds to a step of so many requests; 0 where no drafter was profiled."""
        base, each = (float(self.details.get(name, 0.0)) for name in ("draft_seconds", "draft_row_seconds"))
        return base + each * requests

    def rounds_at(self, context: int, requests: int) -> SPSTable:
        """What a scheduler of this engine sees: ``at(context)`` with the drafting of ``requests`` in every step."""
        return self.at(context).with_overhead(self.drafting(requests))

    def save(self, path: str | Path) -> None:
        """Write .json (with details) or .csv (rows only), chosen by the suffix, atomically."""
        path = Path(path)
        rows = [
            {"context": table.context, "tokens": tokens, "steps_per_second": rate}
            for table in self.tables
            for tokens, rate in zip(table.tokens, table.steps_per_second, strict=True)
        ]
        if path.suffix == ".csv":
            with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.DictWriter(stream, ["context", "tokens", "steps_per_second"])
                writer.writeheader()
                writer.writerows(rows)
            return
        write_json(path, {"kind": KIND, "format_version": FORMAT_VERSION, **self.details, "rows": rows})


def load_profile(path: str | Path) -> SPSProfile:
    """Read a profile from .json (``save``) or .csv (docs/scheduling.md). Raises SPSTableError naming file and row."""
    path = Path(path)
    if not path.is_file():
        raise SPSTableError(
            f"{path} does not exist: make it with `python -m deepspec.eval.profile --target … --output {path}`"
        )
    if path.suffix == ".csv":
        return _profile_of(_csv_rows(path), str(path), {"imported_from": path.name})
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise SPSTableError(f'{path}: no "kind": "{KIND}"; this is not an SPS profile')
    if content.get("format_version") != FORMAT_VERSION:
        raise SPSTableError(
            f"{path}: format_version {content.get('format_version')} where this version reads {FORMAT_VERSION}; "
            "profile again"
        )
    details = {key: value for key, value in content.items() if key not in ("kind", "format_version", "rows")}
    return _profile_of(content.get("rows", []), str(path), details)


def _csv_rows(path: Path) -> Iterable[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as stream:
        yield from csv.DictReader(line for line in stream if line.strip() and not line.lstrip().startswith("#"))


def _profile_of(rows: Iterable[dict[str, Any]], source: str, details: dict[str, Any]) -> SPSProfile:
    by_context: dict[int, dict[int, float]] = {}
    for number, row in enumerate(rows, start=1):
        context, tokens, rate = _parse(row, f"{source}, row {number}")
        if tokens in by_context.setdefault(context, {}):
            raise SPSTableError(f"{source}, row {number}: {tokens} tokens at context {context} appears twice")
        by_context[context][tokens] = rate
    if not by_context:
        raise SPSTableError(f"{source}: no rows")
    tables = (
        SPSTable(*_columns(by_context[context]), context=context, source=source) for context in sorted(by_context)
    )
    return SPSProfile(tuple(tables), details)


def _columns(rates: dict[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    sizes = tuple(sorted(rates))
    return sizes, tuple(rates[size] for size in sizes)


def _parse(row: dict[str, Any], where: str) -> tuple[int, int, float]:
    """Context, tokens, steps/s of a row; the rate may be given as steps_per_second or as seconds_per_step."""
    try:
        tokens, context = int(row["tokens"]), int(row.get("context") or 0)
        if row.get("steps_per_second") not in (None, ""):
            return context, tokens, float(row["steps_per_second"])
        return context, tokens, 1.0 / float(row["seconds_per_step"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise SPSTableError(
            f"{where}: {row} ({error}); columns are tokens, steps_per_second (or seconds_per_step) and, "
            "optionally, context"
        ) from error


def roofline(
    *,
    parameter_bytes: float = 16e9,
    bandwidth: float = 4.0e12,
    flops: float = 5.0e14,
    overhead: float = 1.5e-3,
    tile: int = 64,
    graph_sizes: Sequence[int] = (1, 2, 4, 8, 16, 24, 32, 48, 64),
    limit: int = 8192,
) -> SPSTable:
    """A demonstration table shaped like an accelerator: memory-bound, then compute-bound, with steps.

    seconds(B) = overhead + (m⁴ + f⁴)^¼ with m = parameter_bytes / bandwidth (reading the weights once, in s) and
    f = parameter_bytes · pad(B) / flops (2 FLOPs for each 2-byte parameter and token, in s). pad(B) is the next
    captured graph size, and above those the next multiple of ``tile``. Defaults: 8 B bf16 parameters, effective rates
    of one H200.
    """
    sizes = [*graph_sizes, *range((graph_sizes[-1] // tile + 1) * tile, limit + 1, tile)]
    memory = parameter_bytes / bandwidth
    compute = parameter_bytes * np.asarray(sizes, dtype=np.float64) / flops
    seconds = overhead + (memory**4 + compute**4) ** 0.25
    return SPSTable(tuple(sizes), tuple((1.0 / seconds).tolist()), source="roofline")
