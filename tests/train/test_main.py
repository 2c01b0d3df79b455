"""The command: exit status and one clear line for whatever is wrong, before anything expensive."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepspec.eval import choose
from deepspec.train import main as command
from tests.data.little_chat import TEMPLATE, chat_tokenizer
from tests.train import tiny_run

ROOT = Path(command.__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_run.make(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "+recipe=dflash|dspark"),
        (["+recipe=unknown"], "recipe/unknown"),
        (["+recipe=dspark", "train.lrr=1"], "train.lrr"),
        (["+recipe=dspark", "train.lr=fast"], "train.lr"),
        (["+recipe=dspark", "engine.zero=9"], "engine.zero=9"),
        (["--local_rank=0", "+recipe=dspark", "engine.zero=9"], "engine.zero=9"),
        (["+recipe=dspark"], "make cache MODEL=qwen3-4b"),
        (["+recipe=dspark", "target=smollm2-1.7b"], "make cache MODEL=smollm2-1.7b"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert named in said.splitlines()[0]
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_help_lists_the_recipes(capsys):
    assert command.main(["--help"]) == 0
    assert "dspark-rnn" in capsys.readouterr().out


def test_a_cache_of_another_target_or_taps_is_refused(folder, capsys):
    (folder / "other").mkdir()
    other = tiny_run.chat_target(seed=5)
    other.model.save_pretrained(folder / "other")
    assert command.main([*tiny_run.overrides(folder), f"target.path={folder / 'other'}"]) == 2
    assert "other weights" in capsys.readouterr().err
    assert command.main(tiny_run.overrides(folder, "target.taps=[0,2]")) == 2
    assert "taps [0, 1, 2], this run asks for [0, 2]" in capsys.readouterr().err


def test_a_cache_of_another_chat_template_is_refused(folder, capsys):
    shutil.copytree(folder / "target", folder / "template")
    chat_tokenizer(TEMPLATE.replace("</s>", "</s></s>")).save_pretrained(folder / "template")
    assert command.main(tiny_run.overrides(folder, f"target.path={folder / 'template'}", name="template")) == 2
    assert "built with another tokenizer or chat template" in capsys.readouterr().err
    assert not (folder / "run" / "drafters" / "template").exists()


def test_a_target_without_a_tokenizer_trains_from_a_cache_with_a_note(folder, capsys):
    (folder / "bare").mkdir()
    tiny_run.chat_target().model.save_pretrained(folder / "bare")
    assert command.main(tiny_run.overrides(folder, f"target.path={folder / 'bare'}", name="bare", train__steps=1)) == 0
    said = capsys.readouterr().out
    assert "bare holds no tokenizer (tokenizer.json)" in said
    assert "chat template is not checked" in said


def test_a_run_from_the_command_says_what_to_do_next(folder, capsys):
    arguments = tiny_run.overrides(folder, name="command", train__steps=4)
    assert command.main([*arguments, "train.stop_after=2"]) == 0
    said = capsys.readouterr().out
    assert "step 2/4" in said
    again = "torchrun --standalone --nproc-per-node 1 deepspec/train/main.py +recipe=dspark"
    assert f"the same command without train.stop_after goes on from there:\n  {again}" in said
    assert "train.stop_after=" not in said[said.index(again) :]
    assert command.main(arguments) == 0
    said = capsys.readouterr().out
    assert "continuing" in said
    assert "step 4/4" in said
    drafter = f"{folder}/run/drafters/command"
    assert said.splitlines()[-1] == f"next: python -m deepspec.eval --suite math --drafter {drafter}"
    target = choose.target_config(None, choose.candidates([drafter]), "auto", False)  # what that command evaluates
    assert (target.name, target.path) == ("tiny-qwen3", str(folder / "target"))
    assert command.main(arguments) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_the_line_that_continues_starts_as_many_processes(monkeypatch):
    monkeypatch.setattr(command.distributed, "world_size", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert "torchrun --standalone --nproc-per-node 8 deepspec/train/main.py +recipe=x" in command._again(["+recipe=x"])
    monkeypatch.setattr(command.distributed, "world_size", lambda: 32)
    assert command._again(["+recipe=x"]) == "the same command on every node goes on from there"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("LOCAL_SIZE", "32")  # as DeepSpeed's launcher says it
    assert "--nproc-per-node 32" in command._again([])


def test_the_remedy_for_a_missing_cache_names_the_target_as_it_was_given(tmp_path, monkeypatch, capsys):
    """A target without a recipe is no MODEL of make."""
    monkeypatch.chdir(tmp_path)
    given = ["target.path=org/model", "target.name=mine", "out=here"]
    for more in ([], ["data=prompts"]):
        assert command.main(["+recipe=dspark", "target=custom", *given, *more]) == 2
        said = capsys.readouterr().err
        assert " ".join(given) in said
        assert "make cache" not in said


def test_online_training_is_the_same_as_from_the_lossless_cache(folder, capsys):
    from deepspec.train import tracking

    cached = tiny_run.config(folder, name="cached", train__steps=3)
    assert command.main(tiny_run.overrides(folder, name="cached", train__steps=3)) == 0
    online = tiny_run.config(folder, "data=online", f"data.path={folder / 'responses'}", name="online", train__steps=3)
    arguments = tiny_run.overrides(folder, "data=online", name="online", train__steps=3)
    assert command.main([*arguments, f"data.path={folder / 'responses'}"]) == 0
    losses = [[r["loss"] for r in tracking.read(cfg.folder) if r["kind"] == "train"] for cfg in (cached, online)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_script_does_not_shadow_libraries():
    """Run as a script, its own folder (config.py, engine.py, metrics.py …) is not on the path."""
    script = Path(command.__file__)
    code = f"import runpy, sys; sys.path[0] = {str(script.parent)!r}; sys.argv = ['main.py', '--help']\n"
    code += f"try: runpy.run_path({str(script)!r}, run_name='__main__')\nexcept SystemExit: pass\n"
    code += f"assert {str(script.parent)!r} not in sys.path, sys.path"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    assert "+recipe=" in done.stdout
