"""Regeneration against a real OpenAI-compatible server, `transformers serve`, equals regeneration in process."""

import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import closing

import pytest
import torch

from deepspec.data.engines import EngineError, Request, TransformersEngine
from deepspec.data.regenerate import RegenerateConfig, Stamp
from deepspec.data.servers import ServersEngine
from deepspec.models.sampling import Sampling
from deepspec.models.target import Target
from tests.data.little_chat import VOCAB, chat_tokenizer
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow
LENGTH = 20
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
REQUESTS = [Request(f"p{n}", 0, [{"role": "user", "content": f"Question {n * n}?"}]) for n in range(12)]


@pytest.fixture(scope="module")
def target():
    """A tiny target that ends some of its answers, and not others, within LENGTH tokens."""
    # Of a Qwen3 model the server would expect Qwen3's tokens, and cut its text at those.
    model = tiny_model("llama", 3, vocab_size=VOCAB, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[1] *= 3.0
    return Target.from_model(model, tokenizer=chat_tokenizer(), name="tiny-chat")


@pytest.fixture(scope="module")
def server(target, tmp_path_factory):
    """Base URL of the server, on a free port of this machine."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        pytest.skip("transformers serve needs more packages: pip install 'transformers[serving]'")
    folder = tmp_path_factory.mktemp("served")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "log").open("w")
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert running.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        running.terminate()
        running.wait(20)
        log.close()


def answered(server, sampling, **options):
    config = RegenerateConfig(engine="openai", servers=[server], max_new_tokens=LENGTH, timeout=60.0, **options)
    engine = ServersEngine(config, Stamp("tiny-chat", False, LENGTH, 0, sampling))
    return {answer.request.id: answer for answer in engine.run(deque(REQUESTS))}


def test_greedy_answers_and_their_ends_equal_those_made_in_process(target, server):
    engine = TransformersEngine(
        target, sampling=Sampling(), max_new_tokens=LENGTH, batch_size=4, seed=0, thinking=False
    )
    here = {answer.request.id: answer for answer in engine.run(deque(REQUESTS))}
    there = answered(server, GREEDY)
    assert {key: answer.message for key, answer in there.items()} == {
        key: answer.message for key, answer in here.items()
    }
    # an end of turn that is the last token allowed is "length" to this server
    assert {key: answer.finish_reason for key, answer in there.items()} == {
        key: "length" if len(answer.tokens or []) == LENGTH else answer.finish_reason for key, answer in here.items()
    }
    assert {answer.finish_reason for answer in there.values()} == {"stop", "length"}


def test_sampling_values_that_the_server_does_not_know_end_the_run_and_can_be_given_its_way(server):
    sampling = {**GREEDY, "temperature": 1.0, "top_k": 20}
    with pytest.raises(EngineError, match=r"refuses every request.*top_k.*extra_body"):
        answered(server, sampling)
    config = f'{{"do_sample": true, "temperature": 1.0, "top_k": 20, "max_new_tokens": {LENGTH}, "eos_token_id": 1}}'
    there = answered(server, sampling, extra_body={"top_k": None, "generation_config": config})
    assert [answer.error for answer in there.values()] == [None] * len(REQUESTS)
    assert there["p1"].message != answered(server, GREEDY)["p1"].message
