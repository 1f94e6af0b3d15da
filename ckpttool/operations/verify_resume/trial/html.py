"""The page of a trial: what `ckpttool verify-resume trial --html` writes, by the template `page.html.j2`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from ckpttool.operations.verify_resume.trial.curves import Chart, Curve, chart
from ckpttool.text import duration, plural, safe, size

_VERDICTS = {
    "same": "Resume is exact",
    "differs": "Resume is not exact",
    "failed": "The trial did not finish",
}
_RULES = {"bitwise": "same mesh", "control": "mesh changed, with a reference run", "checkpoints": "checkpoints"}
_RUNS = {"A": "trained without interruption", "B": "resumed", "control": "reference: resumed by torch alone"}
_MOST = 200  # findings in the table


def trial_page(report: Mapping[str, Any]) -> str:
    """Return one self-contained HTML file, light and dark, for the dict that a trial prints with `--json`."""
    verdict = str(report.get("verdict", "failed"))
    title = _VERDICTS.get(verdict, verdict)
    template = _environment().get_template("page.html.j2")
    return template.render(
        report=report, verdict=verdict, title=title, rules=_RULES, charts=_charts(report), most=_MOST
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters |= {
        "duration": duration,
        "number": _number,
        "plural": plural,
        "prose": _prose,
        "purpose": _purpose,
        "size": size,
    }
    return environment


def _printable(value: Any) -> Any:
    """Return a value as text without invisible signs; markup, which is made of such text, as it is."""
    return value if isinstance(value, Markup) else safe(str(value))


def _prose(sentence: Any) -> Markup:
    """Return a sentence with the names that stand in backticks as code."""
    pieces = str(sentence).split("`")
    if len(pieces) % 2 == 0:
        return escape(safe(str(sentence)))
    return Markup().join(
        Markup("<code>{}</code>").format(safe(piece)) if i % 2 else escape(safe(piece))
        for i, piece in enumerate(pieces)
    )


def _number(value: Any, digits: int = 9) -> str:
    """Return a number with `digits` digits if it is a float; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value)


def _purpose(run: Mapping[str, Any]) -> str:
    """Return what a run is for, or the checkpoint that it resumed from."""
    return _RUNS.get(run["name"]) or run.get("source") or ""


def _charts(report: Mapping[str, Any]) -> list[Chart]:
    runs = report.get("runs") or ()
    mark = next((run["resumed_at"] for run in runs if run.get("resumed_at") is not None), None)
    charts = []
    for title, key in (("Loss", "loss"), ("Gradient norm", "gradient_norm")):
        curves = [
            Curve(
                run["name"],
                [(step["number"], step[key]) for step in run["steps"] if step.get(key) is not None],
                ", ".join(filter(None, (_purpose(run), run.get("mesh")))),
            )
            for run in runs
        ]
        charts += chart(title, curves, mark)
    return charts
