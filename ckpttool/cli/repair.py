"""`ckpttool repair`: a copy in which everything is put right that can be without guessing."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

import typer

from ckpttool.cli.options import AsJson, DryRun, Overwrite, Quiet, Source, Threads
from ckpttool.cli.progress import Progress
from ckpttool.cli.terminal import Painted, bold, dim, err, out
from ckpttool.text import duration, plural, size


def repair(
    src: Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="The directory to write, like `cp`.")],
    merge: Annotated[
        list[str] | None,
        typer.Option("--merge", metavar="DIR", help="A directory of another node with files of this save. Repeatable."),
    ] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="OTHER", help="Another step of the run, for a lost `.metadata`.")
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a copy with everything put right that can be without guessing, and verify it.

    DST appears whole or not at all.
    """
    import ckpttool

    with ExitStack() as stack:
        progress = None if quiet or as_json else stack.enter_context(Progress(err()))
        made = ckpttool.repair(
            src, dst, merge=merge or (), like=like, overwrite=overwrite, dry_run=dry_run, threads=threads,
            progress=progress,
        )  # fmt: skip
    terminal = out()
    if as_json:
        terminal.write(json.dumps({"schema": "ckpttool/repair/1", **asdict(made)}) + "\n")
    elif not quiet:
        terminal.line("would write " if made.dry_run else "wrote ", bold(made.destination))
        rows = [
            *zip(("done", *[""] * len(made.done)), made.done, strict=False),
            ("files", f"{plural(made.files, 'file')}, {size(made.bytes)}"),
            ("checked", f"{plural(made.records, 'checksum')} over {size(made.checked)}"),
            ("time", duration(made.seconds)),
        ]
        terminal.table([(dim(title), text) for title, text in rows], cut=(1,), prose=(1,))
        for note in made.notes:
            err().line(Painted("warning: ", "yellow"), note)
