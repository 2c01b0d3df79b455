"""Building: killed at any point and continued, any number of ranks, one damaged shard alone, plans that changed."""

import multiprocessing
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspec.data import cache_build
from deepspec.data.cache import MANIFEST, CacheDamagedError, CacheMismatchError, DiskSpaceError, shard_name
from deepspec.data.cache_build import build_cache
from deepspec.data.cache_reader import CacheReader
from deepspec.data.cache_writer import read_facts, write_shard
from deepspec.data.inspection import damages
from deepspec.data.responses import ResponsesError, next_part, part_name, write_part
from tests.data.killed_build import build
from tests.data.little_chat import answered, built, chat_target, pipeline


def content(folder: Path) -> dict[str, bytes]:
    reader = CacheReader(folder / "cache")
    return {reader.id(row): reader.record(row) for row in range(len(reader))}


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "cache").glob("shard-*.parquet"))}


def test_a_build_killed_at_random_points_ends_with_every_sample_once(tmp_path):
    context = multiprocessing.get_context("fork")  # a fresh interpreter would import for many seconds, nine times
    responses = answered(18)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        pipeline(folder, responses)

    def run(*arguments) -> int | None:
        process = context.Process(target=build, args=arguments)
        process.start()
        process.join(60)
        return process.exitcode

    assert run(str(whole), None, str(tmp_path / "calls")) == 0
    calls = int((tmp_path / "calls").read_text())
    draw = random.Random(7)
    survivors = []
    for kill in range(6):
        # the last one may be past the end of what is left to do
        assert run(str(killed), draw.randrange(50, calls // 2)) in (-9, 0), f"kill {kill}"
        survivors.append(len(list((killed / "cache").glob("shard-*.parquet"))))
    assert survivors == sorted(survivors)  # no finished shard is lost
    assert survivors[0] < 5
    assert run(str(killed), None) == 0
    assert content(killed) == content(whole)
    assert sorted(content(killed)) == [row.id for row in responses]
    assert shards(killed) == shards(whole)
    assert not list((killed / "cache").glob("*.tmp")) + list((killed / "cache").glob(".*.tmp"))


def test_ranks_build_their_own_shards_and_the_last_one_finishes(tmp_path, monkeypatch):
    one = built(tmp_path / "one", count=18)
    three = pipeline(tmp_path / "three", answered(18))
    target = chat_target()
    for rank in (2, 0, 1):
        monkeypatch.setattr(cache_build, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(cache_build, "world_size", lambda: 3)
        manifest = build_cache(three, target)
        assert (manifest is not None) == (rank == 1)
    assert shards(Path(one.out)) == shards(Path(three.out))
    assert [shard.rows for shard in manifest.shards] == [4, 4, 4, 4, 2]


def test_a_damaged_shard_is_rebuilt_alone(tmp_path, capsys):
    cfg = built(tmp_path)
    before = shards(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.parquet")}
    (tmp_path / "cache" / shard_name(2)).unlink()
    target, forwards = counting_target()
    build_cache(cfg, target)
    assert shards(tmp_path) == before
    assert 0 < forwards() <= 5  # its four rows at most one by one, and the probe
    changed = {path.name for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert changed == {shard_name(2), "index.parquet"}
    capsys.readouterr()


def counting_target():
    target = chat_target()
    seen = []
    target.model.register_forward_hook(lambda *_: seen.append("model"))
    target.decoder.register_forward_hook(lambda *_: seen.append("decoder"))
    return target, lambda: seen.count("decoder")


def test_a_finished_cache_is_left_alone(tmp_path, capsys):
    cfg = built(tmp_path)
    before = (tmp_path / "cache" / MANIFEST).read_bytes()
    assert build_cache(cfg, None) is not None  # not even the target is loaded
    assert "Nothing to do" in capsys.readouterr().out
    assert (tmp_path / "cache" / MANIFEST).read_bytes() == before


def test_a_longer_plan_keeps_whole_shards_and_a_full_last_one(tmp_path):
    cfg = built(tmp_path, count=16)
    old = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("shard-*.parquet")}
    write_part(cfg.responses_dir / "part-000-000002.parquet", answered(5, seed=9, prefix="s"))
    assert build_cache(cfg, chat_target()).rows == 21
    new = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("shard-*.parquet")}
    assert len(new) == 6
    assert {name: new[name] for name in old} == old
    write_part(cfg.responses_dir / "part-000-000003.parquet", answered(2, seed=10, prefix="t"))
    manifest = build_cache(cfg, chat_target())  # the last shard, of one row, grows
    assert [shard.rows for shard in manifest.shards] == [4, 4, 4, 4, 4, 3]


def test_parts_that_two_ranks_add_later_leave_all_shards_but_the_last_as_they_were(tmp_path):
    cfg = pipeline(tmp_path)

    def add(count: int, prefix: str, rank: int, number: int) -> None:
        write_part(cfg.responses_dir / part_name(rank, number), answered(count, prefix=prefix))

    add(6, "a", 0, 0)
    add(7, "b", 1, 0)
    add(5, "c", 1, 1)  # rank 1 wrote more parts than rank 0
    build_cache(cfg, chat_target())
    before = shards(tmp_path)
    added = next_part(cfg.responses_dir)
    add(3, "d", 0, added)
    add(3, "e", 1, added)
    assert build_cache(cfg, chat_target()).rows == 24
    after = shards(tmp_path)
    assert [name for name in before if before[name] != after[name]] == [shard_name(4)]  # it had 2 of 4 rows


def test_a_shorter_plan_is_refused_and_removes_the_rest_only_when_told_to(tmp_path):
    cfg = built(tmp_path, count=16)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    cfg.cache.limit = 8
    with pytest.raises(
        CacheMismatchError, match=r"2 of its 4 shards \(cache\.limit None there, 8 here\).*cache\.replace"
    ):
        build_cache(cfg, chat_target())
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == whole
    cfg.cache.replace = True
    target, forwards = counting_target()
    assert build_cache(cfg, target).rows == 8
    assert len(list((tmp_path / "cache").glob("shard-*.parquet"))) == 2
    assert forwards() == 0


CHANGES = {
    "codec": "cache.codec bf16 there, int8 here",
    "taps": r"target\.taps \[0, 1, 2\] there, \[0, 2\] here",
    "target": "target weights .* there, weights .* here",
    "max_length": "cache.max_length 4096 there, 90 here",
    "shard_rows": "cache.shard_rows 4 there, 8 here",
    "response": "responses were changed",
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_inputs_are_refused_by_name_and_rebuild_the_shards_when_told_to(tmp_path, change):
    cfg = built(tmp_path, count=8)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    before = shards(tmp_path)
    target = chat_target(seed=1 if change == "target" else 0, taps=[0, 2] if change == "taps" else None)
    if change == "codec":
        cfg.cache.codec = "int8"
    elif change == "taps":
        cfg.target.taps = [0, 2]
    elif change == "target":
        cfg.target.path = "another"
    elif change == "response":
        write_part(cfg.responses_dir / "part-000-000001.parquet", answered(8, seed=5)[4:])
    else:
        setattr(cfg.cache, change, {"max_length": 90, "shard_rows": 8}[change])
    with pytest.raises(CacheMismatchError, match=CHANGES[change]):
        build_cache(cfg, target)
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == whole
    cfg.cache.replace = True
    build_cache(cfg, target)
    after = shards(tmp_path)
    assert after.get(shard_name(1)) != before[shard_name(1)]
    assert (after[shard_name(0)] == before[shard_name(0)]) == (change == "response")


def test_a_folder_with_another_manifest_is_not_built_into(tmp_path):
    cfg = pipeline(tmp_path, answered(4))
    cfg.cache.folder = "responses"
    (cfg.responses_dir / MANIFEST).write_text('{"stamp": {"target": "tiny-chat"}}')
    with pytest.raises(CacheDamagedError, match=r"responses/manifest\.json is not the manifest of a target cache"):
        build_cache(cfg, chat_target())


def test_the_manifest_is_gone_before_the_first_replaced_shard(tmp_path, monkeypatch):
    cfg = built(tmp_path, count=8)
    cfg.cache.codec, cfg.cache.replace = "int8", True

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_build, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        build_cache(cfg, chat_target())
    assert not (tmp_path / "cache" / MANIFEST).exists()


def test_a_moved_target_keeps_its_shards(tmp_path):
    cfg = built(tmp_path, count=8)
    before = shards(tmp_path)
    cfg.target.path, cfg.target.revision = "elsewhere", "main"
    target, forwards = counting_target()
    target.name, target.path = "moved", "elsewhere"
    assert build_cache(cfg, target).target["path"] == "elsewhere"
    assert forwards() == 0
    assert shards(tmp_path) == before


def test_dropped_responses_are_counted_in_the_manifest(tmp_path):
    rows = answered(8)
    rows[5] = replace(rows[5], finish_reason="length")
    cfg = pipeline(tmp_path, rows, keep_truncated=False)
    assert build_cache(cfg, chat_target()).rows == 7
    assert CacheReader(tmp_path / "cache").manifest.settings["dropped"] == {"truncated": 1}


def test_held_out_answers_are_counted_and_not_in_the_cache(tmp_path, capsys):
    cfg = pipeline(tmp_path, answered(8))
    cfg.prompts_dir.mkdir()
    (cfg.prompts_dir / "heldout.jsonl").write_text('{"id": "r003"}\n')
    manifest = build_cache(cfg, chat_target())
    assert manifest.settings["dropped"] == {"held out": 1}
    assert "1 answers to held-out prompts are left out" in capsys.readouterr().out
    assert CacheReader(tmp_path / "cache").ids() == [f"r{n:03d}" for n in range(8) if n != 3]


def test_too_little_disk_is_an_error_before_the_first_forward(tmp_path, monkeypatch):
    cfg = pipeline(tmp_path, answered(8))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    target, forwards = counting_target()
    with pytest.raises(DiskSpaceError, match=r"cache=bf16.*1\.0 kB free.*cache=int8"):
        build_cache(cfg, target)
    assert forwards() == 0
    cfg.cache.ignore_disk_space = True
    assert build_cache(cfg, target) is not None


def test_the_space_asked_for_is_that_of_all_unfinished_shards_whatever_the_rank(tmp_path, monkeypatch):
    cfg, target = pipeline(tmp_path, answered(18)), chat_target()  # shards of 4, 4, 4, 4, 2
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(cache_build, "world_size", lambda: 4)
    said = []
    for rank in range(4):
        monkeypatch.setattr(cache_build, "rank", lambda rank=rank: rank)
        with pytest.raises(DiskSpaceError) as error:
            build_cache(cfg, target)
        said.append(str(error.value))
    monkeypatch.setattr(cache_build, "world_size", lambda: 1)
    monkeypatch.setattr(cache_build, "rank", lambda: 0)
    with pytest.raises(DiskSpaceError) as error:
        build_cache(cfg, target)
    assert said == 4 * [str(error.value)]


def test_leftovers_of_a_kill_are_gone_before_space_is_asked_for(tmp_path, monkeypatch):
    cfg = pipeline(tmp_path, answered(18))
    (tmp_path / "cache").mkdir()
    leftovers = [tmp_path / "cache" / f".{shard_name(number)}.abc.tmp" for number in range(5)]
    for path in leftovers:
        path.write_bytes(b"half")
    seen = []
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: seen.extend(p.exists() for p in leftovers) or usage)
    monkeypatch.setattr(cache_build, "world_size", lambda: 2)
    build_cache(cfg, chat_target())
    assert seen == [False, True, False, True, False]  # those of the other rank may be in use


def test_too_many_unusable_responses_are_an_error_however_often_it_is_run(tmp_path, monkeypatch):
    rows = [replace(row, messages=[{"role": "user", "content": "x" * 5000}, row.messages[1]]) for row in answered(6)]
    cfg, target = pipeline(tmp_path, answered(18, prefix="a") + rows), chat_target()
    monkeypatch.setattr(cache_build, "_check_space", lambda *_: 1)  # its sample need not hold them
    for _ in range(2):
        with pytest.raises(ResponsesError, match="6 of 24 responses"):
            build_cache(cfg, target)
        assert not (tmp_path / "cache" / MANIFEST).exists()


def with_long_prompts(rows):
    return [replace(row, messages=[{"role": "user", "content": "x" * 5000}, row.messages[1]]) for row in rows]


def test_a_missing_shard_full_of_unusable_responses_is_rebuilt_where_the_whole_cache_is_fine(tmp_path):
    rows = answered(44)
    rows[8:10] = with_long_prompts(rows[8:10])
    cfg = pipeline(tmp_path, rows)
    assert build_cache(cfg, chat_target()).rows == 42
    before = shards(tmp_path)
    (tmp_path / "cache" / shard_name(2)).unlink()
    assert build_cache(cfg, chat_target()).settings["dropped"] == {"nothing supervised": 2}
    assert shards(tmp_path) == before


def test_new_unusable_responses_are_an_error_before_the_first_forward_where_they_are_many_of_all(tmp_path):
    cfg = built(tmp_path, count=18)
    write_part(cfg.responses_dir / "part-000-000002.parquet", with_long_prompts(answered(6, prefix="s")))
    target, forwards = counting_target()
    with pytest.raises(ResponsesError, match="6 of 24 responses"):
        build_cache(cfg, target)
    assert forwards() == 0


def test_a_kill_between_a_rebuilt_shard_and_the_manifest_is_finished_by_the_next_run(tmp_path):
    cfg = built(tmp_path)
    reader = CacheReader(tmp_path / "cache")
    before = content(tmp_path)
    line = reader.manifest.shards[2]
    rows = reader.rows_of(2)
    with write_shard(tmp_path / "cache", 2, reader.manifest.origin, line.identity) as writer:
        for row in sorted(rows, key=reader.id, reverse=True):  # the same samples as other bytes
            writer.add(reader.source(row), reader.record(row))
    assert read_facts(tmp_path / "cache", 2).shard.checksum != line.checksum
    target, forwards = counting_target()
    assert build_cache(cfg, target).shards[2] == read_facts(tmp_path / "cache", 2).shard
    assert forwards() == 0
    assert content(tmp_path) == before
    assert not list(damages(CacheReader(tmp_path / "cache")))


def test_other_thinking_mode_and_missing_responses_are_errors(tmp_path):
    cfg = pipeline(tmp_path, answered(8))
    cfg.target.thinking = True
    with pytest.raises(ResponsesError, match=r"thinking=false.*target\.thinking=true"):
        build_cache(cfg, chat_target())
    with pytest.raises(ResponsesError, match=r"holds no responses.*regenerate"):
        build_cache(pipeline(tmp_path / "empty"), chat_target())


def test_int8_target_states_are_near_the_lossless_ones(tmp_path):
    exact, lossy = built(tmp_path / "a", count=6), built(tmp_path / "b", count=6, codec="int8")
    readers = [CacheReader(Path(cfg.out) / "cache") for cfg in (exact, lossy)]
    assert readers[1].manifest.bytes < readers[0].manifest.bytes
    for row in range(6):
        a, b = (reader.sample(row) for reader in readers)
        error_F = (a.taps_SF.float() - b.taps_SF.float()).square().mean(0).sqrt()
        assert torch.equal(a.tokens_S, b.tokens_S)
        assert 0 < (error_F / a.taps_SF.float().std(0)).max() < 0.05
