"""Build, save and load drafters in the layout of the published DeepSpec checkpoints, with checks against the target.

A folder holds config.json and model.safetensors under the published tensor names; what those formats do not say is in
config.json's ``deepspec`` object. Folders of other layouts are loaded through export.imports. Knows no training.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from deepspec import files
from deepspec.models import families
from deepspec.models.block_drafter import BlockDrafter
from deepspec.models.confidence_scale import ConfidenceScale
from deepspec.models.draft_config import draft_config, read_options, training_fields
from deepspec.models.drafter_base import TrainedDrafter
from deepspec.models.drafter_config import DrafterConfig, DrafterConfigError
from deepspec.models.eagle3 import Eagle3Drafter
from deepspec.models.export import checkpoint as folders
from deepspec.models.export import imports
from deepspec.models.export.checkpoint import CONFIG, EMBED, HEAD, WEIGHTS, Checkpoint, ExportError
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.target import Target

__all__ = [
    "AnchorLayoutError",
    "CheckpointError",
    "DrafterConfig",
    "DrafterConfigError",
    "WrongTargetError",
    "build",
    "load",
    "own_layout",
    "read_config",
    "save",
    "update_metadata",
]

FORMAT_VERSION = 1
# Modules that only group tensors in the program; the files name their tensors without them.
_GROUPS = ("backbone.", "vocabulary.")


class CheckpointError(ValueError):
    """A drafter folder that cannot be read; the message names the file, the field or tensor, and the remedy."""


class WrongTargetError(CheckpointError):
    """A drafter made for another target than the one it is to serve."""


class AnchorLayoutError(CheckpointError):
    """A checkpoint whose anchor predicts nothing: another block layout than this project's (docs/algorithms.md)."""


def build(
    cfg: DrafterConfig,
    target_config: PretrainedConfig,
    head: FrozenHead,
    taps: Sequence[int],
    *,
    draft_ids: Sequence[int] | None = None,
    seed: int = 0,
) -> BlockDrafter | Eagle3Drafter:
    """A new drafter in float32 on the head's device, its initial weights a function of ``seed`` alone.

    ``draft_ids`` are the ascending target ids of a reduced vocabulary (draft_vocabulary.most_frequent), needed exactly
    when ``cfg.draft_vocab_size`` is set. Raises DrafterConfigError where options, target and ids do not fit.
    """
    if (cfg.draft_vocab_size is None) != (draft_ids is None) or len(draft_ids or ()) != (cfg.draft_vocab_size or 0):
        given = "none" if draft_ids is None else str(len(draft_ids))
        raise DrafterConfigError(
            f"drafter.draft_vocab_size={cfg.draft_vocab_size} and {given} draft_ids contradict each other: give as "
            "many ids as the size (draft_vocabulary.most_frequent), or neither"
        )
    config = draft_config(cfg, target_config, taps, head.vocab_size)
    if config.hidden_size != head.hidden_size:
        raise WrongTargetError(
            f"the target's config has hidden_size {config.hidden_size}, its head {head.hidden_size}: they belong to "
            "different targets"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = _construct(cfg, config, head, draft_ids)
    return drafter.to(head.device)


def _construct(
    cfg: DrafterConfig, config: PretrainedConfig, head: FrozenHead, draft_ids: Sequence[int] | None
) -> BlockDrafter | Eagle3Drafter:
    return (Eagle3Drafter if cfg.kind == "eagle3" else BlockDrafter)(cfg, config, head, draft_ids)


def save(
    drafter: TrainedDrafter,
    folder: str | Path,
    *,
    target_name: str | None = None,
    target_fingerprint: str | None = None,
    target_path: str | None = None,
    target_revision: str | None = None,
    thinking: bool | None = None,
    num_anchors: int | None = None,
    step_loss_decay: float | None = None,
    provenance: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    include_head: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write ``drafter`` to ``folder``, atomically, config.json last.

    The target's embedding and head are left out unless ``include_head``; a reduced vocabulary always stores its rows of
    the head, as engines need them. ``dtype`` is bfloat16 or float32. ``state`` replaces the drafter's own state_dict
    (an average of weights, or a gathered sharded one). ``target_path`` is a hub id or folder, as the user gave it.
    ``num_anchors`` (per sequence, block drafters) and ``step_loss_decay`` (EAGLE-3) are the training run's: the public
    DeepSpec classes load no config without them. Facts not given keep the values of the checkpoint that the drafter
    was loaded from, or the paper's; a path, with its revision, replaces both. Raises ValueError for another dtype.
    """
    from safetensors.torch import save_file

    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype={dtype} is not stored: choose torch.bfloat16 or torch.float32")
    target = dict(drafter.metadata.get("target") or {})
    target |= {k: v for k, v in (("name", target_name), ("fingerprint", target_fingerprint)) if v is not None}
    if target_path is not None:
        # a relative folder with its dot: models/x alone would be taken for a hub id where that folder is not
        local = Path(target_path).is_dir() and not Path(target_path).is_absolute()
        target |= {"path": f"./{Path(target_path)}" if local else target_path, "revision": target_revision}
    metadata = drafter.metadata | {
        "format_version": FORMAT_VERSION,
        "kind": drafter.config.kind,
        "sample_from_anchor": True,
        "target": target,
        "thinking": drafter.metadata.get("thinking") if thinking is None else thinking,
        **_scale_fields(drafter),
        "own_embedding": drafter.config.own_embedding,
        "learned_mask": drafter.config.learned_mask,
        "sliding_window": drafter.config.sliding_window,
        "provenance": files.provenance() | dict(provenance or {}),
        **dict(extra or {}),
    }
    tensors = _tensors(drafter, drafter.state_dict() if state is None else state, dtype, include_head)
    with files.atomic_write(Path(folder) / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    fields = _config_fields(drafter, dtype)
    fields |= training_fields(drafter.config.kind, fields, num_anchors=num_anchors, step_loss_decay=step_loss_decay)
    files.write_json(Path(folder) / CONFIG, fields | {"deepspec": metadata})


def _scale_fields(drafter: TrainedDrafter) -> dict[str, Any]:
    scale = drafter.confidence_scale
    return {"temperatures": None, "shifts": None} if scale is None else scale.fields()


def _tensors(
    drafter: TrainedDrafter, state: Mapping[str, Tensor], dtype: torch.dtype, include_head: bool
) -> dict[str, Tensor]:
    found = {published_name(name): tensor for name, tensor in state.items()}
    if include_head:
        found.setdefault(EMBED, drafter.head.embed_VD)
    if include_head or drafter.draft_ids_V is not None:
        found[HEAD] = drafter.vocabulary.head(drafter.head).head_VD
    return {
        # copies, as safetensors refuses tensors that share memory (a tied embedding and head)
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True).contiguous()
        for name, tensor in found.items()
    }


def published_name(name: str) -> str:
    """A tensor's name in the published checkpoints from its name in the module."""
    return next((name.removeprefix(group) for group in _GROUPS if name.startswith(group)), name)


def _config_fields(drafter: TrainedDrafter, dtype: torch.dtype) -> dict[str, Any]:
    config = drafter.hf_config
    fields = config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    if families.family_of(config).drafter_style == "gemma4":  # engines read these under their older names
        layer: Any = config.per_layer_config[0]
        fields |= {"global_head_dim": layer.head_dim, "num_global_key_value_heads": layer.num_key_value_heads}
    return fields


def read_config(folder: str | Path, *, taps: Sequence[int] | None = None) -> dict[str, Any]:
    """A drafter folder's config.json in the DeepSpec layout; its ``deepspec`` object is {} in checkpoints of others.

    Another layout is converted, ``taps`` as in ``load``. Raises CheckpointError for a folder without one, a layout that
    is not known here, a newer format, and AnchorLayoutError for another block layout.
    """
    fields = _stored_config(folder)
    return _checked(Path(folder), fields if imports.native(fields) else _read(folder, taps).config)


def _stored_config(folder: str | Path) -> dict[str, Any]:
    try:
        return folders.read_config(folder)
    except ExportError as error:
        raise CheckpointError(str(error)) from error


def _read(folder: str | Path, taps: Sequence[int] | None) -> Checkpoint:
    try:
        return imports.read(folder, taps=taps)
    except ExportError as error:
        raise CheckpointError(str(error)) from error


def _checked(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a DeepSpec config.json, with a ``deepspec`` object."""
    path, metadata = folder / CONFIG, fields.setdefault("deepspec", {})
    if metadata.get("format_version", FORMAT_VERSION) > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: deepspec.format_version {metadata['format_version']} is newer than {FORMAT_VERSION}: "
            "update deepspec"
        )
    for place in (fields, metadata):
        if place.get("sample_from_anchor", True) is not True:
            raise AnchorLayoutError(
                f"{path}: sample_from_anchor is {place['sample_from_anchor']!r}: in that layout the anchor predicts "
                "nothing, and drafting with it here would accept about one token; train a drafter in this layout"
            )
    return fields


def own_layout(folder: str | Path) -> dict[str, Any]:
    """The config.json of a folder of the DeepSpec layout; raises CheckpointError for another one, with the remedy."""
    fields = _stored_config(folder)
    if not imports.native(fields):
        raise CheckpointError(
            f"{folder} is of another layout, which has no place for this project's fields: import it first (python -m "
            f"deepspec.models.export --drafter {folder} --to deepspec --target TARGET --output FOLDER)"
        )
    return _checked(Path(folder), fields)


def update_metadata(folder: str | Path, **facts: Any) -> None:
    """Replace fields of the ``deepspec`` object (for instance a calibration) without touching the weights.

    Raises CheckpointError as ``own_layout`` does.
    """
    fields = own_layout(folder)
    fields["deepspec"] |= facts
    files.write_json(Path(folder) / CONFIG, fields)


def load(
    folder: str | Path,
    head: FrozenHead | Target | None = None,
    *,
    taps: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    calibrated: bool = True,
) -> BlockDrafter | Eagle3Drafter:
    """The drafter of a folder of any layout that ``export.imports`` reads, in evaluation mode.

    ``head`` is the target, or its embedding and head; with the target its fingerprint is checked too. None takes both
    from the folder, which must then contain them. ``taps`` (zero-based layers) are for published EAGLE-3 files, which
    do not say them. ``dtype`` and ``device`` default to those of ``head``, else to float32 on the CPU. ``calibrated``
    False leaves the scale of its confidences out, be it usable or not. Raises CheckpointError and its kinds, each
    before any weight is copied.
    """
    path, source = Path(folder), _read(folder, taps)
    fields, tensors = _checked(path, dict(source.config)), source.tensors
    metadata: dict[str, Any] = fields.pop("deepspec")
    try:
        config = type(AutoConfig.for_model(fields["model_type"])).from_dict(fields)
        cfg = read_options(config, metadata)
        scale = ConfidenceScale.of(metadata) if calibrated else None
    except ValueError as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from error
    if scale is not None and len(scale.temperatures) != cfg.block_size:
        raise CheckpointError(
            f"{path / CONFIG}: {len(scale.temperatures)} temperatures for block size {cfg.block_size}: calibrate again"
        )
    if isinstance(head, Target):
        _check_target(path, config, metadata, head)
        head = FrozenHead.of(head)
    if head is None:
        head = _own_head(path, config, tensors)
    _check_head(path, config, cfg, head, source)
    draft_ids = None
    if cfg.draft_vocab_size is not None:
        if "d2t" not in tensors:
            raise CheckpointError(f"{path / WEIGHTS}: no tensor d2t, needed by draft_vocab_size {cfg.draft_vocab_size}")
        draft_ids = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()
    device, dtype = device or head.device, dtype or head.dtype
    drafter = _construct(cfg, config, head.to(device), draft_ids)
    _fill(path, drafter, tensors)
    drafter.metadata = metadata
    drafter.confidence_scale = scale
    return drafter.to(device=device, dtype=dtype).eval()


def _check_target(path: Path, config: PretrainedConfig, metadata: Mapping[str, Any], target: Target) -> None:
    layers = getattr(config, "num_target_layers", target.num_layers)
    for name, theirs, ours in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("num_target_layers", layers, target.num_layers),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if theirs != ours:
            raise WrongTargetError(f"{path / CONFIG}: {name} is {theirs}, target {target.name} has {ours}")
    made_for = metadata.get("target") or {}
    fingerprint = made_for.get("fingerprint")
    if fingerprint is not None and fingerprint != target.fingerprint:
        raise WrongTargetError(
            f"{path / CONFIG}: this drafter was trained for target {made_for.get('name')} with fingerprint "
            f"{fingerprint[:12]}…, but {target.name} has {target.fingerprint[:12]}…: use that target or train a drafter"
        )


def _check_head(path: Path, config: PretrainedConfig, cfg: DrafterConfig, head: FrozenHead, source: Checkpoint) -> None:
    for name, theirs, ours in (
        ("hidden_size", config.hidden_size, head.hidden_size),
        ("vocab_size", config.vocab_size, head.vocab_size),
    ):
        if theirs != ours:
            raise WrongTargetError(f"{path / CONFIG}: {name} is {theirs}, the target's head has {ours}")
    if not imports.native(folders.read_config(path)):  # others train the embedding or the head with the drafter
        if (problem := imports.head_error(source, head)) is not None:
            raise WrongTargetError(f"{path / WEIGHTS}: {problem}")
        return
    stored = source.tensors.get(EMBED)
    if stored is None or cfg.own_embedding or stored.shape != head.embed_VD.shape:
        return
    rows = torch.arange(0, head.vocab_size, max(1, head.vocab_size // 64))
    mine, theirs = head.embed_VD[rows.to(head.device)].float().cpu(), stored[rows].float()
    if float((mine - theirs).norm()) > 0.02 * float(theirs.norm()):
        raise WrongTargetError(
            f"{path / WEIGHTS}: {EMBED} is not the embedding of the target given: this drafter belongs to another"
        )


def _own_head(path: Path, config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> FrozenHead:
    missing = [name for name in (EMBED, HEAD) if name not in tensors]
    if missing or len(tensors[HEAD]) != len(tensors[EMBED]):
        raise CheckpointError(
            f"{path / WEIGHTS} does not hold the whole embedding and head ({', '.join(missing) or 'reduced head'}): "
            "pass the target"
        )
    scale, cap = families.embed_scale(config), families.softcap(config)
    return FrozenHead(tensors[EMBED].float(), tensors[HEAD].float(), embed_scale=scale, softcap=cap)


def _fill(path: Path, drafter: TrainedDrafter, tensors: Mapping[str, Tensor]) -> None:
    """Copy the file's tensors into the module; every one of the module's must be there, in its shape."""
    state = drafter.state_dict()
    names = {name: published_name(name) for name in state}
    optional = {"t2d", "d2t", "layer_scalar"}
    missing = [new for new in names.values() if new not in tensors and new.split(".")[-1] not in optional]
    if missing:
        raise CheckpointError(f"{path / WEIGHTS} lacks {', '.join(sorted(missing))}: it does not match {CONFIG}")
    ours = {*names.values(), EMBED, HEAD, "d2t", "t2d"}
    unknown = sorted(name for name in tensors if name not in ours and not name.startswith("rotary_emb."))
    if unknown:
        raise CheckpointError(
            f"{path / WEIGHTS} holds {', '.join(unknown)}, which {CONFIG} has no place for: without them the drafter "
            "would draft differently"
        )
    for name, new in names.items():
        if new not in tensors:
            continue
        if tensors[new].shape != state[name].shape:
            raise CheckpointError(
                f"{path / WEIGHTS}: {new} has shape {list(tensors[new].shape)}, {CONFIG} asks for "
                f"{list(state[name].shape)}"
            )
        state[name] = tensors[new]
    drafter.load_state_dict(state)
