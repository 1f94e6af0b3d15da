"""`ckpttool verify-resume init`: a recipe to begin with."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.cli.options import Quiet
from ckpttool.cli.terminal import bold, dim, out


def init(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to write; nothing is overwritten.")
    ] = "recipe.py",
    quiet: Quiet = False,
) -> None:
    """Write a commented recipe that runs as it is, to be changed into yours."""
    from ckpttool.operations.verify_resume.recipe import write

    write(path)
    terminal = out()
    if quiet:
        terminal.line(path)
        return
    terminal.line("wrote ", bold(path))
    terminal.line(dim("  try it   "), f"ckpttool verify-resume trial --recipe {path}")
    terminal.line(dim("  then     "), "put your model, your optimizer and your data in")
