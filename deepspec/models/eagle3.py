"""EAGLE-3: one fused layer that drafts token by token and is trained on its own outputs (training-time test).

Index t drafts after the anchor x_{t+1}: step 0 joins fc(taps_t) with x_{t+1} and predicts x_{t+2}; step i joins the
hidden state of step i − 1 with x_{t+1+i} and predicts x_{t+2+i}. A step sees the step-0 keys up to t and the keys that
steps 1…i left at t, at positions t + i: what a decoder that has committed x_0…x_{t+1} sees. Source: arXiv 2503.01840.
Shapes: B rows, S tokens, I steps, D hidden size, F taps, K key-value heads, C head dim, G drafted tokens.
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
        style, width = layer_style(style_of(hf_config)), hf_config.hidden_size
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
        tokens_BS, length = batch.tokens_BS, batch.tokens_BS.shape[1]
        index_S = torch.arange(length, device=tokens_BS.device)
        start_BS = document_starts(batch.segments_BS)
        end_BS = (index_S + 1).expand_as(tokens_BS)
        hidden_BSD = self.fc(batch.taps_BSF.to(self.dtype))
        context: KeysValues | None = None
        own: list[KeysValues] = []
        steps = []
        for i in range(self.config.ttt_length):
            next_BSD = self.embed(tokens_BS[:, (index_S + 1 + i).clamp(max=length - 1)])
            x_BSE, rope = self._layer.fuse(next_BSD, hidden_BSD), self.rotary(hidden_BSD, batch.positions_BS + i)
            keys_values = self._layer.self_attn.keys_values(x_BSE, rope)
            if context is None:
                context = keys_values[0].transpose(1, 2), keys_values[1].transpose(1, 2)
            else:
                own.append(keys_values)
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
        """The layer's output for fused inputs that see ``context`` and, each, its keys of the steps in ``own``."""
        attention = self._layer.self_attn
        queries_BQHC = attention.queries(x_BQE, rope)
        if own:
            mine = [torch.stack(parts, 2).flatten(1, 2) for parts in zip(*own, strict=True)]
        else:
            mine = [queries_BQHC.new_empty(len(x_BQE), 0, attention.kv_heads, attention.head_dim)] * 2
        return self._layer.finish(residual_BQD, attention.attend(queries_BQHC, context, (mine[0], mine[1]), blocks))

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
        g_BTD = self.fc(taps_BTF[:, :width].to(self.dtype))
        x_BTE = self._layer.fuse(self.embed(tokens_BT1[:, 1 : width + 1]), g_BTD)
        positions_BT = cache.lengths[:, None] + torch.arange(width, device=self.device)
        rope = self.rotary(g_BTD, positions_BT)
        keys, values = self._layer.self_attn.keys_values(x_BTE, rope)
        cache.append(0, keys.transpose(1, 2), values.transpose(1, 2), counts.to(self.device))
        cache.advance(counts)
        row_B, last_B = torch.arange(len(counts), device=self.device), counts.to(self.device) - 1
        g_B1D, x_B1E = g_BTD[row_B, last_B][:, None], x_BTE[row_B, last_B][:, None]
        last_rope = rope[0][row_B, last_B][:, None], rope[1][row_B, last_B][:, None]
        out_B1D = self._attend(g_B1D, x_B1E, last_rope, cache.view(0), [], _committed(cache.lengths, 0))
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
