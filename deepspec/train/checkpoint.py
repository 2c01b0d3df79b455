"""Checkpoint folders: the drafter in its published layout, and beside it the training state of any world size.

    last/config.json, last/model.safetensors     the drafter
    last/training/state.safetensors              fp32 master weights and moments, "<kind>/<parameter>"
    last/training/progress.json                  step, best, identity of the run
Written beside, synced, then renamed; nothing is pickled. Knows no DeepSpeed: tensors come whole.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspec import distributed
from deepspec.files import atomic_write, read_json, write_json

FORMAT_VERSION = 1
LAST, BEST, TRAINING = "last", "best", "training"
STATE, PROGRESS = "state.safetensors", "progress.json"


class ResumeError(ValueError):
    """A run that cannot be continued as asked; the message names what differs and the remedy."""


@dataclass
class Progress:
    """Where a run is. Everything random in training is drawn from (seed, epoch, sample id), so there is no generator
    state to keep: the step alone says which samples and anchors come next.

    identity holds what must not change between the parts of one run (train/identity.py); total is the length that a
    finished run had, which a longer ``train.steps`` takes up again; ema_updates is the age of the moving average, which
    may have been turned on after the first step.
    """

    step: int = 0
    adam_steps: int = 0
    ema_updates: int = 0
    best_tau: float | None = None
    stale: int = 0
    skipped: int = 0
    finished: bool = False
    total: int = 0
    identity: dict[str, Any] = field(default_factory=dict)


class TrainingState:
    """A checkpoint's training part, read tensor by tensor."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        from safetensors import safe_open

        self.progress = progress
        self._file: Any = safe_open(folder / STATE, framework="pt")
        self.names = set(self._file.keys())

    def tensor(self, kind: str, name: str) -> torch.Tensor:
        """Master weight ("master"), moment ("exp_avg", "exp_avg_sq") or average ("ema") of a parameter, on the CPU."""
        return self._file.get_tensor(f"{kind}/{name}")

    def kind(self, kind: str) -> dict[str, torch.Tensor]:
        """All tensors of a kind by parameter name."""
        prefix = f"{kind}/"
        return {n.removeprefix(prefix): self._file.get_tensor(n) for n in sorted(self.names) if n.startswith(prefix)}


def read(run: str | Path) -> TrainingState | None:
    """The training state of ``<run>/last``, or None for a new run; every rank calls it.

    Heals a rename that was cut in half. Raises ResumeError for a damaged or newer one.
    """
    last = Path(run) / LAST
    if distributed.is_main():
        recover(last)
    distributed.barrier()
    folder = last / TRAINING
    if not (folder / PROGRESS).is_file():
        return None
    plain = read_json(folder / PROGRESS)
    version = plain.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ResumeError(f"{folder / PROGRESS} has format_version {version}, this deepspec reads {FORMAT_VERSION}")
    # Earlier versions had no count of their own: their averages had run from the first step.
    plain.setdefault("ema_updates", plain.get("adam_steps", 0))
    try:
        return TrainingState(folder, Progress(**plain))
    except Exception as error:
        raise ResumeError(
            f"{folder} is damaged ({error}): delete {last} to start again, or name=… for another run"
        ) from error


def write_last(
    run: str | Path, progress: Progress, tensors: Mapping[str, torch.Tensor], save_drafter: Callable[[Path], None]
) -> None:
    """Replace ``<run>/last`` by drafter and training state."""
    from safetensors.torch import save_file

    def fill(folder: Path) -> None:
        save_drafter(folder)
        training = folder / TRAINING
        with atomic_write(training / STATE) as temporary:
            save_file(dict(tensors), temporary)
        write_json(training / PROGRESS, {"format_version": FORMAT_VERSION, **dataclasses.asdict(progress)})

    replace(Path(run) / LAST, fill)


def write_weights(run: str | Path, name: str, save_drafter: Callable[[Path], None]) -> None:
    """Replace ``<run>/<name>`` (best, step-N) by the drafter alone."""
    replace(Path(run) / name, save_drafter)


def retain(run: str | Path, keep: int) -> None:
    """Delete all but the newest ``keep`` step-N folders."""
    steps = sorted(
        (folder for folder in Path(run).glob("step-*") if folder.name.removeprefix("step-").isdigit()),
        key=lambda folder: int(folder.name.removeprefix("step-")),
    )
    for folder in steps[: max(len(steps) - keep, 0)]:
        shutil.rmtree(folder)


def replace(final: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a folder beside ``final``, then swap it in. Killed at any point, ``recover`` finds either the
    old folder or the new one."""
    temporary, previous = _beside(final)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    fill(temporary)
    recover(final)
    shutil.rmtree(previous, ignore_errors=True)
    if previous.exists():  # a network file system keeps the name of a file that someone still reads
        previous.rename(previous.with_name(f"{previous.name}-{time.time_ns()}"))
    if final.exists():
        final.rename(previous)
    temporary.rename(final)
    shutil.rmtree(previous, ignore_errors=True)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def recover(final: Path) -> None:
    """Put the previous folder back if a swap was killed between its two renames."""
    _, previous = _beside(final)
    if previous.exists() and not final.exists():
        previous.rename(final)


def _beside(final: Path) -> tuple[Path, Path]:
    return final.parent / f".{final.name}.tmp", final.parent / f".{final.name}.previous"
