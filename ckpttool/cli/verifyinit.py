"""`ckpttool verify-resume init`: a recipe to begin with."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.errors import UsageError


def init(path: Annotated[str, typer.Argument(metavar="FILE", help="The file to write.")] = "recipe.py") -> None:
    """Write a commented recipe that runs as it is, to be changed into yours."""
    raise UsageError(f"`{path}` cannot be written yet")
