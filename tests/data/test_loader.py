"""The loader: the same samples at any world size, resume from any step, prefetch that stops and reports errors."""

import random
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import xxhash

from deepspec.data.batch import Sample
from deepspec.data.loader import DataConfig, Loader, cut, prefetched
from deepspec.data.order import in_share, shuffled, split


class MemorySource:
    """Random samples; ``loaded`` counts how many were asked for."""

    features, hidden = 6, 3

    def __init__(self, count: int = 41, seed: int = 0) -> None:
        draw = random.Random(seed)
        self._lengths = [draw.randint(2, 60) for _ in range(count)]
        self.loaded = 0

    def ids(self):
        return [f"id{row:04d}" for row in range(len(self._lengths))]

    def contents(self):
        return "random"

    def lengths(self):
        return self._lengths

    def samples(self, rows):
        self.loaded += len(rows)
        return [self._sample(row) for row in rows]

    def _sample(self, row):
        length = self._lengths[row]
        generator = torch.Generator().manual_seed(row)
        supervised_S = torch.arange(length) >= length // 3
        states = int(supervised_S[1:].sum())
        return Sample(
            self.ids()[row],
            torch.randint(0, 50, (length,), generator=generator),
            supervised_S,
            torch.randn(length, 6, generator=generator).bfloat16(),
            torch.randn(states, 3, generator=generator).bfloat16(),
        )


def config(**changes) -> DataConfig:
    return DataConfig(**{"global_batch": 8, "micro_tokens": 150, "anchors": 5, "heldout": 0.1, "seed": 1, **changes})


def loader(rank=0, world_size=1, source=None, **changes) -> Loader:
    source = source or MemorySource()
    return Loader(source, config(**changes), block_size=3, rank=rank, world_size=world_size)


def anchors_by_id(batches) -> dict[str, list[int]]:
    """Document positions of the anchors of each sample."""
    found: dict[str, list[int]] = {}
    for batch in batches:
        for b, row in enumerate(batch.anchors_BN.tolist()):
            for anchor in (a for a in row if a >= 0):
                id = batch.ids[int(batch.segments_BS[b, anchor])]
                found.setdefault(id, []).append(int(batch.positions_BS[b, anchor]))
    return found


@pytest.mark.parametrize("pack_tokens", [None, 4096])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_samples_and_anchors_of_a_step_do_not_depend_on_the_world_size(world_size, pack_tokens):
    one = loader(pack_tokens=pack_tokens)
    many = [loader(rank, world_size, pack_tokens=pack_tokens) for rank in range(world_size)]
    for step in range(one.steps_per_epoch + 2):
        alone = one.step(step)
        parts = [each.step(step) for each in many]
        assert len({len(part) for part in parts}) == 1
        spread = [batch for part in parts for batch in part]
        ids = [id for batch in alone for id in batch.ids]
        assert sorted(ids) == sorted(id for batch in spread for id in batch.ids)
        assert len(set(ids)) == len(ids)
        assert anchors_by_id(alone) == anchors_by_id(spread)


def test_an_epoch_sees_every_training_sample_once_and_no_heldout_one():
    one = loader()
    seen = [row for step in range(one.steps_per_epoch) for row in one.rows(step)]
    assert sorted(seen) == one.training_rows
    assert not set(seen) & set(one.heldout_rows)
    assert len(one.training_rows) + len(one.heldout_rows) == 41
    assert 0 < len(one.heldout_rows) < 12
    following = [row for step in range(one.steps_per_epoch, 2 * one.steps_per_epoch) for row in one.rows(step)]
    assert sorted(following) == sorted(seen)
    assert following != seen


def test_resume_from_any_step_gives_the_same_batches():
    whole = [[(batch.ids, batch.anchors_BN.tolist()) for batch in batches] for batches in loader(0, 2).batches(0, 9)]
    for start in (1, 4, 7):
        rest = [[(b.ids, b.anchors_BN.tolist()) for b in batches] for batches in loader(0, 2).batches(start, 9)]
        assert rest == whole[start:]


def test_more_ranks_than_samples_get_empty_batches():
    parts = [loader(rank, 7, global_batch=3).step(0) for rank in range(7)]
    assert [len(part) for part in parts] == [1] * 7
    assert sum(len(batch.ids) for part in parts for batch in part) == 3
    empty = next(batch for part in parts for batch in part if not batch.ids)
    assert (empty.anchors_BN == -1).all()
    assert empty.taps_BSF.shape[2] == 6


def test_order_is_a_pure_permutation():
    assert sorted(shuffled(100, 1, 2)) == list(range(100))
    assert shuffled(100, 1, 2) == shuffled(100, 1, 2)
    assert shuffled(100, 1, 2) != shuffled(100, 1, 3) != shuffled(100, 2, 3)
    firsts = [shuffled(10, 0, epoch)[0] for epoch in range(2000)]
    assert all(140 < firsts.count(value) < 260 for value in range(10))


def test_heldout_share_is_by_id():
    ids = [f"sample {number}" for number in range(20000)]
    chosen = {id for id in ids if in_share(id, 0.05)}
    assert 850 < len(chosen) < 1150
    assert chosen == {id for id in reversed(ids) if in_share(id, 0.05)}
    assert chosen <= {id for id in ids if in_share(id, 0.1)}
    assert not any(in_share(id, 0.0) for id in ids)


@pytest.mark.parametrize("packed", [False, True])
def test_split_respects_the_budget_and_balances(packed):
    draw = random.Random(2)
    for _ in range(40):
        lengths = [min(4096, int(draw.lognormvariate(6, 0.8)) + 1) for _ in range(draw.randint(0, 300))]
        ranks, budget = draw.choice([1, 2, 3, 8]), draw.choice([2048, 8192, 32768])
        groups = split(lengths, ranks, budget, packed)
        assert len(groups) == ranks
        assert len({len(each) for each in groups}) == 1
        flat = [index for rank in groups for micro in rank for index in micro]
        assert sorted(flat) == list(range(len(lengths)))
        costs = [
            sum(lengths[i] for i in micro) if packed else len(micro) * max((lengths[i] for i in micro), default=0)
            for rank in groups
            for micro in rank
        ]
        assert max(costs) <= max(budget, max(lengths, default=0))
        if len(lengths) == 300:
            assert max(costs) < 1.5 * sum(costs) / len(costs)


def test_drafted_positions_of_short_samples_are_bounded_too():
    """Short samples draft more positions than they have tokens: blocks of 40, of which two or three rows fit 500."""
    made = Loader(MemorySource(), config(micro_tokens=500), block_size=40)
    for step in range(made.steps_per_epoch):
        for batch in made.step(step):
            rows, blocks = batch.anchors_BN.shape
            longest = batch.tokens_BS.shape[1]
            assert rows == 1 or rows * max(longest, blocks * 40) <= 500
            assert bool((batch.anchors_BN >= 0).any(0).all())
    everywhere = Loader(MemorySource(), config(micro_tokens=500), block_size=40, anchored=False)
    assert len(everywhere.step(0)) < len(made.step(0))


def test_samples_of_equal_cost_are_still_neighbours_in_length():
    """5 anchors of 40 cost 200 positions whatever the length: sorted by it, rows of a micro batch are alike."""
    made = Loader(MemorySource(), config(micro_tokens=400, global_batch=40), block_size=40)
    spans = sorted((int(n.min()), int(n.max())) for n in ((b.segments_BS >= 0).sum(1) for b in made.step(0)))
    assert len(spans) > 5
    assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(spans))


def test_unpacked_micro_batches_waste_little():
    draw = random.Random(3)
    lengths = [min(4096, int(draw.lognormvariate(6.5, 0.7)) + 1) for _ in range(512)]
    groups = [micro for rank in split(lengths, 8, 16384, packed=False) for micro in rank]
    padded = sum(len(micro) * max(lengths[i] for i in micro) for micro in groups if micro)
    assert sum(lengths) / padded > 0.9


def test_cut_keeps_the_states_that_are_still_needed():
    sample = MemorySource()._sample(3)
    short = cut(sample, len(sample) - 4)
    short.check()
    assert torch.equal(short.last_ID, sample.last_ID[:-4])
    states = torch.arange(len(sample.last_ID))
    known = cut(replace(sample, log_z_I=states.float(), top_I=states), len(sample) - 4)
    assert known.log_z_I.tolist() == known.top_I.tolist() == states[:-4].tolist()
    assert cut(sample, 1000) is sample


def test_prefetch_is_bounded_and_stops():
    made = []

    def stream():
        for number in range(1000):
            made.append(number)
            yield number

    ahead = prefetched(stream(), 2)
    assert next(ahead) == 0
    time.sleep(0.2)
    assert len(made) == 3  # one taken, two ahead
    ahead.close()
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_prefetch_passes_errors_on_in_their_place():
    def stream():
        yield 1
        raise ValueError("shard 7 is damaged")

    ahead = prefetched(stream(), 2)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="shard 7"):
        next(ahead)


def test_waiting_is_measured():
    class Slow(MemorySource):
        def samples(self, rows):
            time.sleep(0.05)
            return super().samples(rows)

    slow = loader(source=Slow(), micro_tokens=10_000)
    list(slow.batches(0, 3))
    assert slow.wait_seconds > 0.1


def test_heldout_batches_are_the_same_each_time_and_on_any_world_size():
    one = loader(heldout=0.3)
    ids = sorted(id for batch in one.heldout() for id in batch.ids)
    assert ids == sorted(one.source.ids()[row] for row in one.heldout_rows)
    parts = [list(loader(rank, 2, heldout=0.3).heldout()) for rank in range(2)]
    assert len(parts[0]) == len(parts[1])
    assert anchors_by_id(parts[0] + parts[1]) == anchors_by_id(one.heldout()) == anchors_by_id(one.heldout())
    assert list(loader(heldout=0.0).heldout()) == []


def test_only_what_is_evaluated_is_held_out():
    """Of the share, the ids with the lowest hashes; every other sample trains."""
    bounded = loader(heldout=0.5, heldout_max=3)
    ids = bounded.source.ids()
    by_hash = sorted(ids, key=lambda id: xxhash.xxh3_64(id.encode()).intdigest())
    assert sorted(ids[row] for row in bounded.heldout_rows) == sorted(by_hash[:3])
    assert sorted([*bounded.heldout_rows, *bounded.training_rows]) == list(range(len(ids)))
    # a share that holds fewer than the bound is held out whole, as in every earlier run
    share = loader(heldout=0.1, heldout_max=256)
    within = [row for row, id in enumerate(ids) if xxhash.xxh3_64(id.encode()).intdigest() < 0.1 * 2**64]
    assert share.heldout_rows == within


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "disk"}, "'cache' or 'online'"),
        ({"global_batch": 0}, "global_batch"),
        ({"heldout": 1.0}, "heldout"),
        ({"pack_tokens": 100, "max_length": 200}, r"pack_tokens \(100\).*max_length \(200\)"),
    ],
)
def test_options_that_cannot_work_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
