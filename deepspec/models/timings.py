"""Seconds of a decoding run by what they were spent on."""

from dataclasses import dataclass


@dataclass
class Timings:
    """Seconds of a run. Passing one to ``generate`` makes it wait for the device at each boundary."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    rounds: int = 0
    tokens: int = 0

    def add(self, part: str, seconds: float) -> None:
        """Book seconds under prefill, draft, verify or other."""
        setattr(self, part, getattr(self, part) + seconds)

    @property
    def total(self) -> float:
        """All seconds."""
        return self.prefill + self.draft + self.verify + self.other
