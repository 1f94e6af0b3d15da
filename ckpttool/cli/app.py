"""The command line's entry point: which commands there are, and `--version`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from ckpttool.cli.failures import Commands, catch_signals, stopped_early
from ckpttool.cli.parsing import without_adapters
from ckpttool.cli.terminal import out
from ckpttool.errors import INTERRUPTED, TERMINATED
from ckpttool.version import __version__

without_adapters()
# The module of each command, in the order of `--help`. Describing one takes as long as inspecting a checkpoint: of a
# command that is named on the command line no other one is imported.
COMMANDS = {
    "inspect": "inspect",
    "show": "show",
    "diff": "diff",
    "verify": "verify",
    "repair": "repair",
    "convert": "convert",
    "export": "export",
    "reshard": "reshard",
    "formats": "formats",
    "verify-resume": "verifyresume",
}


def application(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """The command line with these commands."""
    made = typer.Typer(
        name="ckpttool",
        cls=Commands,
        help="Inspect, convert and reshard PyTorch training checkpoints: torch.save, DCP and safetensors, bit for bit.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_root)
    for name in names:
        command = getattr(import_module(f"ckpttool.cli.{COMMANDS[name]}"), name.replace("-", "_"))
        if isinstance(command, typer.Typer):
            made.add_typer(command)
        else:
            made.command()(command)
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


def main() -> None:
    """`ckpttool`, as the shell calls it."""
    catch_signals()
    silent = False
    if "WORLD_SIZE" in os.environ:
        # Only under torchrun: it imports much of what writes.
        from ckpttool import sharing

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
