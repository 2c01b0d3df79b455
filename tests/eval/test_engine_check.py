"""A drafter in an engine against the evaluator: on a recited engine here, on llama.cpp where its program is at hand."""

import json
import os
from pathlib import Path

import pytest

from deepspec.data import chat
from deepspec.eval import engine_check
from deepspec.eval.records import Record
from deepspec.models import drafter as drafters
from deepspec.models.decode import generate
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.target import Target, TargetConfig
from tests.data.little_chat import VOCAB
from tests.eval import fake_engine
from tests.eval.tiny_run import save_drafter, save_target, write_prompts
from tests.models.exporting import write_target_gguf

QUESTIONS = ["hello a", "what is this?", "abcabcabcabc"]
TOKENS = 14


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, a drafter, prompts and a program that stands for llama-server."""
    folder = tmp_path_factory.mktemp("place")
    save_drafter(folder / "drafter", save_target(folder / "target"))
    write_prompts(folder / "mine.jsonl", [[question] for question in QUESTIONS])
    write_target_gguf(folder / "target.gguf", VOCAB)
    fake_engine.program(folder / "llama-server")
    return folder


@pytest.fixture(scope="module")
def target(place):
    return Target.load(TargetConfig("target", str(place / "target")), "cpu")


@pytest.fixture(scope="module")
def answers(place, target):
    """What a right engine says: {"plain", "drafted"} → prompt → tokens and timings."""
    drafter = drafters.load(place / "drafter", FrozenHead.of(target))
    prompts = [
        chat.render_prompt(target.tokenizer, [{"role": "user", "content": question}], False) for question in QUESTIONS
    ]
    out = {"plain": {}, "drafted": {}}
    for name, options in (("plain", {}), ("drafted", {"drafter": drafter, "greedy_draft": True})):
        for done in generate(target, prompts, max_new_tokens=TOKENS, **options):
            left, offered, accepted = TOKENS - 1, 0, 0
            for each in done.rounds:  # the engine drafts no more than it can keep
                possible = min(each.proposed, max(left - 1, 0))
                taken = engine_check.accepted_there(each.proposed, each.accepted, each.committed)
                offered += possible
                accepted += min(taken, possible)
                left -= each.committed
            drafts = {"draft_n": offered, "draft_n_accepted": accepted}
            key = " ".join(map(str, prompts[done.index]))
            out[name][key] = {"tokens": done.tokens, "timings": drafts if name == "drafted" else {}}
    return out


def run(place: Path, output: Path, answers: dict, *more: object) -> int:
    (place / "target.gguf.json").write_text(json.dumps(answers))
    where = ["--server", place / "llama-server", "--target-gguf", place / "target.gguf", "--drafter", place / "drafter"]
    where += ["--target", place / "target", "--suite", place / "mine.jsonl", "--max-new-tokens", TOKENS]
    return engine_check.main([*map(str, [*where, "--output", output, "--threads", 1, *more])])


def changed(answers: dict, change) -> dict:
    """A copy whose first drafted answer went through ``change``."""
    copy = json.loads(json.dumps(answers))
    change(next(iter(copy["drafted"].values())))
    return copy


def test_a_right_engine_passes(place, answers, tmp_path, capsys):
    assert run(place, tmp_path, answers) == 0
    said = capsys.readouterr().out
    assert "lossless answers, acceptance within 3 % of the evaluator's: yes" in said
    row = json.loads((tmp_path / "engine_check.json").read_text())["datasets"]["all"]
    drafted = [answer["timings"] for answer in answers["drafted"].values()]
    assert row["engine"] == row["evaluator"]
    assert row["engine"]["offered"] == sum(each["draft_n"] for each in drafted) > 0
    assert (row["identity"]["identical"], row["agreement"]["identical"]) == (3, 3)
    assert row["identity"]["verdict"] == "identical"


def test_the_drafter_is_served_as_its_export_says(place, answers, tmp_path):
    assert run(place, tmp_path, answers) == 0
    arguments = {
        name: json.loads((tmp_path / f"server-{name}.log").read_text().splitlines()[0].removeprefix("arguments: "))
        for name in ("plain", "drafted")
    }
    own = arguments["drafted"]
    assert own[own.index("-md") + 1] == str(tmp_path / "gguf" / "drafter-f32.gguf")
    assert own[own.index("--spec-type") + 1] == "draft-dspark"
    assert own[own.index("--spec-draft-n-max") + 1] == "4"
    assert not {"-md", "--spec-type"} & set(arguments["plain"])
    assert int(own[own.index("-c") + 1]) > TOKENS + max(len(question) for question in QUESTIONS)


def test_a_different_answer_fails_and_is_shown(place, answers, target, tmp_path, capsys):
    wrong = {}

    def replace(answer):
        wrong["was"], wrong["is"] = answer["tokens"][2], (answer["tokens"][2] + 1) % VOCAB
        answer["tokens"][2] = wrong["is"]

    assert run(place, tmp_path, changed(answers, replace)) == 1
    said = capsys.readouterr().out
    before, after = (repr(target.tokenizer.decode([wrong[name]])) for name in ("was", "is"))
    assert f"first difference: q0, token 2: {before} without the drafter, {after} with it" in said
    assert "2 of 3" in said
    assert "NOT lossless" in said
    assert "lossless answers, acceptance within 3 % of the evaluator's: NO" in said


@pytest.mark.parametrize(("factor", "status"), [(0.98, 0), (1.02, 0), (0.95, 1), (1.05, 1)])
def test_acceptance_may_differ_by_three_percent(factor, status):
    row = {"identity": {"prompts": 3, "identical": 3}, "evaluator": {"offered": 20000, "accepted": 5000}}
    row["engine"] = {"offered": 10000, "accepted": round(2500 * factor)}
    assert engine_check.passed(row) == (status == 0)
    assert engine_check.difference(row) == pytest.approx(factor - 1)


@pytest.mark.parametrize(
    ("each", "count"),
    [((5, 2, 3), 2), ((5, 0, 1), 0), ((5, 2, 2), 1), ((5, 4, 1), 0), ((5, 5, 5), 5), ((5, 5, 4), 3), ((0, 0, 1), 0)],
)
def test_an_accepted_stop_token_counts_as_in_llama_cpp(each, count):
    """(offered, accepted, committed): committed ≤ accepted where a stop token among the accepted ones cut the round."""
    assert engine_check.accepted_there(*each) == count


def test_near_the_limit_the_evaluators_rounds_are_counted_as_llama_cpp_offers_them():
    """Eight tokens: one of the prompt's forward, then rounds of 5, 1 and a last one that has room for its own only."""
    rounds = [(4, 4, 5), (4, 0, 1), (4, 2, 3)]
    record = Record("d", "p", 0, "", 1, list(range(8)), "length", rounds, None, 1.0, 0.0, 0.0, 1.0, 0.0)
    assert list(engine_check.as_llama_cpp_counts(record, 8)) == [(4, 4), (1, 0), (0, 0)]


def test_an_engine_that_drafts_nothing_proves_nothing(place, answers, tmp_path, capsys):
    silent = {"plain": answers["plain"], "drafted": answers["plain"]}
    assert run(place, tmp_path, silent) == 1
    assert "3 of 3" in capsys.readouterr().out


def test_running_servers_are_compared(place, answers, tmp_path, capsys):
    where = ["--target", place / "target", "--suite", place / "mine.jsonl", "--max-new-tokens", TOKENS]
    for drafted, status in ((answers["drafted"], 0), (changed(answers, lambda a: a["tokens"].pop())["drafted"], 1)):
        with fake_engine.serving(answers["plain"]) as one, fake_engine.serving(drafted) as two:
            urls = ["--urls", f"{one}/v1", f"{two}/v1", "--output", tmp_path]
            assert engine_check.main([str(word) for word in [*where, *urls]]) == status
        said = capsys.readouterr().out
        assert ("first difference" in said) == bool(status)
        assert "acceptance" not in said


def test_what_is_missing_is_named(place, answers, tmp_path, capsys):
    assert engine_check.main(["--drafter", str(place / "drafter")]) == 2
    assert "--target-gguf" in capsys.readouterr().err
    assert engine_check.main(["--urls", "http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1"]) == 2
    assert "--urls needs --target" in capsys.readouterr().err
    assert run(place, tmp_path, answers, "--server", tmp_path / "none") == 2
    assert "ninja -C llama-build llama-server" in capsys.readouterr().err


@pytest.mark.slow
def test_inside_llama_cpp(tmp_path):
    """DEEPSPEC_LLAMA_SERVER=PROGRAM DEEPSPEC_TARGET_GGUF=FILE DEEPSPEC_DRAFTER=FOLDER; one prompt of each kind."""
    named = [os.environ.get(f"DEEPSPEC_{name}") for name in ("LLAMA_SERVER", "TARGET_GGUF", "DRAFTER")]
    if not all(named):
        pytest.skip("set DEEPSPEC_LLAMA_SERVER, DEEPSPEC_TARGET_GGUF and DEEPSPEC_DRAFTER (docs/serving.md)")
    where = ["--server", named[0], "--target-gguf", named[1], "--drafter", named[2], "--output", str(tmp_path)]
    assert engine_check.main([*where, "--limit", "1", "--max-new-tokens", "48"]) == 0
