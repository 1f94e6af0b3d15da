"""The documents of `--json` that are not results of an operation, and what all have in common."""

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


class ErrorFields(TypedDict):
    """What is wrong; with other fields (`file`, `tensor`, `found`, `expected`, `lost`) that depend on the error."""

    kind: str  #: kind of error: errors.md
    message: str  #: for people
    hint: str | None  #: what to do, for people
    exit_code: int  #: exit code of the command


class Error(Head):
    """What every command prints with `--json` if something is wrong."""

    error: ErrorFields  #: what is wrong


def failure(kind: str, message: str, hint: str | None, exit_code: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the field `error` of an error."""
    own: ErrorFields = {"kind": kind, "message": message, "hint": hint, "exit_code": exit_code}
    return {**facts, **own}
