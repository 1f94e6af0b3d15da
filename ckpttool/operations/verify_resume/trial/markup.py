"""Pieces of a page: escaped text, tables, and the frame that makes one self-contained file of them. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ckpttool.text import safe

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #d9dde3; --page: #fcfcfd; --card: #ffffff;
  --good: #18794e; --good-back: #e6f6eb; --bad: #c62a2f; --bad-back: #feebec; --warn: #9a5b00; --warn-back: #fff4d5;
  --a: #8b8d98; --b: #d6409f; --control: #0081f1; --d: #30a46c; --e: #f76b15; }
@media (prefers-color-scheme: dark) { :root { --ink: #eceef0; --soft: #a2a8b0; --line: #363a3f; --page: #111314;
  --card: #18191b; --good: #4cc38a; --good-back: #0f2b1d; --bad: #ff8b8f; --bad-back: #3b1219; --warn: #ffca16;
  --warn-back: #302008; --a: #8b8d98; --b: #ff8dcc; --control: #70b8ff; --d: #3dd68c; --e: #ffa057; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .6rem; }
p { margin: .35rem 0; } .soft { color: var(--soft); } code, .mono { font: .87em ui-monospace, monospace; }
code { overflow-wrap: anywhere; }
.verdict { border-radius: .6rem; padding: 1rem 1.25rem; margin: 1.25rem 0; border-left: .4rem solid; }
.verdict strong { font-size: 1.25rem; display: block; }
.same { background: var(--good-back); border-color: var(--good); } .same strong { color: var(--good); }
.differs, .failed { background: var(--bad-back); border-color: var(--bad); }
.differs strong, .failed strong { color: var(--bad); }
.first { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .9rem 1.1rem; }
.first p:first-child { font-weight: 600; margin-top: 0; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.25rem; margin: .6rem 0 0; }
dl.facts dt { color: var(--soft); } dl.facts dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .35rem; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; font-size: .87em; } tbody th { color: var(--ink); font-size: 1em; }
td.number, th.number { text-align: right; }
.pill { border-radius: 1rem; padding: .05rem .6rem; font-size: .82em; white-space: nowrap; }
.pill.good { background: var(--good-back); color: var(--good); } .pill.bad { background: var(--bad-back);
  color: var(--bad); } .pill.none { background: var(--line); color: var(--soft); }
.route { list-style: none; display: flex; flex-wrap: wrap; gap: .4rem; padding: 0; margin: .5rem 0; }
.route li { background: var(--card); border: 1px solid var(--line); border-radius: .45rem; padding: .2rem .6rem; }
.route li + li::before { content: "\\2192"; color: var(--soft); margin: 0 .55rem 0 -.05rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem;
  margin-top: 1.25rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem; }
figcaption { font-weight: 500; padding: 0 .2rem .3rem; } svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } svg .grid { stroke: var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: .4rem .2rem 0; margin: 0; list-style: none; }
.legend svg { display: inline-block; width: 2.2rem; height: .8rem; vertical-align: -.05rem; margin-right: .4rem; }
details { margin: .4rem 0; } summary { cursor: pointer; } pre { overflow-x: auto; background: var(--card);
  border: 1px solid var(--line); border-radius: .45rem; padding: .6rem .8rem; font-size: .8rem; }
footer { margin-top: 3rem; color: var(--soft); font-size: .87em; }
"""


class Raw(str):
    """Markup that is not escaped again."""


def text(value: Any) -> str:
    """Anything as text in a page: nothing in it is markup, nor a sign that cannot be seen."""
    return html.escape(safe(str(value)))


def prose(value: str) -> Raw:
    """A sentence in which `names` stand in backticks."""
    pieces = text(value).split("`")
    if len(pieces) % 2 == 0:
        return Raw("`".join(pieces))
    return Raw("".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces)))


def number(value: Any, digits: int = 9) -> str:
    """A number, a dash for None; of floats so many digits."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return text(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str = "", numbers: Sequence[int] = ()
) -> Raw:
    """A table whose first column names its rows. Cells are escaped unless they are `Raw`."""
    kind = [' class="number"' if i in numbers else "" for i in range(len(headers))]
    head = "".join(f'<th scope="col"{k}>{text(title)}</th>' for title, k in zip(headers, kind, strict=True))
    body = []
    for row in rows:
        cells = [
            f'<th scope="row">{_cell(cell)}</th>' if i == 0 else f"<td{kind[i]}>{_cell(cell)}</td>"
            for i, cell in enumerate(row)
        ]  # fmt: skip
        body.append(f"<tr>{''.join(cells)}</tr>")
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    return Raw(
        f'<div class="scroll"><table>{said}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _cell(cell: Any) -> str:
    return cell if isinstance(cell, Raw) else text(cell)


def pill(passed: bool | None, good: str, bad: str, none: str) -> Raw:
    """One word in green, red, or grey where nothing was judged."""
    if passed is None:
        return Raw(f'<span class="pill none">{text(none)}</span>')
    return Raw(f'<span class="pill {"good" if passed else "bad"}">{text(good if passed else bad)}</span>')


def facts(pairs: Iterable[tuple[str, Any]]) -> Raw:
    """Names and values below each other; those that are None are left out."""
    rows = "".join(f"<dt>{text(name)}</dt><dd>{_cell(value)}</dd>" for name, value in pairs if value is not None)
    return Raw(f'<dl class="facts">{rows}</dl>')


def section(title: str, *content: str) -> str:
    """A part of the page under a heading; nothing when there is nothing in it."""
    inner = "".join(content)
    return f"<section><h2>{text(title)}</h2>{inner}</section>" if inner else ""


def page(title: str, *content: str) -> str:
    """A whole page in one file: nothing is loaded from anywhere."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in content if part)
        + "\n</main>\n</body>\n</html>\n"
    )
