"""Which draft tokens are verified: against plain loops, brute force, the published vectors, and in the real decoder."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspec.eval import calibration
from deepspec.eval.scheduler import (
    Async,
    Causal,
    Plateau,
    ScheduleError,
    Static,
    Threshold,
    best_budget,
    goodput,
    make_schedule,
    prefix_survival,
    ranked,
    top_lengths,
)
from deepspec.eval.sps import SPSTable, roofline
from deepspec.models.confidence_scale import ConfidenceScale
from deepspec.models.decode import Proposal, generate
from deepspec.models.sampling import Distribution
from deepspec.models.target import Target
from tests.tiny import tiny_model

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "scheduling-vectors.json").read_text())


def table(*rates: float) -> SPSTable:
    return SPSTable(tuple(range(1, len(rates) + 1)), rates)


def smooth(limit: int, fixed: float, linear: float, square: float = 0.0) -> SPSTable:
    """Seconds per step convex in the step's tokens."""
    sizes = np.arange(1, limit + 1)
    return SPSTable(tuple(sizes.tolist()), tuple((1 / (fixed + linear * sizes + square * sizes**2)).tolist()))


def survivals(confidence_RG: np.ndarray) -> list[list[float]]:
    return [
        [float(a) for a in row] for row in np.cumprod(np.asarray(confidence_RG, np.float32), axis=1, dtype=np.float32)
    ]


def plain_walk(confidence_RG: np.ndarray, sps: SPSTable) -> list[int]:
    """The paper's loop over a frontier: sees a candidate's confidence only once its prefix is admitted."""
    a = survivals(confidence_RG)
    rows, block = len(a), len(a[0])
    lengths = [0] * rows
    expected, size = float(rows), rows
    while True:
        frontier = [(-a[r][lengths[r]], lengths[r], r) for r in range(rows) if lengths[r] < block]
        if not frontier:
            return lengths
        negative, _, row = min(frontier)
        if (expected - negative) * sps(size + 1) <= expected * sps(size):
            return lengths
        expected, size = expected - negative, size + 1
        lengths[row] += 1


def theta(confidence_RG: np.ndarray, lengths: tuple[int, ...], sps: SPSTable) -> float:
    a = np.cumprod(confidence_RG, axis=1)
    expected = len(a) + sum(float(a[r, :n].sum()) for r, n in enumerate(lengths))
    return expected * sps(len(a) + sum(lengths))


# ---------------------------------------------------------------------------------------------------- walk and ranking


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_plain_walk(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, block = int(random.integers(1, 9)), int(random.integers(1, 8))
    # A coarse grid makes ties common, ones make them within a request, zeros end a proposal.
    confidence = random.integers(0, 5, (rows, block)) / 4 if seed % 2 else random.random((rows, block))
    rates = np.sort(random.random(rows * (block + 1)))[::-1] ** 0.2
    sps = table(*rates.tolist())
    assert Causal(sps)(confidence).tolist() == plain_walk(confidence, sps)


@pytest.mark.parametrize("seed", range(20))
def test_top_lengths_are_the_most_likely_prefixes_of_any_budget(seed: int) -> None:
    random = np.random.default_rng(seed)
    confidence = random.integers(1, 5, (4, 3)) / 4
    a = survivals(confidence)
    order = sorted((-a[r][j], j, r) for r in range(4) for j in range(3))
    survival = prefix_survival(confidence)
    for budget in range(14):
        chosen = order[:budget]
        lengths = top_lengths(survival, ranked(survival), budget)
        assert lengths.tolist() == [sum(r == row for _, _, r in chosen) for row in range(4)]
        assert {(r, j) for _, j, r in chosen} == {(r, j) for r in range(4) for j in range(lengths[r])}  # prefix-closed


def test_ties_go_to_the_earlier_position_then_the_earlier_request() -> None:
    confidence = np.array([[0.5, 1.0, 1.0], [0.5, 1.0, 0.2], [0.5, 0.2, 0.2]])
    survival = prefix_survival(confidence)
    found = [top_lengths(survival, ranked(survival), budget).tolist() for budget in range(7)]
    assert found == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [3, 2, 1]]


@pytest.mark.parametrize("seed", range(15))
def test_early_stop_is_the_optimum_on_convex_seconds(seed: int) -> None:
    random = np.random.default_rng(seed)
    confidence = random.random((3, 3)) ** 0.5
    sps = smooth(12, random.random(), random.random(), random.random() * 0.1)
    best = max(theta(confidence, lengths, sps) for lengths in itertools.product(range(4), repeat=3))
    assert theta(confidence, tuple(Causal(sps)(confidence)), sps) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(15))
def test_global_search_is_the_optimum_on_steps(seed: int) -> None:
    random = np.random.default_rng(seed)
    confidence = random.random((3, 3)) ** 0.5
    sps = SPSTable((3, 4, 6, 9, 12), tuple(np.sort(random.random(5) + 0.5)[::-1].tolist()))
    survival = prefix_survival(confidence)
    ranking = ranked(survival)
    budget = best_budget(ranking, 3, sps.curve(12))
    best = max(theta(confidence, lengths, sps) for lengths in itertools.product(range(4), repeat=3))
    assert theta(confidence, tuple(top_lengths(survival, ranking, budget)), sps) == pytest.approx(best, rel=1e-6)
    assert goodput(ranking, 3, sps.curve(12))[budget] == pytest.approx(best, rel=1e-6)


def falls_with_load(scheduled: Callable[[np.ndarray], np.ndarray], confidence: np.ndarray) -> None:
    """No request gets more when others join; copies of the same requests get less in the end."""
    previous = np.full(1, 7)
    for rows in range(1, 41):
        lengths = scheduled(confidence[:rows])
        assert (lengths[: len(previous)] <= previous).all()
        previous = lengths
    copies = [scheduled(np.tile(confidence[:4], (n, 1))).sum() / n for n in (1, 2, 4, 8)]
    assert copies == sorted(copies, reverse=True)
    assert copies[0] > copies[-1]


@pytest.mark.parametrize("seed", range(10))
def test_more_load_never_gives_a_request_more_on_smooth_curves(seed: int) -> None:
    random = np.random.default_rng(seed)
    scheduler = Causal(smooth(400, 1.0, random.random() * 0.1))
    falls_with_load(scheduler, random.random((40, 7)) ** 0.3)


@pytest.mark.parametrize("seed", range(5))
def test_under_more_load_async_settles_on_no_more_for_a_request(seed: int) -> None:
    """Once its two steps of history are of the same load; its optimum is over all budgets, so on stairs it may rise."""
    random = np.random.default_rng(seed)
    sps = smooth(400, 1.0, random.random() * 0.1)

    def settled(confidence_RG: np.ndarray) -> np.ndarray:
        scheduler = Async(sps)
        return [scheduler(confidence_RG) for _ in range(3)][-1]

    falls_with_load(settled, random.random((40, 7)) ** 0.3)


def test_an_edge_of_a_step_stops_causal_but_not_plateau_nor_async() -> None:
    """64 requests on a table with an edge at 64: the next tile pays only once it is filled."""
    sps = SPSTable((64, 128, 192), (100.0, 75.0, 50.0))
    confidence = np.full((64, 3), 0.9)
    assert Causal(sps)(confidence).sum() == 0
    assert Plateau(sps)(confidence).sum() == 64
    scheduler = Async(sps)
    assert [int(scheduler(confidence).sum()) for _ in range(3)] == [0, 0, 64]


def test_async_takes_its_step_size_from_two_steps_ago() -> None:
    sps = table(1.0, 0.99, 0.98, 0.5, 0.49, 0.48)
    sure, unsure = np.array([[0.9, 0.9]]), np.array([[0.001, 0.001]])
    scheduler = Async(sps)
    lengths = [int(scheduler(confidence)[0]) for confidence in (sure, unsure, unsure, sure, sure)]
    assert lengths == [2, 0, 2, 0, 0]
    scheduler = Async(sps)
    for _ in range(2):
        scheduler(np.tile(sure, (1, 1)))
    assert scheduler(np.tile(sure, (2, 1))).tolist() == [1, 0]  # step of 3 tokens: a request joined, one token is left
    scheduler = Async(sps)
    for _ in range(2):
        scheduler(np.tile(sure, (3, 1)))
    assert scheduler(sure).sum() == 2  # requests left: never more than is offered


# ------------------------------------------------------------------------------------------------------- edges, errors


@pytest.mark.parametrize("name", ["none", "static", "threshold", "causal", "plateau", "async"])
def test_every_policy_stays_within_what_is_offered(name: str) -> None:
    scheduler = make_schedule(name, sps=roofline(limit=256), length=5, threshold=0.3)
    random = np.random.default_rng(0)
    for _ in range(20):
        rows = int(random.integers(1, 40))
        confidence = random.random((rows, 7)).astype(np.float32)
        offered = random.integers(0, 8, rows)
        confidence[np.arange(7) >= offered[:, None]] = 0.0
        lengths = scheduler(confidence)
        assert lengths.shape == (rows,)
        assert (lengths >= 0).all()
        assert (lengths <= offered).all()
    assert scheduler(np.zeros((3, 0))).tolist() == [0, 0, 0]


def test_static_and_threshold() -> None:
    confidence = np.array([[0.9, 0.4, 0.9], [0.3, 0.9, 0.9], [0.8, 0.7, 0.0]])
    assert Static(2)(confidence).tolist() == [2, 2, 2]
    assert Static(9)(confidence).tolist() == [3, 3, 2]
    assert Threshold(0.6)(confidence).tolist() == [1, 0, 2]
    assert Threshold(0.6, "survival")(confidence).tolist() == [1, 0, 1]  # 0.8 · 0.7 is below it
    for rule in ("conditional", "survival"):
        assert Threshold(0.5, rule)(confidence).tolist() == [1, 0, 2]
        assert Threshold(0.0, rule)(confidence).tolist() == [3, 3, 2]


@pytest.mark.parametrize("bad", [np.nan, -0.1, 1.1])
def test_confidences_that_are_no_probabilities_are_refused(bad: float) -> None:
    confidence = np.full((3, 2), 0.5)
    confidence[1, 1] = bad
    with pytest.raises(ScheduleError, match="request 1"):
        Causal(table(1.0))(confidence)


def test_options_are_checked() -> None:
    with pytest.raises(ScheduleError, match=r"deepspec\.eval\.profile"):
        make_schedule("causal")
    with pytest.raises(ScheduleError, match="length"):
        make_schedule("static")
    with pytest.raises(ScheduleError, match="one of none, static"):
        make_schedule("eager")
    with pytest.raises(ScheduleError, match="threshold"):
        Threshold(1.5)


@pytest.mark.parametrize("case", VECTORS["cases"], ids=[case["name"] for case in VECTORS["cases"]])
def test_published_vectors(case: dict) -> None:
    sps = SPSTable(tuple(case["sps"]["tokens"]), tuple(case["sps"]["steps_per_second"])) if "sps" in case else None
    options = {name: case[name] for name in ("length", "threshold", "threshold_on") if name in case}
    scheduler = make_schedule(case["policy"], sps=sps, **options)
    found = [scheduler(np.asarray(step["confidence"], np.float32)).tolist() for step in case["steps"]]
    assert found == [step["lengths"] for step in case["steps"]]


def test_published_vector_of_the_calibration() -> None:
    """In the arithmetic of the fit and in the drafter's."""
    vector = VECTORS["calibration"]
    confidence, by = np.asarray(vector["confidence"]), ConfidenceScale.of(vector)
    assert calibration.scale(confidence, by) == pytest.approx(np.asarray(vector["calibrated"]), abs=1e-6)
    decoded = torch.sigmoid(by.logits(torch.logit(torch.tensor(confidence)))).numpy()
    assert decoded == pytest.approx(np.asarray(vector["calibrated"]), abs=1e-6)


# ------------------------------------------------------------------------------------------------ in the real decoder


@pytest.mark.parametrize("name", ["none", "static", "threshold", "causal", "plateau", "async"])
def test_greedy_output_is_the_same_in_all_modes(name: str) -> None:
    """Several rows that join and leave, and a drafter that is right often enough for lengths to matter."""
    target = Target.from_model(tiny_model("qwen3"))
    prompts = [list(range(3 + i, 9 + 2 * i)) for i in range(7)]
    plain = {c.index: c.tokens for c in generate(target, prompts, max_new_tokens=20, stop_ids=())}
    schedule = make_schedule(name, sps=STEPS_OF_FOUR, length=2, threshold=0.28, threshold_on="survival")
    found = generate(
        target, prompts, drafter=Oracle(plain, prompts), max_new_tokens=20, batch_size=4, schedule=schedule, stop_ids=()
    )
    rounds = []
    for completion in found:
        assert completion.tokens == plain[completion.index]
        rounds += completion.rounds
    lengths = {one.proposed for one in rounds}
    if name == "none":
        assert lengths == {0}
    else:
        assert len(lengths) > 1 or name == "static"
        assert sum(one.accepted for one in rounds) > 0
        assert any(one.accepted < one.proposed for one in rounds)


STEPS_OF_FOUR = SPSTable((4, 8, 12, 20), (10.0, 9.0, 8.0, 3.0))


class Oracle:
    """Proposes the plain answer with every third token spoiled, less sure of those. Knows rows by their context."""

    block_size = 3

    def __init__(self, plain: dict[int, list[int]], prompts: list[list[int]]) -> None:
        self.answers = {tuple(prompts[i]): tokens for i, tokens in plain.items()}

    class State(list):
        def add(self, count: int) -> None:
            self.extend([] for _ in range(count))

        def remove(self, row: int) -> None:
            self[row] = self[-1]
            self.pop()

    def start(self, rows: int, max_length: int) -> "Oracle.State":
        return self.State()

    def extend(self, state, tokens_BT1, taps_BTF, counts_B, rows=None) -> None:
        for context, tokens, count in zip(state[rows or slice(None)], tokens_BT1, counts_B, strict=True):
            context += tokens[: int(count)].tolist()

    def propose(self, state, anchor_B, sampling, uniforms_BG, length, greedy=False) -> Proposal:
        tokens, sure = [], []
        for context in state:
            prompt = next(p for p in self.answers if tuple(context[: len(p)]) == p)
            at = len(context) - len(prompt) + 1
            answer = [*self.answers[prompt], 0, 0, 0, 0][at : at + length]
            spoiled = [(at + j) % 3 == 1 for j in range(length)]
            tokens.append([(token + bad) % 97 for token, bad in zip(answer, spoiled, strict=True)])
            sure.append([0.3 if bad else 0.9 for bad in spoiled])
        tokens_BG = torch.tensor(tokens)
        return Proposal(tokens_BG, Distribution.one_hot(tokens_BG, 97), torch.tensor(sure))
