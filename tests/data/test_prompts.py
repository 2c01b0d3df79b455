"""Mixing, splits, copies and contamination of prompts; every row read is accounted for."""

import random
from collections import Counter

import pytest

from deepspec.data.decontaminate import Copies, Evaluation, frame_of, words
from deepspec.data.demo_prompts import generate
from deepspec.data.prompts import PromptsConfig, build, describe, prompt_id, read_prompts
from deepspec.data.sources import SourceConfig, SourceError
from tests.data.prompt_files import made, questions, save, write


def test_every_dropped_row_has_a_reason(tmp_path):
    def conversation(*roles):
        return {"messages": [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]}

    rows = [
        conversation("user", "assistant", "user", "assistant"),
        conversation("assistant", "user"),
        conversation("user", "user"),
        conversation("assistant"),
        conversation("user", "narrator"),
        conversation("user", "system"),
        conversation("user", "assistant", "tool"),
        {"messages": []},
        {"messages": None},
        {"messages": [{"role": "user", "content": " "}]},
        {"messages": [{"role": "user", "content": "x" * 101}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": ["text"]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    ]
    source = SourceConfig(path=write(tmp_path / "x.jsonl", rows))
    train, _, summary = made(tmp_path / "out", sources={"s": source}, heldout=0, shuffle=False, max_chars=100)
    assert [[m["role"] for m in row["messages"]] for row in train] == [["user", "assistant", "user"], ["user"]]
    assert summary["dropped"]["s"] == {
        "two questions in a row": 1,
        "no question": 1,
        "unknown role 'narrator'": 1,
        "system message not first, or several": 1,
        "tool result without a call": 1,
        "empty": 2,
        "empty question": 1,
        "longer than 100 characters": 1,
        "content is not text": 1,
        "a message is not an object": 1,
        "content is not only text": 1,
    }
    assert "image" in summary["examples"]["content is not only text"][0]
    assert "s: 14 read = 2 kept + 2 empty + 1 two questions in a row + 1 no question" in describe(summary, tmp_path)


def test_the_equation_is_printed_with_every_reason(tmp_path):
    rows = [{"prompt": text} for text in ("a", "a", "b", "", "c")]
    source = SourceConfig(path=save(tmp_path / "x.jsonl", rows))
    _, _, summary = made(tmp_path / "out", sources={"s": source}, heldout=1, shuffle=False)
    assert describe(summary, tmp_path / "out").splitlines() == [
        "s: 5 read = 3 kept + 1 exact copy + 1 empty",
        f"  examples of every reason are in {tmp_path / 'out' / 'summary.json'}",
        f"{tmp_path / 'out'}: 2 training and 1 held-out prompts",
    ]


def test_first_turn_only(tmp_path):
    roles = {"system": "S", "user": "hi", "assistant": "x"}
    long = [{"role": role, "content": text} for role, text in roles.items()] + [{"role": "user", "content": "more"}]
    rows = [{"turns": ["a", "b"]}, {"messages": long}]
    write(tmp_path / "1.jsonl", rows[:1])
    write(tmp_path / "2.jsonl", rows[1:])
    sources = {name: SourceConfig(path=str(tmp_path / f"{name}.jsonl")) for name in "12"}
    train, _, _ = made(tmp_path / "out", sources=sources, heldout=0, turns="first", shuffle=False)
    assert [row["messages"] for row in train] == [[{"role": "user", "content": "a"}], rows[1]["messages"][:2]]


def test_copies_are_dropped_exact_and_near(tmp_path):
    text = " ".join(f"word{n}" for n in range(60))
    near = text.replace("word30", "other")
    far = " ".join(f"term{n}" for n in range(60))
    rows = [{"prompt": p} for p in (text, text.upper() + " ", near, far, near, text + "\n")]
    source = {"s": SourceConfig(path=write(tmp_path / "x.jsonl", rows))}
    train, _, summary = made(tmp_path / "exact", sources=source, heldout=0, shuffle=False)
    assert questions(train) == [text, near, far]
    assert summary["dropped"]["s"] == {"exact copy": 3}
    train, _, summary = made(tmp_path / "near", sources=source, heldout=0, shuffle=False, near_duplicates=0.7)
    assert questions(train) == [text, far]
    assert summary["dropped"]["s"] == {"exact copy": 3, "near copy": 1}


def test_near_copies_agree_with_the_true_similarity():
    draw = random.Random(0)
    base = [f"w{n}" for n in range(300)]
    for changed in (2, 5, 40, 80):
        other = list(base)
        for position in draw.sample(range(300), changed):
            other[position] = f"new{position}"
        grams = [{tuple(x[i : i + 5]) for i in range(296)} for x in (base, other)]
        similarity = len(grams[0] & grams[1]) / len(grams[0] | grams[1])
        copies = Copies(0.7)
        assert copies.seen(" ".join(base)) is None
        assert abs(similarity - 0.7) > 0.1  # far enough from the threshold for 64 minima
        assert (copies.seen(" ".join(other)) == "near copy") == (similarity > 0.7)


def test_evaluation_prompts_are_kept_out(tmp_path):
    long = "Tom has three red apples and buys four more green ones at the market on Sunday morning."
    write(tmp_path / "suites" / "maths.jsonl", [{"turns": [long, "And then?"]}, {"turns": ["What is 7 times 8?"]}])
    rows = [
        {"prompt": "Read this. TOM HAS three red apples, and buys four more green ones at the market. How many?"},
        {"prompt": "what is 7 times 8"},
        {"prompt": "What is 7 times 8? Explain in detail."},
        {"prompt": "Tom has three red apples and eats them."},
    ]
    source = {"s": SourceConfig(path=write(tmp_path / "x.jsonl", rows))}
    train, _, summary = made(
        tmp_path / "out", sources=source, heldout=0, shuffle=False, decontaminate=[str(tmp_path / "suites")]
    )
    assert questions(train) == [row["prompt"] for row in rows[2:]]
    assert summary["dropped"]["s"] == {"contaminated": 2}
    assert summary["examples"]["contaminated"][0] == f"maths.jsonl: {long}"
    with pytest.raises(SourceError, match=r"no \.jsonl"):
        made(tmp_path / "none", sources=source, decontaminate=[str(tmp_path / "nowhere")])


def test_what_a_benchmark_asks_around_its_questions_neither_hides_nor_matches(tmp_path):
    ask = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    asked = [f"Simplify the square root of {n}." for n in range(240, 250)] + ["How many marbles does Ann have?"]
    write(tmp_path / "maths.jsonl", [{"turns": [question + ask]} for question in asked])
    write(tmp_path / "few.jsonl", [{"turns": [f"Name {n} things {ask}"]} for n in range(7)])  # may be chance
    suite = Evaluation([str(tmp_path / "maths.jsonl")], 13)
    assert suite.match("Simplify the square root of 242") is not None, "not hidden by the words around it"
    assert suite.match("simplify the square root of 242" + ask) is not None
    assert suite.match("Simplify the square root of 2420." + ask) is None
    assert suite.match("How many socks does Ann have?" + ask) is None, "nothing in common but what is asked of all"
    assert suite.match("Please reason step by step, and put your final answer within \\boxed{}.") is None
    assert Evaluation([str(tmp_path / "few.jsonl")], 13).match("What is 7? It is odd." + ask) is None
    assert frame_of([["a", "b", "c"]] * 8) == (("a", "b", "c"), ())
    assert frame_of([["a", "b"], *[["a", "x", "b"]] * 7]) == (("a",), ("b",))
    assert frame_of([["a"]] * 7) == ((), ())


def test_every_question_of_a_conversation_is_looked_up(tmp_path):
    write(tmp_path / "suite.jsonl", [{"turns": ["What is 7 times 8?"]}])
    rows = [
        {"messages": [{"role": "user", "content": text} for text in ("Hello!", second)]}
        for second in ("what is 7 times 8", "what is 7 times 9")
    ]
    for row in rows:
        row["messages"].insert(1, {"role": "assistant", "content": "Hi."})
    source = {"s": SourceConfig(path=write(tmp_path / "x.jsonl", rows))}
    _, _, summary = made(tmp_path / "out", sources=source, heldout=0, decontaminate=[str(tmp_path / "suite.jsonl")])
    assert summary["dropped"]["s"] == {"contaminated": 1}


def test_contamination_agrees_with_a_naive_search():
    draw = random.Random(1)
    vocabulary = [f"v{n}" for n in range(4)]
    evaluation = Evaluation([], 5)
    suite = [" ".join(draw.choices(vocabulary, k=draw.randint(2, 30))) for _ in range(8)]
    for text in suite:
        evaluation.add(text, "suite")
    hits = 0
    for _ in range(300):
        found = draw.choices(vocabulary, k=draw.randint(2, 12))
        runs = {tuple(found[i : i + 5]) for i in range(len(found) - 4)}
        naive = any(
            tuple(words(text)) == tuple(found) if len(found) < 5
            else any(tuple(words(text)[i : i + 5]) in runs for i in range(len(words(text)) - 4))
            for text in suite
        )  # fmt: skip
        assert (evaluation.match(" ".join(found)) is not None) == naive
        hits += naive
    assert 30 < hits < 270


def numbered(tmp_path, name, count):
    return write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}"} for n in range(count)])


def test_sources_are_mixed_by_weight_and_one_that_runs_out_is_made_up_for(tmp_path):
    sources = {
        "a": SourceConfig(path=numbered(tmp_path, "a", 200), weight=3.0),
        "b": SourceConfig(path=numbered(tmp_path, "b", 200)),
        "c": SourceConfig(path=numbered(tmp_path, "c", 5)),
    }
    train, heldout, summary = made(tmp_path / "out", sources=sources, limit=80, heldout=20)
    counts = Counter(row["source"] for row in train + heldout)
    assert (len(train), len(heldout), counts["c"]) == (80, 20, 5)
    assert abs(counts["a"] - 3 * counts["b"]) <= 4
    assert "c" not in summary["dropped"]
    assert len({row["source"] for row in train[:30]}) > 1  # mixed, not one source after the other


def test_a_source_is_read_up_to_its_limit(tmp_path):
    source = SourceConfig(path=numbered(tmp_path, "a", 50), limit=10)
    train, _, summary = made(tmp_path / "out", sources={"a": source}, heldout=0, shuffle=False)
    assert questions(train) == [f"a {n}" for n in range(10)]
    assert summary["read"] == {"a": 10}


def test_streamed_sources_are_read_no_further_than_needed(tmp_path, monkeypatch):
    from deepspec.data import sources as module

    pulled = Counter()

    def hub(config, seed):
        for n in range(100_000):
            pulled[config.path] += 1
            yield {"prompt": f"{config.path} {n}"}

    monkeypatch.setattr(module, "_hub", hub)
    sources = {"a": SourceConfig(path="some/set", weight=3.0), "b": SourceConfig(path="other/set")}
    train, heldout, _ = made(tmp_path / "out", sources=sources, limit=90, heldout=10)
    assert Counter(row["source"] for row in train + heldout) == {"a": 75, "b": 25}
    assert pulled["some/set"] <= 76
    assert pulled["other/set"] <= 26


def test_the_split_depends_on_the_seed_only_and_shares_nothing(tmp_path):
    source = {"a": SourceConfig(path=numbered(tmp_path, "a", 60))}
    one = made(tmp_path / "1", sources=source, heldout=12)
    two = made(tmp_path / "2", sources=source, heldout=12)
    other = made(tmp_path / "3", sources=source, heldout=12, seed=1)
    assert one[:2] == two[:2]
    assert questions(one[1]) != questions(other[1])
    assert not set(questions(one[0])) & set(questions(one[1]))
    assert len(one[1]) == 12


def test_ids_are_stable_and_given_ones_are_kept(tmp_path):
    messages = [{"role": "user", "content": "é 2+2"}]
    assert prompt_id(messages) == prompt_id([dict(reversed(messages[0].items()))])
    assert prompt_id(messages) == "4dfdf7f70c88ea0bc86a"  # in every version
    assert prompt_id(messages) != prompt_id(messages, [{"name": "f"}])
    rows = [{"id": "one", "prompt": "a"}, {"id": "one", "prompt": "b"}, {"id": "two", "prompt": "c"}]
    path = write(tmp_path / "x.jsonl", rows)
    train, _, _ = made(tmp_path / "hash", sources={"s": SourceConfig(path=path)}, heldout=0)
    assert {row["id"] for row in train} == {prompt_id([{"role": "user", "content": x}]) for x in "abc"}
    given = {"s": SourceConfig(path=path, columns={"id": "id"})}
    train, _, summary = made(tmp_path / "given", sources=given, heldout=0)
    assert sorted(row["id"] for row in train) == ["one", "two"]
    assert summary["dropped"]["s"] == {"duplicate id": 1}


def test_a_folder_of_the_same_options_is_left_alone_and_of_others_made_anew(tmp_path):
    source = {"a": SourceConfig(path=numbered(tmp_path, "a", 30))}
    made(tmp_path / "out", sources=source, heldout=5)
    stamp = (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns
    assert "reused" in build(PromptsConfig(sources=source, heldout=5), tmp_path / "out")
    assert (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns == stamp
    assert "reused" not in build(PromptsConfig(sources=source, heldout=6), tmp_path / "out")
    (tmp_path / "out" / "heldout.jsonl").write_text("damaged")
    assert "reused" not in build(PromptsConfig(sources=source, heldout=6), tmp_path / "out")
    assert len(read_prompts(tmp_path / "out" / "heldout.jsonl")) == 6


def test_demo_prompts_are_distinct_mixed_and_split_by_content():
    rows = list(generate())
    texts = [row["prompt"] for row in rows]
    assert len(set(texts)) == len(texts) > 1200
    heldout = [row for row in rows if row["split"] == "heldout"]
    assert Counter(row["source"] for row in heldout) == {"math": 40, "code": 40, "chat": 40}
    assert {row["source"] for row in heldout[:3]} == {"math", "code", "chat"}
    assert rows == list(generate())
    assert rows != list(generate(seed=1))
    assert not any("{" in text or "  " in text for text in texts)

    def numbers(row):
        return tuple(word.strip(".,?") for word in row["prompt"].split() if word.strip(".,?").isdigit())

    def stories(split):
        return {numbers(row) for row in rows if row["split"] == split and row["source"] == "math"}

    # Numbers alone do not tell the template, so a chance meeting of two templates is allowed for.
    assert len(stories("heldout") & stories("train")) <= 6
