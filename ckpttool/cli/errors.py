"""What went wrong -> words on stderr -> exit code. The one place where a command ends otherwise than by returning.

CkptError             error: ... / hint: ...            its own code
typer's usage errors  error: ... / hint: ...            2
Ctrl-C, SIGTERM       interrupted, nothing was written  130, 143
stdout was closed     nothing                           that of the answer, as `| head` has what it wanted
anything else         bug: ... / hint: ...              70, with the traceback under -v or CKPTTOOL_DEBUG=1
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from typer.core import TyperGroup

from ckpttool.cli.terminal import Painted, ReaderGone, err, out
from ckpttool.errors import BUG, DONE, INTERRUPTED, TERMINATED, CkptError, StorageError, UsageError

SCHEMA = "ckpttool/error/1"


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised where Ctrl-C would be."""


class _Stopped(Exception):
    """An interrupt on its way out; typer would turn a KeyboardInterrupt into an exit without a word."""

    def __init__(self, exit_code: int, said: str, kept: bool = False) -> None:
        super().__init__(said)
        self.exit_code = exit_code
        self.kept = kept


def _stop(signum: int, frame: FrameType | None) -> None:
    # A second one must not interrupt the cleaning up that the first one started.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt if signum == signal.SIGINT else Terminated


def catch_signals() -> None:
    """Treat SIGTERM and SIGHUP (a connection that drops) like Ctrl-C: raise in the main thread. What a shell has told
    us to ignore (`&`, `nohup`) stays ignored."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def stopped_early(stop: KeyboardInterrupt) -> int:
    """The last word and the exit code for a signal that came before there was a command line to be read."""
    stopped = _as_stopped(stop)
    return _Report([]).stopped(stopped)


def _as_stopped(stop: KeyboardInterrupt) -> _Stopped:
    code, said = (TERMINATED, "terminated") if isinstance(stop, Terminated) else (INTERRUPTED, "interrupted")
    return _Stopped(code, said, getattr(stop, "kept", False))


def _make_writable() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        # A name in a script that the locale cannot spell is shown escaped.
        getattr(sys, name).reconfigure(errors="backslashreplace")


class Commands(TyperGroup):
    """The group of all commands, ending in an exit code whatever happens."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        _make_writable()
        # typer takes care of completion requests before it looks at standalone_mode.
        code = self._run(words, _Report(words), {**extra, "standalone_mode": False, "prog_name": "ckpttool"})
        _settle_stdout()
        sys.exit(code)

    def _run(self, words: list[str], report: _Report, extra: dict[str, Any]) -> int:
        try:
            code = super().main(words, **extra)
            out().flush()
        except _Stopped as stopped:
            return report.stopped(stopped)
        except ReaderGone as gone:
            return gone.exit_code
        except CkptError as error:
            return report.failed(error)
        except MemoryError:
            return report.failed(StorageError("out of memory", hint="give the process more, or pass `--max-memory`"))
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            said = f"`{error.filename}`: {why}" if error.filename else why
            return report.failed(StorageError(said))
        except Exception as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                return _show_help(error)
            usage = _as_usage_error(error)
            return report.failed(usage) if usage is not None else report.bug(error)
        return code if isinstance(code, int) else DONE

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise _as_stopped(stop) from None


class _Report:
    """Says what went wrong: on stderr for people, on stdout for `--json`."""

    def __init__(self, words: list[str]) -> None:
        # Looked for here, because the command line may be what is wrong.
        flags = words[: words.index("--")] if "--" in words else words
        self._json = "--json" in flags
        self._verbose = any(re.fullmatch(r"--verbose|-[a-zA-Z]*v[a-zA-Z]*", flag) for flag in flags)

    def failed(self, error: CkptError) -> int:
        return self._say("error: ", error.kind, error.message, error.hint, error.exit_code, error.facts)

    def stopped(self, stopped: _Stopped) -> int:
        hint = "the same command goes on from what has been copied" if stopped.kept else None
        return self._say("", str(stopped), f"{stopped}, nothing was written", hint, stopped.exit_code, {})

    def bug(self, error: Exception) -> int:
        if self._verbose or os.environ.get("CKPTTOOL_DEBUG") == "1":
            for line in "".join(traceback.format_exception(error)).splitlines():
                err().line(line)
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        hint = "this is our mistake, not yours: run it again with `-v` and report what it prints"
        return self._say("bug: ", "bug", said, hint, BUG, {})

    def _say(self, title: str, kind: str, message: str, hint: str | None, exit_code: int, facts: dict[str, Any]) -> int:
        try:
            if self._json:
                said = {**facts, "kind": kind, "message": message, "hint": hint, "exit_code": exit_code}
                terminal = out()
                terminal.write(json.dumps({"schema": SCHEMA, "error": said}, default=str) + "\n")
            else:
                terminal = err()
                terminal.line(Painted(title, "red"), message)
                if hint:
                    terminal.line(Painted("hint: ", "dim"), hint)
            terminal.flush()
        except (ReaderGone, StorageError):
            pass  # nobody is there to be told
        return exit_code


def _settle_stdout() -> None:
    """Throw away what stdout did not take: Python would try again at exit, and complain with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_help(error: Any) -> int:
    terminal = err()
    terminal.write(f"{error.ctx.get_help()}\n")
    return UsageError.exit_code


def _as_usage_error(error: Any) -> UsageError | None:
    """typer's complaint in our words: lower case, backticks, and a hint. None for anything else."""
    # typer has kept its classes in different places; what they have in common is how they are asked.
    if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "ckpttool"
    message = _backticks(error.format_message()).strip()
    hint = f"`{command} --help` shows what it takes"
    if type(error).__name__ == "NoSuchOption":
        message = f"`{command}` has no option `{error.option_name}`"
        if error.possibilities:
            hint = f"did you mean `{error.possibilities[0]}`?"
    elif unknown := re.match(r"No such command (`[^`]*`)", message):
        near = re.findall(r"`[^`]*`", message[unknown.end() :])
        message = f"there is no command {unknown[1]}"
        hint = f"did you mean {near[0]}?" if near else f"`{command} --help` lists the commands"
    message = re.sub(r"(?:^|(?<=: ))[A-Z](?=[a-z])", lambda first: first[0].lower(), message)
    return UsageError(message.rstrip("."), hint=hint)


def _backticks(text: str) -> str:
    return re.sub(r"'([^']*)'", r"`\1`", text)
