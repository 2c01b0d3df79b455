"""What an engine will refuse, or silently get wrong, in a drafter: a list of findings. Loads no engine.

Errors are what the engine refuses or turns into bad drafts without a word; warnings need a decision; notes inform.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from deepspec.models.export.checkpoint import (
    CALIBRATION,
    CONFIDENCE,
    EMBED,
    HEAD,
    MASK,
    W1,
    W2,
    Checkpoint,
    rope_fields,
)
from deepspec.models.export.engines import Engine


@dataclass(frozen=True)
class Finding:
    """``level`` is error, warning or note; ``field`` a config field, tensor or option."""

    level: str
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.field}: {self.message}"


@dataclass(frozen=True)
class Subject:
    """A checkpoint in the engine's layout, and what is known of its use."""

    checkpoint: Checkpoint
    engine: Engine
    target: Mapping[str, Any] | None = None  # the target's text config
    draft_tokens: int | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        return self.checkpoint.config

    @property
    def eagle(self) -> bool:
        return self.checkpoint.kind == "eagle3"


Rule = Callable[[Subject], Iterator[Finding]]


def validate(
    checkpoint: Checkpoint,
    engine: Engine,
    *,
    target: Mapping[str, Any] | None = None,
    draft_tokens: int | None = None,
) -> list[Finding]:
    """Every finding, errors first. ``checkpoint`` is in the engine's layout (GGUF: the DeepSpec layout)."""
    subject = Subject(checkpoint, engine, target, draft_tokens)
    found = [finding for rule in RULES for finding in rule(subject)]
    return sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.level))


def _architecture(s: Subject) -> Iterator[Finding]:
    if s.checkpoint.architecture not in s.engine.architectures:
        more = ""
        if s.engine.name == "gguf" and s.checkpoint.architecture == "Gemma4DSparkModel":
            more = ": use llama.cpp's convert_hf_to_gguf.py on the deepspec export with --include-head"
        yield Finding(
            "error",
            "architectures",
            f"{s.engine.name} ({s.engine.version}) has no drafter class {s.checkpoint.architecture!r}, it knows "
            f"{', '.join(s.engine.architectures)}{more}",
        )


def _anchor(s: Subject) -> Iterator[Finding]:
    if s.eagle:
        return
    stored = s.config.get("sample_from_anchor", (s.config.get("dflash_config") or {}).get("sample_from_anchor"))
    if stored is False:
        yield Finding(
            "error",
            "sample_from_anchor",
            "false: the anchor predicts nothing in this file, while DSpark engines draft from it: about one token "
            "would be accepted; train or import a drafter of the other layout",
        )
    elif stored is None:
        yield Finding(
            "warning",
            "sample_from_anchor",
            "absent: engines guess the anchor layout from the rest of the config; export again to write true",
        )


def _taps(s: Subject) -> Iterator[Finding]:
    checkpoint, config = s.checkpoint, s.config
    taps, layers = checkpoint.taps, config.get("num_target_layers") or (s.target or {}).get("num_hidden_layers")
    aux = config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids")
    if taps and any(low >= high for low, high in pairwise(taps)):
        yield Finding("error", "target_layer_ids", f"{list(taps)} must ascend strictly: engines collect taps in order")
    if taps and layers is not None and (taps[0] < -1 or taps[-1] > layers - 2):
        yield Finding(
            "error", "target_layer_ids", f"{list(taps)} must lie in -1…{layers - 2} for a target of {layers} layers"
        )
    if taps and aux is not None and list(aux) != [tap + s.engine.tap_offset for tap in taps]:
        yield Finding(
            "error",
            "eagle_aux_hidden_state_layer_ids",
            f"{list(aux)} does not name the taps {list(taps)}: {s.engine.name} writes a tap after layer k as "
            f"k + {s.engine.tap_offset}; export for this engine",
        )
    count, width = len(taps or aux or ()), checkpoint.tensors["fc.weight"].shape[1]
    if width != count * config["hidden_size"]:
        yield Finding("error", "fc.weight", f"takes {width} inputs, {count} taps of {config['hidden_size']} were named")
    if s.eagle and s.engine.eagle3_taps not in (None, count):
        yield Finding(
            "error",
            "target_layer_ids",
            f"{s.engine.name} takes exactly {s.engine.eagle3_taps} EAGLE-3 taps, this drafter has {count}: first "
            "`python -m deepspec.data cache target.taps=[a,b,c] cache.folder=cache-eagle3 …`, then train with the same "
            "taps and data.path=…/cache-eagle3 (docs/serving.md)",
        )
    if s.engine.name == "gguf" and -1 in taps:
        yield Finding("warning", "target_layer_ids", "a tap of the embedding (id 0 in llama.cpp) was never tried")


def _vocabulary(s: Subject) -> Iterator[Finding]:
    checkpoint = s.checkpoint
    size, draft = checkpoint.vocab_size, checkpoint.draft_vocab_size
    for name, rows in ((EMBED, size), (HEAD, draft), (W1, size), (W2, draft)):
        stored = checkpoint.tensors.get(name)
        if stored is not None and stored.shape[0] != rows:
            yield Finding(
                "error",
                name,
                f"has {stored.shape[0]} rows, config.json says {rows}: padded and unpadded vocabularies were mixed",
            )
    theirs = (s.target or {}).get("vocab_size")
    if theirs is not None and theirs != size:
        yield Finding(
            "error",
            "vocab_size",
            f"{size}, the target's head has {theirs} rows: take the padded size of the target's config",
        )
    mask = s.config.get("mask_token_id")
    if not s.eagle and (mask is None or not 0 <= int(mask) < size):
        yield Finding("error", "mask_token_id", f"{mask} is not a row of the embedding (vocabulary {size})")
    if checkpoint.reduced:
        yield from _draft_vocabulary(s)


def _draft_vocabulary(s: Subject) -> Iterator[Finding]:
    checkpoint = s.checkpoint
    if checkpoint.kind not in s.engine.reduced_vocabulary:
        yield Finding(
            "error",
            "draft_vocab_size",
            f"{s.engine.name} has no reduced vocabulary for {checkpoint.kind} and would read draft ids as target ids",
        )
    if s.engine.name != "deepspec" and HEAD not in checkpoint.tensors:
        yield Finding("error", HEAD, "missing: a reduced vocabulary needs its own rows of the head in the file")
    offsets = checkpoint.tensors.get("d2t")
    if offsets is None or len(offsets) != checkpoint.draft_vocab_size:
        have = "no" if offsets is None else str(len(offsets))
        yield Finding("error", "d2t", f"{have} entries for draft_vocab_size {checkpoint.draft_vocab_size}")
        return
    ids = offsets + torch.arange(len(offsets))
    if int(ids.min()) < 0 or int(ids.max()) >= checkpoint.vocab_size or len(ids.unique()) != len(ids):
        yield Finding("error", "d2t", "must be offsets (target id = draft id + d2t) to distinct ids of the target")


def _markov(s: Subject) -> Iterator[Finding]:
    if s.eagle:
        return
    if s.engine.needs_markov and not s.checkpoint.rank:
        yield Finding("error", "markov_rank", f"0 fails in {s.engine.name}: export writes a Markov head of zeros")
    head = s.config.get("markov_head_type") or "vanilla"
    if s.checkpoint.rank and head not in s.engine.markov_heads:
        yield Finding(
            "error",
            "markov_head_type",
            f"{s.engine.name} ({s.engine.version}) reads {', '.join(s.engine.markov_heads)}, not {head}: train with "
            "drafter.markov_head=vanilla, or serve with SGLang",
        )


def _confidence(s: Subject) -> Iterator[Finding]:
    weight, config = s.checkpoint.tensors.get(CONFIDENCE), s.config
    if s.eagle or (weight is None and not config.get("enable_confidence_head")):
        return
    if weight is None or not config.get("enable_confidence_head"):
        yield Finding("error", "enable_confidence_head", "config.json and the tensors disagree on a confidence head")
        return
    width = config["hidden_size"] + (s.checkpoint.rank if config.get("confidence_head_with_markov") else 0)
    if weight.shape[1] != width:
        yield Finding("error", CONFIDENCE, f"takes {weight.shape[1]} inputs, confidence_head_with_markov means {width}")
    if s.engine.name == "gguf" and not s.checkpoint.rank:
        yield Finding("warning", CONFIDENCE, "left out: llama.cpp reads it only beside a Markov head")
    if s.engine.name == "vllm" and weight.dtype != torch.float32:
        yield Finding(
            "note", CONFIDENCE, f"stored in {weight.dtype}, computed in float32: its rounding dates from training"
        )
    use = {
        "vllm": "used only with enable_adaptive_verification",
        "sglang": "not used in the default static mode",
        "gguf": "used only with --spec-draft-p-min above 0",
    }.get(s.engine.name)
    if use:
        yield Finding("note", "confidence_head", use)
    if config.get("deepspec", {}).get("temperatures") and not s.engine.reads_temperatures:
        yield Finding(
            "warning",
            "temperatures",
            f"{s.engine.name} has no field for a calibration and uses the raw confidence; it is in {CALIBRATION}",
        )


def _layers(s: Subject) -> Iterator[Finding]:
    config, metadata, name = s.config, s.checkpoint.metadata, s.engine.name
    if name == "deepspec":
        return
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"} or metadata.get("sliding_window"):
        yield Finding(
            "error",
            "layer_types",
            f"{name} makes sliding layers causal inside a block, this drafter's are not: train without "
            "drafter.sliding_window",
        )
    if config.get("attention_bias"):
        yield Finding("error", "attention_bias", f"{name}'s drafter layers have no attention bias")
    if s.eagle and any(tensor.endswith(".q_norm.weight") for tensor in s.checkpoint.tensors):
        yield Finding("error", "qk_norm", f"{name}'s EAGLE-3 class has no q/k norms: train with drafter.qk_norm=false")
    if MASK in s.checkpoint.tensors or metadata.get("learned_mask"):
        yield Finding(
            "error",
            MASK,
            f"{name} looks masks up in the embedding: export with --target and --include-head to write the learned "
            "mask into that row",
        )
    if metadata.get("own_embedding") and not s.engine.own_embedding:
        yield Finding("error", EMBED, f"{name} always takes the target's embedding, this drafter trained its own")
    if metadata.get("own_embedding") and name == "gguf" and HEAD not in s.checkpoint.tensors:
        yield Finding(
            "error", HEAD, "llama.cpp would use the drafter's embedding as its head: export with --include-head"
        )


def _released(s: Subject) -> Iterator[Finding]:
    """What this project reads and the public DeepSpec classes do not; their loader is silent about most of it."""
    if s.engine.name != "deepspec":
        return
    public = "released DeepSpec's classes"
    checkpoint, metadata = s.checkpoint, s.checkpoint.metadata
    missing = [name for name in (EMBED, HEAD) if name not in checkpoint.tensors]
    if missing:
        yield Finding(
            "warning",
            " and ".join(missing),
            f"not in the file: {public} fill them at random without an error (this project shares the target's): "
            "export with --target, and without --no-include-head",
        )
    if checkpoint.architecture.startswith("Gemma3"):
        yield Finding("warning", "architectures", f"there is no {checkpoint.architecture} among {public}")
    if checkpoint.reduced:
        yield Finding("warning", "draft_vocab_size", f"{public} have no reduced vocabulary and refuse the smaller head")
    if MASK in checkpoint.tensors or metadata.get("learned_mask"):
        yield Finding("warning", MASK, f"{public} ignore a learned mask and would draft from the embedding's row")
    sliding = "sliding_attention" in (s.config.get("layer_types") or ())
    if sliding or metadata.get("sliding_window"):
        yield Finding("warning", "layer_types", f"{public} attend to the whole context, not to a sliding window")
    if s.eagle and s.config.get("qk_norm") is False:
        yield Finding("warning", "qk_norm", f"{public} add q/k norms to EAGLE-3, this drafter was trained without any")


def _rope(s: Subject) -> Iterator[Finding]:
    config = s.config
    if not any(name in config for name in ("rope_parameters", "rope_theta", "rope_scaling")):
        yield Finding("error", "rope_parameters", "absent: engines would fall back to a base of 10000")
        return
    ours = rope_fields(config)
    kind = ours.get("rope_type", "default")
    if s.engine.rope_types is not None and kind not in s.engine.rope_types:
        yield Finding("error", "rope_parameters", f"rope_type {kind!r} is not written for {s.engine.name}")
    if s.target is None or "rope_theta" not in ours:
        return
    theirs = rope_fields(s.target)
    if "rope_theta" in theirs and theirs != ours:
        yield Finding("warning", "rope_parameters", f"{ours} in the drafter, {theirs} in the target: positions differ")


def _draft_tokens(s: Subject) -> Iterator[Finding]:
    wanted, size = s.draft_tokens, s.checkpoint.block_size
    if wanted is None or wanted == size or s.engine.name == "deepspec":
        return
    if not s.eagle and (wanted > size or s.engine.name == "vllm"):
        yield Finding(
            "error",
            "num_speculative_tokens",
            f"{wanted} with a block of {size}: the block is drafted in one piece, give {size}",
        )
    elif wanted > size:
        yield Finding("warning", "num_speculative_tokens", f"{wanted} exceeds the {size} steps it was trained for")


def _target(s: Subject) -> Iterator[Finding]:
    if s.target is None:
        yield Finding("note", "target", "not given: vocabulary, width and rope were not compared with it (--target)")
        return
    for name, theirs in (("hidden_size", "hidden_size"), ("num_target_layers", "num_hidden_layers")):
        ours = s.config.get(name)
        if ours is not None and theirs in s.target and ours != s.target[theirs]:
            yield Finding("error", name, f"{ours}, the target has {s.target[theirs]}: another target's drafter")
    if s.target.get("quantization_config"):
        yield Finding(
            "warning", "target", "is quantised: taps differ a little from those of training, acceptance may drop"
        )


RULES: tuple[Rule, ...] = (
    _architecture,
    _anchor,
    _taps,
    _vocabulary,
    _markov,
    _confidence,
    _layers,
    _released,
    _rope,
    _draft_tokens,
    _target,
)
