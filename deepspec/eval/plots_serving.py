"""Figures of the serving simulation as SVG: throughput against user speed, and verification budget against load."""

from collections.abc import Sequence
from typing import Any

from deepspec.eval.plots import COLOURS, DASHES, MARKERS, figure

NAMES = {
    "none": "no drafter",
    "mtp-1": "MTP-1 (one token)",
    "static": "best static length",
    "threshold": "best threshold",
    "causal": "causal",
    "plateau": "plateau",
    "async": "async",
}
Outcomes = Sequence[dict[str, Any]]


def _lines(axis: Any, outcomes: Outcomes, x: str, y: str, skip: Sequence[str] = ()) -> None:
    present = [name for name in NAMES if any(item["policy"] == name for item in outcomes) and name not in skip]
    for name in present:
        own = [item for item in outcomes if item["policy"] == name]
        index = list(NAMES).index(name)
        axis.plot(
            [item[x] for item in own],
            [item[y] for item in own],
            color="#52606d" if name == "none" else COLOURS[index % 6],
            marker=MARKERS[index % 6],
            linestyle=DASHES[index % 6],
            markeredgecolor="white",
            markeredgewidth=0.8,
            label=NAMES[name],
        )
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2, handlelength=2.4)


def frontier(outcomes: Outcomes) -> str:
    """Output tokens/s of the server against tokens/s of one user; up and to the right is better (paper Figure 7)."""

    def draw(axis: Any) -> None:
        _lines(axis, outcomes, "user_speed", "throughput")
        axis.set_xlabel("speed of one user (tokens/s)")
        axis.set_ylabel("throughput of the server (tokens/s)")
        axis.set_ylim(bottom=0)

    return figure("frontier", draw, size=(7.4, 4.6))


def budget(outcomes: Outcomes) -> str:
    """Draft tokens verified for a request and step against concurrency (paper Figure 8)."""

    def draw(axis: Any) -> None:
        _lines(axis, outcomes, "concurrency", "budget", skip=("none",))
        axis.set_xscale("log", base=2)
        ticks = sorted({item["concurrency"] for item in outcomes})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xlabel("concurrent requests")
        axis.set_ylabel("draft tokens verified per request and step")
        axis.set_ylim(bottom=0)

    return figure("budget", draw, size=(7.4, 4.6))


def reliability(panels: Sequence[dict[str, Any]]) -> str:
    """Survival predicted against observed at each position, before and after calibration.

    A panel: {"position", "before", "after"}, each curve {"predicted", "observed"} over the bins that hold rounds.
    """

    def draw(axes: Any) -> None:
        for axis, panel in zip([axes] if len(panels) == 1 else axes, panels, strict=False):
            axis.plot([0, 1], [0, 1], color="#9aa5b1", linewidth=1)
            for index, name in ((1, "before"), (0, "after")):
                curve = panel[name]
                axis.plot(
                    curve["predicted"],
                    curve["observed"],
                    color=COLOURS[index],
                    marker=MARKERS[index],
                    linestyle=DASHES[index],
                    label=name,
                )
            axis.set_title(f"position {panel['position']}")
            axis.set_xlim(0, 1)
            axis.set_ylim(0, 1)
            axis.set_aspect("equal")
            axis.set_xlabel("predicted survival")
        for axis in [] if len(panels) == 1 else axes[len(panels) :]:
            axis.set_axis_off()
        first = axes if len(panels) == 1 else axes[0]
        first.set_ylabel("share accepted this far")
        first.legend(loc="upper left")

    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    return figure("calibration", draw, columns=columns, rows=rows, size=(3.0 * columns, 3.2 * rows))
