"""From options to an engine, its stamp and the answers. Knows where a model's generation defaults are."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepspec.data.engines import NEUTRAL, Engine, TransformersEngine, sampling_from
from deepspec.data.prompts import read_prompts
from deepspec.data.regenerate import Account, RegenerateConfig, Stamp, regenerate
from deepspec.distributed import is_main, rank, world_size
from deepspec.models.sampling import Sampling
from deepspec.models.target import Target, TargetConfig, resolve

# Generation settings of a model that the in-process engine has no place for: servers get them under their own names.
SERVER_ONLY = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class GenerationConfigError(ValueError):
    """A generation_config that could not be read, so that nobody knows how the target is meant to answer."""


def generation_defaults(target: TargetConfig) -> dict[str, Any]:
    """What the target's generation_config sets, {} when it has none.

    Raises GenerationConfigError where that cannot be told: no access to the hub, a file that cannot be read.
    """
    from transformers import GenerationConfig

    path, revision = resolve(target), target.revision or "main"
    try:
        found = GenerationConfig.from_pretrained(path, revision=revision)
    except OSError as error:
        if _has_none(path, revision):
            return {}
        raise GenerationConfigError(
            f"cannot read the generation_config of {path}: give regenerate.temperature=… (and top_k, top_p), or "
            f"access to the hub ({' '.join(str(error).split())[:200]})"
        ) from error
    return {key: value for key, value in found.to_diff_dict().items() if value is not None}


def _has_none(path: str, revision: str) -> bool:
    """Whether the model is known to have no generation_config: a folder, or a repository that says so or once did."""
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from transformers.utils import GENERATION_CONFIG_NAME

    if Path(path).is_dir():
        return not (Path(path) / GENERATION_CONFIG_NAME).exists()
    try:
        if try_to_load_from_cache(path, GENERATION_CONFIG_NAME, revision=revision) is _CACHED_NO_EXIST:
            return True
        hf_hub_download(path, GENERATION_CONFIG_NAME, revision=revision)
    except Exception as error:  # LocalEntryNotFoundError says only that the cache has none
        return isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
    return False


def stamp_of(target: TargetConfig, given: RegenerateConfig) -> Stamp:
    """How the answers of this target are made. Raises as ``generation_defaults``, unless the sampling is all given."""
    greedy = given.temperature == 0
    try:
        defaults = generation_defaults(target)
    except GenerationConfigError:
        if not greedy and None in (given.temperature, given.top_k, given.top_p):
            raise
        defaults = {}
    sampling: dict[str, Any] = asdict(
        sampling_from(defaults, {name: getattr(given, name) for name in ("temperature", "top_k", "top_p", "min_p")})
    )
    penalties = {name: defaults[name] for name in SERVER_ONLY if defaults.get(name, NEUTRAL[name]) != NEUTRAL[name]}
    extra: dict[str, Any] = {}
    if given.engine == "openai":
        sampling |= penalties
        extra = {"chat_template_kwargs": dict(given.chat_template_kwargs), "extra_body": dict(given.extra_body)}
    elif penalties and is_main():
        print(f"note: {penalties} of the model's generation_config are not applied by the transformers engine")
    return Stamp(target.name, target.thinking, given.max_new_tokens, given.seed, sampling, extra)


def engine_maker(
    target: TargetConfig, given: RegenerateConfig, stamp: Stamp, loaded: Target | None = None
) -> Callable[[], Engine]:
    """Makes the engine when it is needed: loading a target is expensive. ``loaded`` is one that is there already."""

    def make() -> Engine:
        if given.engine == "openai":
            from deepspec.data.servers import ServersEngine

            return ServersEngine(given, stamp)
        names = ("temperature", "top_k", "top_p", "min_p")
        return TransformersEngine(
            loaded or Target.load(target),
            sampling=Sampling(**{name: stamp.sampling[name] for name in names}),
            max_new_tokens=given.max_new_tokens,
            batch_size=given.batch_size,
            seed=given.seed,
            thinking=target.thinking,
        )

    return make


def answer_prompts(
    file: Path, folder: Path, target: TargetConfig, given: RegenerateConfig, loaded: Target | None = None
) -> Account:
    """Answer this rank's prompts of ``file`` that have no answer in the responses ``folder`` yet, and say so.

    Raises SourceError without the file, and as ``regenerate`` does.
    """
    prompts, stamp = read_prompts(file), stamp_of(target, given)
    if is_main():
        print(f"{stamp.target}: thinking {'on' if stamp.thinking else 'off'}, sampling {stamp.sampling}")
    make_engine = engine_maker(target, given, stamp, loaded)
    account = regenerate(prompts, folder, stamp, make_engine, given, rank=rank(), world=world_size())
    print(f"{folder}: {account}")
    if account.failed:
        print(f"reasons are in {folder}/failures*.jsonl; running again tries them again")
    return account
