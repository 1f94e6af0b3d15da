"""`ckpttool show`: one tensor, reading only its bytes."""

from __future__ import annotations

from functools import partial

from ckpttool.cli import options
from ckpttool.cli.answer import respond


def show(
    path: options.Checkpoint, tensor: options.TensorName, elements: options.Elements = None, *,
    shapes: options.Shapes = None,
    as_json: options.AsJson = False, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Show one tensor: the location of its shards, the first values, and statistics; or a value that is not a tensor.

    Examples:
        ckpttool show step-1000 model.embed.weight
        ckpttool show step-1000 model.embed.weight '[0:4, :8]'
        ckpttool show step-1000 optim.param_groups.0.lr
    """
    import ckpttool
    from ckpttool.operations.show import blocks

    call = partial(ckpttool.show, path, tensor, elements, shapes=shapes)
    respond(call, blocks, as_json=as_json, quiet=quiet, shows_progress=False)
