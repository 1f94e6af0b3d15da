"""`ckpttool samples`: small checkpoints and scripts to try the commands on."""

from __future__ import annotations

from functools import partial

from ckpttool.cli import options
from ckpttool.cli.answer import respond


def samples(
    dst: options.SamplesDestination, *,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Write the small real checkpoints and the training scripts of the documentation's examples.

    Examples:
        ckpttool samples try
    """
    from ckpttool.operations.samples import blocks
    from ckpttool.operations.samples import samples as write

    respond(partial(write, dst, overwrite=overwrite), blocks, as_json=as_json, quiet=quiet, shows_progress=False)
