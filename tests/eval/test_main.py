"""``python -m deepspec.eval`` from end to end on a tiny random target with random drafters and the n-gram baseline."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepspec.eval import calibrate, cli, report
from deepspec.eval.calibration import logit
from deepspec.eval.rounds import read_rounds
from deepspec.eval.sps import SPSProfile, SPSTable
from deepspec.models import drafter as checkpoints
from deepspec.models.export import checkpoint as folders
from deepspec.models.export import export, imports
from tests.eval.tiny_run import evaluate, results, save_drafter, save_target, write_prompts
from tests.models.exporting import speculators

QUESTIONS = [["hello a"], ["what is this?", "and that?"], ["abcabcabcabc"], ["zz"], ["0 1 2 3 0 1 2 3"]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    target = save_target(folder / "target")
    save_drafter(folder / "runs" / "target" / "drafters" / "dspark" / "best", target)
    save_drafter(folder / "runs" / "target" / "drafters" / "dflash" / "best", target, "dflash", block_size=3)
    write_prompts(folder / "mine.jsonl", QUESTIONS)
    return folder


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch):
    """Drawing is test_report's business and takes a second a run; ``compared`` is made before this and draws."""
    monkeypatch.setattr(report, "write", lambda _, folder: folder)


def run(place: Path, output: Path, *more: object) -> int:
    return evaluate(
        "--suite", place / "mine.jsonl", "--target", place / "target", "--max-new-tokens", 14, "--output", output, *more
    )


def drafter_folder(place: Path, name: str) -> Path:
    return place / "runs" / "target" / "drafters" / name


@pytest.fixture(scope="module")
def compared(place, tmp_path_factory):
    """Two drafters and the baseline, two batch sizes, several block lengths."""
    output = tmp_path_factory.mktemp("compared")
    names = [drafter_folder(place, name) for name in ("dspark", "dflash")]
    more = ("--baselines", "ngram", "--batch-size", 1, 3, "--sweep-blocks", 1, 3, "--turns", "all")
    assert run(place, output, "--drafter", *names, *more) == 0
    return output


def test_every_variant_is_identical_to_plain_decoding(compared):
    out = results(compared)
    checked = [item for item in out["variants"] if item["id"] != "plain-k0-b1"]
    assert len(checked) == 1 + 2 * (3 + 2 + 3)
    for item in checked:
        check = item["datasets"]["mine"]["identity"]
        assert (check["prompts"], check["identical"] + check["ties"], check["different"]) == (6, 6, 0), item["id"]


def test_garbage_behind_the_first_token_is_not_lossless(place, tmp_path, capsys):
    """The drafter's records are spoilt between two runs of the command, which reads them back."""
    arguments = ("--baselines", "ngram", "--drafter", drafter_folder(place, "dspark"))
    assert run(place, tmp_path, *arguments) == 0
    assert "dspark: against plain greedy decoding: identical" in capsys.readouterr().out
    file = tmp_path / "records-dspark-k4-b1-rank0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["tokens"] = [line["tokens"][0]] + [7] * (len(line["tokens"]) - 1)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(place, tmp_path, *arguments) == 3
    said = capsys.readouterr().out
    assert "dspark: against plain greedy decoding: NOT lossless" in said
    assert "first offence: q" in said
    assert "ngram: against plain greedy decoding: identical" in said
    by_id = {item["id"]: item["datasets"]["mine"] for item in results(tmp_path)["variants"]}
    assert by_id["dspark-k4-b1"]["identity"]["verdict"] == "NOT lossless"
    assert by_id["dspark-k4-b1"]["identity"]["different"] > 0


def test_without_plain_decoding_nothing_is_proven(place, tmp_path, capsys):
    assert run(place, tmp_path, "--drafter", drafter_folder(place, "dspark"), "--no-plain", "--limit", 1) == 0
    assert "dspark: against plain greedy decoding: not proven: there is no plain run" in capsys.readouterr().out


def test_the_last_line_names_a_command_that_takes_these_records(place, compared, tmp_path, capsys):
    output = shutil.copytree(compared, tmp_path / "copy")
    names = [drafter_folder(place, name) for name in ("dspark", "dflash")]
    assert run(place, output, "--drafter", *names, "--sweep-blocks", 1, 3) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"next: python -m deepspec.eval.calibrate --records {output} --run dspark-k4-b1"
    )
    from deepspec.eval.rounds import read_rounds

    assert len(read_rounds(output, "dspark-k4-b1").prompts) == 6


def test_calibrating_is_advised_after_full_blocks_only(place, tmp_path, capsys):
    assert run(place, tmp_path, "--drafter", drafter_folder(place, "dspark"), "--block", 3, "--limit", 1) == 0
    assert "next: python -m deepspec.models.export" in capsys.readouterr().out.splitlines()[-1]


def test_results_say_what_was_run(compared, place):
    out = results(compared)
    assert out["settings"]["suites"] == [str(place / "mine.jsonl")]
    assert out["settings"]["temperature"] == 0
    assert [data["name"] for data in out["datasets"]] == ["mine"]
    by_id = {item["id"]: item for item in out["variants"]}
    assert by_id["dspark-k4-b1"]["headline"]
    assert not by_id["dspark-k4-b3"]["headline"]
    assert by_id["dspark-k4-b1"]["drafter"]["confidence"] is True
    assert "reliability" in by_id["dspark-k4-b1"]["macro"]["pooled"]
    assert "reliability" not in by_id["dflash-k3-b1"]["macro"]["pooled"]
    assert {group["label"] for group in out["best_blocks"]} == {"dspark", "dflash", "ngram"}
    data = by_id["ngram-k7-b1"]["datasets"]["mine"]
    assert 1 <= data["tau"]["value"] <= 8
    assert data["speed_up"]["value"] > 0
    shares = [data[f"{name}_share"]["value"] for name in ("prefill", "draft", "verify", "other")]
    assert sum(shares) == pytest.approx(1, abs=1e-3)


def test_figures_come_from_the_records(compared):
    lines = [json.loads(line) for line in (compared / "records-ngram-k7-b1-rank0.jsonl").read_text().splitlines()]
    assert {line["prompt"] for line in lines} == {f"q{i}" for i in range(5)}
    assert len(lines) == 6, "one prompt has two turns"
    rounds = [entry for line in lines for entry in line["rounds"]]
    data = next(item for item in results(compared)["variants"] if item["id"] == "ngram-k7-b1")["datasets"]["mine"]
    assert data["tau"]["value"] == pytest.approx(sum(r[2] for r in rounds) / len(rounds), abs=1e-5)
    for line in lines:
        # the last round counts what it verified beyond the token limit too
        beyond = 1 + sum(r[2] for r in line["rounds"]) - len(line["tokens"])
        assert 0 <= beyond < max([r[2] for r in line["rounds"]], default=1)
        assert beyond == 0 or line["finish"] == "length"
    assert (compared / "table.md").read_text().startswith("### dspark: block 4")
    assert "</html>" in (compared / "index.html").read_text()


def test_an_interrupted_run_continues_and_gives_the_same_answers(place, compared, tmp_path, capsys):
    source = compared / "records-plain-k0-b1-rank0.jsonl"
    lines = source.read_text().splitlines()
    (tmp_path / source.name).write_text("\n".join(lines[:2]) + "\n" + lines[2][:50])
    assert run(place, tmp_path, "--drafter", drafter_folder(place, "dspark"), "--turns", "all") == 0
    assert "plain-k0-b1: 2 answers are already in" in capsys.readouterr().out
    again = [json.loads(line) for line in (tmp_path / source.name).read_text().splitlines()]
    tokens = {(line["prompt"], line["turn"]): line["tokens"] for line in map(json.loads, lines)}
    assert {(line["prompt"], line["turn"]): line["tokens"] for line in again} == tokens
    assert len(again) == 6


def test_a_speed_up_over_plain_records_of_an_earlier_run_says_so(place, tmp_path, capsys):
    arguments = ("--baselines", "ngram", "--limit", 2)
    for _ in range(2):  # the second time everything is reused, plain and drafter of one run
        assert run(place, tmp_path, *arguments) == 0
        assert "different runs of the command" not in capsys.readouterr().out
        assert results(tmp_path)["variants"][1]["datasets"]["mine"]["sessions"] == 1
    (tmp_path / "records-ngram-k7-b1-rank0.jsonl").unlink()  # as after training a drafter again
    assert run(place, tmp_path, *arguments) == 0
    assert "* speed-ups of ngram divide seconds of different runs of the command" in capsys.readouterr().out
    assert results(tmp_path)["variants"][1]["datasets"]["mine"]["sessions"] == 2
    text = (tmp_path / "table.md").read_text()
    assert ")* |" in text
    assert "\\* speed-ups of ngram" in text


def test_other_settings_do_not_reuse_records(place, tmp_path, capsys):
    for seed in (1, 1, 2):
        assert run(place, tmp_path, "--baselines", "ngram", "--temperature", 1, "--seed", seed, "--limit", 3) == 0
    said = capsys.readouterr().out
    assert said.count("ngram-k7-b1: 3 answers are already in") == 1


def test_sampled_answers_do_not_depend_on_batch_or_limit(place, tmp_path):
    answers = []
    for number, more in enumerate((("--batch-size", 1), ("--batch-size", 4), ("--batch-size", 1, "--limit", 2))):
        output = tmp_path / str(number)
        assert (
            run(place, output, "--drafter", drafter_folder(place, "dspark"), "--temperature", 1, "--no-plain", *more)
            == 0
        )
        lines = next(output.glob("records-*.jsonl")).read_text().splitlines()
        answers.append({line["prompt"]: line["tokens"] for line in map(json.loads, lines)})
    assert answers[0] == answers[1]
    assert len(answers[2]) == 2
    assert answers[2].items() <= answers[0].items()
    assert results(tmp_path / "0")["variants"][0]["datasets"]["mine"].get("identity") is None


def test_both_ways_of_drafting_are_reported(place, tmp_path):
    more = ("--temperature", 1, "--draft-sampling", "probabilistic", "greedy", "--no-plain", "--limit", 2)
    assert run(place, tmp_path, "--drafter", drafter_folder(place, "dspark"), *more) == 0
    ids = [item["id"] for item in results(tmp_path)["variants"]]
    assert ids == ["dspark-k4-b1", "dspark-greedy-k4-b1", "ngram-k7-b1"]


# an untrained head is half sure of every token: products fall along the block, the confidences do not
ON_SURVIVAL = ("--threshold-on", "survival", "--confidence-threshold")


def test_a_threshold_shortens_proposals_and_stays_lossless(place, tmp_path, capsys):
    names = [drafter_folder(place, name) for name in ("dspark", "dflash")]
    assert run(place, tmp_path, "--drafter", *names, *ON_SURVIVAL, 0.4, "--limit", 3) == 0
    out = {item["label"]: item["datasets"]["mine"] for item in results(tmp_path)["variants"]}
    assert out["dspark"]["proposal_length"]["value"] < out["dflash"]["proposal_length"]["value"]
    assert out["dspark"]["identity"]["different"] == 0
    assert "not applied to dflash: it has no confidence head; --max-probability" in capsys.readouterr().err


def test_a_threshold_on_the_largest_probability(place, tmp_path, capsys):
    """For drafters without a confidence head; its records calibrate and its scale is applied afterwards."""
    folder = save_drafter(tmp_path / "dflash", place / "target", "dflash")
    more = ("--drafter", folder, drafter_folder(place, "dspark"), "--max-probability", "--limit", 3)
    assert run(place, tmp_path / "full", *more) == 0
    made = {item["label"]: item for item in results(tmp_path / "full")["variants"]}
    assert made["dflash"]["drafter"]["max_probability"] == {}
    assert [made[name]["drafter"]["calibrated"] for name in ("dflash", "dspark")] == [False, False]
    assert "max_probability" not in made["dspark"]["drafter"]
    assert "reliability" in made["dflash"]["macro"]["pooled"]
    assert run(place, tmp_path / "short", *more, *ON_SURVIVAL, 0.06) == 0
    short = {item["label"]: item["datasets"]["mine"] for item in results(tmp_path / "short")["variants"]}
    assert short["dflash"]["proposal_length"]["value"] < made["dflash"]["datasets"]["mine"]["proposal_length"]["value"]
    assert short["dflash"]["identity"]["different"] == 0
    assert "not applied" not in capsys.readouterr().err

    given = ["--records", str(tmp_path / "full"), "--run", made["dflash"]["id"]]
    raw, found = calibrate.recorded(calibrate.parser().parse_args(given))
    assert found.folder == folder
    checkpoints.update_metadata(folder, max_probability={"temperatures": [2.0] * 4, "shifts": [0.5] * 4})
    assert run(place, tmp_path / "scaled", *more) == 0
    scaled = read_rounds(tmp_path / "scaled", made["dflash"]["id"])
    trained = [item for item in results(tmp_path / "scaled")["variants"] if item["drafter"]]
    calibrated = {item["label"]: item["drafter"]["calibrated"] for item in trained}
    assert calibrated == {"dflash": True, "dspark": False}
    assert np.allclose(logit(scaled.confidence_NG), logit(raw.confidence_NG) / 2 + 0.5, atol=0.01, equal_nan=True)
    given[1] = str(tmp_path / "scaled")
    options = calibrate.parser().parse_args(given)
    again, _ = calibrate.recorded(options)
    assert options.max_probability
    assert np.allclose(again.confidence_NG, raw.confidence_NG, atol=1e-3, equal_nan=True)


STAIRS = SPSProfile((SPSTable((2, 3, 5, 9), (10.0, 9.0, 8.5, 4.0)),))


@pytest.mark.parametrize("schedule", ["static", "threshold", "plateau"])
def test_output_under_a_schedule_is_the_target_s(place, tmp_path, capsys, schedule):
    more = ["--drafter", drafter_folder(place, "dspark"), "--batch-size", 3, "--schedule", schedule]
    if schedule == "plateau":
        STAIRS.save(tmp_path / "sps.json")
        more += ["--sps", tmp_path / "sps.json"]
    if schedule == "threshold":
        more += [*ON_SURVIVAL[:2]]
    assert run(place, tmp_path, *more) == 0  # 3 where greedy output differs
    assert "dspark: against plain greedy decoding: identical" in capsys.readouterr().out
    made = results(tmp_path)
    wanted = {"schedule": schedule, "confidence_threshold": 0.5 if schedule == "threshold" else None}
    assert {name: made["settings"][name] for name in wanted} == wanted
    scheduled = next(item for item in made["variants"] if item["label"] == "dspark")
    length = scheduled["datasets"]["mine"]["proposal_length"]["value"]
    full = scheduled["block"]
    assert length > full - 1 if schedule == "static" else length < full - 1


def test_largest_probabilities_are_scheduled(place, tmp_path, capsys):
    """Beside a drafter with a head, in one command; without the option the schedule is not applied."""
    STAIRS.save(tmp_path / "sps.json")
    more = ["--drafter", drafter_folder(place, "dflash"), drafter_folder(place, "dspark"), "--batch-size", 3]
    more += ["--schedule", "causal", "--sps", tmp_path / "sps.json", "--limit", 3]
    assert run(place, tmp_path / "without", *more) == 0
    assert "--schedule causal is not applied to dflash" in capsys.readouterr().err
    assert run(place, tmp_path / "with", *more, "--max-probability") == 0
    said = capsys.readouterr()
    assert "not applied" not in said.err
    for label in ("dspark", "dflash"):
        assert f"{label}: against plain greedy decoding: identical" in said.out
    lengths = [
        next(item for item in results(tmp_path / name)["variants"] if item["label"] == "dflash")["datasets"]["mine"]
        for name in ("with", "without")
    ]
    assert lengths[0]["proposal_length"]["value"] < lengths[1]["proposal_length"]["value"]


def test_defaults_find_the_newest_drafter_and_its_target(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv("DEEPSPEC_TARGETS", str(place))
    prompts = place / "runs" / "target" / "prompts"
    prompts.mkdir(exist_ok=True)
    rows = [
        {"id": str(i), "messages": [{"role": "user", "content": "x" * i}], "source": s}
        for i, s in enumerate(("math", "chat"), 1)
    ]
    (prompts / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate("--max-new-tokens", 6) in (0,)
    output = place / "runs" / "target" / "eval" / "demo-t0"
    out = results(output)
    assert [data["name"] for data in out["datasets"]] == ["demo-math", "demo-chat"]
    assert out["variants"][1]["label"] == "dflash"
    said = capsys.readouterr().out
    assert "dflash: against plain greedy decoding: identical" in said
    assert "prompt lookup (free)" in said
    assert "next: " in said.splitlines()[-1]


def test_too_long_and_unanswerable_prompts_are_left_out_with_a_line(place, tmp_path, capsys):
    path = write_prompts(tmp_path / "long.jsonl", [["a" * 600], ["fine"]])
    more = ("--target", place / "target", "--baselines", "ngram", "--max-new-tokens", 20, "--output", tmp_path / "out")
    assert evaluate("--suite", path, *more) == 0
    assert "long: 1 prompts left out. prompt q0, turn 1: its 6" in capsys.readouterr().out
    assert results(tmp_path / "out")["datasets"][0]["skipped"][0]["prompt"] == "q0"
    path = write_prompts(tmp_path / "longer.jsonl", [["a" * 600]])
    assert evaluate("--suite", path, *more) == 2
    assert "error: no prompt can be decoded. prompt q0" in capsys.readouterr().err


def test_an_empty_answer_is_counted_not_fatal(place, tmp_path, capsys, monkeypatch):
    from deepspec.models.target import Target

    monkeypatch.setattr(Target, "stop_ids", property(lambda self: tuple(range(self.vocab_size))))
    assert run(place, tmp_path, "--baselines", "ngram") == 0
    assert "ngram: 5 answers are empty" in capsys.readouterr().out
    data = results(tmp_path)["variants"][1]["datasets"]["mine"]
    assert (data["empty"], data["rounds"], data["tau"]["value"]) == (5, 0, None)


def test_a_drafter_of_another_target_is_refused(place, tmp_path, capsys):
    other = save_target(tmp_path / "other", seed=9)
    arguments = ("--suite", place / "mine.jsonl", "--target", other, "--max-new-tokens", 8, "--limit", 2)
    name = drafter_folder(place, "dspark")
    assert evaluate(*arguments, "--drafter", name, "--output", tmp_path / "out") == 2
    assert "was trained for target" in capsys.readouterr().err
    assert evaluate(*arguments, "--drafter", name, "--output", tmp_path / "out", "--allow-mismatch") == 0
    assert "!!! WARNING: drafter dspark was trained for target" in capsys.readouterr().err
    assert results(tmp_path / "out")["warnings"]


def test_an_out_of_vocabulary_drafter_is_refused_even_when_allowed(place, tmp_path, capsys):
    wide = save_target(tmp_path / "wide", vocab_size=140)
    more = ("--target", wide, "--drafter", drafter_folder(place, "dspark"), "--allow-mismatch", "--output", tmp_path)
    assert evaluate("--suite", place / "mine.jsonl", *more) == 2
    error = capsys.readouterr().err
    assert "proposes from 128 tokens, target wide has 140" in error.splitlines()[-1]


def test_drafters_of_other_layouts_decode_like_ours(place, tmp_path, capsys):
    save_drafter(tmp_path / "eagle3", place / "target", "eagle3", qk_norm=False)
    own = imports.read(drafter_folder(place, "dspark") / "best")
    folders.write(speculators(own), tmp_path / "theirs")
    export(imports.read(tmp_path / "eagle3"), "vllm", tmp_path / "published")
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    nameless = {key: value for key, value in config.items() if not key.startswith("eagle_")}
    (tmp_path / "published" / "config.json").write_text(json.dumps({**nameless, "deepspec": {}}))
    given = ("--drafter", tmp_path / "theirs", tmp_path / "published", "--limit", 2)
    assert run(place, tmp_path / "out", *given) == 2
    assert "give the zero-based layers as --taps K K K" in capsys.readouterr().err
    assert run(place, tmp_path / "out", *given, "--taps", 0, 1, 2) == 0
    ours = (drafter_folder(place, "dspark"), tmp_path / "eagle3")
    assert run(place, tmp_path / "ours", "--drafter", *ours, "--limit", 2) == 0
    taus = [[item["macro"]["tau"] for item in results(tmp_path / name)["variants"]] for name in ("out", "ours")]
    assert taus[0] == taus[1]
    capsys.readouterr()
    assert run(place, tmp_path / "out", *given, "--taps", -1, 0, 1) == 0, "other layers, another drafter"
    reused = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "are already in" in line]
    assert reused == ["plain-k0-b1", "theirs-k4-b1", "ngram-k7-b1"]


def test_a_thinking_mismatch_warns(place, tmp_path, capsys):
    name = save_drafter(tmp_path / "thinker", place / "target", thinking=True)
    assert run(place, tmp_path / "out", "--drafter", name, "--limit", 1) == 0
    assert "trained on thinking answers, this evaluates non-thinking ones" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drafter", "nowhere"), "--drafter nowhere: no such folder"),
        (("--drafter", "{place}/runs"), "holds a config.json"),
        (("--drafter", "{place}/target"), "no drafter layout that is known"),
        (("--target", "{place}/runs", "--baselines", "ngram"), "config.json"),
        (("--schedule", "causal", "--sps", "typo.json", "--baselines", "ngram"), "typo.json does not exist: make it"),
        (("--target", "qwen99", "--baselines", "ngram"), "neither a folder nor a recipe; recipes: "),
        (
            ("--suite", "nothing", "--baselines", "ngram", "--target", "{place}/target"),
            "unknown suite or data set 'nothing'",
        ),
        (("--drafter", "{place}/runs/target/drafters/dspark", "--block", "9"), "was trained with block 4"),
        (("--drafter", "{place}/runs/target/drafters/dspark", "--sweep-blocks", "5"), "takes 1 to 4"),
    ],
)
def test_mistakes_are_one_line(place, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    given = [argument.format(place=place) for argument in arguments]
    for option, value in (("--suite", place / "mine.jsonl"), ("--target", place / "target")):
        if option not in given:
            given += [option, str(value)]
    assert evaluate(*given, "--output", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists(), "said before anything was decoded"


def test_no_drafter_at_all_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert evaluate("--suite", "math") == 2
    assert "train one with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--top-p", "0.9"), "do nothing at --temperature 0"),
        (("--temperature", "-1"), "temperature"),
        (("--batch-size", "0"), "at least 1"),
        (("--confidence-threshold", "2"), r"in [0, 1]"),
        (("--block", "2", "--sweep-blocks"), "contradict"),
    ],
)
def test_contradicting_options_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit):
        cli.parse(arguments)
    assert message in capsys.readouterr().err


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    said = capsys.readouterr().out
    for option in cli.parser()._option_string_actions:
        assert option in said
    assert "livecodebench" in said


def test_ctrl_c_keeps_what_is_done(place, tmp_path, monkeypatch, capsys):
    from deepspec.eval import run as module

    def stop(self, record):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Progress, "finished", stop)
    assert run(place, tmp_path, "--baselines", "ngram") == 130
    assert "Run the same command again" in capsys.readouterr().err
    assert len((tmp_path / "records-plain-k0-b1-rank0.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_ranks_with_uneven_prompts_give_the_same_results(place, compared, tmp_path):
    """Three ranks, five prompts: split, merged, and equal to one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["-m", "deepspec.eval", "--suite", str(place / "mine.jsonl"), "--target", str(place / "target")]
    command += ["--drafter", str(drafter_folder(place, "dspark")), "--turns", "all", "--max-new-tokens", "14"]
    command += ["--output", str(tmp_path), "--quiet", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(tmp_path.glob("records-dspark-k4-b1-rank*.jsonl"))) == 3
    ours, one = ({item["id"]: item for item in results(folder)["variants"]} for folder in (tmp_path, compared))
    for name in ("plain-k0-b1", "dspark-k4-b1"):
        for key in ("tau", "rounds", "tokens", "conditional_acceptance", "prompts"):
            assert ours[name]["datasets"]["mine"][key] == one[name]["datasets"]["mine"][key]
    assert ours["dspark-k4-b1"]["datasets"]["mine"]["sessions"] == 1, "the ranks are one session"
    assert done.stdout.count("report: ") == 1
