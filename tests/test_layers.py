"""models ← data ← {train, eval}: no module imports a layer above its own, and train and eval never meet."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "deepspec"
FORBIDDEN = {"models": ("data", "train", "eval"), "data": ("train", "eval"), "train": ("eval",), "eval": ("train",)}


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("layer", sorted(FORBIDDEN))
def test_a_layer_never_imports_one_above_it(layer):
    files = sorted((PACKAGE / layer).rglob("*.py"))
    assert files
    for file in files:
        for above in FORBIDDEN[layer]:
            name = f"deepspec.{above}"
            guilty = [module for module in imported(file) if module == name or module.startswith(f"{name}.")]
            assert not guilty, f"{file.relative_to(PACKAGE)} imports {guilty}"


def test_files_stay_small():
    for file in PACKAGE.rglob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 400, file
