"""What the decoding loop asks of a drafter. Knows no drafter.

Letters: B active rows, T new tokens, G block, F concatenated taps.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from deepspec.models.sampling import Distribution, Sampling


@dataclass
class Proposal:
    """A drafted block. ``confidence_BG`` holds P(x_k accepted | x_<k accepted), known before x_k is drawn;
    ``lengths_B`` says how many of the G tokens a row really proposes (default all), also chosen without seeing them."""

    tokens_BG: Tensor
    q: Distribution
    confidence_BG: Tensor | None = None
    lengths_B: Tensor | None = None


class Drafter(Protocol):
    """What decoding needs of a drafter. The state mirrors the target's cache: ``add(k)`` appends rows, ``remove(i)``
    moves the last row into slot i. A drafter with ``taps`` gets those taps; without, None."""

    block_size: int

    def start(self, rows: int, max_length: int) -> Any:
        """An empty state for ``rows`` rows of at most ``max_length`` tokens."""
        ...

    def extend(
        self, state: Any, tokens_BT1: Tensor, taps_BTF: Tensor | None, counts_B: Tensor, rows: slice | None = None
    ) -> None:
        """New context: taps_BTF[b, :counts_b] belong to tokens_BT1[b, :counts_b]; tokens_BT1[b, counts_b] follows them
        (the next anchor). Positions continue from the row's length."""
        ...

    def propose(
        self,
        state: Any,
        anchor_B: Tensor,
        sampling: Sampling,
        uniforms_BG: Tensor,
        length: int,
        greedy: bool = False,
    ) -> Proposal:
        """``length`` tokens after each anchor, drawn from q by ``uniforms_BG``, or the argmax with q one-hot."""
        ...
