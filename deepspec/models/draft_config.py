"""The drafter's Hugging Face config: the target's text config, reshaped to the draft layers, with DeepSpec's fields.

Field names are those of the published DeepSpec checkpoints. Knows no weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from deepspec.models.drafter_config import DrafterConfig, DrafterConfigError
from deepspec.models.families import family_of, text_config, validate_taps

ARCHITECTURES = {
    ("qwen3", "block"): "Qwen3DSparkModel",
    ("qwen3", "eagle3"): "Qwen3Eagle3Model",
    ("gemma3", "block"): "Gemma3DSparkModel",
    ("gemma3", "eagle3"): "Gemma3Eagle3Model",
    ("gemma4", "block"): "Gemma4DSparkModel",
    ("gemma4", "eagle3"): "Gemma4Eagle3Model",
}
# What a training run knows and drafting never reads, yet the public DeepSpec classes refuse a config without. The
# values are those of the paper's recipes, for checkpoints that do not say them.
_TRAINING_DEFAULTS: dict[str, dict[str, Any]] = {
    "block": {"num_anchors": 512},
    "eagle3": {"ttt_length": 7, "step_loss_decay": 0.8},
}
# Ids that the target's tokenizer never produces: unused rows of a padded vocabulary, or a <mask> token.
_MASK_TOKENS = {"qwen2": 151669, "qwen3": 151669, "qwen3_moe": 151669, "llama": 128002, "gemma3_text": 4}
_MASK_TOKENS |= {"gemma4_text": 4, "gemma4_unified_text": 4}
_SHAPE_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act")
_OTHER_FIELDS = ("max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters")
_TOKEN_FIELDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def style_of(config: PretrainedConfig) -> str:
    """Layer style of a target's or drafter's config: qwen3, gemma3 or gemma4."""
    return family_of(config).drafter_style


def derive_mask_token(target: PretrainedConfig, vocab_size: int) -> int:
    """An id that carries no meaning in text: the family's known unused one, else the lowest special-free id.

    "Special" are the config's bos, eos and pad ids; the lowest id left is a reserved or unknown token in practice
    (<|endoftext|> in SmolLM2, <unk> in Mistral).
    """
    known = _MASK_TOKENS.get(target.model_type)
    if known is not None and known < vocab_size and (known <= 4 or vocab_size > 100_000):
        return known
    used: set[int] = set()
    for name in _TOKEN_FIELDS:
        value = getattr(target, name, None)
        used.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return next(token for token in range(len(used) + 1) if token not in used)


def draft_config(
    cfg: DrafterConfig, target_config: PretrainedConfig, taps: Sequence[int], vocab_size: int
) -> PretrainedConfig:
    """The drafter's config for a target; raises DrafterConfigError where ``cfg`` cannot fit it.

    ``vocab_size`` is the number of rows of the target's head, padding included.
    """
    target = text_config(target_config)
    _check_fit(cfg, target, vocab_size)
    style, kind = style_of(target), "eagle3" if cfg.kind == "eagle3" else "block"
    # Gemma 4's config insists on a full last layer: there the window is known to the ``deepspec`` object alone.
    sliding = cfg.sliding_window is not None and style != "gemma4"
    layer_type = "sliding_attention" if sliding else "full_attention"
    fields = _STYLES[style](target) | dict(
        vocab_size=vocab_size,
        num_hidden_layers=cfg.layers,
        layer_types=[layer_type] * int(cfg.layers or 0),
        tie_word_embeddings=False,
        attention_bias=False,
        attention_dropout=0.0,
    )
    if sliding:
        fields |= dict(sliding_window=cfg.sliding_window, use_sliding_window=True)
    model_type = fields.pop("model_type")
    config = AutoConfig.for_model(model_type, **fields)
    config.architectures = [ARCHITECTURES[style, kind]]
    config.num_target_layers = target.num_hidden_layers
    config.target_layer_ids = list(validate_taps(taps, target.num_hidden_layers))
    for name, value in published_fields(cfg, target, vocab_size).items():
        setattr(config, name, value)
    return config


def published_fields(cfg: DrafterConfig, target: PretrainedConfig, vocab_size: int) -> dict[str, Any]:
    """Drafter options under the names of the published checkpoints; the inverse of ``read_options``."""
    fields: dict[str, Any] = {"block_size": cfg.block_size, "sample_from_anchor": True}
    if cfg.draft_vocab_size is not None:
        fields["draft_vocab_size"] = cfg.draft_vocab_size
    if cfg.kind == "eagle3":
        return fields | {
            "ttt_length": cfg.ttt_length,
            "draft_num_hidden_layers": cfg.layers,
            "qk_norm": cfg.qk_norm,
        }
    mask = derive_mask_token(target, vocab_size) if cfg.mask_token_id is None else cfg.mask_token_id
    fields |= {"mask_token_id": mask, "markov_rank": cfg.markov_rank, "enable_confidence_head": cfg.confidence}
    if cfg.markov_rank:
        fields["markov_head_type"] = cfg.markov_head
    if cfg.confidence:
        fields["confidence_head_with_markov"] = cfg.confidence_with_markov
    return fields


def training_fields(kind: str, stored: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """The fields of the training run that the public classes need of a drafter of this kind.

    What is ``given`` goes before what the config has ``stored``, and that before the paper's value; None is not given.
    """
    defaults = _TRAINING_DEFAULTS["eagle3" if kind == "eagle3" else "block"]
    fields: dict[str, Any] = {}
    for name, default in defaults.items():
        choices = (given.get(name), stored.get(name), default)
        fields[name] = next(value for value in choices if value is not None)
    return fields


def read_options(config: PretrainedConfig, extra: dict[str, Any]) -> DrafterConfig:
    """DrafterConfig of a checkpoint's config; ``extra`` (the ``deepspec`` object) holds what has no published name.

    Raises DrafterConfigError for values that no drafter of this project can have, naming the field.
    """
    eagle = str((config.architectures or [""])[0]).endswith("Eagle3Model")
    shared = dict(
        layers=config.num_hidden_layers,
        draft_vocab_size=getattr(config, "draft_vocab_size", None),
        own_embedding=bool(extra.get("own_embedding", False)),
    )
    if shared["draft_vocab_size"] == config.vocab_size and not extra:
        shared["draft_vocab_size"] = None
    if eagle:
        return DrafterConfig(
            kind="eagle3",
            block_size=int(getattr(config, "block_size", getattr(config, "ttt_length", 7))),
            ttt_length=int(getattr(config, "ttt_length", 7)),
            qk_norm=getattr(config, "qk_norm", True),
            **shared,
        )
    for name in ("block_size", "mask_token_id"):
        if getattr(config, name, None) is None:
            raise DrafterConfigError(f"the checkpoint's config.json has no {name}: it is not a block drafter")
    rank, confidence = int(getattr(config, "markov_rank", 0)), bool(getattr(config, "enable_confidence_head", False))
    sliding = "sliding_attention" in (config.layer_types or ())
    window = extra.get("sliding_window", config.sliding_window if sliding else None)
    return DrafterConfig(
        kind="dspark" if rank or confidence else "dflash",
        block_size=config.block_size,
        markov_rank=rank,
        markov_head=getattr(config, "markov_head_type", None) or "vanilla",
        confidence=confidence,
        confidence_with_markov=confidence and bool(getattr(config, "confidence_head_with_markov", rank > 0)),
        mask_token_id=config.mask_token_id,
        learned_mask=bool(extra.get("learned_mask", False)),
        sliding_window=window,
        **shared,
    )


def _check_fit(cfg: DrafterConfig, target: PretrainedConfig, vocab_size: int) -> None:
    if cfg.mask_token_id is not None and cfg.mask_token_id >= vocab_size:
        raise DrafterConfigError(
            f"drafter.mask_token_id={cfg.mask_token_id} is outside the target's vocabulary of {vocab_size} tokens: "
            "give a smaller id, or none to derive it"
        )
    if cfg.draft_vocab_size is not None and cfg.draft_vocab_size > vocab_size:
        raise DrafterConfigError(
            f"drafter.draft_vocab_size={cfg.draft_vocab_size} exceeds the target's vocabulary of {vocab_size} tokens"
        )


def _qwen3_fields(target: PretrainedConfig) -> dict[str, Any]:
    """Qwen3-style layers serve every Llama-like target, whatever its own attention biases or experts."""
    names = _SHAPE_FIELDS + _OTHER_FIELDS + _TOKEN_FIELDS
    fields: dict[str, Any] = {name: getattr(target, name) for name in names if hasattr(target, name)}
    head_dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    return fields | {"model_type": "qwen3", "head_dim": head_dim}


def _gemma_fields(target: PretrainedConfig) -> dict[str, Any]:
    fields = target.to_dict()
    for name in ("per_layer_config", "transformers_version", "architectures", "dtype", "_name_or_path"):
        fields.pop(name, None)
    return fields


def _gemma4_fields(target: PretrainedConfig) -> dict[str, Any]:
    """Dense layers of the target's shapes: no experts, no per-layer inputs, no shared keys."""
    fields = _gemma_fields(target) | dict(
        enable_moe_block=False, hidden_size_per_layer_input=0, num_kv_shared_layers=0, use_double_wide_mlp=False
    )
    if "full_attention" in target.layer_types:
        full: Any = target.per_layer_config["full_attention"]  # type: ignore[call-overload]
        fields |= dict(global_head_dim=full.head_dim, num_global_key_value_heads=full.num_key_value_heads)
    return fields


_STYLES = {"qwen3": _qwen3_fields, "gemma3": _gemma_fields, "gemma4": _gemma4_fields}
