"""Inspect, verify, merge and subset on a real, tiny cache."""

from pathlib import Path

import fsspec
import pytest

from deepspec.data import inspection
from deepspec.data.cache import CacheDamagedError, CacheMismatchError, shard_name
from deepspec.data.cache_build import build_cache
from deepspec.data.cache_reader import CacheReader
from deepspec.data.inspection import describe, render, verify
from deepspec.data.recombine import chooser, merge, subset
from tests.data.little_chat import built, chat_target, chat_tokenizer


def records(path) -> dict[str, bytes]:
    reader = CacheReader(path)
    return {reader.id(row): reader.record(row) for row in range(len(reader))}


def test_summary_and_a_sample_with_its_answer_marked(tmp_path):
    reader = CacheReader(Path(built(tmp_path).out) / "cache")
    text = "\n".join(describe(reader))
    for part in ("tiny-chat", "taps       0, 1, 2", "18 in 5 shards", "made-up 18", "bf16", "dropped    none"):
        assert part in text
    sample = reader.sample(0)
    answer = chat_tokenizer().decode(sample.tokens_S[sample.supervised_S])
    shown = render(reader, chat_tokenizer(), 0, colour=False)
    assert f"assistant\n⟦{answer}⟧" in shown
    assert f"\033[32m{answer}\033[0m" in render(reader, chat_tokenizer(), 0, colour=True)


def test_inspect_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inspection, "_tokenizer", lambda manifest: chat_tokenizer())
    inspection.inspect(built(tmp_path))
    assert "supervised" in capsys.readouterr().out


def test_a_url_is_inspected_and_never_written_to(tmp_path, monkeypatch, capsys):
    cfg = built(tmp_path, count=5)
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "cache"), "/bucket/run/cache", recursive=True)
    monkeypatch.setattr(inspection, "_tokenizer", lambda manifest: chat_tokenizer())
    cfg.out = "memory://bucket/run"
    inspection.inspect(cfg)
    assert "memory://bucket/run/cache\n  target     tiny-chat" in capsys.readouterr().out
    for write in (
        lambda: verify(cfg),
        lambda: build_cache(cfg, chat_target()),
        lambda: merge([cfg.cache_path], "memory://bucket/merged"),
        lambda: cfg.prompts_dir,
    ):
        with pytest.raises(ValueError, match=r"memory://bucket/\S+ is a URL.*local or shared folder"):
            write()
    assert len(merge([cfg.cache_path], tmp_path / "copy").shards) == 1


def test_verify_names_every_kind_of_damage_and_the_shards_can_be_rebuilt_alone(tmp_path, capsys):
    cfg = built(tmp_path)
    folder = tmp_path / "cache"
    whole = records(folder)
    verify(cfg)
    assert "every byte as written" in capsys.readouterr().out
    reader = CacheReader(folder)
    flipped, cut, missing, footer = (folder / shard_name(number) for number in (0, 1, 2, 3))
    row = reader.rows_of(0)[1]
    content = bytearray(flipped.read_bytes())
    content[int(reader._where[1][row]) + 99] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-100])
    missing.unlink()
    content = bytearray(footer.read_bytes())
    content[-60] ^= 1
    footer.write_bytes(content)
    with pytest.raises(CacheDamagedError) as error:
        verify(cfg)
    text = str(error.value)
    assert "4 damaged of 5" in text
    assert f"shard-00000.parquet, sample {reader.id(row)}: the checksum does not match" in text
    assert "shard-00001.parquet: " in text
    assert "instead of" in text
    assert "shard-00002.parquet: missing" in text
    assert "shard-00003.parquet: its metadata changed" in text
    assert "shard-00004" not in text
    cfg.cache.remove_damaged = True
    with pytest.raises(CacheDamagedError, match="only these are rebuilt"):
        verify(cfg)
    assert [path.name for path in sorted(folder.glob("*.parquet"))] == ["index.parquet", "shard-00004.parquet"]
    build_cache(cfg, chat_target())
    verify(cfg)
    assert records(folder) == whole


def test_subset_and_merge_give_the_samples_back(tmp_path):
    folder = Path(built(tmp_path / "all").out) / "cache"
    (tmp_path / "ids").write_text("r003\nr011\nr012\n")
    subset(folder, tmp_path / "few", chooser(ids_file=tmp_path / "ids"))
    subset(folder, tmp_path / "rest", lambda id, source: id not in ("r003", "r011"))
    assert sorted(records(tmp_path / "few")) == ["r003", "r011", "r012"]
    merged = merge([tmp_path / "few", tmp_path / "rest"], tmp_path / "merged", shard_rows=5)
    assert records(tmp_path / "merged") == records(folder)
    assert [shard.rows for shard in merged.shards] == [5, 5, 5, 3]
    assert {probe.id for probe in merged.probes} <= set(records(folder))
    assert list(inspection.damages(CacheReader(tmp_path / "merged"))) == []


def test_chooser_conditions_hold_together():
    keep = chooser(sources=["a"], share=0.5)
    chosen = [id for id in map(str, range(1000)) if keep(id, "a")]
    assert 400 < len(chosen) < 600
    assert not any(keep(id, "b") for id in map(str, range(1000)))


def test_a_damaged_merged_cache_names_its_parents_and_no_build_touches_it(tmp_path):
    cfg = built(tmp_path, count=6)
    parent = tmp_path / "cache"
    merge([parent], tmp_path / "merged", shard_rows=3)
    cfg.cache.folder, cfg.cache.remove_damaged, cfg.cache.replace = "merged", True, True
    again = rf"merge or subset it again from {parent}"
    with pytest.raises(CacheMismatchError, match=rf"was merged or cut out of {parent}.*cache\.folder"):
        build_cache(cfg, chat_target())
    shard = tmp_path / "merged" / shard_name(1)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CacheDamagedError, match=again):
        verify(cfg)
    assert shard.exists()
    reader = CacheReader(tmp_path / "merged")
    with pytest.raises(CacheDamagedError, match=again):
        _ = [reader.sample(row) for row in range(len(reader))]
    shard.unlink()
    with pytest.raises(CacheDamagedError, match=rf"missing: .*{again}"):
        CacheReader(tmp_path / "merged").sample(5)
    (tmp_path / "merged" / "index.parquet").unlink()
    with pytest.raises(CacheDamagedError, match=rf"index\.parquet is missing: .*{again}"):
        CacheReader(tmp_path / "merged")


def test_ids_are_one_per_line(tmp_path):
    (tmp_path / "ids").write_text("math 17\nr003\n")
    keep = chooser(ids_file=tmp_path / "ids")
    assert [id for id in ("math 17", "math", "17", "r003") if keep(id, "")] == ["math 17", "r003"]


def test_merge_and_subset_refuse_what_does_not_fit(tmp_path):
    bf16 = Path(built(tmp_path / "a", count=5).out) / "cache"
    int8 = Path(built(tmp_path / "b", count=5, codec="int8").out) / "cache"
    other = Path(built(tmp_path / "c", count=5, target=chat_target(seed=3)).out) / "cache"
    with pytest.raises(CacheMismatchError, match=r"differ in codec \(int8 and bf16\)"):
        merge([bf16, int8], tmp_path / "x")
    with pytest.raises(CacheMismatchError, match="differ in target"):
        merge([bf16, other], tmp_path / "x")
    with pytest.raises(CacheMismatchError, match="no sample"):
        subset(bf16, tmp_path / "x", lambda id, source: False)
    with pytest.raises(CacheMismatchError, match="already holds shards"):
        merge([bf16], int8)
