"""Verdicts from counts: the exact test against integers, each rule by a hand-made check, old results still shown."""

import copy
import math

import pytest

from deepspec.eval import report, table, verdict
from tests.eval import made_up


def check(**changes):
    """A check of 20 answers and 1000 positions that is consistent: 5 of 200 near-ties excused, 4 in the null run."""
    null = {"prompts": 20, "positions": 1000, "near_ties": 200, "excused": 4, "beyond": 0, "broken": 0}
    out = {
        "prompts": 20,
        "identical": 15,
        "ties": 5,
        "different": 0,
        "first_difference": None,
        "positions": 1000,
        "near_ties": 200,
        "excused": 5,
        "beyond": 0,
        "broken": 0,
        "largest_excused_gap": 0.25,
        "tolerance": 0.5,
        "noise": {"positions": 1000, "largest": 0.25, "near_ties": 200, "excused": 8},
        "null": null,
        "offence": None,
    }
    for key, value in changes.items():
        place, name = (out["null"], key.removeprefix("null_")) if key.startswith("null_") else (out, key)
        place[name] = value
    return out


@pytest.mark.parametrize("odds", [1, 2, 3])
@pytest.mark.parametrize(("count", "of", "control", "control_of"), [(7, 9, 2, 11), (0, 5, 3, 4), (5, 5, 0, 6)])
def test_the_exact_test_against_whole_numbers(count, of, control, control_of, odds):
    total = count + control
    ways = {
        x: math.comb(of, x) * math.comb(control_of, total - x) * odds**x
        for x in range(of + 1)
        if 0 <= total - x <= control_of
    }
    expected = sum(way for x, way in ways.items() if x >= count) / sum(ways.values())
    assert verdict.excess(count, of, control, control_of, odds) == pytest.approx(expected, rel=1e-9)


def test_the_exact_test_of_large_counts():
    """A normal approximation of the difference of two rates at odds 1: 3.0 standard deviations are p = 0.00135."""
    of, rate = 100_000, 0.1
    step = math.sqrt(2 * of * rate * (1 - rate))
    apart = round(3.0 * step / 2)
    p = verdict.excess(10_000 + apart, of, 10_000 - apart, of, odds=1)
    assert p == pytest.approx(0.00135, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "consistent (5 of 1000 positions within measured rounding, null run 4)"),
        ({"identical": 20, "ties": 0}, "identical"),
        ({"identical": 0, "ties": 20}, "consistent (5 of 1000 positions within measured rounding, null run 4)"),
        # one position or one ending that nothing excuses
        ({"beyond": 1, "ties": 4, "different": 1}, "NOT lossless"),
        ({"broken": 1, "ties": 4, "different": 1}, "NOT lossless"),
        ({"broken": 1, "tolerance": None}, "NOT lossless"),
        # the second best token at every near-tie, or at a quarter of them
        ({"excused": 200}, "NOT lossless"),
        ({"excused": 50}, "NOT lossless"),
        # twice the null run's rate: a block may round otherwise than single tokens
        ({"excused": 10}, "consistent (10 of 1000 positions within measured rounding, null run 4)"),
        # as many as the other shape of the same forward excuses
        ({"excused": 50, "noise": {"near_ties": 200, "excused": 45}}, "consistent (50 of"),
        # a second control too small to say anything does not excuse
        ({"excused": 200, "noise": {"near_ties": 0, "excused": 0}}, "NOT lossless"),
        # nothing to go by
        ({"prompts": 0, "identical": 0}, "not proven"),
        ({"tolerance": None}, "not proven"),
        ({"null_near_ties": 900}, "not proven"),
        ({"identical": 0, "positions": 299}, "not proven"),
        # plain decoding is no control when it breaks the rules itself
        ({"beyond": 1, "null_beyond": 1}, "not proven"),
        ({"broken": 1, "null_broken": 1}, "not proven"),
        # unless the drafter does so far more often
        ({"beyond": 300, "null_beyond": 1}, "NOT lossless"),
        ({"null_beyond": 1}, "consistent (5 of"),
    ],
)
def test_rules(changes, expected):
    one = check(**changes)
    assert verdict.wording(one).startswith(expected)
    assert verdict.failed(one) == (expected == "NOT lossless")
    assert verdict.proven(one) == expected.startswith(("identical", "consistent"))


def test_no_check_has_not_failed():
    assert not verdict.failed(None)
    (line,) = verdict.closing_lines("dspark", None)
    assert line.startswith("dspark: against plain greedy decoding: not proven: there is no plain run")


def test_lines_say_what_the_verdict_rests_on():
    offence = {"text": "q0, token 7: ' a' is 3.1 logits below the maximum ' b' (tolerance 0.5)"}
    one = check(different=1, ties=4, beyond=1, offence=offence)
    assert verdict.lines(one) == [
        "NOT lossless: 1 positions are beyond measured rounding",
        "15 of 20 answers equal bit for bit, 1000 positions checked",
        "5 excused (2.5 % of 200 near-ties), null run 4 of 1000 (2.0 % of 200 near-ties)",
        "tolerance 0.5 logits, largest excused gap 0.25",
        f"first offence: {offence['text']}",
    ]


def test_data_sets_add_up():
    worse = check(largest_excused_gap=0.5, offence={"text": "there"})
    total = verdict.total([check(largest_excused_gap=None), worse])
    assert [total[key] for key in ("prompts", "identical", "positions", "excused")] == [40, 30, 2000, 10]
    assert total["null"]["excused"] == 8
    assert total["null"]["positions"] == 2000
    assert (total["largest_excused_gap"], total["tolerance"], total["offence"]) == (0.5, 0.5, {"text": "there"})
    assert verdict.wording(total).startswith("consistent (10 of 2000 positions")


def test_small_excesses_add_up_to_a_failure():
    """Each data set alone is too small to tell; all together are not."""
    small = check(near_ties=10, excused=6, null_near_ties=10, null_excused=1, positions=50, null_positions=50)
    small["noise"] = {"near_ties": 100, "excused": 10}
    assert verdict.proven(small)
    assert verdict.failed(verdict.total([small] * 6))


def test_results_written_before_verdicts_show_their_old_figures():
    results = made_up.results(["gsm8k", "mbpp"], {"dspark": 1.0}, count=6, sweep=False)
    one = table.losslessness_table(results)
    assert one.header == ("variant", "block", "batch", "answers", "identical", "ties", "different")
    assert list(one.rows) == [["dspark", "7", "1", "12", "11", "1", "0"]]


def test_the_table_of_new_results():
    results = copy.deepcopy(made_up.results(["gsm8k", "mbpp"], {"dspark": 1.0}, count=6, sweep=False))
    item = table.headline(results)[0]
    item["datasets"]["gsm8k"]["identity"] = check()
    item["datasets"]["mbpp"]["identity"] = check(identical=20, ties=0, excused=4)
    rows = table.drafter_table(item, 0.0).rows
    assert [row[-1] for row in rows] == ["15 of 20, consistent", "20 of 20", "35 of 40, consistent"]
    one = table.losslessness_table(results)
    proof = ["2000", "9", "8 of 2000", "0.5", "consistent"]
    assert list(one.rows) == [["dspark", "7", "1", "40", "35", "5", "0", *proof]]


def test_the_report_shows_verdicts_and_offences():
    results = made_up.results(["gsm8k", "mbpp"], {"dspark": 1.0}, count=6, sweep=False)
    data = table.headline(results)[0]["datasets"]
    first = {"prompt": "q1", "position": 3, "gap": 0.5, "tolerance": None, "tie": True}
    data["gsm8k"]["identity"] = check(tolerance=None, first_difference=first)
    data["mbpp"]["identity"] = check(beyond=1, offence={"text": "q2, token 5: 3 is 2 logits below the maximum 4"})
    body = report._lossless(results).body
    assert "mbpp: DIFFERENCE, 1 positions are beyond measured rounding. q2, token 5: 3 is 2 logits" in body
    assert "too few plain positions to measure" in body
    assert "it must be the maximum" in body


def test_the_report_of_old_results_says_what_they_were():
    results = made_up.results(["gsm8k", "mbpp"], {"dspark": 1.0}, count=6, sweep=False)
    body = report._lossless(results).body
    assert "mbpp: tie in mbpp/3 at token 17, logit gap 4.00e-04 (tie below 0.001)." in body
    assert "what follows it was not looked at" in body
    assert "verdict" not in body
    card = report._lossless_card(table.identity_total(table.headline(results)[0]))
    assert card == (
        "11 of 12",
        "answers identical to plain greedy decoding, 1 more differ by a floating-point tie",
        False,
    )
