"""`ckpttool inspect`: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.cli import options
from ckpttool.cli.terminal import answer, err
from ckpttool.reports.report import Rows, Styled, TextLike, bold, box, dim
from ckpttool.reports.terminal import Terminal
from ckpttool.text import count, is_or_are, meant, plural, size

if TYPE_CHECKING:
    from ckpttool.analysis.describe.module_tree import ModuleLine
    from ckpttool.analysis.describe.optimizers import OptimizerSummary
    from ckpttool.analysis.describe.sharding import Shards
    from ckpttool.analysis.describe.summary import PartLine, Summary
    from ckpttool.catalogue.entries import Catalogue, Part, Tensor

_OBJECTS = 40  # lines, unless -v
_TREE = 2000  # lines of a module tree, unless -v
_COLUMNS = 6
_DTYPES = 4
# Facts that have a place of their own.
_APART = (
    *("counters", "number", "numbers", "step", "epoch", "run", "mounted", "components", "assets"),
    *("model_type", "architectures", "num_hidden_layers"),
)
_VALUE = 80  # characters of an object's value, unless -v
_RUN = 20  # checkpoints of a run, unless -v
_TITLES = {"producer": "producer", "writer": "written by", "torch": "torch", "layout": "layout"}


def inspect(
    path: options.Checkpoint, *,
    depth: options.Depth = 4, steps: options.ListedSteps = None, shapes: options.Shapes = None,
    tensors: options.ListedTensors = [], dtype: options.ListedDtypes = [], min_size: options.MinSize = None,
    where: options.Where = None, sort: options.SortKey = None, top: options.Top = None,
    as_csv: options.AsCsv = False, as_md: options.AsMarkdown = False, html: options.Html = None,
    strict: options.Strict = False, as_json: options.AsJson = False, quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Show what a checkpoint holds, without reading its weights or executing its pickles.

    With an option under Tensors, list those tensors, with the location of their shards.

    Examples:
        ckpttool inspect step-1000
        ckpttool inspect step-1000 --tensors 'model.layers.0.*'
        ckpttool inspect step-1000 --top 20
        ckpttool inspect hf://org/model --depth 6
    """
    import ckpttool
    from ckpttool.analysis.describe.document import document
    from ckpttool.analysis.describe.listing import ALL, Listing
    from ckpttool.analysis.describe.summary import damage
    from ckpttool.errors import DONE, CorruptError, UsageError

    listing = Listing(tuple(tensors), tuple(dtype), min_size, sort, top, where)
    catalogue = ckpttool.inspect(path, shapes=shapes, steps=steps)
    listed = listing.tensors(catalogue)
    by_name = Listing(listing.globs)
    if not (listed or by_name.tensors(catalogue) or (as_json and listing.objects(catalogue))) and listing.globs:
        names = [tensor.name for tensor in catalogue.tensors]
        hint = meant(listing.globs[0], names, "`--tensors '*'` lists all")
        raise UsageError(f"`{path}`: no tensor matches `{listing.globs[0]}`", hint=hint)
    if html is not None:
        from ckpttool.reports import page_file
        from ckpttool.reports.inspected import inspected_page

        page_file.write(inspected_page(catalogue, path), html)
    exit_code = CorruptError.exit_code if strict and damage(catalogue) else DONE
    with answer(exit_code, verbose) as terminal:
        if as_json:
            for piece in document(catalogue, path, listing, exit_code):
                terminal.write(piece)
        elif as_csv or as_md:
            _table(terminal, catalogue, listed, as_md)
        elif quiet:
            for tensor in listed:
                terminal.line(tensor.name)
        else:
            _print(terminal, catalogue, path, depth, listed if listing != ALL else None)
            err().wrote(html)


def _table(terminal: Terminal, catalogue: Catalogue, tensors: Sequence[Tensor], as_md: bool) -> None:
    """Print a line for each tensor, of CSV or of Markdown."""
    from ckpttool.analysis.describe.rows import COLUMNS, TensorRows

    rows = TensorRows(catalogue)
    lines = ({**row, "shape": "x".join(map(str, row["shape"]))}.values() for row in map(rows.of, tensors))
    if as_md:
        terminal.markdown(COLUMNS, ([*line] for line in lines), right=range(4, 9))
    else:
        terminal.csv(COLUMNS, ([*line] for line in lines))


def _print(terminal: Terminal, catalogue: Catalogue, path: str, depth: int, listed: Sequence[Tensor] | None) -> None:
    from ckpttool.analysis.describe.summary import summarise

    _run(terminal, catalogue, path)
    summary = summarise(catalogue, depth=depth, limit=1000 if terminal.verbose else max(terminal.width or 0, _VALUE))
    shown = (checkpoint["path"] for checkpoint in catalogue.facts.get("run", ()) if checkpoint["taken"])
    _header(terminal, catalogue, next(shown, path), summary)
    _support(terminal, catalogue.facts.get("recognised", {}))
    if mounted := catalogue.facts.get("mounted"):
        terminal.heading("components")
        rows = [(m["root"] or "-", m["path"] or ".", m["format"], plural(m["file_count"], "file")) for m in mounted]
        terminal.table(rows, wrap=(0, 1))
    if listed is not None:
        _tensors(terminal, listed, catalogue)
    elif summary.parts:
        _parts(terminal, summary.parts)
        for part, lines in summary.trees:
            _tree(terminal, part, lines)
        for optimizer in summary.headline.optimizers:
            _optimizer_state(terminal, optimizer)
            hyperparameters(terminal, optimizer)
        _objects(terminal, summary)
        if summary.ties:
            terminal.heading("tied weights", "shared storage")
            terminal.table([(name, f"is {kept}") for name, kept in summary.ties], wrap=(0, 1), limit=_OBJECTS)
    if summary.warnings:
        terminal.heading("warnings")
    for warning in summary.warnings:
        terminal.paragraph(warning, mark=Styled("! ", "yellow"))


def _run(terminal: Terminal, catalogue: Catalogue, path: str) -> None:
    """Print the checkpoints of a run, and mark the one that is shown below."""
    if not (run := catalogue.facts.get("run")):
        return
    terminal.line(bold(path), f"  {plural(len(run), 'checkpoint')}")
    terminal.write("\n")
    shown = run if terminal.verbose else run[-_RUN:]
    if len(shown) < len(run):
        terminal.line(dim(f"  {len(run) - len(shown):,} before them, shown by -v"))
    rows: Rows = []
    for entry in shown:
        state: TextLike = "shown below" if entry["taken"] else ""
        if not entry["complete"]:
            state = Styled(f"not complete: {entry['why_not']}", "yellow")
        step = "" if entry["step"] is None else f"{entry['step']:,}"
        name = bold(entry["name"]) if entry["taken"] else entry["name"]
        rows.append([name, step, size(entry["file_bytes"]), entry["producer"] or entry["format"] or "", state])
    terminal.table(rows, ("checkpoint", "step", "bytes", "producer", ""), right=(1, 2), wrap=(0, 3, 4))
    terminal.write("\n")


def _header(terminal: Terminal, catalogue: Catalogue, path: str, summary: Summary) -> None:
    from ckpttool.analysis.describe import sharding
    from ckpttool.catalogue.shown import shown

    terminal.line(bold(path))
    if text := str(summary.headline):
        terminal.paragraph(text)
    if summary.holds and (len(catalogue.facts.get("mounted", ())) > 1 or len(summary.trees) > 1):
        terminal.paragraph(summary.holds)
    for text in summary.damage:
        terminal.paragraph(text, mark=Styled("! ", "red"))
    terminal.write("\n")
    facts = {key: value for key, value in catalogue.facts.items() if key not in _APART}
    rows = [("format", f"{catalogue.format}, {facts.pop('layout')}" if facts.get("layout") else catalogue.format)]
    rows += [(title, str(facts.pop(key))) for key, title in _TITLES.items() if facts.get(key)]
    if recognised := facts.pop("recognised", None):
        rows += _recognised(recognised, catalogue)
    if catalogue.world_size > 1:
        rows.append(("world size", str(catalogue.world_size)))
    if sharded := sharding.overview(catalogue):
        rows.append(("sharding", sharded))
    if summary.headline.step is not None:
        rows.append(("step", f"{summary.headline.step:,}"))
    if summary.headline.epoch is not None:
        rows.append(("epoch", f"{summary.headline.epoch:,}"))
    missing = sum(file.missing for file in catalogue.own_files)
    on_disk = f"{size(catalogue.nbytes())} in {plural(len(catalogue.own_files) - missing, 'file')}"
    rows.append(("on disk", on_disk + (f", {missing:,} missing" if missing else "")))
    if loads := sharding.bytes_per_rank(catalogue):
        rows.append(("per rank", sharding.balance(loads)))
    if catalogue.facts.get("assets"):
        rows.append(("assets", ", ".join(catalogue.facts["assets"])))
    if facts.get("metadata") == {"format": "pt"}:
        del facts["metadata"]  # which says as little as that the file is one of torch
    others = ((str(key).replace("_", " "), value) for key, value in facts.items() if value not in (None, "", ()))
    rows += [(title, value if isinstance(value, str) else shown(value)) for title, value in others]
    terminal.facts(rows)


def _recognised(recognised: dict[str, Any], catalogue: Catalogue) -> list[tuple[str, str]]:
    """Return the rows of the header on what a checkpoint of another tool is."""
    rows = [("recognised", recognised["title"])] if recognised["title"] != catalogue.format else []
    if recognised["parallelism"]:
        rows.append(("parallelism", recognised["parallelism"]))
    return rows + [
        (name, f"{value:,}" if isinstance(value, int) else value) for name, value in recognised["details"].items()
    ]


def _support(terminal: Terminal, recognised: dict[str, Any]) -> None:
    """Print what ckpttool does and does not do with a checkpoint of another tool."""
    if recognised:
        terminal.heading("what ckpttool does with it")
        for text in recognised["can"]:
            terminal.paragraph(text, mark=Styled("+ ", "green"))
        for text in recognised["cannot"]:
            terminal.paragraph(f"does not {text}", mark=Styled("- ", "yellow"))


def _parts(terminal: Terminal, parts: list[PartLine]) -> None:
    terminal.write("\n")
    rows: Rows = [[bold(str(part.part)), *_numbers([part]), _dtypes(list(part.dtypes))] for part in parts]
    if len(parts) > 1:
        rows.append([dim("total"), *_numbers(parts)])
    headers = ("part", "tensors", "elements", "bytes", "objects", "dtypes")
    terminal.table(rows, headers, right=(1, 2, 3, 4), wrap=(0, 5))


def _numbers(parts: list[PartLine]) -> list[str]:
    tensors, objects = sum(p.tensors for p in parts), sum(p.objects for p in parts)
    elements, nbytes = sum(p.elements for p in parts), sum(p.nbytes for p in parts)
    return [f"{tensors:,}", count(elements), size(nbytes), f"{objects:,}"]


def _dtypes(names: Sequence[str]) -> str:
    if len(names) <= _DTYPES:
        return ", ".join(names)
    return f"{', '.join(names[: _DTYPES - 1])} and {len(names) - _DTYPES + 1} more"


def _tree(terminal: Terminal, part: Part, lines: list[ModuleLine]) -> None:
    dtypes = {line.dtypes for line in lines}
    shared = _dtypes(dtypes.pop()) if len(dtypes) == 1 else ""
    terminal.heading(str(part), shared)
    rows = []
    shown = lines if terminal.verbose else lines[:_TREE]
    for line in shown:
        times, shape = "", plural(line.tensors, "tensor")
        if line.shape is not None:
            shape = f"{f'{line.times:,} x ' if line.times > 1 else ''}{list(line.shape)}"
        elif line.folded > 1:
            times = f"  x{line.folded}"
        dtype = () if shared else (_dtypes(line.dtypes),)
        numbers = ("tied", "") if line.tied else (count(line.elements), size(line.nbytes))
        rows.append(("  " * line.depth + line.name + times, shape, *dtype, *numbers))
    headers = ("", "shape", *(() if shared else ("dtype",)), "elements", "bytes")
    last = len(headers) - 1
    terminal.table(
        rows, headers, right=(1, last - 1, last), wrap=(0,), drop=[(i,) for i in (last - 1, *range(2, last - 1))]
    )
    terminal.more(len(lines) - len(shown))
    if closed := [line for line in lines if line.closed]:
        depth = max(line.closed for line in closed)
        what = f"{plural(len(closed), 'module')} {is_or_are(closed)} closed"
        terminal.line(dim(f"  {what}: --depth {depth} opens {'it' if len(closed) == 1 else 'them'}"))


def _tensors(terminal: Terminal, tensors: Sequence[Tensor], catalogue: Catalogue) -> None:
    from ckpttool.analysis.describe.sharding import Placements, shards

    placements = Placements(catalogue)
    rows: Rows = []
    lines: list[list[str]] = []
    for tensor in tensors:
        placement = placements.of(tensor)
        label = "" if placement is None else str(placement)
        rows.append([bold(tensor.name), tensor.dtype.name, str(list(tensor.shape)), size(tensor.nbytes), label])
        lines.append([_shard(one, tensor) for one in shards(tensor, catalogue, folded=not terminal.verbose)])
    headers = ["", "dtype", "shape", "bytes", "placement"]
    nbytes = size(sum(tensor.nbytes for tensor in tensors))
    aside = f"{len(tensors):,} of {sum(1 for _ in catalogue.tensors):,}, {nbytes}"
    for title in ("dtype", "placement"):
        i = headers.index(title)
        if len(values := {str(row[i]) for row in rows}) == 1:
            # What all have is said once.
            headers.pop(i)
            aside += f", {shared}" if (shared := values.pop()) else ""
            for row in rows:
                row.pop(i)
    terminal.heading("tensors", aside)
    only = max((len(shards[0]) for shards in lines if len(shards) == 1), default=0)
    beside = only and (terminal.width is None or _width(rows, headers) + only + 4 <= terminal.width)
    if beside:
        headers.append("shard")
    table: Rows = []
    for row, shard_lines in zip(rows, lines, strict=True):
        is_beside = beside and len(shard_lines) == 1
        table.append([*row, *shard_lines] if is_beside else row)
        table += [[f"  {shard}"] for shard in ([] if is_beside else shard_lines)]
    drop = [(headers.index(title),) for title in ("placement", "dtype", "bytes") if title in headers]
    terminal.table(table, headers, right=(headers.index("bytes"),), wrap=(0, len(headers) - 1), drop=drop)


def _width(rows: Rows, headers: Sequence[str]) -> int:
    columns = zip(
        headers, *([cell.text if isinstance(cell, Styled) else cell for cell in row] for row in rows), strict=True
    )
    return sum(2 + max(map(len, column)) for column in columns)


def _shard(shards: Shards, tensor: Tensor) -> str:
    ranks = f"{shards.ranks}: " if shards.ranks else ""
    if shards.count > 1:
        return f"{ranks}{shards.count:,} x {list(shards.sizes)}"
    return (
        f"{ranks}{box(shards.offsets, shards.sizes, tensor.shape)}  {shards.file}"
        if shards.file
        else f"{ranks}{list(shards.sizes)}"
    )


def _objects(terminal: Terminal, summary: Summary) -> None:
    objects = [*summary.objects, *(summary.internal if terminal.verbose else [])]
    if objects or summary.internal:
        terminal.heading("objects")
    rows = [(f"{o.name}{f'  x{o.times}' if o.times > 1 else ''}", o.text) for o in objects]
    terminal.table(rows, wrap=(0,), clip=(1,), limit=_OBJECTS)
    if summary.internal and not terminal.verbose:
        terminal.line(dim(f"  {plural(len(summary.internal), 'internal field')} of the scheduler, shown by -v"))


def _optimizer_state(terminal: Terminal, optimizer: OptimizerSummary) -> None:
    if optimizer.state:
        terminal.heading("optimizer state", ".".join(map(str, optimizer.root)))
        rows = [(s.kind, s.dtype, f"{s.tensors:,}", count(s.elements), size(s.nbytes)) for s in optimizer.state]
        terminal.table(rows, ("", "dtype", "tensors", "elements", "bytes"), right=(2, 3, 4), wrap=(0,))


def hyperparameters(terminal: Terminal, optimizer: OptimizerSummary) -> None:
    """Print the hyper-parameters of an optimizer, with a column for each distinct set of values; on one line those that
    are the defaults of its class."""
    table = optimizer.table
    if table is None:
        return
    terminal.heading("hyper-parameters", ".".join(map(str, table.root)))
    columns = table.columns if terminal.verbose else table.columns[:_COLUMNS]
    defaults = [] if terminal.verbose else optimizer.defaults
    rows: Rows = []
    if any(c.params is not None for c in columns):
        rows.append([dim("parameters"), *("" if c.params is None else f"{c.params:,}" for c in columns)])
    rows += [[name, *(c.values.get(name, "") for c in columns)] for name in table.names if name not in defaults]
    terminal.table(rows, ("", *table.titles[: len(columns)]), wrap=range(len(columns) + 1))
    terminal.more(len(table.columns) - len(columns))
    if defaults:
        values = ", ".join(f"{name}={table.columns[0].values[name]}" for name in defaults)
        terminal.paragraph(f"defaults: {values}")
