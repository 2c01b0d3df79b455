"""Turns of variants: every pair of block and variant once, and a drifting machine does not move their ratio."""

import pytest

from deepspec.eval import alternation


@pytest.mark.parametrize(("count", "size"), [(0, 4), (1, 4), (4, 4), (5, 4), (36, 24), (100, 7)])
def test_blocks_hold_every_prompt_once_and_are_nearly_equal(count, size):
    blocks = alternation.blocks(list(range(count)), size)
    assert [item for block in blocks for item in block] == list(range(count))
    sizes = [len(block) for block in blocks]
    assert max(sizes, default=0) <= size
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_who_begins_changes_from_block_to_block():
    turns = list(alternation.turns(["plain", "dspark", "ngram"], ["a", "b", "c"]))
    assert turns[:3] == [("plain", "a"), ("dspark", "a"), ("ngram", "a")]
    assert [variant for variant, _ in turns[3:6]] == ["dspark", "ngram", "plain"]
    assert [variant for variant, _ in turns[6:]] == ["ngram", "plain", "dspark"]
    assert len(set(turns)) == 9


def ratio_on_a_slowing_machine(order):
    """Plain seconds over drafted ones, where drafting really halves them and every prompt slows the machine by 1 %."""
    clock, seconds = 0, {"plain": 0.0, "drafted": 0.0}
    for variant, prompts in order:
        for _ in prompts:
            work = 2.0 if variant == "plain" else 1.0
            seconds[variant] += work * (1 + 0.01 * clock)
            clock += 1
    return seconds["plain"] / seconds["drafted"]


def test_drift_of_the_machine_cancels():
    prompts = list(range(48))
    one_after_the_other = [("plain", prompts), ("drafted", prompts)]
    in_turns = alternation.turns(["plain", "drafted"], alternation.blocks(prompts, 6))
    assert ratio_on_a_slowing_machine(one_after_the_other) < 1.5
    assert ratio_on_a_slowing_machine(in_turns) == pytest.approx(2.0, rel=0.01)
