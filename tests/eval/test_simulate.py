"""The serving model against one that handles requests one by one, replay against records, and the policies' order."""

import json
from dataclasses import replace

import numpy as np
import pytest

from deepspec.eval import simulate as command
from deepspec.eval.replay import DOMAINS, Stream, record, stream_of, synthetic
from deepspec.eval.rounds import RoundsError, from_prompts, write_rounds
from deepspec.eval.scheduler import Causal, Static, Threshold
from deepspec.eval.simulation import Outcome, Serving, policy_of, simulate
from deepspec.eval.sps import SPSProfile, SPSTable, roofline


def small_stream(requests: int = 60, tokens: int = 40, seed: int = 1) -> Stream:
    return synthetic(requests, tokens=tokens, prompt_tokens=20, difficulty=DOMAINS["mix"], seed=seed)


def one_by_one(stream: Stream, table: SPSTable, serving: Serving, scheduler) -> dict[str, float]:
    """The same model with a list of requests and no arrays, over the whole run."""
    random = np.random.default_rng(serving.seed)
    source = random.integers(len(stream.start_Q), size=serving.requests)
    gaps = random.exponential(1.0, serving.requests)
    arrivals = np.cumsum(gaps) / serving.arrival_rate if serving.arrival_rate else np.zeros(serving.requests)
    waiting = list(zip(arrivals.tolist(), source.tolist(), strict=True))
    active: list[dict] = []
    now = busy = request_seconds = latency = 0.0
    tokens = 0
    while waiting or active:
        prompt = 0
        while waiting and len(active) < serving.concurrency and waiting[0][0] <= now:
            arrival, q = waiting.pop(0)
            prompt += int(stream.prompt_length_Q[q])
            active.append({"at": int(stream.start_Q[q]), "left": int(stream.length_Q[q]), "arrival": arrival})
        if not active:
            now = waiting[0][0]
            continue
        lengths = scheduler(np.stack([stream.confidence_TG[each["at"]] for each in active]))
        size = len(active) + int(sum(lengths))
        if serving.padded:
            size = len(active) * (int(max(lengths)) + 1)
        seconds = 1 / table(size) + serving.draft_seconds + serving.draft_row_seconds * len(active)
        if serving.prefill_tokens_per_second:
            seconds += prompt / serving.prefill_tokens_per_second
        now, busy = now + seconds, busy + seconds
        request_seconds += seconds * len(active)
        for each, length in zip(active, lengths, strict=True):
            step = min(min(int(stream.accepted_T[each["at"]]), int(length)) + 1, each["left"])
            each["at"] += step
            each["left"] -= step
            tokens += step
            if not each["left"]:
                latency += now - each["arrival"]
        active = [each for each in active if each["left"]]
    return {"throughput": tokens / busy, "user_speed": tokens / request_seconds, "latency": latency / serving.requests}


@pytest.mark.parametrize("rate", [0.0, 30.0])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_simulation_one_by_one(rate: float, padded: bool) -> None:
    stream, table = small_stream(), roofline(limit=512)
    serving = Serving(
        requests=9, concurrency=12, arrival_rate=rate, prefill_tokens_per_second=5e3, padded=padded, seed=4
    )
    expected = one_by_one(stream, table, serving, Causal(table))
    found = simulate(stream, "causal", table, serving, scheduler=Causal(table))
    assert found.latency == pytest.approx(expected["latency"])
    if not rate:  # all nine are in from the start, so the steady window is empty and the whole run counts
        assert found.throughput == pytest.approx(expected["throughput"])
        assert found.user_speed == pytest.approx(expected["user_speed"])


def test_arrivals_set_the_throughput_of_an_idle_server() -> None:
    stream, table = small_stream(tokens=60), roofline(limit=512)
    serving = Serving(requests=2000, concurrency=64, arrival_rate=20.0)
    found = simulate(stream, "static", table, serving, scheduler=Static(3))
    seconds_each = stream.length_Q.mean() / found.user_speed
    assert found.active < 20
    assert found.latency == pytest.approx(seconds_each, rel=0.1)  # nobody waits
    saturated = simulate(stream, "static", table, replace(serving, arrival_rate=0.0), scheduler=Static(3))
    assert saturated.active == pytest.approx(64)
    assert saturated.throughput > found.throughput


def test_full_blocks_replay_the_recorded_rounds() -> None:
    rounds = record(small_stream())
    replayed = record(stream_of(rounds))
    assert np.array_equal(replayed.accepted_N, rounds.accepted_N)
    assert np.array_equal(replayed.confidence_NG, rounds.confidence_NG)


def test_inside_a_block_replay_continues_it() -> None:
    """Rounds worked out by hand: 2 of 3 accepted, then 3 of 3, then 0 of 3; γ = 3."""
    rounds = from_prompts([[(3, 2, [0.9, 0.8, 0.1]), (3, 3, [0.7, 0.6, 1.0]), (3, 0, [0.2, 0.3, 0.4])]])
    stream = stream_of(rounds)
    assert stream.length_Q.tolist() == [3 + 4 + 1]
    # First block: from its anchor, after one token, after two; then its own token closes it.
    assert stream.accepted_T[:3].tolist() == [2, 1, 0]
    assert stream.confidence_TG[1].tolist() == pytest.approx([0.8, 0.1, 0.1])
    # Second block: behind its last token comes the target's own (accepted: its confidence is 1), then the third block.
    assert stream.accepted_T[3:7].tolist() == [3, 3, 2, 1]
    assert stream.confidence_TG[4].tolist() == pytest.approx([0.6, 1.0, 1.0])
    assert stream.confidence_TG[6].tolist() == pytest.approx([1.0, 0.2, 0.3])
    assert stream.accepted_T[7] == 0


def test_a_shorter_length_commits_what_the_target_would_have_accepted() -> None:
    stream = small_stream()
    table = roofline(limit=256)
    serving = Serving(requests=200, concurrency=4)
    by_length = [simulate(stream, "static", table, serving, scheduler=Static(k)).tau for k in range(1, 8)]
    assert by_length == sorted(by_length)
    zero = simulate(stream, "none", table, serving, scheduler=Static(0))
    assert (zero.tau, zero.budget, zero.acceptance) == (1.0, 0.0, 0.0)
    assert zero.throughput == pytest.approx(4 * table(4))


def test_recordings_understate_short_lengths_and_only_those() -> None:
    """What ``stream_of`` says of itself, measured where the truth is known."""
    truth = synthetic(400, tokens=120, difficulty=DOMAINS["mix"], seed=3)
    replayed = stream_of(record(truth))
    table, serving = roofline(limit=256), Serving(requests=400, concurrency=8)
    gaps = []
    for length in (1, 3, 7):
        both = [simulate(s, "static", table, serving, scheduler=Static(length)).tau for s in (truth, replayed)]
        gaps.append(both[1] / both[0] - 1)
    assert -0.12 < gaps[0] <= 0.0
    assert abs(gaps[2]) < 0.03  # full blocks: only where a request ends differs
    chosen = [simulate(s, "causal", table, serving, scheduler=Causal(table)).throughput for s in (truth, replayed)]
    assert chosen[1] == pytest.approx(chosen[0], rel=0.03)


def test_rounds_recorded_under_a_schedule_are_refused() -> None:
    rounds = from_prompts([[(2, 2, [0.9, 0.9]), (3, 1, [0.9, 0.9, 0.9]), (3, 1, [0.5, 0.5, 0.5])]] * 3)
    with pytest.raises(RoundsError, match="full blocks"):
        stream_of(rounds)
    with pytest.raises(RoundsError, match="confidence head"):
        stream_of(from_prompts([[(3, 1, None)]]))


def outcomes_at(table: SPSTable, concurrency: int, policies: tuple[str, ...]) -> dict[str, Outcome]:
    stream = synthetic(300, tokens=120, difficulty=DOMAINS["mix"], seed=2)
    serving = Serving(requests=max(150, 5 * concurrency), concurrency=concurrency)
    rows = command.sweep(
        stream, table, serving, policies=policies, concurrencies=(concurrency,), lengths=(1, 2, 3, 5, 7)
    )
    return {row["policy"]: row for row in rows}


@pytest.mark.parametrize("concurrency", [4, 32, 100])
def test_on_a_smooth_curve_the_schedulers_match_and_beat_every_static_length(concurrency: int) -> None:
    found = outcomes_at(roofline(tile=1, graph_sizes=(1,), limit=1024), concurrency, ("static", "causal", "async"))
    assert found["causal"]["throughput"] >= 0.99 * found["static"]["throughput"]
    assert found["async"]["throughput"] >= 0.99 * found["causal"]["throughput"]
    if concurrency > 4:
        assert found["causal"]["throughput"] > 1.03 * found["static"]["throughput"]


@pytest.mark.parametrize("concurrency", [8, 64])
def test_on_steps_plateau_and_async_keep_the_order_and_causal_is_the_exception(concurrency: int) -> None:
    found = outcomes_at(roofline(limit=1024), concurrency, ("static", "causal", "plateau", "async"))
    assert found["plateau"]["throughput"] >= 0.99 * found["static"]["throughput"]
    assert found["async"]["throughput"] >= 0.99 * found["plateau"]["throughput"]
    if concurrency == 64:  # an edge: one more token than requests costs a whole tile
        assert found["causal"]["budget"] == 0.0


def test_user_speed_at_the_throughput_of_mtp_1() -> None:
    policies = ("none", "mtp-1", "async")
    stream = synthetic(300, tokens=120, difficulty=DOMAINS["math"], seed=2)
    rows = command.sweep(stream, roofline(), Serving(requests=100), policies=policies, concurrencies=(8, 32, 96))
    gains = [row["speed_over_mtp_1"]["async"] for row in command.comparison(rows)]
    assert min(gains) > 0.2
    assert [row["budget"] for row in rows if row["policy"] == "async"] == sorted(
        (row["budget"] for row in rows if row["policy"] == "async"), reverse=True
    )


def test_speed_at_interpolates_the_frontier() -> None:
    rows = [{"policy": "x", "throughput": t, "user_speed": s} for t, s in ((100.0, 50.0), (200.0, 30.0), (150.0, 20.0))]
    assert command.speed_at(rows, "x", 100.0) == 50.0
    assert command.speed_at(rows, "x", 175.0) == 30.0  # dominated points do not count
    assert command.speed_at(rows, "x", 201.0) is None
    assert command.speed_at(rows, "y", 1.0) is None


def test_policies_by_name() -> None:
    assert isinstance(policy_of("threshold", roofline(limit=64), length=3, threshold=0.4), Threshold)
    assert policy_of("mtp-1", roofline(limit=64), length=3, threshold=0.4)(np.full((1, 7), 0.5)).tolist() == [1]
    for name, value in (("requests", 0), ("concurrency", 0), ("draft_seconds", -1.0)):
        with pytest.raises(ValueError, match=name):
            Serving(**{name: value})


def test_command_line(tmp_path, capsys) -> None:
    write_rounds(tmp_path / "records.jsonl", record(small_stream()))
    (tmp_path / "calibration.json").write_text(json.dumps({"temperatures": [1.1] * 7}))
    SPSProfile((roofline(limit=256),)).save(tmp_path / "sps.csv")
    arguments = ["--records", str(tmp_path), "--sps", str(tmp_path / "sps.csv"), "--concurrency", "2,8"]
    arguments += ["--requests", "20", "--calibration", str(tmp_path / "calibration.json"), "--lengths", "1,7"]
    assert command.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert len(written["outcomes"]) == 2 * 7
    assert (tmp_path / "out" / "frontier.svg").read_text().startswith("<svg")
    assert "<svg" in (tmp_path / "out" / "budget.svg").read_text()
    assert command.main(["--policies", "greedy"]) == 2
    assert command.main(["--records", str(tmp_path / "absent.jsonl")]) == 2
    assert command.main(["--records", str(tmp_path), "--calibration", str(tmp_path / "out" / "simulation.json")]) == 2
    assert command.main(["--calibration", str(tmp_path / "calibration.json"), "--synthetic", "mix"]) == 2
    described = {"folder": "some", "confidence": True, "calibrated": True}
    (tmp_path / "results.json").write_text(json.dumps({"variants": [{"id": "records", "drafter": described}]}))
    assert command.main(arguments) == 2
    errors = capsys.readouterr().err
    assert "these requests are synthetic: add --records" in errors
    assert "are calibrated already (its results.json): drop --calibration" in errors
    assert "unknown policies greedy" in errors
    assert "absent.jsonl" in errors
    assert "simulation.json has no temperatures: give the calibration.json" in errors


def test_costs_come_from_the_profile_unless_given(tmp_path) -> None:
    profiled = {"draft_seconds": 0.25, "draft_row_seconds": 0.125, "prefill_tokens_per_second": 900.0}
    SPSProfile((roofline(limit=256),), profiled).save(tmp_path / "sps.json")
    arguments = ["--sources", "20", "--concurrency", "2", "--requests", "10", "--policies", "none,async"]
    arguments += ["--sps", str(tmp_path / "sps.json"), "--output", str(tmp_path / "out"), "--draft-seconds", "0"]
    assert command.main(arguments) == 0
    serving = json.loads((tmp_path / "out" / "simulation.json").read_text())["serving"]
    wanted = {**profiled, "draft_seconds": 0.0, "mtp_draft_seconds": 0.0}
    assert {name: serving[name] for name in wanted} == wanted
    assert command.main([*arguments[:-2]]) == 0
    serving = json.loads((tmp_path / "out" / "simulation.json").read_text())["serving"]
    assert serving["mtp_draft_seconds"] == pytest.approx(0.25 / 5)
