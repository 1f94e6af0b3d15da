"""The page of a trial: what `ckpttool verify-resume trial --html` writes, by the template `page.html.j2`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpttool.operations.templates import environment

_VERDICTS = {
    "same": "Resume is exact",
    "differs": "Resume is not exact",
    "failed": "The trial did not finish",
    "nondeterministic": "The command does not repeat itself",
    "planned": "Nothing was run",
}
_RUNS = {
    "A": "trained without interruption",
    "A2": "run A repeated, as B differs",
    "B": "resumed",
    "control": "reference: resumed by torch alone",
}
_MOST = 200  # findings in the table
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Classes of the style sheet. Runs are drawn in this order, the first broad and the next ones thinner, so that curves
# that are equal can all be seen.
_STYLES = {"A": "broad", "control": "dashed", "A2": "dotted", "B": "thin"}
_OTHER_STYLES = ("thin", "dashed", "dotted", "orange")


def trial_page(report: Mapping[str, Any], made: Mapping[str, str] | None = None) -> str:
    """Return one self-contained HTML file, light and dark, for the dict that a trial prints with `--json`; `made` says
    how and when the report was made, `{"torch": "2.9.0"}`."""
    verdict = str(report.get("verdict", "failed"))
    templates = environment(__package__)
    templates.filters |= {"purpose": _purpose, "detail": _detail}
    facts = {"verdict": verdict, "title": _VERDICTS.get(verdict, verdict), "most": _MOST}
    tables = {"charts": _charts(report), "checks": _checks(report), "made": made or {}}
    template = templates.get_template("page.html.j2")
    template.globals["is_digest"] = lambda value: isinstance(value, str) and _DIGEST.fullmatch(value) is not None
    return template.render(report=report, **facts, **tables)


def _detail(message: str) -> str:
    """Return what a message says beyond the title: `resume is not exact: the loss ...` is `The loss ...`."""
    detail = re.sub(r"^(resume is not exact|exact resume): ", "", message)
    return detail[:1].upper() + detail[1:]


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
    """Curves over each other, in the order of the legend; `steps` and `values` are the lowest and the highest ones,
    `mark` is the step at which runs resumed, and `y_ticks` are values with their labels. `x` and `y` give the pixels of
    a step and of a value."""

    title: str
    curves: Sequence[Curve]
    steps: tuple[int, int]
    values: tuple[float, float]
    mark: int | None
    y_ticks: Sequence[tuple[float, str]]
    left, right, top, bottom = 66, 468, 10, 230

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
        return [x for x in sorted({round(x) for x in _ticks(low, max(high, low + 1), 8)}) if low <= x <= high]


@dataclass(frozen=True, slots=True)
class CheckRow:
    """A check of the sharding in all runs: `CheckRow("local shapes", [("A", True), ("B", None)], ["31 shards"])`."""

    what: str
    results: Sequence[tuple[str, bool | None]]
    notes: Sequence[str]


def _checks(report: Mapping[str, Any]) -> list[CheckRow]:
    """Return a row for each check, with the results of the runs in one order; a note that all runs share once."""
    checks = report.get("checks") or ()
    runs = [*dict.fromkeys(check["run"] for check in checks)]
    rows = []
    for what in dict.fromkeys(check["what"] for check in checks):
        by_run = {check["run"]: check for check in checks if check["what"] == what}
        messages: dict[str, list[str]] = {}
        for run, check in by_run.items():
            messages.setdefault(check["message"], []).append(run)
        shared = len(messages) == 1
        notes = [text if shared else f"{', '.join(names)}: {text}" for text, names in messages.items() if text]
        results = [(run, by_run[run]["passed"] if run in by_run else None) for run in runs]
        rows.append(CheckRow(what, results, notes))
    return rows


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
        if values := [value for curve in curves for _, value in curve.points]:
            low, high = min(values), max(values)
            margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
            bounds = low - margin, high + margin
            ticks = [(value, f"{value:.4g}") for value in _ticks(*bounds)]
            charts.append(Chart(title, curves, _steps(curves), bounds, _mark(curves, mark), ticks))
        if (difference := _difference(title, curves, mark)) is not None:
            charts.append(difference)
    return charts


def _difference(title: str, curves: Sequence[Curve], mark: int | None) -> Chart | None:
    """Return how far the runs are from their reference, by the power of ten; None where all are equal. Differences of a
    thousandth cannot be seen where the curves themselves are drawn. Zero has a line of its own below the others."""
    if not curves:
        return None
    reference = next((curve for curve in curves if curve.name == "control"), curves[0])
    judged = [curve for curve in curves if curve is not reference and (reference is curves[0] or curve.name == "B")]
    expected = dict(reference.points)
    gaps = [[(step, abs(value - expected[step])) for step, value in c.points if step in expected] for c in judged]
    powers = [math.log10(gap) for points in gaps for _, gap in points if gap > 0.0]
    if not powers:
        return None
    low, high = math.floor(min(powers)), max(math.ceil(max(powers)), math.floor(min(powers)) + 1)
    zero = low - max(1.0, (high - low) / 5)
    drawn = [
        replace(curve, points=[(step, math.log10(gap) if gap > 0.0 else zero) for step, gap in points])
        for curve, points in zip(judged, gaps, strict=True)
        if points
    ]
    every = math.ceil((high - low) / 6)
    ticks = [(zero, "0"), *((float(power), f"1e{power}") for power in range(low, high + 1, every))]
    margin = (high - zero) * 0.06
    bounds = (zero - margin, high + margin)
    name = f"{title}: |difference| from {reference.name}, logarithmic"
    return Chart(name, drawn, _steps(drawn), bounds, _mark(drawn, mark), ticks)


def _steps(curves: Sequence[Curve]) -> tuple[int, int]:
    steps = [step for curve in curves for step, _ in curve.points]
    return min(steps), max(steps)


def _mark(curves: Sequence[Curve], mark: int | None) -> int | None:
    low, high = _steps(curves)
    return mark if mark is not None and low <= mark <= high else None


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
