"""Temperatures against brute force, metrics against their definitions, files and command line."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspec.eval import calibrate, calibration, calibration_report, confidence
from deepspec.eval.max_probability import MaxProbability
from deepspec.eval.replay import Difficulty, record, synthetic
from deepspec.eval.rounds import Rounds, RoundsError, drafter_of, from_prompts, read_rounds, write_rounds
from deepspec.eval.scheduler import make_schedule
from deepspec.eval.sps import SPSProfile, SPSTable
from deepspec.models import drafter as checkpoints
from deepspec.models.confidence_scale import ConfidenceScale
from deepspec.models.decode import generate
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.sampling import Sampling
from deepspec.models.target import Target, TargetConfig
from tests.eval import tiny_run


def random_rounds(seed: int, prompts: int = 40, per_prompt: int = 30, block: int = 3, sharpness: float = 2.0) -> Rounds:
    """Acceptances drawn from probabilities whose logits the drafter exaggerates by ``sharpness``."""
    random = np.random.default_rng(seed)
    count = prompts * per_prompt
    logits = random.normal(1.0, 1.5, (count, block))
    accepted = np.cumprod(random.random((count, block)) < 1 / (1 + np.exp(-logits)), axis=1).sum(axis=1)
    confidence = (1 / (1 + np.exp(-sharpness * logits))).astype(np.float32)
    return Rounds(np.repeat(np.arange(prompts), per_prompt), np.full(count, block), accepted, confidence)


def plain_ece(predicted: list[float], outcome: list[float], bins: int) -> float:
    """Σ_b n_b/n · |mean confidence − share accepted|, as one reads it."""
    members: list[list[int]] = [[] for _ in range(bins)]
    for i, value in enumerate(predicted):
        members[min(int(value * bins), bins - 1)].append(i)
    total = 0.0
    for each in members:
        if each:
            mean = sum(predicted[i] for i in each) / len(each)
            share = sum(outcome[i] for i in each) / len(each)
            total += len(each) / len(predicted) * abs(mean - share)
    return total


def test_metrics_are_their_definitions() -> None:
    random = np.random.default_rng(0)
    predicted = np.round(random.random(200), 2)  # ties
    outcome = (random.random(200) < predicted).astype(float)
    assert confidence.ece(predicted, outcome, 7) == pytest.approx(plain_ece(predicted.tolist(), outcome.tolist(), 7))
    pairs = [
        1.0 if good > bad else 0.5 if good == bad else 0.0
        for good, bad in itertools.product(predicted[outcome == 1], predicted[outcome == 0])
    ]
    assert confidence.auc(predicted, outcome) == pytest.approx(np.mean(pairs))
    assert confidence.brier(predicted, outcome) == pytest.approx(np.mean((predicted - outcome) ** 2))
    assert math.isnan(confidence.auc(predicted, np.ones(200)))
    weight = random.integers(0, 3, 200)
    repeated = np.repeat(np.arange(200), weight)
    assert confidence.auc(predicted, outcome, weight.astype(float)) == pytest.approx(
        confidence.auc(predicted[repeated], outcome[repeated])
    )


def test_the_floor_is_what_exact_probabilities_show() -> None:
    random = np.random.default_rng(1)
    predicted = random.random(3000) ** 2
    shown = [confidence.ece(predicted, (random.random(3000) < predicted).astype(float)) for _ in range(400)]
    assert confidence.ece_floor(predicted) == pytest.approx(np.mean(shown), rel=0.03)
    exact = random_rounds(3, sharpness=1.0)
    floors = confidence.floors_of(exact, exact.confidence_NG)
    survival_N = exact.confidence_NG[:, 0] * exact.confidence_NG[:, 1]
    assert floors[1] == pytest.approx(confidence.ece_floor(survival_N), rel=1e-5)
    assert math.isnan(confidence.ece_floor(np.empty(0)))


def test_sts_is_the_sequential_grid_search() -> None:
    rounds = random_rounds(1)
    grid = np.array([0.5, 1.0, 1.5, 2.0, 3.0])
    found: list[float] = []
    for k in range(3):
        errors = {}
        for candidate in grid.tolist():
            survival = np.ones(len(rounds))
            for i, temperature in enumerate([*found, candidate]):
                c = rounds.confidence_NG[:, i].astype(float)
                survival *= 1 / (1 + ((1 - c) / c) ** (1 / temperature))
            outcome = (rounds.accepted_N > k).astype(float)
            errors[candidate] = plain_ece(survival.tolist(), outcome.tolist(), calibration.BINS)
        found.append(min(errors, key=errors.__getitem__))
    assert calibration.fit_sts(rounds, grid) == tuple(found)


def test_sts_recovers_the_exaggeration_and_keeps_the_order() -> None:
    fit, test = random_rounds(2, prompts=300, per_prompt=100).split(seed=1)
    temperatures = calibration.fit_sts(fit)
    assert temperatures == pytest.approx((2.0, 2.0, 2.0), rel=0.25)
    scaled = calibration.scale(test.confidence_NG, ConfidenceScale(temperatures))
    before = confidence.errors_of(test, test.confidence_NG)
    after = confidence.errors_of(test, scaled)
    assert np.mean(after) < 0.015 < np.mean(before)
    for k in range(3):
        samples = confidence.reached(test, k)
        raw = confidence.auc(test.confidence_NG[samples.rows, k], samples.label)
        assert confidence.auc(scaled[samples.rows, k], samples.label) == pytest.approx(raw, abs=1e-6)


def test_positions_that_nothing_reaches_take_the_temperature_before() -> None:
    """Least ECE alone would make them extreme: whatever is rejected always is predicted best by a survival of 0."""
    rounds = random_rounds(7, prompts=100)
    hopeless = Rounds(rounds.prompt_N, rounds.proposed_N, np.minimum(rounds.accepted_N, 1), rounds.confidence_NG)
    temperatures = calibration.fit_sts(hopeless)
    assert temperatures[1] == temperatures[2] == temperatures[0] != 1.0
    assert [calibration.identified(hopeless, k) for k in range(3)] == [True, False, False]
    platt = calibration.fit_platt(hopeless)
    assert platt.temperatures[1:] == platt.temperatures[:1] * 2
    assert platt.shifts[1:] == platt.shifts[:1] * 2


def test_platt_recovers_a_shift_that_no_temperature_can() -> None:
    """Rounds that start where the drafter thinks too well of itself: log-odds too high by a half, slope right."""
    raw = random_rounds(11, prompts=300, per_prompt=100, sharpness=1.0)
    wrong = calibration.scale(raw.confidence_NG, ConfidenceScale((0.5,) * 3, (0.5,) * 3)).astype(np.float32)
    fit, test = Rounds(raw.prompt_N, raw.proposed_N, raw.accepted_N, wrong).split(seed=1)
    scale = calibration.fit_platt(fit)
    assert scale.temperatures == pytest.approx((2.0, 2.0, 2.0), rel=0.1)
    assert scale.shifts == pytest.approx((-0.25, -0.25, -0.25), abs=0.08)
    scaled = calibration.scale(test.confidence_NG, scale)
    cooled = calibration.scale(test.confidence_NG, ConfidenceScale(calibration.fit_sts(fit)))
    errors, floors = confidence.errors_of(test, scaled), confidence.floors_of(test, scaled)
    assert np.mean(errors) < 2 * np.mean(floors) < np.mean(confidence.errors_of(test, cooled))
    for k in range(3):
        samples = confidence.reached(test, k)
        values = [each[samples.rows, k] for each in (test.confidence_NG, scaled)]
        areas = [confidence.auc(value, samples.label) for value in values]
        assert areas[0] == pytest.approx(areas[1], abs=1e-6)


def test_platt_is_the_maximum_of_the_likelihood() -> None:
    """Against Newton's method in plain float64 arithmetic, with Platt's targets."""
    rounds = random_rounds(12, prompts=20, per_prompt=20)
    scale = calibration.fit_platt(rounds)
    for k in range(3):
        samples = confidence.reached(rounds, k)
        x = np.array([math.log(c / (1 - c)) for c in rounds.confidence_NG[samples.rows, k].astype(float)])
        accepted = samples.label.sum()
        rejected = len(x) - accepted
        wanted = np.where(samples.label == 1, (accepted + 1) / (accepted + 2), 1 / (rejected + 2))
        design, point = np.stack([x, np.ones_like(x)], 1), np.array([1.0, 0.0])
        for _ in range(50):
            p = 1 / (1 + np.exp(-design @ point))
            point += np.linalg.solve(design.T @ (design * (p * (1 - p))[:, None]), design.T @ (wanted - p))
        assert 1 / scale.temperatures[k] == pytest.approx(point[0], rel=1e-3)
        assert scale.shifts[k] == pytest.approx(point[1], abs=1e-3)


def test_the_judging_prompts_have_no_say_in_the_method() -> None:
    """Chosen on a part of the fitting half: outcomes of the judging half may be anything."""
    rounds = random_rounds(15, prompts=60)
    report = calibration_report.calibrate(rounds, resamples=5)
    fit, test = rounds.split(0)
    inner, judging = fit.split(0)
    errors = {
        name: np.mean(confidence.errors_of(judging, calibration.scale(judging.confidence_NG.astype(float), scale)))
        for name, scale in calibration_report.fit_scales(inner).items()
    }
    assert report["method"] == min(errors, key=errors.__getitem__)
    assert report["temperatures"] == list(calibration_report.fit_scales(fit)[report["method"]].temperatures)
    for other in range(4):
        random = np.random.default_rng(other)
        accepted = rounds.accepted_N.copy()
        unseen = np.isin(rounds.prompt_N, test.prompts)
        accepted[unseen] = random.integers(0, 4, int(unseen.sum()))
        changed = Rounds(rounds.prompt_N, rounds.proposed_N, accepted, rounds.confidence_NG)
        again = calibration_report.calibrate(changed, resamples=5)
        assert (again["method"], again["scales"]) == (report["method"], report["scales"])


def test_too_few_rounds_for_an_inner_split_are_all_used() -> None:
    rounds = random_rounds(16, prompts=6, per_prompt=15)  # 45 and 45 within
    errors = {
        name: np.mean(confidence.errors_of(rounds, calibration.scale(rounds.confidence_NG.astype(float), scale)))
        for name, scale in calibration_report.fit_scales(rounds).items()
    }
    assert calibration_report.choose(rounds, seed=0) == min(errors, key=errors.__getitem__)


def test_positions_that_were_not_offered_do_not_count() -> None:
    rounds = from_prompts([[(1, 1, [0.9, 0.8, 0.7]), (3, 1, [0.6, 0.5, 0.4])], [(0, 0, [0.3, 0.3, 0.3])]])
    assert rounds.block_size == 3
    assert confidence.observed(rounds, 0).rows.tolist() == [0, 1]
    assert confidence.observed(rounds, 1).rows.tolist() == [1]
    assert confidence.observed(rounds, 1).label.tolist() == [0.0]
    assert confidence.reached(rounds, 1).rows.tolist() == [1]
    assert confidence.reached(rounds, 2).rows.tolist() == []


def test_isotonic_is_the_least_squares_step_function() -> None:
    random = np.random.default_rng(3)
    score = np.round(random.random(60), 1)
    outcome = (random.random(60) < score).astype(float)
    knots, levels = calibration.isotonic(score, outcome)
    assert (np.diff(levels) >= 0).all()
    from scipy.optimize import isotonic_regression

    means = [outcome[score == knot].mean() for knot in knots]
    counts = [float((score == knot).sum()) for knot in knots]
    assert levels == pytest.approx(isotonic_regression(means, weights=counts).x)


def test_intervals_resample_prompts() -> None:
    """Prompts that are all alike inside: resampling rounds would claim a certainty that is not there."""
    random = np.random.default_rng(5)
    accepted = np.repeat(random.random(20) < 0.7, 50).astype(np.int64)
    rounds = Rounds(
        np.repeat(np.arange(20), 50), np.ones(1000, np.int64), accepted, np.full((1000, 1), 0.7, np.float32)
    )
    entry = confidence.judge(rounds, rounds.confidence_NG, resamples=400)[0]
    brier = entry["brier"]
    assert brier["low"] < brier["value"] < brier["high"]
    assert brier["high"] - brier["low"] > 0.1  # ± 1.96 · 0.4 · √(.7·.3/20), halved; by rounds it would be 0.02
    assert math.isclose(entry[confidence.ECE]["value"], abs(0.7 - accepted.mean()), abs_tol=1e-6)


def test_split_is_by_prompt() -> None:
    fit, test = random_rounds(6).split(seed=3, test_share=0.25)
    assert not set(fit.prompts) & set(test.prompts)
    assert len(test.prompts) == 10
    assert len(fit) + len(test) == 1200
    with pytest.raises(RoundsError, match="two prompts"):
        random_rounds(6, prompts=1).split()


def test_records_files(tmp_path) -> None:
    rounds = record(synthetic(3, tokens=20, difficulty=Difficulty(), seed=1))
    write_rounds(tmp_path / "records.jsonl", rounds)
    again = read_rounds(tmp_path)
    assert np.array_equal(again.accepted_N, rounds.accepted_N)
    assert np.allclose(again.confidence_NG, rounds.confidence_NG, atol=1e-6)
    line = {"settings": "abc", "prompt": "p", "turn": 0, "rounds": [[3, 3, 2], [2, 2, 3]]}
    line["confidence"] = [[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]]
    plain = {"settings": "plain", "prompt": "p", "turn": 0, "rounds": [[0, 0, 1]], "confidence": None}
    text = "\n".join(json.dumps(each) for each in (line, line, plain, {"failure": "no rounds here"}))
    (tmp_path / "records.jsonl").write_text(text + "\n")
    cut = read_rounds(tmp_path / "records.jsonl")  # the second line of a prompt is a repetition
    assert (cut.proposed_N.tolist(), cut.accepted_N.tolist()) == ([2, 2], [2, 2])  # a stop token cut the first round
    (tmp_path / "more.jsonl").write_text(json.dumps({**line, "settings": "xyz"}) + "\n")
    with pytest.raises(RoundsError, match=r"--run NAME: more@xyz \(1 prompts\), records@abc"):
        read_rounds(tmp_path)
    assert len(read_rounds(tmp_path, "more")) == 2
    (tmp_path / "more.jsonl").write_text('{"rounds": [[1, 1]], "confidence": [[0.5]]}\n')
    with pytest.raises(RoundsError, match="line 1"):
        read_rounds(tmp_path)
    with pytest.raises(RoundsError, match="accepted 3 of 2"):
        from_prompts([[(2, 3, [0.5, 0.5])]])


def test_a_run_is_named_in_full_before_its_beginning_counts(tmp_path) -> None:
    """--run dspark-k7-b1, which an evaluation prints, is not dspark-k7-b16; NAME@SETTINGS finds its drafter too."""
    lines = {"dspark-k7-b1": ["one"], "dspark-k7-b16": ["two"], "other-k7-b1": ["three", "four"]}
    for name, settings in lines.items():
        text = ""
        for number, key in enumerate(settings):
            rounds = [[2, 1, 2]] * (len(name) + number)
            text += json.dumps(
                {"prompt": "p", "settings": key, "rounds": rounds, "confidence": [[0.5, 0.5]] * len(rounds)}
            )
            text += "\n"
        (tmp_path / f"records-{name}-rank0.jsonl").write_text(text)
    assert len(read_rounds(tmp_path, "dspark-k7-b1")) == len("dspark-k7-b1")
    assert len(read_rounds(tmp_path, "dspark-k7-b16")) == len("dspark-k7-b16")
    assert len(read_rounds(tmp_path, "other-k7-b1@four")) == len("other-k7-b1") + 1
    for ambiguous in ("dspark", "other-k7-b1", None):
        with pytest.raises(RoundsError, match="choose one with --run"):
            read_rounds(tmp_path, ambiguous)
    variants = [{"id": name, "drafter": {"folder": f"made/{name}", "confidence": True}} for name in lines]
    (tmp_path / "results.json").write_text(json.dumps({"variants": variants}))
    described = {run: drafter_of(tmp_path, run).get("folder") for run in (*lines, "other-k7-b1@four", "dspark")}
    assert described == {name: f"made/{name}" for name in lines} | {
        "other-k7-b1@four": "made/other-k7-b1",
        "dspark": None,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A target, a DSpark and an EAGLE-3 drafter with random weights, and prompts."""
    folder = tmp_path_factory.mktemp("calibrate")
    target = tiny_run.save_target(folder / "tiny")
    dspark = tiny_run.save_drafter(folder / "drafters" / "dspark", target)
    weights = load_file(dspark / "model.safetensors")
    direction = weights["confidence_head.proj.weight"]
    direction.normal_(generator=torch.Generator().manual_seed(1))
    weights["confidence_head.proj.bias"] += 6.0  # so sure that cooling helps on any prompts
    save_file(weights, dspark / "model.safetensors", metadata={"format": "pt"})
    tiny_run.save_drafter(folder / "drafters" / "eagle3", target, kind="eagle3", ttt_length=3)
    tiny_run.write_prompts(folder / "prompts.jsonl", [[f"Question {i}?"] for i in range(6)])
    return folder


def uncalibrated(trained, name: str, folder):
    """A copy of a drafter as it was before any test calibrated it."""
    shutil.copytree(trained / "drafters" / name, folder)
    nothing = dict.fromkeys(("temperatures", "shifts", "max_probability", "calibration"))
    checkpoints.update_metadata(folder, **nothing)
    return folder


def decode_and_calibrate(folder, name: str, *more: object) -> int:
    arguments = [
        "--drafter",
        folder / "drafters" / name,
        "--target",
        folder / "tiny",
        "--suite",
        folder / "prompts.jsonl",
    ]
    arguments += ["--max-new-tokens", "60", "--output", folder / name, "--device", "cpu", "--resamples", "20", *more]
    return calibrate.main([*map(str, arguments)])


def test_command_decodes_stores_and_is_undone(trained, capsys) -> None:
    checkpoint = trained / "drafters" / "dspark"
    before = json.loads((checkpoint / "config.json").read_text())
    assert decode_and_calibrate(trained, "dspark", "--sweep") == 0
    report = json.loads((trained / "dspark" / "calibration.json").read_text())
    assert (trained / "dspark" / "reliability.svg").read_text().startswith("<svg")
    errors = {name: each["mean_ece"] for name, each in report["comparison"].items()}
    assert errors[report["method"]] < errors["raw"]
    for row in report["positions"]:
        assert row["after"]["auc_conditional"]["value"] == pytest.approx(row["before"]["auc_conditional"]["value"])
    after = json.loads((checkpoint / "config.json").read_text())
    assert after["deepspec"]["temperatures"] == report["temperatures"]
    assert after["deepspec"]["calibration"]["format_version"] == 3
    changed = {key for key in after["deepspec"] if after["deepspec"][key] != before["deepspec"].get(key)}
    assert changed == {"temperatures", "shifts", "calibration"}
    assert after["deepspec"]["calibration"]["method"] == report["method"]
    assert (checkpoint / "calibration.json").is_file()
    assert "threshold  acceptance" in capsys.readouterr().out
    # Again: nothing is decoded twice, and raw confidences are fitted although the drafter is calibrated now.
    assert decode_and_calibrate(trained, "dspark", "--method", "sts", "--no-store") == 0
    forced = json.loads((trained / "dspark" / "calibration.json").read_text())
    assert forced["method"] == "sts"
    assert forced["temperatures"] == report["scales"]["sts"]["temperatures"]
    assert forced["shifts"] == [0.0] * len(forced["temperatures"])
    assert decode_and_calibrate(trained, "dspark") == 0
    assert json.loads((checkpoint / "config.json").read_text())["deepspec"]["temperatures"] == report["temperatures"]

    output = trained / "evaluated"
    arguments = ["--suite", trained / "prompts.jsonl", "--drafter", checkpoint, "--target", trained / "tiny"]
    arguments += ["--temperature", 1, "--max-new-tokens", 60, "--output", output, "--no-plain"]
    assert tiny_run.evaluate(*arguments) == 0
    rounds = read_rounds(output)
    found, origin = calibrate.recorded(calibrate.parser().parse_args(["--records", str(output)]))
    assert origin.folder == checkpoint
    shutil.copytree(checkpoint, trained / "run" / "best")  # a run folder stands for its best checkpoint
    named = calibrate.parser().parse_args(["--records", str(output), "--drafter", str(trained / "run")])
    assert calibrate.recorded(named)[1].folder == trained / "run" / "best"
    logits = calibration.logit(found.confidence_NG.astype(float)) / np.array(report["temperatures"])
    logits += np.array(report["shifts"])
    assert np.allclose(logits, calibration.logit(rounds.confidence_NG.astype(float)), atol=1e-3, equal_nan=True)
    fields = json.loads((checkpoint / "config.json").read_text())
    fields["deepspec"]["temperatures"] = [1.0, 1.0, 1.0, 1.0]
    (checkpoint / "config.json").write_text(json.dumps(fields))
    assert calibrate.main(["--records", str(output)]) == 2
    assert "not known whether these records" in capsys.readouterr().err


def test_records_of_a_shorter_block_are_not_stored(trained, tmp_path, capsys) -> None:
    """A scale of 3 positions would make a drafter of block 4 unusable; one that is so already can be calibrated."""
    for name, more in (("dspark", []), ("eagle3", ["--max-probability"])):
        folder = uncalibrated(trained, name, tmp_path / name)
        write_rounds(tmp_path / f"{name}.jsonl", random_rounds(13, block=3))
        given = ["--records", str(tmp_path / f"{name}.jsonl"), "--drafter", str(folder), "--resamples", "20"]
        before = (folder / "config.json").read_text()
        assert calibrate.main([*given, *more]) == 2
        assert "records of block 3, the drafter's block is 4" in capsys.readouterr().err
        assert (folder / "config.json").read_text() == before
        assert calibrate.main([*given, "--no-store", *more]) == 0

    folder = tmp_path / "drafters" / "dspark"
    shutil.copytree(tmp_path / "dspark", folder)
    checkpoints.update_metadata(folder, temperatures=[2.0] * 3, shifts=[0.0] * 3)
    shutil.copyfile(trained / "prompts.jsonl", tmp_path / "prompts.jsonl")
    shutil.copytree(trained / "tiny", tmp_path / "tiny")
    with pytest.raises(checkpoints.CheckpointError, match="calibrate again"):
        checkpoints.load(folder, Target.load(TargetConfig("tiny", str(tmp_path / "tiny")), "cpu"))
    assert decode_and_calibrate(tmp_path, "dspark") == 0
    assert len(json.loads((folder / "config.json").read_text())["deepspec"]["temperatures"]) == 4


def test_the_same_records_can_be_fitted_twice(trained, tmp_path, capsys) -> None:
    """Storing changes the drafter's fingerprint; the summary says which one the records name and what was on them."""
    folder = uncalibrated(trained, "dspark", tmp_path / "dspark")
    before = (folder / "config.json").read_text()
    arguments = ["--suite", trained / "prompts.jsonl", "--drafter", folder, "--target", trained / "tiny", "--no-plain"]
    arguments += ["--temperature", 1, "--max-new-tokens", 60]

    def fitted(records: str, method: str) -> dict:
        given = ["--records", tmp_path / records, "--method", method, "--resamples", 20]
        assert calibrate.main([*map(str, given)]) == 0
        return json.loads((folder / "config.json").read_text())["deepspec"]

    for records in ("raw", "scaled"):  # the second are made with what the first left in the drafter
        assert tiny_run.evaluate(*arguments, "--output", tmp_path / records) == 0
        start = (folder / "config.json").read_text()
        scratch = {}
        for method in ("platt", "sts"):
            (folder / "config.json").write_text(start)
            scratch[method] = fitted(records, method)
        assert scratch["platt"]["temperatures"] != scratch["sts"]["temperatures"]
        for method in ("platt", "sts"):
            assert fitted(records, method) == scratch[method]
    assert scratch["sts"]["calibration"]["undone"] is not None
    assert calibrate.main(["--records", str(tmp_path / "raw")]) == 2
    assert "not known whether these records" in capsys.readouterr().err
    (folder / "config.json").write_text(before)
    assert calibrate.main(["--records", str(tmp_path / "scaled")]) == 2  # nor what was on them, now that it is gone
    assert "these records are calibrated" in capsys.readouterr().err
    assert fitted("raw", "sts")["calibration"]["undone"] is None


def test_confidences_are_those_of_the_head_or_else_the_largest_probabilities(trained, tmp_path, capsys) -> None:
    """Whatever the command line says, a scale goes where the drafter's confidences are read from."""
    write_rounds(tmp_path / "records.jsonl", random_rounds(14, block=4))
    records = ["--records", str(tmp_path / "records.jsonl"), "--resamples", "20"]
    headed = uncalibrated(trained, "dspark", tmp_path / "dspark")
    before = (headed / "config.json").read_text()
    assert calibrate.main([*records, "--drafter", str(headed), "--max-probability"]) == 2
    assert decode_and_calibrate(trained, "dspark", "--max-probability") == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.endswith("drop --max-probability") for line in said] == [True, True]
    assert (headed / "config.json").read_text() == before
    bare = uncalibrated(trained, "eagle3", tmp_path / "eagle3")
    assert calibrate.main([*records, "--drafter", str(bare)]) == 0
    fields = json.loads((bare / "config.json").read_text())["deepspec"]
    assert fields["temperatures"] is None
    assert len(fields["max_probability"]["temperatures"]) == 4


def test_drafters_without_a_confidence_head(trained, capsys) -> None:
    assert decode_and_calibrate(trained, "eagle3") == 2
    assert "--max-probability" in capsys.readouterr().err
    assert decode_and_calibrate(trained, "dspark", "--target", trained / "drafters") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("calibrate: ")
    assert "config.json" in said, "a target that transformers cannot open is one line"
    assert decode_and_calibrate(trained, "eagle3", "--max-probability", "--temperature", 0) == 0
    fields = json.loads((trained / "drafters" / "eagle3" / "config.json").read_text())["deepspec"]
    report = json.loads((trained / "eagle3" / "calibration.json").read_text())
    errors = {name: each["mean_ece"] for name, each in report["comparison"].items()}
    assert not fields.get("temperatures")  # those of a confidence head, which this drafter does not have
    said = capsys.readouterr().out
    if errors[report["method"]] < errors["raw"]:
        assert fields["max_probability"] == {name: report[name] for name in ("temperatures", "shifts")}
        assert len(report["temperatures"]) == 4
        assert fields["calibration"]["method"] == report["method"]
        assert "scale stored in" in said
    else:
        assert "max_probability" not in fields
        assert "calibration" not in fields
        assert "no better than none" in said


def confidences(completion) -> np.ndarray:
    """Of the rounds that drafted (the last token of a request needs none)."""
    return np.array([r.confidence for r in completion.rounds if r.confidence is not None])


def test_max_probability_is_that_of_the_draft_and_leaves_it_alone(trained) -> None:
    target = Target.load(TargetConfig("tiny", str(trained / "tiny")), "cpu")
    inner = checkpoints.load(trained / "drafters" / "eagle3", FrozenHead.of(target))
    prompt = [list(range(5, 15))]
    for sampling in (Sampling(), Sampling(0.8)):
        plain, wrapped = (
            next(iter(generate(target, prompt, drafter=each, sampling=sampling, max_new_tokens=12, stop_ids=())))
            for each in (inner, MaxProbability(inner))
        )
        assert plain.tokens == wrapped.tokens
        assert [r.accepted for r in plain.rounds] == [r.accepted for r in wrapped.rounds]
        values = confidences(wrapped)
        assert ((values > 1 / target.vocab_size) & (values < 1)).all()
    halved = MaxProbability(inner, ConfidenceScale((2.0,) * 4, (0.5,) * 4))
    cooler = next(iter(generate(target, prompt, drafter=halved, max_new_tokens=12, stop_ids=())))
    raw = next(iter(generate(target, prompt, drafter=MaxProbability(inner), max_new_tokens=12, stop_ids=())))
    assert np.allclose(calibration.logit(confidences(cooler)), calibration.logit(confidences(raw)) / 2 + 0.5, atol=1e-4)


def test_sweep_raises_acceptance() -> None:
    rounds = random_rounds(8, prompts=100)
    rows = confidence.threshold_sweep(rounds)
    assert rows[0]["proposal_length"] == 3.0
    assert rows[0]["draft_acceptance_rate"] == pytest.approx(rounds.accepted_N.mean() / 3, abs=1e-6)
    assert rows[0]["verify_rate"] == pytest.approx((rounds.accepted_N.mean() + 1) / 4, abs=1e-6)
    assert rows[16]["verify_rate"] > rows[0]["verify_rate"] + 0.1
    assert [row["tau"] for row in rows] == sorted((row["tau"] for row in rows), reverse=True)


def test_too_little_to_fit(tmp_path, capsys) -> None:
    write_rounds(tmp_path / "records.jsonl", random_rounds(9, prompts=4, per_prompt=5))
    assert calibrate.main(["--records", str(tmp_path)]) == 2
    assert "at least 50" in capsys.readouterr().err
    rounds = random_rounds(9)
    hopeless = Rounds(rounds.prompt_N, rounds.proposed_N, np.minimum(rounds.accepted_N, 1), rounds.confidence_NG)
    write_rounds(tmp_path / "records.jsonl", hopeless)
    assert calibrate.main(["--records", str(tmp_path), "--resamples", "20"]) == 0
    assert "NaN" not in (tmp_path / "calibration.json").read_text()
    assert "pass --drafter FOLDER" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["causal", "async"])
def test_evaluation_under_a_schedule(trained, capsys, name: str) -> None:
    sps = trained / "sps.json"
    SPSProfile((SPSTable((2, 3, 5, 9), (10.0, 9.0, 8.5, 4.0)),)).save(sps)
    arguments = ["--suite", trained / "prompts.jsonl", "--drafter", trained / "drafters" / "dspark", "--batch-size", 3]
    arguments += ["--target", trained / "tiny", "--max-new-tokens", 20, "--output", trained / name]
    assert tiny_run.evaluate(*arguments, "--schedule", name, "--sps", sps) == 0  # 3 where greedy output differs
    assert "against plain greedy decoding: identical" in capsys.readouterr().out
    assert tiny_run.results(trained / name)["settings"]["schedule"] == name
    for wrong in (
        ["--schedule", name],
        ["--sps", sps],
        ["--schedule", name, "--sps", sps, "--confidence-threshold", 0.5],
    ):
        with pytest.raises(SystemExit):
            tiny_run.evaluate(*arguments, *wrong)


@pytest.mark.parametrize("name", ["causal", "async"])
def test_what_an_evaluation_offers_is_what_the_schedule_says(trained, name: str) -> None:
    """One request at a time, so that its records are the scheduler's calls in their order."""
    sps, output = trained / "sps.json", trained / f"{name}-alone"
    table = SPSTable((2, 3, 5, 9), (10.0, 9.0, 8.5, 4.0))
    SPSProfile((table,)).save(sps)
    arguments = ["--suite", trained / "prompts.jsonl", "--drafter", trained / "drafters" / "dspark", "--no-plain"]
    arguments += ["--target", trained / "tiny", "--max-new-tokens", 20, "--output", output]
    assert tiny_run.evaluate(*arguments, "--schedule", name, "--sps", sps) == 0
    scheduler, offered, cut = make_schedule(name, sps=table), set(), 0
    (file,) = output.glob("records-dspark-*.jsonl")
    for line in map(json.loads, file.read_text().splitlines()):
        for (proposed, _, _), values in zip(line["rounds"], line["confidence"], strict=True):
            wanted = int(scheduler(np.array([values]))[0])
            cut += wanted < len(values)
            assert proposed == wanted
            offered.add(proposed)
    assert cut > 5
    assert len(offered) > 2
