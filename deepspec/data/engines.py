"""Who answers: the target in this process. The work list may grow while answers come (turn by turn). Knows no files."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, Protocol

import torch

from deepspec.data.chat import ChatError, Message, render_prompt
from deepspec.data.spans import split_reasoning
from deepspec.models.decode import Completion, generate, prompt_problem
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
        """Longest prompts first, whose batch needs the most memory: where it does not fit, with half of it from then
        on (answers do not depend on the batch). Raises EngineError where one prompt alone does not fit."""
        pairs = sorted(zip(requests, prompts, strict=True), key=lambda pair: -len(pair[1]))
        left = {draw_index(request.id, request.turn): (request, prompt) for request, prompt in pairs}
        while left:
            try:
                for completion in self._complete({index: prompt for index, (_, prompt) in left.items()}):
                    yield self._answer(left.pop(completion.index)[0], completion)
            except torch.OutOfMemoryError as error:
                if self.batch_size == 1:
                    raise EngineError(
                        "out of memory with one prompt at a time: lower regenerate.max_new_tokens or prompts.max_chars,"
                        " or serve the target and give regenerate.engine=openai"
                    ) from error
                self.batch_size //= 2
                print(f"out of memory: going on with regenerate.batch_size={self.batch_size}", flush=True)
            if left and self.target.device.type != "cpu":
                torch.accelerator.empty_cache()  # not while the error lives, whose frames hold what is to be freed

    def _complete(self, prompts: dict[int, list[int]]) -> Iterator[Completion]:
        return generate(
            self.target,
            list(prompts.values()),
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            seed=self.seed,
            indices=list(prompts),
            progress=self.on_tokens,
        )

    def _answer(self, request: Request, completion: Completion) -> Answer:
        finished = completion.finish_reason == "stop"
        text = self.target.tokenizer.decode(completion.tokens[:-1] if finished else completion.tokens)
        return Answer(
            request,
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
