"""What the engine costs: DeepSpeed against a bare torch loop on the same step, and two ranks against one.

    python scripts/bench/trainer.py             overhead of ZeRO 0 and 1, then samples/s of one and two pinned ranks
    python scripts/bench/trainer.py --quick     toy sizes, a check that it runs

Each rank is pinned to one core. Overhead: both loops take the same steps in turns in one process; medians count. Ranks:
the same global batch split over one and two processes under torchrun with gloo. Run it on an idle machine.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepspec import distributed
from deepspec.data.batch import DraftBatch, Sample, collate
from deepspec.models import drafter as drafters
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.train import engine as engines
from deepspec.train.config import EngineConfig, OptimConfig
from deepspec.train.objectives import LossWeights, denominators
from deepspec.train.setup import Objective

TAPS = (1, 2, 3)
CPU = torch.device("cpu")


def objective(args: argparse.Namespace) -> Objective:
    """A DSpark drafter of a Llama-shaped target of width ``args.hidden``."""
    from transformers import AutoConfig

    heads = max(args.hidden // 64, 2)
    config = AutoConfig.for_model(
        "llama", hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_attention_heads=heads,
        num_key_value_heads=heads, num_hidden_layers=8, vocab_size=args.vocab, max_position_embeddings=4096,
    )  # fmt: skip
    head = FrozenHead(torch.randn(args.vocab, args.hidden, generator=torch.Generator().manual_seed(0)) * 0.05)
    drafter = drafters.build(DrafterConfig(layers=args.layers, markov_rank=64), config, head, TAPS)
    return Objective(drafter, LossWeights())


def micros(args: argparse.Namespace, rank: int, ranks: int) -> list[DraftBatch]:
    """This rank's share of the global batch, one sample to a micro batch."""
    draw = torch.Generator().manual_seed(1)
    samples = []
    for number in range(args.batch):
        tokens_S = torch.randint(0, args.vocab, (args.tokens,), generator=draw)
        supervised_S = torch.arange(args.tokens) >= args.tokens // 4
        taps_SF = torch.randn(args.tokens, len(TAPS) * args.hidden, generator=draw)
        last_ID = torch.randn(int(supervised_S[1:].sum()), args.hidden, generator=draw)
        samples.append(Sample(f"s{number}", tokens_S, supervised_S, taps_SF, last_ID))
    mine = samples[rank::ranks]
    return [collate([s], anchors_per_sample=args.anchors, block_size=7, seed=0, epoch=0) for s in mine]


def bare_step(module: Objective, batches: list[DraftBatch], lr: float) -> Callable[[], None]:
    """The loop without an engine: backward, clip, AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.0, fused=True)

    def step() -> None:
        total = torch.stack([denominators(b, module.drafter.config, module.weights) for b in batches]).sum()
        for batch in batches:
            loss, _ = module(batch, total)
            loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(module: Objective, batches: list[DraftBatch], lr: float, zero: int) -> Callable[[], None]:
    """The trainer's step through DeepSpeed."""
    cfg = EngineConfig(zero=zero, precision="fp32")
    engines.start(cfg, CPU)
    engine = engines.Engine(module, cfg, OptimConfig(), CPU)

    def step() -> None:
        own = torch.stack([denominators(b, module.drafter.config, module.weights) for b in batches]).sum()
        total = distributed.sum_across_ranks(own)
        losses = []
        for index, batch in enumerate(batches):
            loss, _ = engine.forward(batch, total, last=index == len(batches) - 1)
            engine.backward(loss)
            losses.append(loss.detach())
        distributed.sum_across_ranks(torch.stack(losses).sum()).item()
        engine.step(lr)

    return step


def timed(step: Callable[[], None]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def overhead(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step of each loop, and what DeepSpeed adds."""
    batches = micros(args, 0, 1)
    steps = {"bare": bare_step(objective(args), batches, 1e-4)}
    for zero in (0, 1):
        steps[f"zero{zero}"] = engine_step(objective(args), batches, 1e-4, zero)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.steps + 1):
        for name, step in steps.items():
            value = timed(step)
            if turn:
                seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    added = {f"overhead_{name}": medians[name] / medians["bare"] - 1 for name in medians if name != "bare"}
    return medians | added


def rank_speed(args: argparse.Namespace) -> None:
    """Worker under torchrun: samples/s over all ranks."""
    batches = micros(args, distributed.rank(), distributed.world_size())
    step = engine_step(objective(args), batches, 1e-4, args.zero)
    values = [timed(step) for _ in range(args.steps + 1)][1:]
    if distributed.is_main():
        print(json.dumps({"samples_per_s": args.batch / statistics.median(values)}), flush=True)
    engines.stop()


def launch(args: argparse.Namespace, ranks: int) -> float:
    """samples/s of ``ranks`` processes of one core each."""
    shapes = [f"--{name}={getattr(args, name)}" for name in (*SHAPES, "steps", "zero")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, __file__, "--worker", *shapes], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))["samples_per_s"])


SHAPES = {"hidden": 256, "vocab": 8192, "layers": 2, "tokens": 384, "anchors": 48, "batch": 8}
QUICK = {"hidden": 64, "vocab": 256, "layers": 1, "tokens": 48, "anchors": 4, "batch": 4}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage of the ranks")
    parser.add_argument("--steps", type=int, default=7)
    for name, value in SHAPES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.quick:
        for name, value in QUICK.items():
            setattr(args, name, value)
        args.steps = 2
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[distributed.local_rank()]})
    if args.worker:
        rank_speed(args)
        return
    found = overhead(args)
    for name in ("bare", "zero0", "zero1"):
        more = f"  {found[f'overhead_{name}']:+.1%}" if name != "bare" else ""
        print(f"{name:<6} {found[name]:.3f} s a step{more}", flush=True)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))
    one, two = launch(args, 1), launch(args, 2)
    print(f"1 rank {one:.2f} samples/s, 2 ranks {two:.2f} samples/s: × {two / one:.2f}")


if __name__ == "__main__":
    main()
