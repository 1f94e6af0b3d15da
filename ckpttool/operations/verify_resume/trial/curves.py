"""Curves over each other, as SVG in a page. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.operations.verify_resume.trial.markup import Raw, text

_WIDTH, _HEIGHT = 480, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 30
# The first is broad and the next ones thinner, so that those which are equal can all be seen.
_LINES = {
    "A": 'stroke="var(--a)" stroke-width="7" stroke-opacity=".45"',
    "control": 'stroke="var(--control)" stroke-width="3.5" stroke-dasharray="7 5"',
    "B": 'stroke="var(--b)" stroke-width="1.6"',
}
_OTHERS = (
    'stroke="var(--b)" stroke-width="1.6"', 'stroke="var(--control)" stroke-width="3" stroke-dasharray="7 5"',
    'stroke="var(--d)" stroke-width="1.6" stroke-dasharray="2 3"', 'stroke="var(--e)" stroke-width="1.6"',
)  # fmt: skip
_ORDER = ("A", "control", "B")


@dataclass(frozen=True, slots=True)
class Curve:
    """`Curve("A", [(0, 5.5), (1, 5.4)], "trained without a break")`: points are `(step, value)`."""

    name: str
    points: Sequence[tuple[int, float]]
    says: str = ""


def chart(title: str, curves: Sequence[Curve], mark: int | None = None) -> Raw:
    """A figure of all curves, with a line at the step `mark`; nothing when there is no point to draw."""
    curves = [Curve(c.name, [p for p in c.points if math.isfinite(p[1])], c.says) for c in curves]
    points = [point for curve in curves for point in curve.points]
    if not points:
        return Raw("")
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    spare = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = low - spare, high + spare

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / ((high_x - low_x) or 1)
        up = (y - low) / (high - low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    drawn: list[str] = []
    for y in _ticks(low, high):
        at = place(low_x, y)[1]
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{y:.5g}</text>')
    for x in sorted({round(x) for x in _ticks(low_x, max(high_x, low_x + 1), 10) if low_x <= round(x) <= high_x}):
        at = place(x, low)[0]
        drawn.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x}</text>')
    if mark is not None and low_x <= mark <= high_x:
        at = place(mark, low)[0]
        end = _HEIGHT - _BOTTOM
        drawn.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{end}" stroke="var(--soft)" stroke-dasharray="2 3"/>'
            f'<text x="{at + 5:.1f}" y="{_TOP + 10}">resumed</text>'
        )
    styles = _styles(curves)
    for curve in _in_order(curves):
        spots = [place(x, y) for x, y in curve.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        drawn.append(
            f'<polyline fill="none" stroke-linejoin="round" {styles[curve.name]} points="{line}">'
            f"<title>{text(curve.name)}</title></polyline>"
        )
        if curve.name == "B" or len(spots) == 1:
            drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="var(--b)"/>' for x, y in spots]
    said = f"{title} by step, of {', '.join(c.name for c in curves)}"
    return Raw(
        f"<figure><figcaption>{text(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(said)}">{"".join(drawn)}</svg>'
        f"{_legend(curves, styles)}</figure>"
    )


def _styles(curves: Sequence[Curve]) -> dict[str, str]:
    others = [curve.name for curve in curves if curve.name not in _LINES]
    made = dict(_LINES)
    for i, name in enumerate(others):
        made[name] = _LINES["A"] if i == 0 and "A" not in {c.name for c in curves} else _OTHERS[i % len(_OTHERS)]
    return made


def _in_order(curves: Sequence[Curve]) -> list[Curve]:
    return sorted(curves, key=lambda c: _ORDER.index(c.name) if c.name in _ORDER else len(_ORDER))


def _legend(curves: Sequence[Curve], styles: dict[str, str]) -> str:
    rows = [
        f'<li><svg viewBox="0 0 36 12" aria-hidden="true"><line x1="2" x2="34" y1="6" y2="6" {styles[c.name]}/></svg>'
        f"<strong>{text(c.name)}</strong> <span class=\"soft\">{text(c.says)}</span></li>"
        for c in curves
    ]  # fmt: skip
    return f'<ul class="legend">{"".join(rows)}</ul>'


def _ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers between two."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]
