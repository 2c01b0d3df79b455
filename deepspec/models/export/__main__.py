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

EPILOG = """\
examples:
  python -m deepspec.models.export --drafter runs/T/drafters/dspark --to vllm --target targets/T
  python -m deepspec.models.export --drafter D --to gguf --target-gguf T.gguf --gguf-type q8_0
  python -m deepspec.models.export --drafter D --all --output served     every engine that can, one folder each
  python -m deepspec.models.export --drafter OTHERS --to deepspec --output mine     import, e.g. from speculators
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
    out.add_argument("--include-head", action="store_true", help="write the target's embedding and head too (--target)")
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
    head = _head(options, source)
    given: dict[str, Any] = {
        "head": head if options.include_head else None,
        "target": target,
        "gguf_type": options.gguf_type,
        "target_gguf": options.target_gguf,
        "draft_tokens": options.num_speculative_tokens,
        "sps_table": options.sps,
    }
    if not options.all and len(engines) > 1:
        for engine in engines:  # all of them or none
            check(source, engine, **given)
    written = 0
    for engine in engines:
        output = options.output or options.drafter / "export"
        folder = output if options.output and len(engines) == 1 else output / engine
        try:
            made = export(source, engine, folder, target_name=options.target, **given)
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
    from deepspec.models.target import gguf_file

    gguf = gguf_file(target)
    try:
        config = AutoConfig.from_pretrained(target, **({"gguf_file": gguf} if gguf else {}))
    except OSError as error:
        raise ExportError(f"--target {target}: no config there ({error})") from error
    fields = text_config(config).to_dict()
    quantised = getattr(config, "quantization_config", None)
    return fields if quantised is None else fields | {"quantization_config": quantised}


def _head(options: argparse.Namespace, source: Checkpoint) -> FrozenHead | None:
    """The target's head, where a target was given; refuses an imported drafter that trained its own."""
    if options.target is None:
        if options.include_head:
            raise ExportError("--include-head needs the target whose embedding and head are meant: add --target")
        return None
    if not options.include_head and not {folders.EMBED, folders.HEAD} & source.tensors.keys():
        return None
    head = FrozenHead.load(options.target, dtype=torch.float32, device="cpu")
    if (problem := imports.head_error(source, head)) is not None:
        raise ExportError(f"{options.drafter}: {problem}")
    return head


if __name__ == "__main__":
    raise SystemExit(main())
