"""Which rows of the fused loss are computed, in which order and in which chunks. Knows indices, no states.

Shapes: X rows, U target positions (groups of rows that share a last state).
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class RowPlan:
    """Active rows grouped by target position, positions with equally many rows adjacent.

    order_X: indices of the active rows in processing order; targets_U: the last-state row of each group, in the same
    order; counts: per group its number of rows, on the host. Making one reads the index back to the host once, so make
    it from the batch before the drafter's forward is queued.
    """

    order_X: torch.Tensor
    targets_U: torch.Tensor
    counts: np.ndarray

    @classmethod
    def of(cls, index_X: torch.Tensor, active_X: torch.Tensor) -> "RowPlan":
        """Plan rows whose target is last state ``index_X``; rows that are not active are never computed."""
        index = torch.where(active_X, index_X, -1).cpu().numpy()
        rows = np.flatnonzero(index >= 0)
        targets, group, counts = np.unique(index[rows], return_inverse=True, return_counts=True)
        by_count = np.argsort(counts, kind="stable")
        rank = np.empty_like(by_count)
        rank[by_count] = np.arange(len(by_count))
        order = rows[np.argsort(rank[group], kind="stable")]
        device = index_X.device
        return cls(
            order_X=torch.from_numpy(order).to(device),
            targets_U=torch.from_numpy(targets[by_count]).to(device),
            counts=counts[by_count],
        )

    def chunks(self, rows: int, tile_rows: int) -> list["Chunk"]:
        """Split into chunks of at most ``rows`` rows (one position at least), each tiled for the elementwise passes."""
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        made, first = [], 0
        while first < len(self.counts):
            last = int(np.searchsorted(ends, ends[first] + rows, side="right")) - 1
            last = max(last, first + 1)
            made.append(Chunk(first, last, int(ends[first]), int(ends[last]), self._tiles(first, last, tile_rows)))
            first = last
        return made

    def _tiles(self, first: int, last: int, tile_rows: int) -> list["Tile"]:
        tiles, position, row = [], first, 0
        while position < last:
            count = int(self.counts[position])
            same = int(np.searchsorted(self.counts, count, side="right"))
            stop = min(same, last, position + max(1, tile_rows // count))
            tiles.append(Tile(position - first, stop - first, row, row + (stop - position) * count, count))
            row += (stop - position) * count
            position = stop
        return tiles


@dataclass(frozen=True)
class Chunk:
    """Positions [u0, u1) of a plan and their rows [x0, x1), with tiles relative to both starts."""

    u0: int
    u1: int
    x0: int
    x1: int
    tiles: list["Tile"]


@dataclass(frozen=True)
class Tile:
    """Positions [u0, u1) and rows [x0, x1) of a chunk; every position has ``count`` rows."""

    u0: int
    u1: int
    x0: int
    x1: int
    count: int
