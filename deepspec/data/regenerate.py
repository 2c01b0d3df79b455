"""The target's own answers to the prompts: work list, resume by id, exactly-once accounting. Knows no templates.

Every prompt ends in one of three ways: a row in a part, a line in failures.jsonl, or a counted reason for skipping it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspec.data.engines import Answer, Engine, Request
from deepspec.data.responses import (
    ANSWER_SEMANTICS,
    Response,
    ResponsesError,
    answered_ids,
    next_part,
    part_name,
    read_failures,
    require_semantics,
    write_part,
)
from deepspec.files import atomic_write, provenance, read_json, write_json

Prompt = dict[str, Any]


@dataclass
class RegenerateConfig:
    """How responses are made.

    ``engine`` is ``transformers`` (in this process) or ``openai`` (the ``servers``). Sampling values that are null come
    from ``target.sampling`` (the model's card, for the mode that is asked in), else from the model's generation_config
    (greedy when it says nothing). A part file is written every
    ``flush_completions`` answers or ``flush_seconds``, whichever is first: the most a kill can lose. ``concurrency`` is
    requests in flight per server, ``timeout`` seconds of one request, ``attempts`` tries of one request.
    """

    engine: str = "transformers"
    max_new_tokens: int = 4096
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    limit: int | None = None
    batch_size: int = 32
    flush_completions: int = 256
    flush_seconds: float = 60.0
    retry_failures: bool = True
    servers: list[str] = field(default_factory=list)
    model: str | None = None
    concurrency: int = 64
    timeout: float = 600.0
    attempts: int = 5
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot work."""
        if self.engine not in ("transformers", "openai"):
            raise ValueError(f"regenerate.engine is '{self.engine}': give transformers or openai")
        if self.engine == "openai" and not self.servers:
            raise ValueError("regenerate.engine=openai needs regenerate.servers=[http://host:port/v1,…]")
        for name in ("max_new_tokens", "batch_size", "flush_completions", "concurrency", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"regenerate.{name} is {getattr(self, name)}: give at least 1")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"regenerate.limit is {self.limit}: give at least 1, or null for everything")


@dataclass(frozen=True)
class Stamp:
    """What every row of a folder was made with; a resumed run must be made with the same."""

    target: str
    thinking: bool
    max_new_tokens: int
    seed: int
    sampling: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    semantics: int = ANSWER_SEMANTICS


@dataclass
class Account:
    """Where the prompts went. ``done`` were answered by an earlier run."""

    prompts: int = 0
    done: int = 0
    answered: int = 0
    truncated: int = 0
    failed: int = 0
    tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    pending: int = 0

    def skip(self, reason: str) -> None:
        """Count a prompt that is not to be answered."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def __str__(self) -> str:
        skipped = "".join(f", {count} skipped ({reason})" for reason, count in self.skipped.items())
        pending = f", {self.pending} still to do" if self.pending else ""
        truncated = f" ({self.truncated} of them cut at the limit)" if self.truncated else ""
        return (
            f"{self.prompts} prompts = {self.done + self.answered} answered{truncated} + {self.failed} failed{skipped}"
            f"{pending}"
        )


def regenerate(
    prompts: list[Prompt],
    folder: Path,
    stamp: Stamp,
    make_engine: Callable[[], Engine],
    config: RegenerateConfig,
    *,
    rank: int = 0,
    world: int = 1,
) -> Account:
    """Answer the prompts that have no answer yet, writing parts into ``folder``; returns the account of this rank.

    ``make_engine`` is called only when something is left to do. An interrupt (Ctrl-C, SIGTERM) keeps what is done and
    is raised again after it is on disk. Raises ResponsesError when the folder was made with another stamp or is in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder, rank):
        _check_stamp(folder, stamp, rank)
        for leftover in folder.glob(f".part-{rank:03d}-*.tmp"):
            leftover.unlink()
        account = Account()
        todo = _work_list(prompts, folder, config, account, rank, world)
        try:
            if todo:
                _answer(todo, folder, stamp, make_engine(), config, account, rank)
        finally:
            settled = account.done + account.answered + account.failed + sum(account.skipped.values())
            account.pending = account.prompts - settled
            name = "summary.json" if rank == 0 else f"summary-{rank:03d}.json"
            write_json(folder / name, {"account": asdict(account), "stamp": asdict(stamp), **provenance()})
    return account


def _work_list(
    prompts: list[Prompt], folder: Path, config: RegenerateConfig, account: Account, rank: int, world: int
) -> list[Prompt]:
    """This rank's prompts without an answer, the longest first; counts the others."""
    answered, failures = answered_ids(folder), read_failures(folder)
    seen: set[str] = set()
    todo: list[Prompt] = []
    for number, prompt in enumerate(prompts):
        if rank_of(prompt["id"], world) != rank:
            continue
        account.prompts += 1
        if prompt["id"] in seen:
            account.skip("duplicate id")
        elif config.limit is not None and number >= config.limit:
            account.skip("over regenerate.limit")
        elif prompt["id"] in answered:
            account.done += 1
        elif prompt["id"] in failures and not config.retry_failures:
            account.failed += 1
        else:
            todo.append(prompt)
        seen.add(prompt["id"])
    _rewrite_failures(folder, rank, {p["id"] for p in todo} | answered)
    todo.sort(key=lambda prompt: -sum(len(message["content"] or "") for message in prompt["messages"]))
    return todo


def rank_of(prompt_id: str, world: int) -> int:
    """The rank that answers a prompt, the same in every run of this world size."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest()) % world


class _Progress:
    """Progress bar with tokens/s and time left, over what this run has to do."""

    def __init__(self, total: int, rank: int) -> None:
        from tqdm import tqdm

        shown = sys.stderr.isatty()
        self.bar = tqdm(
            total=total, unit="prompt", desc="regenerate", disable=rank != 0, mininterval=0.5 if shown else 15,
            smoothing=0.05, dynamic_ncols=shown, maxinterval=1 if shown else 30,
        )  # fmt: skip
        self.tokens, self.started = 0, time.perf_counter()

    def add_tokens(self, count: int) -> None:
        self.tokens += count
        rate = self.tokens / max(1e-9, time.perf_counter() - self.started)
        self.bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self.bar.update(0)


def _answer(
    todo: list[Prompt],
    folder: Path,
    stamp: Stamp,
    engine: Engine,
    config: RegenerateConfig,
    account: Account,
    rank: int,
) -> None:
    """Run the engine over the conversations, turn by turn, writing parts as they fill."""
    conversations = {prompt["id"]: Conversation(prompt) for prompt in todo}
    work = deque(conversation.next_request() for conversation in conversations.values())
    progress = _Progress(len(todo), rank)
    engine.on_tokens = progress.add_tokens
    writer = _Writer(folder, rank, config)
    try:
        with _terminate_as_interrupt():
            for answer in engine.run(work):
                conversation = conversations[answer.request.id]
                request = conversation.take(answer)
                if request is not None:
                    work.appendleft(request)
                    continue
                del conversations[answer.request.id]
                if answer.error is not None:
                    writer.fail(answer.request.id, answer.error)
                    account.failed += 1
                else:
                    account.truncated += answer.finish_reason == "length"
                    writer.add(conversation.response(answer, stamp))
                    account.answered += writer.flush_if_due()
                progress.bar.update(1)
    finally:
        account.answered += writer.flush()
        account.tokens = progress.tokens
        progress.bar.close()


class Conversation:
    """A prompt being answered turn by turn: recorded answers give way to the target's own.

    Recorded tool calls stay, because the tool results that follow belong to them.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self._rest = deque(prompt["messages"])
        self.messages: list[dict[str, Any]] = []
        self.turn = 0

    def next_request(self) -> Request:
        """The request for the next answer: everything up to the next answer to be made."""
        while self._rest:
            message = self._rest[0]
            if message["role"] == "assistant" and not message.get("tool_calls"):
                self._rest.popleft()
                break
            self.messages.append(self._rest.popleft())
        return Request(self.prompt["id"], self.turn, list(self.messages), self.prompt.get("tools"))

    def take(self, answer: Answer) -> Request | None:
        """Add an answer; the next request, or None when the conversation is over (complete, failed or cut)."""
        if answer.error is not None or answer.message is None:
            return None
        self.messages.append(answer.message)
        self.turn += 1
        return self.next_request() if self._rest and answer.finish_reason != "length" else None

    def response(self, answer: Answer, stamp: Stamp) -> Response:
        """The finished conversation."""
        return Response(
            id=self.prompt["id"],
            messages=self.messages,
            finish_reason=answer.finish_reason,
            thinking=stamp.thinking,
            sampling=stamp.sampling,
            tokens=answer.tokens,
            source=self.prompt.get("source", ""),
            tools=self.prompt.get("tools"),
        )


class _Writer:
    """Collects rows of one rank and writes a part when enough or long enough ago; failures are written at once."""

    def __init__(self, folder: Path, rank: int, config: RegenerateConfig) -> None:
        self.folder, self.rank, self.config = folder, rank, config
        self.rows: list[Response] = []
        self.number = next_part(folder)
        self.last = time.monotonic()

    def add(self, row: Response) -> None:
        self.rows.append(row)

    def flush_if_due(self) -> int:
        due = time.monotonic() - self.last >= self.config.flush_seconds
        return self.flush() if due or len(self.rows) >= self.config.flush_completions else 0

    def flush(self) -> int:
        """Write the collected rows; returns how many. On an error (disk full) the rows stay unwritten and uncounted."""
        rows, self.rows = self.rows, []
        self.last = time.monotonic()
        if rows:
            write_part(self.folder / part_name(self.rank, self.number), rows)
            self.number += 1
        return len(rows)

    def fail(self, prompt_id: str, reason: str) -> None:
        with failures_file(self.folder, self.rank).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": prompt_id, "reason": reason}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def failures_file(folder: Path, rank: int) -> Path:
    """Failures of one rank, one JSON object a line."""
    return folder / ("failures.jsonl" if rank == 0 else f"failures-{rank:03d}.jsonl")


def _rewrite_failures(folder: Path, rank: int, settled: set[str]) -> None:
    """Forget failures that are tried again or were answered since; a torn last line goes too."""
    file = failures_file(folder, rank)
    if not file.is_file():
        return
    kept = {key: reason for key, reason in read_failures(file).items() if key not in settled}
    with atomic_write(file) as temporary:
        lines = (json.dumps({"id": key, "reason": reason}) + "\n" for key, reason in kept.items())
        temporary.write_text("".join(lines), encoding="utf-8")


def _check_stamp(folder: Path, stamp: Stamp, rank: int) -> None:
    """The folder's stamp is this run's, or is written now."""
    file, ours = folder / "manifest.json", asdict(stamp)
    if not file.is_file():
        if rank == 0:
            write_json(file, {"stamp": ours, **provenance()})
        return
    require_semantics(folder)
    theirs = {"semantics": 1} | read_json(file)["stamp"]
    different = [f"{key}: {theirs.get(key)!r} there, {ours[key]!r} now" for key in ours if theirs.get(key) != ours[key]]
    if different:
        raise ResponsesError(
            f"{folder} was made with other options ({'; '.join(different)}): give those again, "
            "another out=…, or delete the folder"
        )


@contextlib.contextmanager
def _lock(folder: Path, rank: int) -> Iterator[None]:
    """Refuse a second process with the same rank in this folder."""
    with (folder / f".lock-{rank:03d}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResponsesError(f"another regenerate is writing to {folder}: wait for it, or stop it") from error
        except OSError as error:
            print(f"note: {folder} cannot be locked ({error}): see that no other regenerate writes to it")
        yield


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM (a scheduler's warning) ends the run as Ctrl-C does, where signals may be handled."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
