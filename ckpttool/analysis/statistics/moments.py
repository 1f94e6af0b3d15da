"""Mean, variance and the higher moments of numbers that come in pieces, in float64.

Moments are kept about the mean, and those of two sets of numbers are merged by the formulas of Pébay (Sandia report
SAND2008-6212): the sums of powers themselves would lose all digits of numbers that are far from zero.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from ckpttool.transfer.numbers import Array, dot

_GUESS = 1024  # elements whose mean is near that of the piece
_MIN_EXACT = 1e-140  # of which the square has all digits


@dataclass(slots=True)
class Moments:
    """The moments of `n` numbers: their mean, and the sums of the second, third and fourth power of their distances
    from it."""

    n: int = 0
    mean: float = 0.0
    m2: float = 0.0
    m3: float = 0.0
    m4: float = 0.0

    def merge(self, other: Moments) -> None:
        """Add the moments of other numbers."""
        if not other.n:
            return
        if not self.n:
            self.n, self.mean, self.m2, self.m3, self.m4 = other.n, other.mean, other.m2, other.m3, other.m4
            return
        a, b = self.n, other.n
        n, apart = a + b, other.mean - self.mean
        step = apart / n
        self.m4 += (
            other.m4
            + apart * step * step * step * a * b * (a * a - a * b + b * b)
            + 6 * step * step * (a * a * other.m2 + b * b * self.m2)
            + 4 * step * (a * other.m3 - b * self.m3)
        )
        self.m3 += other.m3 + apart * step * step * a * b * (a - b) + 3 * step * (a * other.m2 - b * self.m2)
        self.m2 = _or_infinite(self.m2 + other.m2 + apart * step * a * b)
        self.mean = self.mean + step * b if math.isfinite(apart) else self.mean + other.mean
        self.n = n

    @property
    def std(self) -> float | None:
        """The standard deviation of the numbers themselves: `numpy.std`. None without any."""
        return math.sqrt(self.m2 / self.n) if self.n else None

    @property
    def squares(self) -> float:
        """The sum of the squares."""
        return self.m2 + self.n * self.mean * self.mean

    @property
    def kurtosis(self) -> float | None:
        """The excess kurtosis: 0 for a normal distribution. None for equal numbers, and for some so small or large that
        their fourth powers are not float64."""
        return self.n * self.m4 / (self.m2 * self.m2) - 3 if self.m2 > _MIN_EXACT and math.isfinite(self.m4) else None


def of_counts(values: Array, counts: Array) -> Moments:
    """Return the moments of numbers of which there are several each."""
    import numpy as np

    n = int(counts.sum())
    if not n:
        return Moments()
    weights = counts.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(math.fsum((values * weights).tolist()) / n)
        apart = values - mean
        squares = apart * apart
        sums = (dot(weights * power, squares) for power in (np.ones_like(apart), apart, squares))
        return Moments(n, mean, *sums)


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[int, Array] = {}


_buffers = _Buffers()


def buffer(number: int, n: int) -> Array:
    """Return an array of `n` float64, the same memory for each call with this number in this thread: the kernel needs
    longer to clear new memory than an addition takes."""
    import numpy as np

    array = _buffers.arrays.get(number)
    if array is None or len(array) < n:
        array = _buffers.arrays[number] = np.empty(n)
    return array[:n]


def of_numbers(values: Array) -> tuple[Moments, float, float]:
    """Return the moments of finite numbers, the sum of their magnitudes, and the root of the sum of their squares."""
    import numpy as np

    n = len(values)
    if not n:
        return Moments(), 0.0, 0.0
    apart, squares = buffer(0, n), buffer(1, n)
    with np.errstate(over="ignore", invalid="ignore"):
        apart[:] = values
        guess = _guess(apart[:_GUESS])
        magnitudes = float(np.abs(apart, out=squares).sum())
        if guess:
            apart -= guess
        np.multiply(apart, apart, out=squares)
        s1, s2 = float(apart.sum()), float(squares.sum())
        s3, s4 = dot(squares, apart), dot(squares, squares)
    step = s1 / n
    m2 = max(_or_infinite(s2 - s1 * step), 0.0)
    m3 = s3 - 3 * step * s2 + 2 * s1 * step * step
    m4 = max(_or_infinite(s4 - 4 * step * s3 + 6 * step * step * s2 - 3 * s1 * step * step * step), 0.0)
    moments = Moments(n, guess + step, m2, m3, m4)
    return moments, magnitudes, _norm(values, moments.squares) if magnitudes else 0.0


def _norm(values: Array, squares: float) -> float:
    """Return the root of a sum of squares, which may be too large or too small for a float64 where it is not."""
    import numpy as np

    if _MIN_EXACT < squares < math.inf:
        return math.sqrt(squares)
    largest = max(-float(values.min()), float(values.max()))
    return largest * math.sqrt(float(np.square(values / largest).sum()))


def _guess(some: Array) -> float:
    """Return a number near the mean, from which distances are taken; 0 where those from zero are as good."""
    mean = float(some.mean())
    return mean if math.isfinite(mean) and 16 * mean * mean > dot(some, some) / len(some) else 0.0


def _or_infinite(total: float) -> float:
    """Return a sum of squares, infinity where a term of it was too large: the difference of two infinities is NaN."""
    return total if math.isfinite(total) else math.inf
