"""`ckpttool stats`: statistics of the values of a checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.parsing import library_arguments


def stats(
    path: options.Checkpoint, *,
    only: options.Only = [], drop: options.Drop = [], tensors: options.Tensors = [], exclude: options.Exclude = [],
    where: options.WhereStatistics = None, steps: options.Steps = None, spectral: options.Spectral = False,
    shapes: options.Shapes = None,
    each: options.Each = False, sort: options.SortStatistic = None, as_csv: options.StatisticsAsCsv = False,
    fail_on: options.FailOn = None, as_json: options.AsJson = False, quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    cache: options.Cache = True, threads: options.Threads = None,
) -> None:  # fmt: skip
    """Show statistics of the values of a checkpoint, and outliers.

    All values are read once: zeros, NaN, infinities, limits, mean, standard deviation, norms, kurtosis and quantiles of
    each tensor, and of the tensors of each part, layer, kind and expert together.

    Examples:
        ckpttool stats step-1000
        ckpttool stats step-1000 --fail-on 'nan > 0 or absmax > 1e4'
        ckpttool stats step-1000 --only model --sort kurtosis
    """
    arguments = library_arguments(locals(), "each", "sort", "as_csv")
    import ckpttool
    from ckpttool.analysis.statistics.results import checked_column
    from ckpttool.reports.statistics import blocks, rows

    column = checked_column(sort) if sort is not None else None
    is_list = each or column is not None or arguments["where"] is not None

    def call(**progress: Any) -> Any:
        result = ckpttool.stats(**arguments, **progress)
        result.sort(column)
        return result

    drawn, of_csv = (
        partial(blocks, is_list=is_list, column=column),
        (lambda result: rows(result.tensors)) if as_csv else None,
    )
    respond(call, drawn, as_json=as_json, quiet=quiet, verbose=verbose, shows_progress=not as_csv, rows=of_csv)
