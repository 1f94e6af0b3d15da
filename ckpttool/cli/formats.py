"""`ckpttool formats`: the table of formats."""

from __future__ import annotations

from ckpttool.cli import options
from ckpttool.cli.answer import respond


def formats(*, as_json: options.AsJson = False, quiet: options.Quiet = False) -> None:
    """List the formats that can be read and written.

    Examples:
        ckpttool formats --json
    """
    from ckpttool.operations.formats import blocks
    from ckpttool.operations.formats import formats as listed

    respond(listed, blocks, as_json=as_json, quiet=quiet, shows_progress=False)
