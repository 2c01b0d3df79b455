"""Preallocated key-value slabs with one length per row, for drafters and targets. Knows no attention and no models
(ragged.py joins it to transformers).

Letters: n active rows, K key-value heads, L cached positions in view, T new tokens, C head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_POSITIONS = 256


class CacheFullError(ValueError):
    """More rows or positions than the cache was made for."""


def _per_layer(value: int | Sequence[int], layers: int, name: str) -> list[int]:
    values = [value] * layers if isinstance(value, int) else [int(item) for item in value]
    if len(values) != layers:
        raise CacheFullError(f"{name} has {len(values)} entries for {layers} layers")
    return values


class KVCache:
    """Slabs [rows, K, positions + 1, C] per layer. Rows 0…n−1 are active and hold ``lengths[row]`` valid positions.

    A forward appends in every layer at the current lengths, then calls ``advance`` once. The extra last position
    swallows writes of padding, so ragged appends need no branches. Removing a row moves the last one into its place;
    rolling back is lowering a length. Positions double up to ``max_length`` as rows need them: a rare copy, instead of
    memory for every row to become as long as the longest could.
    """

    def __init__(
        self,
        num_layers: int,
        rows: int,
        max_length: int,
        kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        heads, dims = _per_layer(kv_heads, num_layers, "kv_heads"), _per_layer(head_dim, num_layers, "head_dim")
        self.capacity, self.max_length, self.device = rows, max_length, torch.device(device)
        self.rows = 0
        self._parent: KVCache | None = None
        self._first_row = 0
        positions = min(max_length, _FIRST_POSITIONS)
        # Zeros, not empty: a masked position still multiplies its value, and 0·NaN would be NaN.
        self.keys = [
            torch.zeros(rows, k, positions + 1, c, dtype=dtype, device=device) for k, c in zip(heads, dims, strict=True)
        ]
        self.values = [torch.zeros_like(slab) for slab in self.keys]
        self._host = torch.zeros(rows, dtype=torch.long)
        self._device = self._host if self.device.type == "cpu" else self._host.to(self.device)

    @property
    def num_layers(self) -> int:
        """Number of layers that have slabs."""
        return len(self.keys)

    @property
    def lengths(self) -> Tensor:
        """Valid positions of the active rows, on the cache's device; read only."""
        return self._device[: self.rows]

    @property
    def host_lengths(self) -> Tensor:
        """The same on the CPU, without synchronising; read only."""
        return self._host[: self.rows]

    @property
    def positions(self) -> int:
        """Positions allocated per row; the index of the one that swallows padding."""
        return self.keys[0].shape[2] - 1

    @property
    def longest(self) -> int:
        """Largest length of the active rows, known on the host."""
        return int(self._host[: self.rows].max()) if self.rows else 0

    def rows_view(self, start: int, stop: int) -> "KVCache":
        """The active rows start…stop−1 as a cache of their own over the same memory (for the prefill of new rows)."""
        if not 0 <= start <= stop <= self.rows:
            raise CacheFullError(f"rows {start}:{stop} are not among the {self.rows} active rows")
        view = KVCache.__new__(KVCache)
        view.capacity = view.rows = stop - start
        view.max_length, view.device = self.max_length, self.device
        view._parent, view._first_row = self, start
        view._share_slabs()
        view._host, view._device = self._host[start:stop], self._device[start:stop]
        return view

    def _share_slabs(self) -> None:
        assert self._parent is not None
        rows = slice(self._first_row, self._first_row + self.capacity)
        self.keys = [slab[rows] for slab in self._parent.keys]
        self.values = [slab[rows] for slab in self._parent.values]

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` per row; CacheFullError beyond max_length."""
        if positions > self.max_length:
            raise CacheFullError(f"a row of {positions} positions exceeds max_length {self.max_length}")
        if positions <= self.positions:
            return
        if self._parent is not None:
            self._parent.reserve(positions)
            self._share_slabs()
            return
        wanted, used = min(self.max_length, max(positions, 2 * self.positions)), self.positions
        for slabs in (self.keys, self.values):
            for layer, slab in enumerate(slabs):
                grown = slab.new_zeros(*slab.shape[:2], wanted + 1, slab.shape[3])
                grown[: self.rows, :, :used] = slab[: self.rows, :, :used]
                slabs[layer] = grown

    def add(self, count: int = 1) -> slice:
        """Activate ``count`` rows of length 0 and return their range; CacheFullError beyond the capacity."""
        if self.rows + count > self.capacity:
            raise CacheFullError(f"cache of {self.capacity} rows has {self.rows} active, cannot add {count}")
        new = slice(self.rows, self.rows + count)
        self._host[new] = 0
        self._device[new] = 0  # the same memory on the CPU
        self.rows += count
        return new

    @torch.inference_mode()
    def remove(self, row: int) -> int:
        """Deactivate ``row``; the last active row takes its place. Returns the index that was moved.

        In inference mode, because slabs that grew in it cannot be written outside.
        """
        if not 0 <= row < self.rows:
            raise CacheFullError(f"row {row} is not among the {self.rows} active rows")
        last = self.rows - 1
        if row != last:
            length = int(self._host[last])
            for slab in (*self.keys, *self.values):
                slab[row, :, :length] = slab[last, :, :length]
            self._host[row] = self._host[last]
            self._device[row] = self._device[last]
        self.rows = last
        return last

    def truncate(self, lengths_n: Tensor | Sequence[int]) -> None:
        """Roll the active rows back to ``lengths_n`` (never longer than they are). A device tensor waits."""
        wanted = torch.as_tensor(lengths_n, dtype=torch.long).cpu()
        assert bool((wanted <= self.host_lengths).all()), "truncate cannot lengthen a row"
        self._set(wanted)

    def advance(self, counts_n: Tensor | Sequence[int] | int) -> None:
        """Declare ``counts_n`` appended positions of each row valid: once per forward, after its last layer."""
        if isinstance(counts_n, int):
            self._set(self.host_lengths + counts_n)
        else:
            self._set(self.host_lengths + torch.as_tensor(counts_n, dtype=torch.long).cpu())

    def _set(self, lengths_n: Tensor) -> None:
        if self.rows and int(lengths_n.max()) > self.max_length:
            raise CacheFullError(f"a row of {int(lengths_n.max())} positions exceeds max_length {self.max_length}")
        self._host[: self.rows] = lengths_n
        if self.device.type != "cpu":
            self._device[: self.rows].copy_(lengths_n, non_blocking=True)

    def append(self, layer: int, k_nKTC: Tensor, v_nKTC: Tensor, counts_n: Tensor | None = None) -> None:
        """Write T new positions after each row's length; entries at or past ``counts_n`` (device) are padding and are
        dropped. Lengths change only in ``advance``."""
        tokens = k_nKTC.shape[2]
        host = self.host_lengths
        needed = self.longest + tokens
        self.reserve(needed if counts_n is None else min(needed, self.max_length))
        keys, values = self.keys[layer][: self.rows], self.values[layer][: self.rows]
        if counts_n is None and int(host.min()) == (start := int(host.max())):
            keys[:, :, start : start + tokens] = k_nKTC
            values[:, :, start : start + tokens] = v_nKTC
            return
        steps = torch.arange(tokens, device=self.device)
        positions_nT = (self.lengths[:, None] + steps).clamp_max_(self.positions)
        if counts_n is not None:
            positions_nT = positions_nT.masked_fill_(steps >= counts_n[:, None], self.positions)
        rows_n1 = torch.arange(self.rows, device=self.device)[:, None]
        keys[rows_n1, :, positions_nT] = k_nKTC.transpose(1, 2)
        values[rows_n1, :, positions_nT] = v_nKTC.transpose(1, 2)

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, K, L, C] of the active rows, L = longest length. Positions past a row's length are stale:
        mask them."""
        stop = self.longest
        return self.keys[layer][: self.rows, :, :stop], self.values[layer][: self.rows, :, :stop]
