"""One row per engine that loads safetensors: its layout, its numbering of taps, its serve command.

Versions are those whose code was read (docs/serving.md); the GGUF file of llama.cpp is llama_cpp.py.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepspec.models.draft_config import ARCHITECTURES, training_fields
from deepspec.models.export import eagle3_layout
from deepspec.models.export.checkpoint import Checkpoint, older_rope_fields, with_markov, with_mask_row

# Of the all-zero Markov head that stands in for none: small files, yet a width that kernels like.
ZERO_RANK = 16


@dataclass(frozen=True)
class Engine:
    """``layout`` maps a DeepSpec checkpoint to the engine's; ``command`` takes (checkpoint, path, target)."""

    name: str
    version: str
    architectures: tuple[str, ...]
    layout: Callable[[Checkpoint], Checkpoint]
    command: Callable[[Checkpoint, Path, str], str]
    tap_offset: int = 0  # of EAGLE-3's aux ids: how the engine counts a tap after decoder layer 0
    eagle3_taps: int | None = None  # the only number of EAGLE-3 taps, where there is one
    markov_heads: tuple[str, ...] = ("vanilla",)
    needs_markov: bool = False
    reduced_vocabulary: tuple[str, ...] = ("dspark", "dflash", "eagle3")  # kinds that may have one
    own_embedding: bool = True  # reads an embedding that differs from the target's
    rope_types: tuple[str, ...] | None = None  # None: those of transformers
    reads_temperatures: bool = False
    needs_head: bool = False  # does not share the target's embedding and head, but reads them from the drafter's file


def native_layout(checkpoint: Checkpoint) -> Checkpoint:
    """The DeepSpec layout with its anchor layout spelt out and all fields that its public classes insist on."""
    required = training_fields(checkpoint.kind, checkpoint.config)
    return checkpoint.replaced(sample_from_anchor=True, **required)


def _spark_layout(checkpoint: Checkpoint) -> Checkpoint:
    """DSpark in the released DeepSpec layout; DFlash as DSpark with a Markov head of zeros."""
    out = with_mask_row(with_markov(native_layout(checkpoint), ZERO_RANK))
    return out.replaced(**older_rope_fields(out.config), torch_dtype=out.config.get("dtype", "bfloat16"))


def vllm_layout(checkpoint: Checkpoint) -> Checkpoint:
    """What vLLM reads."""
    return eagle3_layout.layout(checkpoint, offset=1) if checkpoint.kind == "eagle3" else _spark_layout(checkpoint)


def sglang_layout(checkpoint: Checkpoint) -> Checkpoint:
    """What SGLang reads; it always takes embedding and full head from the target, and adds 1 to aux ids itself."""
    return eagle3_layout.layout(checkpoint, offset=0) if checkpoint.kind == "eagle3" else _spark_layout(checkpoint)


def _native_command(checkpoint: Checkpoint, path: Path, target: str) -> str:
    return shlex.join(["python", "-m", "deepspec.eval", "--drafter", str(path), "--target", target])


def _vllm_command(checkpoint: Checkpoint, path: Path, target: str) -> str:
    options = {
        "method": "eagle3" if checkpoint.kind == "eagle3" else "dspark",
        "model": str(path),
        "num_speculative_tokens": checkpoint.block_size,
    }
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(options)])


def _sglang_command(checkpoint: Checkpoint, path: Path, target: str) -> str:
    size = checkpoint.block_size
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    if checkpoint.kind == "eagle3":
        words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(path)]
        words += ["--speculative-num-steps", str(size), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(size + 1)]
    else:
        words += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(path)]
        words += ["--speculative-dspark-block-size", str(size)]
    return shlex.join(words)


def _llama_command(checkpoint: Checkpoint, path: Path, target: str) -> str:
    kind = "draft-eagle3" if checkpoint.kind == "eagle3" else "draft-dspark"
    model = target if target.endswith(".gguf") else "TARGET.gguf"
    words = ["llama-server", "-m", model, "-md", str(path), "--spec-type", kind]
    return shlex.join([*words, "--spec-draft-n-max", str(checkpoint.block_size)])


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "deepspec",
            "this project and its public release",
            tuple(ARCHITECTURES.values()),
            native_layout,
            _native_command,
            markov_heads=("vanilla", "gated", "rnn"),
            reads_temperatures=True,
            needs_head=True,
        ),
        Engine(
            "vllm",
            "0.32",
            ("Qwen3DSparkModel", "Gemma4DSparkModel", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
            vllm_layout,
            _vllm_command,
            tap_offset=1,
            needs_markov=True,
        ),
        Engine(
            "sglang",
            "0.5.23",
            ("Qwen3DSparkModel", "LlamaForCausalLMEagle3"),
            sglang_layout,
            _sglang_command,
            eagle3_taps=3,
            markov_heads=("vanilla", "gated", "rnn"),
            needs_markov=True,
            reduced_vocabulary=("eagle3",),
            own_embedding=False,
        ),
        Engine(
            "gguf",
            "llama.cpp b11434",
            ("Qwen3DSparkModel", "Qwen3Eagle3Model"),
            lambda checkpoint: with_mask_row(native_layout(checkpoint)),
            _llama_command,
            tap_offset=1,
            eagle3_taps=3,
            rope_types=("default", "linear", "yarn", "llama3"),
        ),
    )
}
