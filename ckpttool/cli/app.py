"""The command line's entry point: which commands there are, and `--version`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ckpttool import sharing
from ckpttool.cli.convert import convert
from ckpttool.cli.diff import diff
from ckpttool.cli.export import export
from ckpttool.cli.failures import Commands, catch_signals, stopped_early
from ckpttool.cli.formats import formats
from ckpttool.cli.inspect import inspect
from ckpttool.cli.parsing import without_adapters
from ckpttool.cli.repair import repair
from ckpttool.cli.reshard import reshard
from ckpttool.cli.show import show
from ckpttool.cli.terminal import out
from ckpttool.cli.verify import verify
from ckpttool.cli.verifyresume import verify_resume
from ckpttool.errors import INTERRUPTED, TERMINATED
from ckpttool.version import __version__

without_adapters()
app = typer.Typer(
    name="ckpttool",
    cls=Commands,
    help="Inspect, convert and reshard PyTorch training checkpoints: torch.save, DCP and safetensors, bit for bit.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        out().line(f"ckpttool {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (inspect, show, diff, verify, repair, convert, export, reshard, formats):
    app.command()(command)
app.add_typer(verify_resume)


def main() -> None:
    """`ckpttool`, as the shell calls it."""
    catch_signals()
    silent = sharing.is_silent()
    if silent:
        # torchrun started several of us. All are needed for what is shared, one for the rest; only one speaks.
        if not {"reshard", "trial"} & {*sys.argv[1:]}:
            return
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        app(prog_name="ckpttool")
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
