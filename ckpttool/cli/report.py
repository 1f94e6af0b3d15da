"""`ckpttool report`: statistics, shards and findings as one HTML file."""

from __future__ import annotations

from functools import partial

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.parsing import library_arguments
from ckpttool.errors import UsageError


def report(
    path: options.Checkpoint, step: options.ReportSteps = [], *,
    only: options.Only = [], drop: options.Drop = [], tensors: options.Tensors = [], exclude: options.Exclude = [],
    steps: options.Steps = None, shapes: options.Shapes = None,
    output: options.ReportFile = "report.html", overwrite: options.Replace = False, as_json: options.AsJson = False,
    quiet: options.Quiet = False, verbose: options.Verbose = False,
    cache: options.Cache = True, threads: options.Threads = None,
) -> None:  # fmt: skip
    """Write one HTML file about a checkpoint: findings, statistics, histograms, shards, bytes.

    The file opens offline and contains statistics and thumbnails, not the weights. All values are read once, as by
    `stats`.

    Examples:
        ckpttool report step-1000
        ckpttool report step-1000 --only model -o model.html
        ckpttool report run7 500 1000 -o run7.html
    """
    arguments = library_arguments(locals(), "step", "steps")
    import ckpttool
    from ckpttool.operations.report import blocks

    if page := next((word for word in step if word.endswith((".html", ".htm"))), None):
        raise UsageError(f"`{page}` is not a step of a run", hint=f"`-o {page}` writes the page to that file")
    if step and steps is not None:
        raise UsageError(
            f"the steps are given twice: `{' '.join(step)}` and `--steps {steps}`", hint="give one of the two"
        )
    call = partial(ckpttool.report, **arguments, steps=step or steps)
    respond(call, blocks, as_json=as_json, quiet=quiet, verbose=verbose)
