"""``python -m deepspec.eval.calibrate``: make a drafter's confidences mean what they say, by Platt scaling, Sequential
Temperature Scaling or a single temperature, whichever is nearest the truth on prompts that it was not fitted on.

Reads the records of an evaluation, or decodes held-out prompts with full blocks itself; writes calibration.json and
reliability.svg, and stores the scale in the drafter's config.json, where decoding and the exporters find it.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepspec.eval import calibration, calibration_report
from deepspec.eval.max_probability import METADATA, MaxProbability
from deepspec.eval.rounds import Rounds, RoundsError, drafter_of, read_rounds, rounds_of
from deepspec.files import atomic_write, provenance, write_json
from deepspec.models.confidence_scale import ConfidenceScale

if TYPE_CHECKING:
    from deepspec.eval.choose import Candidate

FORMAT_VERSION = 3  # 2: ECE in 15 bins, thresholds on the survival


class CalibrateError(ValueError):
    """A calibration that cannot be done as asked; the message says what to do instead."""


@dataclass(frozen=True)
class Origin:
    """The drafter that rounds are of.

    block_size: None where its config does not say; fingerprint: what the records name; undone: the scale that was
    taken off their confidences. The last two are stored, so that the same records can be fitted again after the scale
    made from them has changed the drafter's fingerprint.
    """

    folder: Path
    block_size: int | None
    fingerprint: str | None = None
    undone: ConfidenceScale | None = None


def undo(rounds: Rounds, scale: ConfidenceScale) -> Rounds:
    """The raw confidences of rounds that were recorded with ``scale`` applied."""
    raw_NG = calibration.scale(rounds.confidence_NG, scale.inverse()).astype(np.float32)
    return Rounds(rounds.prompt_N, rounds.proposed_N, rounds.accepted_N, raw_NG)


def check_block(rounds: Rounds, origin: Origin) -> None:
    """Raise CalibrateError for rounds of a shorter block: a scale of fewer positions makes the drafter unusable."""
    if origin.block_size is not None and rounds.block_size != origin.block_size:
        raise CalibrateError(
            f"records of block {rounds.block_size}, the drafter's block is {origin.block_size} ({origin.folder}): "
            "evaluate without --block and with answers longer than a block, or pass --no-store"
        )


def recorded(options: argparse.Namespace) -> tuple[Rounds, Origin | None]:
    """Rounds of an evaluation's output with raw confidences, and the drafter that made them where that is known."""
    rounds = read_rounds(options.records, options.run)
    described = drafter_of(options.records, options.run)
    chosen = options.drafter or described.get("folder")
    if not chosen or not (options.drafter or (Path(chosen) / "config.json").is_file()):
        return rounds, None
    from deepspec.eval.choose import candidates

    candidate = candidates([chosen])[0]
    check_confidence(candidate, options.max_probability)
    options.max_probability = not candidate.confidence
    scale = _scale_of(candidate, described)
    return (
        rounds if scale is None else undo(rounds, scale),
        Origin(candidate.folder, candidate.block_size, described.get("fingerprint"), scale),
    )


def check_confidence(candidate: "Candidate", max_probability: bool) -> None:
    """Raise CalibrateError where the largest probabilities are asked of a drafter whose confidence head is used."""
    if candidate.confidence and max_probability:
        raise CalibrateError(f"{candidate.folder} has a confidence head, which is what is used: drop --max-probability")


def _scale_of(candidate: "Candidate", described: Mapping[str, Any]) -> ConfidenceScale | None:
    """The scale on confidences of records that ``described`` tells of, read from the drafter as it is now."""
    made_with = described.get("fingerprint")
    stored = candidate.own if candidate.confidence else candidate.own.get(METADATA) or {}
    last = candidate.own.get("calibration") or {}
    if made_with == candidate.fingerprint():
        return ConfidenceScale.of(stored)
    if made_with is not None and made_with == last.get("records_fingerprint"):
        return ConfidenceScale.of(last.get("undone") or {})
    if not stored.get("temperatures") and not described.get("calibrated"):
        return None
    which = f"{candidate.folder} is" if stored.get("temperatures") else "these records are"
    raise CalibrateError(
        f"{which} calibrated, and it is not known whether these records were made with the scale in "
        f"{candidate.folder}: evaluate again, or leave --records out and let this command decode"
    )


def collect(options: argparse.Namespace) -> tuple[Rounds, Origin]:
    """Decode held-out prompts with full blocks and raw confidences; resumable, like any evaluation."""
    from deepspec.eval import choose, suites
    from deepspec.eval.__main__ import demo_file, describe
    from deepspec.eval.run import RunConfig, Session, first_turns
    from deepspec.eval.summary import Variant
    from deepspec.models import drafter as checkpoints
    from deepspec.models.frozen_head import FrozenHead
    from deepspec.models.sampling import Sampling
    from deepspec.models.target import Target

    candidate = choose.candidates([options.drafter] if options.drafter else [])[0]
    checkpoints.own_layout(candidate.folder)  # the scale goes there: say it before decoding for hours
    check_confidence(candidate, options.max_probability)
    if not candidate.confidence and not options.max_probability:
        raise CalibrateError(
            f"{candidate.folder} has no confidence head: pass --max-probability to use its largest probabilities"
        )
    thinking = bool(candidate.thinking) if options.thinking is None else options.thinking
    cfg = choose.target_config(options.target, [candidate], options.dtype, thinking)
    loaded = suites.load(
        options.suite, demo_file=demo_file([candidate], cfg.name), limit=options.limit, seed=options.seed
    )
    target = Target.load(cfg, options.device)
    for warning in choose.check_fit(candidate, target, thinking, allow_mismatch=False):
        print(f"warning: {warning}", file=sys.stderr)
    drafter: Any = checkpoints.load(candidate.folder, FrozenHead.of(target), calibrated=False)
    if options.max_probability:
        drafter = MaxProbability(drafter)
    config = RunConfig(Sampling(options.temperature), options.max_new_tokens, thinking, options.seed)
    plan = first_turns(target, loaded, config)
    label = f"calibrate-{candidate.label}" + ("-max-probability" if options.max_probability else "")
    # The weights name the drafter here, not its config: storing a scale must not void what was decoded.
    facts = describe(candidate) | {"fingerprint": _weights(candidate.folder)}
    variant = Variant(label, candidate.kind, drafter.block_size, options.batch_size, drafter=facts)
    options.output = options.output or Path("runs") / cfg.name / "eval" / label
    decoded = Session(target, config, options.output).decode([(variant, drafter)], plan.asks)[variant.id]
    rounds = rounds_of([record for records in decoded.values() for record in records])
    return rounds, Origin(candidate.folder, drafter.block_size)


def _weights(folder: Path) -> str:
    from deepspec.files import sha256_file

    return " ".join(sha256_file(file) for file in sorted(folder.glob("*.safetensors")))


def store(origin: Origin, report: Mapping[str, Any], *, max_probability: bool, source: str) -> None:
    """Put the scale into the drafter's config.json (atomic, weights untouched)."""
    from deepspec.models.drafter import update_metadata

    summary = {
        "format_version": FORMAT_VERSION,
        "method": report["method"],
        "mean_ece_before": report["comparison"]["raw"]["mean_ece"],
        "mean_ece_after": report["comparison"][report["method"]]["mean_ece"],
        "counts": report["counts"],
        "source": source,
        "records_fingerprint": origin.fingerprint,
        "undone": None if origin.undone is None else origin.undone.fields(),
    }
    scale = {name: report[name] for name in ("temperatures", "shifts")}
    update_metadata(origin.folder, **({METADATA: scale} if max_probability else scale), calibration=summary)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Fit, print, write, store. Returns the report."""
    origin: Origin | None
    if options.records is not None:
        rounds, origin = recorded(options)
        source, output = str(options.records), options.output or _folder_of(options.records)
    else:
        rounds, origin = collect(options)
        output = options.output
        source = str(output)
    if not len(rounds):
        raise RoundsError("no rounds: every answer ended at once")
    if origin is not None and not options.no_store:
        check_block(rounds, origin)
    report = calibration_report.calibrate(
        rounds,
        method=None if options.method == "best" else options.method,
        seed=options.seed,
        test_share=options.test_share,
        resamples=options.resamples,
    )
    print(calibration_report.render(report))
    if options.sweep:
        print(calibration_report.render_sweep(report))
    about = {"kind": "deepspec-calibration", "format_version": FORMAT_VERSION, "source": source}
    content = {**about, **report, "provenance": provenance()}
    _write(output, content, report)
    better = report["comparison"][report["method"]]["mean_ece"] < report["comparison"]["raw"]["mean_ece"]
    if origin is None:
        print("the scale is in calibration.json only: pass --drafter FOLDER to store it in the drafter")
    elif options.no_store or not better:
        print("not stored" + ("" if better else ": this scale is no better than none on the test prompts"))
    else:
        store(origin, report, max_probability=options.max_probability, source=source)
        write_json(origin.folder / "calibration.json", content)
        print(f"{report['method']} scale stored in {origin.folder}/config.json")
    return report


def _folder_of(records: Path) -> Path:
    return records if records.is_dir() else records.parent


def _write(output: Path, content: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    from deepspec.eval.plots_serving import reliability

    write_json(output / "calibration.json", content)
    with atomic_write(output / "reliability.svg") as temporary:
        temporary.write_text(reliability(report["reliability"]), encoding="utf-8")
    print(f"wrote {output}/calibration.json, reliability.svg")


def parser() -> argparse.ArgumentParser:
    """The options."""
    out = argparse.ArgumentParser(prog="python -m deepspec.eval.calibrate", description=__doc__)
    out.add_argument("--drafter", metavar="FOLDER", help="default: the one the records name, else the newest in runs/")
    out.add_argument("--records", type=Path, help="output folder (or records file) of an evaluation with full blocks")
    out.add_argument("--run", metavar="NAME", help="which run, if the records hold several")
    out.add_argument("--target", help="recipe, folder or hub id; default: the one the drafter records")
    out.add_argument("--suite", nargs="+", default=["demo"], help="prompts to decode without --records (held-out demo)")
    out.add_argument("--limit", type=int, help="prompts for each data set")
    out.add_argument("--temperature", type=float, default=1.0, help="of the sampling (default 1)")
    out.add_argument("--max-new-tokens", type=int, default=256)
    out.add_argument("--batch-size", type=int, default=8)
    out.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="default: as the drafter was trained")
    out.add_argument(
        "--max-probability",
        action="store_true",
        help="drafters without a confidence head: max q is the confidence (implied by --records)",
    )
    methods = ("best", *calibration_report.METHODS)
    out.add_argument(
        "--method", choices=methods, default="best", help="best (default): least ECE on a part of the fitting prompts"
    )
    out.add_argument("--test-share", type=float, default=0.5, help="share of the prompts that judge (default 0.5)")
    out.add_argument("--resamples", type=int, default=200, help="of the bootstrap over prompts")
    out.add_argument("--sweep", action="store_true", help="print the threshold sweep (paper Figure 5)")
    out.add_argument("--no-store", action="store_true", help="leave the drafter as it is")
    out.add_argument("--output", type=Path, help="folder; default: that of the records, else runs/TARGET/eval/…")
    out.add_argument("--device")
    out.add_argument("--dtype", default="auto")
    out.add_argument("--seed", type=int, default=0)
    return out


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    try:
        run(parser().parse_args(argv))
    except (ValueError, OSError) as error:  # an OSError: the hub, the disk
        print(f"calibrate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
