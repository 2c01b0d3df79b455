"""Which samples a step trains on, split over ranks and micro batches, and read ahead. Knows no model."""

import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import torch
import xxhash

from deepspec.data.batch import DraftBatch, Sample, collate, empty_batch
from deepspec.data.cache_reader import CacheReader
from deepspec.data.order import heldout_rows, shuffled, split

T = TypeVar("T")


@dataclass
class DataConfig:
    """What training reads.

    ``source`` "cache" reads the target cache in ``path``; "online" reads the responses in ``path`` and runs the frozen
    target in the training process, which first answers the prompts in the file ``prompts``, if given, that have no
    answer in ``path`` yet. ``global_batch`` counts sequences over all ranks; ``micro_tokens`` bounds the padded tokens,
    and likewise the positions of drafted blocks, of one forward of one rank. ``heldout`` is the share of samples,
    chosen by a hash of their id, that is kept for the held-out loss, and ``heldout_max`` bounds their number: what is
    not evaluated is trained on.
    ``prefetch`` is the number of global steps read ahead.
    """

    source: str = "cache"
    path: str = "cache"
    prompts: str | None = None
    max_length: int = 4096
    anchors: int = 512
    pack_tokens: int | None = None
    global_batch: int = 512
    micro_tokens: int = 16384
    seed: int = 0
    heldout: float = 0.02
    heldout_max: int = 256
    prefetch: int = 2
    threads: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot work, naming both when two contradict."""
        if self.source not in ("cache", "online"):
            raise ValueError(f"data.source is {self.source!r}: give 'cache' or 'online'")
        if self.prompts is not None and self.source != "online":
            raise ValueError(f"data.prompts={self.prompts} contradicts data.source={self.source}: give data=prompts")
        for name in ("max_length", "anchors", "global_batch", "micro_tokens", "prefetch", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} is {getattr(self, name)}: give at least 1")
        if not 0.0 <= self.heldout < 1.0:
            raise ValueError(f"data.heldout is {self.heldout}: give a share in [0, 1)")
        if self.pack_tokens is not None and self.pack_tokens < self.max_length:
            raise ValueError(
                f"data.pack_tokens ({self.pack_tokens}) is below data.max_length ({self.max_length}): a long sample "
                "would fit no row; raise the first or lower the second"
            )


class Source(Protocol):
    """Samples by number, numbered by ascending id."""

    features: int
    hidden: int

    def ids(self) -> list[str]:
        """All ids, ascending."""
        ...

    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        ...

    def contents(self) -> str:
        """Names what the samples hold beyond ids and lengths: the codec and a digest of the stored bytes, or the
        tokens where states are made when asked for."""
        ...

    def samples(self, rows: Sequence[int]) -> list[Sample]:
        """These samples, whole, on the CPU, in bfloat16."""
        ...


class CacheSource:
    """Samples of a target cache, decoded by ``threads`` threads."""

    def __init__(self, reader: CacheReader, threads: int = 1) -> None:
        self.reader = reader
        shape = reader.manifest.target["shape"]
        self.hidden: int = shape["hidden_size"]
        self.features = self.hidden * len(reader.manifest.taps)
        self._pool = ThreadPoolExecutor(threads, "decode") if threads > 1 else None

    def ids(self) -> list[str]:
        """All ids, ascending."""
        return self.reader.ids()

    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        return self.reader.tokens.tolist()

    def contents(self) -> str:
        """Codec, and digest of everything stored."""
        return f"{self.reader.codec} {self.reader.contents_digest()}"

    def samples(self, rows: Sequence[int]) -> list[Sample]:
        """Read, check and decode; raises CacheDamagedError naming the shard."""
        if self._pool is None:
            return [self.reader.sample(row) for row in rows]
        return list(self._pool.map(self.reader.sample, rows))


class Loader:
    """This rank's micro batches of every global step.

    ``step(n)`` is a pure function of (source, config, n, rank, world size) and the union over ranks does not depend on
    the world size, so the step number is the whole state of a run's data. ``anchored`` says that blocks of
    ``block_size`` are drafted at the anchors (EAGLE-3 drafts everywhere).
    """

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        *,
        block_size: int,
        anchored: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.source, self.config, self.block_size, self.anchored = source, config, block_size, anchored
        self.rank, self.world_size = rank, world_size
        ids = source.ids()
        self._lengths = [min(length, config.max_length) for length in source.lengths()]
        self.heldout_rows = heldout_rows(ids, config.heldout, config.heldout_max)
        heldout = set(self.heldout_rows)
        self.training_rows = [row for row in range(len(ids)) if row not in heldout]
        if not self.training_rows:
            raise ValueError(f"no training samples: {len(ids)} samples and data.heldout={config.heldout}")
        self.wait_seconds = 0.0

    @property
    def steps_per_epoch(self) -> int:
        """Global steps of one pass; the last one may have fewer than ``global_batch`` samples."""
        return -(-len(self.training_rows) // self.config.global_batch)

    def rows(self, step: int) -> list[int]:
        """The samples of a global step, of all ranks together."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        start = index * self.config.global_batch
        return [self.training_rows[place] for place in order[start : start + self.config.global_batch]]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a loader lives as long as its run
    def _order(self, epoch: int) -> list[int]:
        return shuffled(len(self.training_rows), self.config.seed, epoch)

    def digest(self) -> str:
        """Of the ids and lengths of all samples: other data of the same size is other data."""
        found = xxhash.xxh3_128()
        for id, length in zip(self.source.ids(), self.source.lengths(), strict=True):
            found.update(f"{id} {length}\n".encode())
        return found.hexdigest()

    def step(self, step: int) -> list[DraftBatch]:
        """The micro batches of this rank at a global step, as many as on every other rank; some may be empty."""
        return [self._collate(group, step // self.steps_per_epoch) for group in self._mine(self.rows(step))]

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[list[DraftBatch]]:
        """Steps ``start`` … ``stop − 1`` (None: without end), read ahead by ``prefetch`` steps in a thread.

        ``wait_seconds`` grows by the time the caller had to wait.
        """
        steps = itertools.count(start) if stop is None else iter(range(start, stop))
        stream = prefetched((self.step(step) for step in steps), self.config.prefetch)
        with contextlib.closing(stream):
            while True:
                began = time.perf_counter()
                batches = next(stream, None)
                self.wait_seconds += time.perf_counter() - began
                if batches is None:
                    return
                yield batches

    def heldout(self) -> Iterator[DraftBatch]:
        """Held-out micro batches of this rank with the anchors of epoch 0: the same in every evaluation."""
        groups = self._mine(self.heldout_rows) if self.heldout_rows else []
        yield from prefetched((self._collate(group, 0) for group in groups), self.config.prefetch)

    def _mine(self, rows: list[int]) -> list[list[int]]:
        rows = sorted(rows, key=lambda row: (-self._lengths[row], row))  # equal sizes stay neighbours in length
        lengths = [self._lengths[row] for row in rows]
        drafted = [min(self.config.anchors, length) * self.block_size if self.anchored else 0 for length in lengths]
        groups = split(
            [max(pair) for pair in zip(lengths, drafted, strict=True)],
            self.world_size,
            self.config.micro_tokens,
            self.config.pack_tokens is not None,
        )
        return [[rows[place] for place in group] for group in groups[self.rank]]

    def _collate(self, rows: list[int], epoch: int) -> DraftBatch:
        if not rows:
            return empty_batch(self.source.features, self.source.hidden, dtype=torch.bfloat16).pin()
        samples = [cut(sample, self.config.max_length) for sample in self.source.samples(rows)]
        return collate(
            samples,
            anchors_per_sample=self.config.anchors,
            block_size=self.block_size,
            seed=self.config.seed,
            epoch=epoch,
            pack_tokens=self.config.pack_tokens,
        ).pin()


def cut(sample: Sample, length: int) -> Sample:
    """The first ``length`` tokens of a sample and the last states that they still need."""
    if len(sample) <= length:
        return sample
    supervised_S = sample.supervised_S[:length]
    states = int(supervised_S[1:].sum())
    return Sample(
        id=sample.id,
        tokens_S=sample.tokens_S[:length],
        supervised_S=supervised_S,
        taps_SF=sample.taps_SF[:length],
        last_ID=sample.last_ID[:states],
        log_z_I=None if sample.log_z_I is None else sample.log_z_I[:states],
        top_I=None if sample.top_I is None else sample.top_I[:states],
    )


def prefetched(stream: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The same items, at most ``depth`` of them made or being made ahead in a thread (a step's states are large).

    Errors arrive where their item would have.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()
    permits = threading.Semaphore(depth)
    stopped = threading.Event()

    def produce() -> None:
        try:
            while True:
                permits.acquire()
                if stopped.is_set():
                    return
                ready.put((next(stream), None))
        except BaseException as error:  # whatever it is, the consumer must see it; StopIteration is the end
            ready.put((None, error))

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            permits.release()
            yield cast(T, item)
    finally:
        stopped.set()
        permits.release()
        thread.join()
