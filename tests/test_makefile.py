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
