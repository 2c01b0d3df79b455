"""Figures of the report as inline SVG. Knows results.json and the metrics of training runs, not the page.

One look for all: text in the page's font, Okabe-Ito colours, a marker and a dash per series so that colour is never
the only key.
"""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

Results = dict[str, Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1.5, 2)), (0, (8, 3)), (0, (2, 3)))
INK, MUTED, GRID = "#1f2933", "#52606d", "#e4e7eb"
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": MUTED,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
Draw = Callable[[Any], None]


def figure(name: str, draw: Draw, *, columns: int = 1, rows: int = 1, size: tuple[float, float], **options: Any) -> str:
    """SVG of ``draw(axes)``, axes flattened when there are several. ``name`` makes the ids unique and stable."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        drawing = Figure(figsize=size, layout="constrained")
        axes = drawing.subplots(rows, columns, squeeze=False, **options).ravel()
        draw(axes if len(axes) > 1 else axes[0])
        stream = io.StringIO()
        drawing.savefig(
            stream, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight", pad_inches=0.05
        )
    svg = re.sub(r"<metadata>.*?</metadata>", "", stream.getvalue(), flags=re.DOTALL)
    # The page scales a figure down but never up, so that text has one size; its style sheet chooses the font.
    shown = f'<svg role="img" style="max-width:{1.36 * size[0] * 72:.0f}px" '
    svg = svg[svg.index("<svg") :].replace("<svg ", shown, 1)
    svg = re.sub(r' ?(?:height|width)="[\d.]+pt"', "", svg, count=2)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)  # figures share a page


def _style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % 6],
        "marker": MARKERS[index % 6],
        "linestyle": DASHES[index % 6],
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
    }


def _known(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _legend_above(axis: Any, count: int) -> None:
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=min(count, 4), borderaxespad=0.2, handlelength=2.4)


def tau(drafters: Sequence[Results]) -> str:
    """τ of each data set with its interval, one bar per drafter."""
    names = list(drafters[0]["datasets"])
    width = 0.8 / len(drafters)

    def draw(axis: Any) -> None:
        for index, item in enumerate(drafters):
            metrics = [item["datasets"][name]["tau"] for name in names]
            values = _known([metric["value"] for metric in metrics])
            errors = [
                [
                    max(0.0, abs((metric[side] if metric[side] is not None else value) - value))
                    for metric, value in pairs
                ]
                for side in ("low", "high")
                for pairs in [list(zip(metrics, values, strict=True))]
            ]
            at = [place + (index - (len(drafters) - 1) / 2) * width for place in range(len(names))]
            colour = COLOURS[index % 6]
            axis.bar(at, values, width * 0.9, color=colour, label=item["label"])
            axis.errorbar(at, values, errors, fmt="none", ecolor=INK, elinewidth=1, capsize=2.5, capthick=1)
            if len(names) * len(drafters) <= 18:
                for x, value, high in zip(at, values, errors[1], strict=True):
                    axis.annotate(
                        f"{value:.2f}", (x, value + high), (0, 4), textcoords="offset points", ha="center", size=9
                    )
        axis.set_xticks(range(len(names)), names)
        if len(names) > 5:
            axis.tick_params(axis="x", rotation=25)
            for label in axis.get_xticklabels():
                label.set_ha("right")
        axis.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
        axis.set_ylabel("τ, tokens per verification")
        axis.grid(axis="x", visible=False)
        axis.set_xlim(-0.6, len(names) - 0.4)
        _legend_above(axis, len(drafters))

    return figure("tau", draw, size=(max(6.5, min(10.5, 1.6 + 1.1 * len(names))), 3.7))


def _panels(drafters: Sequence[Results]) -> list[tuple[str, Callable[[Results], Results]]]:
    """One panel per domain; a single panel over everything when there is one domain."""
    domains = list(drafters[0]["domains"])
    if len(domains) == 1:
        return [(domains[0], lambda item: item["macro"])]
    return [(domain, lambda item, domain=domain: item["domains"][domain]) for domain in domains]  # type: ignore[misc]


def _panel_width(panels: int) -> float:
    """Inches of a row of panels: one panel is not stretched over the page."""
    return {1: 6.0, 2: 8.5}.get(panels, 10.5)


def acceptance_by_position(drafters: Sequence[Results]) -> str:
    """Conditional acceptance (top) and prefix survival (bottom) at each position of the block, a column per domain."""
    panels = _panels(drafters)

    def draw(axes: Any) -> None:
        rows = (("conditional_acceptance", "accepted, given the prefix"), ("survival", "prefix accepted so far"))
        for row, (metric, label) in enumerate(rows):
            for column, (domain, pick) in enumerate(panels):
                axis = axes[row * len(panels) + column]
                for index, item in enumerate(drafters):
                    values = _known(pick(item)[metric]["value"])
                    axis.plot(range(1, len(values) + 1), values, label=item["label"], **_style(index))
                axis.set_ylim(0, 1.02)
                axis.set_xticks(range(1, max(item["block"] for item in drafters) + 1))
                axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
                if row == 0:
                    axis.set_title(domain)
                else:
                    axis.set_xlabel("position in the block")
                if column == 0:
                    axis.set_ylabel(label)
        axes[0].figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(drafters), handlelength=2.4
        )

    size = (_panel_width(len(panels)), 5.6)
    return figure("positions", draw, rows=2, columns=len(panels), size=size, sharex="col", sharey="row")


def accepted_lengths(drafters: Sequence[Results]) -> str:
    """Distribution of tokens committed per verification, a panel per domain."""
    panels = _panels(drafters)
    width = 0.82 / len(drafters)

    def draw(axes: Any) -> None:
        axes = axes if len(panels) > 1 else [axes]
        for axis, (domain, pick) in zip(axes, panels, strict=True):
            for index, item in enumerate(drafters):
                values = _known(pick(item)["accepted_lengths"]["value"])
                at = [length + 1 + (index - (len(drafters) - 1) / 2) * width for length in range(len(values))]
                axis.bar(at, values, width * 0.92, color=COLOURS[index % 6], label=item["label"])
            axis.set_title(domain)
            axis.set_xlabel("tokens committed in a round")
            axis.set_xticks(range(1, max(item["block"] for item in drafters) + 2))
            axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
            axis.grid(axis="x", visible=False)
        axes[0].set_ylabel("share of rounds")
        axes[0].figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(drafters), handlelength=1.2
        )

    return figure("lengths", draw, columns=len(panels), size=(_panel_width(len(panels)), 3.4), sharey=True)


def speed_up_by_block(groups: Sequence[Results]) -> str:
    """Wall-clock speed-up against block length, a line per drafter and batch size; the best block is ringed."""
    labels = list(dict.fromkeys(group["label"] for group in groups))
    batches = list(dict.fromkeys(group["batch"] for group in groups))

    def draw(axes: Any) -> None:
        axes = axes if len(batches) > 1 else [axes]
        for axis, batch in zip(axes, batches, strict=True):
            for group in groups:
                if group["batch"] != batch:
                    continue
                blocks = [entry["block"] for entry in group["blocks"]]
                speeds = [entry["speed_up"] for entry in group["blocks"]]
                look = _style(labels.index(group["label"]))
                axis.plot(blocks, speeds, label=group["label"], **look)
                axis.plot([group["best"]], [group["speed_up"]], "o", mfc="none", mec=look["color"], ms=13, mew=1.6)
            axis.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
            axis.set_title(f"batch size {batch}")
            axis.set_xlabel("block length k")
            axis.set_xticks(sorted({entry["block"] for group in groups for entry in group["blocks"]}))
            axis.margins(x=0.08, y=0.12)
        axes[0].set_ylabel("speed-up over plain decoding, ×")
        handles, names = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(handles, names, loc="outside upper left", ncols=len(labels), handlelength=2.4)

    return figure("blocks", draw, columns=len(batches), size=(_panel_width(len(batches)), 3.8), sharey=True)


def time_shares(items: Sequence[Results]) -> str:
    """Where a variant's seconds went: prompt forward, draft, verification, the rest."""
    parts = (
        ("prefill_share", "prompt"),
        ("draft_share", "draft"),
        ("verify_share", "verify"),
        ("other_share", "other"),
    )
    colours = ("#56B4E9", "#E69F00", "#0072B2", "#c3cad1")

    def draw(axis: Any) -> None:
        for row, item in enumerate(reversed(items)):
            left = 0.0
            for (key, name), colour in zip(parts, colours, strict=True):
                share = item["macro"][key]["value"] or 0.0
                axis.barh(row, share, left=left, height=0.62, color=colour, label=name if row == 0 else None)
                if share >= 0.06:
                    ink = "white" if colour == "#0072B2" else INK
                    axis.text(
                        left + share / 2, row, f"{100 * share:.0f} %", ha="center", va="center", color=ink, size=9
                    )
                left += share
        axis.set_yticks(range(len(items)), [f"{item['label']}, batch {item['batch']}" for item in reversed(items)])
        axis.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axis.set_xlim(0, 1)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("share of wall-clock time")
        _legend_above(axis, 4)

    return figure("shares", draw, size=(8.5, 1.3 + 0.42 * len(items)))
