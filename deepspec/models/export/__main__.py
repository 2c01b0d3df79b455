"""``python -m deepspec.models.export``: write a drafter for serving engines, or check one. The work is beside it."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspec.models.export import (
    ENGINES,
    Checkpoint,
    ExportError,
    Finding,
    check,
    export,
    imports,
    llama_cpp,
    sps,
    validate,
)
from deepspec.models.export import checkpoint as folders
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.target import TargetConfig, gguf_file, resolve

EPILOG = """\
examples:
  python -m deepspec.models.export --drafter runs/T/drafters/dspark --to vllm --target targets/T
  python -m deepspec.models.export --drafter D --to gguf --target-gguf T.gguf --gguf-type q8_0
  python -m deepspec.models.export --drafter D --all --output served     every engine that can, one folder each
  python -m deepspec.models.export --drafter OTHERS --to deepspec --target T --output mine     import, e.g. speculators
  python -m deepspec.models.export --drafter served/vllm --to vllm --check          what would the engine say?
docs/serving.md says what each engine reads."""


def parser() -> argparse.ArgumentParser:
    """Every option."""
    out = argparse.ArgumentParser(
        prog="python -m deepspec.models.export",
        description="Write a drafter in the layout of a serving engine, and explain what the engine would not take.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument(
        "--drafter",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="checkpoint of any known layout, or a training run: its best, else last",
    )
    which = out.add_mutually_exclusive_group(required=True)
    which.add_argument("--to", nargs="+", choices=tuple(ENGINES), metavar="ENGINE", help=", ".join(ENGINES))
    which.add_argument("--all", action="store_true", help="every engine that can serve this drafter")
    out.add_argument("--output", type=Path, metavar="DIR", help="default: DRAFTER/export/ENGINE")
    out.add_argument(
        "--target", metavar="NAME", help="folder or hub id: compared with the drafter and named in the command"
    )
    out.add_argument(
        "--include-head",
        action=argparse.BooleanOptionalAction,
        help="write the target's embedding and head too (default: for deepspec, whose public loader needs them)",
    )
    out.add_argument(
        "--target-gguf", type=Path, metavar="FILE", help="the target for llama.cpp; its tokenizer is copied"
    )
    out.add_argument("--gguf-type", choices=llama_cpp.TYPES, default="bf16", help="of the GGUF file's matrices (bf16)")
    out.add_argument(
        "--sps", type=Path, metavar="FILE", help="the target's steps per second (deepspec.eval.profile), to go with it"
    )
    out.add_argument("--num-speculative-tokens", type=int, metavar="N", help="check that the drafter can draft N")
    out.add_argument("--taps", type=int, nargs="+", metavar="K", help="zero-based layers of an imported EAGLE-3 file")
    out.add_argument("--check", action="store_true", help="only say what the engine would refuse; write nothing")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 0, or 2 when nothing could be written (or, with --check, an error was found)."""
    options = parser().parse_args(argv)
    try:
        return _run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    engines = list(ENGINES) if options.all else options.to
    target = _target_config(options.target)
    drafter = folders.find(options.drafter) or options.drafter
    if options.check:
        return _check(options, folders.read(drafter), engines, target)
    source = imports.read(drafter, taps=options.taps)
    _check_own_head(options, source)
    given: dict[str, Any] = {
        "target": target,
        "gguf_type": options.gguf_type,
        "target_gguf": options.target_gguf,
        "draft_tokens": options.num_speculative_tokens,
        "sps_table": options.sps,
    }
    if not options.all and len(engines) > 1:
        for engine in engines:  # all of them or none
            check(source, engine, head=_head(options, source, engine), **given)
    written = 0
    for engine in engines:
        output = options.output or options.drafter / "export"
        folder = output if options.output and len(engines) == 1 else output / engine
        try:
            head = _head(options, source, engine)
            made = export(source, engine, folder, head=head, target_name=options.target, **given)
        except ExportError as error:
            if not options.all:
                raise
            print(f"{engine}: not written: {error}\n")
            continue
        written += 1
        _report(engine, made.findings)
        print(f"{engine}: wrote {made.path}\nserve it with:\n  {made.command}\n")
    return 0 if written else 2


def _report(engine: str, findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"{engine}: {finding}")


def _check(
    options: argparse.Namespace, found: Checkpoint, engines: Sequence[str], target: Mapping[str, Any] | None
) -> int:
    if options.sps is not None:
        sps.check(options.sps, found)
    failed = False
    for engine in engines:
        findings = validate(found, ENGINES[engine], target=target, draft_tokens=options.num_speculative_tokens)
        _report(engine, findings)
        bad = sum(finding.level == "error" for finding in findings)
        print(f"{engine}: {bad} error(s), {len(findings) - bad} other finding(s)")
        failed |= bad > 0
    return 2 if failed else 0


def _target_config(target: str | None) -> dict[str, Any] | None:
    """The target's text config; {} is never returned."""
    if target is None:
        return None
    from transformers import AutoConfig

    from deepspec.models.families import text_config

    gguf = gguf_file(target)
    try:
        config = AutoConfig.from_pretrained(target, **({"gguf_file": gguf} if gguf else {}))
    except OSError as error:
        raise ExportError(f"--target {target}: no config there ({error})") from error
    fields = text_config(config).to_dict()
    quantised = getattr(config, "quantization_config", None)
    return fields if quantised is None else fields | {"quantization_config": quantised}


def _check_own_head(options: argparse.Namespace, source: Checkpoint) -> None:
    """Raise ExportError for an imported drafter that trained its own embedding or head, where a target was given."""
    if options.target is None or not {folders.EMBED, folders.HEAD} & source.tensors.keys():
        return
    problem = imports.head_error(source, _load_head(options.target, None))
    if problem is not None:
        raise ExportError(f"{options.drafter}: {problem}")


def _head(options: argparse.Namespace, source: Checkpoint, engine: str) -> FrozenHead | None:
    """The embedding and head to write for an engine, None for none.

    They are those of --target, else of the target that the checkpoint names. Raises ExportError without either, and
    for a target that cannot be read.
    """
    whole = {folders.EMBED, folders.HEAD} <= source.tensors.keys()
    wanted = options.include_head
    if wanted is None:  # a reduced vocabulary is this project's own, and its loader shares the target's embedding
        wanted = ENGINES[engine].needs_head and not source.reduced
    if not wanted or whole:
        return None
    recorded = source.metadata.get("target") or {}
    place, revision = options.target, None
    if place is None and recorded.get("path"):
        named = TargetConfig(str(recorded.get("name") or "target"), str(recorded["path"]))
        place, revision = resolve(named), recorded.get("revision")
    reason = f"{engine} gets the target's embedding and head too"
    remedy = "add --target, or --no-include-head to leave them out"
    if place is None:
        raise ExportError(f"{reason}, and the drafter does not say where its target is: {remedy}")
    try:
        return _load_head(place, revision)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ExportError(f"{reason}, and those of {place} cannot be read ({cause}): {remedy}") from error


def _load_head(place: str, revision: str | None) -> FrozenHead:
    return FrozenHead.load(place, dtype=torch.float32, device="cpu", revision=revision)


if __name__ == "__main__":
    raise SystemExit(main())
