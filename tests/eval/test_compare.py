"""Paired comparisons against bootstraps written out, the paper's own row, and made-up machines."""

import numpy as np
import pytest

from deepspec.eval import compare, metrics
from deepspec.eval.records import Record


def record(rounds: int, committed: int, wall: float, prompt: str = "p") -> Record:
    """An answer of so many rounds of four proposals that commit so many tokens together."""
    each = [(4, min(4, committed // rounds - 1), committed // rounds)] * rounds
    tokens = list(range(committed))
    return Record("d", prompt, 0, "", 3, tokens, "length", each, None, wall, 0.0, 0.0, wall, 0.0)


def tally(pairs: list[tuple[int, int, float]]) -> metrics.Tally:
    return metrics.tally([record(*pair, prompt=f"p{n}") for n, pair in enumerate(pairs)], 4)


FAST = tally([(5, 10, 1.0), (5, 15, 3.0), (4, 12, 1.5)])
PLAIN = tally([(10, 10, 4.0), (15, 15, 4.0), (12, 12, 5.0)])


def bootstrap(statistic, seed: int) -> tuple[float, float]:
    """A percentile interval over resamples of the three prompts, one resample at a time."""
    draws = np.random.default_rng(seed).multinomial(3, [1 / 3] * 3, size=metrics.RESAMPLES)
    values = [statistic(weights) for weights in draws]
    return tuple(np.quantile(values, (0.025, 0.975)))


def test_a_speed_up_and_its_interval():
    ours = np.array([[10, 1.0], [15, 3.0], [12, 1.5]])
    plain = np.array([[10, 4.0], [15, 4.0], [12, 5.0]])

    def ratio(weights):
        (tokens, seconds), (others, slower) = weights @ ours, weights @ plain
        return (tokens / seconds) / (others / slower)

    interval = compare.speed_up(FAST, PLAIN, seed=7).interval()
    assert interval["value"] == pytest.approx((37 / 5.5) / (37 / 13), abs=1e-6)
    assert (interval["low"], interval["high"]) == pytest.approx(bootstrap(ratio, 7), abs=1e-6)


def test_a_gain_draws_the_same_prompts_for_both():
    other = tally([(6, 12, 1.0), (5, 10, 1.0), (3, 9, 1.0)])

    def change(weights):
        ours = (weights @ [10, 15, 12]) / (weights @ [5, 5, 4])
        theirs = (weights @ [12, 10, 9]) / (weights @ [6, 5, 3])
        return ours / theirs - 1

    seed = metrics.seed_of("d", 3)
    gain = compare.gain({"d": FAST}, {"d": other}, ["d"], 3)
    assert gain["value"] == pytest.approx((37 / 14) / (31 / 14) - 1, abs=1e-6)
    assert (gain["low"], gain["high"]) == pytest.approx(bootstrap(change, seed), abs=1e-6)


def test_a_drafter_compared_with_itself_gains_nothing_for_sure():
    gain = compare.gain({"d": FAST}, {"d": FAST}, ["d"], 0)
    assert (gain["value"], gain["low"], gain["high"]) == (0, 0, 0)
    assert compare.shows_difference(gain) is False


def test_one_prompt_has_no_interval():
    alone, plain = tally([(5, 10, 1.0)]), tally([(10, 10, 3.0)])
    interval = compare.speed_up(alone, plain, 0).interval()
    assert interval == {"value": 3.0, "low": None, "high": None}
    assert compare.shows_difference(interval) is None


def test_gains_reproduce_the_papers_qwen3_4b_line():
    """Relative gains of macro averages, from the τ of nine data sets."""
    eagle3 = [5.14, 4.62, 3.92, 3.69, 4.16, 3.77, 2.39, 2.26, 2.55]
    dflash = [5.40, 4.85, 4.15, 4.40, 4.74, 4.18, 3.07, 2.96, 2.83]
    dspark = [6.11, 5.70, 4.89, 5.13, 5.38, 4.86, 3.64, 3.54, 3.29]
    names = [str(number) for number in range(9)]

    def of(taus: list[float]) -> dict[str, metrics.Tally]:
        out = {}
        for name, tau in zip(names, taus, strict=True):
            counts = tally([(1, 1, 1.0)])
            counts.columns["rounds"], counts.columns["committed"] = np.array([100.0]), np.array([100 * tau])
            out[name] = counts
        return out

    assert round(100 * compare.gain(of(dspark), of(eagle3), names, 0)["value"], 1) == 30.9
    assert round(100 * compare.gain(of(dspark), of(dflash), names, 0)["value"], 1) == 16.3


def variant(label: str, kind: str, block: int, batch: int = 1) -> dict:
    item = {"id": f"{label}-k{block}-b{batch}", "label": label, "kind": kind, "block": block, "batch": batch}
    return item | {"headline": True, "datasets": {"d": {}}, "domains": {}, "macro": {"tau": {"value": float(block)}}}


def test_a_best_block_inside_the_noise_says_so():
    plain = tally([(10, 10, 1.0), (10, 10, 1.0), (10, 10, 1.0)])
    steady = tally([(5, 10, 0.50), (5, 10, 0.50), (5, 10, 0.50)])
    slower = tally([(5, 10, 0.60), (5, 10, 0.61), (5, 10, 0.62)])
    noisy = tally([(5, 10, 0.30), (5, 10, 0.80), (5, 10, 0.41)])
    variants = [variant("plain", "plain", 0), variant("a", "dspark", 3), variant("a", "dspark", 7)]

    def best(three, seven):
        tallies = {"plain-k0-b1": {"d": plain}, "a-k3-b1": {"d": three}, "a-k7-b1": {"d": seven}}
        (group,) = compare.best_blocks(variants, tallies, 0)
        return group["best"], group["second"], group["clear"]

    assert best(steady, slower) == (3, 7, True)
    assert best(noisy, steady) == (7, 3, False) or best(noisy, steady) == (3, 7, False)


def test_every_drafter_is_compared_with_prompt_lookup():
    lookup = tally([(5, 5, 1.0), (5, 10, 1.0), (4, 4, 1.0)])
    variants = [variant("a", "dspark", 7), variant("b", "dflash", 5), variant("ngram", "ngram", 4)]
    tallies = {"a-k7-b1": {"d": FAST}, "b-k5-b1": {"d": FAST}, "ngram-k4-b1": {"d": lookup}}
    out = compare.comparison(variants, tallies, 0)
    assert out["best"] == "a"
    assert set(out["gains"]) == {"b", "ngram"}
    assert out["baseline"] == "ngram"
    assert set(out["over_baseline"]) == {"a", "b"}
    assert out["over_baseline"]["a"]["macro"]["value"] > 0
