"""Which drafters, which target: found, checked against each other, and named. Loads no weights.

Knows run folders and checkpoint configs.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from deepspec import recipes
from deepspec.files import sha256_file
from deepspec.models.drafter import read_config
from deepspec.models.export import checkpoint as folders
from deepspec.models.target import Target, TargetConfig, resolve

BASELINES = ("ngram",)  # drafters that need no training: prompt lookup


class ChooseError(ValueError):
    """A drafter or target that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Candidate:
    """A drafter's checkpoint folder and what its config says."""

    label: str
    folder: Path
    config: dict[str, Any]

    @property
    def own(self) -> dict[str, Any]:
        """The "deepspec" object of config.json; empty for checkpoints trained elsewhere."""
        return self.config["deepspec"]

    @property
    def kind(self) -> str:
        """dspark, dflash or eagle3."""
        if "kind" in self.own:
            return str(self.own["kind"])
        if self.config["architectures"][0].endswith("Eagle3Model"):
            return "eagle3"
        return "dspark" if self.config.get("markov_rank") or self.confidence else "dflash"

    @property
    def confidence(self) -> bool:
        """Whether it has a confidence head."""
        return bool(self.config.get("enable_confidence_head", False))

    @property
    def block_size(self) -> int | None:
        """Trained block length, where the config states it."""
        value = self.config.get("block_size")
        return None if value is None else int(value)

    @property
    def target(self) -> dict[str, Any]:
        """Recorded target: name, fingerprint, path and revision where known (older checkpoints: of their recipe)."""
        target = self.own.get("target") or {}
        recipe = ((self.own.get("provenance") or {}).get("recipe") or {}).get("target") or {}
        if "path" not in target and recipe.get("name") == target.get("name") and recipe.get("path"):
            return {**target, "path": recipe["path"], "revision": recipe.get("revision")}
        return target

    @property
    def thinking(self) -> bool | None:
        """Thinking mode of the training data, None when not recorded."""
        return self.own.get("thinking")

    def fingerprint(self) -> str:
        """SHA-256 over the config and the weights: another training run is another drafter."""
        digest = hashlib.sha256()
        for file in sorted([self.folder / "config.json", *self.folder.glob("*.safetensors")]):
            digest.update(f"{file.name} {sha256_file(file)}\n".encode())
        return digest.hexdigest()


def candidates(paths: Sequence[str], root: Path = Path("runs"), taps: Sequence[int] | None = None) -> list[Candidate]:
    """The drafters asked for, or the newest finished one under ``root``; ``taps`` as in drafter.load.

    Raises ChooseError, and CheckpointError for a folder that is no drafter.
    """
    places = [checkpoint_folder(path) for path in paths] or [newest_drafter(root)]
    found: list[Candidate] = []
    taken = set(BASELINES)
    for folder in places:
        inside = folder.name in folders.CHECKPOINTS or folder.name.startswith("step-")
        name = label = folder.parent.name if inside else folder.name
        number = 1
        while label in taken:
            number += 1
            label = f"{name}-{number}"
        taken.add(label)
        found.append(Candidate(label, folder, read_config(folder, taps=taps)))
    return found


def newest_drafter(root: Path = Path("runs")) -> Path:
    """The checkpoint that was written last, ``best`` before ``last`` of the same run. Raises ChooseError."""
    written = [path.parent for name in folders.CHECKPOINTS for path in root.glob(f"*/drafters/*/{name}/config.json")]
    if not written:
        raise ChooseError(
            f"no drafter under {root}/*/drafters/: train one with `torchrun deepspec/train/main.py +recipe=dspark`, or "
            "pass --drafter FOLDER"
        )
    newest = max(written, key=lambda folder: (folder / "config.json").stat().st_mtime)
    return checkpoint_folder(str(newest.parent))


def checkpoint_folder(path: str) -> Path:
    """The folder with config.json: ``path`` itself, its ``best`` or ``last``, or a hub id's snapshot."""
    if (found := folders.find(path)) is not None:
        return found
    if Path(path).exists():
        raise ChooseError(
            f"--drafter {path}: neither it nor its best/ or last/ holds a config.json; is training finished?"
        )
    if _hub_id(path):
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(path))
        except Exception as error:  # offline, unknown id, no access: one answer for all
            reason = " ".join(str(error).split())[:200]
            raise ChooseError(f"--drafter {path}: no such folder, and the hub could not give it ({reason})") from error
    raise ChooseError(f"--drafter {path}: no such folder")


def target_config(name: str | None, drafters: Sequence[Candidate], dtype: str, thinking: bool) -> TargetConfig:
    """Target by recipe name, folder or hub id; without a name the one the first drafter records. Raises ChooseError."""
    if name is None:
        return _recorded_target(drafters[0].target if drafters else {}, dtype, thinking)
    if name in recipes.names("target") and name != "custom":
        plain = OmegaConf.to_container(OmegaConf.load(recipes.recipes_dir() / "target" / f"{name}.yaml"))
        known = {item.name for item in fields(TargetConfig)}
        values = {str(key): value for key, value in dict(plain).items() if key in known}  # type: ignore[arg-type]
        return TargetConfig(**{**values, "dtype": dtype, "thinking": thinking})
    if not Path(name).is_dir() and "/" not in name:
        shown = ", ".join(recipes.names("target"))
        raise ChooseError(
            f"--target {name}: neither a folder nor a recipe; recipes: {shown}; or give a hub id org/name"
        )
    return TargetConfig(recipes.slug(name), name, dtype=dtype, thinking=thinking)  # the name training gives it


def _recorded_target(recorded: Mapping[str, Any], dtype: str, thinking: bool) -> TargetConfig:
    """The target a drafter was trained for: where its training found it, else its recipe's."""
    name, path = recorded.get("name"), str(recorded.get("path") or "")
    if name is None:
        raise ChooseError("the drafter records no target: pass --target RECIPE, FOLDER or HUB-ID")
    known = name in recipes.names("target") and name != "custom"
    named = target_config(name, (), dtype, thinking) if known else TargetConfig(name, name, None, None, dtype, thinking)
    cfg = replace(named, path=path, revision=recorded.get("revision")) if path else named
    if Path(resolve(cfg)).is_dir() or _hub_id(cfg.path):
        return cfg
    if known:
        return named
    place = f" in {path}" if path else ""
    raise ChooseError(
        f"the drafter was trained for the target {name}{place}, which is not here: pass --target FOLDER or HUB-ID"
    )


def _hub_id(path: str) -> bool:
    """Whether it is spelled like org/name on a hub."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~", "runs/"))


def check_fit(candidate: Candidate, target: Target, thinking: bool, allow_mismatch: bool) -> list[str]:
    """Warnings about a drafter and a target; raises ChooseError when they do not belong together."""
    name, warnings = candidate.label, []
    vocabulary = candidate.config.get("vocab_size")
    if vocabulary is not None and int(vocabulary) != target.vocab_size:
        raise ChooseError(
            f"drafter {name} ({candidate.folder}) proposes from {vocabulary} tokens, target {target.name} has "
            f"{target.vocab_size}: it was trained for another target"
        )
    recorded = candidate.target.get("fingerprint")
    if recorded is None:
        warnings.append(
            f"drafter {name} does not record which target it was trained for; low acceptance may mean another one"
        )
    elif recorded != target.fingerprint:
        message = (
            f"drafter {name} was trained for {candidate.target.get('name')} ({recorded[:12]}…), not for {target.name} "
            f"({target.fingerprint[:12]}…)"
        )
        if not allow_mismatch:
            raise ChooseError(f"{message}: pass the right --target, or --allow-mismatch to go on")
        warnings.append(message)
    if candidate.thinking is not None and candidate.thinking != thinking:
        trained, asked = (("thinking" if mode else "non-thinking") for mode in (candidate.thinking, thinking))
        option = "--thinking" if candidate.thinking else "no --thinking"
        warnings.append(
            f"drafter {name} was trained on {trained} answers, this evaluates {asked} ones: acceptance will be lower "
            f"than it can be ({option} matches its training)"
        )
    return warnings
