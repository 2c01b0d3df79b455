"""`torchrun deepspec/train/main.py +recipe=dspark key=value …`: compose, check, train. Knows no step."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

# torchrun puts this script's folder first on the path, where a file could shadow a library.
if __name__ == "__main__" and sys.path and Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from deepspec import distributed, recipes


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit status: 0 done, 2 for input that cannot work, 1 for a run that failed."""
    overrides = list(sys.argv[1:] if argv is None else argv)
    if any(word in ("-h", "--help") for word in overrides):
        print(__doc__)
        print("recipes: " + ", ".join(recipes.names("recipe")) + "\ntargets: " + ", ".join(recipes.names("target")))
        return 0
    from deepspec.train.config import TrainConfig

    try:
        cfg = recipes.load("train", overrides, TrainConfig)
        return train(cfg, overrides)
    except (ValueError, RuntimeError) as error:
        if not type(error).__module__.startswith("deepspec"):
            raise
        if distributed.is_main():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ValueError) else 1


def train(cfg, overrides: Sequence[str]) -> int:
    """Run ``cfg`` (a TrainConfig) on this rank; returns the exit status."""
    from deepspec.train import engine as engines
    from deepspec.train import setup
    from deepspec.train.summary import describe
    from deepspec.train.tracking import Tracker
    from deepspec.train.trainer import Trainer

    setup.check_data(cfg)
    device = distributed.default_device()
    dtype = engines.compute_dtype(cfg.engine, device)
    engines.start(cfg.engine, device)
    tracker = None
    try:
        prepared = setup.prepare(cfg, device, dtype)
        if distributed.is_main():
            print(describe(prepared), flush=True)
        if prepared.state is not None and prepared.state.progress.finished:
            if distributed.is_main():
                print(f"{cfg.folder} is finished at step {prepared.state.progress.step}.")
                print(next_command(cfg))
            return 0
        if cfg.train.dry_run:
            cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, stop_after=1, save_every=0))
            prepared = dataclasses.replace(prepared, cfg=cfg)
        step = 0 if prepared.state is None else prepared.state.progress.step
        if distributed.is_main() and not cfg.train.dry_run:
            tracker = Tracker(cfg.tracking, cfg.folder, name=cfg.name, config=dataclasses.asdict(cfg), step=step)
        engine = engines.Engine(prepared.objective, cfg.engine, cfg.optim, device)
        trainer = Trainer(prepared, engine, tracker, setup.identity(cfg, prepared.taps, prepared.loader))
        outcome = trainer.train()
        if distributed.is_main():
            _finish(cfg, outcome, overrides)
    finally:
        if tracker is not None:
            tracker.close()
        engines.stop()
    return 130 if outcome.stopped == "signal" else 0


def _finish(cfg, outcome, overrides: Sequence[str]) -> None:
    if cfg.train.dry_run:
        print("dry run: everything fits, one real step done, nothing written. Remove train.dry_run to train.")
    elif outcome.stopped in ("signal", "asked"):
        print(f"stopped at step {outcome.step} of {outcome.total}, state saved in {cfg.folder}/last. To go on:")
        print("  " + shlex.join(["torchrun", os.path.relpath(__file__), *overrides]))
    else:
        best = "" if outcome.best_tau is None else f", best held-out expected τ {outcome.best_tau:.3f}"
        print(f"finished: {outcome.step} steps{best}; drafter in {cfg.folder}")
        print(next_command(cfg))


def next_command(cfg) -> str:
    """What to run after training."""
    return f"next: python -m deepspec.eval --suite math --target {cfg.target.name} --drafter {cfg.folder}"


if __name__ == "__main__":
    sys.exit(main())
