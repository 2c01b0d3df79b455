"""Writes the GGUF file that llama.cpp's dflash (which is DSpark too) and eagle3 architectures read.

Names and keys are those of llama.cpp b11434 (its loaders and its converter). The tokenizer is copied from the target's
GGUF file, as llama.cpp compares the two. Knows Qwen3-style drafters only; the validator refuses others.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspec import files
from deepspec.models.export.checkpoint import CONFIDENCE, CONFIDENCE_BIAS, Checkpoint, ExportError, rope_fields

TYPES = ("bf16", "f16", "q8_0", "f32")
# ours → GGUF, without the ending .weight; {i} is the layer.
NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "layers.{i}.input_layernorm": "blk.{i}.attn_norm",
    "layers.{i}.hidden_norm": "blk.{i}.attn_norm_2",
    "layers.{i}.post_attention_layernorm": "blk.{i}.ffn_norm",
    "layers.{i}.self_attn.q_proj": "blk.{i}.attn_q",
    "layers.{i}.self_attn.k_proj": "blk.{i}.attn_k",
    "layers.{i}.self_attn.v_proj": "blk.{i}.attn_v",
    "layers.{i}.self_attn.o_proj": "blk.{i}.attn_output",
    "layers.{i}.self_attn.q_norm": "blk.{i}.attn_q_norm",
    "layers.{i}.self_attn.k_norm": "blk.{i}.attn_k_norm",
    "layers.{i}.mlp.gate_proj": "blk.{i}.ffn_gate",
    "layers.{i}.mlp.up_proj": "blk.{i}.ffn_up",
    "layers.{i}.mlp.down_proj": "blk.{i}.ffn_down",
}
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


def gguf_name(name: str) -> str:
    """GGUF name of one of our tensors; raises ExportError for one that the format has no place for."""
    stem, _, ending = name.rpartition(".")
    parts = stem.split(".")
    layer = parts[1] if parts[0] == "layers" else ""
    if layer:
        parts[1] = "{i}"
    new = NAMES.get(".".join(parts))
    if new is None:
        raise ExportError(f"llama.cpp has no tensor for {name}")
    return f"{new.format(i=layer)}.{ending}"


def permute(weight: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection from the half-split to the interleaved rotary order, which eagle3 there uses."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def rope_factors(config: dict[str, Any]) -> Tensor | None:
    """Per-frequency divisors of a Llama-3 rope, [head_dim / 2]; None for other kinds."""
    rope = rope_fields(config)
    if rope.get("rope_type") != "llama3":
        return None
    dim = config["head_dim"]
    frequency = float(rope["rope_theta"]) ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Tensors under their GGUF names. d2t is absolute there; a confidence head is widened by zeros to D + R."""
    config, eagle = checkpoint.config, checkpoint.kind == "eagle3"
    drop = {"d2t", "t2d"}
    if not checkpoint.rank:
        drop |= {CONFIDENCE, CONFIDENCE_BIAS}
    out: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name in drop:
            continue
        if eagle and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = permute(tensor, heads)
        if name == CONFIDENCE:
            missing = config["hidden_size"] + checkpoint.rank - tensor.shape[1]
            tensor = torch.nn.functional.pad(tensor, (0, missing))
        out[gguf_name(name)] = tensor
    if "d2t" in checkpoint.tensors and checkpoint.reduced:
        offsets = checkpoint.tensors["d2t"].long()
        out["d2t"] = offsets + torch.arange(len(offsets))
    factors = rope_factors(config)
    if factors is not None:
        out["rope_freqs.weight"] = factors
    return out


def fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Metadata without the architecture's prefix. A Python type is a GGUF type: bool, uint32, float32, int32 array."""
    config, rope = checkpoint.config, rope_fields(checkpoint.config)
    out: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        "target_layers": [tap + 1 for tap in checkpoint.taps],
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        out |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
        out["rope.scaling.original_context_length"] = int(original)
        for ours, theirs in (
            ("attention_factor", "yarn_attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if rope.get(ours) is not None:
                out[f"rope.scaling.{theirs}"] = float(rope[ours])
    if checkpoint.kind == "eagle3":
        return out | {
            "vocab_size": checkpoint.vocab_size,
            "rope.dimension_count": config["head_dim"],
            "target_hidden_size": config["hidden_size"],
            "norm_before_residual": False,
            "norm_before_fc": False,
        }
    has_confidence = bool(checkpoint.rank) and CONFIDENCE in checkpoint.tensors
    return out | {
        "block_size": checkpoint.block_size,
        "sample_from_anchor": True,
        "has_confidence_head": has_confidence,
    }


def open_target(checkpoint: Checkpoint, kind: str, target_gguf: Path | None) -> Any:
    """The target's GGUF file, opened. Raises ExportError without one, for one of another vocabulary or ``kind``."""
    import gguf

    if kind not in TYPES:
        raise ExportError(f"--gguf-type {kind} is unknown: choose one of {', '.join(TYPES)}")
    if target_gguf is None:
        raise ExportError(
            "llama.cpp compares the drafter's tokenizer with the target's, so it is copied from there: convert the "
            "target with llama.cpp's convert_hf_to_gguf.py and give it as --target-gguf FILE"
        )
    if not target_gguf.is_file():
        raise ExportError(f"--target-gguf {target_gguf} does not exist")
    reader = gguf.GGUFReader(target_gguf)
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens.data) != checkpoint.vocab_size:
        have = "no" if tokens is None else str(len(tokens.data))
        raise ExportError(
            f"{target_gguf} has {have} tokens, the drafter's vocabulary {checkpoint.vocab_size}: give the target it "
            "was trained for"
        )
    return reader


def write(checkpoint: Checkpoint, folder: Path, kind: str, target_gguf: Path | None) -> Path:
    """Write ``drafter-<kind>.gguf`` into ``folder``; returns its path. Raises as ``open_target``, nothing written."""
    import gguf

    target = open_target(checkpoint, kind, target_gguf)
    arch = "eagle3" if checkpoint.kind == "eagle3" else "dflash"
    path = folder / f"drafter-{kind}.gguf"
    with files.atomic_write(path) as temporary:
        writer = gguf.GGUFWriter(temporary, arch)
        writer.add_name(str(checkpoint.metadata.get("target", {}).get("name") or "target") + " drafter")
        writer.add_type("model")
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, value in fields(checkpoint).items():
            _add(writer, f"{arch}.{name}", value)
        _copy_tokenizer(writer, target, checkpoint)
        for name, tensor in tensors(checkpoint).items():
            _add_tensor(writer, name, tensor, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def _add(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _copy_tokenizer(writer: Any, target: Any, checkpoint: Checkpoint) -> None:
    for name, field in target.fields.items():
        if name.startswith("tokenizer.") and name != "tokenizer.ggml.mask_token_id":
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    if checkpoint.kind != "eagle3":
        writer.add_mask_token_id(int(checkpoint.config["mask_token_id"]))


def _add_tensor(writer: Any, name: str, tensor: Tensor, kind: str) -> None:
    """Matrices in ``kind`` (f16 where rows do not divide into quantised blocks), ids as int64, all else in float32."""
    import gguf

    if not tensor.is_floating_point():
        writer.add_tensor(name, tensor.to(torch.int64).numpy())
        return
    data: np.ndarray = tensor.detach().float().contiguous().numpy()
    wanted = gguf.GGMLQuantizationType.F32
    if data.ndim == 2:
        wanted = gguf.GGMLQuantizationType[kind.upper()]
        if kind == "q8_0" and data.shape[1] % 32:
            wanted = gguf.GGMLQuantizationType.F16
    if wanted is gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, data)
    elif wanted is gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, data.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quantize(data, wanted), raw_dtype=wanted)
