"""`ckpttool convert`: one format into another."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

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
    Tensors,
    Threads,
    Verbose,
    complete_format,
    complete_producer,
)
from ckpttool.cli.progress import Progress
from ckpttool.cli.terminal import err


def convert(
    src: Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="The file or directory to write, like `cp`.")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            autocompletion=complete_format,
            help="torch, dcp, safetensors or fsdp1; by default what the suffix of DST says.",
        ),
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option(
            "--producer",
            metavar="NAME",
            autocompletion=complete_producer,
            help="As a framework resumes from it: accelerate, torchtitan, verl or trainer. In place of --to.",
        ),
    ] = None,
    only: Only = None,
    drop: Drop = None,
    tensors: Tensors = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not what matches. Repeatable.")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename", metavar="OLD=NEW", help="Rename; `*` on both sides is the same. @FILE has rules. Repeatable."
        ),
    ] = None,
    strip_wrappers: Annotated[
        bool,
        typer.Option(
            "--strip-wrappers",
            help="Take `module.`, `_orig_mod.`, `_fsdp_wrapped_module.` and `_checkpoint_wrapped_module.` off.",
        ),
    ] = False,
    strip_prefix: Annotated[
        str | None, typer.Option("--strip-prefix", metavar="P", help="Take one prefix off the model's names.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            metavar="[PATTERN=]DTYPE",
            help="Cast floating point tensors: bfloat16, or 'norm*=float32' for some. Repeatable; first match wins.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Split into files of at most 5GB, 512MiB, ..."),
    ] = None,
    to_world: Annotated[
        int | None, typer.Option("--to-world", metavar="N", help="Chunk the tensors for N ranks (dcp, fsdp1).")
    ] = None,
    tensor_class: Annotated[
        str | None,
        typer.Option("--tensor-class", metavar="CLASS", help="Sharded tensors as sharded_tensor or dtensor (fsdp1)."),
    ] = None,
    optim_keys: Annotated[
        str | None,
        typer.Option("--optim-keys", metavar="KEYS", help="Spell the optimizer's parameters as fqn, id or flat."),
    ] = None,
    optim_root: Annotated[
        str | None, typer.Option("--optim-root", metavar="KEY", help="Keep the optimizer under this key.")
    ] = None,
    shapes: Shapes = None,
    model_from: Annotated[
        str | None, typer.Option("--model-from", metavar="PATH", help="Take the model from another checkpoint.")
    ] = None,
    optim_from: Annotated[
        str | None, typer.Option("--optim-from", metavar="PATH", help="Take the optimizer from another checkpoint.")
    ] = None,
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
    """Convert a checkpoint, bit for bit: the same tensors, objects and names in another format.

    DST appears complete or not at all. What the format cannot hold is refused, unless it is left out by --only, --drop
    or --exclude.
    """
    import ckpttool

    with ExitStack() as stack:
        progress = None if quiet or as_json else stack.enter_context(Progress(err()))
        made = ckpttool.convert(
            src, dst, to=to, producer=producer, only=only or (), drop=drop or (), tensors=tensors or (),
            exclude=exclude or (), rename=rename or (), strip_wrappers=strip_wrappers, strip_prefix=strip_prefix,
            dtype=dtype or (), max_shard_size=max_shard_size, to_world=to_world, tensor_class=tensor_class,
            optim_keys=optim_keys, optim_root=optim_root, shapes=shapes, model_from=model_from, optim_from=optim_from,
            overwrite=overwrite, resume=resume, dry_run=dry_run, threads=threads, max_memory=max_memory, check=check,
            manifest=manifest, progress=progress,
        )  # fmt: skip
    tell(made, "ckpttool/convert/1", as_json=as_json, quiet=quiet, verbose=verbose, checked=check)
