"""From options to an engine, its stamp and the answers. Knows where a model's generation defaults are."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
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

SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p")
GENERATION_CONFIG = "the model's generation_config"
# By these a generation_config of Qwen3 is known, whatever the model is called.
QWEN3_THINKING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


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


@dataclass(frozen=True)
class SamplingPlan:
    """``values`` to sample with and, in words, where they come from; ``defaults`` are the model's own settings."""

    values: Sampling
    source: str
    defaults: dict[str, Any]
    warning: str | None = None


def sampling_plan(target: TargetConfig, given: RegenerateConfig) -> SamplingPlan:
    """What ``regenerate`` gives, else the model's card (``target.sampling``), else its generation_config, else greedy.

    Raises as ``generation_defaults``, unless nothing is left to be told by it.
    """
    card = getattr(target.sampling, target.mode)
    wanted: dict[str, float | int | None] = {}
    for name in SAMPLING_NAMES:
        option = getattr(given, name)
        wanted[name] = getattr(card, name) if option is None else option
    temperature = wanted["temperature"]
    greedy = temperature is not None and Sampling(temperature).greedy
    try:
        defaults = generation_defaults(target)
    except GenerationConfigError:
        if not greedy and None in (temperature, wanted["top_k"], wanted["top_p"]):
            raise
        defaults = {}
    values = sampling_from(defaults, wanted)
    names = ("temperature",) if values.greedy else SAMPLING_NAMES
    sources = {name: _source(name, target, given, defaults) for name in names}
    return SamplingPlan(values, _in_words(sources), defaults, _other_mode(target, sources, defaults))


def _source(name: str, target: TargetConfig, given: RegenerateConfig, defaults: dict[str, Any]) -> str:
    """Who says what one sampling setting is."""
    if getattr(given, name) is not None:
        return "regenerate"
    if getattr(getattr(target.sampling, target.mode), name) is not None:
        return f"target.sampling.{target.mode}, the model's card"
    if defaults.get(name) is not None:
        return GENERATION_CONFIG
    return "nobody, so off" if name != "temperature" else "nobody"


def _in_words(sources: dict[str, str]) -> str:
    """Settings by source: "temperature, top_p from regenerate; top_k, min_p from …"."""
    by_source: dict[str, list[str]] = {}
    for name, source in sources.items():
        by_source.setdefault(source, []).append(name)
    return "; ".join(f"{', '.join(names)} from {source}" for source, names in by_source.items())


def _other_mode(target: TargetConfig, sources: dict[str, str], defaults: dict[str, Any]) -> str | None:
    """A warning where Qwen3's values for thinking, all that its generation_config holds, are used without thinking."""
    is_qwen3 = all(defaults.get(name) == value for name, value in QWEN3_THINKING.items())
    if target.thinking or not is_qwen3 or GENERATION_CONFIG not in sources.values():
        return None
    return (
        f"WARNING: {QWEN3_THINKING} of the model's generation_config are Qwen3's values for thinking, and "
        "target.thinking is false: Qwen3's card says temperature 0.7, top_p 0.8, top_k 20 without thinking. Give them "
        "as regenerate.temperature=0.7 regenerate.top_p=0.8, or take the listed target (target=qwen3-4b …)"
    )


def stamp_of(target: TargetConfig, given: RegenerateConfig, plan: SamplingPlan | None = None) -> Stamp:
    """How the answers of this target are made. Raises as ``sampling_plan``."""
    plan = plan or sampling_plan(target, given)
    sampling: dict[str, Any] = asdict(plan.values)
    stated = {name: plan.defaults.get(name, NEUTRAL[name]) for name in SERVER_ONLY}
    penalties = {name: value for name, value in stated.items() if value != NEUTRAL[name]}
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
        return TransformersEngine(
            loaded or Target.load(target),
            sampling=Sampling(**{name: stamp.sampling[name] for name in SAMPLING_NAMES}),
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
    prompts = read_prompts(file)
    plan = sampling_plan(target, given)
    stamp = stamp_of(target, given, plan)
    if is_main():
        thinking = "on" if stamp.thinking else "off"
        print(f"{stamp.target}: thinking {thinking}, sampling {stamp.sampling} ({plan.source})")
        if plan.warning is not None:
            print(plan.warning)
    make_engine = engine_maker(target, given, stamp, loaded)
    account = regenerate(prompts, folder, stamp, make_engine, given, rank=rank(), world=world_size())
    print(f"{folder}: {account}")
    if account.failed:
        print(f"reasons are in {folder}/failures*.jsonl; running again tries them again")
    return account
