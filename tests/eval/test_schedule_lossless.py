"""Choosing lengths never changes what is sampled: draft → schedule → verify enumerated exactly, requests together."""

import copy
import itertools
from collections import defaultdict

import numpy as np
import pytest

from deepspec.eval.scheduler import Async, Causal, Plateau, Threshold, best_budget, prefix_survival, ranked, top_lengths
from deepspec.eval.sps import SPSTable
from deepspec.models.verify import THRESHOLD_RULES

Outputs = tuple[tuple[int, ...], ...]
HORIZON, BLOCK, VOCABULARY = 3, 2, 2


class Retrospective:
    """What must not be done: search all budgets, then keep the best, having seen the tokens it drops."""

    def __init__(self, sps: SPSTable) -> None:
        self.curve = sps.curve(64)

    def __call__(self, confidence_RG: np.ndarray) -> np.ndarray:
        survival = prefix_survival(confidence_RG)
        ranking = ranked(survival)
        return top_lengths(survival, ranking, best_budget(ranking, survival.shape[1], self.curve))


class World:
    """p, q and confidences of each request, looked up by the whole context: random, and nothing is shared."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.p: dict = defaultdict(lambda: self.random.dirichlet([1.0] * VOCABULARY))
        self.q: dict = defaultdict(lambda: self.random.dirichlet([1.0] * VOCABULARY))
        self.c: dict = defaultdict(lambda: float(self.random.choice([0.02, 0.6, 0.97])))

    def confidence(self, row: int, context: tuple[int, ...], draft: tuple[int, ...]) -> list[float]:
        """c_j given x_<j only: the key leaves out x_j."""
        return [self.c[row, context, draft[:j]] for j in range(BLOCK)]

    def drafts(self, row: int, context: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
        result = []
        for draft in itertools.product(range(VOCABULARY), repeat=BLOCK):
            chance = 1.0
            for j, token in enumerate(draft):
                chance *= self.q[row, context + draft[:j]][token]
            result.append((draft, chance))
        return result

    def verified(self, row: int, context: tuple[int, ...], draft: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        """Distribution of the context after verifying ``draft`` (Leviathan), cut at the horizon."""
        result: dict[tuple[int, ...], float] = defaultdict(float)
        alive = 1.0
        for j, token in enumerate(draft):
            here = context + draft[:j]
            p, q = self.p[row, here], self.q[row, here]
            accept = min(1.0, p[token] / q[token])
            residual = np.maximum(p - q, 0)
            if accept < 1.0:
                for other in range(VOCABULARY):
                    result[(*here, other)] += alive * (1 - accept) * residual[other] / residual.sum()
            alive *= accept
        for token in range(VOCABULARY):
            result[(*context, *draft, token)] += alive * self.p[row, context + draft][token]
        cut: dict[tuple[int, ...], float] = defaultdict(float)
        for sequence, chance in result.items():
            cut[sequence[:HORIZON]] += chance
        return cut

    def target(self, rows: int) -> dict[Outputs, float]:
        single = []
        for row in range(rows):
            chances = {}
            for sequence in itertools.product(range(VOCABULARY), repeat=HORIZON):
                chances[sequence] = float(np.prod([self.p[row, sequence[:i]][sequence[i]] for i in range(HORIZON)]))
            single.append(chances)
        return {
            outputs: float(np.prod([single[row][sequence] for row, sequence in enumerate(outputs)]))
            for outputs in itertools.product(*single)
        }


def enumerate_outputs(
    world: World, scheduler: object, rows: int, see: object = None
) -> tuple[dict[Outputs, float], set]:
    """Joint distribution of all requests' first HORIZON tokens under draft → schedule → verify, and the lengths used.

    Finished requests leave the batch, so its size changes. ``see`` may replace the confidences that the scheduler gets.
    """
    key_of = lambda s: tuple(getattr(s, "_sizes", ()))  # noqa: E731 - all the state any of them has
    waiting: dict = {(((),) * rows, key_of(scheduler)): (1.0, scheduler)}
    done: dict[Outputs, float] = defaultdict(float)
    used: set = set()
    while waiting:
        following: dict = {}
        for (outputs, _), (chance, state) in waiting.items():
            active = [row for row in range(rows) if len(outputs[row]) < HORIZON]
            if not active:
                done[outputs] += chance
                continue
            for drafts in itertools.product(*(world.drafts(row, outputs[row]) for row in active)):
                tokens = [draft for draft, _ in drafts]
                after = copy.deepcopy(state)
                seen = np.array([world.confidence(row, outputs[row], d) for row, d in zip(active, tokens, strict=True)])
                lengths = after(see(world, active, outputs, tokens) if see else seen)
                used.add(tuple(lengths.tolist()))
                weight = chance * float(np.prod([likely for _, likely in drafts]))
                ends = [
                    world.verified(row, outputs[row], draft[:length]).items()
                    for row, draft, length in zip(active, tokens, lengths, strict=True)
                ]
                for combination in itertools.product(*ends):
                    new = list(outputs)
                    for row, (sequence, _) in zip(active, combination, strict=True):
                        new[row] = sequence
                    key = (tuple(new), key_of(after))
                    more = weight * float(np.prod([likely for _, likely in combination]))
                    following[key] = (following.get(key, (0.0, None))[0] + more, after)
        waiting = following
    return done, used


def distance(found: dict[Outputs, float], wanted: dict[Outputs, float]) -> float:
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    return max(abs(found.get(key, 0.0) - wanted[key]) for key in wanted)


STEPS = SPSTable((1, 2, 3, 4, 6), (1.0, 0.62, 0.55, 0.42, 0.4))


@pytest.mark.parametrize("policy", [Causal, Plateau, Async])
@pytest.mark.parametrize(("rows", "seed"), [(1, 0), (1, 1), (1, 2), (2, 3)])
def test_outputs_of_all_requests_are_jointly_the_targets(policy: type, rows: int, seed: int) -> None:
    world = World(seed)
    found, used = enumerate_outputs(world, policy(STEPS), rows)
    assert distance(found, world.target(rows)) < 1e-12
    assert len(used) > 1  # the schedule did vary


def test_the_retrospective_search_changes_the_distribution() -> None:
    gaps = []
    for seed in range(3):
        world = World(seed)
        found, _ = enumerate_outputs(world, Retrospective(STEPS), 1)
        gaps.append(distance(found, world.target(1)))
    assert max(gaps) > 1e-3


def test_gating_a_token_by_its_own_probability_changes_the_distribution() -> None:
    """q(x_j) knows x_j; the drafter's largest probability does not (drafters without a confidence head)."""

    def own(world: World, active: list[int], outputs: Outputs, tokens: list) -> np.ndarray:
        rows = zip(active, tokens, strict=True)
        return np.array([[world.q[r, outputs[r] + d[:j]][d[j]] for j in range(BLOCK)] for r, d in rows])

    def largest(world: World, active: list[int], outputs: Outputs, tokens: list) -> np.ndarray:
        rows = zip(active, tokens, strict=True)
        return np.array([[world.q[r, outputs[r] + d[:j]].max() for j in range(BLOCK)] for r, d in rows])

    world = World(5)
    wanted = world.target(1)
    for rule in THRESHOLD_RULES:
        assert distance(enumerate_outputs(world, Threshold(0.6, rule), 1, see=largest)[0], wanted) < 1e-12
        assert distance(enumerate_outputs(world, Threshold(0.6, rule), 1, see=own)[0], wanted) > 1e-3


def test_requests_must_be_causal_towards_each_other() -> None:
    """Each length depends on the *other* request's tokens only: each output alone is right, the pair is not."""

    class Crossed:
        def __call__(self, confidence_RG: np.ndarray) -> np.ndarray:
            alone = len(confidence_RG) == 1
            return np.zeros(1, np.int64) if alone else (confidence_RG[::-1, 1] > 0.5).astype(np.int64)

    def second_tells_the_first_token(world: World, active: list[int], outputs: Outputs, tokens: list) -> np.ndarray:
        return np.array([[0.9, 0.9 if draft[0] == 0 else 0.1] for draft in tokens])

    world = World(7)
    found, _ = enumerate_outputs(world, Crossed(), 2, see=second_tells_the_first_token)
    first = defaultdict(float)
    for outputs, chance in found.items():
        first[outputs[0][0]] += chance
    assert first[0] == pytest.approx(world.p[0, ()][0], abs=1e-12)
    assert distance(found, world.target(2)) > 1e-3


def test_appendix_a() -> None:
    """DSpark's appendix A: V = {A, B}, p = (0.7, 0.3), q = (0.5, 0.5); c_2 is 0.9 after A and 0 after B."""
    sps = SPSTable((1, 2, 3), (1.0, 0.5, 0.45))
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])

    def chance_of_a(scheduler: object) -> float:
        total = 0.0
        for token in (0, 1):
            length = scheduler(np.array([[0.8, 0.9 if token == 0 else 0.0]]))[0]
            accept = min(1.0, p[token] / q[token])
            if length == 0:
                total += q[token] * p[0]
            else:
                total += q[token] * (accept if token == 0 else 1 - accept)  # the residual is all on A
        return total

    assert Causal(sps)(np.array([[0.8, 0.9]])).tolist() == [0]
    assert Causal(sps)(np.array([[0.8, 0.0]])).tolist() == [0]
    assert chance_of_a(Causal(sps)) == pytest.approx(0.7, abs=1e-12)
    assert chance_of_a(Plateau(sps)) == pytest.approx(0.7, abs=1e-12)
    assert Retrospective(sps)(np.array([[0.8, 0.9]])).tolist() == [2]
    assert chance_of_a(Retrospective(sps)) == pytest.approx(0.85, abs=1e-12)
