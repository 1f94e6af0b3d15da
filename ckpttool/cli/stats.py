"""`ckpttool stats`: statistics of the values of a checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.options import Option
from ckpttool.cli.terminal import answer


@options.command(
    "stats",
    arguments=(options.CHECKPOINT,),
    sections={
        "Selection": (
            *options.SELECTION,
            Option("--where CONDITION", "List tensors of which this is true: 'nan > 0 or absmax > 1e4'."),
            options.STEPS,
            Option("--spectral", "Estimate stable rank and largest singular values of matrices, too."),
            options.SHAPES,
        ),
        "Output": (
            Option("--each", "List each tensor, not groups."),
            Option("--sort STAT", "List each tensor, that with the largest STAT first: rms, absmax, kurtosis, ..."),
            Option("--csv", "Print one line of comma-separated values for each tensor.", name="as_csv"),
            Option("--fail-on CONDITION", "End with exit code 1 if this is true of a tensor: 'nan > 0'."),
            *options.PRINTING,
        ),
        "Execution": (options.NO_CACHE, options.THREADS),
    },
    examples=("step-1000", "step-1000 --fail-on 'nan > 0 or absmax > 1e4'", "step-1000 --only model --sort kurtosis"),
)
def stats(
    each: bool, sort: str | None, as_csv: bool, as_json: bool, quiet: bool, verbose: bool, **arguments: Any
) -> None:
    """Show statistics of the values of a checkpoint, and what stands out.

    All values are read once: zeros, NaN, infinities, limits, mean, deviation, norms, kurtosis and quantiles of each
    tensor, and of the tensors of each part, layer, kind and expert together.
    """
    import ckpttool
    from ckpttool.analysis.statistics.results import checked_column
    from ckpttool.reports.statistics import blocks, write_csv

    column = checked_column(sort) if sort is not None else None
    is_list = each or column is not None or arguments["where"] is not None

    def call(**progress: Any) -> Any:
        result = ckpttool.stats(**arguments, **progress)
        result.sort(column)
        return result

    if as_csv and not as_json:
        result = call()
        with answer(result.exit_code) as terminal:
            write_csv(terminal, result.tensors)
        return
    drawn = partial(blocks, is_list=is_list, column=column)
    respond(call, drawn, as_json=as_json, quiet=quiet, verbose=verbose, shows_progress=not as_csv)
