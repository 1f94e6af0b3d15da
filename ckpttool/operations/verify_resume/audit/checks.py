"""What an audit says: one line for each thing that was looked at. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckpttool.text import some

State = Literal["ok", "note", "differs", "fails"]


@dataclass(frozen=True, slots=True)
class Check:
    """`Check("rng", "differs", "rank 3 has none, of 4", ["rank 3"])`.

    `ok`: as it should be; `note`: nothing is wrong as far as can be told; `differs`: training goes on, but not as if
    nothing had happened; `fails`: it does not go on, or not to any good. `names` are all that the line is about.
    """

    what: str  #: subject
    state: State  #: `ok`, `note`, `differs` (resume is not exact) or `fails` (no resume)
    says: str  #: result, for people
    names: list[str] = field(default_factory=list)  #: all names that it is about
    hint: str | None = None  #: for people


class Checks(list[Check]):
    """The lines of one audit, in the order in which they are shown."""

    def ok(self, what: str, says: str) -> None:
        """Add a line about what is as it should be."""
        self.append(Check(what, "ok", says))

    def note(self, what: str, says: str, names: Sequence[str] = (), hint: str | None = None) -> None:
        """Add a line that does not count."""
        self.append(Check(what, "note", says, list(names), hint))

    def differs(self, what: str, says: str, names: Sequence[str] = (), hint: str | None = None) -> None:
        """Add a line about what will not be as it was."""
        self.append(Check(what, "differs", says, list(names), hint))

    def fails(self, what: str, says: str, names: Sequence[str] = (), hint: str | None = None) -> None:
        """Add a line about what keeps training from going on; once, where it is so of several groups."""
        check = Check(what, "fails", says, list(names), hint)
        if check not in self:
            self.append(check)

    def of(self, state: State) -> list[Check]:
        """The lines of one kind."""
        return [check for check in self if check.state == state]


def named(names: Sequence[str], what: str = "parameter") -> str:
    """`parameter `w`` or `3 parameters (`a`, `b`, `c`)`: names with how many there are. Pure."""
    return f"{what} `{names[0]}`" if len(names) == 1 else f"{len(names):,} {what}s ({some(names)})"
