"""results.json into one self-contained HTML page: ``python -m deepspec.eval.report --results FOLDER``.

Knows results.json and the drafters' metrics.jsonl; reruns nothing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspec.eval import page, plots, plots_confidence, table, verdict
from deepspec.eval.page import Section
from deepspec.eval.summary import FORMAT, PLAIN, VERSION, upgraded
from deepspec.files import atomic_write, read_json

Results = dict[str, Any]
# kind of a metrics.jsonl record → its fields that are drawn, under the names of the curves
CURVES = {
    "train": {"loss": "loss", "tau": "tau_train"},
    "eval": {"tau": "tau_heldout"},
    "decode": {"tau": "tau_decoded"},
}
PROOF = (
    "Every token of every answer is scored by the target given its own prefix: it must be the maximum, or lie within "
    "the rounding that was measured in this run (excused). Plain decoding's answers are scored alike: the null run. "
    "Identical: equal to plain greedy decoding's answer bit for bit. Ties: answers that differ from it and stand."
)
OLD_CHECK = (
    "Every answer was compared with plain greedy decoding of the same prompt up to the first difference. A tie is a "
    "first difference whose two tokens are closer than the arithmetic resolves; what follows it was not looked at."
)


class ReportError(ValueError):
    """Results that no report can be made from."""


def load_results(path: Path) -> Results:
    """Read results.json, given as the file or its folder, in today's terms. Raises ReportError."""
    file = path / "results.json" if path.is_dir() else path
    if not file.is_file():
        raise ReportError(f"no results.json at {path}: run `python -m deepspec.eval` first, or pass --results FOLDER")
    results = read_json(file)
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise ReportError(f"{file} is not a results file of deepspec.eval")
    version = results.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise ReportError(
            f"{file} has schema version {version}, this report reads 1 to {VERSION}: evaluate again, or update deepspec"
        )
    return upgraded(results)


def build(results: Results) -> str:
    """The page."""
    shown = table.headline(results)
    if not shown:
        raise ReportError("these results hold no drafter or baseline, only plain decoding: nothing to report")
    sections = [
        _results(results, shown),
        _comparison(results, shown),
        _lossless(results),
        _positions(shown),
        _lengths(shown),
        _blocks(results),
        _time(results),
        _calibration(shown),
        _training(shown),
        _provenance(results),
    ]
    settings, target = results["settings"], results["target"]
    lead = (
        f"{', '.join(settings['suites'])} · temperature {settings['temperature']:g} · at most "
        f"{settings['max_new_tokens']} new tokens · {'thinking' if settings['thinking'] else 'non-thinking'} · "
        f"{settings['device']}, {settings['dtype']} · {results['created'][:10]}"
    )
    warnings = "".join(page.warning(text) for text in [*results.get("warnings", []), *table.notes(results)])
    title = f"Speculative decoding of {target['name']}"
    footer = "Made by deepspec.eval. Definitions of all metrics: docs/evaluation.md."
    return page.document(title, lead, warnings + _cards(results, shown), sections, footer)


def _cards(results: Results, shown: Sequence[Results]) -> str:
    best = max(shown, key=lambda item: item["macro"]["tau"]["value"] or 0.0)
    items = [
        (
            table.number(best["macro"]["tau"]["value"]),
            f"τ, tokens per verification, {best['label']}, macro average",
            False,
        )
    ]
    if (gain := best["macro"].get("speed_up")) is not None:
        items.append((table.times(gain), f"wall-clock speed-up over plain decoding, batch {best['batch']}", False))
    for label, change in results["comparison"].get("gains", {}).items():
        if change["macro"] is not None and len(items) < 3:
            items.append((table.gain(change["macro"]), f"τ over {table.named(label)}", False))
    if (check := table.identity_total(best)) is not None:
        items.append(_lossless_card(check))
    return page.cards(items)


def _lossless_card(check: Results) -> tuple[str, str, bool]:
    """Answers equal bit for bit, the verdict, and whether it is bad news."""
    share = f"{check['identical']} of {check['prompts']}"
    text = "answers identical to plain greedy decoding"
    if verdict.is_old(check):
        ties = f", {check['ties']} more differ by a floating-point tie" if check["ties"] else ""
        return share, text + ties, check["different"] > 0
    word = verdict.wording(check)
    return share, text if word == verdict.IDENTICAL else f"{text}: {word}", not verdict.proven(check)


def _results(results: Results, shown: Sequence[Results]) -> Section:
    tables = [table.drafter_table(item, results["settings"]["temperature"]) for item in shown]
    body = page.paragraph(
        "τ counts the tokens that one verification commits, the target's own token included, with a 95 % bootstrap "
        "interval over prompts. Tokens per second are wall clock, end to end, for each process.",
        "note",
    )
    body += page.figure(
        plots.tau(shown), "τ of each data set. Whiskers: 95 % interval. The dotted line is plain decoding."
    )
    for one in tables:
        body += f"<h3>{one.title}</h3>" + page.grid(one.header, one.rows, one.rules)
    skipped = [(data["name"], item) for data in results["datasets"] for item in data["skipped"]]
    if skipped:
        first = f"{skipped[0][0]}: {skipped[0][1]['reason']}"
        body += page.warning(f"{len(skipped)} prompts were left out, for every variant alike. {first}")
    return Section("results", "Results", body)


def _comparison(results: Results, shown: Sequence[Results]) -> Section:
    one = table.comparison_table(results)
    if one is None:
        body = page.paragraph(
            "One drafter was evaluated. Pass several to --drafter to compare them on the same prompts.", "note"
        )
        return Section("comparison", "Comparison", body)
    compared = results["comparison"]
    body = page.paragraph(
        f"{one.title}. Averages give each data set the same weight. Gains have 95 % intervals, paired by prompt.",
        "note",
    )
    body += page.grid(one.header, one.rows, best=True)
    body += _gains(f"τ of {table.named(compared['best'])}", "over", compared["gains"])
    if "over_baseline" in compared:
        title = f"τ over {table.named(compared['baseline'])}"
        body += _gains(title, "of", compared["over_baseline"])
    return Section("comparison", "Comparison", body)


def _gains(title: str, word: str, gains: dict[str, Results]) -> str:
    """A row of gains by domain for every label."""
    domains = ["average" if domain == "macro" else domain for domain in next(iter(gains.values()))]
    rows = [
        (f"{word} {table.named(label)}", *(table.gain(change) for change in changes.values()))
        for label, changes in gains.items()
    ]
    return page.grid((title, *domains), rows)


def _lossless(results: Results) -> Section:
    one = table.losslessness_table(results)
    if one is None:
        text = (
            "The identity check needs temperature 0 and the plain baseline; this run had neither or only one. Sampled "
            "decoding keeps the target's distribution, which the test suite proves by enumeration."
        )
        return Section("lossless", "Losslessness", page.paragraph(text, "note"))
    body = page.paragraph(PROOF if "verdict" in one.header else OLD_CHECK, "note")
    body += page.grid(one.header, one.rows)
    details: list[str] = []
    for item in results["variants"]:
        for name, data in item["datasets"].items():
            details += _details(_name(item), name, data.get("identity"))
    details.sort(key=lambda text: "DIFFERENCE" not in text)
    for text in details[:6]:
        body += page.paragraph(text, "note")
    return Section("lossless", "Losslessness", body)


def _details(variant: str, name: str, check: Results | None) -> list[str]:
    """What there is to say of a check of one data set: an offence, or a difference from plain's answer."""
    if not check:
        return []
    if not verdict.is_old(check) and not verdict.proven(check):
        _, why = verdict.judge(check)
        offence = "" if check["offence"] is None else f" {check['offence']['text']}."
        return [f"{variant}, {name}: DIFFERENCE, {why}.{offence}"]
    first = check["first_difference"]
    return [] if first is None else [_difference(variant, name, first)]


def _difference(variant: str, name: str, first: Results) -> str:
    tolerance = "" if first["tolerance"] is None else f" (tie below {first['tolerance']:g})"
    gap = "at an answer's end" if first["gap"] is None else f"logit gap {first['gap']:.2e}{tolerance}"
    kind = "tie" if first["tie"] else "DIFFERENCE"
    return f"{variant}, {name}: {kind} in {first['prompt']} at token {first['position']}, {gap}."


def _name(item: Results) -> str:
    return (
        f"{item['label']}, k = {item['block']}, batch {item['batch']}"
        if item["block"]
        else f"plain, batch {item['batch']}"
    )


def _positions(shown: Sequence[Results]) -> Section:
    caption = (
        "Top: share of draft tokens accepted at a position when everything before it was accepted. Bottom: share of "
        "rounds in which the prefix up to the position survived. Means over the data sets of a domain; a position that "
        "no round of one of them reached has none."
    )
    return Section("positions", "Acceptance by position", page.figure(plots.acceptance_by_position(shown), caption))


def _lengths(shown: Sequence[Results]) -> Section:
    caption = (
        "How many tokens a round commits, the target's own token included; the mean of each histogram is τ. Means over "
        "the data sets of a domain."
    )
    return Section("lengths", "Accepted lengths", page.figure(plots.accepted_lengths(shown), caption))


def _blocks(results: Results) -> Section:
    groups = [group for group in results["best_blocks"] if len(group["blocks"]) > 1]
    one = table.block_table(results)
    if one is None:
        body = page.paragraph(
            "One block length was run. --sweep-blocks measures every length up to the trained one.", "note"
        )
        return Section("blocks", "Speed-up by block length", body)
    caption = (
        "Wall-clock speed-up over plain decoding at the same batch size, mean over data sets, with 95 % intervals over "
        "prompts. Longer blocks raise τ, but cost drafting and verification; the fastest one is ringed."
    )
    body = page.figure(plots.speed_up_by_block(groups), caption) + page.grid(one.header, one.rows)
    return Section("blocks", "Speed-up by block length", body)


def _time(results: Results) -> Section:
    wanted = {item["batch"] for item in table.headline(results)}
    items = [
        item for item in results["variants"] if item["headline"] or (item["kind"] == PLAIN and item["batch"] in wanted)
    ]
    caption = (
        "Mean over data sets. Prompt: the target's forward over prompts. Verify: its forward over drafts, acceptance."
    )
    return Section("time", "Where the time goes", page.figure(plots.time_shares(items), caption))


def _calibration(shown: Sequence[Results]) -> Section:
    known = [item for item in shown if "reliability" in item["macro"]["pooled"]]
    if not known:
        text = (
            "No variant recorded confidences (DSpark's confidence head gives them, --max-probability other drafters)."
        )
        return Section("confidence", "Confidence", page.paragraph(text, "note"))
    caption = (
        "Reliability of the confidences (the confidence head's, or the largest probabilities of drafters without one): "
        "the survival c₁⋯cₖ predicted for a prefix against the share accepted, in 20 bins, pooled over all rounds. ECE "
        "and AUC are means over positions. Below the diagonal confidences are too high; deepspec.eval.calibrate fits a "
        "scale that corrects this."
    )
    body = page.figure(plots_confidence.reliability(known), caption)
    for item in known:
        if not any(data["pooled"].get("threshold_sweep") for data in item["domains"].values()):
            continue
        what = (
            f"{item['label']}: what a confidence threshold would have given, computed from the rounds of this run, "
            "pooled within a domain. The acceptance rate is the paper's: tokens committed over tokens verified, the "
            "target's own token counted in both."
        )
        body += page.figure(plots_confidence.threshold_sweep(item), what)
    return Section("confidence", "Confidence", body)


def _training(shown: Sequence[Results]) -> Section:
    runs: dict[str, Sequence[dict[str, float]]] = {}
    for item in shown:
        folder = item["drafter"].get("folder")
        rows = training_rows(Path(folder)) if folder else []
        if rows:
            runs[item["label"]] = rows
    drawn = plots_confidence.training_curves(runs)
    if drawn is None:
        text = (
            "Their metrics.jsonl hold single points, no curve."
            if runs
            else "No metrics.jsonl lies beside these drafters."
        )
        return Section("training", "Training", page.paragraph(text, "note"))
    caption = (
        "From each drafter's metrics.jsonl. Expected τ is the training forward's; pale lines are single log steps."
    )
    return Section("training", "Training", page.figure(drawn, caption))


def training_rows(folder: Path) -> list[dict[str, float]]:
    """Rows with step, loss and τ from the metrics.jsonl in a checkpoint folder or above it; [] when there is none."""
    for place in (folder, folder.parent):
        file = place / "metrics.jsonl"
        if file.is_file():
            rows = []
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the last line of a run that was killed
                if isinstance(row, dict) and "step" in row:
                    rows.append(_row(row))
            return rows
    return []


def _row(row: Results) -> dict[str, float]:
    out = {"step": float(row["step"])}
    for name, curve in CURVES.get(str(row.get("kind")), {}).items():
        if isinstance(row.get(name), int | float):
            out[curve] = float(row[name])
    return out


def _provenance(results: Results) -> Section:
    target, source = results["target"], results["provenance"]
    rows = [("command", results.get("command", "")), ("created", results["created"])]
    rows += [("target", f"{target['name']} ({target['path']})"), ("target fingerprint", target["fingerprint"])]
    for item in table.headline(results):
        folder = item["drafter"].get("folder")
        if folder:
            rows.append((f"drafter {item['label']}", f"{folder}, {item['drafter'].get('fingerprint', '')}"))
    for data in results["datasets"]:
        pin = data.get("revision") or {True: "published prompts", False: "NOT the published prompts"}.get(
            data["published"], ""
        )
        rows.append(
            (f"data {data['name']}", f"{data['prompts']} of {data['rows']} rows, {data['source']} {pin}".strip())
        )
    rows += [(key.replace("_", " "), json.dumps(value)) for key, value in results["settings"].items()]
    rows += [(name, str(version)) for name, version in source["versions"].items()]
    rows += [("python", source["python"]), ("git revision", str(source["git_revision"]))]
    return Section("provenance", "Provenance", page.facts(rows))


def write(results: Results, folder: Path) -> Path:
    """Write ``index.html`` into ``folder``."""
    path = folder / "index.html"
    html = build(results)
    with atomic_write(path) as temporary:
        temporary.write_text(html, encoding="utf-8")
    return path


def newest_results(root: Path = Path("runs")) -> Path:
    """Folder of the newest results.json under ``root`` or in ``report``. Raises ReportError."""
    found = [*root.glob("*/eval/*/results.json"), *Path("report").glob("results.json")]
    if not found:
        raise ReportError(
            "no results.json under runs/*/eval/ or report/: run `python -m deepspec.eval`, or pass --results"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspec.eval.report", description="Rebuild the HTML report of an evaluation."
    )
    parser.add_argument("--results", type=Path, help="folder or file of results.json (default: the newest one)")
    parser.add_argument("--output", type=Path, help="folder to write index.html into (default: beside results.json)")
    options = parser.parse_args(arguments)
    try:
        source = options.results or newest_results()
        path = write(load_results(source), options.output or (source if source.is_dir() else source.parent))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
