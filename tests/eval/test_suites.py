"""Suites: every local benchmark parses, the paper's samples are drawn, bad input is a clear line."""

import json
import re
from pathlib import Path

import pytest

from deepspec.eval import suites

LOCAL = Path(__file__).resolve().parents[2].parent / "shared" / "eval_datasets"
PAPER = {
    "gsm8k": 500,
    "math500": 500,
    "aime25": 30,
    "humaneval": 164,
    "mbpp": 256,
    "livecodebench": 500,
    "mt-bench": 80,
    "alpaca": 500,
    "arena-hard-v2": 500,
}
MORE = {"aime24": 30, "lbpp": 162, "swe-bench": 300}  # not in the paper's tables


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", [*suites.SUITES["all"], *MORE])
def test_local_benchmark_parses(name):
    if not (LOCAL / f"{name}.jsonl").is_file():
        pytest.skip(f"{name}.jsonl is not in the shared folder of evaluation data sets")
    (loaded,) = suites.load([name], data_dir=LOCAL)
    assert len(loaded.prompts) == (PAPER | MORE)[name]
    assert loaded.published is True
    assert all(turn for prompt in loaded.prompts for turn in prompt.turns)
    if loaded.domain == "math":
        assert all(prompt.turns[0].endswith("within \\boxed{}.") for prompt in loaded.prompts)


def test_mt_bench_has_two_turns():
    if not (LOCAL / "mt-bench.jsonl").is_file():
        pytest.skip("mt-bench.jsonl is not in the shared folder of evaluation data sets")
    (loaded,) = suites.load(["mt-bench"], data_dir=LOCAL)
    assert {len(prompt.turns) for prompt in loaded.prompts} == {2}


def test_suites_cover_the_papers_protocol():
    assert {name: suites.DATA_SETS[name].samples for name in suites.SUITES["all"]} == PAPER
    assert [suites.DATA_SETS[name].domain for name in suites.SUITES["all"]] == ["math"] * 3 + ["code"] * 3 + [
        "chat"
    ] * 3
    assert set(MORE) <= set(suites.DATA_SETS)


def test_every_data_set_that_we_have_read_is_pinned():
    """A digest says whether the prompts are the published ones; alpaca's published file was never at hand."""
    unpinned = [name for name, row in suites.DATA_SETS.items() if row.digest is None]
    assert unpinned == ["alpaca"]
    digests = [row.digest for row in suites.DATA_SETS.values() if row.digest is not None]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert len(set(digests)) == len(digests)


def test_rows_become_turns():
    turns = {name: row.turns for name, row in suites.DATA_SETS.items()}
    boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert turns["gsm8k"]({"question": "1 + 1?"}) == ["1 + 1?" + boxed]
    assert turns["math500"]({"problem": "x"}) == ["x" + boxed]
    assert turns["humaneval"]({"prompt": "def f():\n"})[0].endswith("tests:\n```python\ndef f():\n\n```")
    assert turns["mt-bench"]({"prompt": ["a", "b"]}) == ["a", "b"]
    assert turns["alpaca"]({"instruction": "Do", "input": ""}) == ["Do"]
    assert turns["alpaca"]({"instruction": "Do", "input": "it"}) == ["Do\n\nInput:\nit"]
    assert "# YOUR CODE HERE" in turns["livecodebench"]({"question_content": "q", "starter_code": ""})[0]
    assert "class S:" in turns["livecodebench"]({"question_content": "q", "starter_code": "class S:"})[0]


def test_hub_rows_give_the_local_text():
    """The row formats, applied to fields cut out of the local snapshots, give those snapshots back."""
    path = LOCAL / "livecodebench.jsonl"
    if not path.is_file():
        pytest.skip("livecodebench.jsonl is not in the shared folder of evaluation data sets")
    for line in path.read_text(encoding="utf-8").splitlines():
        (text,) = json.loads(line)["turns"]
        head, _, code = text.rpartition("```python\n")
        code = code.removesuffix("\n```\n\n### Answer: (use the provided format with backticks)")
        question = head.split("### Question:\n", 1)[1].rpartition("\n\n### Format: ")[0]
        starter = "" if code == "# YOUR CODE HERE" else code
        row = {"question_content": question, "starter_code": starter}
        assert suites.DATA_SETS["livecodebench"].turns(row) == [text]


def test_selection_is_seeded_and_nested(tmp_path):
    path = write(tmp_path / "mine.jsonl", [{"turns": [f"question {i}"]} for i in range(50)])
    (ten,) = suites.load([str(path)], limit=10)
    (twenty,) = suites.load([str(path)], limit=20)
    (other,) = suites.load([str(path)], limit=10, seed=1)
    assert twenty.prompts[:10] == ten.prompts
    assert [p.id for p in other.prompts] != [p.id for p in ten.prompts]
    (everything,) = suites.load([str(path)])
    assert [p.turns[0] for p in everything.prompts] == [f"question {i}" for i in range(50)]


def test_a_data_set_is_loaded_once(tmp_path):
    for name in suites.SUITES["math"]:
        write(tmp_path / f"{name}.jsonl", [{"turns": ["q"]}])
    loaded = suites.load(["math", "gsm8k"], data_dir=tmp_path, any_rows=True)
    assert [item.name for item in loaded] == ["gsm8k", "math500", "aime25"]
    assert loaded[0].published is False


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    write(tmp_path / "aime24.jsonl", [{"turns": [f"q{i}"]} for i in range(30)])
    monkeypatch.setenv(suites.DATA_DIR_VARIABLE, str(tmp_path))
    (loaded,) = suites.load(["aime24"])
    assert loaded.source == str(tmp_path / "aime24.jsonl")
    assert loaded.published is False


def test_row_count_is_checked(tmp_path):
    write(tmp_path / "aime25.jsonl", [{"turns": ["q"]}])
    with pytest.raises(suites.SuiteError, match=r"holds 1 rows, the published data set 30.*--any-rows"):
        suites.load(["aime25"], data_dir=tmp_path)


def test_demo_is_grouped_by_source(tmp_path):
    rows = [
        {
            "id": "a",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
            "source": "math",
        },
        {"id": "b", "messages": [{"role": "user", "content": "r"}], "source": "chat"},
    ]
    loaded = suites.load(["demo"], demo_file=write(tmp_path / "heldout.jsonl", rows))
    assert [(item.name, item.domain, len(item.prompts)) for item in loaded] == [
        ("demo-math", "math", 1),
        ("demo-chat", "chat", 1),
    ]
    assert loaded[0].prompts[0].prefix == ({"role": "system", "content": "s"},)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not valid JSON"),
        ("[1]", "line 1: expected a JSON object"),
        ('{"turns": []}', "line 1: expected 'turns'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must be a list that ends in a user turn"),
        ("", "no prompts in it"),
    ],
)
def test_damaged_prompt_files_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(suites.SuiteError, match=message):
        suites.load([str(path)])


def test_repeated_ids_are_refused(tmp_path):
    path = write(tmp_path / "twice.jsonl", [{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}])
    with pytest.raises(suites.SuiteError, match="'x' occurs twice"):
        suites.load([str(path)])


def test_missing_things_say_what_to_do(tmp_path):
    with pytest.raises(suites.SuiteError, match=r"unknown suite or data set 'mathh'.*gsm8k"):
        suites.load(["mathh"])
    with pytest.raises(suites.SuiteError, match="no such file"):
        suites.load([str(tmp_path / "none.jsonl")])
    with pytest.raises(suites.SuiteError, match="make demo"):
        suites.load(["demo"], demo_file=tmp_path / "heldout.jsonl")
    with pytest.raises(suites.SuiteError, match="at least 1"):
        suites.load(["math"], limit=0)


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(suites.SuiteError, match=r"lbpp: .*lbpp.jsonl does not exist, and CohereLabs/lbpp .*--data-dir"):
        suites.load(["lbpp"], data_dir=tmp_path)


def test_two_sources_of_one_name_are_refused(tmp_path):
    rows = [{"turns": ["x"]}]
    names = []
    for folder, name in (("a", "mine"), ("b", "mine"), ("a", "aime25")):
        (tmp_path / folder).mkdir(exist_ok=True)
        names.append(str(write(tmp_path / folder / f"{name}.jsonl", rows)))
    assert len(suites.load([names[0], names[0], names[2]])) == 2, "the same file twice counts once"
    with pytest.raises(suites.SuiteError, match=rf"--suite {names[0]} {names[1]}: both are the data set 'mine'"):
        suites.load(names)
    more = {"data_dir": tmp_path / "a", "any_rows": True}
    with pytest.raises(suites.SuiteError, match=rf"--suite aime25 {names[2]}: both are the data set 'aime25'"):
        suites.load(["aime25", names[2]], **more)
    assert len(suites.load(["aime25", "aime25"], **more)) == 1


def test_data_sets_are_written_for_machines_without_the_hub(tmp_path, monkeypatch, capsys):
    rows = [[f"Question {n} — ü?"] for n in range(30)]
    prompts = [suites.Prompt(f"aime25/{n}", "aime25", "math", tuple(turns)) for n, turns in enumerate(rows)]
    monkeypatch.setattr(suites, "_from_hub", lambda row, local: prompts)
    assert suites.main([str(tmp_path), "aime25"]) == 0
    said = capsys.readouterr().out
    assert "30 prompts of MathArena/aime_2025; NOT the published prompts" in said
    assert f"prompts.decontaminate=[{tmp_path}]" in said
    (again,) = suites.load(["aime25"], data_dir=tmp_path)
    assert [list(prompt.turns) for prompt in again.prompts] == rows
    assert suites.main([str(tmp_path), "aime52"]) == 2
    assert "unknown suite or data set 'aime52'" in capsys.readouterr().err
