"""The losses of a run: of each step, from where the command leaves them.

A source is a function of the output directory and the log of a run. It returns the loss of each step; of a step that
was trained twice, before the stop and after it, the later one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial

from ckpttool.errors import UsageError
from ckpttool.operations.verify_resume.run.process import read_log

Losses = Callable[[str, str], Mapping[int, float]]

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|-?inf"
# `step 4: loss 2.71`, `iter 4: loss 2.71, time 4ms`, `Step 4 | loss=2.71`
_USUAL = rf"(?i)\b(?:step|iter|iteration)\b\W{{0,3}}(?P<step>\d+)\b[^\n]*?\bloss\W{{0,3}}(?P<loss>{_NUMBER})"


def from_output(pattern: str | None) -> Losses:
    """Return a source that reads the output of the command. Without a pattern, the usual forms are looked for.

    A pattern has the groups `step` and `loss`, or two groups in that order, or one: the loss of one step after another.
    Raises UsageError for one that has neither.
    """
    if pattern is None:
        return partial(_matched, re.compile(_USUAL))
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"`--loss {pattern}` is no regular expression: {error}") from None
    if not compiled.groups:
        hint = r"'step (\d+).*loss ([\d.]+)', json:FILE, csv:FILE, tensorboard:FOLDER or trainer:FOLDER"
        raise UsageError(f"`--loss {pattern}` has no group", hint=hint)
    return partial(_matched, compiled)


def _matched(pattern: re.Pattern[str], out: str, log: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for number, match in enumerate(pattern.finditer(read_log(log)), 1):
        groups = match.groupdict() or {}
        step, loss = groups.get("step"), groups.get("loss")
        if loss is None:
            step, loss = (match[1], match[2]) if pattern.groups > 1 else (None, match[1])
        value = _number(loss)
        if value is not None and (step is None or step.isdecimal()):
            found[number if step is None else int(step)] = value
    return found


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def equal(one: float, other: float) -> bool:
    """Return whether two losses are the same number; NaN is itself."""
    return one == other or (math.isnan(one) and math.isnan(other))
