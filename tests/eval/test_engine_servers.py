"""Engines over HTTP: what is sent and read in both dialects, and a server program that comes, dies and goes."""

import json

import pytest

from deepspec.eval import engine_servers
from deepspec.eval.engine_servers import Answer, EngineError, LlamaServer, parse_llama, parse_openai
from tests.eval import fake_engine

ANSWERS = {"1 2 3": {"tokens": [7, 8], "timings": {"draft_n": 5, "draft_n_accepted": 1}}}


def test_llama_cpp_tells_tokens_and_drafts():
    with fake_engine.serving(ANSWERS) as url:
        assert engine_servers.llama_server(url)([1, 2, 3], 16) == Answer([7, 8], 5, 1)
        with pytest.raises(EngineError, match=r"HTTP 400.*unknown prompt"):
            engine_servers.llama_server(url)([4], 16)
    with pytest.raises(EngineError, match="does not answer"):
        engine_servers.llama_server(url)([1, 2, 3], 16)


def test_openai_tells_token_ids_or_text():
    with fake_engine.serving(ANSWERS) as url:
        assert engine_servers.openai_server(f"{url}/v1/", list)([1, 2, 3], 16) == Answer([7, 8])
    with fake_engine.serving(ANSWERS, texts={"1 2 3": "ab"}) as url:
        ask = engine_servers.openai_server(f"{url}/v1", lambda text: [ord(letter) for letter in text])
        assert ask([1, 2, 3], 16) == Answer([97, 98])


def test_an_answer_without_drafts_offered_none():
    assert parse_llama({"tokens": [1], "timings": {}, "tokens_evaluated": 3}, 3) == Answer([1], 0, 0)


def test_replies_that_are_none():
    with pytest.raises(EngineError, match="lacks 'tokens'"):
        parse_llama({"content": "x"}, 3)
    with pytest.raises(EngineError, match="read 4 prompt tokens of the 3 sent"):
        parse_llama({"tokens": [1], "timings": {}, "tokens_evaluated": 4}, 3)
    with pytest.raises(EngineError, match="without choices"):
        parse_openai({"error": "x"}, list)
    with pytest.raises(EngineError, match="names no model"):
        engine_servers.parse_model({"data": []}, "http://h/v1")


def test_the_program_runs_as_long_as_it_is_needed(tmp_path):
    (tmp_path / "t.gguf.json").write_text(json.dumps({"plain": ANSWERS, "drafted": {}}))
    program = fake_engine.program(tmp_path / "llama-server")
    server = LlamaServer(str(program), ["-m", str(tmp_path / "t.gguf")], tmp_path / "logs" / "server.log")
    with server as url:
        assert url.startswith("http://127.0.0.1:")
        assert engine_servers.llama_server(url)([1, 2, 3], 16).tokens == [7, 8]
    with pytest.raises(EngineError, match="does not answer"):
        engine_servers.call(f"{url}/health")
    assert '"--host", "127.0.0.1"' in (tmp_path / "logs" / "server.log").read_text()


def test_a_program_that_dies_shows_its_last_words(tmp_path):
    (tmp_path / "t.gguf.json").write_text(json.dumps({"plain": {}, "drafted": {}}))
    program = fake_engine.program(tmp_path / "llama-server")
    arguments = ["-m", str(tmp_path / "t.gguf"), "-md", str(tmp_path / "none.gguf")]
    with (
        pytest.raises(EngineError, match=r"ended with status 1 [\s\S]*no drafter"),
        LlamaServer(str(program), arguments, tmp_path / "server.log"),
    ):
        pass


def test_a_missing_program_is_said_how_to_build(tmp_path):
    with pytest.raises(EngineError, match=r"no such program[\s\S]*cmake -S"):
        engine_servers.find_llama_server(str(tmp_path / "llama-server"))
