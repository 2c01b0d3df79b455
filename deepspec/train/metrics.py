"""Sums of numerators and denominators on the device, read once per log interval. Knows no step and no output."""

import math
import time
from collections.abc import Mapping

import torch

from deepspec import distributed

Value = float | list[float]


class Meter:
    """Adds (numerator, denominator) pairs, shape [2] or [2, G], without reading them back."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, pairs: Mapping[str, torch.Tensor]) -> None:
        """Add the metrics of one micro batch."""
        for name, pair in pairs.items():
            pair = pair.detach()
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def count(self, name: str, numerator: float, denominator: float = 1.0) -> None:
        """Add host numbers."""
        self.add({name: torch.tensor([numerator, denominator], dtype=torch.float64)})

    def reduce(self, device: torch.device) -> dict[str, Value]:
        """The ratios over everything added since the last call, on all ranks: one collective and one read-back.

        Names must be the same on every rank. A ratio without a denominator is NaN.
        """
        names = sorted(self._sums)
        if not names:
            return {}
        kind = torch.float64 if device.type != "mps" else torch.float32
        flat = torch.cat([self._sums[name].flatten().to(device, kind) for name in names])
        numbers = distributed.sum_across_ranks(flat).tolist()
        values: dict[str, Value] = {}
        for name in names:
            shape = self._sums[name].shape
            size = shape[1] if len(shape) > 1 else 1
            top, bottom = numbers[:size], numbers[size : 2 * size]
            numbers = numbers[2 * size :]
            ratios = [a / b if b else math.nan for a, b in zip(top, bottom, strict=True)]
            values[name] = ratios if len(shape) > 1 else ratios[0]
        self._sums.clear()
        return values


class Pace:
    """Speed of the training steps alone: time spent in evaluations and checkpoints is taken out."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._paused = 0.0
        self._steps = self._tokens = self._samples = 0
        self._seconds_per_step: float | None = None

    def count(self, tokens: int, samples: int) -> None:
        """One step of this rank."""
        self._steps += 1
        self._tokens += tokens
        self._samples += samples

    def pause(self, seconds: float) -> None:
        """Leave this time out of the speeds."""
        self._paused += seconds

    def lap(self, wait: float, left: int, device: torch.device) -> dict[str, float]:
        """Speeds over all ranks since the last lap; ``wait`` are this rank's seconds spent waiting for data,
        ``left`` the steps still to do."""
        seconds = max(time.perf_counter() - self._began - self._paused, 1e-9)
        mine = torch.tensor([self._tokens, self._samples, wait / seconds, 1.0], dtype=torch.float32, device=device)
        tokens, samples, waits, ranks = distributed.sum_across_ranks(mine).tolist()
        recent = seconds / max(self._steps, 1)
        past = self._seconds_per_step
        self._seconds_per_step = recent if past is None else 0.7 * past + 0.3 * recent
        self._began, self._paused = time.perf_counter(), 0.0
        self._steps = self._tokens = self._samples = 0
        return {
            "tokens_per_s": tokens / seconds,
            "samples_per_s": samples / seconds,
            "seconds_per_step": recent,
            "loader_wait": waits / ranks,
            "eta_s": self._seconds_per_step * left,
        }


def line(step: int, total: int, values: Mapping[str, Value]) -> str:
    """One console line of a log interval."""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for name, label, form in (("loss", "loss", ".4f"), ("tau", "τ", ".3f")):
        if name in values:
            parts.append(f"{label} {values[name]:{form}}")
    acceptance = values.get("acceptance")
    if isinstance(acceptance, list):
        parts.append("accept " + " ".join(f"{100 * share:.0f}" for share in acceptance if share == share) + " %")
    if "lr" in values:
        parts.append(f"lr {values['lr']:.2e}")
    if "grad_norm" in values:
        parts.append(f"|g| {values['grad_norm']:.2f}")
    if isinstance(speed := values.get("tokens_per_s"), float):
        parts.append(f"{speed / 1000:.2f}k tok/s")
    if isinstance(wait := values.get("loader_wait"), float):
        parts.append(f"wait {100 * wait:.0f} %")
    if isinstance(eta := values.get("eta_s"), float):
        parts.append(f"ETA {clock(eta)}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
