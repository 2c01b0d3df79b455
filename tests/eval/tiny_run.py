"""A tiny target on disk with a chat tokenizer, prompt files for it, and the command line run in this process."""

import json
from pathlib import Path

from deepspec.eval.__main__ import main
from deepspec.models import drafter
from deepspec.models.drafter import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.target import Target, TargetConfig
from tests.data.little_chat import VOCAB, chat_tokenizer
from tests.tiny import tiny_model


def save_target(folder: Path, seed: int = 0, **overrides) -> Path:
    """A random Qwen3 of four layers, saved as a user's folder would be."""
    tiny_model("qwen3", seed, vocab_size=overrides.pop("vocab_size", VOCAB), **overrides).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def write_prompts(path: Path, turns: list[list[str]]) -> Path:
    """A JSONL file of prompts."""
    path.write_text("".join(json.dumps({"id": f"q{i}", "turns": t}) + "\n" for i, t in enumerate(turns)))
    return path


def evaluate(*arguments: object) -> int:
    """``python -m deepspec.eval`` with short answers on the CPU."""
    return main([*map(str, arguments), "--quiet", "--device", "cpu"])


def results(folder: Path) -> dict:
    """results.json of an output folder."""
    return json.loads((folder / "results.json").read_text())


def save_drafter(folder: Path, target_folder: Path, kind: str = "dspark", thinking: bool = False, **options) -> Path:
    """A drafter with random weights for the target in ``target_folder``, saved as training saves it."""
    target = Target.load(TargetConfig(target_folder.name, str(target_folder)), "cpu")
    options = {"layers": 1, "block_size": 4, **options}
    if kind == "dspark":
        options.setdefault("markov_rank", 6)
    made = drafter.build(DrafterConfig(kind=kind, **options), target.config, FrozenHead.of(target), target.taps, seed=3)
    drafter.save(made, folder, target_name=target.name, target_fingerprint=target.fingerprint, thinking=thinking)
    return folder
