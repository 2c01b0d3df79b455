"""Target families as rows of a table: a new family is one row. Knows configs, loads nothing."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_DECODERS = ("model", "model.language_model", "language_model.model", "language_model")


class UnknownFamilyError(ValueError):
    """The target's ``model_type`` has no row in ``FAMILIES``."""


class RopeError(ValueError):
    """A rotary embedding whose frequencies depend on more than a token's own position."""


class TapError(ValueError):
    """Tap ids that are not ascending decoder layers of this target."""


# Rotary embeddings whose frequencies are fixed when the model is loaded. transformers' "dynamic" and "longrope" choose
# theirs anew in every forward, by the longest position of the whole batch: a row's states then depend on its
# neighbours, keys in a cache stem from other frequencies than the queries that meet them, and drafted decoding, which
# forwards other batches than plain decoding, cannot equal it.
FIXED_ROPES = ("default", "linear", "yarn", "llama3", "proportional")


@dataclass(frozen=True)
class Family:
    """What differs between target families. Paths are relative to the causal LM; the first that exists is taken."""

    name: str
    model_types: tuple[str, ...]
    drafter_style: str = "qwen3"  # layer the drafter borrows: qwen3, gemma3 or gemma4
    masks: str = "full"  # how the decoder takes a prepared mask: full, uniform (one, sliding), by_type (a dict)
    scaled_embedding: bool = False  # embeddings are multiplied by √hidden_size
    softcap_field: str | None = None  # config field of the final logit soft cap
    decoder_paths: tuple[str, ...] = _DECODERS
    layers: str = "layers"
    final_norm: str = "norm"
    embed: str = "embed_tokens"
    end_of_turn: tuple[str, ...] = ()


FAMILIES: tuple[Family, ...] = (
    Family("qwen3", ("qwen3",), masks="by_type", end_of_turn=("<|im_end|>",)),
    Family("qwen3_moe", ("qwen3_moe",), masks="uniform", end_of_turn=("<|im_end|>",)),
    Family("llama", ("llama",), end_of_turn=("<|eot_id|>", "<|im_end|>")),
    Family("qwen2", ("qwen2",), masks="by_type", end_of_turn=("<|im_end|>",)),
    Family("mistral", ("mistral",), masks="uniform"),
    Family(
        "gemma3",
        ("gemma3_text", "gemma3"),
        drafter_style="gemma3",
        masks="by_type",
        scaled_embedding=True,
        softcap_field="final_logit_softcapping",
        end_of_turn=("<end_of_turn>",),
    ),
    Family(
        "gemma4",
        ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
        drafter_style="gemma4",
        masks="by_type",
        scaled_embedding=True,
        softcap_field="final_logit_softcapping",
        end_of_turn=("<turn|>", "<end_of_turn>"),
    ),
)


def text_config(config: Any) -> Any:
    """The text model's config; multimodal wrappers hold it inside."""
    inner = getattr(config, "get_text_config", None)
    return inner() if callable(inner) else config


def family_of(config: Any) -> Family:
    """The row for a Hugging Face config; raises UnknownFamilyError naming the known types."""
    wanted = (getattr(config, "model_type", None), getattr(text_config(config), "model_type", None))
    for family in FAMILIES:
        if any(kind in family.model_types for kind in wanted):
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise UnknownFamilyError(
        f"target family with model_type {wanted[0]!r} is not supported; known model_types: {known}. "
        "A new family is one row in deepspec/models/families.py"
    )


def rope_types(config: Any) -> set[str]:
    """Kinds of rotary embedding of the decoder layers; several where each type of layer has its own (Gemma)."""
    parameters = getattr(text_config(config), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {each.get("rope_type") or "default" for each in nested or [parameters]}


def require_fixed_rope(config: Any) -> None:
    """Raise RopeError unless the frequencies of every layer are functions of the position alone."""
    varying = sorted(rope_types(config) - set(FIXED_ROPES))
    if not varying:
        return
    positions = getattr(text_config(config), "max_position_embeddings", None)
    remedy = f"take a target with one of {', '.join(FIXED_ROPES)}"
    if varying == ["dynamic"]:
        remedy += (
            f", or, for texts of at most {positions} tokens, where both are the same, give a copy of the folder whose "
            'config.json says rope_type "default"'
        )
    raise RopeError(
        f"the target's rope_parameters have rope_type {', '.join(map(repr, varying))}, whose frequencies change with "
        f"the longest text of the batch, so that no decoding in batches could equal plain decoding: {remedy}"
    )


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Sliding window of each decoder layer, None where attention is full."""
    family, text = family_of(config), text_config(config)
    window = getattr(text, "sliding_window", None)
    if family.masks == "full" or window is None:
        return (None,) * text.num_hidden_layers
    if family.masks == "uniform":
        return (window,) * text.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in text.layer_types)


def embed_scale(config: Any) -> float:
    """Factor on the embedding, before rounding to the weights' dtype."""
    return text_config(config).hidden_size ** 0.5 if family_of(config).scaled_embedding else 1.0


def softcap(config: Any) -> float | None:
    """The final logit soft cap s (logits become s·tanh(logits/s)), or None."""
    field = family_of(config).softcap_field
    return getattr(text_config(config), field, None) if field else None


def default_taps(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """``count`` layers evenly spaced from 1 to L−3, halves rounded up, as DSpark's published drafters have them.

    A target too shallow for that spreads over 0…L−2 and may get fewer.
    """
    if num_layers < 2:
        raise TapError(f"a target of {num_layers} layer(s) has nothing to tap: the last layer is not allowed")
    if count < 1:
        raise TapError(f"count of taps must be positive, got {count}")
    first, last = (1, num_layers - 3) if num_layers - 3 >= count else (0, num_layers - 2)
    if count == 1:
        return (last,)
    step = (last - first) / (count - 1)
    return tuple(sorted({int(first + step * index + 0.5) for index in range(count)}))


def validate_taps(taps: Any, num_layers: int) -> tuple[int, ...]:
    """``taps`` as a tuple, or TapError: strictly ascending ids in −1…L−2 (−1 is the embedding output)."""
    ids = tuple(int(tap) for tap in taps)
    ascending = all(low < high for low, high in pairwise(ids))
    if not ids or not ascending or ids[0] < -1 or ids[-1] > num_layers - 2:
        raise TapError(
            f"taps {list(ids)} must be strictly ascending ids from -1 (embedding) to {num_layers - 2} "
            f"for a target of {num_layers} layers (the last layer is not a tap)"
        )
    return ids
