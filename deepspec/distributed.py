"""Rank, world size and reductions that are no-ops in one process; the device of this rank. Knows torch only."""

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def rank() -> int:
    """This process's rank; 0 in one process. Falls back on torchrun's variables before init."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes; 1 in one process. Falls back on torchrun's variables before init."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Rank within this node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of processes on this node; DeepSpeed's launcher has a name of its own for it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")


def is_main() -> bool:
    """Whether this process writes shared files and prints."""
    return rank() == 0


def barrier() -> None:
    """Wait for every rank; a no-op in one process."""
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """No rank leaves before all have finished the body, however long that takes; a no-op in one process.

    The process group's own timeout is for steps of a known length. A rank that dies still ends the wait.
    """
    if world_size() == 1 or not dist.is_initialized():
        yield
        return
    group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))
    yield
    dist.barrier(group)
    dist.destroy_process_group(group)


def sum_across_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in float64 so that order does not matter; returns ``values`` unchanged in one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    total = values.to(torch.float64).clone()
    dist.all_reduce(total)
    return total.to(values.dtype)


def gathered(texts: list[str]) -> list[str]:
    """The strings of all ranks, in their order."""
    if world_size() == 1:
        return texts
    everyone: list[list[str]] = [[] for _ in range(world_size())]
    dist.all_gather_object(everyone, texts)
    return [text for one in everyone for text in one]


def default_device() -> torch.device:
    """The accelerator torch reports for this rank, else the CPU."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None:
            # a launcher may show each process one device only
            return torch.device(kind.type, local_rank() % torch.accelerator.device_count())
    return torch.device("cpu")


def native_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it (accelerators, CPUs with AVX-512 BF16, AMX or Arm's BF16), else float32.

    A torch too old to know its CPU's abilities counts as a CPU without.
    """
    able = {"bf16": True} if device.type != "cpu" else getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if any(able.get(name) for name in ("bf16", "avx512_bf16", "amx_bf16")) else torch.float32
