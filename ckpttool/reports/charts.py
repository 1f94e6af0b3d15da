"""Charts of what runs measured at each step, which the template draws. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Classes of the style sheet. Runs are drawn in this order, the first broad and the next ones thinner, so that curves
# that are equal can all be seen.
_STYLES = {"A": "broad", "control": "dashed", "A2": "dotted", "B": "thin"}
_OTHER_STYLES = ("thin", "dashed", "dotted", "orange")


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
        """Return the pixel of a step."""
        low, high = self.steps
        return self.left + (step - low) / ((high - low) or 1) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.values
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def drawn(self) -> list[Curve]:
        """Return the curves in the order in which they are drawn."""
        return sorted(self.curves, key=lambda curve: [*_STYLES, curve.name].index(curve.name))

    def x_ticks(self) -> list[int]:
        """Return round steps."""
        low, high = self.steps
        return [x for x in sorted({round(x) for x in _ticks(low, max(high, low + 1), 8)}) if low <= x <= high]


def charts(title: str, curves: Sequence[Curve], mark: int | None) -> list[Chart]:
    """Return the chart of curves of which one at least has a point, and that of their differences if there are any."""
    values = [value for curve in curves for _, value in curve.points]
    if not values:
        return []
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    bounds = low - margin, high + margin
    ticks = [(value, f"{value:.4g}") for value in _ticks(*bounds)]
    chart = Chart(title, curves, _steps(curves), bounds, _mark(curves, mark), ticks)
    return [chart, *_differences(title, curves, mark)]


def styles(names: Sequence[str]) -> dict[str, str]:
    """Return the class of each curve. Where there is no run A the first of the others is drawn as it is."""
    others = [name for name in names if name not in _STYLES]
    found = {name: _OTHER_STYLES[i % len(_OTHER_STYLES)] for i, name in enumerate(others)}
    if others and "A" not in names:
        found[others[0]] = _STYLES["A"]
    return _STYLES | found


def _differences(title: str, curves: Sequence[Curve], mark: int | None) -> list[Chart]:
    """Return how far the runs are from their reference, by the power of ten; nothing where all are equal. Differences
    of a thousandth cannot be seen where the curves themselves are drawn. Zero has a line of its own below the rest."""
    one = next((curve for curve in curves if curve.name == "control"), curves[0])
    judged = [curve for curve in curves if curve is not one and (one is curves[0] or curve.name == "B")]
    expected = dict(one.points)
    gaps = [[(step, abs(value - expected[step])) for step, value in c.points if step in expected] for c in judged]
    powers = [math.log10(gap) for points in gaps for _, gap in points if gap > 0.0]
    if not powers:
        return []
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
    name = f"{title}: |difference| from {one.name}, logarithmic"
    return [Chart(name, drawn, _steps(drawn), bounds, _mark(drawn, mark), ticks)]


def _steps(curves: Sequence[Curve]) -> tuple[int, int]:
    steps = [step for curve in curves for step, _ in curve.points]
    return min(steps), max(steps)


def _mark(curves: Sequence[Curve], mark: int | None) -> int | None:
    low, high = _steps(curves)
    return mark if mark is not None and low <= mark <= high else None


def _ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers between two."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
