"""Exactly-once accounting: killed runs, answers out of order, failures, duplicates, ranks, a full disk."""

import errno
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace

import pytest

from deepspec.data import regenerate as module
from deepspec.data.regenerate import RegenerateConfig, rank_of, regenerate
from deepspec.data.responses import (
    ResponsesError,
    answered_ids,
    next_part,
    part_files,
    read_failures,
    read_responses,
)
from tests.data.scripted_engine import STAMP, ScriptedEngine

SMALL = RegenerateConfig(flush_completions=7)


def prompts(count, start=0):
    return [
        {"id": f"p{n:04d}", "messages": [{"role": "user", "content": "x" * (n % 17 + 1)}], "source": "made-up"}
        for n in range(start, start + count)
    ]


def run(rows, folder, engine, config=SMALL, stamp=STAMP, **ranks):
    return regenerate(rows, folder, stamp, lambda: engine, config, **ranks)


def unused():
    raise AssertionError("nothing is left to do, so no engine may be made")


def test_answers_out_of_order_are_stored_once_with_their_own_text(tmp_path):
    account = run(prompts(50), tmp_path, ScriptedEngine())
    rows = list(read_responses(tmp_path))
    assert Counter(row.id for row in rows) == Counter(p["id"] for p in prompts(50))
    assert all(row.messages[-1]["content"] == f"{row.id}/0 after 1 messages" for row in rows)
    assert all(row.tokens == [5, 6, 1] and row.source == "made-up" and not row.thinking for row in rows)
    assert (account.prompts, account.answered, account.failed, account.pending) == (50, 50, 0, 0)
    assert len(part_files(tmp_path)) == 8  # 7 · 7 + 1


def test_a_second_run_does_only_what_is_missing_and_loads_no_engine_for_nothing(tmp_path):
    run(prompts(20), tmp_path, ScriptedEngine())
    before = {file: file.stat().st_mtime_ns for file in part_files(tmp_path)}
    engine = ScriptedEngine()
    account = run(prompts(30), tmp_path, engine)
    assert sorted(engine.asked) == [(p["id"], 0) for p in prompts(10, 20)]
    assert (account.prompts, account.done, account.answered) == (30, 20, 10)
    assert before == {file: file.stat().st_mtime_ns for file in before}
    again = regenerate(prompts(30), tmp_path, STAMP, unused, SMALL)
    assert (again.done, again.answered, again.pending) == (30, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_points_every_prompt_is_answered_once(tmp_path, seed):
    rows, failing = prompts(120), {"p0013", "p0113"}
    config = RegenerateConfig(flush_completions=7, flush_seconds=0.05)
    draw = random.Random(seed)

    def child():
        run(rows, tmp_path, ScriptedEngine(failing, seconds=0.004, seed=time.time_ns()), config)

    kills = 0
    for _ in range(8):
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(draw.uniform(0.02, 0.2))
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
    run(rows, tmp_path, ScriptedEngine(failing), config)
    answered = [row.id for row in read_responses(tmp_path)]
    assert kills >= 2
    assert len(answered) == len(set(answered)) == 118
    assert set(read_failures(tmp_path)) == failing
    assert set(answered) | failing == {row["id"] for row in rows}
    assert not list(tmp_path.glob(".part-*.tmp"))


def test_failures_are_kept_with_their_reason_and_tried_again(tmp_path):
    bad = {f"p{n:04d}" for n in range(0, 100, 20)}
    account = run(prompts(100), tmp_path, ScriptedEngine(failing=bad))
    assert (account.answered, account.failed) == (95, 5)
    assert read_failures(tmp_path) == dict.fromkeys(bad, "refused")
    kept = run(prompts(100), tmp_path, ScriptedEngine(), replace(SMALL, retry_failures=False))
    assert (kept.done, kept.failed, kept.answered) == (95, 5, 0)
    assert set(read_failures(tmp_path)) == bad
    account = run(prompts(100), tmp_path, ScriptedEngine(failing={"p0020"}))
    assert (account.done, account.answered, account.failed) == (95, 4, 1)
    assert read_failures(tmp_path) == {"p0020": "refused"}
    assert len(answered_ids(tmp_path)) == 99


def test_a_failure_line_torn_by_a_kill_is_tried_again(tmp_path):
    run(prompts(3), tmp_path, ScriptedEngine(failing={"p0000", "p0001"}))
    file = tmp_path / "failures.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert len(read_failures(tmp_path)) == 1
    account = run(prompts(3), tmp_path, ScriptedEngine(failing={"p0000"}))
    assert (account.done, account.answered, account.failed) == (1, 1, 1)
    assert read_failures(tmp_path) == {"p0000": "refused"}


def test_every_prompt_is_accounted_for(tmp_path):
    rows = prompts(30) + prompts(5)
    account = run(rows, tmp_path, ScriptedEngine(failing={"p0003"}), replace(SMALL, limit=20))
    assert account.skipped == {"over regenerate.limit": 10, "duplicate id": 5}
    settled = account.done + account.answered + account.failed + sum(account.skipped.values())
    assert settled == account.prompts == 35
    assert "35 prompts = 19 answered + 1 failed" in str(account)


def test_ranks_share_the_prompts_and_another_world_size_continues(tmp_path):
    rows = prompts(60)
    shares = [run(rows, tmp_path, ScriptedEngine(), rank=rank, world=3).answered for rank in range(2)]
    assert min(shares) > 5
    assert answered_ids(tmp_path) == {p["id"] for p in rows if rank_of(p["id"], 3) < 2}
    rest = [run(rows, tmp_path, ScriptedEngine(), rank=rank, world=2).answered for rank in range(2)]
    assert sum(shares) + sum(rest) == 60
    assert len(list(read_responses(tmp_path))) == len(answered_ids(tmp_path)) == 60


def test_what_a_later_run_adds_lies_after_everything_that_was_there_on_any_ranks(tmp_path):
    rows = prompts(60)
    for rank in range(2):
        run(rows[:40], tmp_path, ScriptedEngine(), rank=rank, world=2)
    before = [row.id for row in read_responses(tmp_path)]
    for rank in (1, 0, 2):
        run(rows, tmp_path, ScriptedEngine(), rank=rank, world=3)
    assert [row.id for row in read_responses(tmp_path)][: len(before)] == before
    assert len(answered_ids(tmp_path)) == 60


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_keeps_what_is_done(tmp_path, raised):
    class Interrupted(ScriptedEngine):
        def run(self, work):
            for number, answer in enumerate(super().run(work)):
                if number == 10:
                    raise raised
                yield answer

    with pytest.raises(raised):
        run(prompts(30), tmp_path, Interrupted())
    assert len(answered_ids(tmp_path)) == 10
    assert json.loads((tmp_path / "summary.json").read_text())["account"]["pending"] == 20
    assert run(prompts(30), tmp_path, ScriptedEngine()).answered == 20


def test_sigterm_ends_like_an_interrupt(tmp_path):
    class Terminated(ScriptedEngine):
        def run(self, work):
            for answer in super().run(work):
                yield answer
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run(prompts(5), tmp_path, Terminated())
    assert len(answered_ids(tmp_path)) == 1


def test_a_full_disk_loses_only_what_was_not_written(tmp_path, monkeypatch):
    written = module.write_part
    calls = []

    def full(file, rows):
        calls.append(file)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(file, rows)

    monkeypatch.setattr(module, "write_part", full)
    with pytest.raises(OSError, match="No space"):
        run(prompts(50), tmp_path, ScriptedEngine())
    assert len(answered_ids(tmp_path)) == 14
    monkeypatch.undo()
    account = run(prompts(50), tmp_path, ScriptedEngine())
    assert (account.done, account.answered) == (14, 36)


def conversation():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    return {
        "id": "many",
        "source": "s",
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "recorded"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "result"},
            {"role": "assistant", "content": "recorded too"},
            {"role": "user", "content": "c"},
        ],
    }


def test_recorded_answers_give_way_turn_by_turn_and_tool_calls_stay(tmp_path):
    engine = ScriptedEngine()
    run([conversation()], tmp_path, engine)
    (row,) = read_responses(tmp_path)
    assert engine.asked == [("many", 0), ("many", 1), ("many", 2)]
    assert [message["role"] for message in row.messages] == [
        "system", "user", "assistant", "user", "assistant", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip
    texts = [message["content"] for message in row.messages if message["role"] == "assistant"]
    assert texts == ["many/0 after 2 messages", "", "many/1 after 6 messages", "many/2 after 8 messages"]
    assert row.messages[4]["tool_calls"]


def test_a_cut_answer_ends_its_conversation_and_is_marked(tmp_path):
    account = run([conversation()], tmp_path, ScriptedEngine(cut={"many"}))
    (row,) = read_responses(tmp_path)
    assert row.truncated
    assert len(row.messages) == 3
    assert account.truncated == 1


def test_other_options_are_refused_by_name(tmp_path):
    run(prompts(3), tmp_path, ScriptedEngine())
    with pytest.raises(ResponsesError, match=r"thinking: False there, True now.*delete the folder"):
        run(prompts(3), tmp_path, ScriptedEngine(), stamp=replace(STAMP, thinking=True))


def test_a_second_process_in_the_folder_is_refused(tmp_path):
    class Nested(ScriptedEngine):
        def run(self, work):
            with pytest.raises(ResponsesError, match="another regenerate"):
                regenerate(prompts(2), tmp_path, STAMP, unused, SMALL)
            yield from super().run(work)

    assert run(prompts(2), tmp_path, Nested()).answered == 2


def test_damaged_and_copied_parts_are_named(tmp_path):
    run(prompts(10), tmp_path, ScriptedEngine())
    first = part_files(tmp_path)[0]
    copy = tmp_path / "part-000-000009.parquet"
    copy.write_bytes(first.read_bytes())
    with pytest.raises(ResponsesError, match=r"part-000-000009.*delete"):
        answered_ids(tmp_path)
    copy.unlink()
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(ResponsesError, match=r"part-000-000000.parquet is damaged.*delete it"):
        run(prompts(10), tmp_path, ScriptedEngine())
    first.unlink()
    assert run(prompts(10), tmp_path, ScriptedEngine()).answered == 7
    assert next_part(tmp_path) == 3


def test_text_that_is_not_valid_utf8_survives(tmp_path):
    rows = [{"id": "p", "messages": [{"role": "user", "content": "lone \ud800 surrogate"}], "source": "s"}]
    run(rows, tmp_path, ScriptedEngine())
    (row,) = read_responses(tmp_path)
    assert row.messages[0]["content"] == "lone \ud800 surrogate"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "vllm"}, "give transformers or openai"),
        ({"engine": "openai"}, "regenerate.servers"),
        ({"batch_size": 0}, "regenerate.batch_size is 0"),
        ({"limit": 0}, "regenerate.limit is 0"),
    ],
)
def test_options_that_cannot_work_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RegenerateConfig(**options)
