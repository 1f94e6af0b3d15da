"""What is found in a checkpoint, each thing with its gravity and its place. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpttool.errors import CkptError, RemoteError

DAMAGE, DIFFERENCE, NAN, SUSPECT, NOTE = "damage", "difference", "nan", "suspect", "note"
GRAVITIES = (DAMAGE, DIFFERENCE, NAN, SUSPECT, NOTE)
"""The gravest first. Damage: the bytes are not those that were written, or some are missing. Difference: from the other
checkpoint, the reference, or the tensors of its kind. Suspect: nothing that is read is wrong, but something does not
belong there, or is not as expected."""


class Where(NamedTuple):
    """A place in a checkpoint: `Where("__0_0.distcp", 704, 4096)`, `nbytes` at `offset` of a file."""

    file: str | None
    offset: int | None = None
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was found: `Finding("nan", "nan", "`model.w`: 3 of 8 elements are NaN", names=["model.w"])`. A
    command publishes those of its fields that its results name: `published`."""

    gravity: str  #: one of `GRAVITIES`
    kind: str  #: a word by which code selects it; the command's documentation lists them
    message: str  #: for people
    file: str | None = None  #: file it is in
    tensor: str | None = None  #: tensor it concerns
    offset: int | None = None  #: position in the file
    nbytes: int | None = None  #: length in the file
    hint: str | None = None  #: for people
    names: Sequence[str] = ()  #: all tensors and objects that it concerns
    found: str | None = None  #: what the checkpoint has
    expected: str | None = None  #: what it should have
    ways: Sequence[str] = ()  #: what it may be, or how it may be made, for people

    @classmethod
    def of(
        cls, error: CkptError, kind: str, gravity: str = DAMAGE, where: Where | None = None, tensor: str | None = None
    ) -> Finding:
        """Return an error as a finding; `where` and `tensor` if the caller knows better than the error.

        Raises an error that came while a file was fetched, as it says nothing about the file.
        """
        if isinstance(error, RemoteError) or error.facts.get("fetching"):
            raise error
        facts = error.facts
        place = where or Where(facts.get("file"), facts.get("offset"), facts.get("nbytes"))
        tensor = tensor or facts.get("tensor")
        return cls(gravity, kind, error.message, place.file, tensor, place.offset, place.nbytes, error.hint)

    def __str__(self) -> str:
        return self.message

    @property
    def subjects(self) -> list[str]:
        """The names of all tensors and objects that it concerns."""
        return list(dict.fromkeys(name for name in (self.tensor, *self.names) if name is not None))

    @property
    def fails(self) -> bool:
        """Whether it is grave: neither a note nor a suspicion."""
        return self.gravity in (DAMAGE, DIFFERENCE, NAN)


def published(fields: type) -> Mapping[str, Any]:
    """Return the metadata of a dataclass's field of findings: of each, `--json` prints the `fields` of a TypedDict."""
    return {"fields": fields}
