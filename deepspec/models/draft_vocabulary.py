"""The tokens a drafter can propose: all of the target's, or a reduced set with the d2t/t2d maps of the public formats.

Shapes: V draft vocabulary, T target vocabulary, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepspec.models.drafter_config import DrafterConfigError
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.sampling import Distribution, Sampling


def most_frequent(counts_T: Tensor, size: int) -> list[int]:
    """The ``size`` tokens with the largest counts, ascending; ties go to the smaller id."""
    order = torch.argsort(counts_T, descending=True, stable=True)
    return sorted(order[:size].tolist())


class DraftVocabulary(nn.Module):
    """Draft ids 0…V−1 and the target ids they stand for: target = draft + d2t[draft]; t2d marks the target ids kept.

    Without ``ids`` it is the identity and has no buffers. Raises DrafterConfigError for ids that are not ascending ids
    of the target.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, target_size: int, ids: Sequence[int] | None = None) -> None:
        super().__init__()
        self.target_size = target_size
        self.register_buffer("d2t", None)
        self.register_buffer("t2d", None)
        self._sliced: tuple[FrozenHead, FrozenHead] | None = None
        if ids is not None:
            self._reduce(torch.as_tensor(ids, dtype=torch.long))

    def _reduce(self, ids_V: Tensor) -> None:
        ascending = bool((ids_V[1:] > ids_V[:-1]).all())
        if not len(ids_V) or not ascending or int(ids_V[0]) < 0 or int(ids_V[-1]) >= self.target_size:
            raise DrafterConfigError(
                f"a draft vocabulary must be strictly ascending token ids in 0…{self.target_size - 1}: "
                "make it with draft_vocabulary.most_frequent"
            )
        self.d2t = ids_V - torch.arange(len(ids_V))
        self.t2d = torch.zeros(self.target_size, dtype=torch.bool).index_fill_(0, ids_V, True)

    @property
    def size(self) -> int:
        """V."""
        return self.target_size if self.d2t is None else len(self.d2t)

    @property
    def ids_V(self) -> Tensor | None:
        """Target ids of the draft ids, ascending; None for the identity."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def to_target(self, tokens: Tensor) -> Tensor:
        """Draft ids to target ids."""
        return tokens if self.d2t is None else tokens + self.d2t[tokens]

    def head(self, head: FrozenHead) -> FrozenHead:
        """``head`` with the rows of this vocabulary only; sliced once."""
        ids_V = self.ids_V
        if ids_V is None:
            return head
        if self._sliced is None or self._sliced[0] is not head:
            rows = head.head_VD[ids_V.to(head.head_VD.device)]
            self._sliced = head, FrozenHead(head.embed_VD, rows, softcap=head.softcap)
        return self._sliced[1]

    def distribution(self, logits: Tensor, sampling: Sampling) -> Distribution:
        """q over the target's vocabulary of draft logits [..., V]: zero outside, one-hot at temperature 0."""
        if self.d2t is None:
            return Distribution.of(logits, sampling)
        if sampling.greedy:
            return Distribution.one_hot(self.to_target(logits.argmax(-1)), self.target_size)
        everywhere = logits.new_full((*logits.shape[:-1], self.target_size), -torch.inf, dtype=torch.float32)
        everywhere[..., self.ids_V] = logits.float()
        return Distribution.of(everywhere, sampling)
