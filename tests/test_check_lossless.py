"""The adversarial set of scripts/check_lossless.py on tiny targets: adversaries are caught, honest runs pass."""

import argparse

import pytest
import torch

from deepspec.models.baselines import PromptLookup
from tests.test_scripts import ROOT, load
from tests.tiny import VOCAB, tiny_target

TOKENS = 48


@pytest.fixture(scope="module")
def script():
    return load(ROOT / "check_lossless.py")


def prompts(count=10):
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(3, 24, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_greedy(script, dtype):
    target = tiny_target("qwen3", dtype=dtype)
    without_stops = script.Greedy(target, PromptLookup(VOCAB), prompts(), TOKENS, stop_ids=[])
    stop = without_stops.plain[0].tokens[TOKENS // 2]  # of some answers, and early in few
    greedy = script.Greedy(target, PromptLookup(VOCAB), prompts(), TOKENS, stop_ids=[stop])
    assert {record.finish for record in greedy.plain} == {"stop", "length"}
    outcomes = {outcome.name.split(", ")[1]: outcome for outcome in greedy.outcomes()}
    adversaries = {
        "truncated answers",
        "a token after the stop token",
        "an accepted token too many",
        "a stale cache row",
    }
    if dtype == torch.bfloat16:  # float32 has no near-ties here
        adversaries |= {"garbage after the first tie", "second best at every near-tie"}
    assert outcomes.keys() == adversaries | {"the drafter"}
    for name, outcome in outcomes.items():
        assert outcome.right, str(outcome)
        assert ("NOT lossless" in outcome.text) == (name != "the drafter"), str(outcome)
    if dtype == torch.bfloat16:  # no token is beyond the tolerance, but too many are below the maximum
        text = outcomes["second best at every near-tie"].text
        assert "far more tokens below the maximum at near-ties" in text


def test_sampling(script):
    target = tiny_target("qwen3")
    options = argparse.Namespace(samples=600, top_k=3, batch_size=100)
    outcomes = list(script.sampling_outcomes(target, PromptLookup(VOCAB), [3, 1, 4], options))
    assert [outcome.honest for outcome in outcomes] == [True, True, False]
    assert [outcome.passed for outcome in outcomes] == [True, True, False], list(map(str, outcomes))
