"""Prompts in, training out: the same run as regenerate first and online training after, also when it is interrupted."""

import pytest

from deepspec.data import __main__ as data
from deepspec.data import regenerate
from deepspec.data.engines import TransformersEngine
from deepspec.data.responses import answered_ids, read_responses
from deepspec.train import checkpoint, tracking
from deepspec.train import main as command
from tests.train import tiny_run

ANSWERS = ["regenerate.max_new_tokens=12", "regenerate.temperature=1.0", "regenerate.batch_size=4"]
PROMPTS = 24


@pytest.fixture
def folder(saved_target, tmp_path):
    (tmp_path / "target").symlink_to(saved_target / "target")
    tiny_run.write_prompts(tmp_path / "run", PROMPTS)
    return tmp_path


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny_run.chat_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    return folder


def arguments(folder, *more, name="fresh", source="prompts", **changes):
    given = tiny_run.overrides(folder, f"data={source}", *more, name=name, train__steps=4, **changes)
    return [argument for argument in given if not argument.startswith("data.path=")]


def losses(folder, name):
    return [record["loss"] for record in tracking.read(folder / "run" / "drafters" / name) if record["kind"] == "train"]


def test_it_is_regenerate_then_online_training(folder, capsys):
    assert command.main(arguments(folder, *ANSWERS)) == 0
    said = capsys.readouterr().out
    assert f"{PROMPTS} prompts = {PROMPTS} answered" in said
    assert "regenerate engine=transformers" in said
    made = {row.id: row.tokens for row in read_responses(folder / "run" / "responses")}
    (folder / "run" / "responses").rename(folder / "first")
    target = ["target=custom", "target.name=tiny-qwen3", f"target.path={folder / 'target'}", f"out={folder / 'run'}"]
    assert data.main(["regenerate", *target, *ANSWERS, "regenerate.batch_size=7"]) == 0
    assert {row.id: row.tokens for row in read_responses(folder / "run" / "responses")} == made
    assert command.main(arguments(folder, name="after", source="online")) == 0
    assert losses(folder, "fresh") == losses(folder, "after")


def test_stopped_while_answering_and_while_training_it_is_the_same_run(folder, monkeypatch, capsys):
    assert command.main(arguments(folder, *ANSWERS, name="whole")) == 0
    (folder / "run" / "responses").rename(folder / "whole")
    run = TransformersEngine.run

    def stopped(self, work):
        for count, answer in enumerate(run(self, work)):
            if count == 7:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(TransformersEngine, "run", stopped)
    assert command.main(arguments(folder, *ANSWERS)) == 130
    assert "stopped before the first step; the same command goes on" in capsys.readouterr().out
    assert len(answered_ids(folder / "run" / "responses")) == 7
    monkeypatch.setattr(TransformersEngine, "run", run)
    assert command.main(arguments(folder, *ANSWERS, "train.stop_after=2")) == 0
    assert f"{PROMPTS} prompts = {PROMPTS} answered" in capsys.readouterr().out

    def again(*_):
        raise AssertionError("a run that goes on keeps its samples")

    monkeypatch.setattr(regenerate, "_answer", again)
    (folder / "run" / "responses" / "failures.jsonl").write_text('{"id": "q999", "reason": "made up"}\n')
    assert command.main(arguments(folder, *ANSWERS)) == 0
    assert losses(folder, "fresh") == losses(folder, "whole")


def test_a_dry_run_answers_one_global_batch(folder, capsys):
    assert command.main(arguments(folder, *ANSWERS, "train.dry_run=true")) == 0
    said = capsys.readouterr().out
    assert "4 answered" in said
    assert "dry run: everything fits" in said
    assert len(answered_ids(folder / "run" / "responses")) == 4
    assert not (folder / "run" / "drafters").exists()


def test_mistakes_are_named_before_anything_is_answered(folder, capsys):
    assert command.main(arguments(folder, "data.prompts=nowhere.jsonl")) == 2
    assert "no prompts in nowhere.jsonl: write them with `python -m deepspec.data prompts" in capsys.readouterr().err
    assert command.main(arguments(folder, "data.prompts=nowhere.jsonl", source="cache")) == 2
    assert "data.prompts=nowhere.jsonl contradicts data.source=cache" in capsys.readouterr().err
    assert not (folder / "run" / "responses").exists()
    assert command.main(arguments(folder, *ANSWERS, "train.stop_after=2")) == 0
    assert command.main(arguments(folder, *ANSWERS, "regenerate.seed=1")) == 2
    assert "regenerate.seed was 0, is 1" in capsys.readouterr().err
    assert command.main(arguments(folder, *ANSWERS, "regenerate.seed=1", name="other")) == 2
    assert "was made with other options (seed: 0 there, 1 now)" in capsys.readouterr().err
    assert checkpoint.read(folder / "run" / "drafters" / "other") is None
