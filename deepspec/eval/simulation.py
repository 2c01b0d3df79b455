"""A discrete-event model of one serving instance that decodes speculatively. Knows streams, an SPS table and a policy.

One event is one engine step: waiting requests join while there is room, the policy chooses verification lengths, the
clock moves by what the step costs, every request advances by what it got accepted. Vectorised over the requests of a
step.
Shapes: R active requests, G block size γ, Q requests of a stream.
"""

from dataclasses import dataclass

import numpy as np

from deepspec.eval.replay import Stream
from deepspec.eval.scheduler import Scheduler, Static, make_schedule
from deepspec.eval.sps import SPSTable
from deepspec.models.verify import SURVIVAL

POLICIES = ("none", "mtp-1", "static", "threshold", "causal", "plateau", "async")


@dataclass(frozen=True)
class Serving:
    """The load and what a step costs besides the target's pass over its tokens. Times in seconds.

    requests: how many to simulate; concurrency: most active at once; arrival_rate: Poisson arrivals in requests/s, 0 =
    all are waiting from the start (a saturated server). draft_seconds and draft_row_seconds: drafting, for each step
    and for each active request in it; mtp_draft_seconds: the same for the one-token drafter (one layer instead of
    five).
    prefill_tokens_per_second: prompts of joining requests hold the step up by their tokens over this rate, 0 = free.
    padded: a step costs R · (longest ℓ + 1) tokens, as in a decoder that verifies a rectangle, instead of R + Σℓ.
    """

    requests: int = 2000
    concurrency: int = 64
    arrival_rate: float = 0.0
    draft_seconds: float = 5e-4
    draft_row_seconds: float = 2e-6
    mtp_draft_seconds: float = 1e-4
    prefill_tokens_per_second: float = 0.0
    padded: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be ≥ 1")
        for name in (
            "arrival_rate",
            "draft_seconds",
            "draft_row_seconds",
            "mtp_draft_seconds",
            "prefill_tokens_per_second",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be ≥ 0")


@dataclass(frozen=True)
class Outcome:
    """What the server did in the measured window (after warm-up, before the queue drains when saturated).

    throughput: output tokens/s of the instance; user_speed: output tokens/s of one active request; budget: draft tokens
    verified for each request and step; tau: tokens committed for each request and step; acceptance: accepted share of
    the verified draft tokens; latency: mean seconds from arrival to the last token (all finished requests).
    """

    policy: str
    concurrency: int
    throughput: float
    user_speed: float
    budget: float
    tau: float
    acceptance: float
    active: float
    latency: float
    steps: int
    requests: int


def policy_of(name: str, table: SPSTable, *, length: int, threshold: float) -> Scheduler:
    """The scheduler of a simulated policy; "mtp-1" verifies one token, "threshold" is on the survival."""
    if name == "mtp-1":
        return Static(1)
    return make_schedule(name, sps=table, length=length, threshold=threshold, threshold_on=SURVIVAL)


class _Totals:
    """Sums over steps; a window is a difference of two snapshots."""

    def __init__(self) -> None:
        self.seconds = self.request_seconds = 0.0
        self.tokens = self.rows = self.verified = self.accepted = self.steps = 0

    def add(self, seconds: float, rows: int, tokens: int, verified: int, accepted: int) -> None:
        self.seconds += seconds
        self.request_seconds += rows * seconds
        self.rows += rows
        self.tokens += tokens
        self.verified += verified
        self.accepted += accepted
        self.steps += 1

    def snapshot(self) -> np.ndarray:
        return np.array(
            [self.seconds, self.request_seconds, self.tokens, self.rows, self.verified, self.accepted, self.steps],
            float,
        )


class _Requests:
    """Active requests as parallel arrays: their place in the stream, its end, and their arrival time."""

    def __init__(self, stream: Stream, serving: Serving) -> None:
        generator = np.random.default_rng(serving.seed)
        self.stream = stream
        self.source = generator.integers(len(stream.start_Q), size=serving.requests)
        gaps = generator.exponential(1.0, serving.requests)
        rate = serving.arrival_rate
        self.arrival = np.cumsum(gaps) / rate if rate else np.zeros(serving.requests)
        self.arrived = 0  # requests whose arrival time has passed
        self.joined = 0
        self.finished = 0
        self.waited = 0.0  # seconds from arrival to last token, summed over finished requests
        self.token = np.empty(0, dtype=np.int64)
        self.end = np.empty(0, dtype=np.int64)
        self.since = np.empty(0)

    def join(self, now: float, room: int) -> int:
        """Let waiting requests in; returns the prompt tokens to prefill."""
        total = len(self.arrival)
        if self.arrived < total and self.arrival[self.arrived] <= now:
            self.arrived = int(np.searchsorted(self.arrival, now, side="right"))
        count = min(room, self.arrived - self.joined)
        if count <= 0:
            return 0
        chosen = self.source[self.joined : self.joined + count]
        start = self.stream.start_Q[chosen]
        self.token = np.concatenate([self.token, start])
        self.end = np.concatenate([self.end, start + self.stream.length_Q[chosen]])
        self.since = np.concatenate([self.since, self.arrival[self.joined : self.joined + count]])
        self.joined += count
        return int(self.stream.prompt_length_Q[chosen].sum())

    def advance(self, committed: np.ndarray, now: float) -> int:
        """Move on by the committed tokens, drop finished requests; returns output tokens that counted."""
        before = self.token
        self.token = np.minimum(before + committed, self.end)
        tokens = int((self.token - before).sum())
        active = self.token < self.end
        gone = len(active) - int(np.count_nonzero(active))
        if gone:
            self.finished += gone
            self.waited += now * gone - float(self.since[~active].sum())
            self.token, self.end, self.since = self.token[active], self.end[active], self.since[active]
        return tokens


def simulate(stream: Stream, policy: str, table: SPSTable, serving: Serving, *, scheduler: Scheduler) -> Outcome:
    """Serve ``serving.requests`` requests drawn from the stream; ``policy`` names what is drafted (none, mtp-1, else
    γ).
    """
    requests, totals = _Requests(stream, serving), _Totals()
    widest = 1 + stream.block_size
    seconds_of = 1.0 / table.curve(serving.concurrency * widest)
    draft, draft_row = _draft_cost(policy, serving)
    now = 0.0
    warm: np.ndarray | None = None
    end: np.ndarray | None = None
    while requests.finished < serving.requests:
        prompt_tokens = requests.join(now, serving.concurrency - len(requests.token))
        rows = len(requests.token)
        if rows == 0:
            now = float(requests.arrival[requests.joined])
            continue
        lengths = scheduler(stream.confidence_TG[requests.token])
        accepted = np.minimum(stream.accepted_T[requests.token], lengths)
        verified = int(lengths.sum())
        size = rows * (int(lengths.max()) + 1) if serving.padded else rows + verified
        seconds = seconds_of[size] + draft + draft_row * rows
        if prompt_tokens and serving.prefill_tokens_per_second:
            seconds += prompt_tokens / serving.prefill_tokens_per_second
        now += seconds
        totals.add(seconds, rows, requests.advance(accepted + 1, now), verified, int(accepted.sum()))
        if warm is None and requests.finished * 10 >= serving.requests:
            warm = totals.snapshot()
        if end is None and requests.joined == serving.requests and not serving.arrival_rate:
            end = totals.snapshot()
    return _outcome(policy, serving, totals, warm, end, requests)


def _draft_cost(policy: str, serving: Serving) -> tuple[float, float]:
    """Seconds for a step and for each of its requests."""
    if policy == "none":
        return 0.0, 0.0
    if policy == "mtp-1":
        return serving.mtp_draft_seconds, 0.0
    return serving.draft_seconds, serving.draft_row_seconds


def _outcome(
    policy: str,
    serving: Serving,
    totals: _Totals,
    warm: np.ndarray | None,
    end: np.ndarray | None,
    requests: _Requests,
) -> Outcome:
    last = totals.snapshot()
    first = np.zeros_like(last) if warm is None else warm
    if end is not None and end[-1] > first[-1]:
        last = end
    elif end is not None or last[-1] == first[-1]:  # too few requests for a steady window: all of it
        first = np.zeros_like(last)
    seconds, request_seconds, tokens, rows, verified, accepted, steps = last - first
    return Outcome(
        policy=policy,
        concurrency=serving.concurrency,
        throughput=tokens / seconds,
        user_speed=tokens / request_seconds,
        budget=verified / rows,
        tau=tokens / rows,
        acceptance=accepted / verified if verified else 0.0,
        active=rows / steps,
        latency=requests.waited / requests.finished,
        steps=totals.steps,
        requests=serving.requests,
    )
