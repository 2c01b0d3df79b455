"""A conversation as token ids with supervised spans, through the model's own chat template. Knows no weights.

Spans are half-open token ranges [start, end) whose tokens are labels.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from deepspec.data.control_tokens import ControlTokens
from deepspec.data.spans import MARKER, ChatError, Message, Region, View, locate, with_reasoning, without_reasoning

__all__ = ["ChatError", "Encoded", "Message", "encode", "encode_response", "render_prompt"]


@dataclass(frozen=True)
class Encoded:
    """``tokens``, supervised ``spans`` into them, and how many assistant turns carry no span.

    A turn stays unsupervised when the template rewrote it (history without its reasoning) or its place is not proven.
    """

    tokens: list[int]
    spans: list[tuple[int, int]]
    unsupervised: int = 0


def encode(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    thinking: bool,
    max_length: int | None = None,
    truncated: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> Encoded:
    """Token ids of a conversation and its supervised spans: each assistant turn with its end-of-turn token.

    Headers and an empty thinking block are not supervised. ``truncated`` says that the last answer was cut: its tokens
    end where the text ends, without an end of turn. ``max_length`` cuts tokens and spans. Raises ChatError.
    """
    chat = chat_of(tokenizer)
    return chat.finish(chat.plan(messages, thinking, tools), truncated, max_length)


def render_prompt(
    tokenizer: Any, messages: Sequence[Message], thinking: bool, tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """Token ids of a conversation that ends before an answer, generation prompt included. Raises ChatError."""
    chat = chat_of(tokenizer)
    view = chat.view(messages, thinking, tools)
    return chat.tokenise(view.render(view.messages, prompt=True), view.guarded, ()).ids


def encode_response(
    tokenizer: Any,
    messages: Sequence[Message],
    response: Sequence[int],
    *,
    thinking: bool,
    max_length: int | None = None,
    tools: list[dict[str, Any]] | None = None,
    history: bool = True,
) -> Encoded:
    """Prompt ids followed by the response ids exactly as they were generated.

    ``messages`` end before the answer (a trailing assistant message is left out). The last span is exactly the
    response, its end-of-turn token included when it was generated. With ``history`` earlier answers are supervised too
    where their place in the prompt is proven.
    """
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    prompt = render_prompt(tokenizer, messages, thinking, tools)
    spans: list[tuple[int, int]] = []
    unsupervised = 0
    if history and any(message.get("role") == "assistant" for message in messages):
        before = encode(tokenizer, messages, thinking=thinking, tools=tools)
        shared = next(
            (i for i, (a, b) in enumerate(zip(before.tokens, prompt, strict=False)) if a != b),
            min(len(before.tokens), len(prompt)),
        )
        spans = [span for span in before.spans if span[1] <= shared]
        unsupervised = before.unsupervised + len(before.spans) - len(spans)
    spans.append((len(prompt), len(prompt) + len(response)))
    return _clip(prompt + list(response), spans, unsupervised, max_length)


def _clip(tokens: list[int], spans: list[tuple[int, int]], unsupervised: int, max_length: int | None) -> Encoded:
    if max_length is not None and len(tokens) > max_length:
        tokens = tokens[:max_length]
        spans = [(start, min(end, max_length)) for start, end in spans if start < max_length]
    return Encoded(tokens, [span for span in spans if span[0] < span[1]], unsupervised)


@dataclass
class Pieces:
    """Token ids and the character range of each in the rendered text."""

    ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass
class Plan:
    """A rendered text, and the proven character region of each supervised turn."""

    text: str
    regions: list[Region]
    unsupervised: int
    ends_with_answer: bool
    guarded: bool


class Chat:
    """What is derived once per tokenizer: its control tokens, and which of them open a message."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ChatError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so token positions are unknown: "
                "convert the model's tokenizer to tokenizer.json"
            )
        if not getattr(tokenizer, "chat_template", None):
            raise ChatError(
                f"the tokenizer of '{tokenizer.name_or_path}' has no chat template: use the model's chat "
                "(instruct) version, or set tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.template: str = tokenizer.get_chat_template()
        self.control = ControlTokens(tokenizer, self.template)
        # A tokenizer that puts a space before every text cannot be handed the text in parts.
        first = self.backend.encode("x", add_special_tokens=False).tokens[:1]
        self.divisible = not (first and first[0].startswith(("\u2581", "\u0120")))
        self.openers = self._openers()
        self.lead, self.closed = self._before_answers()

    def _openers(self) -> set[int]:
        """Control tokens that start a message: never the end of the turn before it."""
        view = self.view([{"role": "user", "content": "x"}], False, None)
        try:
            without, with_prompt = view.render(view.messages), view.render(view.messages, prompt=True)
        except ChatError:
            return set()
        ids = self.tokenise(with_prompt[len(without) :], False, ()).ids if with_prompt.startswith(without) else []
        eos = self.tokenizer.eos_token_id
        return {token for token in ids if token in self.control.special_ids and token != eos}

    def _before_answers(self) -> tuple[str, bool]:
        """How the generation prompt and an answered turn differ before the answer.

        White space that the model has to write itself; and whether the prompt holds more than the turn will show: an
        empty thinking block (Gemma 4).
        """
        question = {"role": "user", "content": "x"}
        view = self.view([question], False, None)
        try:
            prompt = view.render([question], prompt=True)
            answered = view.render([question, {"role": "assistant", "content": MARKER}])
        except ChatError:
            return "", False
        before = answered.partition(MARKER)[0]
        between = before.removeprefix(prompt) if before.startswith(prompt) else ""
        return between if between.isspace() else "", prompt != before and prompt.startswith(before)

    def view(self, messages: Sequence[Message], thinking: bool, tools: Any) -> View:
        """Messages in the form templates expect, with typed control tokens hidden."""
        plain = [with_reasoning(message) if thinking else without_reasoning(message) for message in messages]
        guarded = self.control.occur_in(plain, tools)
        if guarded:
            try:
                plain, tools = self.control.hide(plain), self.control.hide_tools(tools)
            except ValueError as error:
                raise ChatError(str(error)) from error
        return View(self.tokenizer, self.control, plain, tools, thinking, guarded)

    def tokenise(self, text: str, guarded: bool, cuts: Sequence[int]) -> Pieces:
        """Ids and offsets of a rendered text, tokenised separately before and after each of ``cuts``."""
        pieces = Pieces([], [])
        for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
            part = text[start:end]
            encoding = self.control.encode(part) if guarded else self.backend.encode(part, add_special_tokens=False)
            pieces.ids += encoding.ids
            pieces.offsets += [(a + start, b + start) for a, b in encoding.offsets]
        return pieces

    def plan(self, messages: Sequence[Message], thinking: bool, tools: Any) -> Plan:
        """Render, and prove where each assistant turn is."""
        if not messages:
            raise ChatError("the conversation has no messages")
        view = self.view(messages, thinking, tools)
        text = view.render(view.messages)
        found = locate(view, text)
        if self.lead:
            back = len(self.lead)
            found = [(r[0] - back, r[1]) if r and text.endswith(self.lead, 0, r[0]) else r for r in found]
        answered = view.messages[-1].get("role") == "assistant"
        if self.closed and not thinking and answered and (last := found[-1]) is not None:
            # The last answer is to follow what the model saw when it wrote it.
            prompt = view.render(view.messages[:-1], prompt=True)
            if prompt.startswith(text[: last[0]]):
                text, found[-1] = prompt + text[last[0] :], (len(prompt), len(prompt) + last[1] - last[0])
        regions = [region for region in found if region is not None]
        return Plan(text, regions, len(found) - len(regions), answered, view.guarded)

    def finish(self, plan: Plan, truncated: bool, max_length: int | None) -> Encoded:
        """Character regions to token spans; a token across the start of an answer is tokenised apart."""
        pieces = self.tokenise(plan.text, plan.guarded, ())
        starts = [start for start, _ in pieces.offsets]
        if self.divisible and any(_straddles(pieces, starts, start) for start, _ in plan.regions):
            pieces = self.tokenise(plan.text, plan.guarded, [start for start, _ in plan.regions])
            starts = [start for start, _ in pieces.offsets]
        spans, tokens = [], pieces.ids
        for number, (start, end) in enumerate(plan.regions):
            first, last = bisect_left(starts, start), bisect_left(starts, end)
            while last > first and pieces.offsets[last - 1][1] > end:
                last -= 1
            if truncated and plan.ends_with_answer and number == len(plan.regions) - 1:
                last = self._before_end_of_turn(plan.text, pieces, first, last)
                tokens = tokens[:last]
            else:
                last = self._with_end_of_turn(plan.text, pieces, first, last)
            spans.append((first, last))
        return _clip(tokens, spans, plan.unsupervised, max_length)

    def _with_end_of_turn(self, text: str, pieces: Pieces, first: int, last: int) -> int:
        """End of a span with the end-of-turn token that follows it, or that a generation mark put inside it.

        White space may stand between the two, and after a marked end of turn it is left out.
        """
        if (inner := self._before_end_of_turn(text, pieces, first, last)) < last:
            return inner + 1
        position = last
        while position < len(pieces.ids) and self._is_space(text, pieces, position):
            position += 1
        if position < len(pieces.ids) and pieces.ids[position] in self.control.special_ids - self.openers:
            return position + 1
        return last

    def _before_end_of_turn(self, text: str, pieces: Pieces, first: int, last: int) -> int:
        """Where a span's own end-of-turn token is, or ``last`` when it has none."""
        position = last - 1
        while position > first and self._is_space(text, pieces, position):
            position -= 1
        return position if position >= first and pieces.ids[position] in self.control.special_ids else last

    def _is_space(self, text: str, pieces: Pieces, position: int) -> bool:
        start, end = pieces.offsets[position]
        return pieces.ids[position] not in self.control.special_ids and text[start:end].isspace()


_chats: WeakKeyDictionary[Any, Chat] = WeakKeyDictionary()


def chat_of(tokenizer: Any) -> Chat:
    """The Chat of a tokenizer, derived once and again when its template is replaced. Raises ChatError."""
    chat = _chats.get(tokenizer)
    if chat is None or not tokenizer.chat_template or tokenizer.get_chat_template() != chat.template:
        chat = _chats[tokenizer] = Chat(tokenizer)
    return chat


def _straddles(pieces: Pieces, starts: list[int], position: int) -> bool:
    before = bisect_left(starts, position) - 1
    return before >= 0 and pieces.offsets[before][1] > position
