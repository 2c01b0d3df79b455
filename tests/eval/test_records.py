"""Records survive kills, and only records of the same settings are read back."""

import dataclasses
import json

import pytest

from deepspec.eval import records
from deepspec.eval.records import Record, Recorder


def record(prompt, turn=0):
    return Record("d", prompt, turn, "abc", 3, [1, 2], "stop", [(2, 1, 2)], [[0.5, 0.25]], 1.0, 0.1, 0.2, 0.3, 0.4)


def write(path, settings, *items):
    recorder = Recorder(path, settings)
    for item in items:
        recorder.add(item)
    recorder.close()


def test_round_trip_by_settings(tmp_path):
    path = tmp_path / "records-a.jsonl"
    write(path, "one", record("p"), record("p", 1))
    write(path, "two", record("q"))
    assert records.read([path], "one") == {("d", "p", 0): record("p"), ("d", "p", 1): record("p", 1)}
    assert list(records.read([path], "two")) == [("d", "q", 0)]
    assert records.read([path], "three") == {}


def test_records_of_before_sessions_are_read(tmp_path):
    path = tmp_path / "records-a.jsonl"
    write(path, "one", dataclasses.replace(record("p"), session="s1"), record("q"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[1]["session"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [item.session for item in records.read([path], "one").values()] == ["s1", None]


def test_a_killed_write_is_forgotten_and_written_over(tmp_path):
    path = tmp_path / "records-a.jsonl"
    write(path, "one", record("p"), record("q"))
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert list(records.read([path], "one")) == [("d", "p", 0)]
    write(path, "one", record("r"))
    assert list(records.read([path], "one")) == [("d", "p", 0), ("d", "r", 0)]
    assert len(path.read_text().splitlines()) == 2


def test_damage_elsewhere_is_named(tmp_path):
    path = tmp_path / "records-a.jsonl"
    write(path, "one", record("p"), record("q"), record("r"))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:30], lines[2]]) + "\n")
    with pytest.raises(records.RecordError, match="line 2 is damaged"):
        records.read([path], "one")


def test_several_ranks_are_merged(tmp_path):
    for rank in range(3):
        write(tmp_path / f"records-a-rank{rank}.jsonl", "one", record(f"p{rank}"))
    assert len(records.read(tmp_path.glob("records-a-rank*.jsonl"), "one")) == 3
