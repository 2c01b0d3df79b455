"""Keeps control tokens typed by a user as plain text. Knows a fast tokenizer's added tokens, not templates or spans.

A conversation that contains the text of a control token ("<|im_end|>" in a question about chat formats) is rendered and
tokenised in *guarded* spelling: the control tokens of the template are renamed to one private character each, in the
text and in a copy of the tokenizer, so the user's spelling matches nothing. Ids and splitting are otherwise unchanged.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Encoding, Tokenizer

# Planes 15 and 16 are private use: HIDDEN stands for a user's spelling during rendering, CONTROL for the real token.
HIDDEN, CONTROL = 0x100000, 0xF0000
UNTRUSTED = ("user", "tool", "function", "ipython", "documents")


class ControlTokens:
    """The control tokens of one tokenizer and chat template.

    Special tokens are guarded in every message. Added tokens that are not special but that the template itself writes
    (``<think>``, ``<tool_call>``) are guarded in user and tool messages only: assistant messages use them as markup.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        added = sorted(tokenizer.added_tokens_decoder.items())
        self.special_ids = {index for index, token in added if token.special}
        special = [token.content for _, token in added if token.special and token.content.strip()]
        written = [
            token.content
            for _, token in added
            if not token.special and token.content.strip() and re.search(r"[<\[|]", token.content)
            if token.content in template
        ]
        self.strings = special + written
        self._number = {string: index for index, string in enumerate(self.strings)}
        self._special = _alternatives(special)
        self._all = _alternatives(self.strings)
        self._tokenizer = tokenizer
        self._guarded: Tokenizer | None = None

    def occur_in(self, messages: list[dict[str, Any]], extra: Any = None) -> bool:
        """Whether any text of the conversation (or of ``extra``, e.g. tools) spells a control token."""
        return any(_search(self._pattern(message), message) for message in messages) or _search(self._special, extra)

    def hide(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A copy of the messages with each spelled control token replaced by its private character.

        Raises ValueError when the text already holds private characters of planes 15 or 16.
        """
        if _search(re.compile(r"[\U000f0000-\U0010ffff]"), messages):
            raise ValueError("text holds private-use characters and the spelling of a control token: remove either")
        return [
            {key: value if key == "role" else self._replace(self._pattern(message), value)
             for key, value in message.items()}
            for message in messages
        ]  # fmt: skip

    def hide_tools(self, tools: Any) -> Any:
        """The same for tool descriptions, whose text is the caller's."""
        return self._replace(self._special, tools)

    def guard(self, rendered: str) -> str:
        """Guarded spelling of a rendering of hidden messages: real control tokens become one character each."""
        if self._all is not None:
            rendered = self._all.sub(lambda match: chr(CONTROL + self._number[match.group()]), rendered)
        return re.sub(r"[\U00100000-\U0010ffff]", lambda match: self.strings[ord(match.group()) - HIDDEN], rendered)

    def encode(self, guarded: str) -> Encoding:
        """Tokenise guarded spelling; offsets count its characters."""
        if self._guarded is None:
            self._guarded = _renamed(self._tokenizer.backend_tokenizer, self._number)
        return self._guarded.encode(guarded, add_special_tokens=False)

    def _pattern(self, message: Mapping[str, Any]) -> re.Pattern[str] | None:
        return self._all if message.get("role") in UNTRUSTED else self._special

    def _replace(self, pattern: re.Pattern[str] | None, value: Any) -> Any:
        if pattern is None:
            return value
        if isinstance(value, str):
            return pattern.sub(lambda match: chr(HIDDEN + self._number[match.group()]), value)
        if isinstance(value, Mapping):
            return {key: self._replace(pattern, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._replace(pattern, item) for item in value]
        return value


def _alternatives(strings: list[str]) -> re.Pattern[str] | None:
    """Leftmost-longest match, as the tokenizer's own search for added tokens."""
    ordered = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _search(pattern: re.Pattern[str] | None, value: Any) -> bool:
    if pattern is None or value is None:
        return False
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, Mapping):
        return any(_search(pattern, item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_search(pattern, item) for item in value)
    return False


def _renamed(backend: Tokenizer, number: Mapping[str, int]) -> Tokenizer:
    """A copy of the tokenizer in which control token i is spelled chr(CONTROL + i), with the same ids."""
    state = json.loads(backend.to_str())
    names = {string: chr(CONTROL + index) for string, index in number.items()}
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocabulary = state["model"].get("vocab")
    if isinstance(vocabulary, dict):
        state["model"]["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
    elif isinstance(vocabulary, list):
        state["model"]["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    state["post_processor"] = None
    state["truncation"] = state["padding"] = None
    if "unk_token" in state["model"]:
        state["model"]["unk_token"] = names.get(state["model"]["unk_token"], state["model"]["unk_token"])
    return Tokenizer.from_str(json.dumps(state))
