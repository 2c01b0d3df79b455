"""Drafters for serving engines: export to vLLM, SGLang, llama.cpp and the DeepSpec layout, and import from others.

``export`` writes what an engine loads, ``check`` says before what it would refuse; ``imports.read`` is the way back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspec.models.export import checkpoint as folders
from deepspec.models.export import llama_cpp, sps
from deepspec.models.export.checkpoint import Checkpoint, ExportError, with_head
from deepspec.models.export.engines import ENGINES
from deepspec.models.export.validate import Finding, validate
from deepspec.models.frozen_head import FrozenHead

__all__ = ["ENGINES", "Checkpoint", "ExportError", "Exported", "Finding", "RefusedError", "check", "export", "validate"]


class RefusedError(ExportError):
    """The engine could not use this drafter; ``findings`` says why, field by field."""

    def __init__(self, engine: str, findings: list[Finding]) -> None:
        self.findings = findings
        errors = [f"{each.field}: {each.message}" for each in findings if each.level == "error"]
        super().__init__(f"{engine} cannot serve this drafter:\n  " + "\n  ".join(errors))


@dataclass(frozen=True)
class Exported:
    """``path`` is the folder, or the GGUF file; ``command`` serves it; ``findings`` holds warnings and notes."""

    path: Path
    command: str
    findings: list[Finding]


def check(
    source: Checkpoint,
    engine: str,
    *,
    head: FrozenHead | None = None,
    target: Mapping[str, Any] | None = None,
    gguf_type: str = "bf16",
    target_gguf: str | Path | None = None,
    draft_tokens: int | None = None,
    sps_table: str | Path | None = None,
) -> tuple[Checkpoint, list[Finding]]:
    """The checkpoint in the layout of ``engine``, with warnings and notes; raises what ``export`` would."""
    row = ENGINES.get(engine)
    if row is None:
        raise ExportError(f"--to {engine} is unknown: choose one of {', '.join(ENGINES)}")
    made = row.layout(source if head is None else with_head(source, head))
    findings = validate(made, row, target=target, draft_tokens=draft_tokens)
    if any(finding.level == "error" for finding in findings):
        raise RefusedError(engine, findings)
    if engine == "gguf":
        llama_cpp.open_target(made, gguf_type, None if target_gguf is None else Path(target_gguf))
    if sps_table is not None:
        sps.check(sps_table, source)
    return made, findings


def export(
    source: Checkpoint,
    engine: str,
    output: str | Path,
    *,
    head: FrozenHead | None = None,
    target: Mapping[str, Any] | None = None,
    target_name: str | None = None,
    gguf_type: str = "bf16",
    target_gguf: str | Path | None = None,
    draft_tokens: int | None = None,
    sps_table: str | Path | None = None,
) -> Exported:
    """Write a DeepSpec checkpoint (``imports.read``) for an engine of ENGINES into the folder ``output``.

    ``head`` adds the target's embedding and head, which engines with ``needs_head`` do not find elsewhere; ``target``
    is its text config, to be compared with; ``sps_table`` is a file of ``deepspec.eval.profile`` to go with the export.
    Raises RefusedError, with nothing written, for what the engine would refuse or get wrong.
    """
    made, findings = check(
        source,
        engine,
        head=head,
        target=target,
        gguf_type=gguf_type,
        target_gguf=target_gguf,
        draft_tokens=draft_tokens,
        sps_table=sps_table,
    )
    recorded = made.metadata.get("target") or {}
    # where the target is found; its name is our own word for it
    path, named = Path(output), target_name or recorded.get("path") or recorded.get("name") or "TARGET"
    if engine == "gguf":
        path = llama_cpp.write(made, path, gguf_type, None if target_gguf is None else Path(target_gguf))
        folders.write_calibration(made, path.parent)
        named = named if target_gguf is None else str(target_gguf)
    else:
        folders.write(made, path)
    if sps_table is not None:
        sps.write(sps_table, path.parent if engine == "gguf" else path)
    return Exported(path, ENGINES[engine].command(made, path, named), findings)
