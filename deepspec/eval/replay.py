"""Token streams to replay: at every output token, what a block drafted there would have offered and got accepted.

Made from recorded rounds (with stated assumptions where nothing was recorded) or by a generator of synthetic requests.
Shapes: T output tokens of all requests one after another, Q requests, G block size γ, N recorded rounds.
"""

from dataclasses import dataclass

import numpy as np

from deepspec.eval.rounds import Rounds, RoundsError


@dataclass(frozen=True)
class Stream:
    """start_Q, length_Q: where a request's output tokens lie and how many; prompt_length_Q in tokens.

    accepted_T: draft tokens accepted of a full block whose anchor is the token before t; confidence_TG: its
    confidences.
    """

    start_Q: np.ndarray
    length_Q: np.ndarray
    prompt_length_Q: np.ndarray
    accepted_T: np.ndarray
    confidence_TG: np.ndarray

    @property
    def block_size(self) -> int:
        """G of the recorded drafter."""
        return self.confidence_TG.shape[1]


def stream_of(rounds: Rounds, *, prompt_length: int = 0, seed: int = 0) -> Stream:
    """Expand recorded rounds into a stream that any policy can walk.

    A recorded round with ``a`` accepted tokens yields a + 1 output tokens. At its anchor the record is used as it is: a
    policy that verifies ℓ tokens commits min(a, ℓ) + 1, exactly what the target would have done. A shorter ℓ leaves the
    policy at a token inside the block, where no block was drafted. There we assume that a fresh block would propose the
    same tokens: it continues with the rest of the recorded block, and, if that was accepted whole, with the token the
    target added (accepted with the block's last confidence; a seeded draw) and then the next recorded block; behind a
    recorded rejection the last confidence is repeated. A nearer anchor predicts better in truth, so this understates
    policies that verify less than the recorded block (by 1 to 1.5 % of τ on ``synthetic``); recording with the length
    in question removes the bias. Rounds must offer their full block; a shorter one (recorded under a schedule) is
    refused unless it was rejected inside, because what lies beyond is unknown.
    """
    block = rounds.block_size
    _refuse_censored(rounds, block)
    _, first_N = np.unique(rounds.prompt_N, return_index=True)
    size_N = rounds.accepted_N + 1
    total = int(size_N.sum())
    begin_N = np.cumsum(size_N) - size_N
    owner_T = np.repeat(np.arange(len(rounds)), size_N)
    offset_T = np.arange(total) - begin_N[owner_T]
    filled_NG = _fill(rounds.confidence_NG)
    bonus_N = np.random.default_rng(seed).random(len(rounds)) < filled_NG[:, -1]
    last_N = np.append(rounds.prompt_N[1:] != rounds.prompt_N[:-1], True)
    accepted_T, confidence_TG = _walk(rounds, filled_NG, bonus_N, last_N, owner_T, offset_T)
    start_Q = begin_N[first_N]
    length_Q = np.diff(np.append(start_Q, total))
    return Stream(start_Q, length_Q, np.full(len(start_Q), prompt_length), accepted_T.astype(np.int16), confidence_TG)


def _refuse_censored(rounds: Rounds, block: int) -> None:
    if not len(rounds) or block == 0:
        raise RoundsError("no proposals in these rounds; record with a drafter")
    if np.isnan(rounds.confidence_NG).all():
        raise RoundsError("these rounds have no confidences; record with a drafter that has a confidence head")
    censored = (rounds.proposed_N < block) & (rounds.accepted_N == rounds.proposed_N)
    final = np.append(rounds.prompt_N[1:] != rounds.prompt_N[:-1], True)
    share = float((censored & ~final).mean())
    if share > 0.01:
        raise RoundsError(
            f"{share:.0%} of the rounds offered fewer than {block} tokens and had all accepted: what lies beyond was "
            "not recorded. Record with full blocks (no schedule, no confidence threshold)"
        )


def _fill(confidence_NG: np.ndarray) -> np.ndarray:
    """Repeat the last recorded confidence of a row over its unrecorded positions (0 where there is none)."""
    known = ~np.isnan(confidence_NG)
    latest = np.maximum.accumulate(np.where(known, np.arange(confidence_NG.shape[1]), 0), axis=1)
    filled = np.take_along_axis(confidence_NG, latest, axis=1)
    return np.nan_to_num(filled, nan=0.0).astype(np.float32)


def _walk(
    rounds: Rounds,
    filled_NG: np.ndarray,
    bonus_N: np.ndarray,
    last_N: np.ndarray,
    owner_T: np.ndarray,
    offset_T: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """For every token: confidences of the next G positions of the recorded path, and how many are accepted in a row."""
    block = rounds.block_size
    node, position = owner_T.copy(), offset_T.copy()  # position: draft tokens of this block already behind
    rejected = np.zeros(len(owner_T), dtype=bool)
    accepted_T = np.zeros(len(owner_T), dtype=np.int64)
    confidence_TG = np.empty((len(owner_T), block), dtype=np.float32)
    for step in range(block):
        within = position < block
        confidence_TG[:, step] = filled_NG[node, np.minimum(position, block - 1)]
        hit = np.where(within, position < rounds.accepted_N[node], bonus_N[node] & ~last_N[node])
        rejected |= ~hit
        accepted_T += ~rejected
        moves_on = ~within & ~rejected
        node = np.where(moves_on, np.minimum(node + 1, len(rounds) - 1), node)
        position = np.where(moves_on, 0, np.where(within, position + 1, position))
    return accepted_T, confidence_TG


@dataclass(frozen=True)
class Difficulty:
    """How acceptance behaves in one kind of text; defaults resemble a mix of math, code and chat at γ = 7.

    P(position j of a block before token t is accepted | its prefix is) = σ(level + z + u_{t+j} − fade·(j − 1)): z ~
    N(0, between²) for each request, u a stationary AR(1) with deviation ``within`` and correlation ``memory`` along its
    tokens. One uniform for each token decides all blocks that reach it, so a nearer anchor accepts whatever a farther
    one does. The drafter's confidence is that probability with N(0, noise²) added to its logit, times ``sharpness`` (1
    = calibrated but for the noise, above 1 = overconfident).
    """

    level: float = 2.0
    between: float = 0.8
    within: float = 2.0
    memory: float = 0.5
    fade: float = 0.12
    noise: float = 0.7
    sharpness: float = 1.0


# Levels at which full blocks of 7 give τ near the paper's macro averages for Qwen3-4B: 5.6, 5.1, 3.5.
DOMAINS = {
    "math": Difficulty(level=3.9),
    "code": Difficulty(level=3.45),
    "chat": Difficulty(level=2.05),
    "mix": Difficulty(level=3.1, between=1.2),
}


def synthetic(
    requests: int,
    *,
    block: int = 7,
    tokens: int = 256,
    prompt_tokens: int = 256,
    difficulty: Difficulty | None = None,
    seed: int = 0,
) -> Stream:
    """Requests from the model ``Difficulty`` states; output and prompt lengths are geometric with these means (≥ 8)."""
    difficulty = difficulty or Difficulty()
    generator = np.random.default_rng(seed)
    length_Q = np.maximum(generator.geometric(1 / tokens, requests), 8)
    prompt_Q = np.maximum(generator.geometric(1 / max(prompt_tokens, 1), requests), 8)
    start_Q = np.cumsum(length_Q) - length_Q
    total = int(length_Q.sum())
    request_T = np.repeat(np.arange(requests), length_Q)
    level_T = difficulty.level + generator.normal(0, difficulty.between, requests)[request_T]
    hardness = level_T + _autoregressive(generator, total + block, difficulty.within, difficulty.memory)[:total]
    uniform = generator.random(total)
    accepted_T = np.zeros(total, dtype=np.int16)
    alive = np.ones(total, dtype=bool)
    confidence_TG = np.empty((total, block), dtype=np.float32)
    for position in range(block):
        index = np.minimum(np.arange(total) + position, total - 1)
        logit = hardness[index] - difficulty.fade * position
        noisy = difficulty.sharpness * (logit + generator.normal(0, difficulty.noise, total))
        confidence_TG[:, position] = 1 / (1 + np.exp(-noisy))
        alive &= uniform[index] < 1 / (1 + np.exp(-logit))
        accepted_T += alive
    return Stream(start_Q, length_Q, prompt_Q, accepted_T, confidence_TG)


def _autoregressive(generator: np.random.Generator, count: int, deviation: float, memory: float) -> np.ndarray:
    """Stationary AR(1) by a truncated moving average (weights below 1e-4 dropped)."""
    taps = 1 if memory <= 0 else int(np.ceil(np.log(1e-4) / np.log(memory))) + 1
    weights = memory ** np.arange(taps)
    noise = generator.normal(0, 1, count + taps - 1)
    return deviation * np.convolve(noise, weights / np.sqrt((weights**2).sum()), mode="valid")


def record(stream: Stream) -> Rounds:
    """The rounds a decoder with full static blocks would record on this stream (the inverse of ``stream_of``)."""
    owner, index = [], []
    for request, (start, length) in enumerate(zip(stream.start_Q, stream.length_Q, strict=True)):
        token = int(start)
        while token < start + length:
            owner.append(request)
            index.append(token)
            token += int(stream.accepted_T[token]) + 1
    proposed = np.full(len(index), stream.block_size)
    return Rounds(np.asarray(owner), proposed, stream.accepted_T[index].astype(np.int64), stream.confidence_TG[index])
