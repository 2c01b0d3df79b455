"""Estimates against counts by hand, and the table that a run prints."""

import pytest
import torch

from deepspec.train import plan
from deepspec.train.setup import prepare
from tests.models.drafting import drafter
from tests.train import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tiny_run.make(tmp_path_factory.mktemp("tiny"))
    return prepare(tiny_run.config(folder), torch.device("cpu"), torch.float32)


def test_work_counts_what_a_step_multiplies(run):
    made = plan.make(run, 1)
    width, vocabulary = 32, 128
    keys = 2 * width * 2 * 8
    context = 3 * width * width + keys
    parameters = sum(p.numel() for p in run.drafter.parameters())
    lengths = [run.loader.source.lengths()[row] for row in run.loader.training_rows]
    tokens = 4 * sum(min(length, 80) for length in lengths) / len(lengths)
    drafted = 4 * 6 * 7
    expected = drafted * (6 * (parameters - context) + 4 * width * vocabulary)
    expected += 2 * width * vocabulary * tokens * run.supervised + 6 * context * tokens
    assert made.parameters == parameters
    assert made.tokens_per_step == pytest.approx(tokens)
    assert made.flops_per_step == pytest.approx(expected)
    assert 0.2 < run.supervised < 0.8


def test_sharding_offloading_and_recomputing_need_less_memory(run, monkeypatch):
    import dataclasses

    def memory(ranks, **engine):
        cfg = dataclasses.replace(run.cfg, engine=dataclasses.replace(run.cfg.engine, **engine))
        return plan.make(dataclasses.replace(run, cfg=cfg), ranks).memory

    alone = memory(1, zero=1)
    assert memory(8, zero=0) == alone
    assert alone > memory(8, zero=1) > memory(8, zero=2) > memory(8, zero=3)
    assert memory(1, zero=1, cpu_offload=True) == alone - 12 * plan.make(run, 1).parameters
    monkeypatch.setattr(run.drafter.hf_config, "num_hidden_layers", 3)
    three, recomputed = memory(1, zero=1), memory(1, zero=1, recompute=True)
    assert three - recomputed == 2 * (three - alone) // 2 - 2 * run.cfg.data.micro_tokens * 4 * 32


def test_a_gemma_4_drafter_is_estimated_with_the_heads_of_its_own_layers(run):
    import dataclasses

    made = [drafter(family, layers=1) for family in ("qwen3", "gemma4")]  # 4 heads of 8, and of 16 in full layers
    plain, gemma = (plan._activations(dataclasses.replace(run, drafter=each)) for each in made)
    assert gemma - plain == run.cfg.data.micro_tokens * 4 * 4 * 4 * 8


def test_the_table_names_the_recipe_and_stays_readable(run):
    text = plan.table(run, plan.make(run, 2), 2)
    assert max(len(line) for line in text.splitlines()[1:-1]) <= 118
    ahead = 3 * 2 * 264 // 2  # two steps ahead and one in use, bfloat16, tokens of a step on two ranks
    assert plan.make(run, 2).host == pytest.approx(ahead * 32 * (3 + run.supervised), rel=0.02)
    for part in ("markov_rank=8", "global_batch=4", "zero=1", "2 × cpu, float32", "10 (6 an epoch)", "taps [0, 1, 2]"):
        assert part in text


def test_hours_follow_from_peak_and_ranks():
    made = plan.Plan(1, 1, steps=1000, tokens_per_step=1.0, memory=1, host=1, flops_per_step=1e15)
    assert made.hours(1e15, 1) == pytest.approx(1000 / plan.STEP_SHARE / 3600)
    assert made.hours(1e15, 8) == pytest.approx(made.hours(1e15, 1) / 8)
    assert plan._peak("NVIDIA H100 80GB HBM3") == plan._peak("NVIDIA H200") == 989e12
    assert plan._peak("unheard-of") is None
