"""Folders are whole at any time, states come back, and another run is not continued by mistake."""

import json

import pytest
import torch

from deepspec.train import checkpoint
from deepspec.train.checkpoint import Progress, ResumeError

TENSORS = {"master/a.weight": torch.arange(6.0).reshape(2, 3), "exp_avg/a.weight": torch.ones(2, 3)}


def drafter(text: str):
    return lambda folder: (folder / "config.json").write_text(text)


def test_a_state_comes_back_tensor_by_tensor(tmp_path):
    progress = Progress(step=7, adam_steps=6, best_tau=2.5, stale=1, skipped=1, identity={"drafter.layers": 5})
    checkpoint.write_last(tmp_path, progress, TENSORS, drafter("{}"))
    state = checkpoint.read(tmp_path)
    assert state is not None
    assert state.progress == progress
    assert torch.equal(state.tensor("master", "a.weight"), TENSORS["master/a.weight"])
    assert list(state.kind("exp_avg")) == ["a.weight"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last"]
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".pt", ".pkl", ".bin")]


def test_no_checkpoint_is_a_new_run(tmp_path):
    assert checkpoint.read(tmp_path) is None


def test_a_failed_write_leaves_the_old_folder(tmp_path):
    checkpoint.write_weights(tmp_path, "best", drafter("old"))

    def fails(folder):
        (folder / "config.json").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.write_weights(tmp_path, "best", fails)
    assert (tmp_path / "best" / "config.json").read_text() == "old"
    checkpoint.write_weights(tmp_path, "best", drafter("new"))
    assert (tmp_path / "best" / "config.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


def test_a_swap_killed_between_its_renames_is_healed(tmp_path):
    checkpoint.write_last(tmp_path, Progress(step=3), TENSORS, drafter("{}"))
    (tmp_path / "last").rename(tmp_path / ".last.previous")
    state = checkpoint.read(tmp_path)
    assert state is not None
    assert state.progress.step == 3
    (tmp_path / "last").rename(tmp_path / ".last.previous")
    checkpoint.write_last(tmp_path, Progress(step=4), TENSORS, drafter("{}"))
    assert checkpoint.read(tmp_path).progress.step == 4  # type: ignore[union-attr]
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_an_average_saved_without_its_age_ran_from_the_first_step(tmp_path):
    checkpoint.write_last(tmp_path, Progress(step=9, adam_steps=8, ema_updates=3), TENSORS, drafter("{}"))
    assert checkpoint.read(tmp_path).progress.ema_updates == 3  # type: ignore[union-attr]
    file = tmp_path / "last" / "training" / "progress.json"
    older = {name: value for name, value in json.loads(file.read_text()).items() if name != "ema_updates"}
    file.write_text(json.dumps(older))
    assert checkpoint.read(tmp_path).progress.ema_updates == 8  # type: ignore[union-attr]


def test_damage_and_newer_formats_are_named(tmp_path):
    checkpoint.write_last(tmp_path, Progress(), TENSORS, drafter("{}"))
    state = tmp_path / "last" / "training" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:20])
    with pytest.raises(ResumeError, match="damaged"):
        checkpoint.read(tmp_path)
    progress = tmp_path / "last" / "training" / "progress.json"
    progress.write_text(progress.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ResumeError, match="format_version 2"):
        checkpoint.read(tmp_path)


def test_retention_keeps_the_newest(tmp_path):
    for step in (5, 10, 100, 20):
        checkpoint.write_weights(tmp_path, f"step-{step}", drafter("x"))
    (tmp_path / "step-notes").mkdir()
    checkpoint.retain(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-100", "step-20", "step-notes"]
    checkpoint.retain(tmp_path, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["step-notes"]


def test_a_previous_folder_that_cannot_be_deleted_is_moved_aside(tmp_path, monkeypatch):
    """A network file system keeps it while someone reads a file in it."""
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
    for step in range(3):
        checkpoint.replace(tmp_path / "last", lambda folder, step=step: (folder / "x").write_text(str(step)))
        (tmp_path / ".last.tmp").mkdir(exist_ok=True)
        (tmp_path / ".last.tmp").rmdir()
    assert (tmp_path / "last" / "x").read_text() == "2"
