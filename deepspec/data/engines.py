"""Who answers: the target in this process. The work list may grow while answers come (turn by turn). Knows no files."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, Protocol

from deepspec.data.chat import ChatError, Message, render_prompt
from deepspec.data.spans import split_reasoning
from deepspec.models.decode import generate, prompt_problem
from deepspec.models.sampling import Sampling
from deepspec.models.target import Target

# The value at which each sampling setting does nothing.
NEUTRAL: Final = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class EngineError(ValueError):
    """An engine that cannot go on at all; what is done stays, and the message says what to do."""


@dataclass(frozen=True)
class Request:
    """One answer wanted: ``messages`` end in a user or tool turn; ``turn`` numbers the conversation's answers."""

    id: str
    turn: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Answer:
    """An assistant message with its token ids (None when unknown), or the ``error`` why there is none."""

    request: Request
    message: Message | None = None
    tokens: list[int] | None = None
    finish_reason: str = "stop"
    error: str | None = None


class Engine(Protocol):
    """Answers requests of a shared work list until it is empty, in any order. ``on_tokens`` hears of new tokens."""

    on_tokens: Callable[[int], None]

    def run(self, work: deque[Request]) -> Iterator[Answer]:
        """Take requests from the left. The caller may append more between two answers."""
        ...


class TransformersEngine:
    """The target in this process, continuously batched; prompts of a chunk are sorted, the longest first.

    Draws depend on (seed, id, turn) only, so an answer is the same however the work is cut and resumed.
    """

    CHUNK_BATCHES = 64  # batches a chunk holds: its end, where the batch runs empty, is then a small part of it

    def __init__(
        self, target: Target, *, sampling: Sampling, max_new_tokens: int, batch_size: int, seed: int, thinking: bool
    ) -> None:
        self.target, self.sampling, self.thinking = target, sampling, thinking
        self.max_new_tokens, self.batch_size, self.seed = max_new_tokens, batch_size, seed
        self.on_tokens: Callable[[int], None] = lambda count: None

    def run(self, work: deque[Request]) -> Iterator[Answer]:
        """Answers in the order rows finish; a prompt that cannot be encoded or is too long is answered by an error."""
        while work:
            requests: list[Request] = []
            prompts: list[list[int]] = []
            for _ in range(min(len(work), self.CHUNK_BATCHES * self.batch_size)):
                request = work.popleft()
                try:
                    prompt = render_prompt(self.target.tokenizer, request.messages, self.thinking, request.tools)
                except ChatError as error:
                    yield Answer(request, error=str(error))
                    continue
                if (problem := prompt_problem(self.target, prompt, self.max_new_tokens)) is not None:
                    yield Answer(request, error=problem)
                    continue
                requests.append(request)
                prompts.append(prompt)
            yield from self._generate(requests, prompts)

    def _generate(self, requests: list[Request], prompts: list[list[int]]) -> Iterator[Answer]:
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        by_index = {draw_index(requests[index].id, requests[index].turn): requests[index] for index in order}
        completions = generate(
            self.target,
            [prompts[index] for index in order],
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            seed=self.seed,
            indices=list(by_index),
            progress=self.on_tokens,
        )
        for completion in completions:
            finished = completion.finish_reason == "stop"
            text = self.target.tokenizer.decode(completion.tokens[:-1] if finished else completion.tokens)
            yield Answer(
                by_index[completion.index],
                message=assistant_message(text),
                tokens=completion.tokens,
                finish_reason=completion.finish_reason,
            )


def draw_index(prompt_id: str, turn: int) -> int:
    """A number below 2**62 that stands for this answer in every run."""
    return int.from_bytes(blake2b(f"{prompt_id}/{turn}".encode(), digest_size=8).digest()) >> 2


def assistant_message(text: str) -> Message:
    """Text of an answer as a message, its thinking apart as templates and servers do."""
    reasoning, content = split_reasoning(text)
    message: Message = {"role": "assistant", "content": content}
    if reasoning.strip():
        message["reasoning_content"] = reasoning
    return message


def sampling_from(generation_config: dict[str, Any], given: dict[str, float | int | None]) -> Sampling:
    """What is given, else what the model's generation_config says, else greedy.

    A config that samples without naming a temperature means 1; one that neither samples nor names one means 0.
    """
    samples = bool(generation_config.get("do_sample")) or generation_config.get("temperature") is not None
    defaults = Sampling(
        temperature=float(generation_config.get("temperature") or 1.0) if samples else 0.0,
        top_k=int(generation_config.get("top_k") or 0) if samples else 0,
        top_p=float(generation_config.get("top_p") or 1.0) if samples else 1.0,
        min_p=float(generation_config.get("min_p") or 0.0) if samples else 0.0,
    )
    sampling = replace(defaults, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    # At temperature 0 the filters mean nothing; one spelling, so that a resumed run compares equal.
    return Sampling() if sampling.greedy else sampling
