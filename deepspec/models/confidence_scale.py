"""What calibration does to confidences: σ(logit / T_k + s_k) at position k, which keeps the order within a position."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ConfidenceScale:
    """Temperatures T_k > 0 and shifts s_k of the confidence logits, k = 1 … γ; no shifts are shifts of 0.

    Temperatures alone are Sequential Temperature Scaling (DSpark), both are Platt scaling of each position.
    Raises ValueError for other lengths or a temperature that is not positive.
    """

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.shifts:
            object.__setattr__(self, "shifts", (0.0,) * len(self.temperatures))
        if len(self.shifts) != len(self.temperatures):
            raise ValueError(f"{len(self.shifts)} shifts for {len(self.temperatures)} temperatures; calibrate again")
        if not all(value > 0 for value in self.temperatures):
            raise ValueError(f"temperatures {list(self.temperatures)} must be positive; calibrate again")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ConfidenceScale | None":
        """That of a checkpoint's ``deepspec`` object, calibration.json or export; None without temperatures."""
        if not fields.get("temperatures"):
            return None
        return cls(tuple(fields["temperatures"]), tuple(fields.get("shifts") or ()))

    def fields(self) -> dict[str, list[float]]:
        """What ``of`` reads."""
        return {"temperatures": list(self.temperatures), "shifts": list(self.shifts)}

    def inverse(self) -> "ConfidenceScale":
        """The scale that takes calibrated confidences back to raw ones."""
        pairs = list(zip(self.temperatures, self.shifts, strict=True))
        return ConfidenceScale(tuple(1 / each for each, _ in pairs), tuple(-each * shift for each, shift in pairs))

    def logits(self, logits_BG: Tensor) -> Tensor:
        """Calibrated logits of the first G positions; raises ValueError for more positions than were calibrated."""
        count = logits_BG.shape[1]
        if count > len(self.temperatures):
            raise ValueError(f"{len(self.temperatures)} temperatures for {count} positions; calibrate again")
        rows = (torch.tensor(each[:count], device=logits_BG.device) for each in (self.temperatures, self.shifts))
        temperature_G, shift_G = rows
        return logits_BG / temperature_G + shift_G
