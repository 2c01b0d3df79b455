"""Order in which variants decode: in turn, block of prompts by block of prompts.

A machine's speed drifts over minutes. Decoding all prompts with one variant after another puts that drift into their
ratio; taking turns within every block of prompts takes it out, and rotating who begins keeps any place in the order
(after a pause, with warm caches) from belonging to one variant:

    block 0   plain    dspark   ngram
    block 1   dspark   ngram    plain
    block 2   ngram    plain    dspark
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
V = TypeVar("V")

BATCHES = 2  # a block fills the largest batch so many times: finished rows are replaced, and turns stay short
LEAST = 4  # prompts of a block


def block_size(largest_batch: int) -> int:
    """Prompts of a block, so that every variant's batches stay full for most of it."""
    return max(LEAST, BATCHES * largest_batch)


def blocks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Consecutive blocks of nearly equal size, none above ``size``."""
    count = -(-len(items) // size)
    bounds = [len(items) * number // count for number in range(count + 1)] if count else []
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]


def turns(variants: Sequence[V], blocks_: Sequence[Sequence[T]], first: int = 0) -> Iterator[tuple[V, Sequence[T]]]:
    """Every variant on every block; block n begins with variant ``first`` + n."""
    for number, block in enumerate(blocks_, start=first):
        start = number % len(variants)
        for variant in [*variants[start:], *variants[:start]]:
            yield variant, block
