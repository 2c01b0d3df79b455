"""Which samples a step trains on and who runs them: pure functions of seed, epoch, ids and lengths. Knows no files."""

import hashlib
import heapq
from collections.abc import Sequence

import torch
import xxhash


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count) that depends on (count, seed, epoch) alone, through 32 bits of their hash."""
    digest = hashlib.sha256(f"order\x00{seed}\x00{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randperm(count, generator=generator).tolist()


def in_share(id: str, share: float) -> bool:
    """Whether an id is among this share of all ids, by its hash: the same in every cache and run."""
    return _hash(id) < share * 2**64


def heldout_rows(ids: Sequence[str], share: float, most: int) -> list[int]:
    """Rows of the at most ``most`` ids with the lowest hashes among ``share`` of all, ascending.

    Only what is evaluated is held out; everything else can be trained on.
    """
    candidates = [row for row, id in enumerate(ids) if in_share(id, share)]
    candidates.sort(key=lambda row: (_hash(ids[row]), row))
    return sorted(candidates[:most])


def _hash(id: str) -> int:
    return xxhash.xxh3_64_intdigest(id.encode())


def split(lengths: Sequence[int], ranks: int, micro_tokens: int, packed: bool) -> list[list[list[int]]]:
    """groups[rank][micro]: the samples of a global batch, every one once, as many micro batches for every rank.

    A micro batch holds at most ``micro_tokens`` tokens, padding included, unless a single sample is longer. There are
    as few micro batches as that allows, of nearly equal cost at the same place on all ranks; some may be empty.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    micros = max(1, -(-sum(lengths) // (micro_tokens * ranks)))
    largest = max(lengths, default=0)
    while True:
        groups = _balanced(lengths, order, micros * ranks) if packed else _runs(lengths, order, micros * ranks)
        cost = max((_cost(lengths, group, packed) for group in groups), default=0)
        if cost <= max(micro_tokens, largest) or micros * ranks >= len(lengths):
            break
        micros += 1
    groups += [[] for _ in range(micros * ranks - len(groups))]
    groups.sort(key=lambda group: -_cost(lengths, group, packed))
    return [[groups[micro * ranks + rank] for micro in range(micros)] for rank in range(ranks)]


def _cost(lengths: Sequence[int], group: Sequence[int], packed: bool) -> int:
    own = [lengths[index] for index in group]
    return sum(own) if packed else len(own) * max(own, default=0)


def _balanced(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    """Longest first to the group with the fewest tokens: long and short samples mix, which packs well."""
    heap = [(0, number) for number in range(count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for index in order:
        tokens, number = heapq.heappop(heap)
        groups[number].append(index)
        heapq.heappush(heap, (tokens + lengths[index], number))
    return groups


def _runs(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    """At most ``count`` runs of neighbours in length, so little is padded, with the smallest largest padded cost."""
    low, high = 0, len(order) * max(lengths, default=0)
    while low < high:
        limit = (low + high) // 2
        if (runs := _cut(lengths, order, limit)) is not None and len(runs) <= count:
            high = limit
        else:
            low = limit + 1
    return _cut(lengths, order, high) or []


def _cut(lengths: Sequence[int], order: Sequence[int], limit: int) -> list[list[int]] | None:
    """Runs of at most ``limit`` padded tokens, greedily; None when one sample alone is longer."""
    runs: list[list[int]] = []
    for index in order:
        if lengths[index] > limit:
            return None
        if not runs or (len(runs[-1]) + 1) * lengths[runs[-1][0]] > limit:
            runs.append([])
        runs[-1].append(index)
    return runs
