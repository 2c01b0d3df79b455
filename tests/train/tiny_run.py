"""A saved tiny target with a cache of made-up conversations, and the overrides of a training run on it."""

import json
from pathlib import Path

from deepspec import recipes
from deepspec.train import engine
from deepspec.train.config import TrainConfig
from deepspec.train.setup import prepare
from deepspec.train.trainer import Trainer
from tests.data.little_chat import built, chat_target

OPTIONS = {
    "drafter.layers": 1,
    "drafter.markov_rank": 8,
    "data.global_batch": 4,
    "data.anchors": 6,
    "data.max_length": 80,
    "data.micro_tokens": 200,
    "data.heldout": 0.2,
    "train.steps": 10,
    "train.lr": 3e-3,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.save_every": 0,
    "optim.warmup": 0,
    "tracking": "none",
    "engine.precision": "fp32",  # the same on every CPU
}


def make(folder: Path, count: int = 30) -> Path:
    """Write ``<folder>/target`` and ``<folder>/cache``."""
    target = chat_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    built(folder, count, target)
    return folder


def write_prompts(out: Path, count: int) -> None:
    """Prompts in the run folder ``out``, as ``python -m deepspec.data prompts`` writes them."""
    (out / "prompts").mkdir(parents=True)
    rows = [
        {"id": f"q{n:03d}", "messages": [{"role": "user", "content": "ab" * (n % 7 + 1)}], "source": "made-up"}
        for n in range(count)
    ]
    (out / "prompts" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def overrides(folder: Path, *more: str, recipe: str = "dspark", **changes) -> list[str]:
    """Arguments of ``deepspec.train.main``; keyword names use __ for the dot."""
    options = OPTIONS | {key.replace("__", "."): value for key, value in changes.items()}
    if recipe != "dspark":
        options.pop("drafter.markov_rank")
    chosen = [f"{key}={value}" for key, value in options.items()]
    return [
        f"+recipe={recipe}",
        "target=tiny-qwen3",
        f"target.path={folder / 'target'}",
        f"data.path={folder / 'cache'}",
        f"out={folder / 'run'}",
        *chosen,
        *more,
    ]


def config(folder: Path, *more: str, recipe: str = "dspark", **changes) -> TrainConfig:
    """The checked configuration of such a run."""
    return recipes.load("train", overrides(folder, *more, recipe=recipe, **changes), TrainConfig)


def trainer(cfg: TrainConfig) -> Trainer:
    """A trainer in this process, on the CPU."""
    import torch

    device = torch.device("cpu")
    engine.start(cfg.engine, device)
    return Trainer(prepare(cfg, device, engine.compute_dtype(cfg.engine, device)))
