"""Several processes under torchrun, with gloo: the same curve at any world size, killed and continued. Slow."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from deepspec.data.responses import read_responses
from deepspec.train import checkpoint, tracking
from tests.train import tiny_run

pytestmark = pytest.mark.slow
MAIN = Path(checkpoint.__file__).with_name("main.py")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(MAIN.parents[2])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_run.make(tmp_path_factory.mktemp("tiny"))


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(ranks: int, arguments: list[str], *launcher: str) -> subprocess.Popen:
    # its own rendezvous on a port that the launcher keeps from the moment it chose it
    options = launcher or ("--standalone", "--local-addr", "127.0.0.1")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *options, str(MAIN)]
    return subprocess.Popen(
        [*command, *arguments], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen, timeout: float = 240) -> str:
    said, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, said
    return said


def curve(cfg) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in tracking.read(cfg.folder) if record["kind"] == "train"}


def weights(cfg) -> dict[str, torch.Tensor]:
    state = checkpoint.read(cfg.folder)
    assert state is not None
    return state.kind("master")


def whole(folder: Path, name: str, ranks: int = 1, **changes):
    cfg = tiny_run.config(folder, name=name, **changes)
    finish(launch(ranks, tiny_run.overrides(folder, name=name, **changes)))
    return cfg


def wait_for_step(cfg, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if max(curve(cfg), default=0) >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def workers(process: subprocess.Popen) -> list[int]:
    """Process ids of the ranks, which torchrun starts in sessions of their own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "main.py" in Path(f"/proc/{pid}/cmdline").read_text()]


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to the launcher and every rank."""
    for pid in [process.pid, *workers(process)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def test_killed_on_one_two_and_one_ranks_it_is_the_same_run(folder):
    options = {"train__steps": 60, "train__save_every": 5, "data__global_batch": 3}
    right = whole(folder, "right", **options)
    cfg = tiny_run.config(folder, name="cut", **options)
    for ranks, until in ((1, 12), (2, 33)):
        process = launch(ranks, tiny_run.overrides(folder, name="cut", **options))
        wait_for_step(cfg, until, process)
        kill(process)
        state = checkpoint.read(cfg.folder)
        assert state is not None
        assert until - 8 <= state.progress.step < 60
    said = finish(launch(1, tiny_run.overrides(folder, name="cut", **options)))
    assert "continuing" in said
    assert sorted(curve(cfg)) == list(range(1, 61))
    assert curve(cfg) == pytest.approx(curve(right), rel=2e-4)
    for name, value in weights(right).items():
        torch.testing.assert_close(weights(cfg)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_of_any_stage_equal_one(folder, stage):
    """The first steps; micro batches differ in number and size, and one sample leaves a rank with nothing to do.

    Stage 2 also recomputes the layers.
    """
    options = {"train__steps": 4, "data__global_batch": 3}
    one = curve(tiny_run.config(folder, name="one", **options)) or curve(whole(folder, "one", **options))
    two = whole(folder, f"two-zero{stage}", 2, engine__zero=stage, engine__recompute=stage == 2, **options)
    assert curve(two) == pytest.approx(one, rel=1e-4)
    state = json.loads((Path(two.folder) / "last" / "training" / "progress.json").read_text())
    assert (state["step"], state["adam_steps"], state["finished"]) == (4, 4, True)


def test_sigterm_to_the_launcher_saves_on_every_rank_and_says_how_to_continue(folder):
    cfg = tiny_run.config(folder, name="term", train__steps=5000)
    process = launch(2, tiny_run.overrides(folder, name="term", train__steps=5000))
    wait_for_step(cfg, 3, process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert "SIGTERM: saved in" in said
    assert "goes on from there" in said
    state = checkpoint.read(cfg.folder)
    assert state is not None
    assert state.progress.step >= 3


def test_a_rank_that_dies_ends_the_job_and_the_run_can_go_on(folder):
    options = {"train__steps": 400, "train__save_every": 2}
    cfg = tiny_run.config(folder, name="dies", **options)
    process = launch(2, tiny_run.overrides(folder, name="dies", **options))
    wait_for_step(cfg, 4, process)
    os.kill(workers(process)[-1], signal.SIGKILL)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert process.returncode != 0
    state = checkpoint.read(cfg.folder)
    assert state is not None
    assert state.progress.step >= 2


def test_two_ranks_share_the_prompts_and_train_on_the_same_samples(folder):
    answers, curves = [], []
    for ranks in (1, 2):
        out = folder / f"prompts{ranks}"
        tiny_run.write_prompts(out, 14)
        given = tiny_run.overrides(
            folder, "data=prompts", f"data.path={out}/responses", f"out={out}", "regenerate.max_new_tokens=12",
            "regenerate.temperature=1.0", train__steps=3,
        )  # fmt: skip
        said = finish(launch(ranks, given))
        assert said.count("answered") == ranks
        answers.append({row.id: row.tokens for row in read_responses(out / "responses")})
        records = tracking.read(out / "drafters" / "dspark")
        curves.append([record["loss"] for record in records if record["kind"] == "train"])
    assert len(answers[0]) == 14
    assert answers[0] == answers[1]
    assert len(curves[0]) == 3
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_two_nodes_meet_at_a_rendezvous(folder):
    """Two launchers on loopback, one process each, as two nodes with a c10d rendezvous."""
    options = {"train__steps": 3}
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port()}", "--rdzv-id", "t"]
    arguments = tiny_run.overrides(folder, name="nodes", **options)
    nodes = [launch(1, arguments, *meeting, "--local-addr", "127.0.0.1") for _ in range(2)]
    said = [finish(node) for node in nodes]
    assert sum("2 × cpu" in text for text in said) == 1
    cfg = tiny_run.config(folder, name="nodes", **options)
    assert sorted(curve(cfg)) == [1, 2, 3]
