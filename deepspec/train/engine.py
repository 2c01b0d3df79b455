"""DeepSpeed behind five verbs: forward, backward, step, export, restore. Knows no drafter and no files.

A global step may have any number of micro batches. Losses arrive already divided by the denominators of the whole
global batch, so their gradients must be summed over micro batches and ranks: nothing is divided by the number of micro
batches, and the loss is multiplied by the number of ranks because DeepSpeed averages over them.
"""

import contextlib
import datetime
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspec import distributed
from deepspec.train.config import EngineConfig, OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # srun and mpirun; they set no RANK
HEAD_MODULES = ("markov", "confidence")


class EngineError(ValueError):
    """An engine that cannot run as asked; the message names the option."""


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did; grad_norm is before clipping and inf when the step was skipped for it."""

    applied: bool
    grad_norm: float


class SkippableAdamW(torch.optim.AdamW):
    """AdamW whose moments exist before the first step, and which can be told to leave everything as it is."""

    skip: bool = False

    def materialise(self, extra: list[torch.Tensor]) -> None:
        """Create the state of every parameter of the groups and of ``extra`` that has none yet."""
        for parameter in [p for group in self.param_groups for p in group["params"]] + extra:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for key in MOMENTS:
                    state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return None if self.skip else super().step(closure)


def start(cfg: EngineConfig, device: torch.device) -> None:
    """Join the process group through DeepSpeed: gloo on a CPU, the accelerator's backend otherwise.

    Raises EngineError for processes of a launcher that does not say which rank each one is.
    """
    tasks = [name for name in LAUNCHERS if int(os.environ.get(name, "1")) > 1]
    if tasks and "RANK" not in os.environ:
        raise EngineError(
            f"{tasks[0]} says that there are {os.environ[tasks[0]]} processes, each of which would train alone in one "
            "folder: let the launcher start one `torchrun --nproc-per-node gpu deepspec/train/main.py …` on every node"
        )
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # DeepSpeed's shared-memory all-reduce needs a compiler and minutes to build; gloo gives the same sums.
        with contextlib.suppress(AttributeError):
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        torch.accelerator.set_device_index(device.index or 0)
    if not torch.distributed.is_initialized():
        backend = "gloo" if device.type == "cpu" else None
        timeout = datetime.timedelta(seconds=cfg.timeout)
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)


def stop() -> None:
    """Leave the process group, so that the launcher sees a clean exit."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def compute_dtype(cfg: EngineConfig, device: torch.device) -> torch.dtype:
    """Type of activations and module weights; master weights are fp32 always."""
    if cfg.precision == "auto":
        return distributed.native_dtype(device)
    return torch.bfloat16 if cfg.precision == "bf16" else torch.float32


class Engine:
    """A module under DeepSpeed. ``forward``, ``backward``, ``step`` and ``export`` are collective."""

    def __init__(self, module: nn.Module, cfg: EngineConfig, optim: OptimConfig, device: torch.device) -> None:
        import deepspeed

        self.cfg, self.device, self.dtype = cfg, device, compute_dtype(cfg, device)
        self.world = distributed.world_size()
        self._heads_lr = optim.heads_lr
        self._adam = SkippableAdamW(
            _groups(module),
            lr=0.0,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self._adam.skip = True  # some wrappers take a step on zero gradients to create the state, and count it
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=self._adam, config=_deepspeed_config(cfg, optim, self.dtype, device)
        )
        self._names = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._adam.materialise(list(getattr(self._engine.optimizer, "fp32_partitioned_groups_flat", [])))
        link = getattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            link()
        self._adam.skip = False

    @property
    def module(self) -> nn.Module:
        """The module in the compute type; under ZeRO 3 its weights are whole only within ``whole_weights``."""
        return self._engine.module

    @property
    def adam_steps(self) -> int:
        """Optimizer updates applied so far."""
        return max((int(state["step"]) for state in self._adam.state.values() if "step" in state), default=0)

    def forward(self, *inputs: Any, last: bool) -> Any:
        """Run the module on one micro batch; ``last`` marks the last one of the global step."""
        self._engine.set_gradient_accumulation_boundary(last)
        return self._engine(*inputs)

    def evaluate(self, *inputs: Any) -> Any:
        """Run the module without touching gradients or the accumulation boundary."""
        return self._engine(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's share of the global loss; after the last micro batch, sum over ranks."""
        self._engine.backward(loss * self.world, scale_wrt_gas=False)

    def step(self, lr: float, *, skip: bool = False) -> StepResult:
        """Clip and update with learning rate ``lr``. ``skip`` drops the gradients instead (on every rank alike);
        a non-finite gradient norm does so by itself."""
        for group in self._adam.param_groups:
            group["lr"] = lr * (self._heads_lr if group.get("heads") else 1.0)
        plain = self.cfg.zero == 0 and self.dtype == torch.float32
        norm = _norm(list(self._names.values())) if plain else None
        self._adam.skip = skip or (norm is not None and not bool(torch.isfinite(norm)))
        if self._adam.skip and norm is not None:
            # DeepSpeed would clip by a non-finite norm and leave NaN behind in the gradients it is about to drop
            for parameter in self._names.values():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        self._engine.step()
        applied = not self._adam.skip and bool(self._engine.was_step_applied())
        self._adam.skip = False
        return StepResult(applied, float(self._engine.get_global_grad_norm() if norm is None else norm))

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        """The module with every weight complete on every rank, for reading."""
        import deepspeed

        gather = (
            deepspeed.zero.GatheredParameters(list(self.module.parameters()))
            if self.cfg.zero == 3
            else contextlib.nullcontext()
        )
        with gather:
            yield self.module

    def export(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(kind, parameter name, fp32 tensor) of every master weight and moment, whole, one at a time."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, parameter in self._names.items():
            master = self._master(parameter)
            if master is not None:
                yield "master", name, master.detach()
                for key in MOMENTS:
                    yield key, name, self._adam.state[master][key]
                continue
            yield "master", name, safe_get_full_fp32_param(parameter)
            for key in MOMENTS:
                yield key, name, safe_get_full_optimizer_state(parameter, key)

    @torch.no_grad()
    def restore(self, read: Callable[[str, str], torch.Tensor], adam_steps: int) -> None:
        """Set master weights and moments from ``read(kind, name)`` and the update count. The module itself must
        have been built with the same weights: DeepSpeed copies masters to it only after a step."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for name, parameter in self._names.items():
            values = {kind: read(kind, name).to(self.device, torch.float32) for kind in ("master", *MOMENTS)}
            master = self._master(parameter)
            if master is not None:
                master.data.copy_(values["master"])
                for key in MOMENTS:
                    self._adam.state[master][key].copy_(values[key])
                continue
            safe_set_full_fp32_param(parameter, values["master"])
            for key in MOMENTS:
                safe_set_full_optimizer_state(parameter, values[key], key)
        for state in self._adam.state.values():
            if "step" in state:
                state["step"].fill_(float(adam_steps))

    def _master(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The fp32 tensor the optimizer updates for a parameter of ZeRO stage 0; None when it is sharded."""
        if self.cfg.zero > 0:
            return None
        halves = getattr(self._engine.optimizer, "fp16_groups", None)
        if halves is None:
            return parameter
        for group, masters in zip(halves, self._engine.optimizer.fp32_groups, strict=True):
            for half, master in zip(group, masters, strict=True):
                if half is parameter:
                    return master
        raise EngineError("a trained parameter has no master weight in DeepSpeed's optimizer: use engine.zero=1")


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: the heads (which may have their own learning rate) and the rest."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    heads = [p for name, p in trained if any(part.startswith(HEAD_MODULES) for part in name.split("."))]
    rest = [p for _, p in trained if all(p is not head for head in heads)]
    groups = [{"params": rest, "heads": False}, {"params": heads, "heads": True}]
    return [group for group in groups if group["params"]]


def _deepspeed_config(
    cfg: EngineConfig, optim: OptimConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    bucket = cfg.bucket_mb * 1024 * 1024 // 2
    zero: dict[str, Any] = {
        "stage": cfg.zero,
        "contiguous_gradients": True,
        "overlap_comm": device.type != "cpu",
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if cfg.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type != "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optim.clip,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["communication_data_type"] = "fp32"  # else sums over ranks are rounded, and depend on their number
        if cfg.zero > 0:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
