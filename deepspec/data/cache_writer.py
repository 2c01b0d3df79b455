"""Writes shards of a target cache, one at a time and atomically, and the manifest last. Knows no models.

Every shard has its facts beside it (``shard-00007.json``: identity, index, checksum), written just before the shard
gets its name. So a shard that exists is complete, any number of processes may build different shards of one folder,
and whoever finishes last writes the manifest from the facts alone.
"""

import contextlib
import dataclasses
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from deepspec.data import record
from deepspec.data.cache import (
    INDEX,
    INDEX_SCHEMA,
    MANIFEST,
    SHARD_SCHEMA,
    CacheDamagedError,
    CacheManifest,
    Origin,
    Probe,
    Shard,
    shard_name,
)
from deepspec.files import atomic_write, provenance, read_json, write_json

_INDEXED: Final = ("id", "source", "n_tokens", "n_last", "offset", "length")


class _Checksummed(io.RawIOBase):
    """A file to write to once, from start to end, that knows the XXH3-128 of its bytes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.digest = xxhash.xxh3_128()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.size += len(view)
        return self._file.write(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True)
class Facts:
    """What is known of a finished shard: manifest line, part of the index, probes, responses dropped by reason."""

    shard: Shard
    index: dict[str, list[Any]]
    probes: list[Probe]
    dropped: dict[str, int]


class ShardWriter:
    """Appends rows to one shard; every row is a row group, so its record is one contiguous range of the file."""

    def __init__(self, temporary: Path, origin: Origin) -> None:
        self.origin = origin
        self._file = _Checksummed(temporary)
        schema = SHARD_SCHEMA.with_metadata({"deepspec": _compact(origin.as_dict())})
        plain = [name for name in SHARD_SCHEMA.names if name != "record"]
        self._schema = schema
        self._parquet = pq.ParquetWriter(
            self._file,
            schema,
            use_dictionary=False,
            compression={**dict.fromkeys(_leaves(plain), "zstd"), "record": "none"},
            write_statistics=plain,
        )
        self._index: dict[str, list[Any]] = {name: [] for name in _INDEXED}
        self.probes: list[Probe] = []
        self.dropped: dict[str, int] = {}

    def add(self, source: str, packed: bytes) -> None:
        """Append a packed record (deepspec.data.record); the metadata columns are what it says of itself."""
        head = record.head(packed)
        values: dict[str, Any] = {
            "id": head.id,
            "source": source,
            "n_tokens": len(head.tokens_S),
            "n_last": head.states,
            "spans": [{"start": start, "end": end} for start, end in head.spans],
            "tokens": head.tokens_S,
            "checksum": record.checksum(packed),
            "record": packed,
        }
        columns = [pa.array([values[field.name]], field.type) for field in self._schema]
        self._parquet.write_table(pa.Table.from_arrays(columns, schema=self._schema))
        for name in ("id", "source", "n_tokens", "n_last"):
            self._index[name].append(values[name])
        self._index["length"].append(len(packed))

    def close(self) -> None:
        """Write the footer and find where each record lies: the last bytes of its column chunk."""
        self._parquet.close()
        self._file.close()

    def facts(self, path: Path, temporary: Path, identity: str) -> Facts:
        """Facts of the closed shard, ``path`` being its final name."""
        metadata = pq.read_metadata(temporary)
        column = SHARD_SCHEMA.get_field_index("record") - len(SHARD_SCHEMA.names) + metadata.num_columns
        for row, length in enumerate(self._index["length"]):
            chunk = metadata.row_group(row).column(column)
            self._index["offset"].append(chunk.data_page_offset + chunk.total_compressed_size - length)
        shard = Shard(
            file=path.name,
            rows=len(self._index["id"]),
            tokens=sum(self._index["n_tokens"]),
            states=sum(self._index["n_last"]),
            bytes=self._file.size,
            checksum=self._file.digest.hexdigest(),
            identity=identity,
            git_revision=provenance()["git_revision"],
        )
        return Facts(shard, self._index, self.probes, self.dropped)


@contextlib.contextmanager
def write_shard(folder: Path, number: int, origin: Origin, identity: str) -> Iterator[ShardWriter]:
    """A writer whose shard appears under its name only when the block ends without an error."""
    path = folder / shard_name(number)
    with atomic_write(path) as temporary:
        writer = ShardWriter(temporary, origin)
        try:
            yield writer
        finally:
            writer.close()
        facts = writer.facts(path, temporary, identity)
        path.unlink(missing_ok=True)  # an outdated shard must not be taken for the one these facts describe
        write_json(facts_path(path), dataclasses.asdict(facts))


def facts_path(shard: Path) -> Path:
    """Where the facts of a shard are."""
    return shard.with_suffix(".json")


def read_facts(folder: Path, number: int) -> Facts | None:
    """Facts of a shard whose file has the right size, else None. Reads no record."""
    path = folder / shard_name(number)
    if not path.is_file() or not facts_path(path).is_file():
        return None
    try:
        plain = read_json(facts_path(path))
        probes = [Probe(**probe) for probe in plain["probes"]]
        facts = Facts(Shard(**plain["shard"]), plain["index"], probes, plain["dropped"])
    except (ValueError, KeyError, TypeError):
        return None  # facts from before a crash of the file system: the shard is built again
    return facts if facts.shard.bytes == path.stat().st_size else None


def finished(folder: Path, identities: Sequence[str]) -> list[bool]:
    """For each shard of the plan whether it is there, whole, and built from the same samples and settings."""
    facts = [read_facts(folder, number) for number in range(len(identities))]
    return [fact is not None and fact.shard.identity == own for fact, own in zip(facts, identities, strict=True)]


def remove_leftovers(folder: Path, shards: Sequence[int]) -> None:
    """Remove the half-written files that a kill left of these shards, which nobody else may be writing."""
    for number in shards:
        for path in folder.glob(f".{Path(shard_name(number)).stem}.*.tmp"):
            path.unlink(missing_ok=True)


def finalise(folder: Path, shards: int, origin: Origin, settings: dict[str, Any]) -> CacheManifest:
    """Write index.parquet and, last, manifest.json from the facts of all shards; files beyond them are removed.

    Safe to run in several processes at once: all write the same. Raises CacheDamagedError for a missing shard and for
    an id in two shards.
    """
    columns: dict[str, list[Any]] = {name: [] for name in INDEX_SCHEMA.names}
    lines: list[Shard] = []
    probes: list[Probe] = []
    for number in range(shards):
        facts = read_facts(folder, number)
        if facts is None:
            raise CacheDamagedError(
                f"{folder / shard_name(number)} is missing or cut: run the cache command again, only it is rebuilt"
            )
        lines.append(facts.shard)
        probes += facts.probes
        for name in _INDEXED:
            columns[name] += facts.index[name]
        columns["shard"] += [number] * facts.shard.rows
    order = sorted(range(len(columns["id"])), key=columns["id"].__getitem__)
    for before, after in itertools.pairwise(order):
        if columns["id"][before] == columns["id"][after]:
            raise CacheDamagedError(
                f"{folder} has two samples with the id {columns['id'][after]!r}: ids must be unique"
            )
    arrays = [pa.array([columns[field.name][row] for row in order], field.type) for field in INDEX_SCHEMA]
    with atomic_write(folder / INDEX) as temporary:
        pq.write_table(pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA), temporary, compression="zstd")
        digest = xxhash.xxh3_128_hexdigest(temporary.read_bytes())
    manifest = CacheManifest(origin, lines, digest, probes[:64], settings, provenance())
    write_json(folder / MANIFEST, manifest.to_json())
    _remove_surplus(folder, shards)
    return manifest


def _remove_surplus(folder: Path, shards: int) -> None:
    """Shards of an earlier, longer plan, which tools that glob would take for data, and what kills left behind."""
    known = {shard_name(number) for number in range(shards)}
    for path in folder.glob("shard-*.parquet"):
        if path.name not in known:
            path.unlink(missing_ok=True)
            facts_path(path).unlink(missing_ok=True)
    for path in folder.glob(".shard-*.tmp"):
        path.unlink(missing_ok=True)


def _leaves(names: Sequence[str]) -> list[str]:
    """Parquet's names of the leaf columns, which compression is set by."""
    nested = {"spans": ["spans.list.element.start", "spans.list.element.end"], "tokens": ["tokens.list.element"]}
    return [leaf for name in names for leaf in nested.get(name, [name])]


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
