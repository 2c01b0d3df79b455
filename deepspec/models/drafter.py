"""Build, save and load drafters in the layout of the published DeepSpec checkpoints."""

from deepspec.models.drafter_config import DrafterConfig, DrafterConfigError

__all__ = ["DrafterConfig", "DrafterConfigError"]
