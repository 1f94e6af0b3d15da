"""Whether two checkpoints are equal in content: names, dtypes, shapes, values, ties and objects, whatever the formats
and however they are cut. See docs/explanation/equality.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from ckpttool.catalogue import boxes, typed_json
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError
from ckpttool.layout import select as layout
from ckpttool.operations.verify.findings import DIFFERENCE, Finding, Report
from ckpttool.storage.files import Pool
from ckpttool.transfer.plan import tiles
from ckpttool.transfer.read import read_box
from ckpttool.transfer.threads import Progress, Work, on_threads

_TILE = 4 << 20
_SHORT = 60  # characters of a value that is shown


class _Pair(NamedTuple):
    here: Tensor
    there: Tensor


def compare(
    source: Source, other: Source, unreadable: set[str], report: Report, threads: int, progress: Progress | None = None
) -> None:
    """Add every difference of `source` from `other`. Tensors that are `unreadable` are damaged, and not compared."""
    here, there = source.catalogue, other.catalogue
    report.add(_entries(here, there))
    report.add(_ties(here, there))
    aliases = find_aliases(here.tensors)
    pairs = [
        _Pair(tensor, match)
        for tensor in here.tensors
        if isinstance(match := there.entries.get(tensor.path), Tensor)
        and (match.dtype, match.shape) == (tensor.dtype, tensor.shape)
        and tensor.numel
        and tensor.name not in unreadable
        and not (tensor.path in aliases and _tied_alike(tensor.path, aliases[tensor.path], there))
    ]
    report.add(_values(source, other, pairs, threads, progress))


def _entries(here: Catalogue, there: Catalogue) -> Iterator[Finding]:
    names = [{entry.name for entry in catalogue.entries.values()} for catalogue in (here, there)]
    same = [_interchangeable(catalogue) for catalogue in (here, there)]
    for path, entry in here.entries.items():
        if path not in there.entries:
            yield _difference("only here", entry, f"is not in the other{_spelt_otherwise(entry, names[1])}")
    for path, entry in there.entries.items():
        if path not in here.entries:
            yield _difference("only there", entry, f"is only in the other{_spelt_otherwise(entry, names[0])}")
    for path, entry in here.entries.items():
        other = there.entries.get(path)
        if other is None:
            continue
        if isinstance(entry, Tensor) != isinstance(other, Tensor):
            kinds = ["a tensor" if isinstance(e, Tensor) else "an object" for e in (entry, other)]
            yield _difference("kind", entry, f"is {kinds[0]}, but {kinds[1]} in the other")
        elif isinstance(entry, Tensor) and isinstance(other, Tensor):
            if (entry.dtype, entry.shape) != (other.dtype, other.shape):
                yield _difference(
                    "layout", entry,
                    f"is {entry.dtype} {list(entry.shape)}, but {other.dtype} {list(other.shape)} in the other",
                )  # fmt: skip
        elif isinstance(entry, Object) and isinstance(other, Object):
            yield from _object(entry, other, same[0], same[1])


def _spelt_otherwise(entry: Entry, names: set[str]) -> str:
    """Keys may be integers in one and strings in the other, or one string with dots: the same to people."""
    return " by these keys, which are spelt otherwise there" if entry.name in names else ""


def _interchangeable(catalogue: Catalogue) -> dict[Path, Path]:
    """One path for tensors that cannot be told apart inside an object: tied ones, and those without elements."""
    empty: dict[Path, Path] = {
        t.path: (t.dtype.name, *t.shape) for t in catalogue.tensors if t.embedded and not t.numel
    }
    return find_aliases(catalogue.tensors) | empty


def _object(one: Object, other: Object, here: dict[Path, Path], there: dict[Path, Path]) -> Iterator[Finding]:
    try:
        spelt = [_spelt(one, here), _spelt(other, there)]
    except CkptError:
        return  # said elsewhere: it cannot be read
    if spelt[0] != spelt[1]:
        values = [repr(value) for value in (one.value, other.value)]
        shown = f": {values[0]} here, {values[1]} there" if max(map(len, values)) < _SHORT else ""
        yield _difference("object", one, f"has another value{shown}")


def _spelt(entry: Object, same: dict[Path, Path]) -> str:
    return typed_json.key_or_repr(layout.relinked(entry.value, same))


def _ties(here: Catalogue, there: Catalogue) -> Iterator[Finding]:
    """Tensors that are one in one of the two, and two in the other."""
    for one, other, words in ((here, there, ("tied", "not tied")), (there, here, ("not tied", "tied"))):
        for path, kept in find_aliases(one.tensors).items():
            tensor = other.entries.get(path)
            if not isinstance(tensor, Tensor) or tensor.embedded or kept not in other.entries:
                continue
            if not _tied_alike(path, kept, other):
                keeper = other.entries[kept].name
                yield _difference("tie", tensor, f"is {words[0]} to `{keeper}` here, and {words[1]} in the other")


def _tied_alike(path: Path, kept: Path, catalogue: Catalogue) -> bool:
    found = find_aliases(t for t in (catalogue.entries.get(p) for p in (kept, path)) if isinstance(t, Tensor))
    return found.get(path) == kept


def _values(
    source: Source, other: Source, pairs: list[_Pair], threads: int, progress: Progress | None
) -> Iterator[Finding]:
    work = Work(sum(pair.here.nbytes for pair in pairs), progress)
    found: dict[str, tuple[_Pair, list[tuple[int, ...]], list[int]]] = {}
    failures: list[Finding] = []
    lock, one, two = threading.Lock(), Pool(), Pool()

    def look(task: tuple[_Pair, Box]) -> None:
        pair, box = task
        try:
            mine = read_box(box, pair.here, source, one)
            theirs = read_box(box, pair.there, other, two)
        except CkptError as error:
            with lock:
                failures.append(Finding.of(error, "unreadable", tensor=pair.here.name))
            return
        work.note(mine.nbytes)
        if (unlike := mine != theirs).any():
            import numpy as np

            at = np.unravel_index(int(np.argmax(unlike)), mine.shape) if mine.shape else ()
            first = tuple(int(i) + o for i, o in zip(at, box[0], strict=True))
            with lock:
                _, firsts, count = found.setdefault(pair.here.name, (pair, [], []))
                firsts.append(first)
                count.append(int(unlike.sum()))

    tasks = (
        (pair, box)
        for pair in pairs
        for box in tiles(boxes.whole(pair.here.shape), max(1, _TILE // pair.here.dtype.itemsize))
    )
    with closing(one), closing(two):
        on_threads(tasks, look, threads, work)
    yield from failures
    for pair, firsts, count in found.values():
        yield _difference(
            "values", pair.here,
            f"{sum(count):,} of {pair.here.numel:,} elements differ, the first at {list(min(firsts))}",
        )  # fmt: skip


def _difference(kind: str, entry: Entry, said: str) -> Finding:
    what = "tensor" if isinstance(entry, Tensor) else "object"
    return Finding(DIFFERENCE, kind, f"{what} `{entry.name}`: {said}", tensor=entry.name)
