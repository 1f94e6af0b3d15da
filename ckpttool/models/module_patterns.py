"""Regular expressions of `adapter_config.json` over the names of modules, matched in bounded time. Pure.

The file is a stranger's, and `re` goes back and tries again: `(a+)+$` takes it hours. Here all ways are followed at
once. A part of a pattern takes the places of a name up to which all before it matches, and returns those up to which it
matches, too. What cannot be matched like this, as a reference to a group, is refused.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from ckpttool.errors import CorruptError
from ckpttool.text import cut, literal

if sys.version_info >= (3, 11):
    from re import _parser  # type: ignore[attr-defined]
else:
    import sre_parse as _parser

_LONGEST = 10_000  # characters of a pattern: the longest that tools write have a thousand
_MOST = 1 << 25  # places looked at for all names of an adapter: some seconds
_PLACES = {
    "AT_BEGINNING": re.compile(r"\A"),
    "AT_BEGINNING_STRING": re.compile(r"\A"),
    "AT_END": re.compile("$"),
    "AT_END_STRING": re.compile(r"\Z"),
    "AT_BOUNDARY": re.compile(r"\b"),
    "AT_NON_BOUNDARY": re.compile(r"\B"),
}
_CATEGORIES = {
    "CATEGORY_DIGIT": re.compile(r"\d"),
    "CATEGORY_NOT_DIGIT": re.compile(r"\D"),
    "CATEGORY_SPACE": re.compile(r"\s"),
    "CATEGORY_NOT_SPACE": re.compile(r"\S"),
    "CATEGORY_WORD": re.compile(r"\w"),
    "CATEGORY_NOT_WORD": re.compile(r"\W"),
}


class ModulePatterns:
    """The patterns of one config: `ModulePatterns().fullmatch(r".*\\.q_proj", "layers.0.q_proj")`.

    Its methods raise CorruptError for a pattern that is none, has what is not matched here, or takes too long.
    """

    def __init__(self) -> None:
        self._left = _MOST
        self._parsed: dict[str, Any] = {}

    def fullmatch(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches a name, as `re.fullmatch` does."""
        return len(name) in self._all_ends(pattern, name)

    def match(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches the beginning of a name, as `re.match` does."""
        return bool(self._all_ends(pattern, name))

    def _all_ends(self, pattern: str, name: str) -> set[int]:
        try:
            if pattern not in self._parsed:
                self._parsed[pattern] = _parse(pattern)
            return self._ends(self._parsed[pattern], name, {0})
        except (re.error, ValueError, OverflowError) as error:
            raise _refused(pattern, cut(str(error), 100)) from None
        except RecursionError:
            raise _refused(pattern, "it is nested too deeply") from None

    def _ends(self, part: Any, name: str, starts: set[int]) -> set[int]:
        for kind, value in part:
            self._left -= 1 + len(starts)
            if self._left < 0:
                raise ValueError("it takes too long to match")
            if not starts:
                break
            starts = self._after(kind.name, value, name, starts)
        return starts

    def _after(self, kind: str, value: Any, name: str, starts: set[int]) -> set[int]:
        if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return {at + 1 for at in starts if at < len(name) and _is_one(kind, value, name[at])}
        if kind == "AT" and value.name in _PLACES:
            return {at for at in starts if _PLACES[value.name].match(name, at)}
        if kind == "BRANCH":
            return {end for branch in value[1] for end in self._ends(branch, name, starts)}
        if kind == "SUBPATTERN" and not (value[1] or value[2]):  # flags
            return self._ends(value[3], name, starts)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, part = value
            return self._repeated(int(low), int(high), part, name, starts)
        if kind in ("ASSERT", "ASSERT_NOT"):
            direction, part = value
            before = part.getwidth()[0] if direction < 0 else 0
            return {at for at in starts if self._is_beside(part, name, at, before) == (kind == "ASSERT")}
        if kind == "FAILURE":
            return set()
        raise ValueError("it has more than characters, classes, groups, alternatives and repeats")

    def _is_beside(self, part: Any, name: str, at: int, before: int) -> bool:
        ends = self._ends(part, name, {at - before}) if at >= before else set[int]()
        return at in ends if before else bool(ends)

    def _repeated(self, low: int, high: int, part: Any, name: str, starts: set[int]) -> set[int]:
        for _ in range(low):
            before, starts = starts, self._ends(part, name, starts)
            if starts == before:
                break  # as will be all that follow: there is no end of work in `(a?){1000000000}`
        found, fresh = starts, starts
        for _ in range(high - low):
            fresh = self._ends(part, name, fresh) - found
            if not fresh:
                break
            found = found | fresh
        return found


def _parse(pattern: str) -> Any:
    if len(pattern) > _LONGEST:
        raise ValueError(f"it has {len(pattern)} characters, and at most {_LONGEST} are taken")
    # The parser of `re`: what it takes a pattern for is what PEFT matches.
    tree = _parser.parse(pattern)
    if tree.state.flags & ~re.UNICODE:
        raise ValueError("it has flags")
    return tree


def _is_one(kind: str, value: Any, char: str) -> bool:
    if kind == "ANY":
        return char != "\n"
    if kind == "IN":
        negated = value[0][0].name == "NEGATE"
        return bool(negated) != any(_is_of_class(one.name, what, char) for one, what in value[negated:])
    return bool(ord(char) == value) == (kind == "LITERAL")


def _is_of_class(kind: str, value: Any, char: str) -> bool:
    if kind == "RANGE":
        return bool(value[0] <= ord(char) <= value[1])
    return bool(_CATEGORIES[value.name].match(char)) if kind == "CATEGORY" else bool(ord(char) == value)


def _refused(pattern: str, why: str) -> CorruptError:
    return CorruptError(f"the regular expression {literal(pattern)}: {why}", found=pattern[:_LONGEST])
