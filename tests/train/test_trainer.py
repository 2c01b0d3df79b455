"""The loop on a tiny target: it learns, resumes exactly, skips what is not finite, stops when asked."""

import dataclasses
import os
import shutil
import signal
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspec import distributed
from deepspec.data.cache import CacheMismatchError
from deepspec.models import drafter as drafters
from deepspec.models.frozen_head import FrozenHead
from deepspec.train import checkpoint, tracking
from deepspec.train.config import TrainConfigError
from deepspec.train.identity import check_identity, run_identity
from deepspec.train.trainer import Interrupted, NonFiniteError
from tests.train import tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_run.make(tmp_path_factory.mktemp("tiny"))


def curve(cfg, kind="train", key="loss"):
    return {
        record["step"]: record[key] for record in tracking.read(cfg.folder) if record["kind"] == kind and key in record
    }


def masters(cfg) -> dict[str, torch.Tensor]:
    state = checkpoint.read(cfg.folder)
    assert state is not None
    return {f"{kind}/{name}": value for kind in ("master", "exp_avg_sq") for name, value in state.kind(kind).items()}


@pytest.fixture(scope="module")
def whole(folder):
    """An uninterrupted run of 10 steps."""
    cfg = tiny_run.config(folder, name="whole", train__eval_every=4)
    tiny_run.trainer(cfg).fit()
    return cfg


@pytest.mark.parametrize(("recipe", "steps"), [("dspark", 20), ("eagle3", 8)])
def test_training_lowers_the_loss_and_raises_the_expected_tau(folder, recipe, steps):
    cfg = tiny_run.config(folder, recipe=recipe, name=f"learns-{recipe}", train__steps=steps)
    trainer = tiny_run.trainer(cfg)
    trainer.evaluate()
    before = trainer.expected_tau
    trainer.fit()
    assert before is not None
    assert trainer.expected_tau is not None
    assert trainer.expected_tau > before + 0.05
    losses = list(curve(cfg).values())
    assert len(losses) == steps
    assert sum(losses[-3:]) < 0.99 * sum(losses[:3])


def test_metrics_and_checkpoints_of_a_run_are_complete(folder, whole):
    records = tracking.read(whole.folder)
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == list(range(1, 11))
    wanted = {"loss", "ce", "tv", "confidence", "confidence_error", "tau", "top1", "acceptance", "lr", "grad_norm"}
    wanted |= {"tokens_per_s", "samples_per_s", "loader_wait", "eta_s", "memory_gb", "epoch", "skipped", "time"}
    assert all(wanted <= set(record) for record in train)
    assert all(len(record["acceptance"]) == 7 for record in train)
    assert [record["step"] for record in records if record["kind"] == "eval"] == [4, 8, 10]
    head = FrozenHead.load(str(folder / "target"))
    for name in ("last", "best"):
        drafter = drafters.load(f"{whole.folder}/{name}", head)
        facts = drafters.read_config(f"{whole.folder}/{name}")["deepspec"]
        derived = {"mask_token_id": drafter.hf_config.mask_token_id}  # not in the recipe
        assert drafter.config == dataclasses.replace(whole.drafter, **derived)
        assert facts["target"]["name"] == "tiny-qwen3"
        assert facts["target"]["fingerprint"]
        assert facts["thinking"] is False
        assert facts["training"]["step"] in (4, 8, 10)
        assert drafters.read_config(f"{whole.folder}/{name}")["num_anchors"] == whole.data.anchors == 6


def test_an_eagle3_checkpoint_publishes_the_run_s_step_decay(folder, tmp_path):
    cfg = tiny_run.config(folder, recipe="eagle3", name="decay", loss__step_decay=0.5, drafter__ttt_length=3)
    tiny_run.trainer(cfg)._write_drafter(tmp_path)
    fields = drafters.read_config(tmp_path)
    assert (fields["step_loss_decay"], fields["ttt_length"]) == (0.5, 3)


def test_the_best_checkpoint_is_the_one_with_the_highest_expected_tau(whole):
    taus = curve(whole, "eval", "tau")
    best = max(taus, key=lambda step: taus[step])
    facts = drafters.read_config(f"{whole.folder}/best")["deepspec"]["training"]
    assert facts == {"step": best, "expected_tau": taus[best]}


def test_a_killed_run_goes_on_to_the_same_curve_and_the_same_weights(folder, whole):
    class Killed(BaseException):
        pass

    cfg = tiny_run.config(folder, name="killed", train__eval_every=4, train__save_every=3)
    trainer = tiny_run.trainer(cfg)
    step = trainer.step

    def dies(batches):
        if trainer.progress.step == 8:
            raise Killed
        step(batches)

    trainer.step = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        trainer.fit()
    resumed = tiny_run.trainer(cfg)
    assert resumed.progress.step == 6
    resumed.fit()
    assert curve(cfg) == pytest.approx(curve(whole), rel=1e-5)
    assert curve(cfg, key="lr") == curve(whole, key="lr")
    for name, value in masters(whole).items():
        torch.testing.assert_close(masters(cfg)[name], value, rtol=1e-5, atol=1e-7)


def test_a_signal_saves_after_the_step_and_the_run_goes_on(folder, whole, capsys):
    cfg = tiny_run.config(folder, name="signalled")
    trainer = tiny_run.trainer(cfg)
    step = trainer.step

    def interrupted(batches):
        step(batches)
        if trainer.progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.step = interrupted  # type: ignore[method-assign]
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"):
        trainer.fit()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "SIGTERM: saving" in capsys.readouterr().out
    again = tiny_run.trainer(cfg)
    assert again.progress.step == 4
    again.fit()
    assert curve(cfg) == pytest.approx(curve(whole), rel=1e-5)


def test_a_signal_between_micro_batches_gives_the_step_up(folder, whole):
    """With much accumulation a step outlasts the launcher's patience; the step is taken again, whole."""
    cfg = tiny_run.config(folder, name="accumulated", data__micro_tokens=32)
    trainer = tiny_run.trainer(cfg)
    forward, seen = trainer.engine.forward, []

    def interrupted(batch, total, last):
        seen.append(trainer.progress.step)
        if seen.count(3) == 1 and seen[-1] == 3:
            assert not last
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(batch, total, last=last)

    trainer.engine.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="SIGTERM"):
        trainer.fit()
    assert seen.count(3) == 1, "no further micro batch"
    again = tiny_run.trainer(cfg)
    assert again.progress.step == 3
    again.fit()
    assert curve(cfg) == pytest.approx(curve(whole), rel=1e-4)


def test_a_finished_run_is_left_alone(folder, whole, capsys):
    written = (tiny_run.Path(whole.folder) / "last" / "model.safetensors").stat().st_mtime_ns
    trainer = tiny_run.trainer(whole)
    trainer.fit()
    assert "nothing to do" in capsys.readouterr().out
    assert (tiny_run.Path(whole.folder) / "last" / "model.safetensors").stat().st_mtime_ns == written
    assert len(curve(whole)) == 10


def poisoned(trainer, steps):
    """The loader's batches with NaN states at some steps."""
    batches = trainer.loader.batches

    def stream(start, stop):
        for step, micros in enumerate(batches(start, stop), start):
            if step in steps:
                micros[0].taps_BSF.fill_(float("nan"))
            yield micros

    trainer.loader.batches = stream
    return trainer


@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_that_is_not_finite_is_skipped_counted_and_named(folder, zero):
    cfg = tiny_run.config(folder, name=f"nan{zero}", train__steps=4, engine__zero=zero)
    trainer = poisoned(tiny_run.trainer(cfg), {2})
    weights = []
    step = trainer.step

    def watched(batches):
        step(batches)
        weights.append(trainer.run.drafter.backbone.fc.weight.detach().clone())

    trainer.step = watched  # type: ignore[method-assign]
    progress = trainer.fit()
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert all(torch.isfinite(value).all() for value in masters(cfg).values())
    assert (progress.skipped, progress.adam_steps, progress.step) == (1, 3, 4)
    (skip,) = [record for record in tracking.read(cfg.folder) if record["kind"] == "skip"]
    ids = {trainer.loader.source.ids()[row] for row in trainer.loader.rows(2)}
    assert skip["step"] == 3
    assert set(skip["samples"]) <= ids
    assert skip["samples"]
    assert sorted(curve(cfg)) == [1, 2, 4]


def test_too_many_bad_steps_in_a_row_end_the_run_with_the_samples(folder):
    cfg = tiny_run.config(folder, name="bad", train__steps=6, train__max_skips=2)
    trainer = poisoned(tiny_run.trainer(cfg), {1, 3, 4})
    with pytest.raises(NonFiniteError, match=r"2 steps in a row .*samples r\d+.*inspect these rows"):
        trainer.fit()
    assert trainer.progress.step == 5


def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradient_is(folder):
    cfg = tiny_run.config(folder, name="inf-loss", train__steps=2)
    trainer = tiny_run.trainer(cfg)
    forward = trainer.engine.forward

    def infinite(*inputs, last):
        loss, values = forward(*inputs, last=last)
        return loss + float("inf"), values

    trainer.engine.forward = infinite  # type: ignore[method-assign]
    before = trainer.run.drafter.backbone.fc.weight.detach().clone()
    trainer.fit()
    assert trainer.progress.skipped == 2
    assert torch.equal(before, trainer.run.drafter.backbone.fc.weight)


def test_micro_batches_do_not_change_the_gradient(folder):
    curves = []
    for tokens in (80, 1000):
        cfg = tiny_run.config(folder, name=f"micro{tokens}", train__steps=4, data__micro_tokens=tokens)
        tiny_run.trainer(cfg).fit()
        curves.append((curve(cfg), curve(cfg, key="grad_norm")))
    assert curves[0][0] == pytest.approx(curves[1][0], rel=1e-4)
    assert curves[0][1] == pytest.approx(curves[1][1], rel=1e-3)


def test_a_dry_run_takes_a_real_step_and_writes_nothing(folder, capsys):
    cfg = tiny_run.config(folder, name="dry", train__dry_run="true")
    tiny_run.trainer(cfg).dry_run()
    said = capsys.readouterr().out
    assert "dry run: everything fits" in said
    assert "step  1/10  loss" in said
    assert "TFLOP a step" in said
    assert not tiny_run.Path(cfg.folder).exists()


def test_averaged_weights_are_saved_and_training_goes_on_with_its_own(folder, whole):
    cfg = tiny_run.config(folder, name="ema", optim__ema=0.9, train__eval_every=4)
    tiny_run.trainer(cfg).fit()
    assert curve(cfg) == pytest.approx(curve(whole), rel=1e-5)
    assert curve(cfg, "eval") != pytest.approx(curve(whole, "eval"), rel=1e-5)
    state = checkpoint.read(cfg.folder)
    assert state is not None
    saved = drafters.load(f"{cfg.folder}/last", FrozenHead.load(str(folder / "target")))
    ema, own = state.tensor("ema", "backbone.fc.weight"), state.tensor("master", "backbone.fc.weight")
    weight = saved.backbone.fc.weight.detach()  # type: ignore[union-attr]
    assert float((weight - ema).norm()) < 0.01 * float((ema - own).norm() + ema.norm())
    assert float((ema - own).norm()) > 0


def test_an_interrupted_average_goes_on_as_if_it_had_not_been(folder):
    """Its decay still ramps: 10 updates are few beside those that 0.99 needs."""
    saved = []
    for name, stops in (("ema-whole", (None,)), ("ema-parts", (3, 7, None))):
        for stop in stops:
            cfg = tiny_run.config(folder, name=name, optim__ema=0.99, train__stop_after=stop or "null")
            tiny_run.trainer(cfg).fit()
        state = checkpoint.read(cfg.folder)
        assert state is not None
        saved.append(state.kind("ema"))
    for name, value in saved[0].items():
        torch.testing.assert_close(saved[1][name], value, rtol=1e-5, atol=1e-7)


def test_stopping_after_a_step_evaluates_nothing_that_an_uninterrupted_run_would_not(folder, whole):
    cfg = tiny_run.config(folder, name="parts", train__eval_every=4, train__stop_after=4)
    assert not tiny_run.trainer(cfg).fit().finished
    cfg = tiny_run.config(folder, name="parts", train__eval_every=4, train__stop_after=6)
    assert tiny_run.trainer(cfg).fit().stale == 0
    tiny_run.trainer(tiny_run.config(folder, name="parts", train__eval_every=4)).fit()
    assert curve(cfg, "eval") == pytest.approx(curve(whole, "eval"), rel=1e-5)


def test_a_finished_run_can_be_lengthened(folder, capsys):
    """Also one that stopped early, whose count of evaluations without a better τ then starts again."""
    options = {"train__eval_every": 1, "train__early_stop": 1, "train__lr": 1e-12}
    short = tiny_run.config(folder, name="longer", train__steps=3, **options)
    stopped = tiny_run.trainer(short).fit()
    assert (stopped.step, stopped.finished) == (2, True)
    assert tiny_run.trainer(short).fit().step == 2
    assert "nothing to do" in capsys.readouterr().out
    more = tiny_run.config(folder, name="longer", train__steps=5, **(options | {"train__early_stop": 2}))
    progress = tiny_run.trainer(more).fit()
    assert (progress.step, progress.finished, progress.total) == (4, True, 5)


def test_early_stop_and_retention(folder):
    cfg = tiny_run.config(
        folder, name="early", train__steps=40, train__lr=1e-9, train__eval_every=1, train__early_stop=2,
        train__keep_every=1, train__keep=2,
    )  # fmt: skip
    trainer = tiny_run.trainer(cfg)
    heldout = iter([2.0, 2.5, 2.4, 2.5])  # the last evaluation is not repeated
    import deepspec.train.evaluation as evaluation

    original = evaluation.heldout
    evaluation.heldout = lambda engine, loader: {"tau": next(heldout)}  # type: ignore[assignment]
    try:
        progress = trainer.fit()
    finally:
        evaluation.heldout = original
    assert (progress.step, progress.best_tau, progress.finished) == (4, 2.5, True)
    assert drafters.read_config(f"{cfg.folder}/best")["deepspec"]["training"]["step"] == 2
    assert sorted(p.name for p in tiny_run.Path(cfg.folder).glob("step-*")) == ["step-3", "step-4"]


def test_a_run_can_start_from_a_drafter(folder, whole):
    cfg = tiny_run.config(folder, name="tuned", train__steps=2, train__lr=1e-6, train__init_from=f"{whole.folder}/last")
    tiny_run.trainer(cfg).fit()
    assert curve(cfg)[1] < curve(whole)[1] - 0.05
    run = tiny_run.config(folder, name="tuned-run", train__steps=1, train__init_from=whole.folder)
    assert tiny_run.trainer(run).run.drafter.training  # a run folder stands for its best checkpoint
    wrong = tiny_run.config(folder, name="w", train__init_from=f"{whole.folder}/last", drafter__block_size=5)
    with pytest.raises(TrainConfigError, match=r"drafter.block_size=5 \(there 7\)"):
        tiny_run.trainer(wrong)


def test_options_that_change_the_data_or_the_drafter_do_not_continue_a_run(folder, whole):
    changed = tiny_run.config(folder, name="whole", data__seed=1, drafter__markov_rank=4)
    with pytest.raises(checkpoint.ResumeError, match=r"drafter.markov_rank was 8, is 4.*data.seed was 0, is 1"):
        tiny_run.trainer(changed)
    with pytest.raises(checkpoint.ResumeError, match=r"train\.resume=false"):
        tiny_run.trainer(tiny_run.config(folder, name="whole", train__resume="false"))
    with pytest.raises(checkpoint.ResumeError, match=r"train\.init_from was None, is .*name=… for a new run"):
        tiny_run.trainer(tiny_run.config(folder, name="whole", train__init_from=f"{whole.folder}/last"))


def test_other_samples_in_the_same_number_do_not_continue_a_run(folder, whole):
    trainer = tiny_run.trainer(whole)
    run = trainer.run
    lengths = trainer.loader.source.lengths()
    trainer.loader.source.lengths = lambda: [lengths[0] + 1, *lengths[1:]]  # type: ignore[method-assign]
    identity = run_identity(whole, run.taps, trainer.loader, run.target_fingerprint)
    with pytest.raises(checkpoint.ResumeError, match="digest of the samples was"):
        check_identity(checkpoint.read(whole.folder), identity, whole.folder)


def test_an_average_turned_on_in_the_middle_keeps_its_own_age(folder):
    """Its decay ramps over its own updates; the optimizer's steps began earlier."""
    first = tiny_run.config(folder, name="late", train__steps=6, train__stop_after=3)
    tiny_run.trainer(first).fit()
    second = tiny_run.config(folder, name="late", train__steps=6, train__stop_after=5, optim__ema=0.9)
    tiny_run.trainer(second).fit()
    resumed = tiny_run.trainer(second)
    assert resumed.progress.adam_steps == 5
    assert resumed.average.updates == 2


def test_the_gate_decodes_the_saved_drafter(folder):
    cfg = tiny_run.config(
        folder, name="gate", train__steps=2, train__decode_every=2, train__decode_prompts=3, train__decode_tokens=12
    )
    tiny_run.trainer(cfg).fit()
    (record,) = [record for record in tracking.read(cfg.folder) if record["kind"] == "decode"]
    assert record["agrees"]
    assert record["expected_tau"] == curve(cfg, "eval", "tau")[2]


def test_a_reduced_vocabulary_is_chosen_from_the_training_answers(folder):
    cfg = tiny_run.config(folder, name="reduced", train__steps=2, drafter__draft_vocab_size=40)
    trainer = tiny_run.trainer(cfg)
    loader, ids = trainer.loader, trainer.run.drafter.draft_ids_V
    assert ids is not None

    def most_frequent(rows):
        counts = Counter()
        for sample in loader.source.samples(rows):
            counts.update(sample.tokens_S[sample.supervised_S].tolist())
        return sorted(sorted(counts, key=lambda token: (-counts[token], token))[:40])

    assert ids.tolist() == most_frequent(loader.training_rows)
    assert ids.tolist() != most_frequent([*loader.training_rows, *loader.heldout_rows])
    trainer.fit()
    assert all(loss == loss for loss in curve(cfg).values())


def test_a_gate_that_cannot_decode_does_not_end_the_run(folder, capsys):
    cfg = tiny_run.config(folder, name="gate-long", train__steps=2, train__decode_every=1, train__decode_tokens=4096)
    tiny_run.trainer(cfg).fit()
    assert "not decoded: no held-out prompt leaves room for train.decode_tokens=4096" in capsys.readouterr().out
    assert checkpoint.read(cfg.folder).progress.finished


@pytest.mark.parametrize("option", ["decode_every", "early_stop"])
def test_what_judges_by_held_out_samples_needs_some(folder, option):
    cfg = tiny_run.config(folder, name="none", data__heldout=0, train__eval_every=1, **{f"train__{option}": 1})
    with pytest.raises(TrainConfigError, match=r"no sample of .* is held out"):
        tiny_run.trainer(cfg)


def test_ranks_that_see_another_run_or_other_data_are_told(folder, monkeypatch):
    def two_ranks(mine):
        return [*mine, "step 40, samples abc"]

    monkeypatch.setattr(distributed, "gathered", two_ranks)
    with pytest.raises(checkpoint.ResumeError, match=r"rank 0: step 0, .*rank 1: step 40, samples abc"):
        tiny_run.trainer(tiny_run.config(folder, name="apart"))


def test_a_resumed_run_does_not_hold_its_checkpoint_open(folder):
    """Network file systems keep the names of open files, and the folder could not be replaced."""
    cfg = tiny_run.config(folder, name="held", train__steps=4, train__stop_after=2)
    tiny_run.trainer(cfg).fit()
    trainer = tiny_run.trainer(tiny_run.config(folder, name="held", train__steps=4))
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    assert not [link for link in links if cfg.folder in link]
    maps = tiny_run.Path("/proc/self/maps").read_text()
    assert cfg.folder not in maps
    trainer.fit()


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_a_cache_of_another_body_is_refused_where_the_target_is_loaded(folder, tmp_path):
    """A merged fine-tune often leaves the head alone, and then only the whole fingerprint differs."""
    shutil.copytree(folder / "target", tmp_path / "tuned")
    file = tmp_path / "tuned" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    cfg = tiny_run.config(folder, name="tuned-body", target__path=tmp_path / "tuned", train__decode_every=2)
    with pytest.raises(CacheMismatchError):
        tiny_run.trainer(cfg)
