"""Teacher-forced scores of answers: how far each token lies below the target's largest logit given its own prefix.

Letters: R rows of a forward, T tokens of a forward, A tokens of an answer, N scored positions, D hidden size,
V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.models.target import Target

_LOGITS_AT_ONCE = 1 << 24  # fp32 values of the logits held at once
_GROUP_TOKENS = 8192  # padded tokens of the answers that are scored together


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and of an answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def size(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Shape:
    """How texts are cut into forwards. Logits of one position differ between two shapes by rounding alone."""

    step: int  # tokens of an answer that one forward reads
    halves: bool  # whether the prompt is read in two forwards
    rows: int  # answers of a forward at most


WHOLE = Shape(step=1024, halves=False, rows=64)
PARTS = Shape(step=8, halves=True, rows=8)  # about what a round of speculative decoding verifies


@dataclass(frozen=True)
class Scores:
    """Logits along an answer, on the CPU. Position a is the one that token a was chosen at; A is the answer's end."""

    pair_A2: Tensor  # ids of the largest and the second largest logit (or the pair that was asked for)
    lead_A: Tensor  # logit of the pair's first token minus logit of its second
    gap_A: Tensor  # largest logit minus the logit of the answer's token, ≥ 0
    stop_gap: float  # at the answer's end: largest logit minus the largest of a stop token; inf without stop tokens
    largest: float  # largest absolute value of a logit seen


@torch.inference_mode()
def score(
    target: Target,
    texts: Sequence[Text],
    stop_ids: Sequence[int],
    shape: Shape = WHOLE,
    pairs: Sequence[Tensor] | None = None,
) -> list[Scores]:
    """Scores of ``texts`` in their order. ``pairs`` [A, 2] of each text replace its own two largest in ``lead_A``.

    Memory is bounded by one forward over _GROUP_TOKENS tokens with its cache and by _LOGITS_AT_ONCE logits.
    """
    out: dict[int, Scores] = {}
    order = sorted(range(len(texts)), key=lambda index: texts[index].size)
    for group in _groups(order, texts, shape):
        states = _states(target, [texts[index] for index in group], shape)
        for index, states_ND in zip(group, states, strict=True):
            pair_A2 = None if pairs is None else pairs[index]
            out[index] = _scores(target, states_ND, texts[index].answer, stop_ids, pair_A2)
    return [out[index] for index in range(len(texts))]


def _groups(order: Sequence[int], texts: Sequence[Text], shape: Shape) -> Iterator[list[int]]:
    """Neighbours in length, as many as a forward takes."""
    group: list[int] = []
    for index in order:
        padded = (len(group) + 1) * texts[index].size
        if group and (len(group) == shape.rows or padded > _GROUP_TOKENS):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _pieces(text: Text, shape: Shape) -> list[tuple[int, ...]]:
    """The text in the parts that follow each other through the cache."""
    middle = len(text.prompt) // 2 if shape.halves else 0
    parts = [text.prompt[:middle], text.prompt[middle:]]
    parts += [text.answer[at : at + shape.step] for at in range(0, len(text.answer), shape.step)]
    return [part for part in parts if part]


def _states(target: Target, texts: Sequence[Text], shape: Shape) -> list[Tensor]:
    """States [A + 1, D] of each text, from the prompt's last token to the answer's last."""
    pieces = [_pieces(text, shape) for text in texts]
    rounds = max(len(parts) for parts in pieces)
    # A row that has ended reads a filler token in every further forward: a forward takes no empty rows.
    longest = max(text.size + rounds - len(parts) for text, parts in zip(texts, pieces, strict=True))
    cache = target.new_cache(len(texts), longest)
    cache.add(len(texts))
    read = [0] * len(texts)
    kept: list[list[Tensor]] = [[] for _ in texts]
    for step in range(rounds):
        parts = [line[step] if step < len(line) else (0,) for line in pieces]
        lengths = [len(part) for part in parts]
        tokens_RT = torch.zeros(len(parts), max(lengths), dtype=torch.long)
        for row, part in enumerate(parts):
            tokens_RT[row, : lengths[row]] = torch.tensor(part)
        device_RT = tokens_RT.to(target.device)
        last_RTD = target(device_RT, lengths_B=lengths, cache=cache, taps=False).last_BTD
        for row, text in enumerate(texts):
            skipped = max(0, len(text.prompt) - 1 - read[row])
            stop = min(lengths[row], text.size - read[row])
            if skipped < stop:
                kept[row].append(last_RTD[row, skipped:stop])
            read[row] += lengths[row]
    return [torch.cat(parts) for parts in kept]


def _scores(
    target: Target,
    states_ND: Tensor,
    answer: Sequence[int],
    stop_ids: Sequence[int],
    pair_A2: Tensor | None,
) -> Scores:
    count = len(answer)
    token_A = torch.tensor(answer, dtype=torch.long, device=target.device)
    pairs, leads, gaps = [], [], []
    stop_gap, largest = float("inf"), 0.0
    at_once = max(1, _LOGITS_AT_ONCE // target.vocab_size)
    for start in range(0, count + 1, at_once):
        logits_NV = target.logits(states_ND[start : start + at_once]).float()
        stop = min(start + len(logits_NV), count)
        at_answer_NV = logits_NV[: stop - start]
        top = at_answer_NV.topk(2, dim=-1)
        pair_N2 = top.indices if pair_A2 is None else pair_A2[start:stop].to(target.device)
        of_pair_N2 = at_answer_NV.gather(1, pair_N2)
        of_token_N = at_answer_NV.gather(1, token_A[start:stop, None])[:, 0]
        pairs.append(pair_N2.cpu())
        leads.append((of_pair_N2[:, 0] - of_pair_N2[:, 1]).cpu())
        gaps.append((top.values[:, 0] - of_token_N).cpu())
        largest = max(largest, float(logits_NV.abs().max()))
        if start + len(logits_NV) == count + 1 and stop_ids:
            end_V = logits_NV[-1]
            stop_gap = float(end_V.max() - end_V[list(stop_ids)].max())
    return Scores(torch.cat(pairs), torch.cat(leads), torch.cat(gaps), stop_gap, largest)
