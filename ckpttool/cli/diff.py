"""`ckpttool diff`: how two checkpoints differ."""

from __future__ import annotations

from functools import partial

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.parsing import library_arguments


def diff(
    a: options.A, b: options.B, *,
    only: options.OnlyWithoutKey = [], drop: options.Drop = [], tensors: options.Tensors = [],
    exclude: options.Exclude = [], shapes: options.Shapes = None,
    rename: options.RenameInA = [], strip_wrappers: options.StripWrappers = False,
    strip_prefix: options.StripPrefix = None,
    rtol: options.Rtol = None, atol: options.Atol = None, ulp: options.Ulp = None,
    ignore_dtype: options.IgnoreDtype = False, sharded: options.Sharded = False,
    threads: options.Threads = None,
    sort: options.SortDifference = None, top: options.TopDifferences = None,
    as_csv: options.DifferencesAsCsv = False, as_md: options.AsMarkdown = False,
    html: options.DiffHtml = None, as_json: options.AsJson = False, quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Compare two checkpoints: names, dtypes, shapes, values, tied weights and objects.

    Formats and world sizes may differ. The exit code is 0 if they are the same, 1 if they differ.

    Examples:
        ckpttool diff step-900 step-1000
        ckpttool diff step-1000 model.safetensors --only model --ulp 1
        ckpttool diff step-900 step-1000 --only model --top 10
    """
    arguments = library_arguments(locals(), "sort", "top", "as_csv", "as_md")
    import ckpttool
    from ckpttool.reports.differences import blocks, rows_of

    respond(
        partial(ckpttool.diff, **arguments), partial(blocks, sort=sort, top=top),
        as_json=as_json, quiet=quiet, verbose=verbose, html=arguments["html"],
        rows=partial(rows_of, sort=sort, top=top) if as_csv or as_md else None, as_md=as_md,
    )  # fmt: skip
