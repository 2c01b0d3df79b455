"""Who answers: any number of OpenAI-compatible servers, asked concurrently. Knows no files and no weights.

A server that refuses connections, hangs or keeps answering garbage is left alone for a growing while and then tried
with one request; its requests go to the others. Needs ``httpx`` (pip install 'deepspec[serve]').
"""

import asyncio
import heapq
import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from deepspec.data.engines import NEUTRAL, Answer, EngineError, Request, assistant_message, draw_index
from deepspec.data.regenerate import RegenerateConfig, Stamp

FINISHED = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "eos_token": "stop", "length": "length"}
NO_TOP_K = -1  # how servers spell a top_k that is off; some refuse 0
BUSY = (429, 503)  # the server's state, not the request's fault


class _Failure(Exception):
    """One try that gave no answer. ``final``: another try would not help. ``counts``: against the request's tries."""

    def __init__(self, reason: str, *, final: bool = False, counts: bool = True, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.final, self.counts, self.wait = final, counts, wait


@dataclass
class _Server:
    url: str
    model: str | None
    active: int = 0
    failures: int = 0
    retry_at: float = 0.0
    down_since: float | None = None

    def room(self, concurrency: int, now: float) -> bool:
        """Whether it may be asked now; one request at a time until a server that was down answers."""
        return now >= self.retry_at and self.active < (1 if self.down_since is not None else concurrency)


@dataclass(order=True)
class _Try:
    ready_at: float
    number: int
    request: Request = field(compare=False)
    tries: int = field(compare=False, default=0)


class ServersEngine:
    """OpenAI chat completions. Sampling values are sent under their own names, unset ones not at all."""

    TOLERATED = 3  # consecutive bad answers before a server is left alone
    SCOUTS = 8  # short prompts asked first: when all are refused with the same words, everything would be

    def __init__(
        self, config: RegenerateConfig, stamp: Stamp, *, pause: float = 1.0, longest_pause: float = 60.0
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise EngineError("regenerate.engine=openai needs httpx: pip install 'deepspec[serve]'") from error
        self.httpx: Any = httpx
        self.config, self.stamp, self.pause, self.longest_pause = config, stamp, pause, longest_pause
        self.servers = [_Server(url.rstrip("/"), config.model) for url in config.servers]
        self.on_tokens: Callable[[int], None] = lambda count: None
        self._numbers = 0
        self._refused_scouts: Counter[str] = Counter()

    def run(self, work: deque[Request]) -> Iterator[Answer]:
        """Answers as they arrive.

        Work is taken from the left, but for the scouts: the longest prompts come first, and may be too long. Raises
        EngineError when every server has been down for ``config.timeout`` seconds, and when the scouts are refused with
        the same words (a wrong model name, a field the server does not know).
        """
        waiting: list[_Try] = []
        running: dict[asyncio.Task[Answer], tuple[_Try, _Server]] = {}
        with asyncio.Runner() as runner:
            client = runner.run(self._client())
            try:
                while work or waiting or running:
                    self._start(runner, client, work, waiting, running)
                    done = runner.run(self._wait(running, waiting))
                    for task in done:
                        attempt, server = running.pop(task)
                        server.active -= 1
                        answer = self._settle(task, attempt, server, waiting)
                        if answer is not None:
                            yield answer
                    self._give_up_if_all_down()
            finally:
                for task in running:
                    task.cancel()
                runner.run(client.aclose())

    async def _client(self) -> Any:
        limits = self.httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return self.httpx.AsyncClient(timeout=self.httpx.Timeout(self.config.timeout, connect=10.0), limits=limits)

    def _start(
        self,
        runner: asyncio.Runner,
        client: Any,
        work: deque[Request],
        waiting: list[_Try],
        running: dict[asyncio.Task[Answer], tuple[_Try, _Server]],
    ) -> None:
        """Hand requests to the least busy servers, those that wait for another try first."""
        loop = runner.get_loop()
        while True:
            now = time.monotonic()
            free = [server for server in self.servers if server.room(self.config.concurrency, now)]
            retry = bool(waiting) and waiting[0].ready_at <= now
            if not free or not (retry or work):
                return
            attempt = heapq.heappop(waiting) if retry else self._next(work, now)
            server = min(free, key=lambda server: server.active)
            server.active += 1
            # A request of its own may hang past the client's timeouts (a byte now and then): bound it as a whole.
            ask = asyncio.wait_for(self._ask(client, server, attempt.request), self.config.timeout)
            running[loop.create_task(ask)] = (attempt, server)

    def _next(self, work: deque[Request], now: float) -> _Try:
        self._numbers += 1
        return _Try(now, self._numbers, work.pop() if self._numbers <= self.SCOUTS else work.popleft())

    async def _wait(
        self, running: dict[asyncio.Task[Answer], tuple[_Try, _Server]], waiting: list[_Try]
    ) -> set[asyncio.Task[Answer]]:
        """Tasks that are done; returns without any when a retry or a server becomes due."""
        now = time.monotonic()
        due = [attempt.ready_at for attempt in waiting[:1]]
        due += [server.retry_at for server in self.servers if server.retry_at > now]
        pause = max(0.001, min([1.0, *(moment - now for moment in due)]))
        if not running:
            await asyncio.sleep(pause)
            return set()
        done, _ = await asyncio.wait(running, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        return done

    def _settle(self, task: asyncio.Task[Answer], attempt: _Try, server: _Server, waiting: list[_Try]) -> Answer | None:
        """Book one ended try: its answer, its final failure, or None when it is to be tried again."""
        now = time.monotonic()
        try:
            answer = task.result()
        except TimeoutError:
            failure = _Failure(f"no answer within {self.config.timeout:g} s")
        except _Failure as error:
            failure = error
        else:
            server.failures, server.down_since, server.retry_at = 0, None, 0.0
            return answer
        if failure.final:
            server.failures = 0
            self._refused_scouts[str(failure)] += attempt.number <= self.SCOUTS
            if self._refused_scouts[str(failure)] == self.SCOUTS:
                raise EngineError(
                    f"{server.url} refuses every request ({failure}): check regenerate.model and regenerate.extra_body "
                    "(a field set to null there is not sent); see docs/regeneration.md"
                )
            return Answer(attempt.request, error=str(failure))
        server.failures += 1
        if not failure.counts or server.failures >= self.TOLERATED or server.down_since is not None:
            server.down_since = server.down_since if server.down_since is not None else now
            server.retry_at = now + max(failure.wait, self._pause(server.failures))
        attempt.tries += failure.counts
        if attempt.tries >= self.config.attempts:
            return Answer(attempt.request, error=f"{failure} ({attempt.tries} tries)")
        attempt.ready_at = now + (self._pause(attempt.tries) if failure.counts else 0.0)
        heapq.heappush(waiting, attempt)
        return None

    def _pause(self, times: int) -> float:
        """Seconds to wait after the n-th failure: doubling, bounded, spread so that tries do not come in step."""
        return min(self.longest_pause, self.pause * 2.0 ** min(times, 16)) * random.uniform(0.5, 1.0)

    def _give_up_if_all_down(self) -> None:
        now = time.monotonic()
        if all(
            server.down_since is not None and now - server.down_since > self.config.timeout for server in self.servers
        ):
            raise EngineError(
                f"no server has answered for {self.config.timeout:g} s ({', '.join(s.url for s in self.servers)}): "
                "start them (scripts/launch_servers.sh) and run again; what is done is kept"
            )

    async def _ask(self, client: Any, server: _Server, request: Request) -> Answer:
        """One try. Raises _Failure."""
        if server.model is None:
            listed = await self._call(client, "GET", f"{server.url}/models", None)
            server.model = _only_model(listed, server.url)
        body = self._body(server.model, request)
        return self._answer(request, await self._call(client, "POST", f"{server.url}/chat/completions", body))

    async def _call(self, client: Any, method: str, url: str, body: dict[str, Any] | None) -> Any:
        try:
            response = await client.request(method, url, json=body)
        except self.httpx.ConnectError as error:
            raise _Failure(f"{url} refuses connections ({error})", counts=False) from error
        except self.httpx.HTTPError as error:
            raise _Failure(f"{url}: {type(error).__name__} {error}") from error
        if response.status_code in BUSY:
            after = response.headers.get("retry-after", "")
            raise _Failure(f"{url} is busy", counts=False, wait=float(after) if after.isdigit() else 0.0)
        if response.status_code != 200:
            # A 4xx says the request is wrong and stays wrong; 408 and 5xx may pass.
            final = 400 <= response.status_code < 500 and response.status_code != 408
            raise _Failure(f"HTTP {response.status_code}: {response.text[:300]}", final=final)
        try:
            return response.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise _Failure(f"{url} answered garbage: {response.content[:80]!r}") from error

    def _body(self, model: str, request: Request) -> dict[str, Any]:
        """The request; of sampling settings only those that do something or were given (OpenAI knows few of them).

        One that was given as neutral is sent too: without it a server may apply the model's generation_config.
        ``extra_body`` comes last: it adds fields, replaces them, and takes away those it sets to null.
        """
        body: dict[str, Any] = {"model": model, "messages": _plain(request.messages)}
        body["max_tokens"] = self.stamp.max_new_tokens
        for name, value in self.stamp.sampling.items():
            if name == "temperature" or value != NEUTRAL[name] or getattr(self.config, name, None) == value:
                body[name] = NO_TOP_K if name == "top_k" and value == NEUTRAL[name] else value
        if body.get("temperature"):
            body["seed"] = (self.stamp.seed + draw_index(request.id, request.turn)) % 2**31
        if request.tools:
            body["tools"] = request.tools
        body["chat_template_kwargs"] = {"enable_thinking": self.stamp.thinking, **self.config.chat_template_kwargs}
        body |= self.config.extra_body
        return {name: value for name, value in body.items() if value is not None}

    def _answer(self, request: Request, found: Any) -> Answer:
        """A parsed reply as an Answer; raises _Failure when it is not one.

        "length" is believed: besides ``max_tokens`` and the context, a server may have limits of its own, so an answer
        shorter than both proves nothing, and a cut answer taken for a whole one would teach an end of turn that the
        target never wrote.
        """
        try:
            choice = found["choices"][0]
            given, reason = choice["message"], choice["finish_reason"]
            content = given.get("content") or ""
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Failure(f"answer without a message: {str(found)[:200]}") from error
        if reason not in FINISHED or not isinstance(content, str):
            raise _Failure(f"answer ended with finish_reason {reason!r}")
        usage = found.get("usage") or {}
        made = usage.get("completion_tokens")
        finish = FINISHED[reason]
        message = assistant_message(content)
        if reasoning := given.get("reasoning_content") or given.get("reasoning"):
            message["reasoning_content"] = reasoning
        if calls := given.get("tool_calls"):
            message["tool_calls"] = [_parsed(call) for call in calls]
        tokens = choice.get("token_ids")
        if finish == "length" and not message["content"] and message.get("reasoning_content") and not tokens:
            raise _Failure("cut inside its thinking: raise regenerate.max_new_tokens", final=True)
        self.on_tokens(made if isinstance(made, int) else len(content) // 4)
        return Answer(request, message=message, tokens=tokens, finish_reason=finish)


def _only_model(listed: Any, url: str) -> str:
    """Id of the model that a server lists; adapters name their parent and do not count.

    Raises EngineError when it lists several, _Failure when the list is not one.
    """
    try:
        models: list[str] = [entry["id"] for entry in listed["data"] if not entry.get("parent")]
    except (KeyError, TypeError, AttributeError) as error:
        raise _Failure(f"{url}/models is not a list of models: {str(listed)[:200]}") from error
    if len(models) > 1:
        raise EngineError(
            f"{url} serves {len(models)} models ({', '.join(models[:5])}): "
            "say which is the target's with regenerate.model"
        )
    if not models:
        raise _Failure(f"{url}/models names no model: give regenerate.model")
    return models[0]


def _plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form: tool call arguments as JSON text, reasoning left to the server's template."""
    sent = []
    for message in messages:
        copy = dict(message)
        if calls := copy.get("tool_calls"):
            copy["tool_calls"] = [
                {"id": call.get("id") or f"call_{number}", "type": "function",
                 "function": {**call["function"], "arguments": json.dumps(call["function"].get("arguments") or {})}}
                for number, call in enumerate(calls)
            ]  # fmt: skip
        sent.append(copy)
    return sent


def _parsed(call: Any) -> dict[str, Any]:
    """A server's tool call with its arguments as an object."""
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        return {"type": "function", "function": function}
    except (KeyError, TypeError, ValueError) as error:
        raise _Failure(f"a tool call is not JSON: {str(call)[:200]}") from error
