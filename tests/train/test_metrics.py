"""Ratios of sums, speeds and the console line."""

import math
from types import SimpleNamespace

import torch

from deepspec.train.metrics import Meter, Pace, clock, line

CPU = torch.device("cpu")


def test_ratios_are_of_sums_and_not_means_of_ratios():
    meter = Meter()
    meter.add({"loss": torch.tensor([1.0, 1.0]), "acceptance": torch.tensor([[1.0, 0.0], [2.0, 0.0]])})
    meter.add({"loss": torch.tensor([9.0, 3.0]), "acceptance": torch.tensor([[2.0, 1.0], [2.0, 4.0]])})
    values = meter.reduce(CPU)
    assert values["loss"] == 2.5
    assert values["acceptance"] == [0.75, 0.25]
    assert meter.reduce(CPU) == {}


def test_a_ratio_of_nothing_is_nan():
    meter = Meter()
    meter.add({"tau": torch.zeros(2)})
    value = meter.reduce(CPU)["tau"]
    assert isinstance(value, float)
    assert math.isnan(value)


def test_a_metric_keeps_no_graph():
    meter = Meter()
    weight = torch.ones(2, requires_grad=True)
    meter.add({"loss": weight * 2})
    assert meter.reduce(CPU) == {"loss": 1.0}


def test_pauses_are_left_out_of_the_pace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("deepspec.train.metrics.time", SimpleNamespace(perf_counter=lambda: now[0]))
    pace = Pace()
    now[0] += 50.0
    pace.pause(50.0)
    for _ in range(4):
        pace.count(100, 2)
    now[0] += 2.0
    first = {"tokens_per_s": 200.0, "samples_per_s": 4.0, "seconds_per_step": 0.5, "loader_wait": 0.25, "eta_s": 5.0}
    assert pace.lap(0.5, left=10, device=CPU) == first
    pace.count(100, 2)
    now[0] += 1.0
    second = pace.lap(0.5, left=10, device=CPU)
    assert (second["tokens_per_s"], second["seconds_per_step"], second["loader_wait"]) == (100.0, 1.0, 0.5)
    assert math.isclose(second["eta_s"], 10 * (0.7 * 0.5 + 0.3 * 1.0))  # smoothed


def test_the_line_shows_what_there_is():
    values = {
        "loss": 1.25,
        "tau": 2.5,
        "acceptance": [0.7, 0.5, math.nan],
        "lr": 6e-4,
        "grad_norm": 0.5,
        "eta_s": 3725.0,
    }
    text = line(7, 100, {**values, "tokens_per_s": 12345.0, "loader_wait": 0.01})
    assert text.startswith("step   7/100  loss 1.2500  τ 2.500  accept 70 50 %  lr 6.00e-04  |g| 0.50")
    assert "12.35k tok/s  wait 1 %  ETA 1:02:05" in text
    assert line(1, 1, {}) == "step 1/1"
    assert clock(59.6) == "0:01:00"
