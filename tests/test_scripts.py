"""Scripts and benches: each imports what it names and explains itself, and their own arithmetic is right."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspec import recipes
from deepspec.models.target import Target
from deepspec.train.config import TrainConfig
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[1] / "scripts"
SCRIPTS = sorted(path for path in ROOT.rglob("*.py") if path.name not in ("__init__.py", "reference_step.py"))


def load(path: Path):
    """The module of a script."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_explains_itself(path: Path, monkeypatch, capsys) -> None:
    module = load(path)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert path.name in capsys.readouterr().out


def test_the_demo_trains_every_recipe_at_a_size_it_can_have(tmp_path) -> None:
    """The script itself, with commands that do nothing."""
    for name in ("python", "torchrun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    chosen = recipes.names("recipe")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DEMO_RECIPES": " ".join(chosen)}
    done = subprocess.run([ROOT / "demo.sh"], env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "$ torchrun" in line]
    trained = [
        recipes.load("train", line.removesuffix("\x1b[0m").split("main.py ")[1].split(), TrainConfig) for line in lines
    ]
    assert [cfg.name for cfg in trained] == chosen
    assert {cfg.drafter.draft_vocab_size for cfg in trained} == {4096}


def test_codecs_are_compared_within_a_seed() -> None:
    """Changes +1 % and −3 %: mean −1 %, standard error 2 %·√2 / √2."""
    relative = load(ROOT / "bench" / "codecs.py").relative
    assert relative({"bf16": [2.0, 4.0], "int8": [2.02, 3.88]}, "int8") == pytest.approx((-0.01, 0.02))


def test_the_markov_head_of_a_small_batch_costs_what_reading_it_costs() -> None:
    """At batch 1 every part is bound by its weights, so the shares are shares of parameters."""
    markov = load(ROOT / "bench" / "markov.py")
    shape = markov.Shape("made up", target=1e9, layer=1e7, width=1000, vocab=10**5)
    head, drafting, verifying = 7 * 10**5 * 256, 5e7 + 1e8, 1e9 + 1e8
    assert markov.computed(shape, 1) == pytest.approx((head / drafting, head / (drafting + verifying)))
    # At batch 1000 by its arithmetic: γ tokens through drafter and head, γ + 1 through the target.
    assert markov.computed(shape, 1000)[0] == pytest.approx(head / (7 * drafting))


def test_the_exact_distribution_is_the_target_s() -> None:
    """Every answer of three tokens by the chain rule, one forward after the other."""
    target = Target.from_model(tiny_model("qwen3"))
    expected = load(ROOT / "check_lossless.py").exact(target, [3, 1, 4], 3)
    assert sum(expected.values()) == pytest.approx(1)
    assert len(expected) == 27
    answer = max(expected, key=lambda tokens: expected[tokens])
    probability, tokens = 1.0, [3, 1, 4]
    for token in answer:
        logits_V = target.logits(target(torch.tensor([tokens]), taps=False).last_BTD[0, -1]).double()
        values, ids = logits_V.topk(3)
        probability *= float(values.softmax(-1)[ids.tolist().index(token)])
        tokens.append(token)
    assert expected[answer] == pytest.approx(probability, rel=1e-4)
