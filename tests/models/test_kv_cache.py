"""Slabs: appends, growth, swap-remove, rollback, views. Against lists of rows."""

import pytest
import torch

from deepspec.models import kv_cache
from deepspec.models.kv_cache import CacheFullError, KVCache


class Reference:
    """Rows as lists of positions."""

    def __init__(self):
        self.rows = []

    def append(self, block, counts):
        for row, new, count in zip(self.rows, block, counts, strict=True):
            row.extend(new[:, t] for t in range(count))


def check(cache, reference):
    assert cache.lengths.tolist() == [len(row) for row in reference.rows]
    assert torch.equal(cache.lengths.cpu(), cache.host_lengths)
    for layer in range(cache.num_layers):
        keys, values = cache.view(layer)
        for b, row in enumerate(reference.rows):
            if row:
                torch.testing.assert_close(keys[b, :, : len(row)], torch.stack(row, 1) * (layer + 1))
                torch.testing.assert_close(values[b, :, : len(row)], -torch.stack(row, 1) * (layer + 1))


def test_random_operations_equal_the_reference(monkeypatch):
    monkeypatch.setattr(kv_cache, "_FIRST_POSITIONS", 4)  # so that rows outgrow the first slabs
    generator = torch.Generator().manual_seed(0)
    cache, reference = KVCache(2, 5, 60, 2, 3), Reference()

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(120):
        move = draw(0, 5)
        if move == 0 and cache.rows < 5:
            cache.add(1)
            reference.rows.append([])
        elif move == 1 and cache.rows > 1:
            row = draw(0, cache.rows)
            assert cache.remove(row) == len(reference.rows) - 1
            reference.rows[row] = reference.rows[-1]
            reference.rows.pop()
        elif move == 2 and cache.rows:
            lengths = [draw(0, len(row) + 1) for row in reference.rows]
            cache.truncate(lengths)
            reference.rows = [row[:length] for row, length in zip(reference.rows, lengths, strict=True)]
        elif cache.rows and cache.longest < 50:
            block = torch.randn(cache.rows, 2, 4, 3, generator=generator)
            ragged = draw(0, 2)
            counts = torch.tensor([draw(1, 5) if ragged else 4 for _ in range(cache.rows)])
            for layer in range(2):
                scaled = block * (layer + 1)
                cache.append(layer, scaled, -scaled, counts if ragged else None)
            cache.advance(counts)
            reference.append(block, counts.tolist())
        check(cache, reference)
    assert cache.positions > 16


def test_padding_at_the_very_end_is_swallowed():
    cache = KVCache(1, 2, 6, 1, 1)
    cache.add(2)
    block = torch.arange(1.0, 9.0).view(2, 1, 4, 1)
    counts = torch.tensor([4, 3])
    cache.append(0, block, block, counts)
    cache.advance(counts)
    cache.append(0, block, block, torch.tensor([2, 3]))
    cache.advance([2, 3])
    keys, _ = cache.view(0)
    assert keys[:, 0, :, 0].tolist() == [[1, 2, 3, 4, 1, 2], [5, 6, 7, 5, 6, 7]]


def test_a_view_of_rows_writes_through_and_can_grow_its_parent(monkeypatch):
    monkeypatch.setattr(kv_cache, "_FIRST_POSITIONS", 4)
    cache = KVCache(1, 3, 20, 1, 1)
    cache.add(3)
    old = torch.full((3, 1, 2, 1), 7.0)
    cache.append(0, old, old)
    cache.advance(2)
    view = cache.rows_view(1, 3)
    new = torch.full((2, 1, 9, 1), 3.0)
    view.append(0, new, new)
    view.advance(9)
    assert cache.lengths.tolist() == [2, 11, 11]
    assert cache.view(0)[0][:, 0, :, 0].sum(-1).tolist() == [14.0, 41.0, 41.0]
    torch.testing.assert_close(view.view(0)[0], cache.view(0)[0][1:])


def test_head_shapes_may_differ_between_layers():
    cache = KVCache(2, 1, 8, [2, 0], [4, 16])
    cache.add(1)
    assert cache.keys[0].shape == (1, 2, 9, 4)
    assert cache.keys[1].shape == (1, 0, 9, 16)


def test_limits_are_typed_errors():
    cache = KVCache(1, 2, 4, 1, 1)
    cache.add(2)
    with pytest.raises(CacheFullError, match="2 rows has 2 active"):
        cache.add(1)
    with pytest.raises(CacheFullError, match="max_length 4"):
        cache.advance(5)
    with pytest.raises(CacheFullError, match="max_length 4"):
        cache.append(0, torch.zeros(2, 1, 5, 1), torch.zeros(2, 1, 5, 1))
    with pytest.raises(CacheFullError, match="row 2"):
        cache.remove(2)
    with pytest.raises(CacheFullError, match="active rows"):
        cache.rows_view(0, 3)
    with pytest.raises(CacheFullError, match="kv_heads"):
        KVCache(3, 1, 4, [1, 2], 1)
