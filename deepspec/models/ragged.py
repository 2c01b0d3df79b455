"""Ragged forwards of unmodified transformers models.

Rows with different numbers of new tokens and different cached lengths run as one flat sequence, so padding costs
nothing outside attention:

    new tokens [B, T]          flat [1, N], through every linear layer        attention [B, T] over [B, L]
    a0 a1 a2 a3                                                               row 0: cached keys of a, then a0 … a3
    b0 b1 .  .          →      a0 a1 a2 a3 b0 b1 c0                    →      row 1: cached keys of b, then b0 b1
    c0 .  .  .                                                                row 2: cached keys of c, then c0

It plugs into transformers' attention and cache interfaces. Shapes: B rows, T longest number of new tokens,
N = Σ new tokens, L keys in view, H query heads, K key-value heads, C head dimension.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from deepspec.models.kv_cache import KVCache

ATTENTION = "deepspec_ragged"
# Query heads that share a key-value head become extra queries up to this many new tokens; copying keys is cheaper
# than the larger mask beyond it.
_PACK_TOKENS = 32


class RaggedPlan:
    """Where each flat token belongs, and the masks. Built once per forward, read by every layer."""

    def __init__(
        self,
        counts: list[int],
        windows: tuple[int | None, ...],
        cache: KVCache | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.counts = counts
        self.windows = windows
        self.cache = cache
        self.device = device
        self.dtype = dtype
        self.rows = len(counts)
        self.width = max(counts)
        starts = [0] * self.rows if cache is None else cache.host_lengths.tolist()
        # uniform: no row is padded. fresh: nothing is cached yet. start: the cached length, where all rows share it.
        self.uniform = min(counts) == self.width
        self.fresh = not any(starts)
        self.start = starts[0] if self.uniform and min(starts) == max(starts) else None
        self.total = max(start + count for start, count in zip(starts, counts, strict=True))
        steps_T = torch.arange(self.width, device=device)
        if self.fresh:
            self.positions_BT = steps_T.expand(self.rows, -1)
        else:
            assert cache is not None
            self.positions_BT = cache.lengths[:, None] + steps_T
        if not self.uniform:
            # Built on the host: boolean indexing on an accelerator would wait for it.
            pairs = [(row, step) for row, count in enumerate(counts) for step in range(count)]
            index = torch.tensor(pairs, dtype=torch.long).t().contiguous().to(device, non_blocking=True)
            self.row_N, self.step_N = index[0], index[1]
            self.flat_N = self.row_N * self.width + self.step_N
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}

    def flatten(self, x_BT: Tensor) -> Tensor:
        """[B, T, ...] → [1, N, ...], dropping padding."""
        flat = x_BT.flatten(0, 1)
        return (flat if self.uniform else flat[self.flat_N]).unsqueeze(0)

    def unflatten(self, x_1N: Tensor) -> Tensor:
        """[1, N, ...] → [B, T, ...], padding zero."""
        if self.uniform:
            return x_1N[0].unflatten(0, (self.rows, self.width))
        padded = x_1N.new_zeros(self.rows * self.width, *x_1N.shape[2:])
        padded[self.flat_N] = x_1N[0]
        return padded.unflatten(0, (self.rows, self.width))

    @property
    def positions(self) -> Tensor:
        """Absolute positions of the flat tokens, [1, N]."""
        return self.flatten(self.positions_BT)

    def mask(self, window: int | None, repeats: int) -> Tensor | None:
        """Additive mask [B or 1, 1, repeats·T, L], or None where the kernel needs none.

        None means plain causal attention from position 0, or a single query that sees every key.
        """
        key = (window, repeats)
        if key not in self._masks:
            self._masks[key] = self._make_mask(window, repeats)
        return self._masks[key]

    def _make_mask(self, window: int | None, repeats: int) -> Tensor | None:
        if self.fresh and window is None and repeats == 1:
            return None  # the kernel's own causal mask is the right one
        if self.width == 1 and self.start is not None and (window is None or self.total <= window):
            return None  # every row is one query that sees every key in view
        positions = self.positions_BT[:1] if self.fresh else self.positions_BT
        keys_L = torch.arange(self.total, device=self.device)
        seen_BTL = keys_L <= positions[..., None]
        if window is not None:
            seen_BTL &= keys_L > positions[..., None] - window
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        mask_B1TL = torch.where(seen_BTL, zero, torch.finfo(self.dtype).min).unsqueeze(1)
        return mask_B1TL.repeat(1, 1, repeats, 1)

    def write(self, layer: int, k_1KNC: Tensor, v_1KNC: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; returns the views [B, K, L, C] that attention reads."""
        assert self.cache is not None
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        n = self.rows
        if self.start is not None:
            span = slice(self.start, self.start + self.width)
            keys[:n, :, span] = self._padded(k_1KNC)
            values[:n, :, span] = self._padded(v_1KNC)
        else:
            row, position = self._slots()
            keys[row, :, position] = k_1KNC[0].transpose(0, 1)
            values[row, :, position] = v_1KNC[0].transpose(0, 1)
        return keys[:n, :, : self.total], values[:n, :, : self.total]

    def _slots(self) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_slot"):
            rows_B = torch.arange(self.rows, device=self.device)
            row = rows_B.repeat_interleave(self.width) if self.uniform else self.row_N
            self._slot = (row, self.positions[0])
        return self._slot

    def _padded(self, x_1HNC: Tensor) -> Tensor:
        """[1, H, N, C] → [B, H, T, C]."""
        return self.unflatten(x_1HNC.transpose(1, 2)).transpose(1, 2)

    def attend(self, query_1HNC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, window: int | None, scale: float) -> Tensor:
        """Attention of the flat queries over each row's keys (flat like the queries without a cache); [1, N, H, C]."""
        q_BHTC = self._padded(query_1HNC)
        if self.cache is None:
            k_BKLC = self._padded(k_BKLC)
            v_BKLC = self._padded(v_BKLC)
        heads = q_BHTC.shape[1]
        groups = heads // k_BKLC.shape[1]
        packed = groups > 1 and self.width <= _PACK_TOKENS
        if packed:
            # The heads of a group become further queries: [B, K, groups·T, C].
            q_BHTC = q_BHTC.unflatten(1, (-1, groups)).flatten(2, 3)
        elif groups > 1:
            k_BKLC = k_BKLC.repeat_interleave(groups, 1)
            v_BKLC = v_BKLC.repeat_interleave(groups, 1)
        mask = self.mask(window, groups if packed else 1)
        causal = mask is None and self.width > 1
        out_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BKLC, v_BKLC, attn_mask=mask, is_causal=causal, scale=scale)
        if packed:
            out_BHTC = out_BHTC.unflatten(2, (groups, self.width)).flatten(1, 2)
        assert out_BHTC.shape[1] == heads
        return self.flatten(out_BHTC.transpose(1, 2))


class RaggedCache(Cache):
    """transformers' cache interface over a plan: ``update`` stores ragged keys in the slabs."""

    def __init__(self, plan: RaggedPlan) -> None:
        super().__init__(layers=[])
        self.plan = plan

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Write and return the views of all rows."""
        return self.plan.write(layer_idx, key_states, value_states)


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    ragged: RaggedPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers; without a plan it is transformers' own sdpa."""
    if ragged is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("softcap") is not None:
        raise ValueError("attention logit soft-capping is not supported for targets: use a family without it")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = ragged.windows[module.layer_idx]  # type: ignore[index]
    return ragged.attend(query, key, value, window, scale), None


AttentionInterface.register(ATTENTION, ragged_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
