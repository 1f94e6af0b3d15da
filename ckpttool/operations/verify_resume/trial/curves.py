"""Curves of several runs over each other: where each line, tick and label lies in the picture. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 480, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 30
# Classes of the style sheet. Runs are drawn in this order, the first broad and the next ones thinner, so that curves
# that are equal can all be seen.
_CLASSES = {"A": "broad", "control": "dashed", "B": "thin"}
_OTHERS = ("thin", "dashed", "dotted", "orange")


@dataclass(frozen=True, slots=True)
class Curve:
    """`Curve("A", [(0, 5.5), (1, 5.4)], "trained without interruption")`: points are `(step, value)`."""

    name: str
    points: Sequence[tuple[int, float]]
    says: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A curve as it is drawn: `points` in pixels, and whether each is marked by a dot."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    dots: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture: lines in the order in which they are drawn, ticks with the pixel and the label of each, the pixel of
    the step at which runs resumed, and the legend with name, class and explanation of each curve."""

    title: str
    lines: Sequence[Line]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    mark: float | None
    legend: Sequence[tuple[str, str, str]]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = _HEIGHT - _BOTTOM


def chart(title: str, curves: Sequence[Curve], mark: int | None = None) -> list[Chart]:
    """Return one chart of all curves, with a line at the step `mark`; none if no curve has a finite value."""
    curves = [Curve(c.name, [p for p in c.points if math.isfinite(p[1])], c.says) for c in curves]
    points = [point for curve in curves for point in curve.points]
    if not points:
        return []
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def at_x(x: float) -> float:
        return _LEFT + (x - low_x) / ((high_x - low_x) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    styles = _styles([curve.name for curve in curves])
    drawing_order = sorted(curves, key=lambda c: [*_CLASSES, c.name].index(c.name))
    steps = sorted({round(x) for x in _ticks(low_x, max(high_x, low_x + 1), 10)})
    return [
        Chart(
            title,
            [
                Line(
                    c.name,
                    styles[c.name],
                    [(at_x(x), at_y(y)) for x, y in c.points],
                    c.name == "B" or len(c.points) == 1,
                )
                for c in drawing_order
            ],
            [(at_x(x), str(x)) for x in steps if low_x <= x <= high_x],
            [(at_y(y), f"{y:.5g}") for y in _ticks(low, high)],
            at_x(mark) if mark is not None and low_x <= mark <= high_x else None,
            [(c.name, styles[c.name], c.says) for c in curves],
        )
    ]


def _styles(names: Sequence[str]) -> dict[str, str]:
    """Return the class of each curve. Where there is no run A the first of the others is drawn as it is."""
    others = [name for name in names if name not in _CLASSES]
    styles = {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}
    if others and "A" not in names:
        styles[others[0]] = _CLASSES["A"]
    return _CLASSES | styles


def _ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers between two."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
