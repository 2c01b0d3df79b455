"""The schema of ``recipes/data.yaml``: one field per step of the data pipeline. Knows no defaults of its own."""

from dataclasses import dataclass, field
from pathlib import Path

from deepspec.data.cache import CacheConfig
from deepspec.data.estimate import EstimateConfig
from deepspec.data.prompts import PromptsConfig
from deepspec.data.regenerate import RegenerateConfig
from deepspec.files import local_path
from deepspec.models.target import TargetConfig


@dataclass
class DataPipelineConfig:
    """Prompts → responses → cache for one target, in the folders below ``out``.

    A URL can be read only: the folders that are written to raise ValueError for one.
    """

    target: TargetConfig
    out: str = "runs/${target.name}"
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    estimate: EstimateConfig = field(default_factory=EstimateConfig)

    @property
    def prompts_dir(self) -> Path:
        """Where ``prompts`` writes train.jsonl, heldout.jsonl and summary.json."""
        return local_path(self.out) / "prompts"

    @property
    def responses_dir(self) -> Path:
        """Where ``regenerate`` writes part-*.parquet, failures.jsonl and summary.json."""
        return local_path(self.out) / "responses"

    @property
    def cache_path(self) -> str:
        """Folder or URL of the cache."""
        if "://" in self.out and "://" not in self.cache.folder:
            return f"{self.out.rstrip('/')}/{self.cache.folder}"
        return self.cache.folder if "://" in self.cache.folder else str(Path(self.out) / self.cache.folder)
