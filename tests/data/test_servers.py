"""The server engine against servers that fail, hang, answer garbage, die and come back."""

import random
from collections import deque
from dataclasses import replace

import pytest

from deepspec.data.engines import EngineError, Request
from deepspec.data.regenerate import RegenerateConfig, regenerate
from deepspec.data.responses import read_failures, read_responses
from deepspec.data.servers import ServersEngine
from tests.data.hostile_server import serving
from tests.data.scripted_engine import STAMP


def fine(number, body):
    return None


def engine(servers, stamp=STAMP, longest_pause=0.2, **options):
    config = RegenerateConfig(
        engine="openai",
        servers=[server.url for server in servers],
        **{"timeout": 5.0, "concurrency": 4, "attempts": 3, **options},
    )
    return ServersEngine(config, stamp, pause=0.01, longest_pause=longest_pause)


def requests(count):
    return [Request(f"p{n}", 0, [{"role": "user", "content": f"question {n}"}]) for n in range(count)]


def answers(engine, wanted):
    found = {}
    for answer in engine.run(deque(wanted)):
        assert answer.request.id not in found
        found[answer.request.id] = answer
    return found


def assert_echoes(found, count):
    assert len(found) == count
    for key, answer in found.items():
        assert answer.error is None, answer.error
        assert answer.message == {"role": "assistant", "content": f"echo: question {key[1:]}"}


def test_all_servers_work_within_their_bounds():
    with serving(fine, fine) as servers:
        found = answers(engine(servers), requests(60))
        assert_echoes(found, 60)
        assert all(1 < server.most_active <= 4 for server in servers)
        assert min(len(server.bodies) for server in servers) > 10


def test_random_failures_are_tried_again():
    draw = random.Random(3)

    def flaky(number, body):
        return draw.choice(["500", "garbage", "drop", "empty", "odd"]) if draw.random() < 0.2 else None

    with serving(flaky) as servers:
        found = answers(engine(servers, attempts=12), requests(40))
        assert_echoes(found, 40)
        assert len(servers[0].bodies) > 40


def test_a_refused_request_is_not_tried_again_and_says_why():
    def strict(number, body):
        return "400" if body["messages"][-1]["content"] == "question 3" else None

    with serving(strict) as servers:
        found = answers(engine(servers), requests(6))
        assert found.pop("p3").error.startswith('HTTP 400: {"error": "made-up 400"}')
        assert_echoes(found, 5)
        assert servers[0].seen["question 3"] == 1


def test_when_everything_is_refused_with_the_same_words_the_run_ends_with_what_to_do():
    with serving(lambda number, body: "400") as servers, pytest.raises(EngineError, match=r"made-up 400.*extra_body"):
        answers(engine(servers), requests(40))
    assert len(servers[0].bodies) < 16  # the scouts, and what was in flight


def test_prompts_that_are_too_long_come_first_and_do_not_end_the_run():
    def short_only(number, body):
        return "400" if int(body["messages"][-1]["content"].split()[1]) < 20 else None

    with serving(short_only) as servers:
        found = answers(engine(servers), requests(40))
    assert [found[f"p{n}"].error is not None for n in range(40)] == [True] * 20 + [False] * 20


def test_the_only_model_is_asked_and_of_several_the_recipe_must_choose():
    with serving(fine) as servers:
        servers[0].listed = [{"id": "base"}, {"id": "tuned", "parent": "base"}]
        answers(engine(servers), requests(1))
        assert servers[0].bodies[0]["model"] == "base"
        servers[0].listed = [{"id": "one"}, {"id": "two"}]
        with pytest.raises(EngineError, match=r"2 models \(one, two\).*regenerate\.model"):
            answers(engine(servers), requests(1))
        answers(engine(servers, model="two"), requests(1))
        assert servers[0].bodies[-1]["model"] == "two"


def test_a_request_that_always_fails_ends_after_its_tries():
    def poisoned(number, body):
        return "500" if body["messages"][-1]["content"] == "question 3" else None

    with serving(poisoned) as servers:
        found = answers(engine(servers), requests(6))
        assert "HTTP 500" in found["p3"].error
        assert "(3 tries)" in found.pop("p3").error
        assert servers[0].seen["question 3"] == 3
        assert_echoes(found, 5)


@pytest.mark.parametrize("trouble", ["hang", "garbage", "500"])
def test_a_bad_server_is_left_alone_and_the_other_does_the_work(trouble):
    with serving(lambda number, body: trouble, fine) as servers:
        bad, good = servers
        timeout = 1.0 if trouble == "hang" else 5.0
        # pauses that keep doubling: the bad one is asked a few times however slow this machine is
        found = answers(engine(servers, longest_pause=60.0, timeout=timeout, attempts=10), requests(40))
        assert_echoes(found, 40)
        assert len(good.seen) == 40  # one may have been asked twice, on a machine too busy to answer in time
        assert len(bad.bodies) < 25


def test_a_server_that_dies_is_dropped_and_comes_back():
    with serving(fine, fine) as servers:
        dying = servers[1]
        running = engine(servers, concurrency=2)
        found = {}
        for answer in running.run(deque(requests(120))):
            found[answer.request.id] = answer
            if len(found) == 20:
                dying.stop()
                before = len(dying.bodies)
            if len(found) == 50:
                dying.start()
        assert_echoes(found, 120)
        assert len(dying.bodies) > before + 5


def test_busy_servers_are_waited_for_without_using_up_tries():
    with serving(lambda number, body: "429" if number < 12 else None) as servers:
        assert_echoes(answers(engine(servers, attempts=1), requests(10)), 10)


def test_when_all_servers_stay_away_the_run_ends_with_what_to_do():
    with serving(fine) as servers:
        servers[0].stop()
        with pytest.raises(EngineError, match=r"no server has answered.*launch_servers\.sh"):
            answers(engine(servers, timeout=0.5), requests(3))


def test_parameters_go_out_under_their_own_names():
    stamp = replace(
        STAMP,
        thinking=True,
        sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05},
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    request = Request("p0", 0, [{"role": "assistant", "content": "", "tool_calls": [call]},
                                {"role": "user", "content": "q"}], tools)  # fmt: skip
    with serving(fine) as servers:
        options = {"chat_template_kwargs": {"style": "short"}, "extra_body": {"ignore_eos": True, "seed": None}}
        answers(engine(servers, stamp, **options), [request])
        (body,) = servers[0].bodies
    assert body["model"] == "served"
    assert (body["temperature"], body["top_k"], body["top_p"]) == (0.6, 20, 0.95)
    assert body["repetition_penalty"] == 1.05
    assert "presence_penalty" not in body
    assert "min_p" not in body
    assert body["max_tokens"] == 16
    assert body["chat_template_kwargs"] == {"enable_thinking": True, "style": "short"}
    assert body["tools"] == tools
    assert body["ignore_eos"] is True
    assert "seed" not in body
    assert body["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_each_setting_has_its_own_neutral_value_and_a_given_one_is_sent_all_the_same():
    odd = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1}
    with serving(fine) as servers:
        answers(engine(servers, replace(STAMP, sampling=odd)), requests(1))
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        answers(engine(servers, replace(STAMP, sampling=neutral), top_k=0, top_p=1.0), requests(1))
        sent = [{name: body[name] for name in (*odd, "min_p") if name in body} for body in servers[0].bodies]
    assert sent[0] == {"temperature": 1.0, "top_k": 1, "min_p": 1.0, "presence_penalty": 1.0}
    assert sent[1] == {"temperature": 1.0, "top_k": -1, "top_p": 1.0}


def one(choice):
    with serving(lambda number, body: choice) as servers:
        return answers(engine(servers, attempts=1), requests(1))["p0"]


def test_reasoning_tool_calls_and_token_ids_are_kept():
    message = {"content": "yes", "reasoning_content": "why"}
    answer = one({"message": message, "token_ids": [4, 5]})
    assert answer.message == {"role": "assistant", "content": "yes", "reasoning_content": "why"}
    assert answer.tokens == [4, 5]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = one({"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"})
    assert answer.message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert answer.finish_reason == "stop"


def test_a_cut_is_believed_wherever_it_comes_from():
    usage = {"completion_tokens": 16, "prompt_tokens": 5}
    assert one({"finish_reason": "length", "usage": usage}).finish_reason == "length"
    # shorter than max_tokens: cut by the context, by the server's own limit, or by extra_body
    assert one({"finish_reason": "length", "usage": {**usage, "completion_tokens": 7}}).finish_reason == "length"
    assert one({"finish_reason": "length", "usage": None}).finish_reason == "length"
    thought = {"message": {"content": None, "reasoning": "hm"}, "finish_reason": "length", "usage": usage}
    assert "max_new_tokens" in one(thought).error


def test_regeneration_over_servers_accounts_for_every_prompt(tmp_path):
    draw = random.Random(5)

    def flaky(number, body):
        if "bad" in body["messages"][0]["content"]:
            return "400"
        return draw.choice(["500", "drop"]) if draw.random() < 0.05 else None

    def row(n):
        first = "bad" if n % 20 == 7 else "good"
        turns = ["user", "assistant", "user"] if n % 3 == 0 else ["user"]
        messages = [{"role": role, "content": f"{first} {n} {k}"} for k, role in enumerate(turns)]
        return {"id": f"p{n}", "messages": messages, "source": "s"}

    rows = [row(n) for n in range(60)]
    with serving(flaky, lambda number, body: "hang" if number == 2 else flaky(number, body)) as servers:
        config = RegenerateConfig(engine="openai", servers=["x"], flush_completions=9)
        make = lambda: engine(servers, timeout=1.0, attempts=8)  # noqa: E731
        account = regenerate(rows, tmp_path, STAMP, make, config)
    assert (account.answered, account.failed) == (57, 3)
    found = {response.id: response for response in read_responses(tmp_path)}
    assert len(found) == 57
    assert set(read_failures(tmp_path)) == {"p7", "p27", "p47"}
    assert found["p3"].messages[1]["content"] == "echo: good 3 0"
    assert found["p3"].messages[-1]["content"] == "echo: good 3 2"
    assert found["p4"].tokens is None
