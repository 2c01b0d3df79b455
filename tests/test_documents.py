"""Documents that are cited exist, and the links between the Markdown files lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A Markdown file with whatever folders stand before it, or any file under docs/.
CITED = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)*[\w-]+\.md|docs/(?:[\w-]+/)*[\w-]+\.\w+)\b")
URL = re.compile(r"\w+://\S+")
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


def absent_documents(text: str) -> list[str]:
    """Documents that a text names and the repository does not hold; a name without a folder may be in any folder."""
    names = set(CITED.findall(URL.sub("", text))) - WRITTEN_BY_US
    pages = {page.name for page in tracked(".md")}
    return sorted(name for name in names if not (ROOT / name).is_file() and name not in pages)


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("see docs/algorithms.md and README.md", []),
        ("the vectors of docs/scheduling-vectors.json", []),
        ("https://example.org/docs/absent.md", []),
        ("formula 3 of absent.md", ["absent.md"]),
        ("see elsewhere/absent.md, section 3", ["elsewhere/absent.md"]),
        ("../elsewhere/absent.md", ["../elsewhere/absent.md"]),
        ("docs/absent/vectors.json", ["docs/absent/vectors.json"]),
        ("ABSENT.md", ["ABSENT.md"]),
    ],
)
def test_absent_documents_are_seen_wherever_they_would_be(text, absent):
    assert absent_documents(text) == absent


@pytest.mark.parametrize(
    "file", tracked(".py", ".yaml", ".sh", ".md", "Makefile"), ids=lambda file: str(file.relative_to(ROOT))
)
def test_documents_that_are_named_exist(file):
    if file == Path(__file__).resolve():
        return
    text = file.read_text(encoding="utf-8")
    # The targets of links are relative to their page and have a test of their own.
    missing = absent_documents(LINK.sub("", text))
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
