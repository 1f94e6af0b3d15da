"""What a checkpoint of another tool is, and what ckpttool does and does not do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CorruptError, ReadError
from ckpttool.storage.stores import Location

FACT = "recognised"
"""The key of a recognition in the facts of a catalogue, and in those of an error."""


@dataclass(frozen=True, slots=True)
class Recognition:
    """What a checkpoint was recognised as: ``Recognition("DeepSpeed ZeRO-3", "0.19.8", "2 data-parallel ranks", 384)``.

    `parameters` counts those of the model, however they are stored; None if nothing says it. `can` and `cannot` are
    sentences on what ckpttool does with it. `hint` says what to do where it cannot be opened. `warnings` say what is
    missing or does not fit, `faults` what stops a conversion.
    """

    name: str
    version: str = ""
    parallelism: str = ""
    parameters: int | None = None
    details: Mapping[str, str | int] = field(default_factory=dict)
    can: tuple[str, ...] = ()
    cannot: tuple[str, ...] = ()
    hint: str = ""
    warnings: tuple[Warning, ...] = ()
    faults: tuple[CorruptError, ...] = ()

    @property
    def title(self) -> str:
        """The name with the version."""
        return f"{self.name} {self.version}".rstrip()

    def fact(self) -> dict[str, Any]:
        """Return the recognition as JSON has it. Pure."""
        return {
            "name": self.name,
            "title": self.title,
            "version": self.version or None,
            "parallelism": self.parallelism or None,
            "parameters": self.parameters,
            "details": dict(self.details),
            "can": list(self.can),
            "cannot": list(self.cannot),
        }

    def annotate(self, catalogue: Catalogue) -> None:
        """Add the recognition to a catalogue."""
        catalogue.facts[FACT] = self.fact()
        catalogue.warnings += self.warnings
        catalogue.faults += self.faults

    def refusal(self, location: Location) -> UnsupportedError:
        """Return the error for a checkpoint that only `inspect` takes."""
        text = f"`{location}`: {self.title}, which `inspect` describes, but ckpttool does not open as one checkpoint"
        return UnsupportedError(text, hint=self.hint, file=location, recognition=self)


class UnsupportedError(ReadError):
    """The source is a checkpoint of another tool that can be recognised, but not opened. `recognition` says what it
    is."""

    @property
    def recognition(self) -> Recognition:
        """What the checkpoint is."""
        found: Recognition = self.facts["recognition"]
        return found


def picked(values: Mapping[str, Any], titles: Mapping[str, str]) -> dict[str, str | int]:
    """Return the texts and numbers among some values, by the titles of their keys. Pure."""
    known = ((title, values.get(key)) for key, title in titles.items())
    return {
        title: f"{value:g}" if isinstance(value, float) else value
        for title, value in known
        if isinstance(value, (str, int, float))
    }


def ranks(n: int, what: str = "") -> str:
    """Return `2 data-parallel ranks`. Pure."""
    return f"{n:,} {what}{' ' if what else ''}{'rank' if n == 1 else 'ranks'}"
