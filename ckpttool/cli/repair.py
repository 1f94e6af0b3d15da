"""`ckpttool repair`: a repaired copy, by lossless fixes only."""

from __future__ import annotations

from functools import partial
from typing import Any

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.options import Option

_NO_MANIFEST = Option("--no-manifest", "Leave out the manifest that a DCP directory carries.")


@options.command(
    "repair",
    arguments=(options.SOURCE, options.reworded(options.DESTINATION, "The directory to write, with missing parents.")),
    sections={
        "Selection": (
            Option("--merge DIR...", "Directory of another node with files of the same save. Repeatable."),
            Option("--like OTHER", "Another step of the same run, to rebuild a missing `.metadata` from."),
        ),
        "Execution": (options.OVERWRITE, options.DRY_RUN, options.THREADS, _NO_MANIFEST),
        "Output": (options.AS_JSON, options.QUIET),
    },
    examples=("node0/step-1000 repaired --merge node1/step-1000", "step-1000 repaired --like step-900"),
)
def repair(as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Write a repaired copy of a checkpoint, with lossless fixes only, and verify it.

    DST is written completely or not at all.
    """
    import ckpttool
    from ckpttool.operations.repair import blocks

    respond(partial(ckpttool.repair, **arguments), blocks, as_json=as_json, quiet=quiet)
