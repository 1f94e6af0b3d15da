"""The page of a trial: what `ckpttool verify-resume trial --html` writes, by the template `page.html.j2`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from ckpttool.text import duration, plural, safe, size

_VERDICTS = {"same": "Resume is exact", "differs": "Resume is not exact", "failed": "The trial did not finish"}
_RULES = {"bitwise": "same mesh", "control": "mesh changed, with a reference run", "checkpoints": "checkpoints"}
_RUNS = {
    "A": "trained without interruption",
    "A2": "run A repeated, as B differs",
    "B": "resumed",
    "control": "reference: resumed by torch alone",
}
_MOST = 200  # findings in the table
# Classes of the style sheet. Runs are drawn in this order, the first broad and the next ones thinner, so that curves
# that are equal can all be seen.
_STYLES = {"A": "broad", "control": "dashed", "A2": "dotted", "B": "thin"}
_OTHER_STYLES = ("thin", "dashed", "dotted", "orange")


def trial_page(report: Mapping[str, Any]) -> str:
    """Return one self-contained HTML file, light and dark, for the dict that a trial prints with `--json`."""
    verdict = str(report.get("verdict", "failed"))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    filters = {"number": _number, "prose": _prose, "purpose": _purpose}
    environment.filters |= {"duration": duration, "plural": plural, "size": size, **filters}
    facts = {"verdict": verdict, "title": _VERDICTS.get(verdict, verdict), "rules": _RULES, "most": _MOST}
    return environment.get_template("page.html.j2").render(report=report, charts=_charts(report), **facts)


def _printable(value: Any) -> Any:
    """Return a value as text without invisible signs; markup, which is made of such text, as it is."""
    return value if isinstance(value, Markup) else safe(str(value))


def _prose(sentence: Any) -> Markup:
    """Return a sentence with the names that stand in backticks as code."""
    pieces = str(sentence).split("`")
    if len(pieces) % 2 == 0:
        return escape(safe(str(sentence)))
    code = Markup("<code>{}</code>")
    return Markup().join(code.format(safe(piece)) if i % 2 else escape(safe(piece)) for i, piece in enumerate(pieces))


def _number(value: Any, digits: int = 9) -> str:
    """Return a number with `digits` digits if it is a float; a dash for None."""
    if value is None:
        return "–"
    if type(value) is int:
        return f"{value:,}"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _purpose(run: Mapping[str, Any]) -> str:
    """Return what a run is for, or the checkpoint that it resumed from."""
    return _RUNS.get(run["name"]) or run.get("source") or ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A run in a chart: `Curve("A", "broad", [(0, 5.5), (1, 5.4)], "trained without interruption")`. `style` is a class
    of the style sheet, `points` are `(step, value)`."""

    name: str
    style: str
    points: Sequence[tuple[int, float]]
    message: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over each other, in the order of the legend; `steps` and `values` are the lowest and the highest ones, and
    `mark` is the step at which runs resumed. `x` and `y` give the pixels of a step and of a value."""

    title: str
    curves: Sequence[Curve]
    steps: tuple[int, int]
    values: tuple[float, float]
    mark: int | None
    left, right, top, bottom = 56, 468, 10, 230

    def x(self, step: float) -> float:
        low, high = self.steps
        return self.left + (step - low) / ((high - low) or 1) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.values
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def drawn(self) -> list[Curve]:
        """Return the curves in the order in which they are drawn."""
        return sorted(self.curves, key=lambda curve: [*_STYLES, curve.name].index(curve.name))

    def x_ticks(self) -> list[int]:
        low, high = self.steps
        return [x for x in sorted({round(x) for x in _ticks(low, max(high, low + 1), 10)}) if low <= x <= high]

    def y_ticks(self) -> list[float]:
        return _ticks(*self.values)


def _charts(report: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of everything that has a finite value."""
    runs = report.get("runs") or ()
    mark = next((run["resumed_at"] for run in runs if run.get("resumed_at") is not None), None)
    styles = _styles([run["name"] for run in runs])
    charts = []
    for title, key in (("Loss", "loss"), ("Gradient norm", "gradient_norm")):
        curves = []
        for run in runs:
            seen = ((step["number"], step.get(key)) for step in run["steps"])
            points = [(number, value) for number, value in seen if value is not None and math.isfinite(value)]
            message = ", ".join(filter(None, (_purpose(run), run.get("mesh"))))
            curves.append(Curve(run["name"], styles[run["name"]], points, message))
        points = [point for curve in curves for point in curve.points]
        if points:
            steps, values = zip(*points, strict=True)
            low, high = min(values), max(values)
            margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
            shown = mark if mark is not None and min(steps) <= mark <= max(steps) else None
            charts.append(Chart(title, curves, (min(steps), max(steps)), (low - margin, high + margin), shown))
    return charts


def _styles(names: Sequence[str]) -> dict[str, str]:
    """Return the class of each curve. Where there is no run A the first of the others is drawn as it is."""
    others = [name for name in names if name not in _STYLES]
    styles = {name: _OTHER_STYLES[i % len(_OTHER_STYLES)] for i, name in enumerate(others)}
    if others and "A" not in names:
        styles[others[0]] = _STYLES["A"]
    return _STYLES | styles


def _ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers between two."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
