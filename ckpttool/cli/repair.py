"""`ckpttool repair`: a repaired copy, by lossless fixes only."""

from __future__ import annotations

from functools import partial

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.parsing import library_arguments


def repair(
    src: options.Source, dst: options.RepairDestination, *,
    merge: options.Merge = [], like: options.LikeStep = None,
    overwrite: options.Overwrite = False, dry_run: options.DryRun = False, threads: options.Threads = None,
    no_manifest: options.NoManifest = False,
    as_json: options.AsJson = False, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Write a repaired copy of a checkpoint, with lossless fixes only, and verify it.

    DST is written completely or not at all.

    Examples:
        ckpttool repair node0/step-1000 repaired --merge node1/step-1000
        ckpttool repair step-1000 repaired --like step-900
    """
    arguments = library_arguments(locals(), "no_manifest")
    import ckpttool
    from ckpttool.operations.repair import blocks

    call = partial(ckpttool.repair, **arguments, manifest=not no_manifest)
    respond(call, blocks, as_json=as_json, quiet=quiet)
