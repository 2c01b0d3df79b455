"""Batched decoding, plain and speculative in one loop: rows join, draft, are verified, commit and leave. Knows any
drafter through a protocol, and neither suites nor metrics.

Letters: B active rows, G block, k proposals of a round, T = k + 1 tokens of a verification, F concatenated taps.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspec.models.protocol import Drafter as Drafter
from deepspec.models.protocol import Proposal as Proposal
from deepspec.models.sampling import Distribution, Sampling
from deepspec.models.target import Target
from deepspec.models.timings import Timings as Timings
from deepspec.models.verify import CONDITIONAL, Threshold, verify

# Part of what names a recorded run. Raise it with any change after which the same seed and options give other tokens,
# other rounds or another meaning of a round's numbers; 1 offered fewer drafts near the token limit.
DECODE_SEMANTICS = 2

# confidence_BG (on the CPU, 0 where a row cannot offer a token) → lengths_B, tensor or array. Lossless only if what it
# decides about x_k it decides from x_<k: see Threshold and deepspec/eval/scheduler.py.
Schedule = Callable[[Tensor], Any]
_PREFILL_TOKENS = 8192  # padded tokens of one prefill
_LOGITS_AT_ONCE = 1 << 26  # fp32 values of the logits held at once when only their argmax is needed


class DecodeError(ValueError):
    """Options of ``generate`` that contradict each other or the drafter."""


class PromptError(ValueError):
    """A prompt that cannot be decoded: empty, too long, or with unknown tokens."""


@dataclass(frozen=True)
class Round:
    """One verification of one row. ``confidence`` covers the whole block, also where nothing was offered. ``committed``
    is accepted + 1 except where a stop token cut the block. In the last round of an answer that reached the token limit
    it counts the tokens beyond the limit too: they were verified, the answer only has no room for them."""

    proposed: int
    accepted: int
    confidence: tuple[float, ...] | None = None
    committed: int = 0


@dataclass
class Completion:
    """``tokens`` end with the stop token when finish_reason is "stop". The first token comes from the prefill and
    belongs to no round. ``seconds`` run from the row's prefill to its end; ``share`` is the row's part of the seconds
    of the run, in which every step's are shared by the rows active in it."""

    index: int
    tokens: list[int]
    finish_reason: str
    rounds: list[Round]
    seconds: float
    share: Timings


@dataclass
class _Row:
    index: int
    prompt: Sequence[int]
    uniforms: Tensor | None
    started: float
    share: Timings
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str | None = None


def prompt_problem(target: Target, prompt: Sequence[int], max_new_tokens: int) -> str | None:
    """Why this prompt cannot be decoded, or None."""
    if len(prompt) == 0:
        return "it has no tokens; give at least one (for instance the beginning-of-sequence token)"
    limit = target.config.max_position_embeddings
    if len(prompt) + max_new_tokens > limit:
        return (
            f"its {len(prompt)} tokens and {max_new_tokens} new ones exceed the {limit} positions of {target.name}; "
            "shorten it or lower max_new_tokens"
        )
    if min(prompt) < 0 or max(prompt) >= target.vocab_size:
        return f"it has token ids outside 0…{target.vocab_size - 1}; was it encoded with another tokenizer?"
    return None


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 1,
    block: int | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    confidence_threshold: float | None = None,
    threshold_on: str = CONDITIONAL,
    schedule: Schedule | None = None,
    greedy_draft: bool = False,
    indices: Sequence[int] | None = None,
    timings: Timings | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Completion]:
    """Decode token-id ``prompts``, yielding each as it ends; ``drafter=None`` is plain decoding.

    The output distribution is the target's at any drafter, block, schedule and batch size, and at temperature 0 the
    tokens are those of plain greedy decoding. Draws come from (seed, index), so a prompt's answer does not depend on
    its batch; ``indices`` replaces 0, 1, … where the prompts are a part of a larger set. ``stop_ids`` default to the
    target's. ``progress`` is called each round with the number of new tokens. A whole block is verified near the token
    limit too, so that acceptance does not depend on it; a shorter one only where the target has no more positions.
    Raises PromptError for a prompt that cannot be decoded and DecodeError for options; both before any work.
    """
    if max_new_tokens < 1 or batch_size < 1:
        raise DecodeError(f"max_new_tokens ({max_new_tokens}) and batch_size ({batch_size}) must be positive")
    if confidence_threshold is not None:
        if schedule is not None:
            raise DecodeError("give confidence_threshold or schedule, not both")
        schedule = Threshold(confidence_threshold, threshold_on)
    numbers = range(len(prompts)) if indices is None else indices
    if len(numbers) != len(prompts):
        raise DecodeError(f"{len(numbers)} indices for {len(prompts)} prompts")
    for number, prompt in zip(numbers, prompts, strict=True):
        if (problem := prompt_problem(target, prompt, max_new_tokens)) is not None:
            raise PromptError(f"prompt {number} cannot be decoded: {problem}")
    proposals = _block(drafter, block, schedule)
    longest = max((len(prompt) for prompt in prompts), default=0)
    options = _Options(
        sampling=sampling or Sampling(),
        block=proposals,
        max_new_tokens=max_new_tokens,
        rows=min(batch_size, len(prompts)),
        # The last block may reach beyond the token limit.
        max_length=longest + max_new_tokens + proposals,
        stop_ids=frozenset(target.stop_ids if stop_ids is None else stop_ids),
        schedule=schedule,
        greedy_draft=greedy_draft,
        seed=seed,
    )
    return _Loop(target, drafter, options, timings).run(deque(zip(numbers, prompts, strict=True)), progress)


def _block(drafter: Drafter | None, block: int | None, schedule: Schedule | None) -> int:
    """Proposals per round, 0 without a drafter."""
    if drafter is None:
        if block or schedule is not None:
            raise DecodeError("block, confidence_threshold and schedule need a drafter")
        return 0
    if block is not None and not 1 <= block <= drafter.block_size:
        raise DecodeError(f"block {block} is outside 1…{drafter.block_size}, the drafter's block size")
    return block or drafter.block_size


@dataclass(frozen=True)
class _Options:
    sampling: Sampling
    block: int
    max_new_tokens: int
    rows: int
    max_length: int
    stop_ids: frozenset[int]
    schedule: Schedule | None
    greedy_draft: bool
    seed: int


class _Loop:
    """Row b of the cache, of the drafter's state and of ``rows`` are the same conversation."""

    def __init__(self, target: Target, drafter: Drafter | None, options: _Options, timings: Timings | None) -> None:
        self.target, self.drafter, self.options = target, drafter, options
        self.sampling, self.block = options.sampling, options.block
        self.taps: Sequence[int] | bool = tuple(getattr(drafter, "taps", None) or ()) or False
        self.rows: list[_Row] = []
        self.cache = target.new_cache(options.rows, options.max_length)
        self.state: Any = drafter.start(options.rows, options.max_length) if drafter is not None else None
        self.timings, self._synchronise = timings or Timings(), timings is not None
        self._mark = time.perf_counter()

    def run(
        self, waiting: deque[tuple[int, Sequence[int]]], progress: Callable[[int], None] | None
    ) -> Iterator[Completion]:
        """Admit, run a round, retire, until nothing is left."""
        self._mark = time.perf_counter()
        while waiting or self.rows:
            before = self.timings.tokens
            self._admit(waiting)
            yield from self._retire()
            if self.rows:
                self._round()
                yield from self._retire()
            if progress is not None:
                progress(self.timings.tokens - before)

    @torch.inference_mode()
    def _admit(self, waiting: deque[tuple[int, Sequence[int]]]) -> None:
        free = min(self.options.rows - len(self.rows), len(waiting))
        new = [self._new_row(*waiting.popleft()) for _ in range(free)]
        # Neighbours in length share a prefill: attention still pays for padding, everything else does not.
        for group in prefill_groups(sorted(new, key=lambda row: len(row.prompt))):
            self._prefill(group)
        if new:
            self._lap("prefill", new)

    def _new_row(self, index: int, prompt: Sequence[int]) -> _Row:
        uniforms = None
        if not self.sampling.greedy:
            generator = torch.Generator().manual_seed((self.options.seed * 0x9E3779B97F4A7C15 + index) % (1 << 63))
            # One row per round: G for the draft, G for acceptance, one for the target's own token.
            uniforms = torch.rand(self.options.max_new_tokens, 2 * self.block + 1, generator=generator)
        return _Row(index, prompt, uniforms, time.perf_counter(), Timings())

    def _prefill(self, group: list[_Row]) -> None:
        counts = [len(row.prompt) for row in group]
        new = self.cache.add(len(group))
        tokens_BT1 = torch.zeros(len(group), max(counts) + 1, dtype=torch.long)
        for b, row in enumerate(group):
            tokens_BT1[b, : counts[b]] = torch.as_tensor(row.prompt)
        tokens_BT1 = tokens_BT1.to(self.target.device)
        view = self.cache.rows_view(new.start, new.stop)
        states = self.target(tokens_BT1[:, :-1], lengths_B=counts, cache=view, taps=self.taps)
        row_B = torch.arange(len(group), device=self.target.device)
        counts_B = torch.tensor(counts).to(self.target.device)
        p = Distribution.of(self.target.logits(states.last_BTD[row_B, counts_B - 1]), self.sampling)
        first_B = p.sample(self._uniforms(group)[:, -1])
        if self.drafter is not None:
            tokens_BT1[row_B, counts_B] = first_B
            self.state.add(len(group))
            self.drafter.extend(self.state, tokens_BT1, states.taps_BTF, counts_B, rows=new)
        for row, token in zip(group, first_B.tolist(), strict=True):
            self._commit(row, [token])
        self.rows.extend(group)

    @torch.inference_mode()
    def _round(self) -> None:
        device = self.target.device
        anchor_B = torch.tensor([row.tokens[-1] for row in self.rows]).to(device)
        uniforms = self._uniforms(self.rows)
        self._lap("other", self.rows)
        proposal, lengths = self._propose(anchor_B, uniforms)
        self._lap("draft", self.rows)
        width = max(lengths)
        draft_Bk = anchor_B.new_empty(len(lengths), 0) if proposal is None else proposal.tokens_BG[:, :width]
        tokens_BT = torch.cat([anchor_B[:, None], draft_Bk], 1)
        counts = [length + 1 for length in lengths]
        starts = self.cache.host_lengths.clone()
        states = self.target(tokens_BT, lengths_B=counts, cache=self.cache, taps=self.taps)
        p = self._distribution(states.last_BTD, counts)
        q = p[:, :0] if proposal is None else proposal.q[:, :width]
        accept_uniforms = torch.cat([uniforms[:, self.block : self.block + width], uniforms[:, -1:]], 1)
        accepted_B, next_B = verify(p, draft_Bk, q, torch.tensor(lengths).to(device), accept_uniforms)
        # What the row commits comes over in one copy: what was accepted, the target's token, and the draft. Confidences
        # follow below, and for a schedule they came before: those copies wait for the device too.
        host = torch.cat([accepted_B[:, None], next_B[:, None], draft_Bk], 1).tolist()
        self._lap("verify", self.rows)
        self.cache.truncate(starts + torch.tensor([line[0] + 1 for line in host]))
        if self.drafter is not None:
            padded_BT1 = torch.cat([tokens_BT, next_B[:, None]], 1)
            following_BT1 = padded_BT1.scatter_(1, accepted_B[:, None] + 1, next_B[:, None])
            self.drafter.extend(self.state, following_BT1, states.taps_BTF, accepted_B + 1)
            self._lap("draft", self.rows)
        confidence = None if proposal is None or proposal.confidence_BG is None else proposal.confidence_BG.tolist()
        for b, (row, line) in enumerate(zip(self.rows, host, strict=True)):
            block_confidence = None if confidence is None else tuple(confidence[b])
            committed = self._commit(row, [*line[2 : 2 + line[0]], line[1]])
            row.rounds.append(Round(lengths[b], line[0], block_confidence, committed))
        self.timings.rounds += 1

    def _propose(self, anchor_B: Tensor, uniforms: Tensor) -> tuple[Proposal | None, list[int]]:
        """The block, and how many of its tokens each row offers: what the schedule says, and never more than the target
        has positions for. Without a schedule each row's number depends on that row alone."""
        if self.drafter is None:
            return None, [0] * len(self.rows)
        positions = self.target.config.max_position_embeddings
        limits = [min(self.block, positions - len(row.prompt) - len(row.tokens)) for row in self.rows]
        proposal = self.drafter.propose(
            self.state, anchor_B, self.sampling, uniforms[:, : self.block], self.block, self.options.greedy_draft
        )
        if proposal.lengths_B is not None:
            limits = [min(pair) for pair in zip(proposal.lengths_B.tolist(), limits, strict=True)]
        if self.options.schedule is None:
            return proposal, limits
        if proposal.confidence_BG is None:
            raise DecodeError("a confidence threshold or schedule needs a drafter with a confidence head")
        beyond_BG = torch.arange(self.block) >= torch.tensor(limits)[:, None]
        lengths = torch.as_tensor(self.options.schedule(proposal.confidence_BG.cpu().masked_fill(beyond_BG, 0.0)))
        return proposal, [min(pair) for pair in zip(lengths.tolist(), limits, strict=True)]

    def _distribution(self, last_BTD: Tensor, counts: list[int]) -> Distribution:
        """p after each verified token. At temperature 0 the logits exist only a few rows at a time."""
        rows, width = last_BTD.shape[:2]
        if min(counts) == width and not self.sampling.greedy:
            return Distribution.of(self.target.logits(last_BTD), self.sampling)
        flat_ND = last_BTD.flatten(0, 1)
        real = None
        if min(counts) < width:
            index = [b * width + step for b, count in enumerate(counts) for step in range(count)]
            real = torch.tensor(index).to(last_BTD.device)
            flat_ND = flat_ND[real]
        vocab = self.target.vocab_size
        if self.sampling.greedy:
            parts = flat_ND.split(max(1, _LOGITS_AT_ONCE // vocab))
            ids_N = torch.cat([self.target.logits(part).argmax(-1) for part in parts])
            if real is not None:
                ids_N = ids_N.new_zeros(rows * width).index_copy_(0, real, ids_N)
            return Distribution.one_hot(ids_N.view(rows, width), vocab)
        logits_NV = self.target.logits(flat_ND)
        assert real is not None
        padded = logits_NV.new_zeros(rows * width, vocab).index_copy_(0, real, logits_NV)
        return Distribution.of(padded.view(rows, width, vocab), self.sampling)

    def _uniforms(self, rows: list[_Row]) -> Tensor:
        """[B, 2G+1] of the coming round; zeros at temperature 0, where nothing is drawn."""
        if self.sampling.greedy:
            return torch.zeros(len(rows), 2 * self.block + 1, device=self.target.device)
        # Each committed token uses up at least one line, so lines are never reused.
        lines = [row.uniforms[len(row.tokens)] for row in rows]  # type: ignore[index]
        return torch.stack(lines).to(self.target.device)

    def _commit(self, row: _Row, tokens: list[int]) -> int:
        """Append up to and including the first stop token, as far as the token limit leaves room; returns how many
        there were with those beyond the limit."""
        stops = [at for at, token in enumerate(tokens) if token in self.options.stop_ids]
        count = stops[0] + 1 if stops else len(tokens)
        room = self.options.max_new_tokens - len(row.tokens)
        row.tokens.extend(tokens[: min(count, room)])
        if stops and count <= room:
            row.finish_reason = "stop"
        elif count >= room:
            row.finish_reason = "length"
        self.timings.tokens += min(count, room)
        return count

    def _retire(self) -> Iterator[Completion]:
        for b in reversed(range(len(self.rows))):
            row = self.rows[b]
            if row.finish_reason is None:
                continue
            self.cache.remove(b)
            if self.state is not None:
                self.state.remove(b)
            self.rows[b] = self.rows[-1]
            self.rows.pop()
            seconds = time.perf_counter() - row.started
            yield Completion(row.index, row.tokens, row.finish_reason, row.rounds, seconds, row.share)

    def _lap(self, name: str, rows: Sequence[_Row]) -> None:
        """Book the time since the last lap, in equal shares to ``rows``."""
        if self._synchronise and self.target.device.type != "cpu":
            torch.accelerator.synchronize(self.target.device)
        now = time.perf_counter()
        elapsed = now - self._mark
        self.timings.add(name, elapsed)
        for row in rows:
            row.share.add(name, elapsed / len(rows))
        self._mark = now


def prefill_groups(rows: list[_Row]) -> list[list[_Row]]:
    """Cut rows sorted by prompt length where the longest would exceed 1.5 times the shortest plus 16 tokens, or the
    padded size a fixed budget."""
    groups: list[list[_Row]] = []
    for row in rows:
        length = len(row.prompt)
        alike = bool(groups) and length <= 1.5 * len(groups[-1][0].prompt) + 16
        if alike and (len(groups[-1]) + 1) * length <= _PREFILL_TOKENS:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
