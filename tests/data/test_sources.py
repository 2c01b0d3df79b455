"""Rows of every shape from every kind of file, and sources that cannot be read."""

import json

import pytest

from deepspec.data.prompts import PromptsConfig, build, read_prompts
from deepspec.data.sources import SourceConfig, SourceError, conversation, infer
from tests.data.prompt_files import made, questions, save, write

USER = {"role": "user", "content": "hi"}


def first_message(row, columns=None):
    return conversation(row, infer(row, columns or {}, "test"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER]}, [USER]),
        ({"conversations": [{"from": "human", "value": "hi"}]}, [USER]),
        ({"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "hi"},
                            {"from": "gpt", "value": "yo"}]},
         [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "yo"}]),
        ({"prompt": "hi"}, [USER]),
        ({"prompt": [USER]}, [USER]),
        ({"prompt": "hi", "system": "S"}, [{"role": "system", "content": "S"}, USER]),
        ({"instruction": "hi", "input": "there", "output": "x"}, [{"role": "user", "content": "hi\n\nthere"}]),
        ({"instruction": "hi", "input": "", "output": "x"}, [USER]),
        ({"turns": ["hi", "again"]},
         [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "again"}]),
        ({"turns": [{"content": "hi"}]}, [USER]),
        ({"turns": [USER, {"role": "assistant", "content": "yo"}]}, [USER, {"role": "assistant", "content": "yo"}]),
        ({"question": "hi", "answer": "x"}, [USER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
         [USER]),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}]},
         [{"role": "assistant", "content": "",
           "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "1"}]}]),
    ],
)  # fmt: skip
def test_shapes_are_recognised(row, expected):
    assert first_message(row) == expected


def test_a_column_can_be_named_and_unknown_shapes_say_what_there_is(tmp_path):
    assert first_message({"text_of_it": "hi"}, {"prompt": "text_of_it"}) == [USER]
    with pytest.raises(SourceError, match=r"\['other'\].*columns.prompt=<column>"):
        infer({"other": "x"}, {}, "test")
    with pytest.raises(SourceError, match=r"'nope' .for prompt. is not among"):
        infer({"other": "x"}, {"prompt": "nope"}, "test")
    with pytest.raises(ValueError, match=r"unknown .'promt'."):
        SourceConfig(path="x", columns={"promt": "y"})


def test_files_of_every_kind_give_the_same_prompts(tmp_path, capsys):
    rows = [{"prompt": f"question {n}"} for n in range(20)]
    for kind, name in zip("abcd", ("x.jsonl", "x.jsonl.zst", "x.parquet", "x.json"), strict=True):
        (tmp_path / kind).mkdir()
        save(tmp_path / kind / name, rows)
    found = []
    for kind in "abcd":
        source = SourceConfig(path=str(tmp_path / kind))
        train, _, _ = made(tmp_path / f"out-{kind}", sources={"mine": source}, heldout=0)
        found.append(train)
    assert found[0] == found[1] == found[2] == found[3]
    assert sorted(questions(found[0])) == sorted(row["prompt"] for row in rows)
    assert found[0][0]["source"] == "mine"
    assert "mine: prompt ← prompt" in capsys.readouterr().out


def of_shape(shape, text):
    """A row of a shape that asks ``text``, and carries an answer where the shape has a place for one."""
    return {
        "messages": {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]},
        "role/content": {"conversations": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]},
        "from/value": {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "a"}]},
        "prompt": {"prompt": text},
        "instruction": {"instruction": text, "input": "", "output": "a"},
        "turns": {"turns": [text]},
    }[shape]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("shape", ["messages", "role/content", "from/value", "prompt", "instruction", "turns"])
def test_what_is_read_is_kept_or_counted_for_every_shape_and_kind_of_file(tmp_path, shape, suffix):
    texts = ["one", "two", "two", "TWO ", "", " ", "x" * 101, "three", "what is 7 times 8", "four", "five"]
    source = SourceConfig(path=save(tmp_path / f"rows{suffix}", [of_shape(shape, text) for text in texts]))
    suite = write(tmp_path / "suite.jsonl", [{"turns": ["What is 7 times 8?"]}])
    train, _, summary = made(
        tmp_path / "out", sources={"s": source}, heldout=0, shuffle=False, max_chars=100, limit=4, decontaminate=[suite]
    )
    assert questions(train) == ["one", "two", "three", "four"]
    empty = summary["dropped"]["s"].pop("empty", 0)  # an empty column; in a conversation it is an empty question
    assert empty == (1 if shape in ("prompt", "instruction") else 0)
    assert summary["dropped"]["s"] == {
        "exact copy": 2,
        "empty question": 2 - empty,
        "longer than 100 characters": 1,
        "contaminated": 1,
        "over prompts.limit": 1,
    }


def test_an_instruction_and_its_input_are_one_question(tmp_path):
    rows = [{"instruction": "Add", "input": pair, "output": "x"} for pair in ("1 2", "3 4", "1 2")]
    source = SourceConfig(path=save(tmp_path / "x.parquet", rows))
    train, _, summary = made(tmp_path / "out", sources={"s": source}, heldout=0, shuffle=False)
    assert questions(train) == ["Add\n\n1 2", "Add\n\n3 4"]
    assert summary["dropped"]["s"] == {"exact copy": 1}


def test_tools_are_a_list_or_json_text_of_one(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"prompt": f"q{n}", "tools": value} for n, value in enumerate((json.dumps(tools), "[", '"f"', None, "[]"))]
    source = SourceConfig(path=save(tmp_path / "x.jsonl", rows))
    train, _, summary = made(tmp_path / "out", sources={"s": source}, heldout=0, shuffle=False)
    assert [row.get("tools") for row in train] == [tools, None, None]
    assert summary["dropped"]["s"] == {"tools are not JSON": 1, "tools are not a list": 1}


def test_bad_sources_are_named(tmp_path):
    with pytest.raises(SourceError, match="no prompt source"):
        build(PromptsConfig(), tmp_path)
    with pytest.raises(SourceError, match=r"no file matches '\./nothing\.jsonl'"):
        build(PromptsConfig(sources={"x": SourceConfig(path="./nothing.jsonl")}), tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(SourceError, match=r"bad\.jsonl line 2 is not JSON"):
        build(PromptsConfig(sources={"x": SourceConfig(path=str(tmp_path / "bad.jsonl"))}), tmp_path / "o")
    (tmp_path / "bad.json").write_text('[{"prompt": "a"}, "b"]')
    with pytest.raises(SourceError, match=r"bad\.json entry 2 is not an object"):
        build(PromptsConfig(sources={"x": SourceConfig(path=str(tmp_path / "bad.json"))}), tmp_path / "o")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SourceError, match="has no rows"):
        build(PromptsConfig(sources={"x": SourceConfig(path=str(tmp_path / "empty.jsonl"))}), tmp_path / "o")
    with pytest.raises(SourceError, match=r"run python -m deepspec\.data prompts"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match=r"prompts\.turns is 'last'"):
        PromptsConfig(turns="last")
