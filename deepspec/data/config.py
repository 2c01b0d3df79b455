"""The schema of ``recipes/data.yaml``: one field per step of the data pipeline. Knows no defaults of its own."""

from dataclasses import dataclass, field
from pathlib import Path

from deepspec.data.cache import CacheConfig
from deepspec.data.prompts import PromptsConfig
from deepspec.data.regenerate import RegenerateConfig
from deepspec.models.target import TargetConfig


@dataclass
class DataPipelineConfig:
    """Prompts → responses → cache for one target, in the folders below ``out``."""

    target: TargetConfig
    out: str = "runs/${target.name}"
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    @property
    def prompts_dir(self) -> Path:
        """Where ``prompts`` writes train.jsonl, heldout.jsonl and summary.json."""
        return Path(self.out) / "prompts"

    @property
    def responses_dir(self) -> Path:
        """Where ``regenerate`` writes part-*.parquet, failures.jsonl and summary.json."""
        return Path(self.out) / "responses"
