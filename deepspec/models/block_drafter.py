"""The block drafter: a backbone that fills a block in one pass (DFlash) and, with heads, draws it in order (DSpark).

Training and decoding share the backbone's forward; heads are composed in. The embedding and the head stay the target's:
``head`` is not a module and no optimizer ever sees it. Computes hidden states and proposals, never a loss.
Shapes: B rows, S tokens, N anchors, G = γ block size, D hidden size, F taps, R rank, V draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from deepspec.models.backbone import Backbone, KeysValues
from deepspec.models.drafter_base import DraftState, TrainedDrafter, spread
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.heads import ConfidenceHead, MarkovHead
from deepspec.models.kv_cache import KVCache
from deepspec.models.masks import Blocks, decoding_blocks, training_blocks
from deepspec.models.protocol import Proposal
from deepspec.models.sampling import Distribution, Sampling


@dataclass
class BlockOutput:
    """Training forward: logits of position k = head(hidden) + markov @ W2ᵀ (no second term where markov is None).

    Blocks of absent anchors hold values without meaning.
    """

    hidden_BNGD: Tensor
    markov_BNGR: Tensor | None
    confidence_logits_BNG: Tensor | None


class BlockDrafter(TrainedDrafter):
    """DFlash and DSpark. ``hf_config`` is the drafter's own config (draft_config.draft_config).

    ``shortlist`` bounds decoding's cost of the Markov head: the bias is computed for that many tokens with the largest
    U_k and q is zero elsewhere, which stays lossless but is another q. 0, the default on every device, takes every
    token, as training and the paper do.
    """

    def __init__(
        self,
        config: DrafterConfig,
        hf_config: PretrainedConfig,
        head: FrozenHead,
        draft_ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__(config, hf_config, head, draft_ids)
        self.shortlist = 0
        self.mask_token_id = int(hf_config.mask_token_id)
        self.backbone = Backbone(hf_config, len(self.taps))
        width, rank = hf_config.hidden_size, config.markov_rank or 0
        self.markov_head = (
            MarkovHead(config.markov_head, head.vocab_size, self.vocabulary.size, rank, width) if rank else None
        )
        self.confidence_head = (
            ConfidenceHead(width, rank if config.confidence_with_markov else 0) if config.confidence else None
        )
        self.mask_embedding: nn.Parameter | None = None
        if config.learned_mask:
            self.mask_embedding = nn.Parameter(self.embed_mask().detach().clone())

    @property
    def markov_weight_VR(self) -> Tensor | None:
        """W2, or None without a Markov head."""
        return None if self.markov_head is None else self.markov_head.markov_w2.weight

    def embed_mask(self) -> Tensor:
        """Input [D] of the positions after the anchor."""
        if self.mask_embedding is not None:
            return self.mask_embedding
        return self.embed(torch.tensor(self.mask_token_id, device=self.head.embed_VD.device))

    def training_forward(self, batch: Any) -> BlockOutput:
        """Hidden states of every block of a data.batch.DraftBatch, teacher-forced: x_{k-1} is the batch's token."""
        tokens_BS, anchors_BN = batch.tokens_BS, batch.anchors_BN
        size, at_BN = self.block_size, anchors_BN.clamp(min=0)
        positions_BQ = spread(batch.positions_BS.gather(1, at_BN), size)
        blocks = training_blocks(batch.segments_BS, anchors_BN, size, self.config.sliding_window)
        contexts = self.backbone.context(batch.taps_BSF.to(self.dtype), batch.positions_BS)
        hidden_BQD = self._fill(tokens_BS.gather(1, at_BN), positions_BQ, contexts, blocks)
        hidden_BNGD = hidden_BQD.unflatten(1, (-1, size))
        previous_BNGR = markov_BNGR = None
        if self.markov_head is not None:
            index_BQ = spread(at_BN, size).clamp(max=tokens_BS.shape[1] - 1)
            previous_BNGR = self.markov_head.embed(tokens_BS.gather(1, index_BQ)).unflatten(1, (-1, size))
            markov_BNGR = self.markov_head(previous_BNGR, hidden_BNGD)
        return BlockOutput(hidden_BNGD, markov_BNGR, self._confidence(hidden_BNGD, previous_BNGR))

    def _fill(
        self, anchor_tokens_BN: Tensor, positions_BQ: Tensor, contexts: Sequence[KeysValues], blocks: Blocks
    ) -> Tensor:
        """One pass over blocks [anchor, mask, …, mask]: hidden states [B, N·G, D]."""
        rows, count = anchor_tokens_BN.shape
        masks = self.embed_mask().expand(rows, count, self.block_size - 1, -1)
        inputs_BNGD = torch.cat([self.embed(anchor_tokens_BN)[:, :, None], masks], 2)
        return self.backbone(inputs_BNGD.flatten(1, 2), positions_BQ, contexts, blocks, self.recompute)

    def _confidence(self, hidden: Tensor, previous: Tensor | None) -> Tensor | None:
        if self.confidence_head is None:
            return None
        return self.confidence_head(hidden, previous if self.config.confidence_with_markov else None)

    def start(self, rows: int, max_length: int) -> DraftState:
        """State for up to ``rows`` rows of at most ``max_length`` context tokens; none is active yet."""
        attention: Any = self.backbone.layers[0].self_attn
        layers, shape = len(self.backbone.layers), (attention.kv_heads, attention.head_dim)
        return DraftState(KVCache(layers, rows, max_length, *shape, dtype=self.dtype, device=self.device))

    @torch.inference_mode()
    def extend(
        self,
        state: DraftState,
        tokens_BT1: Tensor,
        taps_BTF: Tensor,
        counts_B: Tensor | Sequence[int],
        rows: slice | None = None,
    ) -> None:
        """Append the taps of ``counts_B`` newly committed tokens per row, for all rows or those of ``rows``.

        The tokens themselves are not read: a block drafter knows its context by the taps alone.
        """
        cache = state.cache if rows is None else state.cache.rows_view(rows.start, rows.stop)
        counts = torch.as_tensor(counts_B, dtype=torch.long).cpu()
        width = int(counts.max())
        taps_BTF = taps_BTF[:, :width]
        positions_BT = cache.lengths[:, None] + torch.arange(width, device=self.device)
        full = bool((counts == width).all())
        for layer, (keys, values) in enumerate(self.backbone.context(taps_BTF.to(self.dtype), positions_BT)):
            cache.append(layer, keys, values, None if full else counts.to(self.device))
        cache.advance(counts)

    @torch.inference_mode()
    def propose(
        self,
        state: DraftState,
        anchor_B: Tensor,
        sampling: Sampling,
        uniforms_BG: Tensor,
        length: int,
        greedy: bool = False,
    ) -> Proposal:
        """Draft ``length`` ≤ γ tokens after ``anchor_B``: one backbone pass, then one Markov draw per position.

        ``uniforms_BG`` in [0, 1) decide the draws; ``greedy`` proposes the argmax with all mass on it.
        """
        positions_BG = spread(state.lengths[:, None], self.block_size)
        blocks = decoding_blocks(state.lengths, self.block_size, self.config.sliding_window)
        contexts = [state.cache.view(layer) for layer in range(len(self.backbone.layers))]
        hidden_BGD = self._fill(anchor_B[:, None], positions_BG, contexts, blocks)[:, :length]
        base_BGV = self.base_logits(hidden_BGD)
        sampling = Sampling() if greedy else sampling
        if self.markov_head is None:
            q = self.vocabulary.distribution(base_BGV, sampling)
            return Proposal(q.sample(uniforms_BG[:, :length]), q, self._probability(hidden_BGD, None))
        q, tokens_BG, previous_BGR = self._draw(base_BGV, hidden_BGD, anchor_B, sampling, uniforms_BG)
        return Proposal(tokens_BG, q, self._probability(hidden_BGD, previous_BGR))

    def _draw(
        self, base_BGV: Tensor, hidden_BGD: Tensor, anchor_B: Tensor, sampling: Sampling, uniforms_BG: Tensor
    ) -> tuple[Distribution, Tensor, Tensor]:
        """Sequential draws x_k ~ softmax(U_k + m_k W2ᵀ): q, tokens [B, G] and W1[x_{k-1}] [B, G, R]."""
        assert self.markov_head is not None
        wanted = self._shortlist_size()
        top = base_BGV.topk(wanted, dim=-1, sorted=False) if wanted < base_BGV.shape[2] else None
        token_B, memory = anchor_B, None
        drawn: list[Tensor] = []
        qs: list[Distribution] = []
        seen: list[Tensor] = []
        for k in range(base_BGV.shape[1]):
            previous_BR = self.markov_head.embed(token_B)
            m_BR, memory = self.markov_head.step(previous_BR, hidden_BGD[:, k], memory)
            if top is None:
                logits_BV = base_BGV[:, k] + F.linear(m_BR, self.markov_head.markov_w2.weight)
            else:
                logits_BV = self._biased(base_BGV[:, k], top.values[:, k], top.indices[:, k], m_BR)
            q = self.vocabulary.distribution(logits_BV, sampling)
            token_B = q.sample(uniforms_BG[:, k])
            drawn.append(token_B)
            qs.append(q)
            seen.append(previous_BR)
        return Distribution.stack(qs), torch.stack(drawn, 1), torch.stack(seen, 1)

    def _shortlist_size(self) -> int:
        size = self.vocabulary.size
        return min(self.shortlist or size, size)

    def _biased(self, base_BV: Tensor, values_BM: Tensor, ids_BM: Tensor, m_BR: Tensor) -> Tensor:
        """Logits of the shortlist with their Markov bias, −inf elsewhere."""
        assert self.markov_head is not None
        rows_BMR = F.embedding(ids_BM, self.markov_head.markov_w2.weight)
        logits_BM = values_BM + torch.bmm(rows_BMR, m_BR[..., None])[..., 0]
        # Base logits are float32 or wider, the head's weights may be wider still.
        logits_BM = logits_BM.to(base_BV.dtype)
        return torch.full_like(base_BV, -torch.inf).scatter_(-1, ids_BM, logits_BM)

    def _probability(self, hidden_BGD: Tensor, previous_BGR: Tensor | None) -> Tensor | None:
        """c_k of every position, calibrated where the drafter is."""
        confidence_BG = self._confidence(hidden_BGD, previous_BGR)
        if confidence_BG is None:
            return None
        logits_BG = confidence_BG.float()
        if self.confidence_scale is not None:
            logits_BG = self.confidence_scale.logits(logits_BG)
        return torch.sigmoid(logits_BG)
