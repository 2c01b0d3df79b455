"""What is asked: benchmark data sets as table rows, suites of them, JSONL files, and the paper's sample of each.

``python -m deepspec.eval.suites FOLDER [NAME …]`` writes data sets (default: all nine) as FOLDER/NAME.jsonl: for
``--data-dir`` on machines that do not reach the hub, and for ``prompts.decontaminate``.

Knows how a source row becomes user turns. Does not know tokenizers, models or metrics.
"""

import argparse
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspec.files import atomic_write

Row = dict[str, Any]

DEMO = "demo"
DATA_DIR_VARIABLE = "DEEPSPEC_DATA_DIR"
SAMPLE_SEED = 980406  # the public evaluator's default: the same seed draws the same samples from the same rows
_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


class SuiteError(ValueError):
    """A suite, data set or prompt file that cannot be used; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Prompt:
    """A conversation to answer: ``prefix`` messages come first as they are, then each turn is answered in order."""

    id: str
    dataset: str
    domain: str
    turns: tuple[str, ...]
    prefix: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class DataSet:
    """A benchmark. ``samples`` is the paper's number of prompts, ``rows`` what the source must hold."""

    name: str
    domain: str
    samples: int
    rows: int
    hub: str
    split: str
    turns: Callable[[Row], list[str]]
    config: str | None = None
    revision: str = "main"  # a commit where one is publicly attested, else the digest below is the only pin
    files: tuple[str, ...] = ()  # read these files of the hub repository instead of its named split
    digest: str | None = None  # prompts_digest of the published prompts


@dataclass
class Loaded:
    """Selected prompts of one data set and where they came from."""

    name: str
    domain: str
    prompts: list[Prompt]
    rows: int
    source: str
    revision: str | None
    digest: str
    published: bool | None  # whether the digest is the pinned one; None when there is nothing to compare with


def _math(field: str) -> Callable[[Row], list[str]]:
    return lambda row: [str(row[field]) + _BOXED]


def _one(field: str) -> Callable[[Row], list[str]]:
    return lambda row: [str(row[field])]


def _humaneval(row: Row) -> list[str]:
    ask = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{ask}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Row) -> list[str]:
    role = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program"
    )
    starter = row.get("starter_code")
    how = "Use the following code structure:" if starter else "Write your code in the following format:"
    code = starter or "# YOUR CODE HERE"
    answer = "### Answer: (use the provided format with backticks)"
    question = row["question_content"]
    return [f"{role}\n\n### Question:\n{question}\n\n### Format: {how}\n```python\n{code}\n```\n\n{answer}"]


def _alpaca(row: Row) -> list[str]:
    given = row.get("input")
    return [f"{row['instruction']}\n\nInput:\n{given}" if given else str(row["instruction"])]


def _swe_bench(row: Row) -> list[str]:
    return [f"Problem Statement:\n{row['problem_statement']}\nPlease fix the issue described above."]


# fmt: off
DATA_SETS: dict[str, DataSet] = {row.name: row for row in (
    DataSet("gsm8k", "math", 500, 1319, "openai/gsm8k", "test", _math("question"), config="main",
            revision="740312add88f781978c0658806c59bc2815b9866",
            digest="685bd07f7f36d343556080a457f5d7088656a490ae8dfd9e33eda66ab73ccac0"),
    DataSet("math500", "math", 500, 500, "HuggingFaceH4/MATH-500", "test", _math("problem"),
            revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            digest="8312eff2aa24a2ef324aeefb8bf54fbd94c519fc49f7cb20f36b0b8bffe4d6c6"),
    DataSet("aime25", "math", 30, 30, "MathArena/aime_2025", "train", _math("problem"),
            revision="c94da77eb22bbd6439e62a323bec18493a421302",
            digest="b50df22b006d2c959b5a08ac86a71776e4997ea32eb2bfc3d678710c0c33b7e8"),
    DataSet("humaneval", "code", 164, 164, "openai/openai_humaneval", "test", _humaneval,
            revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
            digest="9830bd7305dd67fa2392045a3a373b1bd2d1316d544a88ad724605b7f212aab3"),
    DataSet("mbpp", "code", 256, 257, "google-research-datasets/mbpp", "test", _one("prompt"), config="sanitized",
            revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
            digest="5d3e35f492d731fe67d34a0570710861cdcc4b9698ac80ee2a663d6ac0bf1736"),
    DataSet("livecodebench", "code", 500, 1055, "livecodebench/code_generation_lite", "test", _livecodebench,
            files=("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"),
            revision="0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
            digest="f1b841e7703ee48637ff912fc81881cd70576cdad53a445b7616116d79ec69d4"),
    DataSet("mt-bench", "chat", 80, 80, "HuggingFaceH4/mt_bench_prompts", "train",
            lambda row: [str(turn) for turn in row["prompt"]],
            digest="54a56d084280745e37b373784be16b072487dfea205dd3580c33bf2ecd70c9cc"),
    DataSet("alpaca", "chat", 500, 52002, "tatsu-lab/alpaca", "train", _alpaca,
            revision="dce01c9b08f87459cf36a430d809084718273017"),
    DataSet("arena-hard-v2", "chat", 500, 750, "lmarena-ai/arena-hard-auto", "train", _one("prompt"),
            files=("data/arena-hard-v2.0/question.jsonl",),
            digest="4f451bd1f3dc0aa1ce1c8f8bb53c5bb74ee2fb2925010b6f9fc8c1fa131d719c"),
    DataSet("aime24", "math", 30, 30, "HuggingFaceH4/aime_2024", "train", _math("problem"),
            revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
            digest="252a4408eb5b4b32dbcec27640d7a12d434b03dabbf9a5f4226bd0b2797b6791"),
    DataSet("lbpp", "code", 162, 162, "CohereLabs/lbpp", "test", _one("instruction"), files=("python/test.parquet",),
            digest="3c3c05b799c62a0056dcd8f4f4a7bf358f026cc2c4471c3156b613c645a69180"),
    DataSet("swe-bench", "code", 300, 300, "princeton-nlp/SWE-bench_Lite", "test", _swe_bench,
            revision="6ec7bb89b9342f664a54a6e0a6ea6501d3437cc2",
            digest="9481abd6276917261b861263a829c653e293b6ea70d4d291c137b77e433adbcd"),
)}
# fmt: on

_MATH = ("gsm8k", "math500", "aime25")
_CODE = ("humaneval", "mbpp", "livecodebench")
_CHAT = ("mt-bench", "alpaca", "arena-hard-v2")
SUITES: dict[str, tuple[str, ...]] = {"math": _MATH, "code": _CODE, "chat": _CHAT, "all": _MATH + _CODE + _CHAT}


def load(
    suites: Sequence[str],
    *,
    data_dir: str | Path | None = None,
    demo_file: Path | None = None,
    limit: int | None = None,
    seed: int = SAMPLE_SEED,
    any_rows: bool = False,
) -> list[Loaded]:
    """Prompts of suites, data set names, ``demo`` or JSONL paths, in order, without repeating a data set.

    ``limit`` replaces the paper's number of samples of every data set. ``any_rows`` accepts a source whose row count
    is not the published one. Raises SuiteError, also for two sources of one name: their answers would mix.
    """
    if limit is not None and limit < 1:
        raise SuiteError(f"--limit {limit}: at least 1 prompt per data set")
    loaded: dict[str, Loaded] = {}
    given: dict[str, str] = {}
    for suite in suites:
        for name in SUITES.get(suite, (suite,)):
            for item in _load_one(name, data_dir, demo_file, any_rows):
                count = limit or (DATA_SETS[name].samples if name in DATA_SETS else len(item.prompts))
                item.prompts = select(item.prompts, count, seed)
                loaded.setdefault(item.name, item)
                if given.setdefault(item.name, name) != name:
                    raise SuiteError(
                        f"--suite {given[item.name]} {name}: both are the data set '{item.name}': rename the file"
                    )
    return list(loaded.values())


def select(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """All prompts when there are at most ``count``, else the first ``count`` of a shuffle seeded with ``seed``."""
    chosen = list(prompts)
    if len(chosen) > count:
        random.Random(seed).shuffle(chosen)
    return chosen[:count]


def prompts_digest(turns: Iterable[Sequence[str]]) -> str:
    """SHA-256 over one JSON list of turns per line, UTF-8: what pins the text of a data set."""
    digest = hashlib.sha256()
    for row in turns:
        digest.update((json.dumps(list(row), ensure_ascii=False) + "\n").encode())
    return digest.hexdigest()


def _load_one(name: str, data_dir: str | Path | None, demo_file: Path | None, any_rows: bool) -> list[Loaded]:
    if name in DATA_SETS:
        return [_benchmark(DATA_SETS[name], data_dir or os.environ.get(DATA_DIR_VARIABLE), any_rows)]
    if name == DEMO:
        if demo_file is None or not demo_file.is_file():
            raise SuiteError(
                f"suite demo: no held-out prompts at {demo_file}: run `make demo`, or `python -m deepspec.data prompts`"
            )
        return _by_source(read_prompts(demo_file, "demo"), str(demo_file))
    path = Path(name)
    if path.suffix in (".jsonl", ".json") or path.exists():
        if not path.is_file():
            raise SuiteError(f"--suite {name}: no such file")
        return [_loaded(path.stem, "custom", read_prompts(path, path.stem), str(path))]
    known = ", ".join((*SUITES, DEMO, *DATA_SETS))
    raise SuiteError(f"unknown suite or data set '{name}': one of {known}, or the path of a JSONL file")


def _benchmark(row: DataSet, data_dir: str | Path | None, any_rows: bool) -> Loaded:
    local = Path(data_dir) / f"{row.name}.jsonl" if data_dir else None
    if local is not None and local.is_file():
        prompts, source, revision = read_prompts(local, row.name, row.domain), str(local), None
    else:
        prompts, source, revision = _from_hub(row, local), row.hub, row.revision
    if len(prompts) != row.rows and not any_rows:
        raise SuiteError(
            f"{row.name}: {source} holds {len(prompts)} rows, the published data set {row.rows}: it is cut or another "
            f"version. Fetch it again, or pass --any-rows to evaluate on what is there"
        )
    loaded = _loaded(row.name, row.domain, prompts, source)
    loaded.revision = revision
    loaded.published = None if row.digest is None else loaded.digest == row.digest
    return loaded


def _from_hub(row: DataSet, local: Path | None) -> list[Prompt]:
    tried = f"{local} does not exist" if local else "no --data-dir given"
    try:
        from datasets import load_dataset

        if row.files:
            builder = "parquet" if row.files[0].endswith(".parquet") else "json"
            paths = [f"hf://datasets/{row.hub}@{row.revision}/{file}" for file in row.files]
            rows = load_dataset(builder, data_files=paths, split="train")
        else:
            rows = load_dataset(row.hub, row.config, split=row.split, revision=row.revision)
        return [
            Prompt(f"{row.name}/{index}", row.name, row.domain, tuple(row.turns(item)))
            for index, item in enumerate(rows)
        ]
    except KeyError as error:
        raise SuiteError(f"{row.name}: field {error} is missing in {row.hub} at {row.revision}") from error
    except Exception as error:  # the hub client raises many unrelated types; all of them mean: not available
        reason = " ".join(str(error).split())[:200]
        raise SuiteError(
            f"{row.name}: {tried}, and {row.hub} could not be loaded ({type(error).__name__}: {reason}). Put "
            f'{row.name}.jsonl with one {{"turns": ["…"]}} per line into a folder and pass it as --data-dir, or '
            f"run where the hub can be reached"
        ) from error


def read_prompts(path: Path, dataset: str, domain: str = "custom") -> list[Prompt]:
    """Prompts of a JSONL file: rows with ``turns``, ``messages`` ending in a user turn, or ``prompt``.

    ``id`` and ``source`` are optional; a source becomes the prompt's domain. Raises SuiteError naming file and line.
    """
    prompts: list[Prompt] = []
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise SuiteError(f"{where}: not valid JSON ({error})") from error
            prefix, turns = _conversation(row, where)
            name = str(row.get("id", f"{dataset}/{len(prompts)}"))
            prompts.append(Prompt(name, dataset, str(row.get("source", domain)), turns, prefix))
    if not prompts:
        raise SuiteError(f"{path}: no prompts in it")
    return prompts


def _conversation(row: Any, where: str) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Prefix messages and user turns of one row."""
    if not isinstance(row, dict):
        raise SuiteError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages or messages[-1].get("role") != "user":
            raise SuiteError(f"{where}: 'messages' must be a list that ends in a user turn")
        return tuple(messages[:-1]), (str(messages[-1]["content"]),)
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise SuiteError(f"{where}: expected 'turns' (a list of strings), 'messages' or 'prompt'")
    return (), tuple(turns)


def _by_source(prompts: list[Prompt], source: str) -> list[Loaded]:
    """The demo's prompts, one data set per source tag."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        name = f"{DEMO}-{prompt.domain}"
        groups.setdefault(name, []).append(Prompt(prompt.id, name, prompt.domain, prompt.turns, prompt.prefix))
    return [_loaded(name, group[0].domain, group, source) for name, group in groups.items()]


def _loaded(name: str, domain: str, prompts: list[Prompt], source: str) -> Loaded:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise SuiteError(f"{source}: prompt id '{prompt.id}' occurs twice")
        seen.add(prompt.id)
    digest = prompts_digest(prompt.turns for prompt in prompts)
    return Loaded(name, domain, prompts, len(prompts), source, None, digest, None)


def write(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Write data sets or suites whole, one file each; yields a line about each. Raises SuiteError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(part for given in names for part in SUITES.get(given, (given,))):
        if name not in DATA_SETS:
            raise SuiteError(f"unknown suite or data set '{name}': one of {', '.join((*SUITES, *DATA_SETS))}")
        loaded = _benchmark(DATA_SETS[name], None, any_rows=False)
        with atomic_write(folder / f"{name}.jsonl") as temporary:
            lines = (json.dumps({"turns": list(prompt.turns)}, ensure_ascii=False) for prompt in loaded.prompts)
            temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        same = "" if loaded.published is not False else "; NOT the published prompts"
        yield f"{folder / name}.jsonl: {loaded.rows} prompts of {loaded.source}{same}"


def main(argv: list[str] | None = None) -> int:
    """Command line of ``write``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deepspec.eval.suites", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=["all"], help="suites or data sets (default: all)")
    options = parser.parse_args(argv)
    try:
        for line in write(options.folder, options.names):
            print(line, flush=True)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"next: python -m deepspec.data prompts … prompts.decontaminate=[{options.folder}]")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
