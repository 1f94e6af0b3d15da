"""The losses of a run: of each step, from where the command leaves them.

A source is a function of the output directory and the log of a run, and of the step at which that log begins. It
returns the loss of each step; of a step that was trained twice, before the stop and after it, the later one.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping

from ckpttool.errors import UsageError

Losses = Callable[[str, str, int], Mapping[int, float]]

# `2.71`, `1e-3`, `2,345.67`, and `2,71` where a comma is the decimal point
_NUMBER = r"[-+]?(?:\d+(?:,\d+)*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|-?inf"
# `step 4: loss 2.71`, `iter 4: loss 2.71, time 4ms`, `Step 4 | loss=2.71`
# A line of another rank may end where this one begins.
_STEP = r"(?<![^\W\d])(?:step|iter|iteration)\b\W{0,3}(?P<step>\d+(?:,\d{3})*)\b"
_USUAL = rf"(?i){_STEP}[^\n]*?\b(?:train_)?loss\W{{0,3}}(?P<loss>{_NUMBER})"


class Output:
    """The losses in the output of a command. Without a pattern, the usual forms are looked for.

    A pattern has the groups `step` and `loss`, or two groups in that order, or one: the loss of one step after another.
    Raises UsageError for one that has neither.
    """

    def __init__(self, pattern: str | None) -> None:
        try:
            self._pattern = re.compile(_USUAL if pattern is None else pattern, re.MULTILINE)
        except re.error as error:
            raise UsageError(f"`--loss {pattern}` is not a regular expression: {error}") from None
        if not self._pattern.groups:
            hint = r"'step (\d+).*loss ([\d.]+)', json:FILE, csv:FILE, tensorboard:FOLDER or trainer:FOLDER"
            raise UsageError(f"`--loss {pattern}` has no group", hint=hint)
        self.is_numbered = "step" in self._pattern.groupindex or (
            "loss" not in self._pattern.groupindex and self._pattern.groups > 1
        )

    def __call__(self, out: str, log: str, after: int = 0) -> Mapping[int, float]:
        # Ranks that all print their loss do so in any order.
        return {step: sum(sorted(losses)) / len(losses) for step, losses in self.printed(log, after).items()}

    def printed(self, log: str, after: int = 0) -> Mapping[int, list[float]]:
        """Return all losses of each step. Those without a step are of the steps after `after`."""
        found: dict[int, list[float]] = defaultdict(list)
        for number, match in enumerate(self._pattern.finditer(read_log(log)), 1):
            groups = match.groupdict()
            step, loss = groups.get("step"), groups.get("loss")
            if loss is None:
                step, loss = (match[1], match[2]) if self._pattern.groups > 1 else (None, match[1])
            at, value = _number(step) if step is not None else after + number, _number(loss)
            if at is not None and at == at // 1 and value is not None:
                found[int(at)].append(value)
        return found


def _number(text: str | None) -> float | None:
    """Return the number that a text has; None if it has none. One comma before other than 3 digits is a point."""
    text = re.sub(r"^([-+]?\d+),(?!\d{3}(?!\d))(\d+)", r"\1.\2", text or "").replace(",", "")
    try:
        return float(text)
    except ValueError:
        return None


def equal(one: float, other: float) -> bool:
    """Return whether two losses are the same number; NaN is itself."""
    return one == other or (math.isnan(one) and math.isnan(other))


def read_log(path: str) -> str:
    """Return what a command has written so far; nothing before it was started."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
