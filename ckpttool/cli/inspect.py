"""`ckpttool inspect`: what a checkpoint holds."""

from __future__ import annotations

from functools import partial

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.terminal import out

_VALUE = 80  # characters of an object's value, or as many as a line of the terminal


def inspect(
    path: options.Checkpoint, *,
    depth: options.Depth = 4, steps: options.ListedSteps = None, shapes: options.Shapes = None,
    tensors: options.ListedTensors = [], dtype: options.ListedDtypes = [], min_size: options.MinSize = None,
    where: options.Where = None, sort: options.SortKey = None, top: options.Top = None,
    as_csv: options.AsCsv = False, as_md: options.AsMarkdown = False, html: options.Html = None,
    strict: options.Strict = False, as_json: options.AsJson = False, quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Show what a checkpoint contains, without reading its weights or executing its pickles.

    Options under Tensors switch to a list of tensors and their shards.

    Examples:
        ckpttool inspect step-1000
        ckpttool inspect step-1000 --tensors 'model.layers.0.*'
        ckpttool inspect step-1000 --top 20
        ckpttool inspect hf://org/model --depth 6
    """
    import ckpttool
    from ckpttool.analysis.describe.listing import Listing
    from ckpttool.operations.inspect import Inspection, blocks, page, rows
    from ckpttool.reports import page_file

    listing = Listing(tuple(tensors), tuple(dtype), min_size, sort, top, where)

    def call() -> Inspection:
        result = Inspection(path, ckpttool.inspect(path, shapes=shapes, steps=steps), listing, strict)
        result.check(with_objects=as_json)
        if html is not None:
            page_file.write(page(result), html)
        return result

    drawn = partial(blocks, depth=depth, limit=max(out().width or 0, _VALUE))
    of_table = rows if as_csv or as_md else None
    respond(
        call, drawn, as_json=as_json, quiet=quiet, verbose=verbose, shows_progress=False,
        html=html, rows=of_table, as_md=as_md,
    )  # fmt: skip
