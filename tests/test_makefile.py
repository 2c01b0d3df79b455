"""The Makefile runs the commands of the README, from its own environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


def recipe(*arguments: str) -> str:
    """What ``make`` would run."""
    done = subprocess.run(
        ["make", "--dry-run", *arguments], cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_names_no_folder_of_its_own() -> None:
    """``runs/<name>`` then is what training and data derive from the model, which is where evaluation looks."""
    for target in ("cache", "train"):
        assert "target=org/model" in recipe(target, "MODEL=org/model")
        assert "out=" not in recipe(target, "MODEL=org/model")
        assert "out=elsewhere" in recipe(target, "MODEL=org/model", "OUT=elsewhere")


def test_processes_are_one_per_accelerator_and_one_on_a_cpu() -> None:
    launch = next(line for line in recipe("train").splitlines() if "deepspec/train/main.py" in line)
    choice = launch.split("--nproc-per-node ")[1].split(" deepspec/train/main.py")[0]
    here = choice.replace(".venv/bin/python", sys.executable)
    said = subprocess.run(["sh", "-c", f"echo {here}"], capture_output=True, text=True, check=True).stdout.strip()
    assert said == ("gpu" if torch.accelerator.is_available() else "1")
    assert "--nproc-per-node 4 deepspec" in recipe("train", "GPUS=4")


def test_a_cache_is_estimated_before_the_hours_and_keeps_test_sets_out() -> None:
    steps = recipe("cache", "MODEL=org/model", "SUITES=", "GPUS=8")
    order = [steps.index(f"deepspec.data {name} ") for name in ("prompts", "estimate", "regenerate", "cache")]
    assert order == sorted(order)
    assert "decontaminate" not in steps
    assert steps.count("torchrun --standalone --nproc-per-node") == 2
    assert recipe("cache", "SUITES=suites").count("'prompts.decontaminate=[suites]'") == 4


@pytest.mark.parametrize(("processes", "said"), [("1", "python"), ("4", "torchrun --standalone --nproc-per-node 4")])
def test_data_steps_need_a_launcher_for_several_processes_only(processes: str, said: str) -> None:
    line = next(line for line in recipe("cache", f"GPUS={processes}").splitlines() if "regenerate" in line)
    echoed = line.replace("$run -m", "echo $run -m")
    done = subprocess.run(["sh", "-c", echoed], capture_output=True, text=True, check=True).stdout
    assert done.startswith(f".venv/bin/{said} -m deepspec.data regenerate target=qwen3-4b data=perfectblend")
