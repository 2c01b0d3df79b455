"""The training loop: read a global step, sum its gradients, update, and every so often log, evaluate and save.

Knows neither how batches are made nor how DeepSpeed works. A step waits for the device once, for its gradient norm.
"""

import math
import signal
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspec import distributed
from deepspec.data.batch import DraftBatch
from deepspec.models import drafter as drafters
from deepspec.train import checkpoint, evaluation, metrics
from deepspec.train.checkpoint import Progress
from deepspec.train.engine import MOMENTS, Engine
from deepspec.train.metrics import Meter, Pace, Value
from deepspec.train.objectives import denominators
from deepspec.train.schedule import factor
from deepspec.train.setup import Prepared
from deepspec.train.tracking import Tracker

_PREFIX = "drafter."  # of parameter names inside Objective


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a non-finite gradient; the message names the samples."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``stopped`` is "finished", "early" (no gain), "asked" (train.stop_after) or "signal"."""

    step: int
    total: int
    best_tau: float | None
    stopped: str


class Trainer:
    """One run of one drafter on this rank."""

    def __init__(self, prepared: Prepared, engine: Engine, tracker: Tracker | None, identity: dict[str, Any]) -> None:
        self.cfg, self.run, self.optim = prepared.cfg, prepared.cfg.train, prepared.cfg.optim
        self.prepared, self.engine, self.tracker = prepared, engine, tracker
        self.loader, self.total = prepared.loader, prepared.total_steps
        self.folder = Path(self.cfg.folder)
        state = prepared.state
        self.progress = Progress(identity=identity) if state is None else state.progress
        self.averages: dict[str, torch.Tensor] | None = None
        if self.optim.ema is not None:
            kept = {} if state is None else state.kind("ema")
            self.averages = {
                name: kept[name].to(engine.device) if name in kept else parameter.detach().float().clone()
                for name, parameter in self._trained()
            }
        if state is not None:
            engine.restore(lambda kind, name: state.tensor(kind, name.removeprefix(_PREFIX)), self.progress.adam_steps)
        self.meter, self.pace = Meter(), Pace()
        self._lr = self._grad_norm = self._waited = 0.0
        self._failed: list[list[str]] = []
        self._signal = 0

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        found = self.engine.module.named_parameters()
        return [(name.removeprefix(_PREFIX), parameter) for name, parameter in found if parameter.requires_grad]

    def train(self) -> Outcome:
        """Go on from ``progress.step`` to the end, ``train.stop_after`` or a signal; each saves the state."""
        last = self.total if self.run.stop_after is None else min(self.total, self.run.stop_after)
        stopped = "finished" if last == self.total else "asked"
        with self._signals():
            for micros in self.loader.batches(self.progress.step, last):
                self._step(micros)
                step = self.progress.step
                if step % self.run.log_every == 0 or step == last:
                    self._log()
                with self._paused():
                    early = self._evaluate_if_due(step)
                    signalled = self._signalled()
                    if early or signalled:
                        stopped = "signal" if signalled else "early"
                    self.progress.finished = step == self.total or early
                    if early or signalled or step == last or _due(step, self.run.save_every):
                        self._save_last()
                    if _due(step, self.run.keep_every):
                        self._save_weights(f"step-{step}")
                if early or signalled:
                    break
        return Outcome(self.progress.step, self.total, self.progress.best_tau, stopped)

    def _step(self, micros: Sequence[DraftBatch]) -> None:
        """One optimizer step on a global batch: denominators first, then forward and backward of each micro batch."""
        device = self.engine.device
        batches = [batch.to(device, self.engine.dtype, non_blocking=True) for batch in micros]
        counts = [denominators(batch, self.cfg.drafter, self.cfg.loss) for batch in batches]
        denominator = distributed.sum_across_ranks(torch.stack(counts).sum())
        for index, batch in enumerate(batches):
            loss, values = self.engine.forward(batch, denominator, last=index == len(batches) - 1)
            self.engine.backward(loss)
            self.meter.add(values)
        self._lr = self.run.lr * factor(
            self.progress.step,
            self.total,
            schedule=self.optim.schedule,
            warmup=self.optim.warmup,
            decay=self.optim.decay,
            final=self.optim.final,
        )
        result = self.engine.step(self._lr)
        self.progress.step += 1
        self._grad_norm = result.grad_norm
        ids = [id for batch in micros for id in batch.ids]
        self.pace.count(sum(int((batch.segments_BS >= 0).sum()) for batch in micros), len(ids))
        self._note(result.applied, ids)

    def _note(self, applied: bool, ids: list[str]) -> None:
        """Count an applied or skipped step; raise NonFiniteError after ``train.max_skips`` skipped ones in a row."""
        if applied:
            self.progress.adam_steps += 1
            self._failed.clear()
            if self.averages is not None:
                self._average(float(self.optim.ema or 0.0))
            return
        self.progress.skipped += 1
        self._failed.append(ids)
        self._record("skip", {"grad_norm": self._grad_norm, "samples": ids[:64]})
        self._say(f"step {self.progress.step}: gradient is not finite, update skipped")
        if len(self._failed) >= self.run.max_skips:
            shown = ", ".join(id for step in self._failed[-3:] for id in step[:8])
            raise NonFiniteError(
                f"{len(self._failed)} steps in a row had a non-finite gradient, up to step {self.progress.step}. "
                f"Samples of this rank in the last of them: {shown}. Check the data with `python -m deepspec.data "
                f"verify`, or lower train.lr={self.run.lr:g}; {self.folder}/last is the state before"
            )

    @torch.no_grad()
    def _average(self, decay: float) -> None:
        assert self.averages is not None
        for name, parameter in self._trained():
            self.averages[name].lerp_(parameter.float(), 1.0 - decay)

    def _log(self) -> None:
        waited = self.loader.wait_seconds - self._waited
        self._waited = self.loader.wait_seconds
        values: dict[str, Value] = {
            **self.meter.reduce(self.engine.device),
            **self.pace.lap(waited, self.total - self.progress.step, self.engine.device),
            "lr": self._lr,
            "grad_norm": self._grad_norm,
            "skipped": float(self.progress.skipped),
            "memory_gb": peak_memory() / 1e9,
        }
        self._record("train", values)
        self._say(metrics.line(self.progress.step, self.total, values))

    def _evaluate_if_due(self, step: int) -> bool:
        """Held-out metrics and the train-versus-decode gate where due; True when the run should stop early."""
        ends = step == self.total
        decode = _due(step, self.run.decode_every) or (ends and self.run.decode_every > 0)
        if not (_due(step, self.run.eval_every) or (ends and self.run.eval_every > 0) or decode):
            return False
        values = evaluation.heldout(self.engine, self.loader)
        if not values:
            return False
        self._record("eval", values)
        tau = values["tau"]
        assert isinstance(tau, float)
        better = math.isfinite(tau) and (self.progress.best_tau is None or tau > self.progress.best_tau)
        self._say(f"held-out  {metrics.line(step, self.total, values)}{'  (best so far)' if better else ''}")
        self.progress.stale = 0 if better else self.progress.stale + 1
        if better or decode:
            self.progress.best_tau = tau if better else self.progress.best_tau
            self._save_weights("best" if better else "last-decoded")
        if decode:
            self._gate(tau, "best" if better else "last-decoded")
        if self.run.early_stop and self.progress.stale >= self.run.early_stop:
            self._say(f"no better expected τ in {self.progress.stale} evaluations: stopping early")
            return True
        return False

    def _gate(self, expected: float, name: str) -> None:
        """Decode held-out prompts with the weights just saved and compare with the training forward (traps.md 5)."""
        target = self.prepared.target
        if distributed.is_main() and target is not None:
            prompts = evaluation.heldout_prompts(self.loader, self.run.decode_prompts)
            decoded = evaluation.decoded_tau(
                target, self.folder / name, prompts, max_new_tokens=self.run.decode_tokens, seed=self.run.seed
            )
            self._record("decode", {"tau": decoded, "expected_tau": expected})
            self._say(f"decoded τ {decoded:.3f}, expected τ {expected:.3f}")
            if (warning := evaluation.gate(decoded, expected, self.run.decode_bound)) is not None:
                self._say(warning)
        distributed.barrier()

    def _export(self, kinds: Sequence[str]) -> dict[str, torch.Tensor]:
        """fp32 tensors by "<kind>/<parameter>" on the main rank, {} elsewhere. Collective."""
        tensors = {}
        for kind, name, tensor in self.engine.export():
            if distributed.is_main() and kind in kinds:
                tensors[f"{kind}/{name.removeprefix(_PREFIX)}"] = tensor.detach().to("cpu", torch.float32, copy=True)
        if distributed.is_main() and self.averages is not None:
            tensors |= {f"ema/{name}": value.to("cpu", copy=True) for name, value in self.averages.items()}
        return tensors

    def _save_drafter(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        """The drafter with its averages, else its fp32 master weights."""
        drafter = self.prepared.drafter
        kind = "master" if self.averages is None else "ema"
        state = drafter.state_dict()
        state |= {key.removeprefix(f"{kind}/"): value for key, value in tensors.items() if key.startswith(f"{kind}/")}
        drafters.save(
            drafter,
            folder,
            state=state,
            target_name=self.cfg.target.name,
            target_fingerprint=self.prepared.target_fingerprint,
            thinking=self.cfg.target.thinking,
            provenance={"step": self.progress.step, "data": self.cfg.data.path, "seed": self.run.seed},
        )

    def _save_last(self) -> None:
        tensors = self._export(("master", *MOMENTS))
        if distributed.is_main():
            checkpoint.write_last(
                self.folder, self.progress, tensors, lambda folder: self._save_drafter(folder, tensors)
            )
        distributed.barrier()

    def _save_weights(self, name: str) -> None:
        tensors = self._export(("master",))
        if distributed.is_main():
            checkpoint.write_weights(self.folder, name, lambda folder: self._save_drafter(folder, tensors))
            checkpoint.retain(self.folder, self.run.keep)
        distributed.barrier()

    @contextmanager
    def _signals(self):
        """First SIGINT or SIGTERM: finish the step, save, leave. A second one takes effect at once."""

        def note(number: int, _frame: Any) -> None:
            self._signal = number
            for which, handler in before.items():
                signal.signal(which, handler)
            self._say("stopping after this step; the state is saved (once more to stop at once)")

        which = (signal.SIGINT, signal.SIGTERM)
        before: dict[int, Any] = {number: signal.signal(number, note) for number in which}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self) -> bool:
        """Whether any rank got a signal. Collective."""
        return bool(distributed.sum_across_ranks(torch.tensor(float(self._signal), device=self.engine.device)))

    @contextmanager
    def _paused(self):
        began = time.perf_counter()
        yield
        self.pace.pause(time.perf_counter() - began)

    def _record(self, kind: str, values: dict[str, Any]) -> None:
        if self.tracker is not None:
            self.tracker.log(self.progress.step, kind, values)

    @staticmethod
    def _say(text: str) -> None:
        if distributed.is_main():
            print(text, flush=True)


def peak_memory() -> float:
    """Largest memory of this process so far in bytes: the accelerator's, or resident memory on a CPU."""
    if torch.accelerator.is_available():
        return float(torch.accelerator.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
