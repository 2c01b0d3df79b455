"""Drafters that need no training: prompt lookup, and a plain small language model (Leviathan et al. 2211.17192).

Letters: B active rows, T new tokens, G block, F concatenated taps (unused here), V vocabulary.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspec.models.decode import Proposal
from deepspec.models.kv_cache import KVCache
from deepspec.models.sampling import Distribution, Sampling
from deepspec.models.target import Target


class BaselineError(ValueError):
    """A baseline that does not fit the target or its own options."""


@dataclass
class _History:
    """Tokens of one row, and for each n-gram the position after its latest occurrence."""

    tokens: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: list[int], sizes: range) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for size in sizes:
                if size <= end:
                    self.after[tuple(self.tokens[end - size :])] = end

    def continuation(self, anchor: int, sizes: range, length: int) -> list[int]:
        """What followed the longest n-gram ending in the anchor the last time it occurred; may be empty."""
        for size in reversed(sizes):
            suffix = (*self.tokens[len(self.tokens) - size + 1 :], anchor) if size > 1 else (anchor,)
            at = self.after.get(suffix) if len(suffix) == size else None
            if at is not None:
                following = self.tokens[at : at + length]
                # The text may run out at the anchor itself: what came after the n-gram then starts over.
                return following if len(following) == length else [*following, anchor]
        return []


class _LookupState:
    def __init__(self) -> None:
        self.rows: list[_History] = []

    def add(self, count: int = 1) -> None:
        self.rows.extend(_History() for _ in range(count))

    def remove(self, row: int) -> None:
        self.rows[row] = self.rows[-1]
        self.rows.pop()


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of the last tokens. q is one-hot; a row without a match
    proposes nothing."""

    taps = None

    def __init__(self, vocab_size: int, block_size: int = 7, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise BaselineError(f"n-gram sizes {min_ngram}…{max_ngram} must be ascending and positive")
        if block_size < 1:
            raise BaselineError(f"block_size must be positive, got {block_size}")
        self.vocab_size, self.block_size = vocab_size, block_size
        self.sizes = range(min_ngram, max_ngram + 1)

    def start(self, rows: int, max_length: int) -> _LookupState:
        """An empty state; neither rows nor length need room."""
        return _LookupState()

    def extend(
        self,
        state: _LookupState,
        tokens_BT1: Tensor,
        taps_BTF: Tensor | None,
        counts_B: Tensor,
        rows: slice | None = None,
    ) -> None:
        """Remember the new tokens."""
        histories = state.rows if rows is None else state.rows[rows]
        for history, tokens, count in zip(histories, tokens_BT1.tolist(), counts_B.tolist(), strict=True):
            history.extend(tokens[:count], self.sizes)

    def propose(
        self,
        state: _LookupState,
        anchor_B: Tensor,
        sampling: Sampling,
        uniforms_BG: Tensor,
        length: int,
        greedy: bool = False,
    ) -> Proposal:
        """The continuations found, with their lengths."""
        anchors = anchor_B.tolist()
        found = [row.continuation(a, self.sizes, length) for row, a in zip(state.rows, anchors, strict=True)]
        padded = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens in found], dtype=torch.long)
        tokens_BG = padded.to(anchor_B.device)
        lengths_B = torch.tensor([len(tokens) for tokens in found])
        return Proposal(tokens_BG, Distribution.one_hot(tokens_BG, self.vocab_size), lengths_B=lengths_B)


class _CausalState:
    """The small model's cache, ``ahead`` of the committed text by the last proposal; ``pending`` are committed tokens
    it has not seen."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.ahead = 0
        self.pending: list[list[int]] = []

    def add(self, count: int = 1) -> None:
        self.cache.add(count)
        self.pending.extend([] for _ in range(count))

    def remove(self, row: int) -> None:
        self.cache.remove(row)
        self.pending[row] = self.pending[-1]
        self.pending.pop()


class CausalDrafter:
    """Any small causal LM with the target's tokenizer, drafting token by token with its own cache."""

    taps = None

    def __init__(self, model: Target, vocab_size: int, block_size: int = 5) -> None:
        """``vocab_size`` is the target's; paddings may differ, as long as the real tokens are the same."""
        if block_size < 1:
            raise BaselineError(f"block_size must be positive, got {block_size}")
        if abs(model.vocab_size - vocab_size) > 1024:
            raise BaselineError(
                f"draft model {model.name} has {model.vocab_size} tokens, the target {vocab_size}: "
                "they need the same tokenizer"
            )
        self.model, self.vocab_size, self.block_size = model, vocab_size, block_size

    def start(self, rows: int, max_length: int) -> _CausalState:
        """A cache with room for a block beyond the longest row."""
        return _CausalState(self.model.new_cache(rows, max_length + self.block_size))

    def extend(
        self,
        state: _CausalState,
        tokens_BT1: Tensor,
        taps_BTF: Tensor | None,
        counts_B: Tensor,
        rows: slice | None = None,
    ) -> None:
        """New rows are prefilled. Old ones keep what was accepted of their proposal; the rest waits for the next."""
        counts = counts_B.tolist()
        if rows is not None:
            view = state.cache.rows_view(rows.start, rows.stop)
            self.model(self._known(tokens_BT1[:, :-1]), lengths_B=counts, cache=view, taps=False)
            return
        kept = [min(count, state.ahead) for count in counts]
        state.cache.truncate(
            [n - state.ahead + k for n, k in zip(state.cache.host_lengths.tolist(), kept, strict=True)]
        )
        for pending, tokens, keep, count in zip(state.pending, tokens_BT1.tolist(), kept, counts, strict=True):
            pending.extend(tokens[keep:count])
        state.ahead = 0

    def propose(
        self,
        state: _CausalState,
        anchor_B: Tensor,
        sampling: Sampling,
        uniforms_BG: Tensor,
        length: int,
        greedy: bool = False,
    ) -> Proposal:
        """``length`` forwards; the first also reads the pending tokens."""
        lines = [[*pending, anchor] for pending, anchor in zip(state.pending, anchor_B.tolist(), strict=True)]
        counts = [len(line) for line in lines]
        width = max(counts)
        tokens_BT = torch.tensor([line + [0] * (width - len(line)) for line in lines]).to(anchor_B.device)
        for pending in state.pending:
            pending.clear()
        row_B = torch.arange(len(lines), device=anchor_B.device)
        at_B = torch.tensor(counts, device=anchor_B.device) - 1
        drawn: list[Tensor] = []
        distributions: list[Distribution] = []
        for step in range(length):
            states = self.model(self._known(tokens_BT), lengths_B=counts, cache=state.cache, taps=False)
            q = Distribution.of(self._fit(self.model.logits(states.last_BTD[row_B, at_B])), sampling)
            if greedy:
                q = q.argmax_only()
            distributions.append(q)
            drawn.append(q.sample(uniforms_BG[:, step]))
            tokens_BT, counts, at_B = drawn[-1][:, None], [1] * len(lines), torch.zeros_like(at_B)
        state.ahead = length
        return Proposal(torch.stack(drawn, 1), Distribution.stack(distributions))

    def _fit(self, logits_BV: Tensor) -> Tensor:
        """Cut or pad with −inf to the target's vocabulary."""
        missing = self.vocab_size - logits_BV.shape[-1]
        return F.pad(logits_BV, (0, missing), value=-torch.inf) if missing > 0 else logits_BV[..., : self.vocab_size]

    def _known(self, tokens_BT: Tensor) -> Tensor:
        """Target tokens past the small model's padding become its token 0: they cannot be real text."""
        return tokens_BT.where(tokens_BT < self.model.vocab_size, 0)
