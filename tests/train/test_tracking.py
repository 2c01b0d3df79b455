"""metrics.jsonl is one curve whatever happens; trackers that cannot start cost nothing."""

import json
import math
import sys

from deepspec.train.config import TrackingConfig
from deepspec.train.tracking import Tracker, read

OFF = TrackingConfig(wandb="disabled")


def tracker(folder, step=0, cfg=OFF) -> Tracker:
    return Tracker(cfg, folder, name="dspark", config={"train": {"lr": 1e-3}}, step=step)


def test_records_are_complete_json_lines(tmp_path):
    log = tracker(tmp_path)
    log.log(1, "train", {"loss": 2.0, "acceptance": [0.5, math.nan], "samples": ["a"]})
    log.log(2, "eval", {"loss": math.inf})
    log.close()
    first, second = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["step"], first["kind"], first["loss"], first["acceptance"]) == (1, "train", 2.0, [0.5, None])
    assert first["time"] > 0
    assert second["loss"] is None


def test_a_continued_run_forgets_what_was_after_its_checkpoint(tmp_path):
    log = tracker(tmp_path)
    for step in range(1, 8):
        log.log(step, "train", {"loss": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 8, "kin')  # killed while writing
    log = tracker(tmp_path, step=5)
    log.log(6, "train", {"loss": 60.0})
    log.close()
    assert [(r["step"], r["loss"]) for r in read(tmp_path)] == [*((float(s), float(s)) for s in range(1, 6)), (6, 60.0)]


def test_a_new_run_starts_a_new_file(tmp_path):
    tracker(tmp_path).log(1, "train", {"loss": 1.0})
    tracker(tmp_path).close()
    assert read(tmp_path) == []
    assert read(tmp_path / "nothing") == []


def test_trackers_that_cannot_start_are_reported_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = tracker(tmp_path, cfg=TrackingConfig(wandb="offline", tensorboard=True))
    log.log(1, "train", {"loss": 1.0})
    log.close()
    assert read(tmp_path)[0]["loss"] == 1.0
    said = capsys.readouterr().err
    assert "wandb is off" in said
    assert "TensorBoard is off" in said


def test_wandb_gets_numbers_with_positions_named(tmp_path, monkeypatch):
    logged = []

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            logged.append("finished")

    started = {}

    class Module:
        Settings = staticmethod(lambda **options: options)

        @staticmethod
        def init(**options):
            started.update(options)
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log = tracker(tmp_path, cfg=TrackingConfig())
    log.log(3, "train", {"loss": 1.0, "acceptance": [0.5, 0.25], "samples": ["a"]})
    log.close()
    assert started["mode"] == "offline"
    assert logged == [(3, {"train/loss": 1.0, "train/acceptance/1": 0.5, "train/acceptance/2": 0.25}), "finished"]


def test_a_real_offline_wandb_run_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = tracker(tmp_path, cfg=TrackingConfig())
    log.log(1, "train", {"loss": 1.0})
    log.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
