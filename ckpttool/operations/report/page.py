"""Renders the page of a report: `page.html.j2` with `style.css`, `script.js` and the document as JSON. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.operations.inspect.sharding import bytes_per_rank, overview
from ckpttool.operations.inspect.summary import head
from ckpttool.operations.report.document import document
from ckpttool.operations.stats import Stats
from ckpttool.operations.templates import environment, verbatim
from ckpttool.version import __version__

PAGES = {
    "summary": "Summary",
    "matrix": "Layers",
    "tensor": "Tensors",
    "sharding": "Sharding",
    "bytes": "Bytes",
    "steps": "Steps",
    "experts": "Experts",
}
"""The pages of the file, by their names in its addresses."""

_MOST = 200  # rows of a table
# What ends a script or starts a comment in one, and the line ends of old JavaScript.
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def render(stats: Stats, catalogue: Catalogue, hyperparameters: Sequence[Mapping[str, str]] = ()) -> str:
    """Return one self-contained HTML file, light and dark."""
    drawn = document(stats, catalogue)
    if drawn["steps"]:
        drawn["steps"]["hyperparameters"] = hyperparameters
    templates = environment(__package__)
    script = _text(templates, "script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    files = sorted(catalogue.own_files, key=lambda file: -file.size)
    return templates.get_template("page.html.j2").render(
        stats=stats,
        pages=pages(stats),
        parts=head(catalogue)[1],
        facts=[(name, value) for name, value in _facts(stats, catalogue) if value],
        loads=bytes_per_rank(catalogue),
        files=files,
        most=_MOST,
        warnings=[str(warning) for warning in catalogue.warnings],
        version=__version__,
        style=verbatim(_text(templates, "style.css")),
        script=verbatim(script),
        digest=digest,
        data=verbatim(json_in_html(drawn)),
    )


def json_in_html(value: Any) -> str:
    """Return a value as JSON that can stand in a script element: no text in it ends that."""
    return json.dumps(value, separators=(",", ":")).translate(_ESCAPES)


def _text(templates: Any, name: str) -> str:
    source: str = templates.loader.get_source(templates, name)[0]
    return source


def pages(stats: Stats) -> dict[str, str]:
    """Return the pages that have something to show, with their titles."""
    absent = set() if len(stats.steps) > 1 else {"steps"}
    absent |= set() if any(row.expert for row in stats.tensors) else {"experts"}
    return {name: title for name, title in PAGES.items() if name not in absent}


def _facts(stats: Stats, catalogue: Catalogue) -> list[tuple[str, str]]:
    writer = catalogue.facts.get("writer")
    return [
        ("format", catalogue.format),
        ("written by", str(writer) if writer else ""),
        ("step", "" if stats.step is None else f"{stats.step:,}"),
        ("ranks", f"{catalogue.world_size:,}" if catalogue.world_size > 1 else ""),
        ("sharding", overview(catalogue)),
        ("read", f"{stats.elements:,} elements"),
    ]
