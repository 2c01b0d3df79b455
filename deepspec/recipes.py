"""Composes a Hydra recipe into a checked dataclass. Knows where the recipes are, not what they mean."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe or an override that cannot be composed; the message names the key and the remedy."""


def recipes_dir() -> Path:
    """The folder of recipes: inside an installed wheel, else beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "recipes", package.parent / "recipes"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise RecipeError(f"no recipes beside {package}: reinstall deepspec, or run from a checkout")


def names(group: str) -> list[str]:
    """Names of the recipes of a group, e.g. ``names("target")``."""
    return sorted(path.stem for path in (recipes_dir() / group).glob("*.yaml"))


def slug(path: str) -> str:
    """Name of an unlisted target: the last part of a hub id or folder, in lower case without an instruct suffix."""
    return re.sub(r"-(instruct|it|chat)$", "", Path(path).name.lower()) or "target"


def expand_target(overrides: Sequence[str]) -> list[str]:
    """Let ``target=<hub id or folder>``, or ``target.path=`` alone, stand for an unlisted target with a derived name.

    ``target=<recipe> target.path=<folder>`` keeps the recipe's name and options.
    """
    values = dict(override.split("=", 1) for override in overrides if "=" in override)
    chosen, path = values.get("target"), values.get("target.path")
    if chosen is None and path is None:
        return list(overrides)
    if chosen is None:
        unlisted = str(path)
    elif chosen not in names("target") and ("/" in chosen or Path(chosen).is_dir()):
        unlisted = chosen
    else:
        return list(overrides)
    kept = [override for override in overrides if override.split("=", 1)[0] not in ("target", "target.path")]
    derived = [] if "target.name" in values else [f"target.name='{slug(unlisted)}'"]
    return ["target=custom", f"target.path='{path or unlisted}'", *derived, *kept]


def dictionaries(schema: type[Any], prefix: str = "") -> Iterator[str]:
    """Keys of the schema that hold a dictionary, whose own keys are the user's."""
    for name, kind in get_type_hints(schema).items():
        if get_origin(kind) is dict:
            yield prefix + name
        elif isinstance(kind, type) and is_dataclass(kind):
            yield from dictionaries(kind, f"{prefix}{name}.")


def _opened(override: str, keys: Sequence[str]) -> str:
    """An override of a key that need not exist yet, spelled as Hydra wants it."""
    key = override.split("=", 1)[0]
    return f"++{override}" if any(key == given or key.startswith(f"{given}.") for given in keys) else override


def load(root: str, overrides: Sequence[str], schema: type[T]) -> T:
    """Compose ``recipes/<root>.yaml`` with Hydra overrides over the dataclass ``schema`` (``<root>_schema`` in its
    defaults list), so that every key of the schema can be overridden and is checked. Dictionaries take new keys.

    Raises RecipeError for an unknown recipe, an unknown key or a value of the wrong type, naming it.
    """
    GlobalHydra.instance().clear()
    ConfigStore.instance().store(name=f"{root}_schema", node=schema)
    keys = list(dictionaries(schema))
    try:
        with initialize_config_dir(str(recipes_dir()), version_base="1.3"):
            composed = compose(root, overrides=[_opened(override, keys) for override in expand_target(overrides)])
        plain = OmegaConf.to_container(composed, resolve=True)
        return cast(T, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain)))
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
        groups = ", ".join(
            f"{path.name}={'|'.join(names(path.name))}" for path in sorted(recipes_dir().iterdir()) if path.is_dir()
        )
        message = " ".join(str(error).split()).split(" Config search path:")[0]
        if message.startswith("Error merging override") and error.__cause__ is not None:
            message += f": {str(error.__cause__).splitlines()[0]}"
        raise RecipeError(f"recipe '{root}': {message}\nKnown groups: {groups}") from error
