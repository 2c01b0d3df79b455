"""What a new plan would take away from a finished cache. Reads the manifest and the shards' facts, no records."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspec.data.cache import MANIFEST, CacheConfig, CacheManifest, CacheMismatchError, Origin
from deepspec.data.cache_writer import read_facts

if TYPE_CHECKING:
    from deepspec.data.cache_build import Plan

_SETTINGS = ("limit", "shard_rows", "max_length", "keep_truncated", "batch_tokens", "max_padding")


def finished_manifest(folder: Path) -> CacheManifest | None:
    """The manifest of a finished cache, None without one. Raises CacheVersionError, and CacheDamagedError."""
    file = folder / MANIFEST
    return CacheManifest.from_json(file.read_text(encoding="utf-8"), str(folder)) if file.is_file() else None


def require_captured(folder: Path, manifest: CacheManifest) -> None:
    """Raise CacheMismatchError for a merged or subset cache: no build of responses makes or completes it."""
    if manifest.parents:
        raise CacheMismatchError(
            f"{folder} was merged or cut out of {', '.join(manifest.parents)}: give cache.folder=<another folder> to "
            "build a cache of the responses, or merge or subset into an empty folder"
        )


def outdated_shards(folder: Path, manifest: CacheManifest, plan: "Plan", origin: Origin) -> dict[int, bool]:
    """Whole shards of a finished cache that the plan removes or builds anew, each with whether its samples are lost.

    A last shard that was not full and now gets more rows loses nothing; a damaged shard has nothing to lose.
    """
    outdated: dict[int, bool] = {}
    for number in range(len(manifest.shards)):
        if (facts := read_facts(folder, number)) is None:
            continue
        if number >= len(plan.ranges):
            outdated[number] = True
            continue
        start, stop = plan.ranges[number]
        if facts.shard.identity != plan.identity(origin, start, stop):
            before = start + facts.shard.rows + sum(facts.dropped.values())
            outdated[number] = before >= stop or facts.shard.identity != plan.identity(origin, start, before)
    return outdated


def require_replace(
    folder: Path, manifest: CacheManifest, outdated: dict[int, bool], origin: Origin, config: CacheConfig
) -> None:
    """Raise CacheMismatchError, naming what differs, if finished samples would be lost without ``cache.replace``."""
    lost = sum(outdated.values())
    if lost and not config.replace:
        raise CacheMismatchError(
            f"{folder} is a finished cache of {manifest.rows} samples, and this command would replace or remove {lost} "
            f"of its {len(manifest.shards)} shards ({'; '.join(_differences(manifest, origin, config))}): give "
            "cache.folder=<another folder>, or cache.replace=true to give the finished shards up"
        )


def _differences(manifest: CacheManifest, origin: Origin, config: CacheConfig) -> list[str]:
    pairs: list[tuple[str, Any, Any]] = [("target", _target(manifest.origin), _target(origin))]
    for option, name in (
        ("target.taps", "taps"),
        ("target.thinking", "thinking"),
        ("cache.codec", "codec"),
        ("cache.log_normaliser", "log_normaliser"),
        ("states of the log-normalisers", "normaliser_states"),
        ("last states' stage", "norm_stage"),
        ("the version of the rules for states", "semantics"),
    ):
        pairs.append((option, getattr(manifest.origin, name), getattr(origin, name)))
    pairs.append(("tokenizer and chat template", manifest.origin.template[:12], origin.template[:12]))
    settings = manifest.settings.get("cache", {})
    pairs += [(f"cache.{name}", settings[name], getattr(config, name)) for name in _SETTINGS if name in settings]
    named = [f"{name} {there} there, {here} here" for name, there, here in pairs if there != here]
    return named or ["responses were changed or removed or new ones lie between them, or another version built it"]


def _target(origin: Origin) -> str:
    fingerprints = (origin.target["fingerprint"][:12], origin.target["head"][:12])
    return f"weights {fingerprints[0]} with head {fingerprints[1]}"
