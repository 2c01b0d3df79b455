"""Samples, draft batches and packing. Knows tensors only: no files, no models, no ranks.

Shapes: B rows, S tokens of a row, N anchors of a row, F = M·D concatenated taps, D hidden size, L rows with a last
state in the batch, I rows with a last state of one sample, G block size.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspec.data import anchors as anchor_draws


class BatchError(ValueError):
    """A sample that cannot be batched; the message names its id and the remedy."""


@dataclass
class Sample:
    """One document with the target's states.

    supervised_S: the token is a label (answer tokens incl. end of turn). last_ID: the target's states after the final
    norm at the positions t, ascending, whose token t+1 is supervised, so p(token t+1) = softmax(lm_head(last[t])).
    log_z_I, top_I: its log-normaliser (float32) and p's most likely token, where the cache stores them.
    """

    id: str
    tokens_S: torch.Tensor
    supervised_S: torch.Tensor
    taps_SF: torch.Tensor
    last_ID: torch.Tensor
    log_z_I: torch.Tensor | None = None
    top_I: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.tokens_S.shape[0]

    def check(self) -> None:
        """Raise BatchError unless lengths agree and there is one last state per supervised next token."""
        length, states = len(self), int(self.supervised_S[1:].sum())
        if length == 0 or self.supervised_S.shape[0] != length or self.taps_SF.shape[0] != length:
            raise BatchError(
                f"sample {self.id!r}: {length} tokens, {self.supervised_S.shape[0]} supervised flags and "
                f"{self.taps_SF.shape[0]} taps rows must be equal and not zero; capture it again"
            )
        if self.last_ID.shape[0] != states:
            raise BatchError(
                f"sample {self.id!r}: {self.last_ID.shape[0]} last states for {states} supervised next tokens; "
                "capture it again"
            )


@dataclass
class DraftBatch:
    """What a drafter trains on: packed documents, their states and the anchors drawn for them.

    positions_BS are absolute within the document; segments_BS is the document's index in ``ids``, −1 on padding;
    last_row_BS[b, t] is the row of last_LD that holds p for token t+1, −1 where there is none; anchors_BN are
    positions in the row, ascending, absent ones (−1) last; N is what the fullest row needs, at least 1. log_z_L, top_L:
    as in Sample, None unless all have them.
    """

    tokens_BS: torch.Tensor
    positions_BS: torch.Tensor
    segments_BS: torch.Tensor
    supervised_BS: torch.Tensor
    taps_BSF: torch.Tensor
    last_LD: torch.Tensor
    last_row_BS: torch.Tensor
    anchors_BN: torch.Tensor
    ids: list[str]
    log_z_L: torch.Tensor | None = None
    top_L: torch.Tensor | None = None

    def to(
        self, device: torch.device | str, dtype: torch.dtype | None = None, *, non_blocking: bool = False
    ) -> "DraftBatch":
        """The batch on ``device``; ``dtype`` converts the states (taps, last) only."""
        states = {"taps_BSF", "last_LD"}
        return self._map(
            lambda name, value: value.to(device, dtype if name in states else None, non_blocking=non_blocking)
        )

    def pin(self) -> "DraftBatch":
        """The batch in page-locked memory when an accelerator is there to copy to; otherwise itself."""
        if not torch.accelerator.is_available():
            return self
        return self._map(lambda _, value: value.pin_memory())

    def _map(self, change) -> "DraftBatch":
        moved = {
            field.name: change(field.name, value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return DraftBatch(**moved, ids=self.ids)


def pack(lengths: Sequence[int], pack_tokens: int | None) -> list[list[int]]:
    """Rows of document indices: first fit into rows of at most ``pack_tokens`` tokens; None = one document per row."""
    if pack_tokens is None:
        return [[index] for index in range(len(lengths))]
    rows: list[list[int]] = []
    free: list[int] = []
    for index, length in enumerate(lengths):
        row = next((i for i, room in enumerate(free) if room >= length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(pack_tokens)
        rows[row].append(index)
        free[row] -= length
    return rows


def collate(
    samples: Sequence[Sample],
    *,
    anchors_per_sample: int,
    block_size: int,
    seed: int,
    epoch: int,
    pack_tokens: int | None = None,
) -> DraftBatch:
    """Draw ``anchors_per_sample`` anchors from every sample and lay the samples out in rows.

    ``pack_tokens`` packs documents first-fit into rows of at most that many tokens (None: one per row). The draw of a
    sample depends on (seed, epoch, id) only, never on its neighbours. Raises BatchError for no or inconsistent samples,
    documents longer than ``pack_tokens`` and a block size below 1.
    """
    _check(samples, anchors_per_sample, block_size, pack_tokens)
    rows = pack([len(sample) for sample in samples], pack_tokens)
    width = max(sum(len(samples[i]) for i in row) for row in rows)
    drawn = [_draw(sample, anchors_per_sample, seed, epoch) for sample in samples]
    count = max(1, *(sum(len(drawn[i]) for i in row) for row in rows))
    states = sum(len(sample.last_ID) for sample in samples)
    batch = _blank(len(rows), width, count, states, samples[0])
    batch.ids = [sample.id for sample in samples]
    if all(sample.log_z_I is not None for sample in samples):
        batch.log_z_L = torch.zeros(states, dtype=torch.float32)
        batch.top_L = torch.zeros(states, dtype=torch.int64)
    used = 0
    for b, row in enumerate(rows):
        start, filled = 0, 0
        for index in row:
            used = _place(batch, samples[index], index, b, start, used)
            batch.anchors_BN[b, filled : filled + len(drawn[index])] = drawn[index] + start
            start, filled = start + len(samples[index]), filled + len(drawn[index])
    return batch


def _draw(sample: Sample, count: int, seed: int, epoch: int) -> torch.Tensor:
    """Positions of at most ``count`` anchors of a sample, ascending."""
    draws = anchor_draws.draw(sample.supervised_S, count, anchor_draws.generator(seed, epoch, sample.id))
    return draws[draws >= 0]


def empty_batch(
    features: int,
    hidden: int,
    *,
    length: int = 8,
    anchors: int = 1,
    states: int = 0,
    dtype: torch.dtype = torch.float32,
) -> DraftBatch:
    """One unsupervised document whose anchors are all absent: a rank with nothing to do runs it and adds zero.

    features = F of the taps, hidden = D; ``length``, ``anchors`` and ``states`` set S, N and L for static shapes.
    """
    nothing = Sample(
        id="",
        tokens_S=torch.zeros(length, dtype=torch.int64),
        supervised_S=torch.zeros(length, dtype=torch.bool),
        taps_SF=torch.zeros(length, features, dtype=dtype),
        last_ID=torch.zeros(0, hidden, dtype=dtype),
    )
    batch = _blank(1, length, anchors, states, nothing)
    _place(batch, nothing, 0, 0, 0, 0)
    return batch


def _check(samples: Sequence[Sample], anchors_per_sample: int, block_size: int, pack_tokens: int | None) -> None:
    if not samples:
        raise BatchError("no samples to collate: use empty_batch for a rank with nothing to do")
    if block_size < 1 or anchors_per_sample < 0:
        raise BatchError(f"block_size {block_size} must be ≥ 1 and anchors_per_sample {anchors_per_sample} ≥ 0")
    first = samples[0]
    for sample in samples:
        sample.check()
        if sample.taps_SF.shape[1] != first.taps_SF.shape[1] or sample.last_ID.shape[1] != first.last_ID.shape[1]:
            raise BatchError(
                f"samples {first.id!r} and {sample.id!r} differ in width of taps or last states: "
                "they come from different targets or tap lists, and cannot be trained on together"
            )
        if pack_tokens is not None and len(sample) > pack_tokens:
            raise BatchError(
                f"sample {sample.id!r} has {len(sample)} tokens, rows are packed to {pack_tokens}: "
                "raise data.pack_tokens or lower data.max_length"
            )


def _blank(rows: int, width: int, count: int, states: int, like: Sample) -> DraftBatch:
    return DraftBatch(
        tokens_BS=torch.zeros(rows, width, dtype=torch.int64),
        positions_BS=torch.zeros(rows, width, dtype=torch.int64),
        segments_BS=torch.full((rows, width), -1, dtype=torch.int64),
        supervised_BS=torch.zeros(rows, width, dtype=torch.bool),
        taps_BSF=like.taps_SF.new_zeros(rows, width, like.taps_SF.shape[1]),
        last_LD=like.last_ID.new_zeros(states, like.last_ID.shape[1]),
        last_row_BS=torch.full((rows, width), -1, dtype=torch.int64),
        anchors_BN=torch.full((rows, count), -1, dtype=torch.int64),
        ids=[],
    )


def _place(batch: DraftBatch, sample: Sample, index: int, b: int, start: int, used: int) -> int:
    """Write one document at row b, token ``start`` and state row ``used``; returns the next free state row."""
    stop, states = start + len(sample), len(sample.last_ID)
    batch.tokens_BS[b, start:stop] = sample.tokens_S
    batch.positions_BS[b, start:stop] = torch.arange(len(sample))
    batch.segments_BS[b, start:stop] = index
    batch.supervised_BS[b, start:stop] = sample.supervised_S
    batch.taps_BSF[b, start:stop] = sample.taps_SF
    batch.last_LD[used : used + states] = sample.last_ID
    if (
        batch.log_z_L is not None
        and batch.top_L is not None
        and sample.log_z_I is not None
        and sample.top_I is not None
    ):
        batch.log_z_L[used : used + states] = sample.log_z_I
        batch.top_L[used : used + states] = sample.top_I
    batch.last_row_BS[b, start : stop - 1][sample.supervised_S[1:]] = torch.arange(used, used + states)
    return used + states
