"""One function per data command: compose the recipe, call the step, say what to run next. Knows no step's inside."""

import argparse
import shlex

from deepspec import recipes
from deepspec.data.cache import CacheConfig, CacheManifest
from deepspec.data.config import DataPipelineConfig


def _load(overrides: list[str]) -> DataPipelineConfig:
    return recipes.load("data", overrides, DataPipelineConfig)


def _command(name: str, overrides: list[str]) -> str:
    return shlex.join(["python", "-m", "deepspec.data", name, *overrides])


def prompts(overrides: list[str]) -> str:
    """Build the prompt files."""
    from deepspec.data.prompts import build, describe

    config = _load(overrides)
    print(describe(build(config.prompts, config.prompts_dir), config.prompts_dir))
    if not config.prompts.decontaminate and any(source.path != "demo" for source in config.prompts.sources.values()):
        print(
            "note: no test sets were kept out of the training prompts. `python -m deepspec.eval.suites FOLDER` writes "
            "those of the evaluation, prompts.decontaminate=[FOLDER] drops their questions"
        )
    return _command("regenerate", overrides)


def regenerate(overrides: list[str]) -> str:
    """Answer the training prompts."""
    from deepspec.data.setup import answer_prompts

    config = _load(overrides)
    answer_prompts(config.prompts_dir / "train.jsonl", config.responses_dir, config.target, config.regenerate)
    return _command("cache", overrides)


def preview(arguments: list[str]) -> str:
    """Show conversations with supervised tokens coloured."""
    from deepspec.data.preview import conversations, show

    parser = argparse.ArgumentParser(prog="python -m deepspec.data preview", allow_abbrev=False)
    parser.add_argument("--count", type=int, default=3, help="conversations to show")
    parser.add_argument("--ids", action="store_true", help="a line per token: position, id, supervised, text")
    parser.add_argument("--id", help="only this conversation")
    parser.add_argument("--plain", action="store_true", help="brackets instead of colours")
    options, overrides = parser.parse_known_args(arguments)
    config = _load(overrides)
    show(config, conversations(config, options.id), options.count, ids=options.ids, plain=options.plain)
    return _command("cache", overrides)


def cache(overrides: list[str]) -> str:
    """Build the target cache."""
    from deepspec.data.cache_build import build_cache

    config = _load(overrides)
    build_cache(config)
    return _train_on(config, overrides)


def inspect(overrides: list[str]) -> str:
    """Print what a cache holds."""
    from deepspec.data.inspection import inspect as run

    config = _load(overrides)
    run(config)
    return _command("verify", overrides)


def verify(overrides: list[str]) -> str:
    """Check a cache's checksums."""
    from deepspec.data.inspection import verify as run

    config = _load(overrides)
    run(config)
    return _train_on(config, overrides)


def merge(arguments: list[str]) -> str:
    """One cache from several."""
    from deepspec.data.recombine import merge as run

    parser = argparse.ArgumentParser(prog="python -m deepspec.data merge", allow_abbrev=False)
    parser.add_argument("--from", dest="parents", nargs="+", required=True, help="finished caches, the first wins")
    parser.add_argument("--to", required=True, help="an empty folder")
    options = parser.parse_args(arguments)
    manifest = run(options.parents, options.to)
    print(f"{options.to}: {manifest.rows} samples, {manifest.tokens} tokens")
    return _train(*_made_for(manifest), f"data.path={options.to}")


def subset(arguments: list[str]) -> str:
    """A part of a cache."""
    from deepspec.data.recombine import chooser
    from deepspec.data.recombine import subset as run

    parser = argparse.ArgumentParser(prog="python -m deepspec.data subset", allow_abbrev=False)
    parser.add_argument("--from", dest="parent", required=True, help="a finished cache")
    parser.add_argument("--to", required=True, help="an empty folder")
    parser.add_argument("--source", nargs="+", action="extend", help="only samples of these data sets")
    parser.add_argument("--ids", help="only the ids in this file, one per line")
    parser.add_argument("--share", type=float, default=1.0, help="only this share, chosen by a hash of the id")
    options = parser.parse_args(arguments)
    manifest = run(options.parent, options.to, chooser(options.source, options.ids, options.share))
    print(f"{options.to}: {manifest.rows} samples, {manifest.tokens} tokens")
    return _train(*_made_for(manifest), f"data.path={options.to}")


def estimate(overrides: list[str]) -> str:
    """Print disk, memory and hours."""
    from deepspec.data.estimate import estimate as run

    run(_load(overrides))
    return _command("prompts", overrides)


def _train_on(config: DataPipelineConfig, overrides: list[str]) -> str:
    """The training command for the cache of ``config``, with the target and folder the user gave."""
    names = [override.split("=", 1)[0].lstrip("+~") for override in overrides]
    chosen = [o for o, name in zip(overrides, names, strict=True) if name == "target" or name.startswith("target.")]
    folders = [o for o, name in zip(overrides, names, strict=True) if name == "out"] or [f"out={config.out}"]
    if config.cache.folder != CacheConfig().folder:
        folders.append(f"data.path={config.cache_path}")
    return _train(*(chosen or [f"target={config.target.name}"]), *folders)


def _made_for(manifest: CacheManifest) -> list[str]:
    """Overrides that name the target of a cache as it was captured."""
    name, path = manifest.target["name"], manifest.target["path"]
    unlisted = path is not None and name not in recipes.names("target")
    chosen = [f"target.path={path}", f"target.name={name}"] if unlisted else [f"target={name}"]
    taps = ",".join(map(str, manifest.taps))
    return [*chosen, f"target.taps=[{taps}]", f"target.thinking={str(manifest.thinking).lower()}"]


def _train(*overrides: str) -> str:
    """The training command for this machine: a process per accelerator, one on a CPU."""
    import torch

    processes = "gpu" if torch.accelerator.is_available() else "1"
    launch = ["torchrun", "--standalone", "--nproc-per-node", processes, "deepspec/train/main.py", "+recipe=dspark"]
    return shlex.join([*launch, *overrides])
