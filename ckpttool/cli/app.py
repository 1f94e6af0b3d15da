"""The command line's entry point: which commands there are, and `--version`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, NamedTuple

import typer

from ckpttool.cli.errors import Commands, catch_signals, stopped_early
from ckpttool.cli.parsing import without_adapters
from ckpttool.cli.terminal import out
from ckpttool.errors import INTERRUPTED, TERMINATED
from ckpttool.version import __version__

without_adapters()


class Command(NamedTuple):
    """Where a command is described, and what `--help` says of it in a line of 80 columns."""

    module: str
    summary: str


# In the order of `--help`. Describing a command takes as long as inspecting a checkpoint: of one that is named on the
# command line no other one is imported.
COMMANDS = {
    "inspect": Command("inspect", "What a checkpoint holds, without reading its weights."),
    "show": Command("show", "One tensor: where it lies, values, mean, norm, NaN."),
    "diff": Command("diff", "How two checkpoints differ, of any formats and worlds."),
    "verify": Command("verify", "Is it whole? Every checksum, size and range is compared."),
    "repair": Command("repair", "A copy with everything put right that needs no guess."),
    "convert": Command("convert", "Any format to any other, bit for bit, optimizer and all."),
    "export": Command("export", "The model for transformers, vLLM and the Hub."),
    "reshard": Command("reshard", "Onto another number of ranks, or another mesh."),
    "formats": Command("formats", "What can be read and written."),
    "verify-resume": Command("verifyresume", "Does training go on as if nothing had happened?"),
}


def application(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """The command line with these commands."""
    made = typer.Typer(
        name="ckpttool",
        cls=Commands,
        help="Inspect, convert, reshard, compare, verify and publish the checkpoints of PyTorch training, bit for bit.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_root)
    for name in names:
        module, summary = COMMANDS[name]
        command = getattr(import_module(f"ckpttool.cli.{module}"), name.replace("-", "_"))
        if isinstance(command, typer.Typer):
            made.add_typer(command, short_help=summary)
        else:
            made.command(short_help=summary)(command)
    return made


def _asked() -> Iterable[str]:
    """The command that the command line names, or all."""
    first = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    return (first,) if first in COMMANDS else COMMANDS


def _version(wanted: bool) -> None:
    if wanted:
        out().line(f"ckpttool {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def collect_rarely() -> None:
    """What a command makes is needed until it ends: looking through it for garbage, again and again and once more at
    the end, is a sixth of a short command."""
    gc.set_threshold(20_000, 20, 20)
    atexit.register(gc.freeze)


def main() -> None:
    """`ckpttool`, as the shell calls it."""
    catch_signals()
    collect_rarely()
    silent = False
    if "WORLD_SIZE" in os.environ:
        # Only under torchrun: it imports much of what writes.
        from ckpttool.transfer import processes as sharing

        silent = sharing.is_silent()
    if silent:
        # Of several processes all are needed for what is shared, one for the rest; only one speaks.
        if not {"reshard", "trial"} & {*sys.argv[1:]}:
            return
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        application(_asked())(prog_name="ckpttool")
    except KeyboardInterrupt as stop:
        # No command has begun yet.
        sys.exit(stopped_early(stop))
    except SystemExit as stop:
        if stop.code in (INTERRUPTED, TERMINATED):
            # All is said and cleaned up. A thread may be in the middle of importing torch, whose own threads abort an
            # ordinary exit.
            sys.stderr.flush()
            os._exit(stop.code)
        if silent and stop.code:
            sharing.wait_to_be_ended()
        raise
