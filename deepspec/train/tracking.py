"""Where metrics go: metrics.jsonl always, wandb and TensorBoard on request. Knows no training."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspec.files import atomic_write
from deepspec.train.config import TrackingConfig

FILE = "metrics.jsonl"


class Tracker:
    """Writes records of one run. Every record has ``step``, ``kind`` ("train", "eval", "decode", "skip") and ``time``.

    A wandb or TensorBoard that cannot start is reported once and left out: training never stops for it.
    """

    def __init__(
        self, cfg: TrackingConfig, folder: str | Path, *, name: str, config: Mapping[str, Any], step: int = 0
    ) -> None:
        self.path = Path(folder) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _forget_after(self.path, step)
        self._stream = self.path.open("a", encoding="utf-8")
        self._wandb = _start_wandb(cfg, self.path.parent, name, config)
        self._board = _start_tensorboard(self.path.parent) if cfg.tensorboard else None

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append one record; a value that is not finite becomes null in the file."""
        record = {"step": step, "kind": kind, "time": round(time.time(), 3), **values}
        self._stream.write(json.dumps(_finite(record), ensure_ascii=False) + "\n")
        self._stream.flush()
        flat = _flat(kind, values)
        if self._wandb is not None:
            self._wandb.log(flat, step=step)
        if self._board is not None:
            for name, value in flat.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush everything."""
        self._stream.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._board is not None:
            self._board.close()


def read(folder: str | Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first; a half-written last line is left out."""
    path = Path(folder) / FILE
    if not path.is_file():
        return []
    records = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return records


def _forget_after(path: Path, step: int) -> None:
    """Drop the records that a killed run wrote after the checkpoint it continues from, so that the curve is one."""
    records = read(path.parent)
    kept = [record for record in records if record.get("step", 0) <= step] if step else []
    if records != kept or path.exists():
        with atomic_write(path) as temporary:
            temporary.write_text(
                "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept), encoding="utf-8"
            )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


def _flat(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers only, lists as name/1, name/2, …"""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            flat |= {f"{kind}/{name}/{k}": item for k, item in enumerate(value, 1) if isinstance(item, int | float)}
        elif isinstance(value, int | float):
            flat[f"{kind}/{name}"] = value
    return flat


def _start_wandb(cfg: TrackingConfig, folder: Path, name: str, config: Mapping[str, Any]) -> Any:
    mode: Any = cfg.wandb or os.environ.get("WANDB_MODE", "offline")
    if mode == "disabled":
        return None
    try:
        import wandb

        settings = wandb.Settings(console="off", silent=True)
        group, entity = cfg.group, cfg.entity
        return wandb.init(
            project=cfg.project,
            entity=entity,
            group=group,
            name=name,
            dir=str(folder),
            mode=mode,
            config=dict(config),
            settings=settings,
        )
    except Exception as error:  # a tracker must never cost a run
        print(f"wandb is off: {error} (tracking.wandb=disabled silences this)", file=sys.stderr)
        return None


def _start_tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder / "tensorboard"))
    except ImportError:
        print("TensorBoard is off: pip install 'deepspec[tracking]'", file=sys.stderr)
        return None
