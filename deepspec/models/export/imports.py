"""Reads drafters of other formats as DeepSpec checkpoints: speculators, z-lab's DFlash, published EAGLE-3.

What this project's drafters cannot represent is refused with the reason; nothing is guessed. Builds no model.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspec.models.draft_config import ARCHITECTURES, training_fields
from deepspec.models.export import checkpoint as folders
from deepspec.models.export import eagle3_layout
from deepspec.models.export.checkpoint import EMBED, HEAD, LAYER_FIELDS, Checkpoint, ExportError, rope_fields
from deepspec.models.frozen_head import FrozenHead

_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
# Tensors of others that carry nothing of the drafter: the verifier's copies, and placeholders that no forward reads.
_DROPPED = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.", "mask_embedding")
_HEAD_FIELDS = (
    "block_size",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def read(folder: str | Path, *, taps: Sequence[int] | None = None) -> Checkpoint:
    """The drafter of ``folder`` as a DeepSpec checkpoint, whatever its layout.

    ``taps`` (zero-based decoder layers) are needed for EAGLE-3 files whose numbering is ambiguous. Raises ExportError,
    for a layout that is not known here before any tensor is read.
    """
    config = folders.read_config(folder)
    convert = _converter(config, taps)
    if convert is None:
        raise ExportError(
            f"{folder}/config.json: architectures {config.get('architectures')} is no drafter layout that is known "
            "here: DeepSpec, speculators (dspark, dflash, eagle3), DFlashDraftModel, published EAGLE-3"
        )
    try:
        return convert(folders.read(folder), folder)
    except KeyError as error:
        raise ExportError(f"{folder}/config.json has no {error}, which this layout needs") from error


def native(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of the DeepSpec layout, which needs no conversion."""
    return (config.get("architectures") or [""])[0] in ARCHITECTURES.values()


def _converter(
    config: Mapping[str, Any], taps: Sequence[int] | None
) -> Callable[[Checkpoint, str | Path], Checkpoint] | None:
    if native(config):
        return lambda found, folder: folders.without_zero_markov(found)
    architecture = (config.get("architectures") or [""])[0]
    if "speculators_model_type" in config:
        return _speculators
    if architecture == "DFlashDraftModel" or "dflash_config" in config:
        return _dflash
    return functools.partial(_eagle3, taps=taps) if architecture in _EAGLE3 else None


def head_error(checkpoint: Checkpoint, head: FrozenHead) -> str | None:
    """Why a stored embedding or head is not the target's, or None.

    This project's drafters share the target's; one trained along with the drafter would be lost in silence.
    """
    wanted = {EMBED: head.embed_VD, HEAD: head.head_VD}
    if checkpoint.reduced and "d2t" in checkpoint.tensors:
        offsets = checkpoint.tensors["d2t"].long()
        wanted[HEAD] = head.head_VD[(offsets + torch.arange(len(offsets))).to(head.head_VD.device)]
    for name, theirs in wanted.items():
        ours = checkpoint.tensors.get(name)
        if ours is None or (name == EMBED and checkpoint.metadata.get("own_embedding")):
            continue
        if ours.shape != theirs.shape or not _close(ours, theirs):
            return f"{name} is not the target's: this project's drafters share the target's, so it would be lost"
    return None


def _close(ours_VD: Tensor, theirs_VD: Tensor) -> bool:
    """Equal but for rounding; a few rows at a time, as both may be gigabytes."""
    pairs = zip(ours_VD.split(8192), theirs_VD.split(8192), strict=True)
    return all(torch.allclose(a.float(), b.float().cpu(), rtol=0.02, atol=1e-3) for a, b in pairs)


def _native(source: Mapping[str, Any], architecture: str, taps: Sequence[int]) -> dict[str, Any]:
    """Config fields common to every import; ``source`` holds the layers' shapes."""
    layers = int(source["num_hidden_layers"])
    fields = {name: source[name] for name in ("num_hidden_layers", *LAYER_FIELDS) if name in source}
    fields.setdefault("head_dim", source["hidden_size"] // source["num_attention_heads"])
    return fields | {
        "architectures": [architecture],
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * layers,
        "rope_parameters": rope_fields(source),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "target_layer_ids": list(taps),
        "sample_from_anchor": True,
    }


def _kept(tensors: Mapping[str, Tensor], reduced: bool) -> dict[str, Tensor]:
    """Without what belongs to others; full vocabularies need no maps."""
    maps = () if reduced else ("d2t", "t2d")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_DROPPED) and name not in maps}


def _check_layers(source: Mapping[str, Any], folder: str | Path) -> None:
    if "sliding_attention" in (source.get("layer_types") or ()) or source.get("use_sliding_window"):
        raise ExportError(f"{folder}: sliding layers there are causal inside a block; this project's are not")
    if source.get("attention_bias"):
        raise ExportError(f"{folder}: attention_bias is true; drafter layers here have none")
    if source.get("model_type", "qwen3") not in ("qwen3", "llama"):
        raise ExportError(f"{folder}: layers of model_type {source['model_type']!r} are not imported (qwen3, llama)")


def _anchor(stored: bool | None, folder: str | Path) -> None:
    if stored is not True:
        state = "absent, which means false in that format's DFlash" if stored is None else "false"
        raise ExportError(
            f"{folder}/config.json: sample_from_anchor is {state}: there the anchor predicts nothing and a block of n "
            "drafts n - 1 tokens; here the anchor predicts the first token, so the weights would draft about one "
            "token. Train a drafter in this layout (or set the field to true if it was trained so)"
        )


def _vocabulary(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    size = config.get("draft_vocab_size")
    return {} if size in (None, vocab_size) else {"draft_vocab_size": size}


def _speculators(found: Checkpoint, folder: str | Path) -> Checkpoint:
    config = found.config
    layer, kind = config["transformer_layer_config"], config["speculators_model_type"]
    _check_layers(layer, folder)
    if kind == "eagle3":
        aux = config.get("eagle_aux_hidden_state_layer_ids")
        if not aux:
            raise ExportError(f"{folder}/config.json has no eagle_aux_hidden_state_layer_ids: the taps are unknown")
        return _published_eagle3(found, layer, [tap - 1 for tap in aux], folder)
    if kind not in ("dspark", "dflash"):
        raise ExportError(f"{folder}: speculators_model_type {kind!r} is not imported (dspark, dflash, eagle3)")
    _anchor(config.get("sample_from_anchor"), folder)
    fields = _native(layer, "Qwen3DSparkModel", [tap - 1 for tap in config["aux_hidden_state_layer_ids"]])
    fields |= _block_fields(config) | _vocabulary(config, layer["vocab_size"])
    return Checkpoint(fields, _kept(found.tensors, "draft_vocab_size" in fields))


def _dflash(found: Checkpoint, folder: str | Path) -> Checkpoint:
    config = found.config
    nested = {**config, **(config.get("dflash_config") or {})}
    _check_layers(config, folder)
    _anchor(nested.get("sample_from_anchor"), folder)
    fields = _native(config, "Qwen3DSparkModel", nested["target_layer_ids"])
    fields |= _block_fields(nested) | _vocabulary(config, config["vocab_size"])
    return Checkpoint(fields, _kept(found.tensors, "draft_vocab_size" in fields))


def _block_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: config[name] for name in _HEAD_FIELDS if config.get(name) is not None}
    for name in ("block_size", "mask_token_id"):
        if name not in fields:
            raise KeyError(name)
    return {"markov_rank": 0, "enable_confidence_head": False} | fields


def _eagle3(found: Checkpoint, folder: str | Path, taps: Sequence[int] | None) -> Checkpoint:
    stated = found.metadata.get("target_layer_ids")
    if stated:
        return _published_eagle3(found, found.config, stated, folder)
    nested = (found.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = found.config.get("eagle_aux_hidden_state_layer_ids") or nested
    if not taps:
        raise ExportError(
            f"{folder}/config.json: aux ids {ids} may count a tap after layer k as k (SGLang) or k + 1 (vLLM), and "
            "only its trainer knows: give the zero-based layers as --taps K K K"
        )
    readings = [list(ids), [tap - 1 for tap in ids]] if ids else []
    if readings and list(taps) not in readings:
        raise ExportError(
            f"{folder}/config.json: aux ids {ids} mean the taps {readings[0]} or {readings[1]}, not {list(taps)}: give "
            "those (--taps; in training a cache with them and target.taps)"
        )
    return _published_eagle3(found, found.config, taps, folder)


def _published_eagle3(
    found: Checkpoint, layer: Mapping[str, Any], taps: Sequence[int], folder: str | Path
) -> Checkpoint:
    config = found.config
    for name in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"):
        if config.get(name):
            raise ExportError(f"{folder}/config.json: {name} is true; this project's EAGLE-3 layer has no such norm")
    if "speculators_model_type" in config and "norm_before_residual" not in config:
        raise ExportError(f"{folder}/config.json has no norm_before_residual: its default there is true")
    if int(layer["num_hidden_layers"]) != 1:
        raise ExportError(f"{folder}: {layer['num_hidden_layers']} layers; EAGLE-3 here has one")
    _check_layers(layer, folder)
    tensors = {eagle3_layout.rename_back(name): tensor for name, tensor in found.tensors.items()}
    fields = _native(layer, eagle3_layout.NATIVE, taps)
    if "num_target_layers" in config:
        fields["num_target_layers"] = config["num_target_layers"]
    fields |= _vocabulary(config, layer["vocab_size"])
    fields |= {
        "block_size": found.block_size,
        **training_fields("eagle3", found.metadata),
        "draft_num_hidden_layers": 1,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
    }
    if found.metadata:
        fields["deepspec"] = found.metadata
    return Checkpoint(fields, _kept(tensors, "draft_vocab_size" in fields))
