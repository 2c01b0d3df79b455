"""Single tensors of a checkpoint folder or hub id: only the safetensors shards that hold them are opened."""

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class StoredWeightsError(ValueError):
    """A checkpoint without safetensors."""


class StoredWeights:
    """Tensors by name. Raises StoredWeightsError when ``path`` holds neither one safetensors file nor an index."""

    def __init__(self, path: str, revision: str | None = None) -> None:
        from safetensors import safe_open

        self.path, self._revision = path, revision
        index = self._file(INDEX, required=False)
        if index is not None:
            self._shards: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            return
        single = self._file(SINGLE, required=False)
        if single is None:
            raise StoredWeightsError(
                f"{path} has neither {SINGLE} nor {INDEX}: give a folder or hub id with safetensors"
            )
        with safe_open(single, framework="pt") as file:
            self._shards = dict.fromkeys(file.keys(), SINGLE)

    def first(self, names: Iterable[str]) -> Tensor | None:
        """The first of ``names`` that is stored, else None."""
        from safetensors import safe_open

        for name in names:
            if name in self._shards:
                with safe_open(str(self._file(self._shards[name], required=True)), framework="pt") as file:
                    return file.get_tensor(name)
        return None

    def _file(self, name: str, *, required: bool) -> str | None:
        from transformers.utils.hub import cached_file

        found = cached_file(self.path, name, revision=self._revision, _raise_exceptions_for_missing_entries=required)
        return None if found is None else str(found)
