"""The identity check finds the first difference, and tells a numerical tie from a wrong token."""

import pytest
import torch

from deepspec.eval import exactness
from deepspec.eval.records import Record
from tests.tiny import tiny_target

PROMPT = [3, 5, 7, 11]


def record(tokens, prompt="p"):
    return Record("d", prompt, 0, "", len(PROMPT), list(tokens), "length", [], None, 1.0, 0.0, 0.0, 0.0, 1.0)


def test_first_difference():
    assert exactness.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert exactness.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert exactness.first_difference([1, 2, 3], [1, 2]) == 2
    assert exactness.first_difference([], [1]) == 0


def test_a_wrong_token_is_a_difference_and_its_gap_is_the_models():
    target = tiny_target("qwen3")
    logits_V = target.model(torch.tensor([[*PROMPT, 20, 21]])).logits[0, -1]
    best, worst = int(logits_V.argmax()), int(logits_V.argmin())
    plain, other = [20, 21, best, 4], [20, 21, worst, 4]
    out = exactness.check(
        target, [record(plain), record(plain, "q")], [record(other), record(plain, "q")], lambda _: PROMPT
    )
    assert (out["prompts"], out["identical"], out["ties"], out["different"]) == (2, 1, 0, 1)
    shown = out["first_difference"]
    assert (shown["prompt"], shown["position"], shown["plain"], shown["drafter"]) == ("p", 2, best, worst)
    assert shown["gap"] == pytest.approx(float(logits_V[best] - logits_V[worst]), rel=1e-4)


def test_two_equal_logits_are_a_tie():
    target = tiny_target("qwen3")
    target.head_VD[40] = target.head_VD[41]  # the two tokens now always score the same
    out = exactness.check(target, [record([20, 40])], [record([20, 41])], lambda _: PROMPT)
    assert (out["identical"], out["ties"], out["different"]) == (0, 1, 0)
    assert abs(out["first_difference"]["gap"]) <= out["first_difference"]["tolerance"]


def test_an_answer_that_ends_early_is_a_difference():
    out = exactness.check(tiny_target("qwen3"), [record([20, 21])], [record([20])], lambda _: PROMPT)
    assert out["different"] == 1
    assert out["first_difference"]["gap"] is None


def test_prompts_without_a_plain_answer_are_left_out():
    out = exactness.check(tiny_target("qwen3"), [record([20])], [record([20]), record([1], "q")], lambda _: PROMPT)
    assert (out["prompts"], out["identical"]) == (1, 1)
