"""Held-out means over all samples, prompts cut before the answer, and the train-versus-decode gate."""

import pytest
import torch

from deepspec.train import evaluation
from deepspec.train.objectives import LossWeights, denominators, objective
from tests.train import tiny_run


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tiny_run.make(tmp_path_factory.mktemp("tiny"))
    return tiny_run.trainer(tiny_run.config(folder, data__micro_tokens=100))


def test_heldout_metrics_are_sums_over_all_samples(trainer):
    values = evaluation.heldout(trainer.engine, trainer.loader)
    sums: dict[str, torch.Tensor] = {}
    batches = list(trainer.loader.heldout())
    assert len(batches) > 1
    with torch.no_grad():
        for batch in batches:
            batch = batch.to("cpu", torch.float32)
            total = denominators(batch, trainer.run.drafter.config, LossWeights())
            for name, pair in objective(trainer.run.drafter, batch, LossWeights(), total)[1].items():
                sums[name] = sums.get(name, torch.zeros_like(pair)) + pair
    assert sum(len(batch.ids) for batch in batches) == len(trainer.loader.heldout_rows)
    for name, pair in sums.items():
        assert values[name] == pytest.approx((pair[0] / pair[1]).tolist(), rel=1e-5), name


def test_evaluating_leaves_training_untouched(trainer):
    before = [tensor.clone() for _, _, tensor in trainer.engine.export()]
    first = evaluation.heldout(trainer.engine, trainer.loader)
    assert evaluation.heldout(trainer.engine, trainer.loader) == first
    assert all(torch.equal(a, b) for a, (_, _, b) in zip(before, trainer.engine.export(), strict=True))
    assert trainer.engine.module.training
    assert all(p.grad is None for p in trainer.run.drafter.parameters())


def test_prompts_end_before_the_answer(trainer):
    prompts = evaluation.heldout_prompts(trainer.loader, 3)
    assert len(prompts) == 3
    samples = trainer.loader.source.samples(trainer.loader.heldout_rows[:3])
    for prompt, sample in zip(prompts, samples, strict=True):
        assert prompt == sample.tokens_S[: len(prompt)].tolist()
        assert not sample.supervised_S[: len(prompt)].any()
        assert sample.supervised_S[len(prompt)]


def test_the_gate_warns_outside_its_bound_only():
    assert evaluation.gate(2.4, 2.0, 0.25) is None
    assert evaluation.gate(1.6, 2.0, 0.25) is None
    warning = evaluation.gate(1.1, 2.0, 0.25)
    assert warning is not None
    assert "decoded τ 1.100, expected τ 2.000" in warning
    assert "train.decode_bound=25%" in warning
