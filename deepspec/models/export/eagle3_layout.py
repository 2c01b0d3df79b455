"""The published EAGLE-3 layout: a rename table and a config, one numbering of the taps per engine. Knows no engine."""

from typing import Any

from deepspec.models.draft_config import training_fields
from deepspec.models.export.checkpoint import LAYER_FIELDS, Checkpoint, older_rope_fields, rope_fields

ARCHITECTURE = "LlamaForCausalLMEagle3"
NATIVE = "Qwen3Eagle3Model"
# (ours, published): prefixes of tensor names.
RENAMES = (("layers.0.", "midlayer."),)
_COPIED = (*LAYER_FIELDS, "dtype", "num_target_layers")


def rename(name: str) -> str:
    """Our tensor name to the published one."""
    return next((new + name.removeprefix(old) for old, new in RENAMES if name.startswith(old)), name)


def rename_back(name: str) -> str:
    """The published tensor name to ours."""
    name = name.removeprefix("model.")
    return next((old + name.removeprefix(new) for old, new in RENAMES if name.startswith(new)), name)


def layout(checkpoint: Checkpoint, offset: int) -> Checkpoint:
    """A DeepSpec EAGLE-3 checkpoint in the published layout; a tap after layer k is written as k + ``offset``.

    Checkpoints of another style than Qwen3's are returned as they are: no engine has a class for them, and the
    validator says so.
    """
    if checkpoint.architecture != NATIVE:
        return checkpoint
    source = checkpoint.config
    ids = [tap + offset for tap in checkpoint.taps]
    config: dict[str, Any] = {name: source[name] for name in _COPIED if name in source}
    config |= {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": rope_fields(source),
        **older_rope_fields(source),
        "target_hidden_size": source["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
        "fc_norm": False,
    }
    if len(ids) != 3:
        config["num_aux_hidden_states"] = len(ids)
    if checkpoint.reduced:  # SGLang shares the target's head only where this field is absent
        config["draft_vocab_size"] = checkpoint.draft_vocab_size
    config["deepspec"] = checkpoint.metadata | {
        "target_layer_ids": list(checkpoint.taps),
        "block_size": checkpoint.block_size,
        **training_fields(checkpoint.kind, source),
    }
    return Checkpoint(config, {rename(name): tensor for name, tensor in checkpoint.tensors.items()})
