"""What the pages draw, as a document for JSON: what tensors have in common is there once. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpttool.analysis.describe.sharding import MeshPlacement, Placements
from ckpttool.analysis.statistics.histogram import Central, Compact
from ckpttool.analysis.statistics.results import COLUMNS, GroupStatistics, Stats, TensorStatistics
from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.layout.mesh import Mesh, mesh_boxes
from ckpttool.text import safe

Document = dict[str, Any]

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""The digits of the counts in histograms."""

_MAX_TENSORS = 25_000  # tensors on a page
_DETAILED = 4_000  # tensors of which every statistic and a histogram are there
_LISTED = ("rms", "absmax", "nan")
_COLUMNS_OF_LIST = 4
_FEW = ("numel", "zeros", "nan", "inf", "min", "max", "mean", "rms", "absmax", "kurtosis", "update")
_BOXES = 20_000  # of all tilings
_OWNERS = 300_000  # characters that say which file each box is in
_THUMBNAILS = 1_000_000  # characters of all
_PER_OCTAVE = 64  # steps of a count
_KNOWN = {"Replicate", *(f"Shard({dim})" for dim in range(8))}
_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,8})(?=\.|$)", re.ASCII)
_OF_STEPS = ("rms", "absmax", "mean", "std", "min", "max", "kurtosis", "l2")


Figures = Mapping[str, Mapping[str, float | None]]
"""Further figures of tensors by the name of the figure and that of the tensor: `{"max ulp": {"model.w": 3}}`."""


def document(
    stats: Stats,
    catalogue: Catalogue,
    *,
    figures: Figures | None = None,
    columns: Sequence[str] | None = None,
    after: Catalogue | None = None,
) -> Document:
    """Return the document of a checkpoint, or of the steps of a run and the last of them; with the figures, which come
    before the statistics, some columns of these, and the layout that the tensors will have `after` something."""
    known = {row.name for row in stats.tensors}
    named = {name for finding in stats.findings for name in finding.subjects if name in known}
    shown = _shown(stats.tensors, named)
    return {
        "omitted": len(stats.tensors) - len(shown),
        "tensors": _tensors(shown, named, figures or {}, columns, detailed=len(shown) <= _DETAILED),
        "listed": [*(figures or _LISTED)][:_COLUMNS_OF_LIST],
        "messages": _messages(stats, named),
        "layout": _layout(shown, catalogue),
        "after": _layout(shown, after) if after is not None else None,
        "steps": _steps(stats),
    }


def _layout(rows: Sequence[TensorStatistics], catalogue: Catalogue) -> Document:
    """Return the files, and where in them the tensors lie."""
    files = [[safe(file.name), file.size, file.rank] for file in catalogue.own_files]
    return {"files": files, "shards": _shards(rows, catalogue)}


def _shown(tensors: Sequence[TensorStatistics], named: Collection[str]) -> list[TensorStatistics]:
    """Return the tensors that are listed: all, or those that stand out and the largest."""
    if len(tensors) <= _MAX_TENSORS:
        return [*tensors]
    largest = sorted(tensors, key=lambda row: (row.name not in named, -row.nbytes))[:_MAX_TENSORS]
    kept = {row.name for row in largest}
    return [row for row in tensors if row.name in kept]


class _Numbered:
    """Distinct values, each of which gets a number."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    @property
    def values(self) -> list[Any]:
        return [*self.numbers]


def _tensors(
    rows: Sequence[TensorStatistics],
    named: Collection[str],
    figures: Figures,
    columns: Sequence[str] | None,
    *,
    detailed: bool,
) -> Document:
    """Return the tensors column by column; a column with one value is that value. Statistics that no tensor has are
    left out."""
    texts, names = _Numbered(), _Numbered()
    at = {row.name: i for i, row in enumerate(rows)}
    values = [row.values() for row in rows]
    columns = columns or (COLUMNS if detailed else _FEW)
    keeps = [detailed or row.name in named for row in rows]
    digits = 5 if detailed else 4
    statistics = {name: _column(_figure(one[name], digits) for one in values) for name in columns}
    others = {name: _column(_figure(of.get(row.name), digits) for row in rows) for name, of in figures.items()}
    return {
        "count": len(rows),
        "name": [_name(row.name, names) for row in rows],
        "names": [[safe(piece) for piece in pieces] for pieces in names.values],
        "part": _column(texts(safe(row.part)) for row in rows),
        "moment": _column(texts(safe(row.moment)) for row in rows),
        "layer": _column(texts(safe(row.layer)) for row in rows),
        "kind": _column(texts(safe(row.kind)) for row in rows),
        "expert": _column(texts(row.expert) for row in rows),
        "dtype": _column(texts(row.dtype) for row in rows),
        "shape": _column(texts("×".join(map(str, row.shape))) for row in rows),
        "bytes": _column(row.nbytes for row in rows),
        "tied": {i: at[row.tied_to] for i, row in enumerate(rows) if row.tied_to in at},
        "texts": texts.values,
        "values": {name: column for name, column in (others | statistics).items() if column is not None},
        "rows": {
            i: [_channels(row.rows), _channels(row.columns)]
            for i, (row, kept) in enumerate(zip(rows, keeps, strict=True))
            if kept and row.rows is not None
        },
        "histograms": {
            i: _histogram(row.histogram)
            for i, (row, kept) in enumerate(zip(rows, keeps, strict=True))
            if kept and row.histogram is not None and row.statistics.numel > 1
        },
        "central": {
            i: _central(row.histogram.central)
            for i, (row, kept) in enumerate(zip(rows, keeps, strict=True))
            if kept and row.histogram is not None and row.histogram.central is not None and row.statistics.numel > 1
        },
        "thumbnails": _thumbnails(rows, named, keeps),
    }


def _thumbnails(
    rows: Sequence[TensorStatistics], named: Collection[str], keeps: Sequence[bool]
) -> dict[int, list[Any]]:
    """Return as many as there is place for: first of tensors that stand out, then of the largest ones. All have a
    quarter of their blocks if the whole ones are too many."""
    of_rows = {i: row.thumbnail for i, row in enumerate(rows) if keeps[i] and row.tied_to is None}
    found = {i: one for i, one in of_rows.items() if one is not None}
    if sum(len(one.levels) for one in found.values()) > _THUMBNAILS:
        found = {i: one.halved() for i, one in found.items()}
    drawn, letters = {}, 0
    for i in sorted(found, key=lambda i: (rows[i].name not in named, -rows[i].nbytes)):
        one = found[i]
        letters += len(one.levels)
        if letters > _THUMBNAILS:
            break
        drawn[i] = [one.rows, one.columns, _figure(one.low), _figure(one.high), one.levels]
    return drawn


def _name(name: str, names: _Numbered) -> list[int]:
    """Return the number of the pieces between the numbers of a name, and these numbers."""
    pieces = _NUMBER.split(name)
    return [names(tuple(pieces[::2])), *map(int, pieces[1::2])]


def _column(values: Iterable[Any]) -> Any:
    column = [*values]
    return column[0] if column and all(value == column[0] for value in column) else column


def _figure(value: float | None, digits: int = 5) -> Any:
    """Return a number as JSON has it: infinities are words."""
    if value is None or type(value) is int:
        return value
    if not math.isfinite(value):
        return str(float(value)).replace("inf", "Infinity").replace("nan", "NaN")
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _channels(channels: Any) -> Any:
    if channels is None:
        return None
    figures = _figure(channels.median), _figure(channels.max)
    return [channels.count, *figures, channels.largest, channels.outlying]


def _histogram(histogram: Compact) -> list[Any]:
    """Return the first half-octave, and the counts of negative and of positive elements in each, of two digits: the
    logarithm of the count."""
    halves: dict[tuple[int, int], int] = {}
    for sign, step, count in histogram.counts:
        if sign:
            halves[sign, step >> 1] = halves.get((sign, step >> 1), 0) + count
    if not halves:
        return [0, "", ""]
    places = [place for _, place in halves]
    first, last = min(places), max(places)
    return [first, *("".join(_digits(halves.get((s, p), 0)) for p in range(first, last + 1)) for s in (-1, 1))]


def _central(histogram: Central) -> list[Any]:
    """Return the limits of a linear histogram, its largest count, each count as a share of it in one digit, and how
    many elements are below and above."""
    most, last = max(histogram.counts), len(ALPHABET) - 1
    shares = "".join(ALPHABET[-(-last * n // most) if most else 0] for n in histogram.counts)
    return [_figure(histogram.low), _figure(histogram.high), most, shares, histogram.below, histogram.above]


def _digits(count: int) -> str:
    level = 0 if count == 0 else min(1 + round(math.log2(count) * _PER_OCTAVE), len(ALPHABET) ** 2 - 1)
    return ALPHABET[level // len(ALPHABET)] + ALPHABET[level % len(ALPHABET)]


def _messages(stats: Stats, named: set[str]) -> dict[str, list[str]]:
    """Return what stands out of each tensor."""
    messages: dict[str, list[str]] = {safe(name): [] for name in named}
    for finding in stats.findings:
        for name in named.intersection(finding.subjects):
            messages[safe(name)].append(safe(finding.message))
    return messages


# Shards ---------------------------------------------------------------------------------------------------------------


def _shards(rows: Sequence[TensorStatistics], catalogue: Catalogue) -> Document:
    """Return how each tensor is cut, and in which file each box is. Tensors that are cut alike share their boxes."""
    by_name = {tensor.name: tensor for tensor in catalogue.tensors}
    placements = Placements(catalogue)
    tilings, owners, placed = _Numbered(), _Numbered(), _Numbered()
    of_tensors: list[list[int] | None] = []
    known: dict[tuple[int, int, Any], int] = {}
    holders: dict[str, list[list[int]] | None] = {}
    boxes = letters = 0
    for row in rows:
        tensor = by_name.get(row.name)
        if tensor is None:
            of_tensors.append(None)
            continue
        chunks = tensor.chunks
        # In a large index tensors of one shape share their boxes.
        key = id(chunks.offsets), id(chunks.sizes), tensor.shape
        if key not in known:
            is_new = (tiling := (tensor.shape, tuple(chunks.offsets), tuple(chunks.sizes))) not in tilings.numbers
            fits = boxes + len(chunks) <= _BOXES
            known[key] = tilings(tiling) if not is_new or fits else -1
            boxes += len(chunks) if is_new and fits else 0
        files = ranges_in_order(chunks.file)
        if files not in owners.numbers and letters + len(files) > _OWNERS:
            files = ""
        letters += 0 if files in owners.numbers else len(files)
        placement = placements.of(tensor)
        number = placed("" if placement is None else str(placement))
        of_tensors.append([known[key], owners(files), number, len(chunks)])
        cut_as = f"{known[key]},{number}"
        if known[key] >= 0 and cut_as not in holders:
            holders[cut_as] = _holders(tensor, placement)
    cut = [[shape, [*map(list, zip(offsets, sizes, strict=True))]] for shape, offsets, sizes in tilings.values]
    named = {"tilings": cut, "owners": owners.values, "placements": placed.values, "tensors": of_tensors}
    return named | {"holders": holders}


def _holders(tensor: Tensor, placement: MeshPlacement | None) -> list[list[int]] | None:
    """Return the ranks that hold each box; None where no more than one does."""
    if placement is None or "Replicate" not in placement.placements or not _KNOWN.issuperset(placement.placements):
        return None
    names = tuple(map(str, range(len(placement.mesh))))
    dims = {name: int(one[6:-1]) for name, one in zip(names, placement.placements, strict=True) if one != "Replicate"}
    if any(dim >= len(tensor.shape) for dim in dims.values()):
        return None
    found = dict(mesh_boxes(tensor.shape, Mesh(names, placement.mesh), dims))
    return [found.get(box, []) for box in zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True)]


def ranges_in_order(numbers: Iterable[int]) -> str:
    """Return numbers as words, in their order: `0-2,7` for 0, 1, 2, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# Steps ----------------------------------------------------------------------------------------------------------------


def _steps(stats: Stats) -> Document | None:
    if len(stats.steps) < 2:
        return None
    of_steps = [{_identity(group): group for group in one.groups if group.by == "kind"} for one in stats.steps]
    kinds = dict.fromkeys(identity for of_step in of_steps for identity in of_step)
    return {
        "steps": [one.step if one.step is not None else safe(one.path) for one in stats.steps],
        "findings": [len(one.findings) for one in stats.steps],
        "kinds": [
            {
                "name": [safe(word) for word in identity],
                "values": {name: [*_of_steps(of_steps, identity, name)] for name in _OF_STEPS},
            }
            for identity in kinds
        ],
    }


def _identity(group: GroupStatistics) -> tuple[str, ...]:
    return group.part, group.moment, group.name, group.dtype


def _of_steps(of_steps: Sequence[Mapping[Any, GroupStatistics]], identity: Any, name: str) -> Iterator[Any]:
    for of_step in of_steps:
        group = of_step.get(identity)
        yield _figure(group.values()[name]) if group is not None else None
