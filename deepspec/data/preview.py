"""Conversations in the terminal, the supervised tokens coloured. Knows no weights."""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from deepspec.data.chat import ChatError, Encoded, encode
from deepspec.data.config import DataPipelineConfig
from deepspec.data.prompts import read_prompts
from deepspec.data.responses import Response, ResponsesError, encode_row, part_files, read_responses

GREEN, DIM, RESET = "\033[32m", "\033[2m", "\033[0m"


def conversations(config: DataPipelineConfig, wanted: str | None = None) -> Iterator[Response | dict[str, Any]]:
    """Responses if there are any, else prompts; only the one with id ``wanted`` if given (ResponsesError if absent)."""
    rows: Iterator[Response | dict[str, Any]]
    if part_files(config.responses_dir):
        rows = read_responses(config.responses_dir)
    else:
        rows = iter(read_prompts(config.prompts_dir / "train.jsonl"))
    if wanted is None:
        yield from rows
        return
    for row in rows:
        if (row.id if isinstance(row, Response) else row["id"]) == wanted:
            yield row
            return
    raise ResponsesError(f"no conversation '{wanted}' in {config.out}")


def show(
    config: DataPipelineConfig,
    rows: Iterator[Response | dict[str, Any]],
    count: int,
    *,
    ids: bool = False,
    plain: bool = False,
) -> None:
    """Print ``count`` conversations; without a terminal, or with ``plain``, supervised tokens are in ⟦brackets⟧."""
    from deepspec.models.target import load_tokenizer, resolve

    tokenizer = load_tokenizer(resolve(config.target), config.target.revision)
    colour = not plain and sys.stdout.isatty()
    for row in islice(rows, count):
        try:
            if isinstance(row, Response):
                encoded = encode_row(tokenizer, row, max_length=config.cache.max_length)
                title = f"{row.id}  {row.source}  {row.finish_reason}  thinking {'on' if row.thinking else 'off'}"
            else:
                encoded = encode(tokenizer, row["messages"], thinking=config.target.thinking, tools=row.get("tools"))
                title = f"{row['id']}  {row.get('source', '')}  no answer yet"
        except ChatError as error:
            print(f"error: {error}")
            continue
        supervised = sum(end - start for start, end in encoded.spans)
        print(f"── {title}  {len(encoded.tokens)} tokens, {supervised} supervised")
        print(by_token(tokenizer, encoded, colour) if ids else as_text(tokenizer, encoded, colour))


def _mask(encoded: Encoded) -> list[bool]:
    mask = [False] * len(encoded.tokens)
    for start, end in encoded.spans:
        mask[start:end] = [True] * (end - start)
    return mask


def as_text(tokenizer: Any, encoded: Encoded, colour: bool) -> str:
    """The conversation as text, each supervised span marked."""
    on, off = (GREEN, RESET) if colour else ("⟦", "⟧")
    parts, position = [], 0
    for start, end in encoded.spans:
        parts += [
            tokenizer.decode(encoded.tokens[position:start]),
            on,
            tokenizer.decode(encoded.tokens[start:end]),
            off,
        ]
        position = end
    return "".join([*parts, tokenizer.decode(encoded.tokens[position:])])


def by_token(tokenizer: Any, encoded: Encoded, colour: bool) -> str:
    """A line per token: position, id, ● if supervised, text."""
    lines = []
    for position, (token, supervised) in enumerate(zip(encoded.tokens, _mask(encoded), strict=True)):
        style = (GREEN if supervised else DIM) if colour else ""
        text = f"{position:>6} {token:>8} {'●' if supervised else ' '} {tokenizer.decode([token])!r}"
        lines.append(f"{style}{text}{RESET if colour else ''}")
    return "\n".join(lines)
