"""What the results of operations have in common: a verdict, a message, an exit code, and how they become JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any, ClassVar, NamedTuple

from ckpttool.analysis.describe.format_value import jsonable
from ckpttool.errors import DONE
from ckpttool.version import schema


class FileSize(NamedTuple):
    """A file and its size: `FileSize("model.safetensors", 7226)`."""

    path: str  #: path below the checkpoint
    nbytes: int  #: its size


class Absent:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "-"


ABSENT = Absent()


class Result:
    """The result of an operation. Its `repr` is one line; `as_dict` is what the command prints with `--json`."""

    __slots__ = ()
    command: ClassVar[str]

    @property
    def verdict(self) -> str:
        """The result in a word."""
        raise NotImplementedError

    @property
    def message(self) -> str:
        """The result in a sentence."""
        raise NotImplementedError

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return DONE

    @property
    def lines(self) -> Iterable[str]:
        """What the command prints with `--quiet`."""
        return ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.message}>"

    def json(self) -> Iterable[str]:
        """Return the document as JSON text, in pieces."""
        return (json.dumps(self.as_dict()), "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the document that the command prints with `--json`: docs/reference/json.md."""
        document: dict[str, Any] = {"schema": schema(self.command), "exit_code": self.exit_code}
        return document | {"verdict": self.verdict, "message": self.message, **as_json(self)}


class Written(Result):
    """The result of an operation that writes a checkpoint, or its plan."""

    __slots__ = ()
    destination: str
    dry_run: bool
    notes: list[str]

    @property
    def contents(self) -> str:
        """What is in it."""
        raise NotImplementedError

    @property
    def verdict(self) -> str:
        """`written`; for a dry run `planned`, or `refused` if the real run would end with an error."""
        if not self.dry_run:
            return "written"
        return "refused" if self.exit_code else "planned"

    @property
    def message(self) -> str:
        """What was written, or would be, or why it would not."""
        if self.verdict == "refused":
            return f"would not write {self.destination}: {'; '.join(self.notes)}"
        return f"{'would write' if self.dry_run else 'wrote'} {self.destination}: {self.contents}"


_SMALL = 1 << 53  # in magnitude; what `jsonable` does with other integers is its own


@cache
def _fields(kind: type) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the names of the fields of a dataclass, and of those that are tables, with their columns."""
    tables = [(one.name, one.metadata["fields"]) for one in fields(kind) if "fields" in one.metadata]
    return [one.name for one in fields(kind)], [(name, [*of.__annotations__]) for name, of in tables]


def as_json(value: Any) -> Any:
    """Return `value` with its fields by name, for JSON; those whose name begins with `_` or that are `ABSENT` are left
    out. Pure."""
    kind: Any = type(value)
    if kind is str or kind is bool or value is None or (kind is int and -_SMALL < value < _SMALL):
        return value  # as most are: the statistics of 660 tensors are 340,000 numbers
    if kind is float:
        return value if isfinite(value) else str(value)
    if is_dataclass(value):
        names, tables = _fields(kind)
        named = {name: getattr(value, name) for name in names}
        for name, keys in tables:
            named[name] = [{key: getattr(each, key) for key in keys} for each in named[name]]
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        named = value._asdict()
    elif isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()} if value else {}
    elif isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    else:
        return jsonable(value)
    return {name: as_json(each) for name, each in named.items() if not (name.startswith("_") or each is ABSENT)}
