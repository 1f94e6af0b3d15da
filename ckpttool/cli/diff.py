"""`ckpttool diff`: how two checkpoints differ."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.options import Argument, Option

_ONLY = "Include only this part (model, optimizer, ...; or its key), and strip its key from names. Repeatable."


@options.command(
    "diff",
    arguments=(
        Argument("a", metavar="A", help="A checkpoint of any format."),
        Argument("b", metavar="B", help="The checkpoint to compare it with, of any format."),
    ),
    sections={
        "Selection": (
            options.reworded(options.ONLY, _ONLY),
            options.DROP,
            options.TENSORS,
            options.EXCLUDE,
            options.SHAPES,
        ),
        "Names": (
            options.reworded(options.RENAME, "Rename OLD in A to NEW, as in convert; @FILE reads rules. Repeatable."),
            options.STRIP_WRAPPERS,
            options.STRIP_PREFIX,
        ),
        "Comparison": (
            Option("--rtol R", "Relative tolerance of elements, relative to B.", type=float),
            Option("--atol A", "Absolute tolerance of elements.", type=float),
            Option("--ulp N", "Tolerance in ULPs.", type=click.IntRange(min=0)),
            Option("--ignore-dtype", "Do not count a different dtype as a difference if the values are equal."),
            Option("--sharding", "Count a different sharding as a difference.", name="sharded"),
        ),
        "Execution": (options.THREADS,),
        "Output": (
            options.reworded(options.HTML, "Also write an HTML page: a report with the statistics of B minus A."),
            *options.PRINTING,
        ),
    },
    examples=("step-900 step-1000", "step-1000 model.safetensors --only model --ulp 1"),
)
def diff(as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
    """Compare two checkpoints: names, dtypes, shapes, values, tied weights and objects.

    Formats and world sizes may differ. The exit code is 0 if they are the same, 1 if they differ.
    """
    import ckpttool
    from ckpttool.reports.differences import blocks

    call = partial(ckpttool.diff, **arguments)
    respond(call, blocks, as_json=as_json, quiet=quiet, verbose=verbose, html=arguments["html"])
