"""The words with which people choose steps of a run: `all`, `500,1000`, `500..900`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import compress
from typing import TypeAlias, TypeVar

from ckpttool.errors import UsageError

StepWords: TypeAlias = "int | str | Sequence[int | str]"
_Checkpoint = TypeVar("_Checkpoint")
_DASHED = re.compile(r"(\d+)-(\d+)")
_MOST = 20  # steps that a hint lists


def words_of(steps: StepWords) -> list[str]:
    """Return the words one by one."""
    return [str(word).strip() for word in (str(steps).split(",") if isinstance(steps, int | str) else steps)]


def chosen(steps: Sequence[str], checkpoints: Sequence[_Checkpoint], words: Sequence[str]) -> list[_Checkpoint]:
    """Return those of the checkpoints, of these steps, that a word names."""
    return [*compress(checkpoints, (any(_names(word, step) for word in words) for step in steps))]


def check(steps: Sequence[str], words: Sequence[str], message: str, hint: str) -> None:
    """Raise UsageError if a word names none of the steps; the word ends the message, and the steps the hint."""
    for word in words:
        if not any(_names(word, step) for step in steps):
            known = list(dict.fromkeys(steps))
            more = f" and {len(known) - _MOST} more" if len(known) > _MOST else ""
            hint = f"{hint} {', '.join(known[:_MOST])}{more}"
            if dashed := _DASHED.fullmatch(word):
                hint = f"a range is written `{dashed[1]}..{dashed[2]}`; {hint}"
            raise UsageError(f"{message} {word}", hint=hint)


def _names(word: str, step: str) -> bool:
    first, _, last = word.partition("..")
    if all(map(str.isdecimal, (first, last, step))):
        return int(first) <= int(step) <= int(last)
    return word in (step, "all")
