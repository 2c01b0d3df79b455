"""Options out of range and pairs that contradict each other are refused by name."""

import pytest

from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.target import TargetConfig
from deepspec.train.config import (
    EngineConfig,
    OptimConfig,
    RunConfig,
    TrackingConfig,
    TrainConfig,
    TrainConfigError,
)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (OptimConfig, {"schedule": "linear"}, ["optim.schedule='linear'", "cosine, wsd"]),
        (OptimConfig, {"warmup": 1.5}, ["optim.warmup=1.5"]),
        (OptimConfig, {"beta2": 1.0}, ["optim.beta2=1.0"]),
        (OptimConfig, {"clip": -1.0}, ["optim.clip=-1.0"]),
        (OptimConfig, {"ema": 1.0}, ["optim.ema=1.0"]),
        (OptimConfig, {"schedule": "wsd", "warmup": 0.6, "decay": 0.6}, ["optim.warmup=0.6", "optim.decay=0.6"]),
        (RunConfig, {"lr": 0.0}, ["train.lr=0.0"]),
        (RunConfig, {"steps": 0}, ["train.steps=0"]),
        (RunConfig, {"log_every": 0}, ["train.log_every=0"]),
        (RunConfig, {"early_stop": 2, "eval_every": 0}, ["train.early_stop=2", "train.eval_every=0"]),
        (EngineConfig, {"zero": 4}, ["engine.zero=4"]),
        (EngineConfig, {"precision": "fp8"}, ["engine.precision='fp8'"]),
        (EngineConfig, {"recompute": True, "zero": 3}, ["engine.recompute=true", "engine.zero=3"]),
        (EngineConfig, {"cpu_offload": True, "zero": 0}, ["engine.cpu_offload=true", "engine.zero=0"]),
        (
            TrainConfig,
            {
                "target": TargetConfig("t", "t"),
                "drafter": DrafterConfig(),
                "optim": OptimConfig(ema=0.9),
                "engine": EngineConfig(zero=3),
            },
            ["optim.ema=0.9", "engine.zero=3"],
        ),
        (TrackingConfig, {"wandb": "on"}, ["tracking.wandb='on'"]),
    ],
)
def test_what_cannot_work_is_named(kind, options, named):
    with pytest.raises(TrainConfigError) as error:
        kind(**options)
    assert all(text in str(error.value) for text in named)


def test_defaults_are_valid():
    for kind in (OptimConfig, RunConfig, EngineConfig, TrackingConfig):
        kind()
