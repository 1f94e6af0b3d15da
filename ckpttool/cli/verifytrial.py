"""`ckpttool verify-resume trial`: trains, resumes, and compares."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.errors import UsageError


def trial(
    recipe: Annotated[str, typer.Option("--recipe", metavar="FILE", help="The Python file that builds and steps.")],
) -> None:
    """Train, save, resume in fresh processes, and compare everything bit for bit."""
    raise UsageError(f"`{recipe}` cannot be tried yet")
