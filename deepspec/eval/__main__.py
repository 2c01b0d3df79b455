"""``python -m deepspec.eval``: choose, decode, compare, report. The work is in the modules beside it."""

import argparse
import datetime
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepspec import distributed
from deepspec.eval import choose, cli, compare, exactness, report, suites, summary, table, verdict
from deepspec.eval.choose import BASELINES, Candidate
from deepspec.eval.max_probability import METADATA, MaxProbability
from deepspec.eval.records import Record
from deepspec.eval.run import Entry, Plan, RunConfig, Session, first_turns, next_turns
from deepspec.eval.sps import load_profile
from deepspec.eval.summary import PLAIN, Variant
from deepspec.files import atomic_write, provenance, write_json
from deepspec.models import drafter as checkpoints
from deepspec.models.baselines import PromptLookup
from deepspec.models.confidence_scale import ConfidenceScale
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.target import Target

NGRAM_BLOCK = 7


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 2 for what the user can mend, 3 when losslessness failed, 130."""
    options = cli.parse(argv)
    command = "python -m deepspec.eval " + shlex.join(sys.argv[1:] if argv is None else argv)
    try:
        with distributed_job():
            return evaluate(options, command)
    except (ValueError, OSError) as error:  # an OSError: the hub, the disk
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped. Run the same command again to continue; answers on disk are kept.", file=sys.stderr)
        return 130


class distributed_job:
    """Join torchrun's process group (gloo: only barriers) for the time of the run."""

    def __enter__(self) -> None:
        self._own = distributed.world_size() > 1 and not torch.distributed.is_initialized()
        if self._own:
            torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(days=2))

    def __exit__(self, *_: object) -> None:
        if self._own:
            torch.distributed.destroy_process_group()


def evaluate(options: argparse.Namespace, command: str) -> int:
    """The whole evaluation."""
    if options.sps is not None:
        load_profile(options.sps)  # a wrong one is said before hours of plain decoding
    drafters = [] if options.baselines_only else choose.candidates(options.drafter, taps=options.taps)
    cfg = choose.target_config(options.target, drafters, options.dtype, options.thinking)
    loaded = suites.load(
        options.suite,
        data_dir=options.data_dir,
        demo_file=demo_file(drafters, cfg.name),
        limit=options.limit,
        seed=options.seed,
        any_rows=options.any_rows,
    )
    target = Target.load(cfg, options.device)
    warnings = [
        text for item in drafters for text in choose.check_fit(item, target, options.thinking, options.allow_mismatch)
    ]
    variants = plan_variants(options, drafters)
    warnings += threshold_warnings(options, variants)
    for text in warnings:
        say(f"\n!!! WARNING: {text}\n", sys.stderr)
    output = options.output or Path("runs") / cfg.name / "eval" / default_name(options)
    config = RunConfig(
        options.sampling,
        options.max_new_tokens,
        options.thinking,
        options.seed,
        options.confidence_threshold,
        threshold_on=options.threshold_on,
        schedule=None if options.sps is None else options.schedule,
        sps=options.sps,
    )
    session = Session(target, config, output, quiet=options.quiet)
    plan = first_turns(target, loaded, config)
    if not any(plan.asks.values()):
        reason = next((item["reason"] for skipped in plan.skipped.values() for item in skipped), "")
        raise ValueError(f"no prompt can be decoded. {reason}")
    decoded = decode_all(session, variants, drafters, plan, loaded, options)
    if not distributed.is_main():
        return 0
    results = assemble(session, variants, decoded, plan, loaded, options, command, warnings)
    return finish(results, output, options)


def say(text: str, stream: Any = None) -> None:
    """Print on the main rank."""
    if distributed.is_main():
        print(text, file=stream or sys.stdout, flush=True)


def default_name(options: argparse.Namespace) -> str:
    """Folder name of a run: its suites and temperature."""
    names = "-".join(Path(name).stem for name in options.suite)
    return f"{names}-t{options.temperature:g}" + ("-thinking" if options.thinking else "")


def demo_file(drafters: Sequence[Candidate], target: str) -> Path:
    """The held-out prompts of the run folder that a drafter lies in, else of the target's."""
    file = Path("prompts") / "heldout.jsonl"
    for item in drafters:
        for folder in item.folder.parents:
            if (folder / file).is_file():
                return folder / file
    return Path("runs") / target / file


def plan_variants(options: argparse.Namespace, drafters: Sequence[Candidate]) -> list[Variant]:
    """Plain decoding at every batch size, then each drafter and baseline: the headline block, then the sweep."""
    out: list[Variant] = []
    first = options.batch_size[0]
    if not options.no_plain:
        out += [Variant(PLAIN, PLAIN, 0, batch, batch == first) for batch in options.batch_size]
    described = [
        (item.label, item.kind, item.block_size or NGRAM_BLOCK, describe(item, options.taps, options.max_probability))
        for item in drafters
    ]
    described += [(name, name, NGRAM_BLOCK, {}) for name in options.baselines]
    for label, kind, trained, facts in described:
        if kind in BASELINES:
            # no training bounds the block of prompt lookup
            trained = max([options.block or NGRAM_BLOCK, *(options.sweep_blocks or [])])
        if options.block is not None and not 1 <= options.block <= trained:
            raise ValueError(f"--block {options.block}: drafter {label} was trained with block {trained}")
        full = options.block or trained
        swept = options.sweep_blocks if options.sweep_blocks is not None else []
        blocks = swept or (range(1, full + 1) if options.sweep_blocks is not None else [])
        if any(not 1 <= block <= full for block in blocks):
            raise ValueError(f"--sweep-blocks {' '.join(map(str, blocks))}: drafter {label} takes 1 to {full}")
        # what prompt lookup proposes is certain: there is one way to draw it
        ways = options.draft_sampling[:1] if kind in BASELINES else options.draft_sampling
        for draft in ways:
            name = label if draft == options.draft_sampling[0] else f"{label}-{draft}"
            for batch in options.batch_size:
                for block in sorted({full, *blocks}):
                    headline = batch == first and block == full
                    out.append(Variant(name, kind, block, batch, headline, draft, facts))
    return out


def describe(item: Candidate, taps: Sequence[int] | None = None, max_probability: bool = False) -> dict[str, Any]:
    """What results.json says of a drafter; ``taps`` are those given for published EAGLE-3 files, which say none.

    ``max_probability`` gives drafters without a confidence head the field of that name: the scale of such confidences.
    """
    unstated = item.kind == "eagle3" and not item.own
    stands_in = max_probability and not item.confidence
    scale = item.own if item.confidence else (item.own.get(METADATA) or {}) if stands_in else {}
    return {
        "folder": str(item.folder),
        "fingerprint": item.fingerprint(),
        "thinking": item.thinking,
        "block_size": item.block_size,
        "confidence": item.confidence or stands_in,
        "calibrated": bool(scale.get("temperatures")),
        "trained_for": item.target,
        **({"taps": list(item.config["target_layer_ids"])} if unstated and taps is not None else {}),
        **({"max_probability": scale} if stands_in else {}),
    }


def threshold_warnings(options: argparse.Namespace, variants: Sequence[Variant]) -> list[str]:
    """A threshold does nothing to a drafter without confidences: say so instead of failing the comparison."""
    if options.confidence_threshold is None and options.sps is None:
        return []
    what = "--confidence-threshold" if options.sps is None else f"--schedule {options.schedule}"
    trained = [item for item in variants if item.kind != PLAIN and item.kind not in BASELINES]
    bare = {item.label for item in trained if not item.drafter.get("confidence")}
    return [
        f"{what} is not applied to {name}: it has no confidence head; --max-probability takes its largest "
        "probabilities instead"
        for name in sorted(bare)
    ]


def decode_all(
    session: Session,
    variants: Sequence[Variant],
    drafters: Sequence[Candidate],
    plan: Plan,
    loaded: Sequence[suites.Loaded],
    options: argparse.Namespace,
) -> dict[str, dict[str, list[Record]]]:
    """Records by variant id. The first variant's answers are the history of later turns, for every variant alike."""
    entries = load_all(variants, session.target, options.taps)
    for variant, _ in entries:
        if reused := len(session.existing(variant, plan.asks)):
            say(f"{variant.id}: {reused} answers are already in {session.output}")
        if outdated := session.outdated(variant):
            say(
                f"{variant.id}: {outdated} answers of an earlier version of the decoder in {session.output} are not "
                "reused"
            )
    while True:
        decoded = session.decode(entries, plan.asks)
        history = decoded[variants[0].id]
        if options.turns != "all" or not next_turns(plan, session.target, loaded, session.config, history):
            return decoded


def load_all(variants: Sequence[Variant], target: Target, taps: Sequence[int] | None) -> list[Entry]:
    """Each variant with its drafter, all at once, as they take turns; they share the target's embedding and head."""
    head = FrozenHead.of(target)
    loaded: dict[str, Any] = {}
    entries: list[Entry] = []
    for variant in variants:
        folder = variant.drafter.get("folder", "")
        drafter: Any = None
        if folder:
            if folder not in loaded:
                # the head alone skips the fingerprint check, which check_fit has done
                loaded[folder] = checkpoints.load(folder, head, taps=taps)
            drafter = loaded[folder]
            if (scale := variant.drafter.get("max_probability")) is not None:
                drafter = MaxProbability(drafter, ConfidenceScale.of(scale))
        elif variant.kind != PLAIN:
            drafter = PromptLookup(target.vocab_size, variant.block)
        entries.append((variant, drafter))
    return entries


def assemble(
    session: Session,
    variants: Sequence[Variant],
    decoded: dict[str, dict[str, list[Record]]],
    plan: Plan,
    loaded: Sequence[suites.Loaded],
    options: argparse.Namespace,
    command: str,
    warnings: list[str],
) -> dict[str, Any]:
    """results.json: summaries of every variant, checked against plain decoding."""
    target = session.target
    domains = {item.name: item.domain for item in loaded}
    plain = {item.batch: decoded[item.id] for item in variants if item.kind == PLAIN}
    reference = plain.get(options.batch_size[0])
    control = None
    if reference is not None and options.sampling.greedy:
        rules = exactness.Rules(target.stop_ids, options.max_new_tokens)
        control = exactness.Control.of_run(target, reference, plan.asks, rules)
    tallies = {item.id: summary.tallies_of(decoded[item.id], item.block) for item in variants}
    out = []
    for variant in variants:
        item = summary.variant_results(variant, decoded[variant.id], plain.get(variant.batch), domains, options.seed)
        if control is not None and decoded[variant.id] is not reference:
            for name, records in decoded[variant.id].items():
                item["datasets"][name]["identity"] = control.check(records)
        out.append(item)
    return {
        "format": summary.FORMAT,
        "version": summary.VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "warnings": warnings,
        "settings": settings(session, options),
        "target": {"name": target.name, "path": target.path, "fingerprint": target.fingerprint},
        "datasets": [describe_data(item, plan) for item in loaded],
        "variants": out,
        "comparison": compare.comparison(out, tallies, options.seed),
        "best_blocks": compare.best_blocks(out, tallies, options.seed),
        "revisions": revisions(decoded),
        "provenance": provenance(),
    }


def revisions(decoded: dict[str, dict[str, list[Record]]]) -> list[str]:
    """Git revisions of the programs that decoded the answers; "unknown" where a record names none."""
    records = [record for by_name in decoded.values() for group in by_name.values() for record in group]
    return sorted({record.revision or "unknown" for record in records})


def settings(session: Session, options: argparse.Namespace) -> dict[str, Any]:
    """The options that shaped the run."""
    names = ("max_new_tokens", "turns", "thinking", "confidence_threshold", "threshold_on", "schedule", "limit", "seed")
    return {
        "suites": options.suite,
        **vars(options.sampling),
        "draft_sampling": options.draft_sampling,
        **{name: getattr(options, name) for name in names},
        "batch_size": options.batch_size,
        "device": str(session.target.device),
        "dtype": str(session.target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "processes": distributed.world_size(),
    }


def describe_data(item: suites.Loaded, plan: Plan) -> dict[str, Any]:
    """Source and size of one data set."""
    fields = ("name", "domain", "rows", "source", "revision", "digest", "published")
    skipped = plan.skipped[item.name]
    return {**{name: getattr(item, name) for name in fields}, "prompts": len(item.prompts), "skipped": skipped}


def finish(results: dict[str, Any], output: Path, options: argparse.Namespace) -> int:
    """Write results, tables and the report, print the tables and what to do next."""
    write_json(output / "results.json", results)
    tables, notes = table.tables(results), table.notes(results)
    with atomic_write(output / "table.md") as temporary:
        parts = [*(one.markdown() for one in tables), *(f"\\{note}\n" for note in notes)]
        temporary.write_text("\n".join(parts), encoding="utf-8")
    for one in tables:
        print("\n" + one.text())
    for text in [*notes, *closing_lines(results), *results["warnings"]]:
        print(text)
    if table.headline(results):
        print(f"report: {report.write(results, output)}")
    print(f"next: {next_step(results, options, output)}")
    checks = [table.identity_total(item) for item in results["variants"]]
    return 3 if any(map(verdict.failed, checks)) else 0


def closing_lines(results: dict[str, Any]) -> list[str]:
    """Losslessness, empty answers, skipped prompts, in words."""
    lines = []
    for item in table.headline(results):
        if results["settings"]["temperature"] == 0:
            lines += verdict.closing_lines(item["label"], table.identity_total(item))
        empty = sum(data["empty"] for data in item["datasets"].values())
        if empty:
            lines.append(f"{item['label']}: {empty} answers are empty (the target ended its turn at once)")
    for data in results["datasets"]:
        if data["skipped"]:
            lines.append(f"{data['name']}: {len(data['skipped'])} prompts left out. {data['skipped'][0]['reason']}")
        if data["published"] is False:
            lines.append(
                f"{data['name']}: the prompts are not the published ones; do not compare with published figures"
            )
    return lines


def next_step(results: dict[str, Any], options: argparse.Namespace, output: Path) -> str:
    """The command that most runs want after this one."""
    shown = table.headline(results)
    if not shown:
        return "pass --drafter to measure a drafter against this baseline"
    if options.sweep_blocks is None and options.block is None:
        return "the same command with --sweep-blocks finds the block length that is fastest here"
    for item in shown:
        full = item["drafter"].get("block_size") in (None, item["block"])  # a scale is of all positions
        if full and "reliability" in item["macro"]["pooled"]:
            return f"python -m deepspec.eval.calibrate --records {output} --run {item['id']}"
    folders = [item["drafter"]["folder"] for item in shown if item["drafter"]]
    if not folders:
        return "the same command with --drafter FOLDER compares a trained drafter with the baseline"
    return f"python -m deepspec.models.export --drafter {folders[0]} --to vllm"


if __name__ == "__main__":
    sys.exit(main())
