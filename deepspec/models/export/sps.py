"""The target's table of steps per second (docs/scheduling.md) as a side file of an export, for what schedules by it.

Checks that a file is such a table and the same target's; looks nothing up in it: deepspec/eval/sps.py does.
"""

import math
import shutil
from pathlib import Path
from typing import Any

from deepspec import files
from deepspec.models.export.checkpoint import Checkpoint, ExportError

FILE = "deepspec_sps.json"
KIND, VERSION = "deepspec-sps", 1


def check(path: str | Path, checkpoint: Checkpoint) -> None:
    """Raise ExportError where ``path`` is no table of version 1, or one of another target than the drafter's."""
    path = Path(path)
    if not path.is_file():
        raise ExportError(f"--sps {path} does not exist: make it with `python -m deepspec.eval.profile --target …`")
    if path.suffix == ".csv":
        raise ExportError(f"--sps {path}: convert it with `python -m deepspec.eval.profile --import {path}` first")
    content = files.read_json(path)
    if not isinstance(content, dict) or (content.get("kind"), content.get("format_version")) != (KIND, VERSION):
        raise ExportError(
            f'--sps {path} is no table of steps per second: it needs "kind": "{KIND}" of version {VERSION}'
        )
    _check_rows(path, content.get("rows"))
    measured, trained = ((found.get("target") or {}).get("fingerprint") for found in (content, checkpoint.metadata))
    if measured and trained and measured != trained:
        raise ExportError(
            f"--sps {path} was measured on {content['target'].get('name')} ({measured[:12]}…), the drafter was trained "
            f"for {checkpoint.metadata['target'].get('name')} ({trained[:12]}…): profile that target"
        )


def _check_rows(path: Path, rows: Any) -> None:
    if not isinstance(rows, list) or not rows:
        raise ExportError(f"--sps {path}: no rows; profile again")
    seen = set()
    for number, row in enumerate(rows, start=1):
        try:
            size, rate = (int(row.get("context") or 0), int(row["tokens"])), float(row["steps_per_second"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ExportError(f"--sps {path}, row {number}: {row} has no tokens and steps_per_second") from error
        if size[1] < 1 or not math.isfinite(rate) or rate <= 0 or size in seen:
            raise ExportError(
                f"--sps {path}, row {number}: {row} must have positive tokens and steps_per_second, each size once"
            )
        seen.add(size)


def write(path: str | Path, folder: Path) -> None:
    """Copy the table beside the weights, byte for byte and atomically."""
    with files.atomic_write(folder / FILE) as temporary:
        shutil.copyfile(path, temporary)
