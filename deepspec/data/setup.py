"""From the recipe to an engine and the stamp of its answers. Knows where a model's generation defaults are."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from deepspec.data.config import DataPipelineConfig
from deepspec.data.engines import Engine, TransformersEngine, sampling_from
from deepspec.data.regenerate import Stamp
from deepspec.models.sampling import Sampling
from deepspec.models.target import Target, resolve

# Generation settings of a model that the in-process engine has no place for: servers get them under their own names.
SERVER_ONLY = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def generation_defaults(config: DataPipelineConfig) -> dict[str, Any]:
    """What the target's generation_config sets, {} when it has none."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(resolve(config.target), revision=config.target.revision or "main")
    except OSError:
        return {}
    return {key: value for key, value in found.to_diff_dict().items() if value is not None}


def stamp_of(config: DataPipelineConfig) -> Stamp:
    """How the answers of this configuration are made."""
    given = config.regenerate
    defaults = generation_defaults(config)
    sampling: dict[str, Any] = asdict(
        sampling_from(defaults, {name: getattr(given, name) for name in ("temperature", "top_k", "top_p", "min_p")})
    )
    penalties = {name: defaults[name] for name in SERVER_ONLY if defaults.get(name) not in (None, 0.0, 1.0)}
    extra: dict[str, Any] = {}
    if given.engine == "openai":
        sampling |= penalties
        extra = {"chat_template_kwargs": dict(given.chat_template_kwargs), "extra_body": dict(given.extra_body)}
    elif penalties:
        print(f"note: {penalties} of the model's generation_config are not applied by the transformers engine")
    return Stamp(config.target.name, config.target.thinking, given.max_new_tokens, given.seed, sampling, extra)


def engine_maker(config: DataPipelineConfig, stamp: Stamp) -> Callable[[], Engine]:
    """Makes the engine when it is needed: loading a target is expensive."""
    given = config.regenerate

    def make() -> Engine:
        if given.engine == "openai":
            from deepspec.data.servers import ServersEngine

            return ServersEngine(given, stamp)
        names = ("temperature", "top_k", "top_p", "min_p")
        return TransformersEngine(
            Target.load(config.target),
            sampling=Sampling(**{name: stamp.sampling[name] for name in names}),
            max_new_tokens=given.max_new_tokens,
            batch_size=given.batch_size,
            seed=given.seed,
            thinking=config.target.thinking,
        )

    return make
