"""Turns exceptions and signals into a message on stderr and an exit code.

CkptError             error: ... / hint: ...            its own code
usage errors          error: ... / hint: ...            2
Ctrl-C, SIGTERM       interrupted, nothing was written  130, 143
stdout was closed     nothing                           that of the answer: `| head` has read what it needs
anything else         bug: ... / hint: ...              70, with the traceback under -v or CKPTTOOL_DEBUG=1
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from typing import Any

from ckpttool.cli.documents import failure
from ckpttool.cli.parsing import Exit
from ckpttool.cli.signals import Terminated
from ckpttool.cli.terminal import CommandEnded, err, out
from ckpttool.errors import (
    BUG,
    DONE,
    INTERRUPTED,
    TERMINATED,
    CkptError,
    MissingPackageError,
    StorageError,
    why_no_import,
)
from ckpttool.reports.report import Styled, dim
from ckpttool.reports.terminal import ReaderGone
from ckpttool.version import schema


def exit_code_of(command: Any, words: list[str]) -> int:
    """Run `command` with the `words` of the command line, report what goes wrong and return the exit code."""
    _make_writable()
    code = _run(command, words, ErrorPrinter(words))
    try:
        sys.stdout.flush()
    except OSError:
        # Python would try again at exit, and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run(command: Any, words: list[str], report: ErrorPrinter) -> int:
    try:
        code = _invoke(command, words)
        out().flush()
    except KeyboardInterrupt as stop:
        return report.stopped(stop)
    except ReaderGone as gone:
        return gone.exit_code
    except BrokenPipeError:  # typer writes the help by itself
        return DONE
    except CkptError as error:
        return report.failed(error)
    except MemoryError:
        return report.failed(StorageError("out of memory", hint="give the process more, or pass `--max-memory`"))
    except Exception as error:
        return _failed(error, report)
    return code


def _failed(error: Exception, report: ErrorPrinter) -> int:
    if (package := _not_imported(error)) is not None:
        why = why_no_import(package, error)
        absent, is_absent, _ = why.partition(" is not installed")
        hint = f"pip install {absent}" if is_absent else f"`python -c 'import {package}'` shows where it fails"
        return report.failed(MissingPackageError(why, hint=hint, package=package))
    if isinstance(error, OSError):
        reason = (error.strerror or str(error)).lower()
        return report.failed(StorageError(f"`{error.filename}`: {reason}" if error.filename else reason))
    return report.bug(error)


def _not_imported(error: Exception) -> str | None:
    """Return the package of others that raised an error while it was imported."""
    found = str(error.name).partition(".")[0] if isinstance(error, ImportError) and error.name else ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and name not in ("ckpttool", "__main__", "None"):
            found = name
            break
    return found if found not in ("", "ckpttool") else None


def _invoke(command: Any, words: list[str]) -> int:
    try:
        with command.make_context("ckpttool", list(words)) as context:
            command.invoke(context)
    except Exit as stop:
        return stop.exit_code
    except CommandEnded as stop:
        return int(stop.args[0])
    return DONE


def _make_writable() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        # Characters that the locale cannot encode are escaped.
        getattr(sys, name).reconfigure(errors="backslashreplace")


class ErrorPrinter:
    """Prints an error: on stderr for people, on stdout for `--json`."""

    def __init__(self, words: list[str]) -> None:
        # Searched for, because the command line itself may be the error.
        flags = words[: words.index("--")] if "--" in words else words
        self._json = "--json" in flags
        self._verbose = any(re.fullmatch(r"--verbose|-[a-zA-Z]*v[a-zA-Z]*", flag) for flag in flags)

    def failed(self, error: CkptError) -> int:
        return self._print("error: ", error.kind, error.message, error.hint, error.exit_code, error.facts)

    def stopped(self, stop: KeyboardInterrupt) -> int:
        """Report a signal. Return the exit code."""
        kind, exit_code = ("terminated", TERMINATED) if isinstance(stop, Terminated) else ("interrupted", INTERRUPTED)
        if err().is_terminal and not self._json:
            err().write("\n")  # behind the `^C` that the terminal shows
        kept, written = getattr(stop, "kept", False), getattr(stop, "written", "nothing was written")
        hint = "run the same command again to continue from what has been copied" if kept else None
        return self._print("", kind, f"{kind}, {written}", hint, exit_code, {})

    def bug(self, error: Exception) -> int:
        if self._verbose or os.environ.get("CKPTTOOL_DEBUG") == "1":
            for line in "".join(traceback.format_exception(error)).splitlines():
                err().line(line)
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        hint = "this is a mistake in ckpttool: run it again with `-v` and report what it prints"
        return self._print("bug: ", "bug", message, hint, BUG, {})

    def _print(
        self, title: str, kind: str, message: str, hint: str | None, exit_code: int, facts: dict[str, Any]
    ) -> int:
        try:
            if self._json:
                from ckpttool.analysis.describe.format_value import jsonable

                plain = {key: fact.fact() if hasattr(fact, "fact") else fact for key, fact in facts.items()}
                error = failure(kind, message, hint, exit_code, jsonable(plain))
                terminal = out()
                document = {"schema": schema("error"), "exit_code": exit_code, "error": error}
                terminal.write(json.dumps(document) + "\n")
            else:
                terminal = err()
                terminal.paragraph(message, mark=Styled(title, "red"), indent=len(title))
                if hint:
                    terminal.paragraph(hint, mark=dim("hint: "), indent=6)
            terminal.flush()
        except ReaderGone:
            pass
        except StorageError:
            if self._json:  # stdout is full or closed, and stderr may not be
                self._json = False
                return self._print(title, kind, message, hint, exit_code, facts)
        return exit_code
