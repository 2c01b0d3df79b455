"""How many draft tokens of each request the next verification carries (DSpark, confidence-scheduled verification).

Pure array code: knows confidences and an SPS table, no model, no engine. What a policy may look at, and why its output
stays the target's, is in docs/scheduling.md. Shapes: R active requests, G block size γ.

Causality. c[r, j] may depend on x[r, 1..j−1] (the Markov input is x[r, j−1]) but not on x[r, j]. Survival
a[r, j] = Π c[r, ≤j] never rises along j, so walking all candidates by descending a pops a queue that holds one
candidate for each request: the next one after its admitted prefix. Every decision is then a function of confidences
whose inputs were admitted before it, in this request and in all others. Each admitted token is drawn, in that order,
after the decision to admit it, hence the outputs of all requests are jointly the target's. A search over the whole
ranking and then backwards is not: the token it would drop has already been seen.
"""

from collections import deque
from typing import Any, Protocol

import numpy as np

from deepspec.eval.sps import SPSTable
from deepspec.models.verify import CONDITIONAL, ScheduleError, Static, Threshold, probabilities, survival

POLICIES = ("none", "static", "threshold", "causal", "plateau", "async")


class Scheduler(Protocol):
    """Chooses verification lengths, one call for each engine step."""

    name: str

    def __call__(self, confidence_RG: Any, /) -> np.ndarray:
        """confidence_RG, array or CPU tensor: P(x_j accepted | x_<j accepted), 0 where a request offers no token →
        lengths [R] in 0..G.
        """
        ...


def prefix_survival(confidence_RG: Any) -> np.ndarray:
    """Survivals as the walks below take them: float32, position-major [G, R]. Raises ScheduleError outside [0, 1]."""
    return survival(probabilities(confidence_RG)).T


def ranked(survival_GR: np.ndarray) -> np.ndarray:
    """All survivals in descending order, [G·R]."""
    ascending = survival_GR.flatten()
    ascending.sort()
    return ascending[::-1]


def goodput(ranking: np.ndarray, rows: int, curve: np.ndarray) -> np.ndarray:
    """Θ after 0, 1, …, n admissions in ranking order: τ*·SPS(B), tokens/s, float64 [n + 1]."""
    expected = np.empty(len(ranking) + 1)
    expected[0] = rows
    expected[1:] = ranking
    np.add.accumulate(expected, out=expected)
    expected *= curve[rows : rows + len(expected)]
    return expected


def causal_budget(ranking: np.ndarray, rows: int, curve: np.ndarray) -> int:
    """Admissions up to, not including, the first that does not raise Θ (the early stop that keeps it lossless)."""
    theta = goodput(ranking, rows, curve)
    stops = theta[1:] <= theta[:-1]
    first = int(stops.argmax()) if len(stops) else 0
    return first if len(stops) and stops[first] else len(stops)


def best_budget(ranking: np.ndarray, rows: int, curve: np.ndarray) -> int:
    """Admissions that maximise Θ over the whole curve, fewest on a tie. Only for confidences of an earlier step."""
    return int(goodput(ranking, rows, curve).argmax())


def top_lengths(survival_GR: np.ndarray, ranking: np.ndarray, budget: int) -> np.ndarray:
    """Lengths that admit the ``budget`` highest survivals; ties go to the earlier position, then the earlier request.

    A survival of 0 is never admitted. That tie order never rises along a request, so the admitted set is prefix-closed.
    """
    rows = survival_GR.shape[1]
    if budget <= 0 or not len(ranking):
        return np.zeros(rows, dtype=np.int64)
    budget = min(budget, len(ranking))
    lowest = ranking[budget - 1]
    if lowest <= 0:
        return np.add.reduce(survival_GR > 0, axis=0, dtype=np.int64)
    lengths = np.add.reduce(survival_GR >= lowest, axis=0, dtype=np.int64)
    if budget < len(ranking) and ranking[budget] == lowest:
        tied = np.flatnonzero(survival_GR.ravel() == lowest)  # position-major: the tie order
        surplus = int(lengths.sum()) - budget
        np.subtract.at(lengths, tied[len(tied) - surplus :] % rows, 1)
    return lengths


class _Curve:
    """Dense SPS lookup that grows with the largest step asked for."""

    def __init__(self, table: SPSTable) -> None:
        self.table = table
        self.values = table.curve(table.tokens[-1])

    def upto(self, tokens: int) -> np.ndarray:
        if len(self.values) <= tokens:
            self.values = self.table.curve(max(tokens, 2 * len(self.values)))
        return self.values


class Causal:
    """The hardware-aware prefix scheduler: greedy by survival, stopped at the first admission that does not pay."""

    name = "causal"

    def __init__(self, table: SPSTable) -> None:
        self._curve = _Curve(table)

    def __call__(self, confidence_RG: np.ndarray) -> np.ndarray:
        survival_GR = prefix_survival(confidence_RG)
        ranking, rows = ranked(survival_GR), survival_GR.shape[1]
        budget = causal_budget(ranking, rows, self._curve.upto(rows + len(ranking)))
        return top_lengths(survival_GR, ranking, budget)


class Plateau:
    """The causal walk on the convex hull of a step-wise curve, then on to the end of the plateau it stopped on.

    ``Causal`` stands still wherever the next token opens a new kernel tile or graph size, even if the tile would pay
    when filled; with R itself on such an edge it admits nothing. The hull has no edges, and the tokens up to the next
    measured size are free. How many those are depends only on where the walk stopped, so the rule stays causal.
    """

    name = "plateau"

    def __init__(self, table: SPSTable) -> None:
        self._hull = _Curve(table.hull())
        self._sizes = np.asarray(table.tokens)

    def __call__(self, confidence_RG: np.ndarray) -> np.ndarray:
        survival_GR = prefix_survival(confidence_RG)
        ranking, rows = ranked(survival_GR), survival_GR.shape[1]
        size = rows + causal_budget(ranking, rows, self._hull.upto(rows + len(ranking)))
        plateau = int(np.searchsorted(self._sizes, size))
        if plateau < len(self._sizes):
            size = int(self._sizes[plateau])
        return top_lengths(survival_GR, ranking, size - rows)


class Async:
    """Capacity from two steps ago, candidates from now: for zero-overhead scheduling and captured graphs.

    The step size B of step t is the global optimum for the confidences of step t − 2, so it is known while step t − 1
    runs; step t fills it with its own most likely candidates. Requests that came or went in between change the share,
    not B. The first two steps have no history and are scheduled causally.
    """

    name = "async"
    delay = 2

    def __init__(self, table: SPSTable) -> None:
        self._curve = _Curve(table)
        self._sizes: deque[int] = deque(maxlen=self.delay)

    def __call__(self, confidence_RG: np.ndarray) -> np.ndarray:
        survival_GR = prefix_survival(confidence_RG)
        ranking, rows = ranked(survival_GR), survival_GR.shape[1]
        curve = self._curve.upto(rows + len(ranking))
        if len(self._sizes) == self.delay:
            budget = self._sizes[0] - rows
        else:
            budget = causal_budget(ranking, rows, curve)
        self._sizes.append(rows + best_budget(ranking, rows, curve))
        return top_lengths(survival_GR, ranking, budget)


def make_schedule(
    name: str,
    *,
    sps: SPSTable | None = None,
    length: int | None = None,
    threshold: float | None = None,
    threshold_on: str = CONDITIONAL,
) -> Scheduler:
    """A fresh scheduler for one decoding run.

    name: none, static (``length``, required), threshold (``threshold``, default 0.5, and ``threshold_on``, its rule),
    causal, plateau or async (``sps``, required).
    Raises ScheduleError for an unknown name or a missing option.
    """
    if name == "none":
        return Static(0)
    if name == "static":
        if length is None:
            raise ScheduleError("schedule static needs a length: the number of draft tokens to verify")
        return Static(length)
    if name == "threshold":
        return Threshold(0.5 if threshold is None else threshold, threshold_on)
    needs_table: dict[str, type[Causal] | type[Plateau] | type[Async]] = {
        "causal": Causal,
        "plateau": Plateau,
        "async": Async,
    }
    if name in needs_table:
        if sps is None:
            raise ScheduleError(
                f"schedule {name} needs an SPS table: measure one with `python -m deepspec.eval.profile --target …` "
                "and pass --sps"
            )
        return needs_table[name](sps)
    raise ScheduleError(f"unknown schedule {name!r}; one of {', '.join(POLICIES)}")
