"""Turns exceptions and signals into a message on stderr and an exit code.

CkptError             error: ... / hint: ...            its own code
click's usage errors  error: ... / hint: ...            2
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

import click

from ckpttool.cli.documents import failure
from ckpttool.cli.signals import Terminated
from ckpttool.cli.terminal import err, out
from ckpttool.errors import (
    BUG,
    DONE,
    INTERRUPTED,
    TERMINATED,
    CkptError,
    MissingPackageError,
    StorageError,
    UsageError,
    why_no_import,
)
from ckpttool.reports.report import Styled, dim
from ckpttool.reports.terminal import ReaderGone
from ckpttool.text import near_names
from ckpttool.version import schema

# What other tools call the commands.
_SYNONYMS = {
    **dict.fromkeys(("info", "ls", "list", "tree", "summary"), "`inspect`"),
    **dict.fromkeys(("cat", "print", "head"), "`show`"),
    **dict.fromkeys(("statistics", "describe", "health"), "`stats`"),
    **dict.fromkeys(("compare", "cmp"), "`diff`"),
    **dict.fromkeys(("validate", "fsck"), "`verify`"),
    "fix": "`repair`",
    "consolidate": "`convert SRC out.pt`, which writes one file",
    "merge": "`convert SRC out.pt`, which writes one file, or `repair --merge`, for the directories of several nodes",
    "split": "`convert --max-shard-size` or `reshard --to-world`",
    **dict.fromkeys(("upload", "push", "publish"), "`export SRC hf://org/name`"),
    "download": "`convert hf://org/name DST`",
    **dict.fromkeys(("audit", "trial", "resume"), "`verify-resume`"),
    "version": "`ckpttool --version`",
    "help": "`ckpttool --help`",
    "completion": "`ckpttool --install-completion`",
}

_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)")
# click's words for a number that an option does not take, and ours.
_NUMBERS = (
    (r"(\S+) is not in the range x>=(\d+)", r"\1 is less than \2"),
    (r"(\S+) is not a valid integer( range)?", r"\1 is not a whole number"),
    (r"(\S+) is not a valid float( range)?", r"\1 is not a number"),
)


def exit_code_of(command: click.Command, words: list[str]) -> int:
    """Run `command` with the `words` of the command line, report what goes wrong and return the exit code."""
    _make_writable()
    code = _run(command, words, Report(words))
    try:
        sys.stdout.flush()
    except OSError:
        # Python would try again at exit, and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run(command: click.Command, words: list[str], report: Report) -> int:
    try:
        code = _invoke(command, words)
        out().flush()
    except KeyboardInterrupt as stop:
        return report.stopped(stop)
    except ReaderGone as gone:
        return gone.exit_code
    except BrokenPipeError:  # click writes the help by itself
        return DONE
    except CkptError as error:
        return report.failed(error)
    except MemoryError:
        return report.failed(StorageError("out of memory", hint="give the process more, or pass `--max-memory`"))
    except Exception as error:
        return _failed(error, command, words, report)
    return code


def _failed(error: Exception, command: click.Command, words: list[str], report: Report) -> int:
    if (package := _not_imported(error)) is not None:
        why = why_no_import(package, error)
        absent, is_absent, _ = why.partition(" is not installed")
        hint = f"pip install {absent}" if is_absent else f"`python -c 'import {package}'` shows where it fails"
        return report.failed(MissingPackageError(why, hint=hint, package=package))
    if isinstance(error, OSError):
        reason = (error.strerror or str(error)).lower()
        return report.failed(StorageError(f"`{error.filename}`: {reason}" if error.filename else reason))
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        err().write(f"{error.format_message()}\n")
        return UsageError.exit_code
    if isinstance(error, click.UsageError):
        return report.failed(_translate(error, command, words))
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


def _invoke(command: click.Command, words: list[str]) -> int:
    try:
        with command.make_context("ckpttool", list(words)) as context:
            command.invoke(context)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    return DONE


def _make_writable() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        # Characters that the locale cannot encode are escaped.
        getattr(sys, name).reconfigure(errors="backslashreplace")


class Report:
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
        kept = getattr(stop, "kept", False)
        hint = "run the same command again to continue from what has been copied" if kept else None
        return self._print("", kind, f"{kind}, nothing was written", hint, exit_code, {})

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
        except (ReaderGone, StorageError):
            pass  # the stream is closed or full, and there is no other
        return exit_code


def _translate(error: click.UsageError, application: click.Command, words: list[str]) -> UsageError:
    """Return click's error with our wording: lower case, backticks, and a hint."""
    context = error.ctx
    if context is None:  # the parser raises without one
        context = click.Context(application, info_name="ckpttool")
        if isinstance(application, click.Group) and words and (named := application.get_command(context, words[0])):
            context = click.Context(named, context, words[0])
    command = context.command_path
    message = re.sub(r"'([^']*)'", r"`\1`", error.format_message()).strip()
    hint = f"`{command} --help` shows what it takes"
    if isinstance(error, click.NoSuchOption):
        message = f"`{command}` has no option `{error.option_name}`"
        if error.possibilities:
            hint = f"did you mean `{error.possibilities[0]}`?"
    elif isinstance(error, click.MissingParameter) and error.param is not None and error.param.name == "recipe":
        hint = _recipe_meant(command, words[len(command.split()) - 1 :])
    elif isinstance(error, click.exceptions.NoSuchCommand):
        message = f"there is no command `{error.command_name}`"
        hint = _command_meant(error.command_name, context)
    elif extra := _EXTRA.fullmatch(message):
        message = f"too many arguments: `{extra[1]}`"
        takes = [param.make_metavar(context) for param in context.command.params if isinstance(param, click.Argument)]
        hint = f"`{' '.join([command, *takes])}` is all; {hint}"
    for pattern, plain in _NUMBERS:
        message = re.sub(pattern, plain, message)
    message = re.sub(r"(?:^|(?<=: ))[A-Z](?=[a-z])", lambda first: first[0].lower(), message)
    return UsageError(message.rstrip("."), hint=hint)


def _recipe_meant(command: str, words: list[str]) -> str:
    """Return the hint for a recipe that is not given, or given as if it were a checkpoint."""
    recipe = next((word for word in words if word.endswith(".py")), None)
    if recipe is None:
        return "`ckpttool verify-resume init` writes a recipe, a Python file; name it with `--recipe FILE`"
    rest = [word for word in words if word != recipe]
    return f"`{' '.join([command, *rest, '--recipe', recipe])}`"


def _command_meant(name: str, context: click.Context) -> str:
    """Return the hint for a word that is not a command."""
    from ckpttool.storage.stores import is_remote

    group = context.command
    names = group.list_commands(context) if isinstance(group, click.Group) else []
    near = near_names(name, names)
    if meant := _SYNONYMS.get(name) or (f"`{near[0]}`" if near else None):
        return f"did you mean {meant}?"
    if names and (os.path.lexists(name) or is_remote(name)):
        return f"the command comes first: `{context.command_path} {names[0]} {name}`"
    return f"`{context.command_path} --help` lists the commands"
