"""The documents of `--json` that are no result of an operation, and what all have in common."""

from __future__ import annotations

from typing import Any, TypedDict


class Head(TypedDict):
    """What every document has."""

    schema: str  #: name and version of this schema
    exit_code: int  #: exit code of the command


class Judged(Head):
    """What the document of every command has, unless it ends with an error."""

    verdict: str  #: the result in a word
    message: str  #: the result in a sentence, for people


class Format(TypedDict):
    """A format."""

    name: str  #: its name, as in `format` of other documents
    title: str  #: for people
    reads: bool  #: whether it can be read
    writes: bool  #: whether it can be written
    to: str | None  #: its name for `--to`
    suffixes: list[str]  #: suffixes of files from which `convert` chooses it


class Formats(Judged):
    """What `formats --json` prints."""

    formats: list[Format]  #: the formats


class Sample(TypedDict):
    """A sample checkpoint."""

    path: str  #: its path below `destination`
    bytes: int  #: bytes of its files


class Samples(Judged):
    """What `samples --json` prints."""

    destination: str  #: path of the directory, as it was typed
    samples: list[Sample]  #: the checkpoints


class Failure(TypedDict):
    """What is wrong; with other fields (`file`, `tensor`, `found`, `expected`, `lost`) that depend on the error."""

    kind: str  #: kind of error: errors.md
    message: str  #: for people
    hint: str | None  #: what to do, for people
    exit_code: int  #: exit code of the command


class Error(Head):
    """What every command prints with `--json` if something is wrong."""

    error: Failure  #: what is wrong


def failure(kind: str, message: str, hint: str | None, exit_code: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the field `error` of an error."""
    own: Failure = {"kind": kind, "message": message, "hint": hint, "exit_code": exit_code}
    return {**facts, **own}
