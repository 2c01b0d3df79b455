"""Figures of the report about confidences and about training: reliability, threshold what-if, training curves."""

from collections.abc import Sequence
from typing import Any

from deepspec.eval.plots import GRID, MUTED, Results, _known, _legend_above, _style, figure


def reliability(drafters: Sequence[Results]) -> str:
    """Confidence against the share really accepted, with the counts below; the diagonal is perfect calibration."""
    shown = [item for item in drafters if "reliability" in item["macro"]]

    def draw(axes: Any) -> None:
        upper, lower = axes
        upper.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
        for index, item in enumerate(shown):
            diagram = item["macro"]["reliability"]
            filled = [bin for bin, count in enumerate(diagram["count"]) if count]
            auc = "–" if diagram["auc"] is None else f"{diagram['auc']:.3f}"
            label = f"{item['label']}: ECE {100 * diagram['ece']:.1f} %, ROC-AUC {auc}"
            x = [diagram["confidence"][bin] for bin in filled]
            look = _style(index)
            upper.plot(x, [diagram["accepted"][bin] for bin in filled], label=label, **look)
            bins = len(diagram["count"])
            share = [count / max(diagram["positions"], 1) for count in diagram["count"]]
            width = 0.8 / bins / len(shown)
            at = [(bin + 0.5) / bins + (index - (len(shown) - 1) / 2) * width for bin in range(bins)]
            lower.bar(at, share, width * 0.95, color=look["color"])
        upper.set_ylim(0, 1.02)
        upper.set_xlim(0, 1)
        upper.set_ylabel("share accepted")
        lower.set_ylabel("of positions")
        lower.set_xlabel("confidence")
        for axis in axes:
            axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        lower.grid(axis="x", visible=False)
        lower.tick_params(axis="x", pad=6)
        _legend_above(upper, 1)

    return figure("reliability", draw, rows=2, size=(5.6, 5.2), sharex=True, gridspec_kw={"height_ratios": [3, 1]})


def threshold_sweep(item: Results) -> str:
    """Acceptance rate and τ that a confidence threshold would give, a line per domain."""
    domains = {name: data["threshold_sweep"] for name, data in item["domains"].items() if data.get("threshold_sweep")}

    def draw(axes: Any) -> None:
        for axis, key, label in zip(
            axes, ("acceptance_rate", "tau"), ("acceptance rate", "τ, tokens per verification"), strict=True
        ):
            for index, (name, rows) in enumerate(domains.items()):
                look = {**_style(index), "markevery": 2}
                axis.plot([row["threshold"] for row in rows], [row[key] for row in rows], label=name, **look)
            axis.set_xlabel("confidence threshold")
            axis.set_ylabel(label)
        axes[0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes[0].set_ylim(0, 1.02)
        axes[0].figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(domains), handlelength=2.4
        )

    return figure(f"threshold-{item['label']}", draw, columns=2, size=(8.5, 3.4))


def training_curves(runs: dict[str, Sequence[dict[str, float]]]) -> str | None:
    """Loss and τ over steps: ``runs`` maps a label to rows with step and some of the keys below.

    A curve that has a single point everywhere is left out; None when none is left.
    """
    panels = {
        "loss": "training loss",
        "tau_train": "expected τ, training batches",
        "tau_heldout": "expected τ, held-out",
        "tau_decoded": "decoded τ",
    }
    points = {key: [sum(row.get(key) is not None for row in rows) for rows in runs.values()] for key in panels}
    present = [(key, title) for key, title in panels.items() if max(points[key], default=0) > 1]
    if not present:
        return None
    if len(present) > 3:
        present = [panel for panel in present if panel[0] != "tau_train"]

    def draw(axes: Any) -> None:
        axes = axes if len(present) > 1 else [axes]
        for axis, (key, title) in zip(axes, present, strict=True):
            for index, (label, rows) in enumerate(runs.items()):
                points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
                if not points:
                    continue
                steps, values = zip(*points, strict=True)
                look = _style(index)
                if len(points) > 25:
                    axis.plot(steps, values, color=look["color"], linewidth=0.8, alpha=0.25)
                    axis.plot(steps, _smooth(values), label=label, **{**look, "marker": ""})
                else:
                    axis.plot(steps, _known(values), label=label, **look)
            axis.set_title(title)
            axis.set_xlabel("optimizer step")
            axis.grid(color=GRID)
        axes[0].figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(runs), handlelength=2.4
        )

    return figure(
        "training", draw, columns=len(present), size={1: (6.0, 3.4), 2: (8.5, 3.4)}.get(len(present), (10.5, 3.4))
    )


def _smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without the bias of its start."""
    out, state, norm = [], 0.0, 0.0
    for value in values:
        state, norm = weight * state + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(state / norm)
    return out
