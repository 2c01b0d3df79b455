"""The report's HTML skeleton and style sheet: one file, no script, nothing loaded from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { --ink: #1f2933; --muted: #52606d; --line: #e4e7eb; --soft: #f5f7fa; --accent: #0072B2; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1124px; margin: 0 auto; padding: 48px 32px 80px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.015em; }
h2 { font-size: 21px; margin: 56px 0 4px; padding-top: 20px; letter-spacing: -0.01em;
  border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 28px 0 8px; }
p { margin: 6px 0 14px; max-width: 76ch; }
.lead { max-width: none; color: var(--muted); margin-bottom: 26px; }
.note { color: var(--muted); font-size: 14.5px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin: 24px 0 8px; }
.card { background: var(--soft); border-radius: 10px; padding: 16px 18px; }
.card b { display: block; font-size: 27px; line-height: 1.25; font-weight: 650; letter-spacing: -0.02em; }
.card span { color: var(--muted); font-size: 14px; }
.card.warn { background: #fdf0e6; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14.5px; margin: 22px 0 0; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
.scroll { overflow-x: auto; margin: 10px 0 18px; }
table { border-collapse: collapse; font-size: 14px; white-space: nowrap; }
th { text-align: right; font-weight: 600; color: var(--muted); border-bottom: 1.5px solid #9aa5b1; }
td { text-align: right; border-bottom: 1px solid var(--line); }
th, td { padding: 6px 9px; } th:first-child, td:first-child { text-align: left; padding-left: 2px; }
tr.rule td { border-top: 1.5px solid #9aa5b1; font-weight: 600; }
td.best { font-weight: 700; }
table.facts td { text-align: left; white-space: normal; vertical-align: top; overflow-wrap: anywhere; }
table.facts td:first-child { color: var(--muted); white-space: nowrap; width: 190px; }
code, .mono { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--soft); border-radius: 8px; padding: 12px 14px; overflow-x: auto; }
figure { margin: 14px 0 8px; } figcaption { color: var(--muted); font-size: 14px; max-width: 84ch; margin-top: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit !important; }
.warning { background: #fdf0e6; border-left: 4px solid #D55E00; border-radius: 4px; padding: 10px 14px;
  margin: 12px 0; }
footer { margin-top: 60px; padding-top: 14px; color: var(--muted); font-size: 13.5px;
  border-top: 1px solid var(--line); }
@media print { main { padding: 0; } h2 { break-after: avoid; } figure, table { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Section:
    """A titled part of the page; ``body`` is HTML."""

    id: str
    title: str
    body: str


def document(title: str, lead: str, top: str, sections: Sequence[Section], footer: str) -> str:
    """The whole page. ``title``, ``lead`` and ``footer`` are text, the rest is HTML."""
    links = "".join(f'<a href="#{section.id}">{escape(section.title)}</a>' for section in sections)
    parts = "".join(
        f'<section id="{section.id}"><h2>{escape(section.title)}</h2>{section.body}</section>' for section in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>"
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{top}<nav>{links}</nav>\n{parts}\n'
        f"<footer>{escape(footer)}</footer></main></body></html>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    """Escaped text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def warning(text: str) -> str:
    """A box that stands out."""
    return f'<div class="warning">{escape(text)}</div>'


def figure(svg: str, caption: str) -> str:
    """A drawing with its caption."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def cards(items: Sequence[tuple[str, str, bool]]) -> str:
    """Big figures: (value, what it is, whether it is a warning)."""
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card{" warn" if bad else ""}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
            for value, label, bad in items
        )
        + "</div>"
    )


def grid(
    header: Sequence[str], rows: Sequence[Sequence[str]], rules: frozenset[int] = frozenset(), best: bool = False
) -> str:
    """A table; ``rules`` are rows set off by a line, ``best`` makes the largest number of each column bold."""
    top = {column: _largest(rows, column) for column in range(1, len(header))} if best else {}
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(
            f"<td{' class=best' if top.get(column) == index else ''}>{escape(cell)}</td>"
            for column, cell in enumerate(row)
        )
        lines.append(f"<tr{' class=rule' if index in rules else ''}>{cells}</tr>")
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _largest(rows: Sequence[Sequence[str]], column: int) -> int | None:
    try:
        values = [float(row[column]) for row in rows]
    except ValueError:
        return None
    return max(range(len(values)), key=lambda index: values[index])


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A two-column list of names and values."""
    lines = "".join(f'<tr><td>{escape(name)}</td><td class="mono">{escape(value)}</td></tr>' for name, value in rows)
    return f'<table class="facts"><tbody>{lines}</tbody></table>'
