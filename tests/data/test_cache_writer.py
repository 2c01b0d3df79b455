"""Shards: whole or absent, open to any Parquet reader, the manifest last."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from deepspec.data import record
from deepspec.data.cache import INDEX, MANIFEST, SHARD_SCHEMA, CacheDamagedError, Origin, shard_name
from deepspec.data.cache_reader import CacheReader
from deepspec.data.cache_writer import facts_path, finalise, finished, read_facts, write_shard
from deepspec.data.codecs import codec_named
from tests.data.little_chat import built

TARGET = {"name": "a", "path": None, "revision": None, "fingerprint": "f", "head": "h", "shape": {"hidden_size": 4}}
ORIGIN = Origin(TARGET, [0, 1], False, "t", "bf16")


def packed(id: str, length: int = 12) -> bytes:
    generator = torch.Generator().manual_seed(sum(id.encode()))
    taps_SF = torch.randn(length, 8, generator=generator).bfloat16()
    last_ID = torch.randn(4, 4, generator=generator).bfloat16()
    row = record.Row(id, "made-up", list(range(length)), [(3, 7)], taps_SF, last_ID)
    return record.pack(row, codec_named("bf16"), 2)


def shard(folder: Path, number: int, ids: list[str]) -> None:
    with write_shard(folder, number, ORIGIN, f"identity {number}") as writer:
        for id in ids:
            writer.add("made-up", packed(id))


def test_records_lie_where_the_index_says(tmp_path):
    shard(tmp_path, 0, ["b", "d"])
    shard(tmp_path, 1, ["c", "a"])
    finalise(tmp_path, 2, ORIGIN, {})
    reader = CacheReader(tmp_path)
    assert reader.ids() == ["a", "b", "c", "d"]
    assert [reader.record(row) for row in range(4)] == [packed(id) for id in "abcd"]
    column = pq.read_table(tmp_path / shard_name(0))["record"].to_pylist()
    assert column == [packed("b"), packed("d")]


def test_an_error_leaves_no_shard_and_no_facts(tmp_path):
    def interrupted() -> None:
        with write_shard(tmp_path, 0, ORIGIN, "x") as writer:
            writer.add("made-up", packed("a"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_facts_of_another_size_or_identity_do_not_count(tmp_path):
    shard(tmp_path, 0, ["a"])
    assert finished(tmp_path, ["identity 0"]) == [True]
    assert finished(tmp_path, ["another"]) == [False]
    path = tmp_path / shard_name(0)
    path.write_bytes(path.read_bytes()[:-1])
    assert finished(tmp_path, ["identity 0"]) == [False]
    shard(tmp_path, 0, ["a"])
    facts_path(path).write_text("{")
    assert read_facts(tmp_path, 0) is None


def test_finalise_refuses_gaps_and_repeated_ids(tmp_path):
    shard(tmp_path, 0, ["a"])
    with pytest.raises(CacheDamagedError, match=r"shard-00001\.parquet is missing"):
        finalise(tmp_path, 2, ORIGIN, {})
    shard(tmp_path, 1, ["a"])
    with pytest.raises(CacheDamagedError, match="two samples with the id 'a'"):
        finalise(tmp_path, 2, ORIGIN, {})
    assert not (tmp_path / MANIFEST).exists()


def test_empty_shards_and_caches_are_possible(tmp_path):
    shard(tmp_path, 0, [])
    manifest = finalise(tmp_path, 1, ORIGIN, {})
    assert (manifest.rows, len(CacheReader(tmp_path))) == (0, 0)


def test_any_parquet_reader_opens_the_metadata(tmp_path):
    cfg = built(tmp_path, count=8)
    folder = Path(cfg.out) / "cache"
    reader = CacheReader(folder)
    shards = str(folder / "shard-*.parquet")
    metadata = [name for name in SHARD_SCHEMA.names if name != "record"]
    table = pq.read_table(folder / shard_name(0), columns=metadata)
    own = reader.sample(reader.ids().index(table["id"][0].as_py()))
    assert table["tokens"][0].as_py() == own.tokens_S.tolist()
    spans = [(span["start"], span["end"]) for span in table["spans"][0].as_py()]
    assert record.supervised_mask(len(own), spans).tolist() == own.supervised_S.tolist()
    assert table["n_last"][0].as_py() == len(own.last_ID)

    duckdb = pytest.importorskip("duckdb")
    database = duckdb.connect()
    counted = database.execute(f"select count(*), sum(n_tokens), min(len(tokens)) from '{shards}'").fetchone()
    assert counted == (8, reader.manifest.tokens, int(reader.tokens.min()))
    joined = database.execute(
        f"select count(*) from '{shards}' s join '{folder / INDEX}' i using (id, n_tokens)"
    ).fetchone()
    assert joined == (8,)


def test_datasets_opens_the_metadata(tmp_path):
    datasets = pytest.importorskip("datasets")
    folder = Path(built(tmp_path, count=8).out) / "cache"
    loaded = datasets.load_dataset(
        "parquet",
        data_files=str(folder / "shard-*.parquet"),
        columns=["id", "n_tokens", "spans", "tokens"],
        split="train",
        cache_dir=str(tmp_path / "hf"),
    )
    assert sorted(loaded["id"]) == CacheReader(folder).ids()
    assert all(len(tokens) == count for tokens, count in zip(loaded["tokens"], loaded["n_tokens"], strict=True))
