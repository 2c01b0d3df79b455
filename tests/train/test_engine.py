"""DeepSpeed at every ZeRO stage: exact sums, equal losses, state that any stage can restore."""

import itertools

import pytest
import torch
from torch import nn

from deepspec.train import engine as engines
from deepspec.train.config import EngineConfig, OptimConfig
from deepspec.train.engine import Engine

CPU = torch.device("cpu")
STAGES = list(itertools.product((0, 1, 2, 3), ("fp32", "bf16")))


class Toy(nn.Module):
    """A weight used outside its own layer, as W2 is, and a head by name."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.markov_head = nn.Linear(6, 16), nn.Linear(16, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x_BD, y_BD):
        return (((self.markov_head(torch.tanh(self.body(x_BD))) * self.scale - y_BD).float()) ** 2).sum() / 48


def make(stage=0, precision="fp32", offload=False, module=None, **optim) -> Engine:
    cfg = EngineConfig(zero=stage, precision=precision, cpu_offload=offload)
    engines.start(cfg, CPU)
    return Engine(module or Toy(), cfg, OptimConfig(**optim), CPU)


def run(engine: Engine, steps, lr=0.01):
    """(loss, gradient norm) of each step; every third step comes in two micro batches."""
    curve = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        x_BD, y_BD = (torch.randn(8, 6, generator=draw).to(engine.dtype) for _ in range(2))
        parts = [slice(0, 3), slice(3, 8)] if step % 3 == 2 else [slice(0, 8)]
        total = 0.0
        for index, part in enumerate(parts):
            loss = engine.forward(x_BD[part], y_BD[part], last=index == len(parts) - 1)
            engine.backward(loss)
            total += float(loss)
        result = engine.step(lr)
        assert result.applied
        curve.append((total, result.grad_norm))
    return curve


BETAS = (0.9, 0.95)


@pytest.fixture(scope="module")
def reference():
    """The same six steps by hand: torch.optim.AdamW and clip_grad_norm_."""
    module = Toy()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, betas=BETAS, weight_decay=0.0)
    curve = []
    for step in range(6):
        draw = torch.Generator().manual_seed(step)
        x_BD, y_BD = (torch.randn(8, 6, generator=draw) for _ in range(2))
        optimizer.zero_grad()
        loss = module(x_BD, y_BD)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        curve.append((float(loss), float(norm)))
    return curve


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_every_stage_is_adamw_on_exact_sums(stage, precision, reference):
    engine = make(stage, precision, clip=0.5, beta1=BETAS[0], beta2=BETAS[1])
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for own, right in zip(run(engine, range(6)), reference, strict=True):
        assert own == pytest.approx(right, rel=tolerance)
    assert engine.adam_steps == 6


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_state_moves_between_stages(stage, precision):
    whole = run(make(stage, precision), range(6))
    first = make(stage, precision)
    run(first, range(3))
    stored = {(kind, name): tensor.clone() for kind, name, tensor in first.export()}
    assert {kind for kind, _ in stored} == {"master", "exp_avg", "exp_avg_sq"}
    module = Toy()
    module.load_state_dict({name: tensor for (kind, name), tensor in stored.items() if kind == "master"})
    second = make((stage + 1) % 4, precision, module=module)
    second.restore(lambda kind, name: stored[kind, name], first.adam_steps)
    for (kind, name), tensor in stored.items():
        assert torch.equal({(k, n): t for k, n, t in second.export()}[kind, name], tensor)
    tolerance = 1e-6 if precision == "fp32" else 2e-2
    for own, right in zip(run(second, range(3, 6)), whole[3:], strict=True):
        assert own == pytest.approx(right, rel=tolerance)


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_a_skipped_or_non_finite_step_changes_nothing(stage, precision):
    engine = make(stage, precision)
    run(engine, range(2))
    before = [tensor.clone() for _, _, tensor in engine.export()]
    x_BD = torch.ones(8, 6, dtype=engine.dtype)
    engine.backward(engine.forward(x_BD, x_BD, last=True))
    assert not engine.step(0.1, skip=True).applied
    engine.backward(engine.forward(x_BD * float("nan"), x_BD, last=True))
    result = engine.step(0.1)
    assert not result.applied
    assert not result.grad_norm < float("inf")
    assert all(torch.equal(a, b) for a, (_, _, b) in zip(before, engine.export(), strict=True))
    assert engine.adam_steps == 2
    run(engine, range(2, 3))
    assert not any(torch.equal(a, b) for a, (_, _, b) in zip(before, engine.export(), strict=True))


def test_the_first_step_may_be_the_bad_one():
    engine = make(1)
    x_BD = torch.full((8, 6), float("nan"))
    engine.backward(engine.forward(x_BD, x_BD, last=True))
    assert not engine.step(0.1).applied
    run(engine, range(2))
    assert engine.adam_steps == 2


def test_heads_may_learn_at_their_own_rate():
    engine = make(1, heads_lr=0.0)
    before = {name: tensor.clone() for kind, name, tensor in engine.export() if kind == "master"}
    run(engine, range(2))
    after = {name: tensor for kind, name, tensor in engine.export() if kind == "master"}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"body.weight", "body.bias", "scale"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_state_may_live_in_host_memory(stage):
    plain, offloaded = run(make(stage), range(3)), run(make(stage, offload=True), range(3))
    for own, right in zip(offloaded, plain, strict=True):
        assert own == pytest.approx(right, rel=1e-5)


def test_weights_are_whole_where_they_are_read():
    engine = make(3)
    with engine.whole_weights() as module:
        assert module.body.weight.shape == (16, 6)


@pytest.mark.parametrize(
    ("able", "dtype"),
    [
        ({"avx512_f": True}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_precision_follows_the_device(able, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert engines.compute_dtype(EngineConfig(), CPU) == dtype
    assert engines.compute_dtype(EngineConfig(), torch.device("cuda", 0)) == torch.bfloat16
    assert engines.compute_dtype(EngineConfig(precision="bf16"), CPU) == torch.bfloat16
    assert engines.compute_dtype(EngineConfig(precision="fp32"), torch.device("cuda", 0)) == torch.float32


def test_processes_that_do_not_know_their_rank_are_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(engines.EngineError, match=r"SLURM_STEP_NUM_TASKS says that there are 8 processes.*torchrun"):
        engines.start(EngineConfig(), torch.device("cpu"))
