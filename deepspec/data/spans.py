"""Where each assistant turn lies in a rendered conversation, proven by rendering again. Knows characters, not tokens.

The conversation is rendered a second time with the answer replaced by a marker: whatever is not the marker must be
equal in both renderings. Templates with ``{% generation %}`` tags say it themselves.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from deepspec.data.control_tokens import ControlTokens

Message = dict[str, Any]
Region = tuple[int, int]
REASONING = ("reasoning_content", "reasoning", "thinking")
THINKING = (("<think>", "</think>"), ("<|channel>thought", "<channel|>"))  # around thinking that is part of the content
MARKER = "\ufdd0{}\ufdd1"  # noncharacters: valid in a string, never in a text


class ChatError(ValueError):
    """A conversation that the template cannot render, or a tokenizer that cannot say where its tokens are."""


@dataclass
class View:
    """One conversation ready to be rendered any number of times."""

    tokenizer: Any
    control: ControlTokens
    messages: list[Message]
    tools: Any
    thinking: bool
    guarded: bool

    def render(self, messages: list[Message], prompt: bool = False) -> str:
        """Text of ``messages``, in the first spelling the template takes. Raises ChatError with the last refusal."""
        for spelling in _spellings(messages):
            try:
                text = self._apply(spelling, prompt)
            except Exception as error:  # templates raise whatever their expressions raise
                refusal = error
            else:
                return self.control.guard(text) if self.guarded else text
        raise ChatError(f"the chat template refuses this conversation: {refusal}") from refusal

    def _apply(self, messages: list[Message], prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=self.tools,
            tokenize=False,
            add_generation_prompt=prompt,
            **self.template_arguments(),
        )

    def template_arguments(self) -> dict[str, Any]:
        """The thinking switch under the names templates use."""
        return {"enable_thinking": self.thinking, "thinking": self.thinking}


def _spellings(messages: list[Message]) -> Iterator[list[Message]]:
    """As given; with tool arguments as JSON text (DeepSeek); without a system role, merged into the first question."""
    yield messages
    if any(message.get("tool_calls") for message in messages):
        yield [_with_text_arguments(message) if message.get("tool_calls") else message for message in messages]
    if [message.get("role") for message in messages[:2]] == ["system", "user"]:
        merged = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1].get('content') or ''}"}
        yield [merged, *messages[2:]]


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function", call))
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def locate(view: View, text: str) -> list[Region | None]:
    """Character regions of the assistant turns, in order; None for a turn whose place is not proven."""
    turns = [index for index, message in enumerate(view.messages) if message.get("role") == "assistant"]
    together = _marked(view, text, turns) or _all_at_once(view, text, turns)
    if together is not None:
        return list(together)
    regions: list[Region | None] = []
    reached = 0
    for turn in turns:
        region = _one_by_one(view, text, turn)
        if region is not None and region[0] < reached:
            region = None
        regions.append(region)
        reached = region[1] if region is not None else reached
    return regions


def _marked(view: View, text: str, turns: list[int]) -> list[Region] | None:
    """Regions that the template marks as generated; None when it marks none, or not one for each turn.

    A turn without reasoning starts no earlier than its proven start: an empty thinking block may be marked.
    """
    template = view.tokenizer.get_chat_template(tools=view.tools)
    if view.guarded or not turns or "endgeneration" not in template:
        return None
    render: Callable[..., tuple[list[str], list[list[Region]]]] = render_jinja_template  # type: ignore[assignment]
    try:
        rendered, marked = render(
            [view.messages], tools=view.tools, chat_template=template, return_assistant_tokens_mask=True,
            **view.tokenizer.special_tokens_map, **view.template_arguments(),
        )  # fmt: skip
    except Exception:  # the text came from another spelling
        return None
    if rendered[0] != text or len(marked[0]) != len(turns):
        return None
    regions = []
    for turn, (start, end) in zip(turns, marked[0], strict=True):
        if not reasoning_of(view.messages[turn]) and (proven := _one_by_one(view, text, turn)) is not None:
            start = max(start, proven[0])
        regions.append((start, end))
    return regions


def reasoning_of(message: Message) -> str:
    """The non-blank thinking text of an assistant message, from its own field or from its content, else ''."""
    for name in REASONING:
        if isinstance(message.get(name), str) and message[name].strip():
            return message[name].strip()
    content = message.get("content")
    return split_reasoning(content)[0].strip() if isinstance(content, str) else ""


def split_reasoning(content: str) -> tuple[str, str]:
    """The thinking in an answer's text ('' when there is none), and the text after it."""
    for opening, closing in THINKING:
        thinking, found, rest = content.partition(closing)
        if found:
            return thinking.split(opening)[-1].strip("\n"), rest.lstrip("\n")
    return "", content


def with_reasoning(message: Message) -> Message:
    """The thinking of an assistant message under every name templates look for."""
    given = next((message[name] for name in REASONING if isinstance(message.get(name), str)), None)
    return dict(message) if given is None else {**message, **dict.fromkeys(REASONING, given)}


def without_reasoning(message: Message) -> Message:
    """The message without its thinking, in a field of its own or in its content."""
    kept = {key: value for key, value in message.items() if key not in REASONING}
    if message.get("role") == "assistant" and isinstance(kept.get("content"), str):
        kept["content"] = split_reasoning(kept["content"])[1]
    return kept


def _all_at_once(view: View, text: str, turns: list[int]) -> list[Region] | None:
    """Regions of plain answers from one more rendering, in which every answer is a marker; None if not proven."""
    if not turns:
        return []
    if any(view.messages[turn].get("tool_calls") or reasoning_of(view.messages[turn]) for turn in turns):
        return None
    probe = list(view.messages)
    markers = [MARKER.format(turn) for turn in turns]
    for turn, marker in zip(turns, markers, strict=True):
        probe[turn] = {"role": "assistant", "content": marker}
    try:
        rest = view.render(probe)
    except ChatError:
        return None
    fixed: list[str] = []
    for marker in markers:
        before, found, rest = rest.partition(marker)
        if not found:
            return None
        fixed.append(before)
    fixed.append(rest)
    if not text.startswith(fixed[0]):
        return None
    regions, position = [], len(fixed[0])
    for turn, following in zip(turns, fixed[1:], strict=True):
        content = view.messages[turn].get("content") or ""
        if not isinstance(content, str):
            return None
        if view.guarded:
            content = view.control.guard(content)
        answer = next((a for a in (content, content.strip()) if text.startswith(a + following, position)), None)
        if answer is None:
            return None
        regions.append((position, position + len(answer)))
        position += len(answer) + len(following)
    return regions if position == len(text) else None


def _one_by_one(view: View, text: str, turn: int) -> Region | None:
    """Region of one turn: equal text before and after a marker in its place; None when not proven.

    A turn with reasoning starts where its generation prompt ends. Where the text after the turn depends on it (results
    that a template attaches to their calls), the turn ends where the conversation up to it ends. A turn of which the
    template dropped the reasoning or a tool call is not what the model wrote, so it has no region.
    """
    message = view.messages[turn]
    marker = MARKER.format(turn)
    probe = [*view.messages[:turn], {"role": "assistant", "content": marker}, *view.messages[turn + 1 :]]
    try:
        before, found, after = view.render(probe).partition(marker)
        if not found:
            return None
        if text.endswith(after):
            end = len(text) - len(after)
        else:
            head = view.render(view.messages[: turn + 1]).rstrip()
            if not text.startswith(head):
                return None
            end = len(head)
        reasoning = reasoning_of(message)
        if reasoning or not text.startswith(before):
            before = view.render(view.messages[:turn], prompt=True)
        if not text.startswith(before) or len(before) > end:
            return None
    except ChatError:
        return None
    calls = [call.get("function", call).get("name", "") for call in message.get("tool_calls") or []]
    shown = text[len(before) : end]
    if any((view.control.guard(part) if view.guarded else part) not in shown for part in (reasoning, *calls)):
        return None
    return len(before), end
