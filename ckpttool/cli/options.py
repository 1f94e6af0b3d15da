"""Options that several commands share, each defined once: the same flag means the same thing everywhere."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_format(incomplete: str) -> list[str]:
    """Names of formats that can be written, for the shell's completion."""
    from ckpttool.formats import FORMATS

    return [row.target for row in FORMATS if row.create and row.target.startswith(incomplete)]


def complete_producer(incomplete: str) -> list[str]:
    """Layouts that can be written, for the shell's completion."""
    from ckpttool.producers.writable import WRITABLE

    return [row.name for row in WRITABLE if row.name.startswith(incomplete)]


def complete_part(incomplete: str) -> list[str]:
    """Kinds of parts, for the shell's completion."""
    from ckpttool.catalogue.entries import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="A checkpoint: a file, a directory, a run directory, or a quoted pattern of rank files."
    ),
]
Source = Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to read. It is never touched.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST. The old one stays until the new one is complete.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from what an interrupted run has copied, after checking it; keep it when this one stops.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Show the plan and write nothing.")]
Threads = Annotated[
    int | None, typer.Option("--threads", "-j", metavar="N", min=1, help="How many threads move bytes.")
]
MaxMemory = Annotated[
    str | None, typer.Option("--max-memory", metavar="SIZE", help="Bound the buffers: 2GB, 512MiB, ...")
]
Check = Annotated[bool, typer.Option("--check", help="Read DST back and compare it with SRC before it gets its name.")]
Manifest = Annotated[
    str | None,
    typer.Option("--manifest", metavar="FILE", help="Write a manifest of DST too: SHA-256 by file and tensor."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, errors too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print bare values only, and no progress.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Leave nothing out; show where a bug of ours is.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="PART", autocompletion=complete_part,
        help="Only this part (model, optimizer, ...; or its key). Repeatable.",
    ),
]  # fmt: skip
Drop = Annotated[
    list[str] | None,
    typer.Option("--drop", metavar="PART", autocompletion=complete_part, help="Not this part. Repeatable."),
]
Shapes = Annotated[
    str | None,
    typer.Option(
        "--shapes", metavar="FROM",
        help="Who knows the parameters in their order: a checkpoint, or JSON. For flat files and numbered optimizers.",
    ),
]  # fmt: skip
Tensors = Annotated[
    list[str] | None,
    typer.Option(
        "--tensors", metavar="GLOB",
        help="Only tensors whose dotted name matches; `*` crosses dots, `re:` begins a regular expression. Repeatable.",
    ),
]  # fmt: skip
