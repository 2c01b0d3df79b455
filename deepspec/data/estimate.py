"""Tokens, bytes, hours and memory from configuration alone. Knows no weights and reads no data."""

from deepspec.data.codecs import Codec


def state_bytes(codec: Codec, hidden: int, taps: int, tokens: int, states: int) -> int:
    """Expected bytes of a cache: taps of ``tokens`` tokens, ``states`` last states, 5 bytes per token for the rest."""
    return int(codec.bytes_per_value * hidden * (taps * tokens + states)) + 5 * tokens


def human_bytes(count: float) -> str:
    """12345678 → '12.3 MB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"
