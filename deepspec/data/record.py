"""One sample as self-contained bytes: a fixed header, tokens, spans, encoded states, a checksum. Knows no files.

Layout, little endian (docs/cache-format.md): ``DSRC`` · u32 version · u64 XXH3-64 of everything after it · u16 codec ·
u16 taps M · u32 tokens, spans, last states, hidden D, tap channels F, id bytes · u64 taps bytes, last bytes ·
i32 spans · i32 tokens · id · taps block · last block · from version 2 on: f32 log-normalisers and i32 most likely
tokens of the last states.

Versions: 1 has no log-normalisers. 2 has those of the states as captured, which with a lossy codec are not the states
that a reader decodes: exp(logit − log Z) would not sum to one, so they are ignored. 3 has those of the decoded states.

Shapes: S tokens, I tokens with a last state, F = M·D tap channels, D hidden size.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import xxhash

from deepspec.data.batch import Sample
from deepspec.data.codecs import Codec, codec_numbered

MAGIC: Final = b"DSRC"
WITHOUT_NORMALISERS, OF_CAPTURED, OF_DECODED = 1, 2, 3  # versions, see above
VERSION: Final = OF_DECODED
_PREFIX: Final = struct.Struct("<4sIQ")
_SIZES: Final = struct.Struct("<HHIIIIIIQQ")
_BODY: Final = _PREFIX.size + _SIZES.size
Spans = Sequence[tuple[int, int]]


class RecordError(ValueError):
    """Bytes that are not a whole, undamaged record."""


@dataclass(frozen=True)
class Row:
    """A sample on its way into the cache: token ids, half-open supervised spans, the target's states in bfloat16.

    log_z_I, top_I: log-normaliser and most likely token of p, of the states that a reader decodes. last_block: the
    encoded last states, where they had to be encoded already to derive these.
    """

    id: str
    source: str
    tokens: Sequence[int]
    spans: Spans
    taps_SF: torch.Tensor
    last_ID: torch.Tensor
    log_z_I: torch.Tensor | None = None
    top_I: torch.Tensor | None = None
    last_block: bytes | None = None


def supervised_mask(length: int, spans: Spans) -> torch.Tensor:
    """supervised_S: True where a token is a label."""
    mask_S = torch.zeros(length, dtype=torch.bool)
    for start, end in spans:
        mask_S[start:end] = True
    return mask_S


def last_positions(supervised_S: torch.Tensor) -> torch.Tensor:
    """Positions t, ascending, whose token t+1 is supervised: where the cache keeps a last state."""
    return torch.nonzero(supervised_S[1:]).flatten()


def pack(row: Row, codec: Codec, taps: int) -> bytes:
    """The record of a row. Thread-safe; the entropy coder releases the interpreter lock."""
    name = row.id.encode()
    taps_block = codec.encode(row.taps_SF)
    last_block = codec.encode(row.last_ID) if row.last_block is None else row.last_block
    spans = np.asarray(row.spans, "<i4").reshape(-1)
    tokens = np.asarray(row.tokens, "<i4")
    sizes = _SIZES.pack(
        *(codec.number, taps),
        *(len(tokens), len(row.spans), len(row.last_ID), row.last_ID.shape[1], row.taps_SF.shape[1], len(name)),
        *(len(taps_block), len(last_block)),
    )
    parts = [sizes, spans.tobytes(), tokens.tobytes(), name, taps_block, last_block]
    if row.log_z_I is not None and row.top_I is not None:
        parts += [row.log_z_I.cpu().numpy().astype("<f4").tobytes(), row.top_I.cpu().numpy().astype("<i4").tobytes()]
    checked = b"".join(parts)
    version = WITHOUT_NORMALISERS
    if row.log_z_I is not None:
        # With a lossless codec the two are the same; 2 is what earlier versions of this program read.
        version = OF_CAPTURED if codec.lossless else OF_DECODED
    return _PREFIX.pack(MAGIC, version, xxhash.xxh3_64_intdigest(checked)) + checked


def checksum(record: bytes | memoryview) -> int:
    """The checksum that a record's header states."""
    return _PREFIX.unpack_from(record)[2]


def check(record: bytes | memoryview) -> None:
    """Raise RecordError unless the bytes are a whole record whose checksum holds."""
    if len(record) < _BODY or bytes(record[:4]) != MAGIC:
        raise RecordError("no record starts here: the file was cut or overwritten")
    _, version, digest = _PREFIX.unpack_from(record)
    if version > VERSION:
        raise RecordError(f"record version {version} is newer than this deepspec's {VERSION}: update deepspec")
    _, _, tokens, spans, states, _, _, name, taps_block, last_block = _SIZES.unpack_from(record, _PREFIX.size)
    size = _BODY + 8 * spans + 4 * tokens + name + taps_block + last_block + (8 * states if version > 1 else 0)
    if size != len(record):
        raise RecordError(f"the record has {len(record)} bytes and its header says {size}")
    if xxhash.xxh3_64_intdigest(memoryview(record)[_PREFIX.size :]) != digest:
        raise RecordError("the checksum does not match: at least one byte changed")


@dataclass(frozen=True)
class Head:
    """What a record says about itself before its states; ``blocks`` are the encoded taps and last states.

    log_z_I, top_I: log-normaliser and most likely token of p at every last state, None in records without them and
    where they are not of the states that ``codec`` decodes (version 2 with a lossy codec).
    """

    id: str
    tokens_S: np.ndarray
    spans: list[tuple[int, int]]
    states: int
    hidden: int
    channels: int
    codec: Codec
    blocks: tuple[memoryview, memoryview]
    log_z_I: np.ndarray | None
    top_I: np.ndarray | None


def head(record: bytes | memoryview) -> Head:
    """Everything but the states; the record must have passed ``check``. Raises CodecError for an unknown codec."""
    view = memoryview(record)
    version = _PREFIX.unpack_from(view)[1]
    number, _, tokens, spans, states, hidden, channels, name, *blocks = _SIZES.unpack_from(view, _PREFIX.size)
    codec = codec_numbered(number)
    tail = 4 * states if version >= OF_CAPTURED else 0
    parts = []
    start = _BODY
    for size in (8 * spans, 4 * tokens, name, *blocks, tail, tail):
        parts.append(view[start : start + size])
        start += size
    spans_part, tokens_part, name_part, taps_part, last_part, log_z_part, top_part = parts
    usable = version >= OF_DECODED or (version == OF_CAPTURED and codec.lossless)
    return Head(
        id=bytes(name_part).decode(),
        tokens_S=np.frombuffer(tokens_part, "<i4"),
        spans=[(int(first), int(end)) for first, end in np.frombuffer(spans_part, "<i4").reshape(-1, 2)],
        states=states,
        hidden=hidden,
        channels=channels,
        codec=codec,
        blocks=(taps_part, last_part),
        log_z_I=np.frombuffer(log_z_part, "<f4") if usable else None,
        top_I=np.frombuffer(top_part, "<i4") if usable else None,
    )


def unpack(record: bytes | memoryview) -> Sample:
    """Check and decode a record; raises RecordError or CodecError when it is damaged."""
    check(record)
    own = head(record)
    length = len(own.tokens_S)
    return Sample(
        id=own.id,
        tokens_S=torch.from_numpy(own.tokens_S.astype(np.int64)),
        supervised_S=supervised_mask(length, own.spans),
        taps_SF=own.codec.decode(own.blocks[0], length, own.channels),
        last_ID=own.codec.decode(own.blocks[1], own.states, own.hidden),
        log_z_I=None if own.log_z_I is None else torch.from_numpy(own.log_z_I.astype(np.float32)),
        top_I=None if own.top_I is None else torch.from_numpy(own.top_I.astype(np.int64)),
    )
