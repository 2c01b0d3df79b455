"""Everything a training run can be told, and what contradicts what. Knows no tensors."""

from dataclasses import dataclass, field

from deepspec.data.loader import DataConfig
from deepspec.data.regenerate import RegenerateConfig
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.target import TargetConfig
from deepspec.train.objectives import LossWeights

SCHEDULES = ("cosine", "wsd")
PRECISIONS = ("auto", "bf16", "fp32")
WANDB_MODES = ("online", "offline", "disabled")


class TrainConfigError(ValueError):
    """A training option out of range, or two that contradict each other; the message names them."""


@dataclass
class OptimConfig:
    """AdamW and its schedule; the peak learning rate is ``train.lr``.

    schedule       "cosine" (to ``final`` of the peak) or "wsd" (warm-up, stable, decay)
    beta1, beta2   AdamW's averages: torch's defaults, which DSpark's public code trains with
    warmup, decay  shares of all steps; ``decay`` is the last part of a wsd schedule
    clip           largest gradient norm; 0 turns clipping off
    heads_lr       learning rate of the Markov and confidence heads, relative to ``train.lr``
    ema            decay of an exponential moving average of the weights, kept beside them and saved; None: none
    """

    schedule: str = "cosine"
    warmup: float = 0.04
    decay: float = 0.2
    final: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    heads_lr: float = 1.0
    ema: float | None = None

    def __post_init__(self) -> None:
        _one_of("optim.schedule", self.schedule, SCHEDULES)
        for name in ("warmup", "decay", "final"):
            _within(f"optim.{name}", getattr(self, name), 0.0, 1.0)
        for name in ("beta1", "beta2"):
            _within(f"optim.{name}", getattr(self, name), 0.0, 1.0, open_top=True)
        for name in ("eps", "weight_decay", "clip", "heads_lr"):
            _at_least(f"optim.{name}", getattr(self, name), 0)
        if self.ema is not None:
            _within("optim.ema", self.ema, 0.0, 1.0, open_top=True)
        if self.schedule == "wsd" and self.warmup + self.decay > 1.0:
            raise TrainConfigError(
                f"optim.warmup={self.warmup} and optim.decay={self.decay} are more than the whole run: lower one"
            )


@dataclass
class RunConfig:
    """Length, cadence and safety of a run. Cadences count optimizer steps; 0 turns one off.

    steps              length of the run; None: ``epochs`` passes over the training samples
    stop_after         leave after this many steps of the schedule, as if interrupted; a later run continues
    resume             continue from ``last`` when there is one; false refuses to touch an existing run
    init_from          a drafter or run folder of any layout in docs/serving.md, whose weights the run starts from
    warm_start         start the draft layers from the target's own layers after the deepest tap
    keep               how many step-N checkpoints are kept
    early_stop         end after this many evaluations in a row without a better expected τ; 0: never
    decode_every       steps between real decodings of ``decode_prompts`` held-out prompts (needs the whole target)
    decode_bound       largest |decoded τ − expected τ| / expected τ that raises no warning
    max_skips          consecutive steps with a non-finite loss or gradient before the run aborts
    dry_run            check everything, run one real step, write no checkpoint
    """

    lr: float = 6e-4
    epochs: int = 10
    steps: int | None = None
    stop_after: int | None = None
    seed: int = 0
    resume: bool = True
    init_from: str | None = None
    warm_start: bool = False
    log_every: int = 10
    eval_every: int = 500
    save_every: int = 500
    keep: int = 2
    keep_every: int = 0
    early_stop: int = 0
    decode_every: int = 0
    decode_prompts: int = 8
    decode_tokens: int = 128
    decode_bound: float = 0.25
    max_skips: int = 10
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "log_every", "decode_prompts", "decode_tokens", "max_skips"):
            _at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("eval_every", "save_every", "keep", "keep_every", "early_stop", "decode_every", "decode_bound"):
            _at_least(f"train.{name}", getattr(self, name), 0)
        for name in ("steps", "stop_after"):
            if getattr(self, name) is not None:
                _at_least(f"train.{name}", getattr(self, name), 1)
        if self.warm_start and self.init_from is not None:
            raise TrainConfigError(
                f"train.warm_start=true contradicts train.init_from={self.init_from}: change one of the two"
            )
        if self.lr <= 0:
            raise TrainConfigError(f"train.lr={self.lr} must be above 0")
        if self.early_stop and not self.eval_every:
            raise TrainConfigError(
                f"train.early_stop={self.early_stop} contradicts train.eval_every=0: change one of the two"
            )


@dataclass
class EngineConfig:
    """How DeepSpeed runs. precision "auto" is bf16 with fp32 masters where the device multiplies bf16, else fp32.

    zero           ZeRO stage: what is split over ranks (1 optimizer state, 2 and gradients, 3 and weights)
    cpu_offload    optimizer state in host memory (stages 1 to 3)
    recompute      make the draft layers' activations again in backward instead of keeping them: less memory, more
                   time; not with ZeRO 3, which has released the weights by then
    timeout        seconds a rank waits for the others before it gives up on them
    """

    precision: str = "auto"
    zero: int = 1
    cpu_offload: bool = False
    recompute: bool = False
    bucket_mb: int = 200
    timeout: int = 1800

    def __post_init__(self) -> None:
        _one_of("engine.precision", self.precision, PRECISIONS)
        if self.zero not in (0, 1, 2, 3):
            raise TrainConfigError(f"engine.zero={self.zero} is not a ZeRO stage: choose 0, 1, 2 or 3")
        if self.cpu_offload and self.zero == 0:
            raise TrainConfigError(
                "engine.cpu_offload=true contradicts engine.zero=0: offloading starts at stage 1, change one of the two"
            )
        if self.recompute and self.zero == 3:
            raise TrainConfigError(
                "engine.recompute=true contradicts engine.zero=3, which has released the weights it needs: choose "
                "engine.zero=2"
            )
        _at_least("engine.bucket_mb", self.bucket_mb, 1)
        _at_least("engine.timeout", self.timeout, 1)


@dataclass
class TrackingConfig:
    """Where metrics go besides metrics.jsonl. wandb None follows WANDB_MODE and is offline without it."""

    wandb: str | None = None
    project: str = "deepspec"
    entity: str | None = None
    group: str | None = None
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.wandb is not None:
            _one_of("tracking.wandb", self.wandb, WANDB_MODES)


@dataclass
class TrainConfig:
    """One training run: target, drafter, data, loss, optimizer, engine; ``name`` is the drafter's name.

    ``regenerate`` is how the target answers ``data.prompts``. Checkpoints go to
    ``<out>/drafters/<name>/{last,best,step-N}``.
    """

    target: TargetConfig
    drafter: DrafterConfig  # no default instance: it would carry values derived for another kind into a recipe
    data: DataConfig = field(default_factory=DataConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    loss: LossWeights = field(default_factory=LossWeights)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: RunConfig = field(default_factory=RunConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    out: str = "runs/drafter"
    name: str = "drafter"

    def __post_init__(self) -> None:
        self.loss = self.loss.resolved(self.drafter)
        if not self.name or "/" in self.name:
            raise TrainConfigError(f"name={self.name!r} must be a folder name without '/'")
        if self.optim.ema is not None and self.engine.zero == 3:
            raise TrainConfigError(
                f"optim.ema={self.optim.ema} contradicts engine.zero=3, where no rank has the whole weights: choose "
                "engine.zero=2"
            )

    @property
    def folder(self) -> str:
        """Where this drafter's checkpoints and metrics go."""
        return f"{self.out}/drafters/{self.name}"


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise TrainConfigError(f"{name}={value!r} is unknown: choose one of {', '.join(known)}")


def _within(name: str, value: float, low: float, high: float, *, open_top: bool = False) -> None:
    if not low <= value <= high or (open_top and value == high):
        raise TrainConfigError(f"{name}={value} must be between {low:g} and {high:g}{' (excluded)' * open_top}")


def _at_least(name: str, value: float, low: float) -> None:
    if value < low:
        raise TrainConfigError(f"{name}={value} must be at least {low:g}")
