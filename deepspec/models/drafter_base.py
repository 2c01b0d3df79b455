"""What every trained drafter shares: its configs, the target's frozen embedding and head, and its draft vocabulary.

Shapes: D hidden size, V draft vocabulary.
"""

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from deepspec.models.confidence_scale import ConfidenceScale
from deepspec.models.draft_vocabulary import DraftVocabulary
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.kv_cache import KVCache


class TrainedDrafter(nn.Module, abc.ABC):
    """Abstract. ``head`` is not a module: no optimizer sees it, it gets no gradient, and ``.to()`` does not move it."""

    def __init__(
        self, config: DrafterConfig, hf_config: PretrainedConfig, head: FrozenHead, draft_ids: Sequence[int] | None
    ) -> None:
        super().__init__()
        self.config, self.hf_config, self.head = config, hf_config, head
        self.taps: tuple[int, ...] = tuple(hf_config.target_layer_ids)
        self.block_size = config.block_size
        self.metadata: dict[str, Any] = {}  # the checkpoint's ``deepspec`` object, where it was loaded from one
        self.recompute = False  # layers' activations are made again in backward instead of kept (EngineConfig)
        self.confidence_scale: ConfidenceScale | None = None  # of a calibrated confidence head
        self.vocabulary = DraftVocabulary(head.vocab_size, draft_ids)
        # Trained in float32 whatever the head's dtype, like every other weight.
        own = (
            nn.Embedding.from_pretrained(head.embed_VD.float().clone(), freeze=False) if config.own_embedding else None
        )
        self.embed_tokens = own

    @property
    def dtype(self) -> torch.dtype:
        """Of the drafter's own weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Of the drafter's own weights; ``head`` must be on it too."""
        return next(self.parameters()).device

    @property
    def markov_weight_VR(self) -> Tensor | None:
        """W2 of a Markov head, or None without one."""
        return None

    @property
    def draft_ids_V(self) -> Tensor | None:
        """Target ids of a reduced draft vocabulary, ascending; None for the whole one."""
        return self.vocabulary.ids_V

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., D], scaled as the target scales them."""
        if self.embed_tokens is None:
            return self.head.embed(tokens).to(self.dtype)
        return self.embed_tokens(tokens) * self.head.embed_scale

    def base_logits(self, hidden: Tensor) -> Tensor:
        """The head's fp32 logits [..., V] over the draft vocabulary, without a Markov bias."""
        return self.vocabulary.head(self.head).full_logits(hidden.to(self.head.dtype))

    @abc.abstractmethod
    def training_forward(self, batch: Any) -> Any:
        """Hidden states of a data.batch.DraftBatch, for the loss."""

    def forward(self, batch: Any) -> Any:
        """``training_forward``, under the name that training engines call."""
        return self.training_forward(batch)


class DraftState:
    """Context keys and values of the rows being decoded; rows join and leave as in KVCache."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    @property
    def rows(self) -> int:
        """Active rows."""
        return self.cache.rows

    @property
    def lengths(self) -> Tensor:
        """Committed context per row, [rows]; the anchor stands at this position."""
        return self.cache.lengths

    def add(self, count: int = 1) -> slice:
        """Activate rows without context."""
        return self.cache.add(count)

    def remove(self, row: int) -> int:
        """Swap-remove a row; returns the index of the row that took its place."""
        return self.cache.remove(row)

    def truncate(self, lengths: Tensor | Sequence[int]) -> None:
        """Roll every row back to ``lengths`` tokens of context."""
        self.cache.truncate(lengths)


def spread(start_BN: Tensor, size: int) -> Tensor:
    """start, start + 1, … start + size − 1 of every block, [B, N·size]."""
    return (start_BN[..., None] + torch.arange(size, device=start_BN.device)).flatten(1)
