"""Metrics against hand-computed rounds, a loop written without numpy, and the paper's own table."""

import numpy as np
import pytest

from deepspec.eval import metrics
from deepspec.eval.records import Record


def record(rounds, prompt="p", tokens=None, wall=1.0, confidence=None, draft=0.25, verify=0.5):
    count = 1 + sum(committed for _, _, committed in rounds) if tokens is None else tokens
    return Record(
        dataset="d",
        prompt=prompt,
        turn=0,
        prompt_digest="",
        prompt_tokens=3,
        tokens=list(range(count)),
        finish="stop",
        rounds=[tuple(item) for item in rounds],
        confidence=confidence,
        wall=wall,
        prefill=0.0,
        draft=draft,
        verify=verify,
        other=wall - draft - verify,
    )


def random_records(count, block, seed):
    generator = np.random.default_rng(seed)
    records = []
    for index in range(count):
        rounds = []
        for _ in range(int(generator.integers(1, 9))):
            proposed = int(generator.integers(0, block + 1))
            accepted = int(generator.integers(0, proposed + 1))
            rounds.append((proposed, accepted, accepted + 1))
        proposed, accepted, _ = rounds[-1]
        if accepted:
            rounds[-1] = (proposed, accepted, int(generator.integers(1, accepted + 1)))
        records.append(record(rounds, f"p{index}", wall=float(generator.uniform(0.5, 2))))
    return records


def known_length(proposed, accepted, committed):
    """Draft tokens with an outcome: as the public evaluator does, those behind a stop token are not counted."""
    return committed if committed <= accepted else proposed


def slow(records, block):
    """The definitions of docs/evaluation.md, one round at a time."""
    rounds = [item for entry in records for item in entry.rounds]
    conditional, survival = [], []
    for k in range(1, block + 1):
        offered = reached = kept = 0
        for proposed, accepted, committed in rounds:
            cut = committed <= accepted
            known = min(accepted, committed) if cut else proposed
            if k <= known:
                offered += 1
                survives = k <= min(accepted, committed)
                kept += survives
                reached += k - 1 <= accepted
        conditional.append(kept / reached if reached else None)
        survival.append(kept / offered if offered else None)
    return {
        "tau": sum(c for _, _, c in rounds) / len(rounds),
        "verify_rate": sum(c for _, _, c in rounds) / sum(known_length(*one) + 1 for one in rounds),
        "conditional_acceptance": conditional,
        "survival": survival,
    }


def test_hand_computed_rounds():
    # accepted 2 of 3, then 0 of 3, then 3 of 3: 3 + 1 + 4 tokens in 3 rounds
    summary = metrics.summarise(metrics.tally([record([(3, 2, 3), (3, 0, 1), (3, 3, 4)], wall=2.0)], 3), seed=0)
    assert summary["tau"]["value"] == pytest.approx(8 / 3, abs=1e-6)
    assert summary["draft_acceptance_rate"]["value"] == pytest.approx(5 / 9, abs=1e-6)
    assert summary["verify_rate"]["value"] == pytest.approx(8 / 12, abs=1e-6)
    assert summary["conditional_acceptance"]["value"] == pytest.approx([2 / 3, 1.0, 0.5], abs=1e-6)
    assert summary["survival"]["value"] == pytest.approx([2 / 3, 2 / 3, 1 / 3], abs=1e-6)
    assert summary["accepted_lengths"]["value"] == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3], abs=1e-6)
    assert summary["tokens_per_second"]["value"] == 4.5
    assert summary["proposals_per_second"]["value"] == 1.5
    assert (summary["draft_share"]["value"], summary["verify_share"]["value"]) == (0.125, 0.25)
    assert summary["tau"]["low"] is None, "one prompt has no interval"


def test_a_cut_round_counts_what_it_kept_and_censors_the_rest():
    # three were accepted, but the second was a stop token: two kept, position 3 neither accepted nor rejected
    counts = metrics.tally([record([(5, 3, 2)])], 5)
    summary = metrics.summarise(counts, seed=0)
    assert summary["tau"]["value"] == 2
    assert counts.columns["offered"].tolist() == [[1, 1, 0, 0, 0]]
    assert counts.columns["kept"].tolist() == [[1, 1, 0, 0, 0]]
    assert summary["draft_acceptance_rate"]["value"] == 1
    assert summary["verify_rate"]["value"] == pytest.approx(2 / 3, abs=1e-6), "two of two, and the target's own"
    assert summary["conditional_acceptance"]["value"] == [1, 1, None, None, None]


def test_plain_decoding_has_length_one_and_no_acceptance():
    summary = metrics.summarise(metrics.tally([record([(0, 0, 1)] * 4), record([(0, 0, 1)] * 2)], 0), seed=0)
    assert summary["tau"] == {"value": 1, "low": 1, "high": 1}
    assert summary["draft_acceptance_rate"]["value"] is None
    assert summary["conditional_acceptance"]["value"] == []


def test_a_prompt_without_rounds_is_counted():
    summary = metrics.summarise(metrics.tally([record([], tokens=1), record([(2, 1, 2)])], 2), seed=0)
    assert summary["prompts"] == 2
    assert summary["tau"]["value"] == 2


@pytest.mark.parametrize("seed", range(5))
def test_random_rounds_agree_with_the_loop(seed):
    records = random_records(12, 5, seed)
    summary = metrics.summarise(metrics.tally(records, 5), seed=1)
    for name, expected in slow(records, 5).items():
        assert summary[name]["value"] == pytest.approx(expected, abs=2e-6), name


def test_bootstrap_agrees_with_drawing_prompts_one_by_one():
    counts = metrics.tally(random_records(40, 5, 3), 5)
    tau = metrics.summarise(counts, seed=4)["tau"]
    generator = np.random.default_rng(9)
    draws = []
    for _ in range(2000):
        chosen = generator.integers(0, 40, 40)
        draws.append(counts.columns["committed"][chosen].sum() / counts.columns["rounds"][chosen].sum())
    low, high = np.quantile(draws, [0.025, 0.975])
    assert tau["low"] == pytest.approx(low, abs=0.05)
    assert tau["high"] == pytest.approx(high, abs=0.05)
    assert tau["low"] < tau["value"] < tau["high"]


def test_the_interval_is_seeded_and_covers_the_truth():
    counts = metrics.tally(random_records(30, 5, 6), 5)
    assert metrics.summarise(counts, seed=1) == metrics.summarise(counts, seed=1)
    assert metrics.summarise(counts, seed=1)["tau"] != metrics.summarise(counts, seed=2)["tau"]
    # geometric rounds with a known mean: the 95 % interval holds it in most of 60 data sets
    generator = np.random.default_rng(0)
    truth, hits = 1 + 0.6 + 0.6**2 + 0.6**3, 0
    for seed in range(60):
        records = []
        for _ in range(50):
            accepted = np.minimum(generator.geometric(0.4, size=8) - 1, 3)
            records.append(record([(3, int(a), int(a) + 1) for a in accepted]))
        tau = metrics.summarise(metrics.tally(records, 3), seed)["tau"]
        hits += tau["low"] <= truth <= tau["high"]
    assert hits >= 50


def test_macro_average_weighs_data_sets_equally():
    small, large = metrics.tally([record([(1, 1, 2)])] * 2, 1), metrics.tally([record([(1, 0, 1)])] * 50, 1)
    out = metrics.macro([small, large], [0, 1])
    assert out["tau"]["value"] == 1.5
    assert out["tau"]["low"] == out["tau"]["high"] == 1.5
    assert out["conditional_acceptance"]["value"] == [0.5], "positions too: pooled over 52 rounds it would be 0.04"
