"""The checks of an audit, one line for each thing that was checked, and what several of them ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpttool.catalogue.entries import Catalogue, Entry, Object, Tensor
from ckpttool.errors import CkptError
from ckpttool.layout import select
from ckpttool.layout.rename import strip_wrappers
from ckpttool.text import some

State = Literal["ok", "note", "differs", "fails"]


@dataclass(frozen=True, slots=True)
class Check:
    """`Check("rng", "differs", "rank 3 has none, of 4", ["rank 3"])`. A `note` is of what was not checked, or of no
    consequence; what `fails` does not resume, or not correctly."""

    what: str  #: subject
    state: State  #: `ok`, `note`, `differs` (resume is not exact) or `fails` (no resume)
    message: str  #: result, for people
    names: list[str] = field(default_factory=list)  #: all names that it is about
    hint: str | None = None  #: for people


class Checks(list[Check]):
    """The lines of one audit, in the order in which they are shown."""

    def ok(self, what: str, message: str) -> None:
        """Add a check that passed."""
        self.append(Check(what, "ok", message))

    def note(self, what: str, message: str, names: Sequence[str] = (), hint: str | None = None) -> None:
        """Add a line that does not count for the verdict."""
        self.append(Check(what, "note", message, list(names), hint))

    def differs(self, what: str, message: str, names: Sequence[str] = ()) -> None:
        """Add something that will differ after resuming."""
        self.append(Check(what, "differs", message, list(names)))

    def fails(self, what: str, message: str, names: Sequence[str] = (), hint: str | None = None) -> None:
        """Add something that prevents resuming; once, if several groups have it."""
        check = Check(what, "fails", message, list(names), hint)
        if check not in self:
            self.append(check)

    def topics(self, *states: State) -> list[str]:
        """Return the subject of each line of these states."""
        return [check.what for check in self if check.state in states]

    @property
    def faults(self) -> int:
        """The number of lines that count for the verdict."""
        return len(self.topics("differs", "fails"))


def named(names: Sequence[str], what: str = "parameter") -> str:
    """Return names with their number: `parameter `w`` or `3 parameters (`a`, `b`, `c`)`. Pure."""
    return f"{what} `{names[0]}`" if len(names) == 1 else f"{len(names):,} {what}s ({some(names)})"


def value_of(entry: Entry) -> Any:
    """Return the value of an object; None for a tensor, and if it cannot be read."""
    try:
        return entry.value if isinstance(entry, Object) else None
    except CkptError:
        return None


def trained_model(catalogue: Catalogue) -> dict[str, Tensor]:
    """Return the tensors of the model that the optimizer is about, by FQN without wrappers. Pure."""
    models = select.models(catalogue)
    entries = models[0][1] if models else ()
    return {strip_wrappers(entry.fqn): entry for entry in entries if isinstance(entry, Tensor)}


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and one that a float can be."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else value.bit_length() < _LARGEST


_LARGEST = 1000  # bits
