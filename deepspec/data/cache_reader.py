"""Random access to the samples of a target cache on any file system. Knows no models, order or batches.

One sample costs one range read of exactly its record; the index (ids, lengths, where each record lies) is read once.
"""

import os
import threading
from collections import OrderedDict
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from deepspec.data import record
from deepspec.data.batch import Sample
from deepspec.data.cache import INDEX, MANIFEST, CacheDamagedError, CacheError, CacheManifest, CacheMissingError
from deepspec.data.codecs import CodecError

OPEN_FILES: Final = 64


class _Storage(Protocol):
    def read(self, name: str) -> bytes: ...

    def read_range(self, name: str, start: int, size: int) -> bytes: ...


class _Local:
    """Positioned reads of local files, a bounded number of which stay open."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, name: str) -> bytes:
        with open(os.path.join(self._folder, name), "rb") as stream:
            return stream.read()

    def read_range(self, name: str, start: int, size: int) -> bytes:
        # a duplicate, so that another thread may close the cached descriptor meanwhile
        with self._lock:
            descriptor = os.dup(self._descriptor(name))
        try:
            parts = []
            while size > 0 and (part := os.pread(descriptor, size, start)):
                parts.append(part)
                start, size = start + len(part), size - len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(descriptor)

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(os.path.join(self._folder, name), os.O_RDONLY)
            if len(self._open) > OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(name)
        return self._open[name]

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()


class _Remote:
    """Any fsspec file system: object stores, servers, memory."""

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self._files, self._folder = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # a package that the scheme needs is missing, or an unknown scheme
            raise CacheError(f"{url} cannot be read: {error}") from error

    def read(self, name: str) -> bytes:
        return self._files.cat_file(f"{self._folder}/{name}")

    def read_range(self, name: str, start: int, size: int) -> bytes:
        return self._files.cat_file(f"{self._folder}/{name}", start=start, end=start + size)


class CacheReader:
    """An opened cache. Samples are numbered by ascending id, however many shards and processes made them.

    Safe to use from several threads. Raises CacheMissingError, CacheVersionError or CacheDamagedError on opening, and
    CacheError for a URL that no installed package reads.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        self._storage: _Storage = _Remote(self.path) if "://" in self.path else _Local(self.path)
        self.bytes_read = 0
        try:
            text = self._storage.read(MANIFEST).decode()
        except FileNotFoundError as error:
            raise CacheMissingError(
                f"{self.path} has no {MANIFEST}: no cache was finished there; run `python -m deepspec.data cache` "
                "(it continues where it stopped) or set data.path"
            ) from error
        self.manifest = CacheManifest.from_json(text, self.path)
        self._index = self._read_index()
        self.tokens: np.ndarray = self._index["n_tokens"].to_numpy()
        self.states: np.ndarray = self._index["n_last"].to_numpy()
        self._where = [self._index[name].to_numpy() for name in ("shard", "offset", "length")]
        self._ids = self._index["id"].combine_chunks()

    def _read_index(self) -> pa.Table:
        try:
            content = self._storage.read(INDEX)
        except FileNotFoundError as error:
            raise CacheDamagedError(f"{self.path}/{INDEX} is missing: {self.manifest.repair}") from error
        if xxhash.xxh3_128_hexdigest(content) != self.manifest.index_checksum:
            raise CacheDamagedError(f"{self.path}/{INDEX} does not match the manifest: {self.manifest.repair}")
        return pq.read_table(pa.BufferReader(content))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def codec(self) -> str:
        """Name of the codec."""
        return self.manifest.codec

    def id(self, row: int) -> str:
        """The id of a sample."""
        return self._ids[row].as_py()

    def ids(self) -> list[str]:
        """All ids, ascending."""
        return self._ids.to_pylist()

    def source(self, row: int) -> str:
        """The data set a sample came from."""
        return self._index["source"][row].as_py()

    def contents_digest(self) -> str:
        """Of the checksums of all shards: of every byte that is stored, without reading it."""
        digest = xxhash.xxh3_128()
        for shard in self.manifest.shards:
            digest.update(f"{shard.file} {shard.checksum}\n".encode())
        return digest.hexdigest()

    def record(self, row: int) -> bytes:
        """The undecoded record of a sample; raises CacheDamagedError if it cannot be read whole."""
        shard, offset, length = (int(column[row]) for column in self._where)
        name = self.manifest.shards[shard].file
        try:
            content = self._storage.read_range(name, offset, length)
        except FileNotFoundError as error:
            raise CacheDamagedError(f"{self.path}/{name} is missing: {self.manifest.repair}") from error
        self.bytes_read += len(content)
        if len(content) != length:
            raise CacheDamagedError(f"{self.path}/{name} is cut at sample {self.id(row)}: {self.manifest.repair}")
        return content

    def sample(self, row: int) -> Sample:
        """Read, check and decode one sample; raises CacheDamagedError naming the shard."""
        try:
            sample = record.unpack(self.record(row))
        except (record.RecordError, CodecError) as error:
            raise self.damaged(row, str(error)) from error
        if sample.id != self.id(row):
            raise self.damaged(row, f"the record there is of sample {sample.id}")
        return sample

    def rows_of(self, shard: int) -> list[int]:
        """The samples of a shard."""
        return np.flatnonzero(self._where[0] == shard).tolist()

    def damaged(self, row: int, reason: str) -> CacheDamagedError:
        """The error that says where a sample lies and how to get it back."""
        name = self.manifest.shards[int(self._where[0][row])].file
        captured = "delete this shard and run the cache command again: only it is rebuilt"
        remedy = self.manifest.repair if self.manifest.parents else captured
        return CacheDamagedError(f"{self.path}/{name}, sample {self.id(row)}: {reason}: {remedy}")
