"""Reading: one range per sample, any file system, threads, and errors that name the shard."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch

from deepspec.data import cache_reader
from deepspec.data.cache import INDEX, MANIFEST, CacheDamagedError, CacheError, CacheMissingError, shard_name
from deepspec.data.cache_reader import CacheReader
from tests.data.little_chat import built


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Path(built(tmp_path_factory.mktemp("cache"), count=18).out) / "cache"


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def equal(a, b) -> bool:
    return a.id == b.id and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("tokens_S", "supervised_S", "taps_SF", "last_ID")
    )


def test_a_sample_costs_its_own_bytes_in_one_read(folder, monkeypatch):
    reader = CacheReader(folder)
    ranges = []
    own = reader._storage.read_range
    monkeypatch.setattr(reader._storage, "read_range", lambda *a: ranges.append(a) or own(*a))
    monkeypatch.setattr(reader._storage, "read", lambda name: pytest.fail(f"read all of {name}"))
    for row in (11, 0, 17, 11):
        before = reader.bytes_read
        sample = reader.sample(row)
        read = reader.bytes_read - before
        assert read < 2 * (sample.taps_SF.numel() + sample.last_ID.numel()) + 8 * len(sample) + 1000
        assert read == len(reader.record(row))
    assert len(ranges) == 8
    assert sum(size for _, _, size in ranges) == reader.bytes_read
    assert max(size for _, _, size in ranges) < reader.manifest.shards[0].bytes / 2


def without_package(url):
    raise ImportError("Install s3fs to access S3")


def test_memory_file_system_gives_the_same_samples(folder, monkeypatch):
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe_file(f"/bucket/cache/{path.name}", path.read_bytes())
    local, remote = CacheReader(folder), CacheReader("memory://bucket/cache")
    assert remote.ids() == local.ids()
    assert all(equal(local.sample(row), remote.sample(row)) for row in range(len(local)))
    assert remote.bytes_read == local.bytes_read
    with pytest.raises(CacheMissingError, match=r"memory://elsewhere.*data cache"):
        CacheReader("memory://elsewhere")
    with pytest.raises(CacheError, match="nosuch://bucket cannot be read"):
        CacheReader("nosuch://bucket")
    monkeypatch.setattr(fsspec.core, "url_to_fs", without_package)
    with pytest.raises(CacheError, match="s3://bucket cannot be read: Install s3fs to access S3"):
        CacheReader("s3://bucket")


def test_threads_read_the_same_with_few_open_files(folder, monkeypatch):
    monkeypatch.setattr(cache_reader, "OPEN_FILES", 1)
    reader = CacheReader(folder)
    rows = [row for _ in range(5) for row in range(len(reader))]
    expected = [CacheReader(folder).sample(row) for row in range(len(reader))]
    with ThreadPoolExecutor(4) as pool:
        for row, sample in zip(rows, pool.map(reader.sample, rows), strict=True):
            assert equal(sample, expected[row])


def test_no_cache_is_an_error_that_says_what_to_run(tmp_path):
    with pytest.raises(CacheMissingError, match=r"has no manifest\.json.*deepspec\.data cache"):
        CacheReader(tmp_path)


def test_a_flipped_byte_names_shard_and_sample(copy):
    reader = CacheReader(copy)
    path = copy / shard_name(1)
    content = bytearray(path.read_bytes())
    row = reader.rows_of(1)[0]
    content[int(reader._where[1][row]) + 500] ^= 4
    path.write_bytes(content)
    with pytest.raises(CacheDamagedError, match=rf"shard-00001\.parquet, sample {reader.id(row)}.*checksum.*only it"):
        CacheReader(copy).sample(row)


def test_cut_and_missing_shards_are_named(copy):
    reader = CacheReader(copy)
    path = copy / shard_name(2)
    row = max(reader.rows_of(2), key=lambda row: reader._where[1][row])
    path.write_bytes(path.read_bytes()[: int(reader._where[1][row]) + 10])
    with pytest.raises(CacheDamagedError, match=r"shard-00002\.parquet is cut"):
        reader.sample(row)
    path.unlink()
    with pytest.raises(CacheDamagedError, match=r"shard-00002\.parquet is missing"):
        CacheReader(copy).sample(row)


def test_an_index_of_another_build_is_refused(copy):
    content = bytearray((copy / INDEX).read_bytes())
    content[100] ^= 1
    (copy / INDEX).write_bytes(content)
    with pytest.raises(CacheDamagedError, match=r"index\.parquet does not match"):
        CacheReader(copy)
    (copy / INDEX).unlink()
    with pytest.raises(CacheDamagedError, match=r"index\.parquet is missing"):
        CacheReader(copy)
    assert (copy / MANIFEST).exists()
