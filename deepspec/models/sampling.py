"""One distribution object that both draws and accepts, in fp32. Knows no models.

Letters: B rows, V vocabulary; "..." are any leading dimensions.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

# Below this a temperature is greedy, as in the public DeepSpec: logits divided by it leave float32's range.
SMALLEST_TEMPERATURE = 1e-5
# Above this, logits divided by it would be zeros, and tokens that are ruled out (−inf) would become NaN.
LARGEST_TEMPERATURE = 1e30


class SamplingError(ValueError):
    """A sampling parameter outside its range."""


@dataclass(frozen=True)
class Sampling:
    """Temperature 0, or one below SMALLEST_TEMPERATURE, is greedy; top_k 0, top_p 1 and min_p 0 switch the filters off.
    Filters apply in the order temperature, top-k, top-p, min-p, each on the renormalised survivors (as in
    transformers). Raises SamplingError for values outside their range, NaN included."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= LARGEST_TEMPERATURE:
            raise SamplingError(
                f"temperature must be 0 (greedy) or positive, at most {LARGEST_TEMPERATURE:g}, got {self.temperature}"
            )
        if self.top_k < 0:
            raise SamplingError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise SamplingError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise SamplingError(f"min_p must be in [0, 1], got {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether every draw is the argmax."""
        return self.temperature < SMALLEST_TEMPERATURE


@dataclass
class ModeSampling:
    """Sampling settings as a model's card names them for one mode; None where it names none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass
class CardSampling:
    """What a model's card says to sample with when it thinks and when it answers directly."""

    thinking: ModeSampling = field(default_factory=ModeSampling)
    direct: ModeSampling = field(default_factory=ModeSampling)


class Distribution:
    """Categorical distributions over V for any leading shape: one-hot ids, or filtered fp32 logits with their
    log-normaliser. Dense probabilities exist only where they are asked for."""

    def __init__(self, vocab_size: int, ids: Tensor | None = None, logits: Tensor | None = None) -> None:
        assert (ids is None) != (logits is None)
        self.vocab_size = vocab_size
        self.ids = ids
        self.logits = logits
        self._normaliser = None if logits is None else logits.logsumexp(-1)

    @classmethod
    def of(cls, logits: Tensor, sampling: Sampling) -> "Distribution":
        """From raw logits [..., V]; at temperature 0 only the argmax is taken, never a softmax."""
        if sampling.greedy:
            return cls(logits.shape[-1], ids=logits.argmax(-1))
        return cls(logits.shape[-1], logits=filtered_logits(logits, sampling))

    @classmethod
    def one_hot(cls, ids: Tensor, vocab_size: int) -> "Distribution":
        """All mass on ``ids``: a greedy proposal."""
        return cls(vocab_size, ids=ids)

    @property
    def greedy(self) -> bool:
        """Whether this is one-hot."""
        return self.ids is not None

    @property
    def shape(self) -> torch.Size:
        """Leading shape, without V."""
        return self.ids.shape if self.ids is not None else self.logits.shape[:-1]  # type: ignore[union-attr]

    def argmax(self) -> Tensor:
        """Most probable tokens."""
        return self.ids if self.ids is not None else self.logits.argmax(-1)  # type: ignore[union-attr]

    def argmax_only(self) -> "Distribution":
        """One-hot at the mode: what a greedy proposal is drawn from."""
        return self if self.greedy else Distribution(self.vocab_size, ids=self.argmax())

    def __getitem__(self, index) -> "Distribution":
        """Index the leading dimensions."""
        if self.ids is not None:
            return Distribution(self.vocab_size, ids=self.ids[index])
        picked = Distribution.__new__(Distribution)
        picked.vocab_size, picked.ids = self.vocab_size, None
        picked.logits, picked._normaliser = self.logits[index], self._normaliser[index]  # type: ignore[index]
        return picked

    @staticmethod
    def stack(parts: list["Distribution"], dim: int = -1) -> "Distribution":
        """Stack along a new leading dimension (−1: the last one before V)."""
        vocab_size = parts[0].vocab_size
        if all(part.greedy for part in parts):
            return Distribution(vocab_size, ids=torch.stack([part.argmax() for part in parts], dim))
        if any(part.greedy for part in parts):
            raise SamplingError("cannot stack one-hot and dense distributions")
        at = dim - 1 if dim < 0 else dim
        return Distribution(vocab_size, logits=torch.stack([part.logits for part in parts], at))  # type: ignore[misc]

    def prob(self, tokens: Tensor) -> Tensor:
        """Probability of ``tokens`` (the leading shape), fp32."""
        if self.ids is not None:
            return (self.ids == tokens).float()
        picked = self.logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # type: ignore[union-attr]
        return (picked - self._normaliser).exp()

    def probs(self) -> Tensor:
        """Dense probabilities [..., V], fp32."""
        if self.ids is not None:
            dense = torch.zeros(*self.ids.shape, self.vocab_size, device=self.ids.device)
            return dense.scatter_(-1, self.ids.unsqueeze(-1), 1.0)
        return (self.logits - self._normaliser.unsqueeze(-1)).exp_()  # type: ignore[union-attr]

    def sample(self, uniforms: Tensor) -> Tensor:
        """Inverse CDF at ``uniforms`` in [0, 1) of the leading shape: the first token whose cumulative sum exceeds."""
        return self.ids if self.ids is not None else inverse_cdf(self.probs(), uniforms)

    def residual(self, other: "Distribution") -> Tensor:
        """Weights of norm(max(p − q, 0)) for q = ``other``, dense, not normalised (Leviathan et al. 2211.17192).
        Where rounding leaves no mass at all, p itself."""
        weights = self.probs()
        if other.ids is not None:
            remaining = weights.scatter(-1, other.ids.unsqueeze(-1), 0.0)
        else:
            remaining = (weights - other.probs()).clamp_min_(0.0)
        return torch.where(remaining.sum(-1, keepdim=True) > 0, remaining, weights)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Token whose interval of the cumulative weights [..., V] holds u·total; zero weights are never drawn."""
    cumulative = weights.cumsum(-1)
    if cumulative.device.type != "cpu":
        cumulative = rising(cumulative, weights)
    total = cumulative[..., -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(uniforms.unsqueeze(-1).to(total.dtype) * total, below_total)
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)


def rising(cumulative: Tensor, weights: Tensor) -> Tensor:
    """Cumulative weights that rise only where a weight is: sums on accelerators are trees, whose prefixes may differ
    by a rounding where nothing was added, and an interval of a token without weight would be drawn."""
    return torch.where(weights > 0, cumulative, 0.0).cummax(-1).values


def filtered_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """fp32 logits / temperature, −inf where top-k, top-p or min-p remove a token. Keeps at least one token."""
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        threshold = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        # A token stays while the mass before it has not reached top_p.
        dropped = probs.cumsum(-1) - probs >= sampling.top_p
        dropped[..., 0] = False  # even where a tiny top_p is 0 in float32
        scaled = scaled.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    if sampling.min_p > 0.0:
        probs = scaled.softmax(-1)
        scaled = scaled.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scaled
