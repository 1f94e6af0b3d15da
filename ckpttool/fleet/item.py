"""One checkpoint of a batch: what becomes of it, and what is called for it, in a process of its own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from ckpttool.errors import DONE, CkptError, OverwriteError, UsageError
from ckpttool.producers.open import opened
from ckpttool.storage.stores import Location, local_path
from ckpttool.text import literal, meant
from ckpttool.transfer.threads import Progress
from ckpttool.version import schema

State = Literal["planned", "done", "kept", "present", "failed"]
COMMANDS = ("convert", "export", "verify", "stats")
WRITERS = ("convert", "export")  # the others read, and their documents are written
PAST = {"convert": "converted", "export": "exported", "verify": "verified", "stats": "measured"}


@dataclass(slots=True)
class Item:
    """A checkpoint of a batch, and what became of it."""

    name: str  #: its name
    source: str  #: its path
    destination: str  #: where it goes; empty if that cannot be said
    step: int | None  #: its step, if it has one
    nbytes: int  #: bytes of its files
    state: State = "planned"  #: `done` now, `kept` from an earlier run, `present` (`new`), `failed`, or `planned`
    seconds: float = 0.0  #: duration
    exit_code: int = DONE  #: exit code of the command for this checkpoint
    message: str = ""  #: what the command says of it, for people
    error: dict[str, Any] | None = None  #: what is wrong if it failed, as in `ckpttool/error`

    def fail(self, error: CkptError) -> None:
        """Note an error with which it ended."""
        self.state, self.exit_code, self.message = "failed", error.exit_code, error.message
        self.error = {"kind": error.kind, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}


def function_of(command: str) -> Callable[..., Any]:
    """Return the function of a command. Raises UsageError for one of which there are no batches."""
    # Imported in the processes that need them, of which each needs one.
    match command:
        case "convert":
            from ckpttool.operations.convert import convert as function
        case "export":
            from ckpttool.operations.export import export as function  # type: ignore[assignment]
        case "verify":
            from ckpttool.operations.verify import verify as function  # type: ignore[assignment]
        case "stats":
            from ckpttool.operations.stats import stats as function  # type: ignore[assignment]
        case _:
            hint = meant(command, COMMANDS, "one of `convert`, `export`, `verify` and `stats`")
            raise UsageError(f"`batch` has no command `{command}`", hint=hint)
    return function


def check_options(command: str, options: Mapping[str, Any]) -> None:
    """Raise UsageError for a command that is none, or an option that it does not have."""
    known = {*inspect.signature(function_of(command)).parameters} - {"src", "dst", "path", "progress", "announce"}
    for name in options:
        if name not in known:
            hint = meant(name, sorted(known), "the page of the command lists them")
            raise UsageError(f"`{command}` has no option {literal(name)}", hint=hint)


def carry_out(command: str, src: str, dst: str, options: Mapping[str, Any], progress: Progress) -> tuple[int, str]:
    """Call a command, and return its exit code and message. What one that only reads answers is written to `dst`.
    Raises the errors of the command."""
    call = function_of(command)
    if command in WRITERS:
        result = call(src, dst, **options, progress=progress)
    else:
        result = call(src, **options, progress=progress)
        with local_path(dst).stage(overwrite=False, is_file=True) as stage:
            stage.path.put("".join(result.json()).encode())
    return result.exit_code, result.message


def confirm(command: str, src: str, dst: str, options: Mapping[str, Any], progress: Progress) -> tuple[int, str]:
    """Return the same for what lies at `dst` already, if that is what the command writes there: it opens, and its files
    have the planned sizes, or a document is about the same. It appeared in one step, so that it is whole. Raises
    OverwriteError if it is something else, and the errors of the command."""
    location, code = local_path(dst), DONE
    if command in WRITERS:
        call = function_of(command)
        if options.get("manifest"):
            with suppress(OverwriteError):  # which it raises after it has written the manifest that is missing
                call(src, dst, **options, progress=progress)
        plan = call(src, dst, **{**options, "overwrite": True, "dry_run": True}, progress=progress)
        # Indexes and what is copied beside the state are in no plan; they are there if it opens.
        sizes = _sizes(location)
        is_same = bool(plan.files) and all(sizes.get(file.path) == file.nbytes for file in plan.files)
        if is_same:
            with opened(dst):
                pass
    else:
        document = _document(location)
        is_same, code = document.get("schema") == schema(command) and document.get("path") == src, document["exit_code"]
    if not is_same:
        text = f"`{dst}` exists, and is not what would be written there"
        raise OverwriteError(text, hint="`--new` leaves it alone", file=dst)
    return code, f"a run that was killed has written {dst}"


def _document(location: Location) -> dict[str, Any]:
    with suppress(ValueError):
        document = json.loads(location.read())
        if isinstance(document, dict):
            return {"exit_code": DONE, **document}
    return {"exit_code": DONE}


def _sizes(location: Location) -> dict[str, int]:
    if location.is_file():
        return {location.name: location.size()}
    return {name: (location / name).size() for name in location.below()}
