"""``python -m deepspec.eval.engine_check``: a drafter inside a serving engine, against the evaluator.

Two claims, on held-out prompts at temperature 0: with the drafter the engine's answers are as lossless as without it,
and the share of draft tokens it accepts is the evaluator's. Exports, serves and asks; decodes nothing itself.
"""

import argparse
import datetime
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspec.eval import choose, engine_servers, exactness, suites, verdict
from deepspec.eval.engine_servers import Answer, Ask, LlamaServer
from deepspec.eval.records import Record
from deepspec.eval.run import Ask as Question
from deepspec.eval.run import Plan, RunConfig, Session, first_turns
from deepspec.eval.summary import Variant
from deepspec.eval.table import Table
from deepspec.files import provenance, write_json
from deepspec.models import drafter as checkpoints
from deepspec.models.block_drafter import BlockDrafter
from deepspec.models.export import export, imports, llama_cpp
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.sampling import Sampling
from deepspec.models.target import Target

TOLERANCE = 0.03  # of the ratio of the two acceptance rates to 1
FORMAT, VERSION = "deepspec-engine-check", 1
EPILOG = """\
examples:
  python -m deepspec.eval.engine_check --server llama-server --target-gguf T-f32.gguf --drafter runs/T/drafters/dspark
  python -m deepspec.eval.engine_check --urls http://HOST:8000/v1 http://HOST:8001/v1 --target T    (without, with)
exit status: 0 both claims hold, 1 one does not, 2 for something you can mend. docs/serving.md has figures."""


def parser() -> argparse.ArgumentParser:
    """Every option."""
    out = argparse.ArgumentParser(
        prog="python -m deepspec.eval.engine_check",
        description="Serve a drafter in an engine; compare its answers with those without, its acceptance with ours.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    llama = out.add_argument_group("llama.cpp, started and stopped here")
    llama.add_argument("--server", default="llama-server", metavar="PROGRAM", help="its server (default: llama-server)")
    llama.add_argument("--target-gguf", type=Path, metavar="FILE", help="the target; f32 makes float ties rare")
    llama.add_argument("--drafter", metavar="FOLDER", help="checkpoint or run folder (default: the newest under runs/)")
    llama.add_argument("--gguf-type", choices=llama_cpp.TYPES, default="f32", help="of the drafter's matrices (f32)")
    llama.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="default: %(default)s")
    out.add_argument(
        "--urls",
        nargs=2,
        metavar=("PLAIN", "DRAFTED"),
        help="instead: base URLs of two running OpenAI-compatible servers (vLLM, SGLang) of one target, without and "
        "with a drafter; answers are compared, acceptance is not",
    )
    out.add_argument("--target", metavar="NAME", help="recipe, folder or hub id (default: the one the drafter records)")
    out.add_argument("--suite", nargs="+", default=[suites.DEMO], metavar="NAME", help="as in deepspec.eval (demo)")
    out.add_argument("--data-dir", type=Path, metavar="DIR", help="as in deepspec.eval")
    out.add_argument("--limit", type=int, metavar="N", help="prompts per data set (default: all)")
    out.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens per answer (128)")
    out.add_argument("--output", type=Path, metavar="DIR", help="default: runs/TARGET/eval/engine-DRAFTER")
    out.add_argument("--device", help="of the evaluator (default: the accelerator, else cpu)")
    out.add_argument("--dtype", default="auto", help="of the evaluator: float32 on the CPU, bfloat16 on accelerators")
    return out


@dataclass(frozen=True)
class Case:
    """A prompt with the engine's answers without and with the drafter, and the evaluator's record where it decodes."""

    question: Question
    plain: Answer
    drafted: Answer
    ours: Record | None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = parser().parse_args(argv)
    command = shlex.join(["python", "-m", "deepspec.eval.engine_check", *(sys.argv[1:] if argv is None else argv)])
    try:
        result = check(options)
    except (ValueError, OSError) as error:  # an OSError: the hub, the disk
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {"format": FORMAT, "version": VERSION, "command": command, **result, "provenance": provenance()}
    write_json(Path(result["output"]) / "engine_check.json", report)
    print(render(result))
    return 0 if result["passed"] else 1


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Ask, decode, compare. Raises ValueErrors for what the user can mend, before anything is served if possible."""
    if options.urls is None:
        if options.target_gguf is None:
            raise ValueError(
                "give --target-gguf FILE, the target as llama.cpp's convert_hf_to_gguf.py --outtype f32 writes it, or "
                "--urls PLAIN DRAFTED of running servers"
            )
        options.server = engine_servers.find_llama_server(options.server)
    elif options.target is None:
        raise ValueError("--urls needs --target: prompts are rendered by its chat template")
    drafters = choose.candidates([options.drafter] if options.drafter else []) if options.urls is None else []
    target, plan, config = _prepare(options, drafters)
    questions = [ask for asks in plan.asks.values() for ask in asks]
    if not questions:
        raise ValueError(f"no prompt can be asked: {plan.skipped}")
    label = drafters[0].label if drafters else "urls"
    output = options.output or Path("runs") / target.name / "eval" / f"engine-{label}"
    ours: list[Record] | list[None] = [None] * len(questions)
    if options.urls is not None:
        asks = [engine_servers.openai_server(url, _encoder(target)) for url in options.urls]
        plain, drafted = (_ask_all(ask, questions, config.max_new_tokens) for ask in asks)
        engine = f"{options.urls[1]} against {options.urls[0]}"
    else:
        plain, drafted, engine = _llama(options, drafters[0], questions, output)
        ours = _evaluate(target, drafters[0], plan, config, output)
    cases = [Case(*each) for each in zip(questions, plain, drafted, ours, strict=True)]
    sets = [name for name, asked in plan.asks.items() if asked]
    controls = Controls.of(target, cases, config.max_new_tokens)
    by_set = {name: [case for case in cases if case.question.dataset == name] for name in sets}
    rows = {name: figures(controls, chosen) for name, chosen in by_set.items()}
    rows["all"] = figures(controls, cases)
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "engine": engine,
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "drafter": [{"folder": str(item.folder), "fingerprint": item.fingerprint()} for item in drafters],
        "max_new_tokens": config.max_new_tokens,
        "output": str(output),
        "datasets": rows,
        "first_difference": _show(target, rows["all"]["identity"]["first_difference"]),
        "verdict": verdict.wording(rows["all"]["identity"]),
        "passed": passed(rows["all"]),
    }


def _prepare(options: argparse.Namespace, drafters: list[choose.Candidate]) -> tuple[Target, Plan, RunConfig]:
    """The evaluator's own target, prompts and settings."""
    from deepspec.eval.__main__ import demo_file

    thinking = any(item.thinking for item in drafters)
    cfg = choose.target_config(options.target, drafters, options.dtype, thinking)
    loaded = suites.load(
        options.suite, data_dir=options.data_dir, demo_file=demo_file(drafters, cfg.name), limit=options.limit
    )
    target = Target.load(cfg, options.device)
    for item in drafters:
        for warning in choose.check_fit(item, target, thinking, allow_mismatch=False):
            print(f"warning: {warning}", file=sys.stderr)
    config = RunConfig(Sampling(), options.max_new_tokens, thinking, suites.SAMPLE_SEED)
    return target, first_turns(target, loaded, config), config


def _encoder(target: Target) -> Any:
    return lambda text: target.tokenizer.encode(text, add_special_tokens=False)


def _ask_all(ask: Ask, questions: Sequence[Question], max_new_tokens: int) -> list[Answer]:
    """One after another: batches would change the arithmetic."""
    from tqdm import tqdm

    return [ask(question.ids, max_new_tokens) for question in tqdm(questions, unit="prompt", disable=None)]


def _llama(
    options: argparse.Namespace, drafter: choose.Candidate, questions: Sequence[Question], output: Path
) -> tuple[list[Answer], list[Answer], str]:
    """Answers without and with the drafter, and the engine's name. The drafter is served as its export says."""
    made = export(
        imports.read(drafter.folder),
        "gguf",
        output / "gguf",
        gguf_type=options.gguf_type,
        target_gguf=options.target_gguf,
    )
    longest = max(len(question.ids) for question in questions) + options.max_new_tokens
    # Float32 caches and plain attention: what is compared is the drafter, not the rounding of a cache.
    shared = ["-t", str(options.threads), "--poll", "0", "-np", "1", "-c", str(longest + 64), "-fa", "off"]
    shared += ["-ctk", "f32", "-ctv", "f32"]
    drafted = ["--spec-draft-p-min", "0", "-ctkd", "f32", "-ctvd", "f32"]
    answers: list[list[Answer]] = []
    for name, own in (
        ("plain", ["-m", str(options.target_gguf)]),
        ("drafted", [*shlex.split(made.command)[1:], *drafted]),
    ):
        print(f"llama.cpp, {name}: {len(questions)} prompts", file=sys.stderr)
        with LlamaServer(options.server, [*own, *shared], output / f"server-{name}.log") as url:
            answers.append(_ask_all(engine_servers.llama_server(url), questions, options.max_new_tokens))
            build = engine_servers.call(f"{url}/props").get("build_info", "")
    return answers[0], answers[1], f"llama.cpp {build}, {made.path.name}"


def _evaluate(target: Target, item: choose.Candidate, plan: Plan, config: RunConfig, output: Path) -> list[Record]:
    """The evaluator's records of the same prompts, its drafts greedy as an engine's are; resumable."""
    drafter = checkpoints.load(item.folder, FrozenHead.of(target))
    if isinstance(drafter, BlockDrafter):
        drafter.shortlist = 0  # the whole vocabulary, as engines do
    facts = {"folder": str(item.folder), "fingerprint": item.fingerprint()}
    variant = Variant(item.label, item.kind, drafter.block_size, 1, draft="greedy", drafter=facts)
    decoded = Session(target, config, output).decode([(variant, drafter)], plan.asks)[variant.id]
    return [record for records in decoded.values() for record in records]


@dataclass(frozen=True)
class Controls:
    """What answers are held against: the engine's plain ones, and the evaluator's where it decodes."""

    engine: exactness.Control
    evaluator: exactness.Control | None

    @classmethod
    def of(cls, target: Target, cases: Sequence[Case], max_new_tokens: int) -> "Controls":
        """Scores every plain answer once."""
        ids = {case.question.key: case.question.ids for case in cases}
        # An engine may leave the stop token out of the answer, and rounds in its own way.
        rules = exactness.Rules(target.stop_ids, max_new_tokens, stops_shown=False)
        plain = [as_record(case.question, case.plain) for case in cases]
        ours = [case.ours for case in cases if case.ours is not None]

        def control(records: Sequence[Record]) -> exactness.Control:
            return exactness.Control(
                target,
                records,
                lambda record: ids[record.key],
                rules,
                foreign=True,
                say_token=lambda token: repr(target.tokenizer.decode([token])),
            )

        return cls(control(plain), control(ours) if ours else None)


def figures(controls: Controls, cases: Sequence[Case]) -> dict[str, Any]:
    """``identity`` of the engine's answers with and without drafter; with the evaluator's records also ``agreement``
    of its answers with the engine's, and both sides' draft tokens."""
    plain = [as_record(case.question, case.plain) for case in cases]
    drafted = [as_record(case.question, case.drafted) for case in cases]
    ours = [case.ours for case in cases if case.ours is not None]
    out: dict[str, Any] = {"identity": controls.engine.check(drafted)}
    if controls.evaluator is not None:
        out["agreement"] = controls.evaluator.check(plain)
        out["engine"] = counts((case.drafted.offered or 0, case.drafted.accepted or 0) for case in cases)
        limit = controls.evaluator.rules.max_new_tokens
        out["evaluator"] = counts(pair for record in ours for pair in as_llama_cpp_counts(record, limit))
    return out


def as_record(question: Question, answer: Answer) -> Record:
    """An engine's answer in the evaluator's form, without rounds and seconds."""
    return Record(
        *question.key, question.digest, len(question.ids), answer.tokens, "", [], None, 0.0, 0.0, 0.0, 0.0, 0.0
    )


def accepted_there(offered: int, accepted: int, committed: int) -> int:
    """What llama.cpp counts of a round that the evaluator wrote down: it ends at an accepted stop token and takes that
    for the target's own, unless it is the last of the block."""
    return accepted if committed > accepted or committed == offered else committed - 1


def as_llama_cpp_counts(record: Record, max_new_tokens: int) -> Iterator[tuple[int, int]]:
    """(offered, accepted) of each round of the evaluator's record as llama.cpp would have counted it.

    Near the token limit llama.cpp drafts no more than can be kept, while the evaluator verifies whole blocks.
    """
    left = max_new_tokens - 1  # the first token belongs to no round
    for offered, accepted, committed in record.rounds:
        possible = min(offered, max(left - 1, 0))
        yield possible, min(accepted_there(offered, accepted, committed), possible)
        left -= committed


def counts(pairs: Iterable[Sequence[int]]) -> dict[str, int]:
    """Draft tokens offered and accepted, over (offered, accepted) of answers or rounds."""
    listed = list(pairs)
    return {"offered": sum(pair[0] for pair in listed), "accepted": sum(pair[1] for pair in listed)}


def rate(count: dict[str, int]) -> float | None:
    """Accepted / offered, None where nothing was offered."""
    return count["accepted"] / count["offered"] if count["offered"] else None


def difference(row: dict[str, Any]) -> float | None:
    """Engine's acceptance over the evaluator's, minus 1; None where either is undefined or the latter is 0."""
    engine, evaluator = rate(row["engine"]), rate(row["evaluator"])
    return engine / evaluator - 1 if engine is not None and evaluator else None


def passed(row: dict[str, Any]) -> bool:
    """Whether both claims hold: the answers are proven lossless, and acceptance is within TOLERANCE."""
    if not verdict.proven(row["identity"]):
        return False
    if "engine" not in row:
        return True
    gap = difference(row)
    return gap is not None and abs(gap) <= TOLERANCE


def _show(target: Target, found: dict[str, Any] | None) -> str | None:
    """The first difference in words."""
    if found is None:
        return None
    ours, theirs = (
        "nothing" if token is None else repr(target.tokenizer.decode([token]))
        for token in (found["plain"], found["drafter"])
    )
    gap = "" if found["gap"] is None else f" (logits {found['gap']:.5f} apart)"
    return f"{found['prompt']}, token {found['position']}: {ours} without the drafter, {theirs} with it{gap}"


def render(result: dict[str, Any]) -> str:
    """The table and the verdict."""
    rows, compared = [], "engine" in result["datasets"]["all"]
    header = ["prompts", "identical", "ties"]
    if compared:
        header += ["as evaluator", "drafted", "accepted", "acceptance", "evaluator's", "difference"]
    for name, row in result["datasets"].items():
        identity = row["identity"]
        cells = [name, f"{identity['identical']} of {identity['prompts']}", str(identity["ties"])]
        if compared:
            shares = [
                "–" if share is None else f"{share:.4f}" for share in (rate(row["engine"]), rate(row["evaluator"]))
            ]
            gap = difference(row)
            cells += [f"{row['agreement']['identical']} of {row['agreement']['prompts']}"]
            cells += [str(row["engine"]["offered"]), str(row["engine"]["accepted"]), *shares]
            cells += ["–" if gap is None else f"{100 * gap:+.2f} %"]
        rows.append(cells)
    title = f"{result['engine']}: greedy answers with the drafter against without"
    table = Table(title, header, rows, frozenset({len(rows) - 1}))
    proof = verdict.lines(result["datasets"]["all"]["identity"])
    lines = [table.text(), *proof]
    if result["first_difference"]:
        lines.append(f"first difference: {result['first_difference']}")
    bound = f", acceptance within {100 * TOLERANCE:g} % of the evaluator's" if compared else ""
    lines.append(f"lossless answers{bound}: {'yes' if result['passed'] else 'NO'}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
