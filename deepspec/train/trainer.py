"""The training loop: denominators, micro batches, step; log, evaluate, save. Knows no files' formats, no recipes."""

import contextlib
import dataclasses
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deepspec import distributed
from deepspec.data.batch import DraftBatch
from deepspec.models import drafter as drafters
from deepspec.models.decode import prompt_problem
from deepspec.models.target import Target
from deepspec.train import checkpoint, evaluation, metrics, plan
from deepspec.train.average import Average
from deepspec.train.checkpoint import BEST, LAST, Progress
from deepspec.train.engine import Engine
from deepspec.train.objectives import denominators
from deepspec.train.schedule import factor
from deepspec.train.setup import Prepared, same_on_all_ranks
from deepspec.train.tracking import Tracker


class NonFiniteError(RuntimeError):
    """Too many steps in a row with a non-finite loss or gradient; the message names the samples."""


class Interrupted(Exception):
    """A signal ended the run after it was saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Trainer:
    """One run from its first (or next) step to its last, on every rank alike."""

    def __init__(self, run: Prepared) -> None:
        self.run, self.cfg, self.loader = run, run.cfg, run.loader
        self.engine = Engine(run.objective, self.cfg.engine, self.cfg.optim, run.device)
        self.module: Any = self.engine.module
        self.progress = Progress(identity=run.identity)
        self.average = None if self.cfg.optim.ema is None else Average(run.drafter, self.cfg.optim.ema)
        same_on_all_ranks(run)
        if run.state is not None:
            self._resume(run.state)
            run.state = None  # its file is not held open: it will be replaced
        self.total = run.total_steps
        self.plan = plan.make(run, distributed.world_size())
        self.meter, self.pace = metrics.Meter(), metrics.Pace()
        self.tracker: Tracker | None = None
        self.bad_in_a_row = 0
        self.signal: int | None = None  # what this rank got
        self.stop: int | None = None  # what all ranks have agreed on: the one to act upon
        self.expected_tau: float | None = None
        self.evaluated_step = -1

    def fit(self) -> Progress:
        """Train to the end of the schedule, or to ``train.stop_after``.

        Raises Interrupted after a signal (saved), NonFiniteError after ``train.max_skips`` bad steps in a row.
        """
        stop = min(self.total, self.cfg.train.stop_after or self.total)
        say(plan.table(self.run, self.plan, distributed.world_size()))
        ended = self.progress.finished and self.total <= (self.progress.total or self.total)
        if ended or self.progress.step >= stop:
            say(f"{self.cfg.folder} is complete at step {self.progress.step}: nothing to do")
            return self.progress
        if self.progress.finished:  # lengthened: early stopping begins anew
            self.progress.finished, self.progress.stale = False, 0
        self._open_tracker()
        complete = stop == self.total
        with self._signals(), closing(self.loader.batches(self.progress.step, stop)) as steps:
            for batches in steps:
                before = self.progress.step
                self.step(batches)
                if self.progress.step == before and self.stop is not None:
                    self.save()
                    raise Interrupted(self.stop)
                self._due()
                if self.cfg.train.early_stop and self.progress.stale >= self.cfg.train.early_stop:
                    say(f"no better expected τ in {self.progress.stale} evaluations: stopping early")
                    complete = True
                    break
        self._finish(complete=complete)
        return self.progress

    def dry_run(self) -> None:
        """One real step on real data, no checkpoint written."""
        say(plan.table(self.run, self.plan, distributed.world_size()))
        with closing(self.loader.batches(0, 1)) as steps:
            for batches in steps:
                self.step(batches)
        lap = self.pace.lap(0.0, self.total - 1, self.engine.device)
        say(metrics.line(1, self.total, {**self.meter.reduce(self.engine.device), **lap}))
        say(
            f"dry run: everything fits, one real step took {lap['seconds_per_step']:.1f} s, no checkpoint was written. "
            "Remove train.dry_run to train."
        )

    def step(self, batches: list[DraftBatch]) -> None:
        """One global step: Σw of the whole global batch first, then every micro batch, then the update.

        A signal gives it up between two micro batches, before anything has changed, where there is one process: that
        need not agree with others, and its steps are the long ones, longer than a launcher waits before it kills.
        """
        step, lr = self.progress.step, self.learning_rate(self.progress.step)
        total = self.denominator(batches)
        losses, measured = [], []
        for index, batch in enumerate(batches):
            if index and self.stop is not None:
                return
            moved = batch.to(self.engine.device, self.engine.dtype, non_blocking=True)
            loss, values = self.engine.forward(moved, total, last=index == len(batches) - 1)
            self.engine.backward(loss)
            losses.append(loss.detach())
            measured.append(values)
        loss_sum, signals = self._agree(losses)
        result = self.engine.step(lr, skip=not _finite(loss_sum))
        self.progress.step = step + 1
        self.pace.count(sum(int((batch.segments_BS >= 0).sum()) for batch in batches), sum(len(b.ids) for b in batches))
        if result.applied:
            self.bad_in_a_row = 0
            for values in measured:
                self.meter.add(values)
            self.meter.count("grad_norm", result.grad_norm)
            if self.average is not None:
                self.average.update()
        else:
            self._skip(batches, losses, loss_sum, result.grad_norm)
        if signals:
            self.stop = self.signal or int(signal.SIGTERM)

    def denominator(self, batches: list[DraftBatch]) -> torch.Tensor:
        """Σw over all micro batches of all ranks, on the device."""
        config, weights = self.run.drafter.config, self.cfg.loss
        own = torch.stack([denominators(batch, config, weights) for batch in batches]).sum()
        return distributed.sum_across_ranks(own.to(self.engine.device))

    def learning_rate(self, step: int) -> float:
        """Of the 0-based step."""
        optim = self.cfg.optim
        share = factor(
            step,
            self.run.total_steps,
            schedule=optim.schedule,
            warmup=optim.warmup,
            decay=optim.decay,
            final=optim.final,
        )
        return self.cfg.train.lr * share

    def _agree(self, losses: list[torch.Tensor]) -> tuple[float, float]:
        """Global loss and number of ranks that got a signal: the one read-back of a step, after its last backward, so
        that every rank skips, or stops, at the same step."""
        mine = torch.stack([torch.stack(losses).float().sum(), losses[0].new_tensor(float(self.signal is not None))])
        loss, signals = distributed.sum_across_ranks(mine.float()).tolist()
        return loss, signals

    def _skip(self, batches: list[DraftBatch], losses: list[torch.Tensor], loss: float, grad_norm: float) -> None:
        self.progress.skipped += 1
        self.bad_in_a_row += 1
        own = [
            id for batch, value in zip(batches, losses, strict=True) if not _finite(float(value)) for id in batch.ids
        ]
        own = own or [id for batch in batches for id in batch.ids]
        ids = sorted(distributed.gathered(own))
        self._log("skip", {"loss": loss, "grad_norm": grad_norm, "samples": ids[:32]})
        say(f"step {self.progress.step}: loss {loss}, gradient norm {grad_norm}: update skipped; samples {_some(ids)}")
        if self.bad_in_a_row >= self.cfg.train.max_skips:
            raise NonFiniteError(
                f"{self.bad_in_a_row} steps in a row had a non-finite loss or gradient (train.max_skips), the last one "
                f"on samples {_some(ids)}: inspect these rows of {self.cfg.data.path}, or lower train.lr. "
                f"{self.cfg.folder}/{LAST} holds the last saved state"
            )

    def _due(self) -> None:
        """What this step number calls for, in the order that a reader of the log expects."""
        cfg, step = self.cfg.train, self.progress.step
        if step % cfg.log_every == 0 or step == self.total:
            self._log_interval()
        began = time.perf_counter()
        last = step == self.total
        if cfg.eval_every and step % cfg.eval_every == 0 and not last:
            self.evaluate()
        if cfg.keep_every and step % cfg.keep_every == 0:
            self._save_weights(f"step-{step}")
            if distributed.is_main():
                checkpoint.retain(self.cfg.folder, cfg.keep)
        decode = bool(cfg.decode_every and step % cfg.decode_every == 0)
        if ((cfg.save_every and step % cfg.save_every == 0) or decode or self.stop is not None) and not last:
            self.save()
        if decode and not last:
            self._decode()
        self.pace.pause(time.perf_counter() - began)
        if self.stop is not None and not last:
            raise Interrupted(self.stop)

    def _log_interval(self) -> None:
        values = self.meter.reduce(self.engine.device)
        wait, self.loader.wait_seconds = self.loader.wait_seconds, 0.0
        values["lr"] = self.learning_rate(self.progress.step - 1)
        lap = self.pace.lap(wait, self.total - self.progress.step, self.engine.device)
        values |= {**lap, "memory_gb": peak_memory() / 1e9}
        peak = plan.peak_flops(self.engine.device)
        if peak is not None:
            ranks = distributed.world_size()
            values["mfu"] = self.plan.flops_per_step / (lap["seconds_per_step"] * peak * ranks)
        values["epoch"] = self.progress.step / self.loader.steps_per_epoch
        self._log("train", values | {"skipped": self.progress.skipped})
        say(metrics.line(self.progress.step, self.total, values))

    def evaluate(self) -> None:
        """Held-out metrics; the best expected τ so far is kept in ``best``."""
        self.evaluated_step = self.progress.step
        with self._averaged():
            values = evaluation.heldout(self.engine, self.loader)
        tau = values.get("tau")
        if not isinstance(tau, float) or not _finite(tau):
            return
        self.expected_tau = tau
        better = self.progress.best_tau is None or tau > self.progress.best_tau
        self._log("eval", dict(values))
        say(f"  held out: {metrics.line(self.progress.step, self.total, values)}{'  best' if better else ''}")
        self.progress.stale = 0 if better else self.progress.stale + 1
        if better:
            self.progress.best_tau = tau
            self._save_weights(BEST)

    def save(self) -> None:
        """Replace ``last``."""
        tensors = {}
        for kind, name, tensor in self.engine.export():
            if distributed.is_main():
                tensors[f"{kind}/{name.removeprefix('drafter.')}"] = tensor.to("cpu", copy=True).contiguous()
        self.progress.adam_steps = self.engine.adam_steps
        if self.average is not None:
            self.progress.ema_updates = self.average.updates
            tensors |= {f"ema/{name}": tensor.cpu() for name, tensor in self.average.tensors.items()}
        with self._averaged(), self.engine.whole_weights():
            if distributed.is_main():
                checkpoint.write_last(self.cfg.folder, self.progress, tensors, self._write_drafter)
        distributed.barrier()

    def _save_weights(self, name: str) -> None:
        with self._averaged(), self.engine.whole_weights():
            if distributed.is_main():
                checkpoint.write_weights(self.cfg.folder, name, self._write_drafter)
        distributed.barrier()

    def _write_drafter(self, folder: Path) -> None:
        tau = {"step": self.progress.step, "expected_tau": self.expected_tau}
        drafters.save(
            self.run.drafter,
            folder,
            target_name=self.cfg.target.name,
            target_fingerprint=self.run.target_fingerprint,
            target_path=self.cfg.target.path,
            target_revision=self.cfg.target.revision,
            thinking=self.cfg.target.thinking,
            num_anchors=self.cfg.data.anchors,
            step_loss_decay=self.cfg.loss.step_decay,
            provenance={"recipe": dataclasses.asdict(self.cfg)},
            extra={"training": tau},
        )

    def _decode(self) -> None:
        """Real decoding of the saved drafter on the main rank, compared with what the training forward expects."""
        if self.expected_tau is None:
            self.evaluate()
        if distributed.is_main() and self.run.target is not None and self.expected_tau is not None:
            try:
                failed = self._decode_now(self.run.target, self.expected_tau)
            except (RuntimeError, ValueError) as error:  # memory, a prompt: a check must not end the run
                failed = f"WARNING train-versus-decode gate: not decoded: {error}"
            if failed is not None:
                say(failed)
        distributed.barrier()

    def _decode_now(self, target: Target, expected: float) -> str | None:
        cfg = self.cfg.train
        prompts = evaluation.heldout_prompts(self.loader, cfg.decode_prompts)
        prompts = [prompt for prompt in prompts if prompt_problem(target, prompt, cfg.decode_tokens) is None]
        if not prompts:
            raise ValueError(f"no held-out prompt leaves room for train.decode_tokens={cfg.decode_tokens}")
        folder = Path(self.cfg.folder) / LAST
        tau = evaluation.decoded_tau(target, folder, prompts, max_new_tokens=cfg.decode_tokens, seed=cfg.seed)
        failed = evaluation.gate(tau, expected, cfg.decode_bound)
        self._log("decode", {"tau": tau, "expected_tau": expected, "agrees": failed is None})
        say(f"  decoded:  τ {tau:.3f} (expected {expected:.3f})")
        return failed

    def _resume(self, state: checkpoint.TrainingState) -> None:
        self.progress = dataclasses.replace(state.progress, identity=self.progress.identity)
        self.engine.restore(
            lambda kind, name: state.tensor(kind, name.removeprefix("drafter.")), state.progress.adam_steps
        )
        if self.average is not None:
            # No average is saved where it is turned on only now: it starts at the weights.
            saved = state.kind("ema")
            updates = state.progress.ema_updates if saved else 0
            self.average.restore(saved or state.kind("master"), updates)
        say(f"continuing {self.cfg.folder} at step {self.progress.step}")

    def _finish(self, *, complete: bool) -> None:
        """Save for good. A run that will go on is not evaluated here, so that it goes on as if it had not stopped."""
        if complete and self.evaluated_step != self.progress.step:
            self.evaluate()
        if self.progress.best_tau is None and complete:
            self._save_weights(BEST)
        self.progress.finished, self.progress.total = complete, self.total
        self.save()
        if complete and self.cfg.train.decode_every:
            self._decode()
        if self.tracker is not None:
            self.tracker.close()
        best = "" if self.progress.best_tau is None else f"; best expected τ {self.progress.best_tau:.3f}"
        say(f"{self.cfg.folder}: step {self.progress.step} of {self.total} saved{best}")

    def _open_tracker(self) -> None:
        if distributed.is_main():
            config = dataclasses.asdict(self.cfg)
            self.tracker = Tracker(
                self.cfg.tracking, self.cfg.folder, name=self.cfg.name, config=config, step=self.progress.step
            )

    def _log(self, kind: str, values: dict[str, Any]) -> None:
        if self.tracker is not None:
            self.tracker.log(self.progress.step, kind, values)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.average is None else self.average.swapped()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run after the current step, or in it (``step``); a second one ends it at once."""

        def note(number: int, frame: Any) -> None:
            self.signal = number
            if distributed.world_size() == 1:
                self.stop = number
            signal.signal(number, previous[number])
            say(f"{signal.Signals(number).name}: saving (again to leave at once)")

        numbers = (int(signal.SIGTERM), int(signal.SIGINT))
        previous: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        try:
            for number in numbers:
                signal.signal(number, note)
        except ValueError:  # not in the main thread: the embedding program handles its own signals
            previous = {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def closing(steps: Iterator[list[DraftBatch]]) -> Iterator[Iterator[list[DraftBatch]]]:
    """Ends the reading thread when the loop is left early."""
    try:
        yield steps
    finally:
        close = getattr(steps, "close", None)
        if close is not None:
            close()


def say(text: str) -> None:
    """Print on the main rank, at once."""
    if distributed.is_main():
        print(text, flush=True, file=sys.stdout)


def peak_memory() -> float:
    """Largest memory of this process so far in bytes: the accelerator's, or resident memory on a CPU."""
    if torch.accelerator.is_available():
        return float(torch.accelerator.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:8]) + (f" … ({len(ids)})" if len(ids) > 8 else "")
