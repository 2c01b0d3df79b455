"""The options of ``python -m deepspec.eval``, checked as far as they can be without a model."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepspec.eval import suites
from deepspec.eval.choose import BASELINES
from deepspec.models.sampling import Sampling
from deepspec.models.verify import CONDITIONAL, THRESHOLD_RULES

DESCRIPTION = """\
Speculative decoding of a target with one or more drafters, on benchmark suites or your own prompts.

Writes records (resumable), results.json, table.md and a one-file HTML report into --output, and prints the table:
accepted length τ with confidence intervals, acceptance by position, tokens per second with and without the drafter,
and, at temperature 0, how many answers are identical to plain greedy decoding."""

EPILOG = """\
examples:
  python -m deepspec.eval --suite math                         newest drafter under runs/, its own target
  python -m deepspec.eval --suite all --temperature 1 --data-dir DIR        the paper's protocol, nine benchmarks
  python -m deepspec.eval --suite demo --drafter runs/T/drafters/dspark runs/T/drafters/dflash --sweep-blocks
  torchrun --nproc-per-node gpu -m deepspec.eval --suite all --temperature 1             prompts split over 8 GPUs
Run the same line again after an interruption: answers that are on disk are not decoded twice."""


def parser() -> argparse.ArgumentParser:
    """Every option, grouped."""
    out = argparse.ArgumentParser(
        prog="python -m deepspec.eval",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _prompts(out.add_argument_group("prompts"))
    _models(out.add_argument_group("models"))
    _decoding(out.add_argument_group("decoding"))
    _running(out.add_argument_group("output and machine"))
    return out


def _prompts(group: argparse._ArgumentGroup) -> None:
    known = ", ".join((*suites.SUITES, suites.DEMO, *suites.DATA_SETS))
    group.add_argument(
        "--suite", nargs="+", default=["demo"], metavar="NAME", help=f"{known}, or JSONL files (default: demo)"
    )
    group.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help=f'folder of NAME.jsonl with a line {{"turns": [...]}} per prompt, tried before the hub (also '
        f"${suites.DATA_DIR_VARIABLE})",
    )
    group.add_argument("--limit", type=int, metavar="N", help="prompts per data set (default: the paper's number)")
    group.add_argument("--turns", choices=("first", "all"), default="first", help="turns of multi-turn prompts (first)")
    group.add_argument(
        "--any-rows", action="store_true", help="accept a data set whose row count is not the published one"
    )


def _models(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--drafter",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="checkpoints of any layout in docs/serving.md, run folders (best, else last, is taken) or hub ids; "
        "several are compared on the same prompts (default: the newest under runs/*/drafters/)",
    )
    group.add_argument(
        "--taps", type=int, nargs="+", metavar="K", help="zero-based layers of a published EAGLE-3 drafter"
    )
    group.add_argument(
        "--target", metavar="NAME", help="recipe name, folder or hub id (default: the one the drafter records)"
    )
    group.add_argument(
        "--baselines",
        nargs="+",
        choices=(*BASELINES, "none"),
        help="drafters that need no training, run beside the others: ngram is prompt lookup, which everyone has for "
        "free (default: ngram; none leaves it out; given without --drafter, only it runs)",
    )
    group.add_argument(
        "--no-plain", action="store_true", help="skip plain decoding: no speed-up and no identity check, half the time"
    )
    group.add_argument(
        "--allow-mismatch", action="store_true", help="go on with a drafter that was trained for another target"
    )


def _decoding(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy; the paper's tables use 1 (default: 0)"
    )
    group.add_argument("--top-k", type=int, default=0, help="keep the K likeliest tokens (default: 0, off)")
    group.add_argument("--top-p", type=float, default=1.0, help="keep this much probability (default: 1, off)")
    group.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the best (default: 0)")
    group.add_argument(
        "--draft-sampling",
        nargs="+",
        choices=("probabilistic", "greedy"),
        default=["probabilistic"],
        help="how drafts are drawn: from q (the paper's protocol) or its argmax; both lossless, both may be given",
    )
    group.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="tokens per answer (default: 2048 as in the paper; demo: 256)"
    )
    group.add_argument("--thinking", action="store_true", help="the template's thinking mode (default: non-thinking)")
    group.add_argument("--block", type=int, metavar="K", help="draft tokens per round, at most the trained block")
    group.add_argument(
        "--sweep-blocks",
        nargs="*",
        type=int,
        metavar="K",
        help="also run these block lengths (no value: every one up to the trained) and name the fastest",
    )
    _verifying(group)
    group.add_argument(
        "--batch-size",
        nargs="+",
        type=int,
        default=[1],
        metavar="B",
        help="prompts decoded together; several values are all run, tables show the first (default: 1)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=suites.SAMPLE_SEED,
        help="of the sample of prompts, the draws and the intervals (default: %(default)s)",
    )


def _verifying(group: argparse._ArgumentGroup) -> None:
    """How many of the drafted tokens are verified."""
    group.add_argument(
        "--confidence-threshold",
        type=float,
        metavar="C",
        help="verify only the prefix before the first token that is less sure than this (drafters with a confidence "
        "head)",
    )
    group.add_argument(
        "--threshold-on",
        choices=THRESHOLD_RULES,
        default=CONDITIONAL,
        help="what the threshold is on: the confidence of each token as in the paper (conditional), or the product of "
        "those up to it (survival) (default: %(default)s)",
    )
    group.add_argument(
        "--max-probability",
        action="store_true",
        help="drafters without a confidence head: the largest probability at each position stands for it",
    )
    group.add_argument(
        "--schedule",
        choices=("static", "threshold", "causal", "plateau", "async"),
        default="static",
        help="how many draft tokens are verified: the block (static), by --confidence-threshold, or by the load and "
        "the confidences (docs/scheduling.md; needs --sps); the output is the target's under all of them",
    )
    group.add_argument(
        "--sps", type=Path, metavar="FILE", help="steps per second of the target: python -m deepspec.eval.profile"
    )


def _running(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output", type=Path, metavar="DIR", help="default: runs/TARGET/eval/SUITE-tTEMPERATURE")
    group.add_argument("--device", help="torch device (default: the accelerator, else cpu)")
    group.add_argument("--dtype", default="auto", help="auto: float32 on the CPU, bfloat16 on accelerators")
    group.add_argument("--quiet", action="store_true", help="no progress bars")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parsed options; prints usage and exits for anything contradictory."""
    command = parser()
    options = command.parse_args(arguments)
    try:
        options.sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    except ValueError as error:
        command.error(str(error))
    if options.sampling.greedy and (options.top_k or options.top_p < 1 or options.min_p):
        command.error("--top-k, --top-p and --min-p do nothing at --temperature 0: drop them or raise the temperature")
    options.baselines_only = options.baselines is not None and "none" not in options.baselines and not options.drafter
    options.baselines = [name for name in options.baselines or BASELINES if name != "none"]
    if min(options.batch_size) < 1:
        command.error("--batch-size must be at least 1")
    if options.max_new_tokens is None:
        options.max_new_tokens = 256 if options.suite == [suites.DEMO] else 2048
    if options.max_new_tokens < 1:
        command.error("--max-new-tokens must be at least 1")
    if options.confidence_threshold is not None and not 0 <= options.confidence_threshold <= 1:
        command.error("--confidence-threshold must be in [0, 1]")
    schedule_options(command, options)
    if options.block is not None and options.sweep_blocks is not None:
        command.error("--block and --sweep-blocks contradict each other: the sweep compares with the trained block")
    options.batch_size = list(dict.fromkeys(options.batch_size))
    options.draft_sampling = list(dict.fromkeys(options.draft_sampling))
    if options.sampling.greedy:
        options.draft_sampling = options.draft_sampling[:1]  # at temperature 0 both draw the argmax
    return options


def schedule_options(command: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit where schedule, threshold and table do not go together; fill in the default threshold."""
    if options.schedule in ("causal", "plateau", "async"):
        if options.sps is None:
            command.error(
                f"--schedule {options.schedule} needs --sps FILE (made by python -m deepspec.eval.profile --target …)"
            )
        if options.confidence_threshold is not None:
            command.error(f"--schedule {options.schedule} and --confidence-threshold contradict each other: give one")
    elif options.sps is not None:
        command.error(f"--sps does nothing with --schedule {options.schedule}: choose causal, plateau or async")
    if options.schedule == "threshold" and options.confidence_threshold is None:
        options.confidence_threshold = 0.5
