"""The command line's entry point: the commands, `--version` and shell completion."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import click

from ckpttool.cli.error_messages import Report, exit_code_of
from ckpttool.cli.options import Option
from ckpttool.cli.signals import catch_signals
from ckpttool.cli.terminal import out
from ckpttool.errors import INTERRUPTED, TERMINATED, UsageError
from ckpttool.version import __version__

_MAX_WIDTH = 160  # columns of `--help`, on a terminal that has them
_COMPLETE = "_CKPTTOOL_COMPLETE"  # the variable in which a completion script asks


# In the order of `--help`, with their lines there, of at most 60 characters. A command's module is imported when the
# command is run.
COMMANDS = {
    "inspect": "Show what a checkpoint holds, without reading its weights.",
    "show": "Show one tensor: shards, values, mean, norm, NaN.",
    "stats": "Compute statistics of every tensor, layer and moment.",
    "browse": "Walk through a checkpoint in the terminal.",
    "report": "Write statistics, shards and findings as one HTML file.",
    "diff": "Compare two checkpoints of any format and world size.",
    "check": "Check that a model fits a released one: names, shapes, ties.",
    "match": "Find how a released model's tensors are made: a key map.",
    "verify": "Check that a checkpoint is whole: every checksum and range.",
    "repair": "Write a repaired copy, with lossless fixes only.",
    "convert": "Convert to another format, bit for bit.",
    "export": "Export the model for transformers, vLLM and the Hub.",
    "reshard": "Reshard for another number of ranks or another mesh.",
    "clean": "List or remove what failed runs left in a directory.",
    "samples": "Write small real checkpoints to try the commands on.",
    "formats": "List the formats that can be read and written.",
    "verify-resume": "Check that training resumes exactly from a checkpoint.",
}


class Application(click.Group):
    """The group of all commands. It imports the one that is run, and ends in an exit code whatever happens."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        function = name.replace("-", "_")
        command: click.Command = getattr(import_module(f"ckpttool.cli.{function}"), function)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        if instruction := os.environ.get(_COMPLETE):
            from click.shell_completion import shell_complete

            sys.exit(shell_complete(self, {}, "ckpttool", _COMPLETE, instruction))
        words = list(sys.argv[1:] if args is None else args)
        sys.exit(exit_code_of(self, words))


def _print_version(context: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        out().line(f"ckpttool {__version__}")
        context.exit()


def _completion_script(shell: str) -> tuple[str, str]:
    """Return the shell's name (`$SHELL` if `shell` is empty) and its script. Raises UsageError for other shells."""
    from click.shell_completion import get_completion_class

    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    complete = get_completion_class(name)
    if complete is None:
        raise UsageError(f"there is no completion for the shell `{name}`", hint="name one: bash, zsh or fish")
    return name, complete(Application(), {}, "ckpttool", _COMPLETE).source()


def _show_completion(context: click.Context, param: click.Parameter, shell: str | None) -> None:
    if shell is not None:
        out().write(_completion_script(shell)[1])
        context.exit()


def _install_completion(context: click.Context, param: click.Parameter, shell: str | None) -> None:
    if shell is None:
        return
    name, script = _completion_script(shell)
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    folder = os.path.join(config, "fish/completions" if name == "fish" else "ckpttool")
    path = os.path.join(folder, "ckpttool.fish" if name == "fish" else f"completion.{name}")
    os.makedirs(folder, exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(script)
    if name != "fish":  # fish reads its folder by itself
        startup, line = os.path.expanduser(f"~/.{name}rc"), f'source "{path}"\n'
        with open(startup, "a+", encoding="utf-8") as stream:
            stream.seek(0)
            if line not in stream.read():
                stream.write(line)
    out().line(f"wrote {path}; it is used by each new {name}")
    context.exit()


def application() -> Application:
    """Return the command line."""
    return Application(
        name="ckpttool",
        help="Inspect, convert, reshard, compare, verify and export PyTorch training checkpoints, bit for bit.",
        epilog="`ckpttool COMMAND --help` shows a command's options and examples.\n\nMore: docs/reference/cli.md",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _MAX_WIDTH},
        params=[
            _immediate("--version", _print_version, "Print the version and exit."),
            _immediate("--install-completion [SHELL]", _install_completion, "Install completion (bash, zsh, fish)."),
            _immediate("--show-completion [SHELL]", _show_completion, "Print the completion script."),
        ],
    )


def _immediate(usage: str, callback: Callable[..., None], help: str) -> Option:
    """Return an option that is done at once, whatever else is on the command line. The shell may be left out."""
    shell: dict[str, Any] = {"flag_value": "", "is_flag": False} if "[" in usage else {}
    return Option(usage, help, is_eager=True, expose_value=False, callback=callback, **shell)


def collect_rarely() -> None:
    """Run the garbage collector rarely. Nearly everything that a command allocates is needed until it ends, and
    looking through it again and again takes a sixth of a short command."""
    gc.set_threshold(20_000, 20, 20)
    atexit.register(gc.freeze)


def calculate_on_one_thread() -> None:
    """Let numpy start no threads of BLAS: each spins for 0.1 s, and next to nothing is calculated with them."""
    # Their own where they matter: the scripts of people inherit the environment.
    if not {"verify-resume", "--spectral"} & {*sys.argv[1:]}:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main() -> None:
    """`ckpttool`, as the shell calls it."""
    catch_signals()
    collect_rarely()
    calculate_on_one_thread()
    silent = False
    if "WORLD_SIZE" in os.environ:
        # Only under torchrun: it imports much of what writes.
        from ckpttool.transfer import processes

        silent = processes.is_silent()
    if silent:
        # All processes divide the work of these two; one does the rest, and one prints.
        if not {"reshard", "trial"} & {*sys.argv[1:]}:
            return
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        application().main()
    except KeyboardInterrupt as stop:
        # No command has begun yet.
        sys.exit(Report([]).stopped(stop))
    except SystemExit as stop:
        if stop.code in (INTERRUPTED, TERMINATED):
            # A thread may be in the middle of importing torch, whose own threads abort an ordinary exit.
            sys.stderr.flush()
            os._exit(stop.code)
        if silent and stop.code:
            processes.wait_to_be_ended()
        raise
