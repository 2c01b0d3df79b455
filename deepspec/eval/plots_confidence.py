"""Figures of the report about confidences and about training: reliability, threshold what-if, training curves."""

from collections.abc import Sequence
from typing import Any

from deepspec.eval.confidence import ECE
from deepspec.eval.plots import GRID, MUTED, Results, _known, _legend_above, _style, figure
from deepspec.models.verify import SURVIVAL


def reliability(drafters: Sequence[Results]) -> str:
    """Survival predicted against the share accepted (paper Figure 6), all positions of all rounds together.

    Below it the share of predictions in each bin; the diagonal is perfect calibration. The legend has the means over
    positions.
    """
    diagrams = [(item["label"], item["macro"]["pooled"].get("reliability")) for item in drafters]
    shown = [(label, diagram) for label, diagram in diagrams if diagram is not None]

    def draw(axes: Any) -> None:
        upper, lower = axes
        upper.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
        for index, (label, diagram) in enumerate(shown):
            predicted, observed, count = _merged(diagram)
            look = _style(index)
            upper.plot(predicted, observed, label=f"{label}: {_headline(diagram)}", **look)
            bins = diagram["bins"]
            share = [number / max(sum(count), 1) for number in count]
            width = 0.8 / bins / len(shown)
            offset = (index - (len(shown) - 1) / 2) * width
            at = [(_bin_of(value, bins) + 0.5) / bins + offset for value in predicted]
            lower.bar(at, share, width * 0.95, color=look["color"])
        upper.set_ylim(0, 1.02)
        upper.set_xlim(0, 1)
        upper.set_ylabel("share accepted")
        lower.set_ylabel("of predictions")
        lower.set_xlabel("predicted survival of the prefix")
        for axis in axes:
            axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        lower.grid(axis="x", visible=False)
        lower.tick_params(axis="x", pad=6)
        _legend_above(upper, 1)

    return figure("reliability", draw, rows=2, size=(5.6, 5.2), sharex=True, gridspec_kw={"height_ratios": [3, 1]})


def _merged(diagram: Results) -> tuple[list[float], list[float], list[int]]:
    """Mean prediction, share accepted and count of each filled bin, over the curves of all positions."""
    cells: dict[int, list[tuple[float, float, int]]] = {}
    for panel in diagram["positions"]:
        for predicted, observed, count in zip(panel["predicted"], panel["observed"], panel["count"], strict=True):
            cells.setdefault(_bin_of(predicted, diagram["bins"]), []).append((predicted, observed, int(count)))
    predictions, shares, counts = [], [], []
    for bin in sorted(cells):
        total = sum(count for _, _, count in cells[bin])
        predictions.append(sum(predicted * count for predicted, _, count in cells[bin]) / total)
        shares.append(sum(observed * count for _, observed, count in cells[bin]) / total)
        counts.append(total)
    return predictions, shares, counts


def _bin_of(predicted: float, bins: int) -> int:
    return min(int(predicted * bins), bins - 1)


def _headline(diagram: Results) -> str:
    """ECE and ROC-AUC under their own names: results of version 1 have them of c_k, in ten bins."""
    conditional = next((name for name in diagram if name.startswith("ece_") and name.endswith("_conditional")), None)
    auc = diagram["auc_conditional"] if conditional else diagram["auc"]
    area = "–" if auc is None else f"{auc:.3f}"
    if conditional:
        return f"ECE of c_k {100 * diagram[conditional]:.1f} %, ROC-AUC {area}"
    error = diagram[ECE]
    value = "–" if error is None else f"{100 * error:.1f} %"
    return f"ECE ({diagram['bins']} bins) {value}, ROC-AUC {area}"


def threshold_sweep(item: Results) -> str:
    """The paper's acceptance rate and τ that a confidence threshold would give (Figure 5), a line per domain."""
    pooled = {name: data["pooled"].get("threshold_sweep") for name, data in item["domains"].items()}
    domains = {name: rows for name, rows in pooled.items() if rows}
    on_survival = any(row["on"] == SURVIVAL for rows in domains.values() for row in rows)

    def draw(axes: Any) -> None:
        for axis, key, label in zip(
            axes, ("verify_rate", "tau"), ("acceptance rate", "τ, tokens per verification"), strict=True
        ):
            for index, (name, rows) in enumerate(domains.items()):
                look = {**_style(index), "markevery": 2}
                axis.plot([row["threshold"] for row in rows], [row[key] for row in rows], label=name, **look)
            axis.set_xlabel("threshold on the survival" if on_survival else "threshold on each confidence")
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
