"""What a run is about to do, as a table for people: recipe values, sizes and steps. Knows no loop."""

import dataclasses
from typing import Any

from deepspec import distributed
from deepspec.data.estimate import human_bytes
from deepspec.train.setup import Prepared


def describe(prepared: Prepared) -> str:
    """The recipe's values by section, then what follows from them and the data."""
    cfg, loader = prepared.cfg, prepared.loader
    lines = [f"{cfg.name} for {cfg.target.name} → {cfg.folder}"]
    for section in ("drafter", "loss", "data", "optim", "train", "engine"):
        values = dataclasses.asdict(getattr(cfg, section))
        shown = "  ".join(f"{key}={_short(value)}" for key, value in values.items() if value is not None)
        lines.append(f"  {section:<8} {shown}")
    trained = sum(parameter.numel() for parameter in prepared.drafter.parameters() if parameter.requires_grad)
    frozen = prepared.drafter.head.embed_VD.numel() * (1 if prepared.drafter.head.tied else 2)
    width = 4 if prepared.dtype.itemsize == 4 else 2
    memory = trained * (12 + (0 if width == 4 else 2) + 4) + frozen * width
    start = 0 if prepared.state is None else prepared.state.progress.step
    lines.append(
        f"  {trained / 1e6:.1f} M trained, {frozen / 1e6:.1f} M frozen parameters; {human_bytes(memory)} of weights, "
        f"gradients and moments before activations; taps {list(prepared.taps)}; mask token "
        f"{getattr(prepared.drafter.hf_config, 'mask_token_id', None)}"
    )
    lines.append(
        f"  {len(loader.training_rows)} training and {len(loader.heldout_rows)} held-out samples; "
        f"{loader.steps_per_epoch} steps per epoch, {prepared.total_steps} in all, from step {start}; "
        f"{distributed.world_size()} process(es) on {prepared.device}, {str(prepared.dtype).removeprefix('torch.')}"
    )
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
