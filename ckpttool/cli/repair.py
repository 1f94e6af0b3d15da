"""`ckpttool repair`: a repaired copy, by lossless fixes only."""

from __future__ import annotations

from typing import Any

from ckpttool.cli import options
from ckpttool.cli.options import Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import answer, bold, err
from ckpttool.text import duration, plural, size

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

    with progress_on_stderr(not (quiet or as_json)) as progress:
        result = ckpttool.repair(**arguments, progress=progress)
    with answer(result.exit_code) as terminal:
        if as_json:
            terminal.json(result.as_dict())
        elif not quiet and not result.done:
            terminal.line(result.message)
            terminal.facts([("checked", f"{plural(result.records, 'checksum')} over {size(result.checked_bytes)}")])
        elif not quiet:
            terminal.line("would write " if result.dry_run else "wrote ", bold(result.destination))
            rows = [
                *zip(("done", *[""] * len(result.done)), result.done, strict=False),
                ("files", f"{plural(len(result.files), 'file')}, {size(result.file_bytes)}"),
                ("checked", f"{plural(result.records, 'checksum')} over {size(result.checked_bytes)}"),
                ("time", duration(result.seconds)),
            ]
            terminal.facts(rows)
            err().warnings(result.notes)
