"""`ckpttool report`: statistics, shards and findings as one HTML file."""

from __future__ import annotations

from functools import partial
from typing import Any

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.options import Argument, Option
from ckpttool.errors import UsageError


@options.command(
    "report",
    arguments=(
        options.CHECKPOINT,
        Argument(
            "step", metavar="[STEP]...", nargs=-1, help="Of a run, the steps to draw side by side, as with --steps."
        ),
    ),
    sections={
        "Selection": (*options.SELECTION, options.STEPS, options.SHAPES),
        "Output": (
            Option("--output -o FILE", "The HTML file to write.", default="report.html"),
            options.REPLACE,
            *options.PRINTING,
        ),
        "Execution": (options.NO_CACHE, options.THREADS),
    },
    examples=("step-1000", "step-1000 --only model -o model.html", "run7 500 1000 -o run7.html"),
)
def report(
    step: tuple[str, ...], steps: str | None, as_json: bool, quiet: bool, verbose: bool, **arguments: Any
) -> None:
    """Write one HTML file about a checkpoint: what stands out, statistics, histograms, shards, bytes.

    It opens offline, needs nothing beside it, and holds statistics and thumbnails, not the weights. All values are
    read once, as `stats` does.
    """
    import ckpttool
    from ckpttool.operations.report import blocks

    if step and steps is not None:
        raise UsageError(
            f"the steps are given twice: `{' '.join(step)}` and `--steps {steps}`", hint="give one of the two"
        )
    call = partial(ckpttool.report, **arguments, steps=step or steps)
    respond(call, blocks, as_json=as_json, quiet=quiet, verbose=verbose)
