"""`ckpttool show`: one tensor, reading only its bytes."""

from __future__ import annotations

from functools import partial

from ckpttool.cli import options
from ckpttool.cli.answer import respond


@options.command(
    "show",
    arguments=(options.CHECKPOINT, options.TENSOR),
    sections={"Selection": (options.SHAPES,), "Output": (options.AS_JSON, options.QUIET)},
    examples=("step-1000 model.embed.weight",),
)
def show(path: str, tensor: str, shapes: str | None, as_json: bool, quiet: bool) -> None:
    """Show one tensor: the location of its shards, the first values, and statistics."""
    import ckpttool
    from ckpttool.operations.show import blocks

    call = partial(ckpttool.show, path, tensor, shapes=shapes)
    respond(call, blocks, as_json=as_json, quiet=quiet, shows_progress=False)
