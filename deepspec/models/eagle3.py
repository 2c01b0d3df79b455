"""EAGLE-3 drafter: one fused layer that drafts token by token (arXiv 2503.01840).

It is trained on its own outputs ("training-time test"). Index t drafts after the anchor x_{t+1}:

    step   input at index t                        position   keys it sees                           predicts
    0      fc(taps_t)           with x_{t+1}       t          step 0 at 0 … t                        x_{t+2}
    1      hidden of step 0     with x_{t+2}       t + 1      step 0 at 0 … t, step 1 at t           x_{t+3}
    2      hidden of step 1     with x_{t+3}       t + 2      step 0 at 0 … t, steps 1, 2 at t       x_{t+4}
    i      hidden of step i−1   with x_{t+1+i}     t + i      step 0 at 0 … t, steps 1 … i at t      x_{t+2+i}

These are the keys of a decoder that has committed x_0 … x_{t+1} and drafts i further tokens.

Shapes: B rows, S tokens, I steps, D hidden size, E = 2·D, F taps, Q queries, K key-value heads, C head dimension,
G drafted tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from deepspec.models.backbone import DraftLayer, KeysValues, Rope, Rotary, initialise, layer_style, recomputed
from deepspec.models.draft_config import style_of
from deepspec.models.drafter_base import DraftState, TrainedDrafter
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.kv_cache import KVCache
from deepspec.models.masks import Blocks, document_starts
from deepspec.models.protocol import Proposal
from deepspec.models.sampling import Distribution, Sampling


@dataclass
class Eagle3Output:
    """Training forward: logits of step i at index t, which predict x_{t+2+i}, are head(hidden_IBSD[i, b, t]).

    Indices whose label would leave the document hold values without meaning.
    """

    hidden_IBSD: Tensor


class Eagle3State(DraftState):
    """Step-0 keys of the committed context, and the hidden state at its last token, from which drafting goes on."""

    def __init__(self, cache: KVCache, width: int) -> None:
        super().__init__(cache)
        self.hidden = torch.zeros(cache.capacity, width, dtype=cache.keys[0].dtype, device=cache.device)

    def remove(self, row: int) -> int:
        """Swap-remove a row; returns the index of the row that took its place."""
        moved = super().remove(row)
        self.hidden[row] = self.hidden[moved]
        return moved


class Eagle3Drafter(TrainedDrafter):
    """One fused layer. ``hf_config`` is the drafter's own config (draft_config.draft_config)."""

    def __init__(
        self,
        config: DrafterConfig,
        hf_config: PretrainedConfig,
        head: FrozenHead,
        draft_ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__(config, hf_config, head, draft_ids)
        style = layer_style(style_of(hf_config))
        width = hf_config.hidden_size
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.layers = nn.ModuleList([DraftLayer(hf_config, style, fused=True, qk_norm=config.qk_norm)])
        self.norm = style.norm(width, eps=hf_config.rms_norm_eps)
        self.rotary = Rotary(hf_config, style)
        initialise(self, hf_config.initializer_range)

    @property
    def _layer(self) -> Any:
        return self.layers[0]

    def training_forward(self, batch: Any) -> Eagle3Output:
        """All ``ttt_length`` steps of a DraftBatch at every index; the batch's anchors are not used."""
        tokens_BS = batch.tokens_BS
        length = tokens_BS.shape[1]
        index_S = torch.arange(length, device=tokens_BS.device)
        start_BS = document_starts(batch.segments_BS)
        end_BS = (index_S + 1).expand_as(tokens_BS)
        hidden_BSD = self.fc(batch.taps_BSF.to(self.dtype))
        context: KeysValues | None = None  # the keys of step 0
        own: list[KeysValues] = []  # the keys of steps 1 … i
        steps = []
        for i in range(self.config.ttt_length):
            # Past the end the last token stands in: such rows have no label and do not count.
            next_S = (index_S + 1 + i).clamp(max=length - 1)
            embedded_BSD = self.embed(tokens_BS[:, next_S])
            x_BSE = self._layer.fuse(embedded_BSD, hidden_BSD)
            rope = self.rotary(hidden_BSD, batch.positions_BS + i)
            keys_BSKC, values_BSKC = self._layer.self_attn.keys_values(x_BSE, rope)
            if context is None:
                context = (keys_BSKC.transpose(1, 2), values_BSKC.transpose(1, 2))
            else:
                own.append((keys_BSKC, values_BSKC))
            blocks = Blocks(start_BS, end_BS, queries=1, own=len(own))
            arguments = (hidden_BSD, x_BSE, rope, context, tuple(own), blocks)
            hidden_BSD = recomputed(self._attend, *arguments) if self.recompute else self._attend(*arguments)
            steps.append(self.norm(hidden_BSD))
        return Eagle3Output(torch.stack(steps))

    def _attend(
        self,
        residual_BQD: Tensor,
        x_BQE: Tensor,
        rope: Rope,
        context: KeysValues,
        own: Sequence[KeysValues],
        blocks: Blocks,
    ) -> Tensor:
        """Output of the layer for fused inputs; query n sees ``context`` and the keys of every step in ``own`` at n."""
        attention = self._layer.self_attn
        queries_BQHC = attention.queries(x_BQE, rope)
        if own:
            # [B, Q, steps, K, C] → [B, Q·steps, K, C]: the keys of one query lie side by side.
            keys = torch.stack([keys_BQKC for keys_BQKC, _ in own], 2).flatten(1, 2)
            values = torch.stack([values_BQKC for _, values_BQKC in own], 2).flatten(1, 2)
        else:
            keys = values = queries_BQHC.new_empty(len(x_BQE), 0, attention.kv_heads, attention.head_dim)
        attended_BQD = attention.attend(queries_BQHC, context, (keys, values), blocks)
        return self._layer.finish(residual_BQD, attended_BQD)

    def start(self, rows: int, max_length: int) -> Eagle3State:
        """State for up to ``rows`` rows of at most ``max_length`` context tokens; none is active yet."""
        attention = self._layer.self_attn
        shape = (attention.kv_heads, attention.head_dim)
        cache = KVCache(1, rows, max_length, *shape, dtype=self.dtype, device=self.device)
        return Eagle3State(cache, self.hf_config.hidden_size)

    @torch.inference_mode()
    def extend(
        self,
        state: Eagle3State,
        tokens_BT1: Tensor,
        taps_BTF: Tensor,
        counts_B: Tensor | Sequence[int],
        rows: slice | None = None,
    ) -> None:
        """Append ``counts_B`` newly committed tokens per row, for all rows or those of ``rows``.

        Keys enter for every token; the layer's output is needed at the last one alone.
        """
        rows = slice(0, state.rows) if rows is None else rows
        cache = state.cache.rows_view(rows.start, rows.stop)
        counts = torch.as_tensor(counts_B, dtype=torch.long).cpu()
        width = int(counts.max())
        counts_on_device = counts.to(self.device)
        features_BTD = self.fc(taps_BTF[:, :width].to(self.dtype))
        embedded_BTD = self.embed(tokens_BT1[:, 1 : width + 1])
        x_BTE = self._layer.fuse(embedded_BTD, features_BTD)
        positions_BT = cache.lengths[:, None] + torch.arange(width, device=self.device)
        cos_BTC, sin_BTC = self.rotary(features_BTD, positions_BT)
        keys, values = self._layer.self_attn.keys_values(x_BTE, (cos_BTC, sin_BTC))
        cache.append(0, keys.transpose(1, 2), values.transpose(1, 2), counts_on_device)
        cache.advance(counts)

        row_B = torch.arange(len(counts), device=self.device)
        last_B = counts_on_device - 1
        out_B1D = self._attend(
            residual_BQD=features_BTD[row_B, last_B][:, None],
            x_BQE=x_BTE[row_B, last_B][:, None],
            rope=(cos_BTC[row_B, last_B][:, None], sin_BTC[row_B, last_B][:, None]),
            context=cache.view(0),
            own=[],
            blocks=_committed(cache.lengths, 0),
        )
        state.hidden[rows] = out_B1D[:, 0]

    @torch.inference_mode()
    def propose(
        self,
        state: Eagle3State,
        anchor_B: Tensor,
        sampling: Sampling,
        uniforms_BG: Tensor,
        length: int,
        greedy: bool = False,
    ) -> Proposal:
        """Draft ``length`` tokens after ``anchor_B``, one at a time; the anchor entered with ``extend``.

        The keys of drafted tokens live in this call alone, so a rejection needs no rollback.
        """
        sampling = Sampling() if greedy else sampling
        hidden_BD = state.hidden[: state.rows]
        own: list[KeysValues] = []
        drawn: list[Tensor] = []
        qs: list[Distribution] = []
        for i in range(length):
            if i:
                hidden_BD = self._draft_step(state, drawn[-1], hidden_BD, own, i)
            q = self.vocabulary.distribution(self.base_logits(self.norm(hidden_BD)), sampling)
            qs.append(q)
            drawn.append(q.sample(uniforms_BG[:, i]))
        return Proposal(torch.stack(drawn, 1), Distribution.stack(qs))

    def _draft_step(
        self, state: Eagle3State, tokens_B: Tensor, hidden_BD: Tensor, own: list[KeysValues], step: int
    ) -> Tensor:
        """Hidden state [B, D] after the drafted ``tokens_B``; its keys are appended to ``own``."""
        hidden_B1D = hidden_BD[:, None]
        x_B1E = self._layer.fuse(self.embed(tokens_B)[:, None], hidden_B1D)
        rope = self.rotary(hidden_B1D, state.lengths[:, None] - 1 + step)
        own.append(self._layer.self_attn.keys_values(x_B1E, rope))
        blocks = _committed(state.lengths, len(own))
        return self._attend(hidden_B1D, x_B1E, rope, state.cache.view(0), own, blocks)[:, 0]


def _committed(lengths_B: Tensor, own: int) -> Blocks:
    """One query per row that sees the whole committed context and ``own`` keys of its own."""
    end_BN = lengths_B[:, None]
    return Blocks(torch.zeros_like(end_BN), end_BN, queries=1, own=own)
