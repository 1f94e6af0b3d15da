"""The tabs on the right, as text for a given width and height."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ldexp, prod

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from ckpttool.analysis.browsing.folding import Node
from ckpttool.analysis.browsing.pixels import as_matrix
from ckpttool.analysis.browsing.session import Opened
from ckpttool.analysis.describe.sharding import shards
from ckpttool.analysis.differences.elements import Difference
from ckpttool.analysis.statistics.histogram import Central, together
from ckpttool.analysis.statistics.places import place_of
from ckpttool.analysis.statistics.results import TensorStatistics
from ckpttool.catalogue.entries import Tensor
from ckpttool.reports.report import box
from ckpttool.reports.statistics import number, summed
from ckpttool.text import count, plural, safe, size
from ckpttool.transfer.numbers import Array, has_numbers

TABS = ("Tensor", "Histogram", "Heat map", "Shards", "Optimizer", "Files", "Findings")

_DIM, _BOLD, _BAD = Style(dim=True), Style(bold=True), Style(color="red")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "white", "bright_black")
_RAMP = ((0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164))  # inferno
_SHADES = " ░▒▓█"
_SHOWN = 200  # lines of a table
_MAP = 12  # lines of a map of shards
_FEW_BARS = 13  # of a histogram below a heat map
_LABEL = 16  # characters of a layer's name
_WAIT = "not read yet"


@dataclass(slots=True)
class Look:
    """What is looked at: a tensor by its number or a line of the tree, and the room for it."""

    opened: Opened
    tensor: int | None
    node: Node | None
    width: int
    height: int
    with_colour: bool = True

    @property
    def entry(self) -> Tensor | None:
        """The tensor."""
        return self.opened.tensors[self.tensor] if self.tensor is not None else None

    @property
    def row(self) -> TensorStatistics | None:
        """Its statistics, if they are known."""
        return self.opened.survey.rows[self.tensor] if self.tensor is not None else None

    @property
    def waiting(self) -> str:
        """Why its statistics are not known."""
        survey = self.opened.survey
        if self.tensor in survey.errors:
            return survey.errors[self.tensor]
        if survey.damage:
            return survey.damage
        return _WAIT if survey.is_local else "not on this machine: Enter reads it"

    @property
    def members(self) -> list[int]:
        """The tensors of the line."""
        return [self.tensor] if self.tensor is not None else self.node.members if self.node is not None else []


def tensor(look: Look) -> Text:
    """Return what a tensor is, and its statistics."""
    entry, row = look.entry, look.row
    if entry is None:
        return _several(look)
    text = _title(safe(entry.name))
    placement = look.opened.placements.of(entry)
    facts = [
        ("part", str(entry.part)),
        ("dtype", entry.dtype.name),
        ("shape", str(list(entry.shape))),
        ("size", f"{count(entry.numel)} elements, {size(entry.nbytes)}"),
        ("placement", str(placement) if placement is not None else ""),
        ("tied to", safe(row.tied_to) if row is not None and row.tied_to else ""),
    ]
    _facts(text, facts)
    text.append("\n")
    if row is None:
        text.append(f"{look.waiting}\n", _DIM)
        return text
    s, values = row.statistics, row.values()
    bad = [(name, f"{int(values[name] or 0):,}") for name in ("nan", "inf") if values[name]]
    for name, value in bad:
        text.append(f"! {value} {'NaN' if name == 'nan' else 'infinite'}\n", _BAD)
    shown = ["min", "max", "mean", "std", "rms", "absmax", "l1", "l2", "kurtosis", "zeros", "subnormals", "update"]
    shown += ["outlying_rows", "outlying_columns"]
    cells = [(name.replace("_", " "), _figure(values[name])) for name in shown if values[name] is not None]
    _grid(text, cells, look.width)
    if s.quantiles:
        text.append("\n")
        text.append("quantiles" + (f" (±{100 * s.quantile_error:.2g} %)" if s.quantile_error else "") + "\n", _DIM)
        _grid(text, [(name, number(value)) for name, value in s.quantiles.items()], look.width)
    for what, channels in (("row", row.rows), ("column", row.columns)):
        if channels is not None and channels.outlying:
            text.append(f"\n{what} {channels.largest} has the largest magnitude, {number(channels.max)}, ")
            text.append(f"{channels.max / channels.median:.3g} times the median {what}")
    return text


def _several(look: Look) -> Text:
    node = look.node
    if node is None:
        return Text("nothing is selected", _DIM)
    text = _title(safe(node.label))
    totals = node.totals
    rows = [look.opened.survey.rows[i] for i in node.members]
    known = [row for row in rows if row is not None]
    facts = [
        ("tensors", f"{len(rows):,}"),
        ("elements", count(totals.elements)),
        ("size", size(totals.nbytes)),
        ("dtype", ", ".join(totals.dtypes[:4])),
        ("shape", str(list(totals.shapes[0])) if len(totals.shapes) == 1 else ""),
        ("read", f"{len(known):,} of {len(rows):,}" if len(known) < len(rows) else ""),
    ]
    _facts(text, facts)
    if not node.is_list:
        bad = sum(bool(row.statistics.nans or row.statistics.infs) for row in known)
        if bad:
            text.append(f"\n! {plural(bad, 'tensor')} with NaN or infinities\n", _BAD)
        text.append("\n")
        _cells(text, node, look)
        text.append("\n")
        _values(text, look, _FEW_BARS)
        return text
    text.append("\n")
    top = max((row.statistics.rms or 0.0 for row in known), default=0.0)
    room = max(4, look.width - 32)
    text.append(f"{'':<9}{'rms':>10}{'absmax':>11}\n", _DIM)
    for child in node.children[:_SHOWN]:
        row = look.opened.survey.rows[child.members[0]]
        text.append(set_cell_size(child.label, 9))
        if row is None:
            text.append(f"{'·':>10}\n", _DIM)
            continue
        s = row.statistics
        text.append(f"{number(s.rms):>10}{number(s.absmax):>11} ")
        text.append(_bar(s.rms or 0.0, top, room), Style(color="cyan"))
        text.append(" NaN" if s.nans else " inf" if s.infs else "", _BAD)
        text.append("\n")
    _more(text, len(node.children) - _SHOWN)
    return text


def histogram(look: Look) -> Text:
    """Return how many elements there are of each value, in intervals of one width; below, the magnitude spectrum."""
    entry, row = look.entry, look.row
    if entry is None:
        return _histogram_of_several(look)
    text = _title(safe(entry.name))
    if row is None or row.histogram is None:
        text.append(look.waiting if row is None else "its elements are not numbers", _DIM)
        return text
    _linear(text, row.histogram.central, look)
    text.append("\n")
    _spectrum(text, row, look)
    s = row.statistics
    text.append(f"; {s.nans:,} NaN" if s.nans else "", _BAD)
    text.append(f"; {s.infs:,} infinite" if s.infs else "", _BAD)
    return text


def _histogram_of_several(look: Look) -> Text:
    """Return one histogram of the elements of all tensors of a line, as far as they are read."""
    if look.node is None:
        return Text("nothing is selected", _DIM)
    text = _title(safe(look.node.label))
    _values(text, look)
    return text


def _values(text: Text, look: Look, most: int | None = None) -> None:
    rows = [row for row in (look.opened.survey.rows[i] for i in look.members) if row is not None]
    known = [row.histogram.central for row in rows if row.histogram is not None and row.statistics.numel > 1]
    found = together([one for one in known if one is not None])
    if found is None:
        text.append("its elements are not numbers" if rows else look.waiting, _DIM)
        return
    _linear(text, found, look, most)
    text.append(f"of {plural(len(known), 'tensor')}")
    text.append(f"; {len(look.members) - len(rows):,} not read yet" if len(rows) < len(look.members) else "", _DIM)


def _linear(text: Text, central: Central | None, look: Look, most: int | None = None) -> None:
    if central is None or len(central.counts) < 2:
        return
    counts = summed(central.counts, min(len(central.counts), most or max(7, look.height - 3)))
    step = (central.high - central.low) / len(counts)
    room, top = max(3, look.width - 12), max(counts)
    apart = [f"; {n:,} {where}" for n, where in ((central.below, "smaller"), (central.above, "larger")) if n]
    text.append(f"quantiles 0.1 % to 99.9 %{''.join(apart)}\n", _DIM)
    for k, n in enumerate(counts):
        middle = central.low + (k + 0.5) * step
        text.append(f"{number(0.0 if abs(middle) < step / 2 else middle):>10}  ", _DIM)
        text.append(_bar(n, top, room) + "\n", Style(color="magenta" if middle < -step / 2 else "cyan"))


def _spectrum(text: Text, row: TensorStatistics, look: Look) -> None:
    assert row.histogram is not None
    text.append("magnitude spectrum\n", _BOLD)
    sides: dict[int, dict[int, int]] = {-1: {}, 1: {}}
    zeros = 0
    for sign, step, n in row.histogram.counts:
        if sign:
            sides[sign][step // 4] = sides[sign].get(step // 4, 0) + n
        else:
            zeros += n
    powers = {*sides[-1], *sides[1]}
    most = max([*sides[-1].values(), *sides[1].values(), 1])
    room = max(3, (look.width - 13) // 2)
    text.append(f"{'negative':>{room}}{'magnitude':^12}{'positive'}\n", _DIM)
    rows = range(max(powers), min(powers) - 1, -1) if powers else range(0)
    # Of a wide range, the powers of two that have next to nothing are together at the end.
    fit = max(6, look.height - 5)
    for power in list(rows)[:fit]:
        left, right = sides[-1].get(power, 0), sides[1].get(power, 0)
        bar = _bar(left, most, room)
        text.append(" " * (room - cell_len(bar)) + "█" * cell_len(bar), Style(color="magenta"))
        text.append(f"{ldexp(1.0, power - 1):^12.3g}")
        text.append(_bar(right, most, room) + "\n", Style(color="cyan"))
    rest = list(rows)[fit:]
    if rest:
        n = sum(sides[-1].get(p, 0) + sides[1].get(p, 0) for p in rest)
        text.append(f"{n:,} smaller than {ldexp(1.0, rest[0]):.3g}\n", _DIM)
    s = row.statistics
    text.append(f"{s.numel:,} elements, each line twice the one below")
    text.append(f"; {zeros:,} zeros" if zeros else "")


def no_picture(look: Look) -> str:
    """Return why there is no picture of what is selected; nothing if there is one."""
    entry, survey = look.entry, look.opened.survey
    if entry is None:
        return ""
    if not entry.numel or not (has_numbers(entry.dtype) or entry.dtype.kind == "bool"):
        return "its elements are not numbers"
    if survey.damage or look.tensor in survey.errors:
        return look.waiting
    if not survey.is_local and look.row is None:
        return look.waiting
    return ""


def picture_size(look: Look, with_colour: bool) -> tuple[int, int]:
    """Return how many cells high and wide a picture is: two above each other in a character, with colours."""
    height = max(1, look.height - 4)
    return (2 * height if with_colour else height), max(1, look.width)


def heat_map(look: Look, grid: Array | None, with_colour: bool) -> Text:
    """Return the largest magnitude in each cell of a tensor, the brighter the larger."""
    entry = look.entry
    assert entry is not None
    text = _title(safe(entry.name))
    if grid is None:
        text.append("reading ...", _DIM)
        return text
    known = grid[grid == grid]
    low, top = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    shares = (grid - low) / (top - low) if top > low else grid * 0
    height, width = grid.shape
    rows, columns = as_matrix(entry.shape)
    if with_colour:
        for y in range(0, height, 2):
            for x in range(width):
                lower = _colour(shares[y + 1][x]) if y + 1 < height else None
                text.append("▀", Style(color=_colour(shares[y][x]), bgcolor=lower))
            text.append("\n")
    else:
        for line in shares:
            text.append("".join("!" if x != x else _SHADES[min(4, int(5 * x))] for x in line) + "\n")
    text.append(f"{rows:,} rows x {columns:,} columns; in a cell at most {-(-rows // height):,} x ")
    text.append(f"{-(-columns // width):,}\n")
    text.append(f"largest |x|: {number(low)} dark to {number(top)} bright")
    text.append("; NaN or inf" if known.size < grid.size else "", _BAD)
    return text


def heat_map_of_several(look: Look) -> Text:
    """Return a cell for each tensor of a line: a row for each layer or module, a column for each kind, the brighter the
    larger the rms is next to the others of its kind."""
    node = look.node
    if node is None:
        return Text("nothing is selected", _DIM)
    text = _title(safe(node.label))
    _cells(text, node, look)
    return text


def _cells(text: Text, node: Node, look: Look) -> None:
    survey = look.opened.survey
    cells: dict[str, dict[str, TensorStatistics | None]] = {}
    kinds: dict[str, None] = {}
    for i in node.members:
        if (entry := look.opened.tensors[i]).numel > 1:
            place = place_of(entry, look.opened.parameter_names)
            line = ".".join(filter(None, (place.layer, place.expert))) or place.kind.rpartition(".")[0]
            kind = f"{place.kind}.{place.moment}" if place.moment else place.kind
            cells.setdefault(line, {})[kind] = survey.rows[i]
            kinds[kind] = None
    shown = [*kinds][: max(1, (look.width - _LABEL - 2) // 2)]
    of_kind = {kind: [row for line in cells.values() if (row := line.get(kind)) is not None] for kind in shown}
    sizes = {kind: [row.statistics.rms or 0.0 for row in rows] for kind, rows in of_kind.items()}
    for line, of_line in [*cells.items()][:_SHOWN]:
        text.append(_end(safe(line), _LABEL).rjust(_LABEL) + " ", _DIM)
        for kind in shown:
            _cell(text, of_line.get(kind, ""), sizes[kind], look.with_colour)
        text.append("\n")
    _more(text, len(cells) - _SHOWN)
    text.append(
        "a row is a layer or module, a column a kind, dark to bright the rms within a kind; ! NaN, · not read\n", _DIM
    )
    for k, kind in enumerate(shown):
        text.append(f"{k + 1:>3} {safe(kind)}\n", _DIM)
    _more(text, len(kinds) - len(shown))


def _cell(text: Text, row: TensorStatistics | str | None, sizes: Sequence[float], with_colour: bool) -> None:
    if isinstance(row, str) or row is None:
        text.append("  " if isinstance(row, str) else " ·", _DIM)
        return
    s, low, top = row.statistics, min(sizes), max(sizes)
    share = ((s.rms or 0.0) - low) / (top - low) if low < top < float("inf") else 0.5
    if s.nans or s.infs:
        text.append(" !", _BAD)
    elif with_colour:
        text.append("██", Style(color=_colour(0.15 + 0.85 * share)))
    else:
        text.append(2 * _SHADES[min(4, 1 + int(4 * share))])


def _colour(share: float) -> str:
    """Return the colour of a share of the largest, dark to bright: black, violet, orange, yellow, white. Pure."""
    if share != share:
        return "#ff00ff"
    at = min(share, 0.999999) * (len(_RAMP) - 1)
    i = int(at)
    mixed = (round(a + (b - a) * (at - i)) for a, b in zip(_RAMP[i], _RAMP[i + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def shard_table(look: Look) -> Text:
    """Return where the elements of a tensor lie: ranks, boxes and files."""
    entry = look.entry
    if entry is None:
        return Text("shards are shown for one tensor", _DIM)
    text = _title(safe(entry.name))
    catalogue = look.opened.catalogue
    placement = look.opened.placements.of(entry)
    if placement is not None:
        text.append(f"{placement}\n")
    if len(entry.chunks) > 1:
        _map(text, entry, look)
    rows = shards(entry, catalogue, folded=False)
    text.append("\n")
    for i, shard in enumerate(rows[:_SHOWN]):
        text.append("■ ", Style(color=_COLOURS[i % len(_COLOURS)]))
        ranks = f"{shard.ranks}: " if shard.ranks else ""
        text.append(f"{ranks}{box(shard.offsets, shard.sizes, entry.shape)}\n")
        text.append(f"  {safe(shard.file)}\n", _DIM)
    _more(text, len(rows) - _SHOWN)
    return text


def _map(text: Text, entry: Tensor, look: Look) -> None:
    """Draw a tensor as a rectangle of its shards: rows downwards, the last dimension to the right."""
    shape = entry.shape
    if not shape or not prod(shape):
        return
    height = min(_MAP, max(2, look.height - 8), shape[0]) if len(shape) > 1 else 1
    width = min(look.width - 2, 2 * shape[-1])
    last = len(shape) - 1
    order = sorted(range(len(entry.chunks)), key=entry.chunks.offsets.__getitem__)
    text.append("\n")
    for y in range(height):
        at_row = y * shape[0] // height
        for x in range(width):
            at_column = x * shape[last] // width
            found = next((n for n, i in enumerate(order) if _holds(entry, i, at_row, at_column)), None)
            if found is None:
                text.append("·", _DIM)
            else:
                text.append("█" if found % 2 else "▓", Style(color=_COLOURS[found % len(_COLOURS)]))
        text.append("\n")


def _holds(entry: Tensor, i: int, row: int, column: int) -> bool:
    offsets, sizes, last = entry.chunks.offsets[i], entry.chunks.sizes[i], len(entry.shape) - 1
    in_row = last == 0 or offsets[0] <= row < offsets[0] + sizes[0]
    return in_row and offsets[last] <= column < offsets[last] + sizes[last]


def optimizer(look: Look) -> Text:
    """Return what an optimizer keeps of a parameter, and its hyper-parameters."""
    entry, opened = look.entry, look.opened
    text = Text()
    if entry is not None:
        text = _title(safe(entry.name))
        for i in opened.moments_of(entry):
            moment, row = opened.tensors[i], opened.survey.rows[i]
            text.append(moment.name.rpartition(".")[2], _BOLD)
            text.append(f"  {moment.dtype.name} {list(moment.shape)}, {size(moment.nbytes)}\n")
            if row is None:
                text.append(f"  {_WAIT}\n", _DIM)
                continue
            names = ("rms", "absmax", "zeros", "update") if moment.numel > 1 else ("max",)
            values = row.values()
            figures = [(name if name != "max" else "value", values[name]) for name in names]
            _grid(text, [(name, _figure(value)) for name, value in figures if value is not None], look.width, indent=2)
        if entry.part.kind == "model" and not opened.moments_of(entry):
            text.append(f"{safe(opened.unnamed) or 'no optimizer state goes by this name'}\n", _DIM)
    for one in opened.headline.optimizers:
        text.append(f"\n{one}\n", _BOLD)
        for column, title in zip(one.table.columns, one.table.titles, strict=True) if one.table is not None else ():
            params = f", {column.split} parameter{'' if column.params == 1 else 's'}" if column.split else ""
            text.append(f"{title}{params}\n", _DIM)
            _grid(text, [(safe(name), safe(value)) for name, value in column.values.items()], look.width, indent=2)
    if not opened.headline.optimizers:
        text.append("\nthere is no optimizer in this checkpoint\n", _DIM)
    return text


def files(look: Look) -> Text:
    """Return the files of the checkpoint, and what of the selected tensors lies in each."""
    catalogue = look.opened.catalogue
    used: dict[int, int] = {}
    for i in look.members:
        entry = look.opened.tensors[i]
        for chunk_sizes, file in zip(entry.chunks.sizes, entry.chunks.file, strict=True):
            used[file] = used.get(file, 0) + prod(chunk_sizes) * entry.dtype.itemsize
    what = safe(look.entry.name) if look.entry is not None else safe(look.node.label) if look.node is not None else ""
    text = _title(what)
    own = [(i, each) for i, each in enumerate(catalogue.files) if not each.scratch]
    text.append(f"{size(catalogue.nbytes())} in {plural(len(own), 'file')}; ● has what is selected\n\n", _DIM)
    own.sort(key=lambda item: item[0] not in used)
    for i, one in own[:_SHOWN]:
        rank = f"rank {one.rank}  " if one.rank is not None else ""
        text.append("● " if i in used else "  ", Style(color="cyan"))
        room = look.width - 2
        text.append(_end(safe(one.name), room) + "\n", _BAD if one.missing else Style())
        text.append(f"  {rank}{'missing' if one.missing else size(one.size)}", _DIM)
        text.append(f", {size(used[i])} of it\n" if i in used else "\n", _DIM)
    _more(text, len(own) - _SHOWN)
    return text


def findings(look: Look) -> Text:
    """Return what stands out, and what is wrong."""
    survey, catalogue = look.opened.survey, look.opened.catalogue
    text = Text()
    wrong = [*([survey.damage] if survey.damage else []), *(fault.message for fault in catalogue.faults)]
    wrong += [f"{look.opened.tensors[i].name}: {error}" for i, error in [*survey.errors.items()][:_SHOWN]]
    for message in dict.fromkeys(wrong):
        text.append("! ", _BAD)
        text.append(f"{safe(message)}\n")
    name = look.entry.name if look.entry is not None else None
    for finding in survey.findings[:_SHOWN]:
        is_here = name in finding.names
        text.append("▶ " if is_here else "! ", _BAD if finding.kind in ("nan", "inf") else Style(color="yellow"))
        text.append(f"{safe(finding.message)}\n", _BOLD if is_here else Style())
    _more(text, len(survey.findings) - _SHOWN)
    for warning in catalogue.warnings[:_SHOWN]:
        text.append("! ", Style(color="yellow"))
        text.append(f"{safe(str(warning))}\n")
    state = "all values are read" if survey.finished else f"{survey.done:,} of {len(survey.rows):,} tensors are read"
    text.append(f"{'' if text.plain else 'nothing stands out; '}{state}\n", _DIM)
    return text


VIEWS: dict[str, Callable[[Look], Text]] = {
    "Tensor": tensor,
    "Histogram": histogram,
    "Shards": shard_table,
    "Optimizer": optimizer,
    "Files": files,
    "Findings": findings,
}
"""All but the heat map, which is read for the room that it has."""

# Parts of them --------------------------------------------------------------------------------------------------------


def _title(name: str) -> Text:
    text = Text(overflow="fold")
    text.append(f"{name}\n", _BOLD)
    return text


def _facts(text: Text, facts: Iterable[tuple[str, str]]) -> None:
    for name, value in facts:
        if value:
            text.append(f"{name:<10}", _DIM)
            text.append(f"{value}\n")


def _grid(text: Text, cells: Sequence[tuple[str, str]], width: int, indent: int = 0) -> None:
    """Add names and values, as many side by side as there is room for."""
    widest = max((cell_len(name) + cell_len(value) for name, value in cells), default=0) + 2
    columns = max(1, (width - indent + 2) // (widest + 2))
    for i, (name, value) in enumerate(cells):
        text.append(" " * indent if i % columns == 0 else "  ")
        text.append(name, _DIM)
        text.append(" " * max(1, widest - cell_len(name) - cell_len(value)) + value)
        if i % columns == columns - 1 or i == len(cells) - 1:
            text.append("\n")


def _figure(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else number(value)


def _bar(value: float, top: float, room: int) -> str:
    """Return a bar whose length is a share of `room`, to an eighth of a cell; none but of zero is empty. Pure."""
    if not (0 < value < float("inf")) or top <= 0:
        return ""
    eighths = max(1, round(8 * room * min(1.0, value / top)))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _end(text: str, room: int) -> str:
    return text if cell_len(text) <= room else "…" + text[-(room - 1) :]


def _more(text: Text, n: int) -> None:
    if n > 0:
        text.append(f"and {n:,} more\n", _DIM)


def difference(
    found: Difference, titles: Sequence[str], shape: Sequence[int], rows: Sequence[TensorStatistics | None]
) -> Text:
    """Return how two tensors differ."""
    text = Text(overflow="fold")
    for sign, title in zip("AB", titles, strict=True):
        text.append(f"{sign}  ", _BOLD)
        text.append(f"{title}\n")
    text.append("\n")
    if not found.differing:
        text.append(f"all {found.numel:,} elements are equal, bit for bit", Style(color="green"))
        return text
    first = found.index(tuple(shape))
    facts = [
        ("differing", f"{found.differing:,} of {found.numel:,} elements, {100 * found.differing / found.numel:.3g} %"),
        ("absolute", f"{number(found.absolute)} at most" if found.absolute is not None else ""),
        ("relative", f"{number(found.relative)} at most" if found.relative is not None else ""),
        ("ULP", f"{found.ulp:,} at most" if found.ulp is not None else ""),
        ("cosine", f"{found.cosine:.9g}" if found.cosine is not None else ""),
        ("NaN", f"{found.nans:,} on one side only" if found.nans else ""),
        ("first", f"{first}: {found.values[0]} and {found.values[1]}" if found.values is not None else ""),
    ]
    _facts(text, facts)
    if all(row is not None for row in rows):
        text.append(f"\n{'':<10}{'A':>14}{'B':>14}\n", _DIM)
        a, b = (row.values() for row in rows if row is not None)
        for name in ("min", "max", "mean", "std", "rms", "absmax", "zeros", "nan"):
            text.append(f"{name:<10}", _DIM)
            text.append(f"{_figure(a[name]):>14}{_figure(b[name]):>14}\n")
    text.rstrip()
    return text
