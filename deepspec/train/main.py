"""Entry of training: ``torchrun deepspec/train/main.py +recipe=dspark target=qwen3-4b``, or ``deepspec train …``."""

import atexit
import shlex
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__" and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    # A script's own folder comes first on the path: a file here must never shadow a library.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from deepspec import distributed, recipes

USAGE = """usage: torchrun [--nproc-per-node N] deepspec/train/main.py +recipe=NAME [group=NAME] [key=value] …
  +recipe=   {recipe}
  target=    {target}, a hub id or a folder
  data=      cache | online | prompts
  engine=    {engine}
  optim=     {optim}      tracking=  {tracking}      +size=  {size}
  any option by its path: train.lr=3e-4 data.global_batch=256 drafter.layers=3 train.dry_run=true
Meanings and defaults: deepspec/train/config.py (train, optim, engine, tracking), objectives.py beside it (loss),
deepspec/data/loader.py (data), deepspec/models/drafter_config.py (drafter), deepspec/models/target.py (target);
the values of a run are printed when it starts."""


def main(argv: list[str] | None = None) -> int:
    """Train from Hydra overrides.

    Returns 0 when complete, 2 for an option, recipe or input that cannot work, 1 for a run that failed and 128 + n
    when the run was saved after signal n.
    """
    arguments = sys.argv[1:] if argv is None else argv
    # the deepspeed launcher adds this to what LOCAL_RANK already says
    arguments = [argument for argument in arguments if not argument.startswith(("--local_rank=", "--local-rank="))]
    if any(argument in ("-h", "--help") for argument in arguments):
        groups = ("recipe", "target", "engine", "optim", "tracking", "size")
        print(USAGE.format(**{group: " | ".join(recipes.names(group)) for group in groups}))
        return 0
    try:
        return _run(arguments)
    except (ValueError, OSError) as error:
        if distributed.local_rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(1)  # the launcher ends all ranks when one leaves: let the first one say why
        return 2


def _run(arguments: list[str]) -> int:
    from deepspec.train.config import TrainConfig
    from deepspec.train.setup import check_data

    if not any(argument.startswith("+recipe=") for argument in arguments):
        raise recipes.RecipeError(f"choose what to train: +recipe={'|'.join(recipes.names('recipe'))}")
    cfg = recipes.load("train", arguments, TrainConfig)
    check_data(cfg)

    from deepspec.train import engine
    from deepspec.train.setup import prepare
    from deepspec.train.trainer import Interrupted, NonFiniteError, Trainer, say

    device = distributed.default_device()
    engine.start(cfg.engine, device)
    try:
        trainer = Trainer(prepare(cfg, device, engine.compute_dtype(cfg.engine, device)))
        if cfg.train.dry_run:
            trainer.dry_run()
        else:
            progress = _fit(trainer)
            if progress.finished:
                evaluate = ["python", "-m", "deepspec.eval", "--suite", "math", "--drafter", cfg.folder]
                say(f"next: {shlex.join(evaluate)}")  # the drafter records its target
            else:
                kept = [argument for argument in arguments if not argument.startswith("train.stop_after=")]
                say(_again(kept, " without train.stop_after"))
    except Interrupted as stop:
        say(f"{stop}: saved in {cfg.folder}/last; {_again(arguments)}")
        return 128 + stop.number
    except KeyboardInterrupt:
        say(f"\nstopped before the first step; {_again(arguments)}")
        return 130
    except NonFiniteError as error:
        say(f"error: {error}")
        return 1
    # not after an error: the other ranks may still be waiting in a collective
    atexit.register(engine.stop)
    return 0


def _fit(trainer: Any) -> Any:
    """Data errors may be one rank's own: say them there, before the others are ended."""
    try:
        return trainer.fit()
    except (ValueError, OSError) as error:
        if distributed.local_rank() != 0:
            print(f"error on rank {distributed.rank()}: {error}", file=sys.stderr, flush=True)
        raise


def _again(arguments: list[str], changed: str = "") -> str:
    """How to continue: the line, with as many processes as now; of several nodes no line is right."""
    processes = distributed.local_world_size()
    if distributed.world_size() > processes:
        return f"the same command{changed} on every node goes on from there"
    launch = ["torchrun", "--standalone", "--nproc-per-node", str(processes), "deepspec/train/main.py"]
    return f"the same command{changed} goes on from there:\n  {shlex.join([*launch, *arguments])}"


if __name__ == "__main__":
    raise SystemExit(main())
