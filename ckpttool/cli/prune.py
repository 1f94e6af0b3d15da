"""`ckpttool prune`: the checkpoints of a run that need not stay."""

from __future__ import annotations

from functools import partial

from ckpttool.cli import options
from ckpttool.cli.answer import respond


def prune(
    run: options.Run, *,
    keep_last: options.KeepLast = None, keep_every: options.KeepEvery = None, drop: options.DropPart = [],
    yes: options.YesPrune = False,
    as_json: options.AsJson = False, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Remove old checkpoints of a run, or parts of them.

    The newest complete checkpoint stays, and so does whatever cannot be judged: incomplete checkpoints, links, folders
    that are not checkpoints. If interrupted, each of the others is either whole or gone.

    Examples:
        ckpttool prune run7 --keep-last 3 --keep-every 1000
        ckpttool prune run7 --keep-last 3 --keep-every 1000 --drop optimizer --yes
    """
    import ckpttool
    from ckpttool.fleet.prune import blocks

    call = partial(ckpttool.prune, run, keep_last=keep_last, keep_every=keep_every, drop=tuple(drop), yes=yes)
    respond(call, blocks, as_json=as_json, quiet=quiet, shows_progress=False)
