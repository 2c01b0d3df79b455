"""A drafter's folder as plain data: config fields and tensors under the names of a file format. Builds no model.

Shapes: V vocabulary, R Markov rank, D hidden size.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspec import files
from deepspec.models.confidence_scale import ConfidenceScale
from deepspec.models.frozen_head import FrozenHead

CONFIG, WEIGHTS, CALIBRATION = "config.json", "model.safetensors", "deepspec_calibration.json"
EMBED, HEAD, MASK = "embed_tokens.weight", "lm_head.weight", "mask_embedding"
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
CHECKPOINTS = ("best", "last")  # of a training run's folder, the one to take first
# Config fields that every layout spells alike, but for the number of layers.
LAYER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


class ExportError(ValueError):
    """A drafter that cannot be written for, or read from, another format; the message says why and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """config.json and the tensors of a folder, in whichever layout they were read or built."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def metadata(self) -> dict[str, Any]:
        """The ``deepspec`` object; {} in checkpoints of others."""
        return self.config.get("deepspec") or {}

    @property
    def architecture(self) -> str:
        """First of ``architectures``, or ''."""
        return (self.config.get("architectures") or [""])[0]

    @property
    def kind(self) -> str:
        """eagle3, dspark (a Markov or confidence head) or dflash."""
        if "eagle3" in self.architecture.lower():
            return "eagle3"
        return "dspark" if self.rank or self.config.get("enable_confidence_head") else "dflash"

    @property
    def rank(self) -> int:
        """Rank of the Markov head, 0 without one."""
        return int(self.config.get("markov_rank") or 0)

    @property
    def block_size(self) -> int:
        """Number of drafted tokens per round."""
        if "block_size" in self.config:
            return int(self.config["block_size"])
        return int(self.metadata.get("block_size") or self.config.get("ttt_length") or 7)

    @property
    def taps(self) -> tuple[int, ...]:
        """Zero-based decoder layers, −1 the embedding; () where the file does not say them in this numbering."""
        return tuple(self.config.get("target_layer_ids") or self.metadata.get("target_layer_ids") or ())

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return int(self.config["vocab_size"])

    @property
    def draft_vocab_size(self) -> int:
        """V of the drafter's proposals."""
        return int(self.config.get("draft_vocab_size") or self.vocab_size)

    @property
    def reduced(self) -> bool:
        """Whether the drafter proposes from a part of the vocabulary."""
        return self.draft_vocab_size != self.vocab_size

    def replaced(self, tensors: Mapping[str, Tensor | None] | None = None, **fields: Any) -> "Checkpoint":
        """With other tensors (None removes one) and config fields."""
        merged = self.tensors | dict(tensors or {})
        kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
        return dataclasses.replace(self, config=self.config | fields, tensors=kept)


def find(folder: str | Path) -> Path | None:
    """The checkpoint in ``folder``: itself, or the ``best`` or ``last`` of a training run; None where there is none."""
    path = Path(folder)
    places = (path, *(path / name for name in CHECKPOINTS))
    return next((place for place in places if (place / CONFIG).is_file()), None)


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder; raises ExportError for a folder without one."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ExportError(
            f"{path} does not exist: {folder} is not a drafter checkpoint (training writes its last and best)"
        )
    return dict(files.read_json(path))


def read(folder: str | Path) -> Checkpoint:
    """Any folder of config.json and safetensors; raises ExportError for an incomplete or damaged one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path, config = Path(folder), read_config(folder)
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise ExportError(f"{path} holds no .safetensors file: the checkpoint is incomplete")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        try:
            tensors |= load_file(shard)
        except SafetensorError as error:
            raise ExportError(f"{shard} is damaged ({error}): copy or train it again") from error
    return Checkpoint(config, tensors)


def write(checkpoint: Checkpoint, folder: str | Path) -> None:
    """Weights first, config.json last, each atomically; calibration beside them where there is any."""
    from safetensors.torch import save_file

    path = Path(folder)
    with files.atomic_write(path / WEIGHTS) as temporary:
        save_file(
            {name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()},
            temporary,
            metadata={"format": "pt"},
        )
    write_calibration(checkpoint, path)
    files.write_json(path / CONFIG, checkpoint.config)


def write_calibration(checkpoint: Checkpoint, folder: Path) -> None:
    """The calibration of the confidences as a side file, as no engine has a field for it; nothing without any."""
    scale = ConfidenceScale.of(checkpoint.metadata)
    if scale is not None:
        use = "confidence of position k = sigmoid(logit_k / temperatures[k - 1] + shifts[k - 1]), k = 1 … block_size"
        files.write_json(folder / CALIBRATION, {"format_version": 2, **scale.fields(), "use": use})


def with_head(checkpoint: Checkpoint, head: FrozenHead) -> Checkpoint:
    """The target's embedding and head beside the drafter's tensors, in the drafter's dtype; its own ones stay."""
    if (head.vocab_size, head.hidden_size) != (checkpoint.vocab_size, checkpoint.config["hidden_size"]):
        raise ExportError(
            f"the target's head is {head.vocab_size} x {head.hidden_size}, the drafter's config says "
            f"{checkpoint.vocab_size} x {checkpoint.config['hidden_size']}: give the target it was trained for"
        )
    dtype = checkpoint.tensors["fc.weight"].dtype
    added = {
        name: weight.detach().to("cpu", dtype, copy=True)
        for name, weight in ((EMBED, head.embed_VD), (HEAD, head.head_VD))
        if name not in checkpoint.tensors
    }
    return checkpoint.replaced(added)


def with_markov(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    """A Markov head of zeros, which changes no logit, for engines that insist on one; unchanged where there is one."""
    if checkpoint.rank or checkpoint.kind == "eagle3":
        return checkpoint
    dtype = checkpoint.tensors["fc.weight"].dtype
    sizes = ((W1, checkpoint.vocab_size), (W2, checkpoint.draft_vocab_size))
    zeros: dict[str, Tensor | None] = {name: torch.zeros(size, rank, dtype=dtype) for name, size in sizes}
    fields: dict[str, Any] = dict(markov_rank=rank, markov_head_type="vanilla")
    if not checkpoint.config.get("enable_confidence_head"):
        fields |= dict(enable_confidence_head=False, confidence_head_with_markov=False)
    return checkpoint.replaced(zeros, **fields)


def without_zero_markov(checkpoint: Checkpoint) -> Checkpoint:
    """Without the zeros that ``with_markov`` adds, so that an exported DFlash is one again; others unchanged."""
    w1, w2 = checkpoint.tensors.get(W1), checkpoint.tensors.get(W2)
    read_by_confidence = checkpoint.config.get("confidence_head_with_markov")
    if w1 is None or w2 is None or read_by_confidence or bool(w1.any()) or bool(w2.any()):
        return checkpoint
    return checkpoint.replaced({W1: None, W2: None}, markov_rank=0)


def with_mask_row(checkpoint: Checkpoint) -> Checkpoint:
    """A learned mask embedding as the row ``mask_token_id`` of the embedding, where engines look it up.

    Exact as long as no text contains that token. Unchanged without a learned mask or without an embedding in the file
    (the validator refuses the latter).
    """
    mask, embed = checkpoint.tensors.get(MASK), checkpoint.tensors.get(EMBED)
    if mask is None or embed is None:
        return checkpoint
    gemma = checkpoint.architecture.startswith("Gemma")
    folded = embed.clone()
    folded[int(checkpoint.config["mask_token_id"])] = mask / (embed.shape[1] ** 0.5 if gemma else 1.0)
    metadata = checkpoint.metadata | {"learned_mask": False, "own_embedding": True}
    return checkpoint.replaced({MASK: None, EMBED: folded}, deepspec=metadata)


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of either spelling (older files say rope_theta and rope_scaling)."""
    stored = config.get("rope_parameters")
    if stored:
        return {name: value for name, value in stored.items() if value is not None}
    scaling = {name: value for name, value in (config.get("rope_scaling") or {}).items() if value is not None}
    kind = scaling.pop("type", None) or scaling.pop("rope_type", None) or "default"
    return scaling | {"rope_type": kind, "rope_theta": config.get("rope_theta", 10000.0)}


def older_rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling beside rope_parameters, for engines on an older transformers.

    {} where each kind of layer has its own (Gemma).
    """
    rope = rope_fields(config)
    if "rope_theta" not in rope:
        return {}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
    }
