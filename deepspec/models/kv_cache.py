"""Preallocated key-value slabs with one length per row, for drafters and targets.

A slab of one layer, three active rows of a capacity of four:

    row 0   k k k k k k k k . . . . | x        k  valid position (below the row's length)
    row 1   k k k s s s . . . . . . | x        s  stale: left behind by a rollback, masked by whoever reads
    row 2   k k k k k . . . . . . . | x        .  never written, zero
    (free)  . . . . . . . . . . . . | x        x  swallows the writes of padding

Rolling back is lowering a length. Shapes: n active rows, K key-value heads, L cached positions in view, T new tokens,
C head dimension.
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
        heads_of_layers = _per_layer(kv_heads, num_layers, "kv_heads")
        dims_of_layers = _per_layer(head_dim, num_layers, "head_dim")
        self.capacity = rows
        self.max_length = max_length
        self.device = torch.device(device)
        self.rows = 0
        self._parent: KVCache | None = None
        self._first_row = 0
        positions = min(max_length, _FIRST_POSITIONS)
        # Zeros, not empty: a masked position still multiplies its value, and 0·NaN would be NaN.
        self.keys = [
            torch.zeros(rows, heads, positions + 1, dim, dtype=dtype, device=device)
            for heads, dim in zip(heads_of_layers, dims_of_layers, strict=True)
        ]
        self.values = [torch.zeros_like(slab) for slab in self.keys]
        # Lengths live twice, so that the host can plan a forward without waiting for the device.
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
        view.capacity = stop - start
        view.rows = stop - start
        view.max_length = self.max_length
        view.device = self.device
        view._parent = self
        view._first_row = start
        view._share_slabs()
        view._host = self._host[start:stop]
        view._device = self._device[start:stop]
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
        used = self.positions
        # Doubling makes the copies rare.
        wanted = min(self.max_length, max(positions, 2 * used))
        for slabs in (self.keys, self.values):
            for layer, slab in enumerate(slabs):
                rows, heads, _, dim = slab.shape
                larger = slab.new_zeros(rows, heads, wanted + 1, dim)
                larger[: self.rows, :, :used] = slab[: self.rows, :, :used]
                slabs[layer] = larger

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
        start = self.longest
        needed = start + tokens
        # Padding may reach past max_length: it is dropped, so no room is needed for it.
        self.reserve(needed if counts_n is None else min(needed, self.max_length))
        keys = self.keys[layer][: self.rows]
        values = self.values[layer][: self.rows]
        equal_lengths = int(self.host_lengths.min()) == start
        if counts_n is None and equal_lengths:
            keys[:, :, start : start + tokens] = k_nKTC
            values[:, :, start : start + tokens] = v_nKTC
            return
        steps_T = torch.arange(tokens, device=self.device)
        positions_nT = (self.lengths[:, None] + steps_T).clamp_max_(self.positions)
        if counts_n is not None:
            padding_nT = steps_T >= counts_n[:, None]
            positions_nT = positions_nT.masked_fill_(padding_nT, self.positions)
        rows_n1 = torch.arange(self.rows, device=self.device)[:, None]
        keys[rows_n1, :, positions_nT] = k_nKTC.transpose(1, 2)
        values[rows_n1, :, positions_nT] = v_nKTC.transpose(1, 2)

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, K, L, C] of the active rows, L = longest length.

        Positions past a row's length are stale: mask them.
        """
        stop = self.longest
        keys = self.keys[layer][: self.rows, :, :stop]
        values = self.values[layer][: self.rows, :, :stop]
        return keys, values
