"""`ckpttool clean`: what failed runs left in a directory."""

from __future__ import annotations

from functools import partial

from ckpttool.cli import options
from ckpttool.cli.answer import respond


def clean(
    directory: options.Directory, *,
    yes: options.Yes = False,
    as_json: options.AsJson = False, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """List what failed runs left in a directory, or remove it.

    These are partial outputs, old destinations that were being replaced, and temporary files. Directories that a run
    is using are left alone, and so is everything that is not provably from a run of yours.

    Examples:
        ckpttool clean runs
        ckpttool clean runs --yes
    """
    import ckpttool
    from ckpttool.operations.clean import blocks

    call = partial(ckpttool.clean, directory, yes=yes)
    respond(call, blocks, as_json=as_json, quiet=quiet, shows_progress=False)
