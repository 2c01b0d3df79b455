"""Records: round trip, and a flipped bit anywhere is found."""

import random
import struct
from dataclasses import replace

import pytest
import torch
import xxhash

from deepspec.data import record
from deepspec.data.codecs import CODECS, codec_named
from deepspec.data.record import RecordError, Row, last_positions, supervised_mask


def row(length: int = 30, spans=((5, 12), (20, 30))) -> Row:
    generator = torch.Generator().manual_seed(length)
    states = len(last_positions(supervised_mask(length, spans)))
    return Row(
        id="naïve-1",
        source="s",
        tokens=list(range(100, 100 + length)),
        spans=list(spans),
        taps_SF=torch.randn(length, 12, generator=generator).bfloat16(),
        last_ID=torch.randn(states, 4, generator=generator).bfloat16(),
    )


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize(("length", "spans"), [(30, ((5, 12), (20, 30))), (1, ()), (2, ((0, 2),)), (9, ())])
def test_round_trip(codec, length, spans):
    original = row(length, spans)
    sample = record.unpack(record.pack(original, codec, 3))
    sample.check()
    assert (sample.id, sample.tokens_S.tolist()) == (original.id, original.tokens)
    assert sample.supervised_S.nonzero().flatten().tolist() == [t for start, end in spans for t in range(start, end)]
    assert sample.taps_SF.shape == original.taps_SF.shape
    assert sample.last_ID.shape == original.last_ID.shape
    if codec.name == "bf16":
        assert torch.equal(sample.taps_SF, original.taps_SF)
        assert torch.equal(sample.last_ID, original.last_ID)


def test_log_normalisers_are_optional_and_checked():
    plain = row()
    states = len(plain.last_ID)
    known = replace(plain, log_z_I=torch.linspace(-3, 90, states), top_I=torch.arange(states) * 7000)
    packed = record.pack(known, codec_named("int4"), 3)
    sample = record.unpack(packed)
    assert torch.equal(sample.log_z_I, known.log_z_I)
    assert torch.equal(sample.top_I, known.top_I)
    without = record.pack(plain, codec_named("int4"), 3)
    assert len(packed) == len(without) + 8 * states
    assert record.unpack(without).log_z_I is record.unpack(without).top_I is None
    with pytest.raises(RecordError, match="header says"):
        record.check(packed[: -4 * states])


@pytest.mark.parametrize(("codec", "usable"), [("bf16", True), ("int8", False), ("int4", False)])
def test_normalisers_of_the_states_before_encoding_are_ignored(codec, usable):
    """Version 2, as earlier versions wrote it for every codec: right for a lossless one only."""
    states = len(row().last_ID)
    original = replace(row(), log_z_I=torch.zeros(states), top_I=torch.zeros(states))
    older = bytearray(record.pack(original, codec_named(codec), 3))
    older[4] = 2
    older[8:16] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(older[16:])))
    sample = record.unpack(bytes(older))
    assert (sample.log_z_I is not None) is usable
    assert (sample.top_I is not None) is usable
    assert len(sample.last_ID) == states


def test_last_states_are_before_supervised_tokens():
    mask_S = supervised_mask(6, [(0, 2), (4, 6)])
    assert last_positions(mask_S).tolist() == [0, 3, 4]


def test_any_flipped_bit_is_found():
    packed = record.pack(row(), codec_named("bf16"), 3)
    draw = random.Random(0)
    for place in [*range(76), *(draw.randrange(76, len(packed)) for _ in range(200))]:
        damaged = bytearray(packed)
        damaged[place] ^= 1 << draw.randrange(8)
        with pytest.raises(RecordError):
            record.check(bytes(damaged))


def test_cut_and_newer_records_are_named():
    packed = record.pack(row(), codec_named("int8"), 3)
    with pytest.raises(RecordError, match="header says"):
        record.check(packed[:-1])
    with pytest.raises(RecordError, match="no record"):
        record.check(packed[:10])
    newer = bytearray(packed)
    newer[4] = 4
    with pytest.raises(RecordError, match=r"newer.*update"):
        record.check(bytes(newer))
