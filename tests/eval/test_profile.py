"""SPS tables: look-up, files, errors, hull; and measuring a tiny target."""

import json

import numpy as np
import pytest

from deepspec.eval import profile
from deepspec.eval.sps import SPSProfile, SPSTable, SPSTableError, load_profile, roofline
from tests.eval.tiny_run import save_drafter, save_target

TABLE = SPSTable((2, 4, 8), (100.0, 80.0, 50.0))


def test_lookup_pads_up_and_keeps_the_token_rate_beyond() -> None:
    assert [TABLE(b) for b in (1, 2, 3, 4, 5, 8, 16)] == [100.0, 100.0, 80.0, 80.0, 50.0, 50.0, 25.0]
    assert TABLE.curve(16).tolist() == [100.0, *[TABLE(b) for b in range(1, 17)]]


@pytest.mark.parametrize(
    ("tokens", "rates", "message"),
    [
        ((), (), "at least one row"),
        ((1, 2), (1.0,), "2 token counts and 1 rates"),
        ((2, 1), (1.0, 1.0), "row 1: tokens 1 does not exceed 2"),
        ((2, 2), (1.0, 1.0), "does not exceed"),
        ((0,), (1.0,), "row 0: tokens is 0"),
        ((1,), (float("nan"),), "steps_per_second is nan"),
        ((1,), (-3.0,), "steps_per_second is -3.0"),
    ],
)
def test_tables_are_checked(tokens: tuple, rates: tuple, message: str) -> None:
    with pytest.raises(SPSTableError, match=message):
        SPSTable(tokens, rates)


def test_envelope_never_rises() -> None:
    assert SPSTable((1, 2, 3, 4), (9.0, 10.0, 5.0, 6.0)).envelope().steps_per_second == (10.0, 10.0, 6.0, 6.0)


def test_hull_is_the_largest_convex_curve_below() -> None:
    """Against the definition: at B, the least of all chords between two points of the curve."""
    seconds = 1 / TABLE.curve(8)[1:]
    hull = 1 / np.array(TABLE.hull().steps_per_second)
    for b in range(8):
        chords = [
            seconds[i] + (seconds[j] - seconds[i]) * (b - i) / (j - i) if j > i else seconds[i]
            for i in range(b + 1)
            for j in range(b, 8)
        ]
        assert hull[b] == pytest.approx(min(chords))
    assert (np.diff(hull, 2) > -1e-12).all()


def test_overhead_adds_seconds() -> None:
    slower = TABLE.with_overhead(0.004).with_overhead(0.006)
    assert [slower(b) for b in (1, 2, 3, 4, 8)] == pytest.approx([50.0, 50.0, 1 / 0.0225, 1 / 0.0225, 1 / 0.03])


def test_overhead_does_not_grow_with_the_step() -> None:
    """Beyond the last size, by hand: 16 tokens take twice the 0.02 s of 8, and the 0.01 s of drafting once."""
    slower = TABLE.with_overhead(0.01)
    assert [slower(16), slower(32)] == pytest.approx([1 / 0.05, 1 / 0.09])
    hull = TABLE.hull()
    for b in (1, 3, 8, 16):
        assert slower.hull()(b) == pytest.approx(1 / (1 / hull(b) + 0.01))


def test_roofline_has_its_two_regimes_and_its_steps() -> None:
    table = roofline()
    assert table(2) > 0.99 * table(1)  # memory-bound
    assert table(8192) == pytest.approx(table(4096) / 2, rel=0.1)  # compute-bound
    assert table(65) == table(128) < table(64)


@pytest.mark.parametrize("name", ["table.json", "table.csv"])
def test_files_come_back(tmp_path, name: str) -> None:
    written = SPSProfile((TABLE, SPSTable((1, 9), (30.0, 20.0), context=512)), {"device": "some"})
    written.save(tmp_path / name)
    again = load_profile(tmp_path / name)
    assert [(t.context, t.tokens, t.steps_per_second) for t in again.tables] == [
        (t.context, t.tokens, t.steps_per_second) for t in written.tables
    ]
    assert [again.at(context).context for context in (0, 1, 512, 9999)] == [0, 512, 512, 512]
    if name == "table.json":
        assert again.details == {"device": "some"}


def test_tables_from_elsewhere(tmp_path) -> None:
    file = tmp_path / "engine.csv"
    file.write_text("# measured on a server\ntokens,seconds_per_step\n8,0.02\n\n1,0.01\n")
    table = load_profile(file).at(0)
    assert (table.tokens, table.steps_per_second) == ((1, 8), (100.0, 50.0))
    for text, message in (
        ("tokens,rate\n1,2\n", "row 1.*columns are tokens, steps_per_second"),
        ("tokens,steps_per_second\n1,fast\n", "row 1"),
        ("tokens,steps_per_second\n1,5\n1,6\n", "row 2: 1 tokens at context 0 appears twice"),
        ("tokens,steps_per_second\n", "no rows"),
        ("tokens,seconds_per_step\n1,0\n", "row 1"),
    ):
        file.write_text(text)
        with pytest.raises(SPSTableError, match=message):
            load_profile(file)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SPSTableError, match="not an SPS profile"):
        load_profile(tmp_path / "other.json")
    with pytest.raises(SPSTableError, match=r"deepspec\.eval\.profile"):
        load_profile(tmp_path / "absent.json")


def test_command_line(tmp_path, capsys) -> None:
    folder = save_target(tmp_path / "tiny")
    arguments = ["--target", str(folder), "--sizes", "1,3,8,13", "--contexts", "0,20", "--width", "4", "--repeats", "2"]
    assert profile.main([*arguments, "--device", "cpu", "--output", str(tmp_path / "sps.json")]) == 0
    content = json.loads((tmp_path / "sps.json").read_text())
    assert {(row["context"], row["tokens"]) for row in content["measured"]} == {
        (context, size) for context in (0, 20) for size in (1, 3, 8, 13)
    }
    assert all(row["seconds"] > 0 for row in content["measured"])
    assert content["prefill_tokens_per_second"] > 0
    for table in load_profile(tmp_path / "sps.json").tables:
        assert (np.diff(table.steps_per_second) <= 0).all()
    (tmp_path / "engine.csv").write_text("tokens,steps_per_second\n1,5\n")
    assert profile.main(["--import", str(tmp_path / "engine.csv")]) == 0
    assert load_profile(tmp_path / "engine.json").at(0)(1) == 5.0
    assert profile.main([]) == 2
    assert profile.main(["--target", str(folder), "--sizes", "3,1"]) == 2
    assert profile.main(["--target", str(folder), "--contexts", "9999", "--device", "cpu"]) == 2
    errors = capsys.readouterr().err
    assert "--import CSV" in errors
    assert "ascending" in errors
    assert "exceed the 512 positions" in errors


def test_drafting_is_timed_with_its_target(tmp_path, capsys) -> None:
    """What a round of the decoder takes beside the target's pass, as a line over the number of requests."""
    folder = save_target(tmp_path / "tiny")
    drafter = save_drafter(tmp_path / "drafters" / "own" / "best", folder)
    arguments = ["--target", str(folder), "--sizes", "1,13", "--contexts", "20", "--width", "4", "--repeats", "2"]
    arguments += ["--device", "cpu", "--output", str(tmp_path / "sps.json"), "--drafter", str(drafter)]
    assert profile.main(arguments) == 0
    assert "drafting with own, ms a step (requests): " in capsys.readouterr().out
    measured = load_profile(tmp_path / "sps.json")
    points = measured.details["drafting"]
    assert [point["requests"] for point in points] == [1, 2, 4]
    assert all(point["seconds"] > 0 for point in points)
    assert (measured.details["draft_seconds"], measured.details["draft_row_seconds"]) == profile.fit_drafting(points)
    assert profile.main(["--import", str(tmp_path / "x.csv"), "--drafter", str(drafter)]) == 2
    assert "or --import CSV" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "line"),
    [((10.0, 12.0, 16.0), (8.0, 2.0)), ((7.0, 6.0, 2.0), (5.0, 0.0)), ((1.0, 4.0, 7.0), (0.0, 37 / 21))],
)
def test_drafting_is_a_line_that_is_never_negative(seconds: tuple, line: tuple) -> None:
    """By hand: exact; falling with the requests, so its mean; through the origin, Σxy / Σx²."""
    points = [{"requests": requests, "seconds": value} for requests, value in zip((1, 2, 4), seconds, strict=True)]
    assert profile.fit_drafting(points) == pytest.approx(line)


def test_schedulers_see_the_drafting_of_their_requests() -> None:
    timed = SPSProfile((TABLE,), {"draft_seconds": 0.004, "draft_row_seconds": 0.001})
    assert timed.drafting(6) == pytest.approx(0.01)
    assert timed.rounds_at(0, 6).curve(20) == pytest.approx(TABLE.with_overhead(0.01).curve(20))
    assert SPSProfile((TABLE,)).rounds_at(0, 6).curve(20) == pytest.approx(TABLE.curve(20))
