"""An exponential moving average of a module's trained weights, in fp32. Knows no optimizer."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn


class Average:
    """average ← decay · average + (1 − decay) · weights, started at the weights. The decay is ramped as
    min(decay, (1 + n) / (10 + n)) over the updates n, so that a short run is not held back by its first weights."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._decay, self.updates = decay, 0
        self.tensors = {name: p.detach().float().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, weight in self._weights.items():
            self.tensors[name].lerp_(weight.detach().float(), 1 - decay)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], updates: int) -> None:
        """Continue from averages that were saved after so many updates."""
        self.updates = updates
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped(self) -> Iterator[None]:
        """The module with the averages in place of its weights."""
        kept = {name: weight.detach().clone() for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            weight.copy_(self.tensors[name])
        try:
            yield
        finally:
            for name, weight in self._weights.items():
                weight.copy_(kept[name])
