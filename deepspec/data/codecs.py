"""Hidden-state codecs: a bfloat16 matrix to bytes and back. Knows nothing of samples, files or models.

Shapes: S tokens (rows), F channels. Every block decodes alone; its size (S, F) is the caller's to remember.

``bf16`` is lossless: exponents, made small by a reference exponent per channel, go through zstd used as an entropy
coder; sign and mantissa are noise and stay raw. ``int8`` and ``int4`` quantise each channel uniformly with a step in
proportion to its own spread and entropy-code the symbols, so a step, not a clipped range, bounds the error and the few
huge channels of hidden states cost nothing; values too far out are kept exactly (docs/cache-format.md).
"""

import struct
import threading
import warnings
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
import zstandard

# Read-only buffers (files, zstd's output) are viewed as tensors and never written to; torch warns of that once per
# process, here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

CHUNK_VALUES: Final = 1 << 18  # values decoded at a time: temporaries stay in the processor's cache
ESCAPE: Final = -128
MAX_SYMBOL: Final = 127
SPREAD_ROWS: Final = 64  # rows looked at to find a channel's spread
STEPS: Final = torch.tensor([2.0 ** ((code - 128) / 4) for code in range(256)], dtype=torch.float32)


class CodecError(ValueError):
    """An unknown codec, a matrix of the wrong type, or a damaged block."""


class Codec(Protocol):
    """bfloat16 matrices to bytes and back; stateless, so safe to share between threads."""

    @property
    def name(self) -> str:
        """What recipes call it."""
        ...

    @property
    def number(self) -> int:
        """What records call it."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether what is decoded is what was encoded, bit for bit."""
        ...

    @property
    def bytes_per_value(self) -> float:
        """Typical, of real hidden states; raw bfloat16 is 2."""
        ...

    def encode(self, states_SF: torch.Tensor) -> bytes:
        """Encode a bfloat16 matrix. Runs on the tensor's device up to the entropy coder."""
        ...

    def decode(self, block: memoryview, rows: int, channels: int) -> torch.Tensor:
        """The bfloat16 matrix [rows, channels] on the CPU; raises CodecError if the block is damaged."""
        ...


# zstd's fast strategy with long matches only is, on symbols like these, a Huffman coder: measured smaller and three
# times faster than level 1, whose short accidental matches cost more than they save.
_ENTROPY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7, target_length=0
)
_local = threading.local()  # zstd contexts must not be shared between threads


def _compress(plane: torch.Tensor) -> bytes:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_ENTROPY)
    return _local.compressor.compress(plane.contiguous().cpu().numpy())


def _decompress(compressed: memoryview, size: int) -> np.ndarray:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        plain = _local.decompressor.decompress(compressed, max_output_size=max(size, 1))
    except zstandard.ZstdError as error:
        raise CodecError(f"damaged block: {error}; run verify, then rebuild the shard it names") from error
    if len(plain) != size:
        raise CodecError(f"damaged block: {len(plain)} bytes where {size} were expected; run verify")
    return np.frombuffer(plain, np.uint8)


def _take(block: memoryview, start: int, size: int) -> memoryview:
    if start + size > len(block):
        raise CodecError(f"damaged block: {len(block)} bytes, {start + size} expected; run verify")
    return block[start : start + size]


def _check(states_SF: torch.Tensor) -> None:
    if states_SF.dtype != torch.bfloat16 or states_SF.ndim != 2:
        raise CodecError(f"codecs take bfloat16 matrices, got {states_SF.dtype} of {states_SF.ndim} dimensions")


def _tensor(plane: Any, rows: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """A view of the plane, not to be written to."""
    return torch.frombuffer(plane, dtype=dtype).view(rows, channels)


@dataclass(frozen=True)
class Lossless:
    """bfloat16, bit for bit. Block: reference exponents [F] u8 · u32 size · zstd(exponent − reference) · sign/mantissa.

    A bfloat16 rotated left by one bit has the exponent in its high byte and mantissa·2 + sign in its low byte.
    """

    name: str = "bf16"
    number: int = 1
    lossless: bool = True
    bytes_per_value: float = 1.335

    def encode(self, states_SF: torch.Tensor) -> bytes:
        _check(states_SF)
        if states_SF.numel() == 0:
            return b""
        bits_SF = states_SF.contiguous().view(torch.int16)
        exponent_SF = (bits_SF >> 7).to(torch.uint8)
        noise_SF = ((bits_SF << 1) | ((bits_SF >> 15) & 1)).to(torch.uint8)
        reference_F = exponent_SF.float().mean(0).round().to(torch.uint8)
        compressed = _compress(exponent_SF - reference_F)
        head = reference_F.cpu().numpy().tobytes() + struct.pack("<I", len(compressed))
        return head + compressed + noise_SF.cpu().numpy().tobytes()

    def decode(self, block: memoryview, rows: int, channels: int) -> torch.Tensor:
        states_SF = torch.empty(rows, channels, dtype=torch.bfloat16)
        if states_SF.numel() == 0:
            return states_SF
        reference_F = torch.frombuffer(_take(block, 0, channels), dtype=torch.uint8)
        (size,) = struct.unpack("<I", _take(block, channels, 4))
        plane = _decompress(_take(block, channels + 4, size), rows * channels)
        exponent_SF = _tensor(plane, rows, channels, torch.uint8)
        noise_SF = _tensor(_take(block, channels + 4 + size, rows * channels), rows, channels, torch.uint8)
        bits_SF = states_SF.view(torch.int16)
        step = max(1, CHUNK_VALUES // channels)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            noise = noise_SF[part].to(torch.int16)
            bits = torch.add(exponent_SF[part], reference_F).to(torch.int16).bitwise_left_shift_(7)
            bits.bitwise_or_(noise >> 1)
            torch.bitwise_or(bits, noise.bitwise_left_shift_(15), out=bits_SF[part])
        return states_SF


@dataclass(frozen=True)
class Quantised:
    """Uniform steps of ``delta`` channel spreads, entropy-coded.

    |decoded − x| ≤ step/2 plus bfloat16 rounding, with step ≤ 2^⅛·max(delta·σ, |median|/256) and σ the channel's
    robust spread over the sample; values further than 127 steps from the channel's median are stored exactly.
    Block: u32 sizes of the next two parts · zstd(step codes u8 [F], offsets i16 low bytes [F], high bytes [F]) ·
    zstd(symbols i8 [S, F]) · exact values u16 of the symbols −128, in order.
    """

    name: str
    number: int
    delta: float
    bytes_per_value: float
    lossless: bool = False

    def encode(self, states_SF: torch.Tensor) -> bytes:
        _check(states_SF)
        if states_SF.numel() == 0:
            return b""
        code_F, step_F, offset_F = self._scale(states_SF)
        symbol_SF = (states_SF.float() / step_F).round_().sub_(offset_F)
        exact_SF = ~(symbol_SF.abs() <= MAX_SYMBOL)  # written so that NaN is exact too
        symbol_SF = symbol_SF.masked_fill_(exact_SF, ESCAPE).to(torch.int8)
        exact = states_SF.view(torch.int16)[exact_SF].cpu().numpy().tobytes()
        offsets_F2 = offset_F.to(torch.int16).view(torch.uint8).view(-1, 2)
        head = _compress(torch.cat([code_F, offsets_F2[:, 0], offsets_F2[:, 1]]))
        body = _compress(symbol_SF)
        return struct.pack("<II", len(head), len(body)) + head + body + exact

    def _scale(self, states_SF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(step code, step, offset in steps) per channel, from the median and the median absolute deviation."""
        rows = states_SF.shape[0]
        seen_FS = states_SF[:: -(-rows // SPREAD_ROWS)].float().T.contiguous()  # medians want contiguous rows
        median_F = seen_FS.nanmedian(1).values.nan_to_num(0.0, 0.0, 0.0)
        deviation_FS = (seen_FS - median_F[:, None]).abs()
        # half of a channel's values may be equal, for example in samples of a few tokens: then the mean speaks
        spread_F = torch.maximum(deviation_FS.nanmedian(1).values / 0.6745, deviation_FS.nanmean(1) / 4)
        wanted_F = torch.maximum(self.delta * spread_F, median_F.abs() / 256).nan_to_num(1.0, 1.0, 1.0)
        code_F = (wanted_F.clamp(min=2.0**-32).log2() * 4 + 128).round().clamp(0, 255)
        step_F = STEPS.to(states_SF.device)[code_F.long()]
        return code_F.to(torch.uint8), step_F, (median_F / step_F).round().clamp(-32768, 32767)

    def decode(self, block: memoryview, rows: int, channels: int) -> torch.Tensor:
        states_SF = torch.empty(rows, channels, dtype=torch.bfloat16)
        if states_SF.numel() == 0:
            return states_SF
        head_size, body_size = struct.unpack("<II", _take(block, 0, 8))
        head = _decompress(_take(block, 8, head_size), 3 * channels)
        code, low, high = head.reshape(3, channels)
        step_F = STEPS[torch.from_numpy(code.astype(np.int64))]
        offset_F = torch.from_numpy((low.astype(np.uint16) | (high.astype(np.uint16) << 8)).astype(np.int16)).float()
        plane = _decompress(_take(block, 8 + head_size, body_size), rows * channels)
        symbol_SF = _tensor(plane, rows, channels, torch.int8)
        chunk = max(1, CHUNK_VALUES // channels)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            states_SF[part] = symbol_SF[part].float().add_(offset_F).mul_(step_F)
        exact = np.flatnonzero(plane.view(np.int8) == ESCAPE)
        if len(exact):
            values = np.frombuffer(_take(block, 8 + head_size + body_size, 2 * len(exact)), np.uint16)
            states_SF.view(torch.int16).numpy().view(np.uint16).reshape(-1)[exact] = values
        return states_SF


CODECS: Final[dict[str, Codec]] = {
    codec.name: codec
    for codec in (
        Lossless(),
        Quantised("int8", 2, delta=0.04, bytes_per_value=0.875),
        Quantised("int4", 3, delta=0.35, bytes_per_value=0.48),
    )
}


def encode_and_decode(codec: Codec, states_SF: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """The block of a matrix, and the matrix that a reader will get from it, on the device of ``states_SF``.

    Whatever is derived from states and stored beside them must be derived from these.
    """
    block = codec.encode(states_SF)
    if codec.lossless:
        return block, states_SF
    decoded_SF = codec.decode(memoryview(block), *states_SF.shape)
    return block, decoded_SF.to(states_SF.device)


def codec_named(name: str) -> Codec:
    """The codec of that name; raises CodecError listing the known ones."""
    if name not in CODECS:
        raise CodecError(f"unknown codec {name!r}: known are {', '.join(CODECS)}")
    return CODECS[name]


def codec_numbered(number: int) -> Codec:
    """The codec that a record's header names; raises CodecError for one this version does not know."""
    for codec in CODECS.values():
        if codec.number == number:
            return codec
    raise CodecError(f"codec number {number} is not known to this version: update deepspec")
