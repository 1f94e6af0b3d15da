"""What the index of a checkpoint says, as blocks: those of `inspect`, and those on the pages of other commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from ckpttool.analysis.describe import sharding
from ckpttool.analysis.describe.module_tree import ModuleLine
from ckpttool.analysis.describe.optimizers import OptimizerSummary
from ckpttool.analysis.describe.rows import COLUMNS, NUMBERS, TensorRows
from ckpttool.analysis.describe.sharding import Placements, Shards, shards
from ckpttool.analysis.describe.summary import DEPTH, PartFigures, Summary, damage, head, summarise
from ckpttool.catalogue.chosen import chosen_of_run
from ckpttool.catalogue.entries import Catalogue, Part, Tensor, dotted
from ckpttool.catalogue.findings import DAMAGE
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.shown import LIMIT, shown
from ckpttool.reports.report import Block, Column, Facts, Findings, Line, Styled, Table, Text, TextLike, bold, box, dim
from ckpttool.text import count, plural, size

_OBJECTS = 40  # lines, unless -v
_TREE = 2000  # lines of a module tree, unless -v
_COLUMNS = 6
_DTYPES = 4
_LONG = 1000  # characters of an object's value under -v
# Facts that have a place of their own.
_APART = (
    *(
        "buffers",
        "counters",
        "lacks",
        "number",
        "numbers",
        "step",
        "epoch",
        "run",
        "mounted",
        "components",
        "assets",
        "whole objects",
    ),
    *("model_type", "architectures", "num_hidden_layers", "tie_word_embeddings"),
)
_RUN = 20  # checkpoints of a run, unless -v
_TITLES = {"producer": "producer", "writer": "written by", "torch": "torch", "layout": "layout"}
_NAME = Column(fit="wrap")


def blocks(
    catalogue: Catalogue,
    path: str,
    listed: Sequence[Tensor] | None = None,
    *,
    depth: int = DEPTH,
    limit: int = LIMIT,
    verbose: bool = False,
) -> Iterator[Block]:
    """Yield what `inspect` shows of the checkpoint at `path`: what it is, its parts, modules to a `depth`, optimizers
    and other values up to `limit` characters; of `listed` tensors, these instead."""
    yield from _run(catalogue, path, verbose)
    summary = summarise(catalogue, depth=depth, limit=_LONG if verbose else limit)
    run = catalogue.facts.get("run", ())
    yield Line([bold(next((one["path"] for one in run if one["taken"]), path))], is_apart=bool(run))
    if text := str(summary.headline) or _without_tensors(catalogue):
        yield Text(text)
    if summary.holds and (len(catalogue.facts.get("mounted", ())) > 1 or len(summary.trees) > 1):
        yield Text(summary.holds)
    yield Findings("", damage(catalogue), None)
    yield from about(catalogue, summary)
    yield from contents(summary, verbose) if listed is None else [_tensors(listed, catalogue, verbose)]
    yield Findings("warnings", summary.warnings, None, "")


def _without_tensors(catalogue: Catalogue) -> str:
    """Return what to say first of a checkpoint without tensors; nothing of one that has some, or may have."""
    if any(catalogue.tensors) or catalogue.faults or catalogue.facts.get("recognised"):
        return ""
    number = sum(1 for _ in catalogue.objects)
    return f"no tensors, {plural(number, 'object')}" if number else "empty: no tensors and no objects"


def on_page(
    catalogue: Catalogue,
    source: Source | None = None,
    *more: tuple[str, str],
    title: str = "Checkpoint",
    run: Iterable[tuple[str, str]] = (),
    without: Collection[str] = (),
) -> Iterator[Block]:
    """Yield what the page of a command says of a checkpoint: warnings, facts and `more` of them under a title, parts,
    ranks and files. `source` is None of a catalogue that `inspect` returned; `run` says which checkpoint of a run this
    is if the catalogue does not, and warnings of the kinds `without` are left out."""
    headline, parts = head(catalogue, source)
    warnings = [one for one in catalogue.warnings if one.gravity != DAMAGE and one.kind not in without]
    yield Findings("warnings", warnings, None)
    yield Facts([*chosen(catalogue), *run, *_facts(catalogue, headline.step, headline.epoch), *more], title)
    yield _parts(parts, exact=True)
    for part, lines in summarise(catalogue).trees:
        yield from _tree(part, lines, f"modules of {part}")
    yield from ranks_and_files(catalogue)


def chosen(catalogue: Catalogue) -> Iterator[tuple[str, str]]:
    """Yield the fact that says which checkpoint of a run this is, if it is of one."""
    if which := "; ".join(chosen_of_run(catalogue)):
        yield "run", which


def about(catalogue: Catalogue, summary: Summary, before: Iterable[tuple[str, str]] = ()) -> Iterator[Block]:
    """Yield the facts, what ckpttool does with a checkpoint of another tool, and the components of a directory. Facts
    `before` come first."""
    facts = [*before, *_facts(catalogue, summary.headline.step, summary.headline.epoch)]
    yield Facts(facts, "Checkpoint", is_apart=True)
    if recognised := catalogue.facts.get("recognised"):
        for title, mark, key in (
            ("supported", Styled("+ ", "green"), "can"),
            ("not supported", Styled("- ", "yellow"), "cannot"),
        ):
            for i, text in enumerate(recognised[key]):
                yield Text(text, "" if i else title, mark=mark)
    mounted = catalogue.facts.get("mounted", ())
    rows = [(m["root"] or "-", m["path"] or ".", m["format"], plural(m["file_count"], "file")) for m in mounted]
    yield Table("components", [_NAME, _NAME, Column(), Column()], rows, limit=None)


def ranks_and_files(catalogue: Catalogue) -> Iterator[Table]:
    """Yield the bytes of each rank, and the files, for a page."""
    loads = sharding.bytes_per_rank(catalogue) or []
    rows = [(f"rank {rank}", size(load)) for rank, load in enumerate(loads)]
    yield Table("bytes of each rank", [Column("rank"), Column("bytes", is_number=True)], rows, bars=loads)
    files = sorted(catalogue.own_files, key=lambda file: -file.size)
    of_files = [
        [file.name, "" if file.rank is None else f"rank {file.rank}", "missing" if file.missing else size(file.size)]
        for file in files
    ]
    columns = [Column("file"), Column("rank"), Column("bytes", is_number=True)]
    yield Table("files", columns, of_files, bars=[file.size for file in files])


def rows(tensors: Iterable[Tensor], catalogue: Catalogue) -> tuple[list[Column], Iterator[list[object]]]:
    """Return the columns of `--csv` and `--md`, and a row for each tensor."""
    of_tensors = map(TensorRows(catalogue).of, tensors)
    lines = ([*{**row, "shape": "x".join(map(str, row["shape"]))}.values()] for row in of_tensors)
    return [Column(name, name in NUMBERS) for name in COLUMNS], lines


def _run(catalogue: Catalogue, path: str, verbose: bool) -> Iterator[Block]:
    """Yield the checkpoints of a run, of which the one that is shown below is marked."""
    if not (run := catalogue.facts.get("run")):
        return
    yield Line([bold(path), f"  {plural(len(run), 'checkpoint')}"])
    rows: list[list[TextLike]] = []
    for entry in run if verbose else run[-_RUN:]:
        state: TextLike = "shown below" if entry["taken"] else ""
        if not entry["complete"]:
            state = Styled(f"not complete: {entry['why_not']}", "yellow")
        step = "" if entry["step"] is None else f"{entry['step']:,}"
        name = bold(entry["name"]) if entry["taken"] else entry["name"]
        rows.append([name, step, size(entry["file_bytes"]), entry["producer"] or entry["format"] or "", state])
    columns = [Column("checkpoint", fit="wrap"), Column("step", is_number=True), Column("bytes", is_number=True)]
    before = f"{len(run) - len(rows):,} before them, shown by -v" if len(rows) < len(run) else ""
    yield Table("", [*columns, Column("producer", fit="wrap"), _NAME], rows, before, None, name="Checkpoints")


def _facts(catalogue: Catalogue, step: float | None, epoch: int | None) -> Iterator[tuple[str, TextLike]]:
    facts = {key: value for key, value in catalogue.facts.items() if key not in _APART}
    yield "format", f"{catalogue.format}, {facts.pop('layout')}" if facts.get("layout") else catalogue.format
    yield from [(title, str(facts.pop(key))) for key, title in _TITLES.items() if facts.get(key)]
    if recognised := facts.pop("recognised", None):
        yield from _recognised(recognised, catalogue)
    if catalogue.world_size > 1:
        yield "world size", str(catalogue.world_size)
    if sharded := sharding.overview(catalogue):
        yield "sharding", sharded
    if step is not None:
        yield "step", f"{step:,}"
    if epoch is not None:
        yield "epoch", f"{epoch:,}"
    missing = sum(file.missing for file in catalogue.own_files)
    on_disk = f"{size(catalogue.nbytes())} in {plural(len(catalogue.own_files) - missing, 'file')}"
    yield "on disk", on_disk + (f", {missing:,} missing" if missing else "")
    if loads := sharding.bytes_per_rank(catalogue):
        yield "per rank", sharding.balance(loads)
    if catalogue.facts.get("assets"):
        yield "assets", ", ".join(catalogue.facts["assets"])
    if facts.get("metadata") == {"format": "pt"}:
        del facts["metadata"]  # which says as little as that the file is one of torch
    for key, value in facts.items():
        if value not in (None, "", ()):
            yield str(key).replace("_", " "), value if isinstance(value, str) else shown(value)


def _recognised(recognised: dict[str, Any], catalogue: Catalogue) -> Iterator[tuple[str, str]]:
    """Yield the facts on what a checkpoint of another tool is."""
    if recognised["title"] != catalogue.format:
        yield "recognised", recognised["title"]
    if recognised["parallelism"]:
        yield "parallelism", recognised["parallelism"]
    for name, value in recognised["details"].items():
        yield name, f"{value:,}" if isinstance(value, int) else value


def contents(summary: Summary, verbose: bool, *, exact: bool = False) -> Iterator[Block]:
    """Yield the parts, if `exact` with all digits, the modules of the models, the optimizers, other values, and tied
    weights."""
    if not summary.parts:
        return
    yield _parts(summary.parts, exact=exact)
    for part, lines in summary.trees:
        yield from _tree(part, lines)
    for optimizer in summary.headline.optimizers:
        yield _optimizer_state(optimizer)
        yield from hyperparameters(optimizer, verbose)
    yield from _objects(summary, verbose)
    ties = [(name, f"is {kept}") for name, kept in summary.ties]
    yield Table("tied weights", [_NAME, _NAME], ties, "shared storage" if ties else "", _OBJECTS)


def _parts(parts: Sequence[PartFigures], *, exact: bool = False) -> Table:
    """Return the table of the parts; if `exact`, with all digits and the bytes of each dtype."""
    number = "{:,}".format if exact else count
    rows: list[list[TextLike]] = [
        [
            bold(str(line)),
            *_numbers([line], number),
            ", ".join(f"{name} {size(n)}" for name, n in line.dtypes.items()) if exact else _dtypes([*line.dtypes]),
        ]
        for line in parts
    ]
    if len(parts) > 1:
        rows.append([dim("total"), *_numbers(parts, number), ""])
    numbers = [Column(title, is_number=True) for title in ("tensors", "elements", "bytes", "objects")]
    return Table("", [Column("part", fit="wrap"), *numbers, Column("dtypes", fit="wrap")], rows, "", None, name="Parts")


def _numbers(parts: Sequence[PartFigures], number: Callable[[int], str]) -> list[str]:
    tensors, objects = sum(p.tensor_count for p in parts), sum(p.object_count for p in parts)
    elements, nbytes = sum(p.numel for p in parts), sum(p.payload_bytes for p in parts)
    return [f"{tensors:,}", number(elements), size(nbytes), f"{objects:,}"]


def _dtypes(names: Sequence[str]) -> str:
    if len(names) <= _DTYPES:
        return ", ".join(names)
    return f"{', '.join(names[: _DTYPES - 1])} and {len(names) - _DTYPES + 1} more"


def _tree(part: Part, lines: Sequence[ModuleLine], name: str = "") -> Iterator[Block]:
    dtypes = {line.dtypes for line in lines}
    shared = _dtypes(dtypes.pop()) if len(dtypes) == 1 else ""
    rows = []
    for line in lines:
        times, shape = "", plural(line.tensors, "tensor")
        if line.shape is not None:
            shape = f"{f'{line.times:,} x ' if line.times > 1 else ''}{list(line.shape)}"
        elif line.folded > 1:
            times = f"  x{line.folded}"
        dtype = () if shared else (_dtypes(line.dtypes),)
        numbers = ("tied", "") if line.tied else (count(line.elements), size(line.nbytes))
        rows.append(("  " * line.depth + line.name + times, shape, *dtype, *numbers))
    columns = [_NAME, Column("shape", is_number=True), *([] if shared else [Column("dtype", drop=2)])]
    columns += [Column("elements", is_number=True, drop=1), Column("bytes", is_number=True)]
    yield Table(str(part), columns, rows, shared, _TREE, name=name)
    if closed := [line for line in lines if line.closed]:
        depth = max(line.closed for line in closed)
        yield Line([dim(f"  {plural(len(closed), 'module')} collapsed (--depth {depth} expands)")])


def _tensors(tensors: Sequence[Tensor], catalogue: Catalogue, verbose: bool) -> Table:
    placements = Placements(catalogue)
    rows: list[list[TextLike]] = []
    for tensor in tensors:
        placement = placements.of(tensor)
        label = "" if placement is None else str(placement)
        rows.append([bold(tensor.name), tensor.dtype.name, str(list(tensor.shape)), size(tensor.nbytes), label])
    columns = [_NAME, Column("dtype", drop=2), Column("shape"), Column("bytes", is_number=True, drop=3)]
    columns.append(Column("placement", drop=1))
    nbytes = size(sum(tensor.nbytes for tensor in tensors))
    aside = f"{len(tensors):,} of {sum(1 for _ in catalogue.tensors):,}, {nbytes}"
    for title in ("dtype", "placement"):
        i = [column.title for column in columns].index(title)
        if len(values := {str(row[i]) for row in rows}) == 1:
            # What all have is said once.
            aside += f", {shared}" if (shared := values.pop()) else ""
            columns[i : i + 1] = []
            for row in rows:
                row.pop(i)
    columns[-1] = columns[-1]._replace(fit="wrap")
    below = [[_shard(one, tensor) for one in shards(tensor, catalogue, folded=not verbose)] for tensor in tensors]
    return Table("tensors", columns, rows, aside, None, below=below, below_title="shard")


def _shard(shards: Shards, tensor: Tensor) -> str:
    ranks = f"{shards.ranks}: " if shards.ranks else ""
    if shards.count > 1:
        return f"{ranks}{shards.count:,} x {list(shards.sizes)}"
    return (
        f"{ranks}{box(shards.offsets, shards.sizes, tensor.shape)}  {shards.file}"
        if shards.file
        else f"{ranks}{list(shards.sizes)}"
    )


def _objects(summary: Summary, verbose: bool) -> Iterator[Block]:
    objects = [*summary.objects, *(summary.internal if verbose else [])]
    rows = [(f"{o.name}{f'  x{o.times}' if o.times > 1 else ''}", o.text) for o in objects]
    yield Table("objects", [_NAME, Column(fit="clip")], rows, limit=_OBJECTS)
    if summary.internal and not verbose:
        if not rows:
            yield Line([bold("objects")], is_apart=True)
        yield Line([dim(f"  {plural(len(summary.internal), 'internal field')} of the scheduler, shown by -v")])


def _optimizer_state(optimizer: OptimizerSummary) -> Table:
    rows = [(s.kind, s.dtype, f"{s.tensor_count:,}", count(s.numel), size(s.payload_bytes)) for s in optimizer.state]
    columns = [_NAME, Column("dtype"), *(Column(title, is_number=True) for title in ("tensors", "elements", "bytes"))]
    return Table("optimizer state", columns, rows, dotted(optimizer.root) if rows else "", None)


def hyperparameters(optimizer: OptimizerSummary, verbose: bool) -> Iterator[Block]:
    """Yield the hyper-parameters of an optimizer, with a column for each distinct set of values; on one line those that
    are the defaults of its class."""
    table = optimizer.table
    if table is None:
        return
    columns = table.columns if verbose else table.columns[:_COLUMNS]
    defaults = [] if verbose else optimizer.defaults
    rows: list[list[TextLike]] = []
    if any(c.params is not None for c in columns):
        rows.append([dim("parameters"), *(c.split for c in columns)])
    rows += [[name, *(c.values.get(name, "") for c in columns)] for name in table.names if name not in defaults]
    titles = [_NAME, *(Column(title, fit="wrap") for title in table.titles[: len(columns)])]
    yield Table("hyper-parameters", titles, rows, dotted(table.root), None)
    if more := len(table.columns) - len(columns):
        yield Line([dim(f"  {more:,} more, shown by -v")])
    if defaults:
        values = ", ".join(f"{name}={table.columns[0].values[name]}" for name in defaults)
        yield Text(f"defaults: {values}", indent=len("  defaults: "))
