"""Results as tables: aligned text for the terminal, Markdown for table.md, the paper's Table 1 for several drafters.

Knows results.json only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspec.eval import compare, verdict
from deepspec.eval.summary import PLAIN

Results = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Cells with a title; the first column is left-aligned, the others right-aligned."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    rules: frozenset[int] = frozenset()  # rows that start after a line

    def text(self) -> str:
        """For a terminal."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        total = sum(widths) + 2 * (len(widths) - 1)
        out = [self.title, "─" * total, _align(self.header, widths), "─" * total]
        for index, row in enumerate(self.rows):
            if index in self.rules:
                out.append("─" * total)
            out.append(_align(row, widths))
        return "\n".join([*out, "─" * total])

    def markdown(self) -> str:
        """A pipe table under a heading. A pipe within a cell is escaped: it would begin another cell."""
        marks = [":---", *("---:" for _ in self.header[1:])]
        cells = [[cell.replace("|", "\\|") for cell in line] for line in (self.header, marks, *self.rows)]
        lines = ["| " + " | ".join(line) + " |" for line in cells]
        return f"### {self.title}\n\n" + "\n".join(lines) + "\n"


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]).rstrip()


def headline(results: Results) -> list[Results]:
    """The variants a reader asked for: drafters and baselines at full block and the first batch size, no plain ones."""
    return [item for item in results["variants"] if item["headline"] and item["kind"] != PLAIN]


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where it is undefined."""
    return "–" if value is None else f"{value:.{digits}f}"


def spread(metric: Results, digits: int = 2) -> str:
    """``value (low–high)``, without the bracket where no interval exists."""
    if metric.get("low") is None:
        return number(metric["value"], digits)
    return f"{number(metric['value'], digits)} ({number(metric['low'], digits)}–{number(metric['high'], digits)})"


def positions(values: Sequence[float | None]) -> str:
    """Acceptance by position in two decimals without the leading zero."""
    return " ".join(
        "–" if value is None else f"{value:.2f}".replace("0.", ".", 1).replace("1.00", "1.0") for value in values
    )


def times(metric: Results | None) -> str:
    """A speed-up such as ``2.41× (2.30–2.55)``, without the bracket where a single prompt allows no interval."""
    if not metric or metric["value"] is None:
        return "–"
    if metric.get("low") is None:
        return f"{metric['value']:.2f}×"
    return f"{metric['value']:.2f}× ({metric['low']:.2f}–{metric['high']:.2f})"


def gain(change: Results | float | None) -> str:
    """A relative gain such as ``+14.9 % (+12.1 to +17.8)``; where the interval holds 0, that no difference is shown.

    Results of version 1 have bare numbers.
    """
    if change is None:
        return "–"
    if not isinstance(change, dict):
        return f"{100 * change:+.1f} %"
    text = f"{100 * change['value']:+.1f} %"
    if change["low"] is None:
        return text
    text += f" ({100 * change['low']:+.1f} to {100 * change['high']:+.1f})"
    return text if compare.shows_difference(change) else f"{text}, no difference shown"


def named(label: str) -> str:
    """A variant's label as people read it: prompt lookup is what every user has without training."""
    return "prompt lookup (free)" if label == compare.BASELINE else label


def mixed(data: Results) -> bool:
    """Whether a data set's speed-up divides seconds that several runs of the command measured."""
    return data.get("sessions", 1) > 1


def _starred(metric: Results | None, marked: bool) -> str:
    return times(metric) + "*" * (marked and bool(metric))


def notes(results: Results) -> list[str]:
    """What a reader of the tables must know about their figures."""
    lines = []
    labels = [item["label"] for item in results["variants"] if any(map(mixed, item["datasets"].values()))]
    if labels:
        lines.append(
            f"* speed-ups of {', '.join(dict.fromkeys(labels))} divide seconds of different runs of the command, as "
            "answers on disk were reused: the machine may have been faster in one of them. A new --output times all "
            "in one run."
        )
    revisions = results.get("revisions", [])
    if len(revisions) > 1:
        names = ", ".join(str(revision)[:12] for revision in revisions)
        lines.append(f"these answers were decoded by {len(revisions)} revisions of the program ({names})")
    return lines


def identical(check: Results | None) -> str:
    """Answers equal bit for bit, ``40 of 40``, and the verdict where they are not all. Results written before verdicts
    name the differing answers that were taken for floating-point ties."""
    if not check:
        return "–"
    share = f"{check['identical']} of {check['prompts']}"
    if verdict.is_old(check):
        return f"{share} (+{check['ties']} ties)" if check["ties"] else share
    word, _ = verdict.judge(check)
    return share if word == verdict.IDENTICAL else f"{share}, {word}"


HEADER = (
    "data set",
    "prompts",
    "τ (95 % CI)",
    "accepted | prefix, by position",
    "plain tok/s",
    "tok/s",
    "speed-up",
    "identical",
)


def drafter_table(item: Results, temperature: float) -> Table:
    """One variant: a row per data set and the macro average."""
    rows = []
    for name, data in item["datasets"].items():
        rows.append(
            (
                name,
                str(data["prompts"]),
                spread(data["tau"]),
                positions(data["conditional_acceptance"]["value"]),
                number(data.get("plain_tokens_per_second"), 1),
                number(data["tokens_per_second"]["value"], 1),
                _starred(data.get("speed_up"), mixed(data)),
                identical(data.get("identity")),
            )
        )
    macro = item["macro"]
    rows.append(
        (
            "average",
            str(sum(data["prompts"] for data in item["datasets"].values())),
            spread(macro["tau"]),
            positions(macro["conditional_acceptance"]["value"]),
            "",
            number(macro["tokens_per_second"]["value"], 1),
            _starred(macro.get("speed_up"), any(map(mixed, item["datasets"].values()))),
            identical(identity_total(item)),
        )
    )
    title = f"{named(item['label'])}: block {item['block']}, batch {item['batch']}, temperature {temperature:g}"
    return Table(title, HEADER, rows, frozenset({len(rows) - 1}))


def identity_total(item: Results) -> Results | None:
    """The identity check of a variant over all data sets, None when it did not run."""
    checks = [data.get("identity") for data in item["datasets"].values()]
    return verdict.total(checks) if checks and all(checks) else None


LOSSLESS_HEADER = ("variant", "block", "batch", "answers", "identical", "ties", "different")
PROOF_HEADER = ("positions", "excused", "null run", "tolerance", "verdict")


def losslessness_table(results: Results) -> Table | None:
    """Every variant that was compared with plain decoding, over all data sets; None where none was. Results written
    before verdicts have no columns of the proof."""
    checks = [(item, identity_total(item)) for item in results["variants"]]
    compared = [(item, check) for item, check in checks if check is not None]
    if not compared:
        return None
    with_proof = not any(verdict.is_old(check) for _, check in compared)
    rows = []
    for item, check in compared:
        figures = [str(check[key]) for key in ("prompts", "identical", "ties", "different")]
        row = [item["label"], str(item["block"] or "–"), str(item["batch"]), *figures]
        rows.append([*row, *_proof(check)] if with_proof else row)
    header = LOSSLESS_HEADER + PROOF_HEADER if with_proof else LOSSLESS_HEADER
    return Table("Against plain greedy decoding", header, rows)


def _proof(check: Results) -> list[str]:
    null, tolerance = check["null"], check["tolerance"]
    shown = "–" if tolerance is None else f"{tolerance:.2g}"
    controlled = f"{null['excused']} of {null['positions']}"
    return [str(check["positions"]), str(check["excused"]), controlled, shown, verdict.judge(check)[0]]


def comparison_table(results: Results) -> Table | None:
    """The paper's Table 1: τ of each drafter on each data set, the macro average, and the gain of the best one."""
    variants = headline(results)
    if len(variants) < 2:
        return None
    names = list(variants[0]["datasets"])
    compared = results["comparison"]
    over_baseline = compared.get("over_baseline")
    header = ["drafter", *names, "average", f"{named(compared['best'])} gains over it"]
    if over_baseline:
        header.append(f"gains over {named(compared['baseline'])}")
    rows = []
    for item in variants:
        label = item["label"]
        row = [
            named(label),
            *(number(item["datasets"][name]["tau"]["value"]) for name in names),
            number(item["macro"]["tau"]["value"]),
            gain(compared["gains"].get(label, {}).get("macro")),
        ]
        if over_baseline:
            row.append(gain(over_baseline.get(label, {}).get("macro")))
        rows.append(row)
    return Table("Accepted length τ, tokens per verification (bonus included)", header, rows)


def block_table(results: Results) -> Table | None:
    """Speed-up against block length, one row per drafter and batch size; None without a sweep."""
    groups = [group for group in results["best_blocks"] if len(group["blocks"]) > 1]
    if not groups:
        return None
    blocks = sorted({entry["block"] for group in groups for entry in group["blocks"]})
    rows = []
    for group in groups:
        speeds = {entry["block"]: times({**entry, "value": entry["speed_up"]}) for entry in group["blocks"]}
        cells = [speeds.get(block, "–") for block in blocks]
        rows.append((named(group["label"]), str(group["batch"]), *cells, _fastest(group)))
    return Table(
        "Speed-up over plain decoding by block length k", ("drafter", "batch", *map(str, blocks), "best"), rows
    )


def _fastest(group: Results) -> str:
    """The fastest block, and the second where the prompts do not tell them apart."""
    best = f"k = {group['best']}"
    return f"{best}, no faster than {group['second']} for sure" if group.get("clear") is False else best


def tables(results: Results) -> list[Table]:
    """Every table of a run, in reading order."""
    temperature = results["settings"]["temperature"]
    optional = (comparison_table(results), block_table(results))
    return [drafter_table(item, temperature) for item in headline(results)] + [table for table in optional if table]
