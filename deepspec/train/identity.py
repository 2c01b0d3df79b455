"""Identity of a training run: what must stay the same for it to be continued, and what may change.

Everything a run is told is part of its identity, unless it is listed in MAY_CHANGE: an option that is added later is
compared without anyone having to remember it here.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspec.data.loader import Loader
from deepspec.files import read_json
from deepspec.train.checkpoint import LAST, ResumeError, TrainingState
from deepspec.train.config import TrainConfig
from deepspec.train.objectives import OBJECTIVE_SEMANTICS

# Options that a continued run may change, by group ("*": the whole group), and why.
MAY_CHANGE: dict[str, tuple[tuple[str, ...], str]] = {
    "data": (
        ("path", "prompts", "micro_tokens", "pack_tokens", "prefetch", "threads"),
        "where the same samples lie, and how a global batch is cut into forwards: losses sum over the whole batch",
    ),
    "optim": (("ema",), "kept beside the weights, which it does not change"),
    "train": (
        (
            *("lr", "steps", "epochs", "stop_after", "resume", "dry_run"),
            *("log_every", "eval_every", "save_every", "keep", "keep_every", "early_stop", "max_skips"),
            *("decode_every", "decode_prompts", "decode_tokens", "decode_bound"),
        ),
        "length, cadence, safety, and the peak learning rate, which people lower after a divergence",
    ),
    "engine": (("*",), "where and how it runs: ranks, sharding, precision"),
    "tracking": (("*",), "where metrics go"),
    "target": (("path", "revision", "dtype", "taps"), "compared as loaded: by fingerprint and by taps"),
}
ANSWER_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "limit")


def run_identity(cfg: TrainConfig, taps: tuple[int, ...], loader: Loader, target_fingerprint: str) -> dict[str, Any]:
    """What must stay the same, by the name that an error shows; values as JSON keeps them."""
    facts: dict[str, Any] = {}
    for group in ("drafter", "data", "loss", "optim", "train", "target"):
        free = MAY_CHANGE.get(group, ((), ""))[0]
        for name, value in dataclasses.asdict(getattr(cfg, group)).items():
            if name not in free:
                facts[f"{group}.{name}"] = list(value) if isinstance(value, tuple) else value
    if cfg.data.prompts is not None:
        facts |= {f"regenerate.{name}": getattr(cfg.regenerate, name) for name in ANSWER_OPTIONS}
    facts["taps"] = list(taps)
    facts["target fingerprint"] = target_fingerprint
    facts["training samples"] = len(loader.training_rows)
    facts["digest of the samples"] = loader.digest()
    facts["contents of the samples"] = loader.source.contents()
    facts["objective version"] = OBJECTIVE_SEMANTICS
    return facts


def recorded_options(run: str) -> dict[str, Any]:
    """Options of loss and optimizer from the drafter in ``<run>/last``: identities of earlier versions had none."""
    config = Path(run) / LAST / "config.json"
    if not config.is_file():
        return {}
    recipe = read_json(config).get("deepspec", {}).get("provenance", {}).get("recipe", {})
    free = MAY_CHANGE["optim"][0]
    return {
        f"{group}.{name}": value
        for group in ("loss", "optim")
        for name, value in recipe.get(group, {}).items()
        if not (group == "optim" and name in free)
    }


def check_identity(state: TrainingState, identity: Mapping[str, Any], run: str) -> list[str]:
    """Raise ResumeError naming every fact that differs from the run being continued.

    Returns the names that an earlier version did not write down, which therefore cannot be compared.
    """
    before = {**recorded_options(run), **state.progress.identity}
    changed = [
        f"{name} was {before[name]!r}, is {value!r}"
        for name, value in identity.items()
        if name in before and before[name] != value
    ]
    # The first version of the objective wrote no version; with equal options the block drafters' is what it was.
    if "objective version" not in before and before.get("drafter.kind") == "eagle3":
        changed.append("EAGLE-3's loss was normalised over all tokens of the global batch, is normalised per sequence")
    if changed:
        raise ResumeError(
            f"{run} was trained with other options ({'; '.join(changed)}): set them back to continue it, give name=… "
            f"for a new run (train.init_from={run} starts from its weights), or delete the folder"
        )
    return [name for name in identity if name not in before]
