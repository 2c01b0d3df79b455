"""A reader written from docs/cache-format.md alone, against fixed bytes and a cache of today: neither may drift.

The functions up to ``GOLDEN`` use nothing of deepspec. The fixed records hold every kind of value the page names.
"""

import base64
import json
import re
import struct
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
import zstandard

from deepspec.data import record
from deepspec.data.cache_reader import CacheReader
from deepspec.data.codecs import codec_named
from tests.data.little_chat import built


def unzstd(content: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(content)


def read_lossless(block: bytes, rows: int, channels: int) -> np.ndarray:
    reference_C = np.frombuffer(block, np.uint8, channels)
    (size,) = struct.unpack_from("<I", block, channels)
    start = channels + 4
    exponent_RC = np.frombuffer(unzstd(block[start : start + size]), np.uint8).reshape(rows, channels) + reference_C
    byte_RC = np.frombuffer(block[start + size :], np.uint8).reshape(rows, channels).astype(np.uint16)
    return (exponent_RC.astype(np.uint16) << 7) | (byte_RC >> 1) | ((byte_RC & 1) << 15)


def read_quantised(block: bytes, rows: int, channels: int) -> np.ndarray:
    head_size, symbols_size = struct.unpack_from("<II", block)
    code_C, low_C, high_C = np.frombuffer(unzstd(block[8 : 8 + head_size]), np.uint8).reshape(3, channels)
    symbols_end = 8 + head_size + symbols_size
    symbol_RC = np.frombuffer(unzstd(block[8 + head_size : symbols_end]), np.int8).reshape(rows, channels)
    exact = np.frombuffer(block[symbols_end:], "<u2")
    step_C = (2.0 ** ((code_C.astype(float) - 128) / 4)).astype(np.float32)
    offset_C = (low_C.astype(np.uint16) | (high_C.astype(np.uint16) << 8)).view(np.int16)
    value_RC = (symbol_RC.astype(np.int32) + offset_C).astype(np.float32) * step_C
    bits_RC = value_RC.view(np.uint32)
    nearest_RC = ((bits_RC + 0x7FFF + ((bits_RC >> 16) & 1)) >> 16).astype(np.uint16)
    nearest_RC[symbol_RC == -128] = exact
    return nearest_RC


def read_block(codec: int, block: bytes, rows: int, channels: int) -> np.ndarray:
    """Bits of the bfloat16 values, [rows, channels]."""
    if rows == 0:
        assert block == b""
        return np.zeros((0, channels), np.uint16)
    return read_lossless(block, rows, channels) if codec == 1 else read_quantised(block, rows, channels)


def read_record(content: bytes) -> dict:
    magic, version, checksum = struct.unpack_from("<4sIQ", content)
    assert magic == b"DSRC"
    assert checksum == xxhash.xxh3_64_intdigest(content[16:])
    codec, taps = struct.unpack_from("<HH", content, 16)
    tokens, spans, states, hidden, channels, id_size = struct.unpack_from("<6I", content, 20)
    taps_size, last_size = struct.unpack_from("<QQ", content, 44)
    assert channels == taps * hidden
    at = 60

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return content[at - size : at]

    found = {
        "spans": np.frombuffer(take(8 * spans), "<i4").reshape(-1, 2).tolist(),
        "tokens": np.frombuffer(take(4 * tokens), "<i4").tolist(),
        "id": take(id_size).decode(),
        "taps": read_block(codec, take(taps_size), tokens, channels),
        "last": read_block(codec, take(last_size), states, hidden),
    }
    if version in (2, 3):
        found["log_z"] = np.frombuffer(take(4 * states), "<f4").tolist()
        found["top"] = np.frombuffer(take(4 * states), "<i4").tolist()
    assert at == len(content)
    return found


def read_cache(folder: Path) -> dict[str, dict]:
    """Every record by id, by the manifest and the index."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == "deepspec-target-cache"
    assert manifest["schema_version"] == 1
    index = (folder / "index.parquet").read_bytes()
    assert xxhash.xxh3_128_hexdigest(index) == manifest["index_checksum"]
    files = [(folder / shard["file"]).read_bytes() for shard in manifest["shards"]]
    assert [len(file) for file in files] == [shard["bytes"] for shard in manifest["shards"]]
    assert [xxhash.xxh3_128_hexdigest(file) for file in files] == [shard["checksum"] for shard in manifest["shards"]]
    rows = pq.read_table(folder / "index.parquet").to_pylist()
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    return {row["id"]: read_record(files[row["shard"]][row["offset"] : row["offset"] + row["length"]]) for row in rows}


def bits(hexadecimal: str, channels: int) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(hexadecimal), ">u2").astype(np.uint16).reshape(-1, channels)


def bits_of(states: torch.Tensor) -> np.ndarray:
    return states.contiguous().view(torch.int16).numpy().view(np.uint16)


# A record and the bits of its taps [7, 4] and last states [3, 2]. NaN, −∞, −0 and a value far from its channel's
# median; bf16 is version 1, the others version 2.
GOLDEN = {
    "bf16": (
        "RFNSQwEAAADNXJXMvUwOSgEAAgAHAAAAAgAAAAMAAAACAAAABAAAAAQAAABJAAAAAAAAABsAAAAAAAAAAAAAAAIAAAAFAAAABwAA"
        "AAUAAABwEQEABwAAAAgAAAAJAAAACgAAAAsAAADDqS0xa4mQkSUAAAAotS/9IBzhAAAQBO3sE//u8A//b+0S/+5ulf/t7hL/7uwS"
        "/+7vO9T4JFTHCJmpx4DJY7sAAQHH/GZ+wwTBF8EAXH9+DwAAACi1L/0gBjEAAAD///8BAX7qkzgxEg==",
        "bd9d46ea3efc3e923f2ac4633f04c0ccbd54c4637fc0bf64beb1c45d3f00ff808000c4633efe3fb33ebfc4613f02bee0be8bc4603f00402e",
        "3fbf3ef5bf493e9cc0183f89",
    ),
    "int8": (
        "RFNSQwIAAAD2EEzc4uaIhAIAAgAHAAAAAgAAAAMAAAACAAAABAAAAAQAAABIAAAAAAAAACYAAAAAAAAAAAAAAAIAAAAFAAAABwAA"
        "AAUAAABwEQEABwAAAAgAAAAJAAAACgAAAAsAAADDqS0xFQAAACUAAAAotS/9IAxhAABnllyA/OwAAP//AQAotS/9IBzhAAD+gPwA"
        "NwAI+gAAgP/qAACABAD+ASAABADvAAAD6kbAf4D/DwAAAA8AAAAotS/9IAYxAAByZvcr/wAotS/9IAYxAAAaAADx7jYAAMA/AAAQ"
        "wAAAtEIDAAAAf1ECAAAAAAA=",
        "bda146ea3efc00003f2cc4623f04c0c0bd57c4627fc0bf80beafc4623f00ff800000c4623efe3f803ebcc4623f020000be8dc4623f004040",
        "3fc03ef3bf4c3e9ec0193f89",
    ),
    "int4": (
        "RFNSQwIAAABzD0aZj8hsFgMAAgAHAAAAAgAAAAMAAAACAAAABAAAAAQAAABGAAAAAAAAACYAAAAAAAAAAAAAAAIAAAAFAAAABwAA"
        "AAUAAABwEQEABwAAAAgAAAAJAAAACgAAAAsAAADDqS0xFQAAACUAAAAotS/9IAxhAABzolyAAP4AAAD/AQAotS/9IBzhAAD/VfwA"
        "Bv8I+gD/gP/9AACAAP/+AQQABAD9AAADwH+A/w8AAAAPAAAAKLUv/SAGMQAAf3L/Bf8AKLUv/SAGMQAAAwAA/v4HAADAPwAAEMAA"
        "ALRCAwAAAH9RAgAAAAAA",
        "bdd746eb3efc00003f21c4883f04c0c00000c4887fc0bf80bea1c4353f00ff800000c4883efe3f803ed7c4353f020000bea1c4353f004040",
        "3fd73ee2bf573e88c0213f88",
    ),
}


@pytest.fixture(params=GOLDEN)
def golden(request):
    content, taps, last = GOLDEN[request.param]
    return request.param, base64.b64decode(content), bits(taps, 4), bits(last, 2)


def test_the_pages_reader_decodes_the_fixed_records(golden):
    codec, content, taps_SF, last_ID = golden
    found = read_record(content)
    assert (found["id"], found["tokens"], found["spans"]) == ("é-1", [5, 70000, 7, 8, 9, 10, 11], [[0, 2], [5, 7]])
    assert (found["taps"] == taps_SF).all()
    assert (found["last"] == last_ID).all()
    known = {} if codec == "bf16" else {"log_z": [1.5, -2.25, 90.0], "top": [3, 151935, 0]}
    assert {name: found[name] for name in ("log_z", "top") if name in found} == known


def test_deepspec_decodes_the_fixed_records(golden):
    _, content, taps_SF, last_ID = golden
    sample = record.unpack(content)
    assert (bits_of(sample.taps_SF) == taps_SF).all()
    assert (bits_of(sample.last_ID) == last_ID).all()
    # the fixed lossy records are of version 2: their normalisers belong to states that nobody can decode any more
    assert sample.log_z_I is sample.top_I is None


def test_deepspec_still_writes_what_the_fixed_records_hold(golden):
    codec, _, taps_SF, last_ID = golden
    exact = record.unpack(base64.b64decode(GOLDEN["bf16"][0]))
    row = record.Row("x", "s", exact.tokens_S.tolist(), [(0, 2), (5, 7)], exact.taps_SF, exact.last_ID)
    found = read_record(record.pack(row, codec_named(codec), 2))
    assert (found["taps"] == taps_SF).all()  # zstd may compress better one day: the bytes are free, the values are not
    assert (found["last"] == last_ID).all()


def test_products_are_rounded_to_nearest_ties_to_even():
    head = zstandard.compress(bytes([128, 0, 1]))  # step 1, offset 256
    symbols = zstandard.compress(bytes([0, 1, 2, 3, 5]))  # 257, 259 and 261 lie between two bfloat16 each
    block = struct.pack("<II", len(head), len(symbols)) + head + symbols
    expected = torch.tensor([256.0, 256.0, 258.0, 260.0, 260.0], dtype=torch.bfloat16)[:, None]
    assert (read_block(2, block, 5, 1) == bits_of(expected)).all()
    assert torch.equal(codec_named("int8").decode(memoryview(block), 5, 1), expected)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("log_normaliser", [False, True])
def test_the_pages_reader_decodes_every_sample_of_a_cache(tmp_path, codec, log_normaliser):
    built(tmp_path, count=9, codec=codec, log_normaliser=log_normaliser)
    own = CacheReader(tmp_path / "cache")
    found = read_cache(tmp_path / "cache")
    assert list(found) == own.ids()
    for row, id in enumerate(own.ids()):
        sample = own.sample(row)
        assert found[id]["tokens"] == sample.tokens_S.tolist()
        assert (found[id]["taps"] == bits_of(sample.taps_SF)).all()
        assert (found[id]["last"] == bits_of(sample.last_ID)).all()
        supervised = [token for start, end in found[id]["spans"] for token in range(start, end)]
        assert supervised == sample.supervised_S.nonzero().flatten().tolist()
        assert found[id].get("top") == (sample.top_I.tolist() if log_normaliser else None)
        assert found[id].get("log_z") == (sample.log_z_I.tolist() if log_normaliser else None)


def test_the_page_names_every_field_of_the_manifest(tmp_path):
    built(tmp_path, count=4)
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    page = (Path(__file__).parents[2] / "docs" / "cache-format.md").read_text(encoding="utf-8")
    names = [*manifest, *manifest["totals"], *manifest["origin"], *manifest["origin"]["target"]]
    names += [*manifest["shards"][0], *manifest["probes"][0]]
    assert [name for name in names if not re.search(rf"`[\w.]*\b{name}\b[^`]*`", page)] == []
