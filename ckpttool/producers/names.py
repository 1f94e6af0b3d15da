"""What the name of a checkpoint says: its step, and that the save did not end. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Words that count steps, and words that count something else where nothing counts steps.
STEPS = (
    re.compile(r"(?:^|[^a-z])(?:global_?)?steps?[-_=]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:^|[^a-z])ba(\d+)", re.IGNORECASE),
)
NUMBERS = (
    *STEPS,
    re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt|iter|iteration)[-_=]?(\d+)", re.IGNORECASE),
    re.compile(r"^(\d+)$"),
    re.compile(r"(?:^|[^a-z])(?:epoch|ep)[-_=]?(\d+)", re.IGNORECASE),
)
_UNFINISHED = re.compile(r"^(tmp[-_.]|\.)|([-_.])(tmp|partial|incomplete|unfinished)$|\.partial-\d+$", re.IGNORECASE)


def step_in(name: str, patterns: Sequence[re.Pattern[str]] = NUMBERS) -> int | None:
    """The step that a name says: `epoch=0-step=100.ckpt` -> 100; None for one that says nothing. Pure."""
    return next((int(found[1]) for pattern in patterns if (found := pattern.search(name))), None)


def is_unfinished(name: str) -> bool:
    """Whether a name is one that a writer gives before it renames: `tmp_step-10`, `.checkpoint-20`. Pure."""
    return _UNFINISHED.search(name) is not None
