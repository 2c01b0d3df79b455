"""Held-out loss and expected τ from the training forward, and real decoding to compare it with. Knows no step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepspec import distributed
from deepspec.data.loader import Loader
from deepspec.models import drafter as drafters
from deepspec.models.decode import generate
from deepspec.models.sampling import Sampling
from deepspec.models.target import Target
from deepspec.train.engine import Engine
from deepspec.train.metrics import Meter, Value
from deepspec.train.objectives import denominators


@torch.no_grad()
def heldout(engine: Engine, loader: Loader) -> dict[str, Value]:
    """Means over all held-out samples of all ranks; {} without any. Anchors are those of epoch 0 each time."""
    module: Any = engine.module
    meter = Meter()
    training = module.training
    module.eval()
    try:
        for batch in loader.heldout():
            # any denominator does: metrics are sums, and the loss itself is not used
            own = denominators(batch, module.drafter.config, module.weights)
            batch = batch.to(engine.device, engine.dtype, non_blocking=True)
            _, metrics = engine.evaluate(batch, own.to(engine.device))
            meter.add(metrics)
    finally:
        module.train(training)
    return meter.reduce(engine.device)


def heldout_prompts(loader: Loader, count: int) -> list[list[int]]:
    """The tokens before the first answer of ``count`` held-out samples (training samples where none is held out)."""
    prompts = []
    for sample in loader.source.samples((loader.heldout_rows or loader.training_rows)[:count]):
        first = int(sample.supervised_S.int().argmax())
        if first > 0:
            prompts.append(sample.tokens_S[:first].tolist())
    return prompts


def decoded_tau(
    target: Target, checkpoint: str | Path, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int = 0
) -> float:
    """Tokens committed per round when the saved drafter really drafts, at temperature 1 as the training metric is.

    Plain rounds (nothing proposed) are left out, as are the tokens of the prompt.
    """
    drafter: Any = drafters.load(checkpoint, target)
    completions = generate(
        target,
        prompts,
        drafter=drafter,
        sampling=Sampling(temperature=1.0),
        max_new_tokens=max_new_tokens,
        batch_size=len(prompts),
        seed=seed,
    )
    rounds = [r for completion in completions for r in completion.rounds if r.proposed == drafter.block_size]
    return sum(r.accepted + 1 for r in rounds) / max(len(rounds), 1)


def gate(decoded: float, expected: float, bound: float) -> str | None:
    """A warning when decoding and the training forward disagree by more than ``bound``, else None."""
    if not distributed.is_main() or abs(decoded - expected) <= bound * expected:
        return None
    return (
        f"WARNING train-versus-decode gate: decoded τ {decoded:.3f}, expected τ {expected:.3f}: they differ by "
        f"{abs(decoded - expected) / expected:.0%}, more than train.decode_bound={bound:.0%}. Expect this early, or "
        "when the data's answers were not sampled at temperature 1; later it means that training and decoding differ"
    )
