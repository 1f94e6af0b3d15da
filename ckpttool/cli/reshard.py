"""`ckpttool reshard`: onto another number of ranks, or another mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli.conversion_result import tell
from ckpttool.cli.options import (
    AsJson,
    Check,
    Drop,
    DryRun,
    Manifest,
    MaxMemory,
    Only,
    Overwrite,
    Quiet,
    Resume,
    Shapes,
    Source,
    Threads,
    Verbose,
)
from ckpttool.cli.progress import Progress
from ckpttool.cli.terminal import err
from ckpttool.text import plural

if TYPE_CHECKING:
    from ckpttool import Resharding


def reshard(
    src: Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="The directory to write, like `cp`.")],
    to_world: Annotated[
        int | None, typer.Option("--to-world", metavar="N", help="Onto N ranks, as FSDP cuts parameters.")
    ] = None,
    to_mesh: Annotated[
        str | None,
        typer.Option("--to-mesh", metavar="MESH", help="Onto a mesh: shard=4,tp=2 or replicate=2,shard=4."),
    ] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="OTHER", help="With the chunks and ranks of another checkpoint.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="FORMAT", help="dcp or fsdp1; by default as SRC, and dcp for a file.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="bytes copies; mesh loads into torch, on as many processes as ranks, and is the default there.",
        ),
    ] = None,
    placements: Annotated[
        list[str] | None,
        typer.Option(
            "--placements",
            metavar="GLOB=DIM:N",
            help="Cut parameters by a mesh dimension along theirs: 'layers.*.wq.weight=tp:0'; or @FILE. Repeatable.",
        ),
    ] = None,
    shard: Annotated[
        list[str] | None, typer.Option("--shard", metavar="GLOB", help="These are parameters: cut them. Repeatable.")
    ] = None,
    replicate: Annotated[
        list[str] | None,
        typer.Option("--replicate", metavar="GLOB", help="These are buffers: keep them whole. Repeatable."),
    ] = None,
    rng: Annotated[
        str, typer.Option("--rng", metavar="POLICY", help="Random states of the ranks: keep, rank0 or drop.")
    ] = "keep",
    dataloader: Annotated[
        str, typer.Option("--dataloader", metavar="POLICY", help="Data loaders of the ranks: keep or drop.")
    ] = "keep",
    only: Only = None,
    drop: Drop = None,
    shapes: Shapes = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    check: Check = False,
    manifest: Manifest = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a checkpoint in the chunks that another number of ranks, or another mesh, would save.

    Alone it needs no process group; under torchrun the processes share the copies. DST appears complete or not at all.
    """
    import ckpttool

    with ExitStack() as stack:
        progress = None if quiet or as_json else stack.enter_context(Progress(err()))
        made = ckpttool.reshard(
            src, dst, to_world=to_world, to_mesh=to_mesh, like=like, to=to, engine=engine,
            placements=placements or (), shard=shard or (), replicate=replicate or (), rng=rng, dataloader=dataloader,
            only=only or (), drop=drop or (),
            shapes=shapes, overwrite=overwrite, resume=resume, dry_run=dry_run, threads=threads, max_memory=max_memory,
            check=check, manifest=manifest, progress=progress,
        )  # fmt: skip
    tell(
        made, "ckpttool/reshard/1", as_json=as_json, quiet=quiet, verbose=verbose, checked=check, more=[*_more(made)]
    )  # fmt: skip


def _more(made: Resharding) -> Iterator[tuple[str, str]]:
    yield "onto", f"{plural(made.world, 'rank')}, {made.mesh}"
    shared = f", {made.processes} processes" if made.processes > 1 else ""
    yield "engine", f"{made.engine}{shared} ({made.why})"
    for said in made.policies:
        yield "of a rank", said
