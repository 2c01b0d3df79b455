"""Documents that are cited exist, and the links between the Markdown files lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CITED = re.compile(r"(?<![\w/.])((?:docs/)?[a-z][\w-]*\.md)\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
WRITTEN_BY_US = {"table.md"}  # an evaluation writes it


def tracked(*endings: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines() if line.endswith(endings) and (ROOT / line).is_file()]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, by GitHub's rule: lower case, punctuation dropped, spaces to hyphens."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("file", tracked(".py", ".yaml", ".sh"), ids=lambda file: str(file.relative_to(ROOT)))
def test_documents_named_in_code_exist(file):
    if file == Path(__file__).resolve():
        return
    names = set(CITED.findall(file.read_text(encoding="utf-8"))) - WRITTEN_BY_US
    pages = {page.name for page in tracked(".md")}
    missing = [name for name in names if not (ROOT / name).is_file() and name not in pages]
    assert not missing, f"cites {missing}"


@pytest.mark.parametrize("page", tracked(".md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        other = page if not name else (page.parent / name).resolve()
        assert other.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(other), f"{target}: no such heading in {other.name}"
