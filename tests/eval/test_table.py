"""Tables say what the results say."""

import copy
import re

import pytest

from deepspec.eval import table
from tests.eval import made_up


@pytest.fixture(scope="module")
def results():
    return made_up.results(["gsm8k", "mbpp", "alpaca"], {"dspark": 1.0, "dflash": 0.9}, count=6)


def test_one_drafter(results):
    item = table.headline(results)[0]
    one = table.drafter_table(item, 0.0)
    assert [row[0] for row in one.rows] == ["gsm8k", "mbpp", "alpaca", "average"]
    assert one.title == "dspark: block 7, batch 1, temperature 0"
    row = one.rows[1]
    assert row[7] == "5 of 6 (+1 ties)"
    assert one.rows[-1][7] == "17 of 18 (+1 ties)"
    assert len(row[3].split()) == 7
    tau = item["datasets"]["mbpp"]["tau"]
    assert 1 < tau["low"] < tau["value"] < tau["high"] < 8
    assert row[2] == f"{tau['value']:.2f} ({tau['low']:.2f}–{tau['high']:.2f})" == table.spread(tau)
    assert one.rows[-1][2] == table.spread(item["macro"]["tau"])


def test_rows_have_the_headers_width_and_text_is_aligned(results):
    for one in table.tables(results):
        assert {len(row) for row in one.rows} == {len(one.header)}
        lines = one.text().splitlines()
        body = [line for line in lines[2:] if not line.startswith("─")]
        assert len({len(line) for line in body}) == 1, one.title


def test_the_papers_layout(results):
    one = table.comparison_table(results)
    assert one.header == ["drafter", "gsm8k", "mbpp", "alpaca", "average", "dspark gains over it"]
    values = {row[0]: row for row in one.rows}
    ours, theirs = (float(values[name][4]) for name in ("dspark", "dflash"))
    assert values["dspark"][5] == "–"
    value, low, high = map(float, re.fullmatch(r"(.*) % \((.*) to (.*)\)", values["dflash"][5]).groups())
    assert value == pytest.approx(100 * (ours / theirs - 1), abs=0.4)
    assert 0 < low < value < high


def test_a_gain_whose_interval_holds_zero_is_no_difference():
    assert table.gain({"value": 0.149, "low": 0.121, "high": 0.178}) == "+14.9 % (+12.1 to +17.8)"
    assert table.gain({"value": 0.003, "low": -0.01, "high": 0.016}) == ("+0.3 % (-1.0 to +1.6), no difference shown")
    assert table.gain({"value": 0.003, "low": None, "high": None}) == "+0.3 %"
    assert table.gain(0.135) == "+13.5 %", "as results of version 1 hold it"
    assert table.gain(None) == "–"


def test_prompt_lookup_is_marked_as_free_and_every_drafter_compared_with_it():
    both = made_up.results(["gsm8k"], {"dspark": 1.0, "ngram": 0.6}, count=8, sweep=False)
    one = table.comparison_table(both)
    assert one.header[-1] == "gains over prompt lookup (free)"
    assert [row[0] for row in one.rows] == ["dspark", "prompt lookup (free)"]
    assert one.rows[0][-1].startswith("+")
    assert one.rows[1][-1] == "–"


def test_the_block_table_names_the_best(results):
    one = table.block_table(results)
    assert one.header == ("drafter", "batch", *"1234567", "best")
    for row in one.rows:
        speeds = [float(cell.split("×")[0]) for cell in row[2:9]]
        best = int(row[-1].split(",")[0].removeprefix("k = "))
        assert speeds[best - 1] == max(speeds)


def test_without_a_sweep_or_rivals_those_tables_are_absent():
    alone = made_up.results(["gsm8k"], {"dspark": 1.0}, count=3, sweep=False)
    assert [one.title for one in table.tables(alone)] == ["dspark: block 7, batch 1, temperature 0"]


def test_every_markdown_table_has_as_many_cells_in_each_row(results):
    """A pipe inside a cell, as in "accepted | prefix", must be escaped, or GitHub shows text instead of a table."""
    for one in table.tables(results):
        lines = one.markdown().splitlines()
        assert lines[0] == f"### {one.title}"
        cells = [re.split(r"(?<!\\)\|", line) for line in lines[2:]]
        assert {len(row) for row in cells} == {len(one.header) + 2}, one.title
    assert any("|" in cell for one in table.tables(results) for cell in one.header)


def test_undefined_figures_are_dashes():
    assert table.number(None) == "–"
    assert table.positions([0.5, None, 1.0]) == ".50 – 1.0"
    assert table.spread({"value": 2.0, "low": None, "high": None}) == "2.00"
    assert table.times(None) == "–"
    assert table.times({"value": 1.2, "low": None, "high": None}) == "1.20×"
    assert table.times({"value": 1.2, "low": 1.1, "high": 1.35}) == "1.20× (1.10–1.35)"
    assert table.identical(None) == "–"


def test_speed_ups_over_several_sessions_are_marked(results):
    assert table.notes(results) == []
    marked = copy.deepcopy(results)
    item = next(each for each in table.headline(marked) if each["label"] == "dflash")
    item["datasets"]["mbpp"]["sessions"] = 2
    assert [row[6][-1] for row in table.drafter_table(item, 0.0).rows] == [")", "*", ")", "*"]
    (note,) = table.notes(marked)
    assert note.startswith("* speed-ups of dflash divide seconds of different runs")
