"""How do two checkpoints differ, whatever their formats, and however many ranks wrote them?

sides        what of both is compared, under which names
walking      two tensors tile by tile; equal bytes are never decoded
widening     elements of two dtypes, without rounding
objects      values that are not tensors
sharding     how they are cut
results      what was found, as data
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Part, Path, Tensor
from ckpttool.catalogue.patterns import several
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import UsageError
from ckpttool.layout import select as layout
from ckpttool.operations import arguments as rulefiles
from ckpttool.operations.diff import objects, sharding, sides
from ckpttool.operations.diff import promote as widening
from ckpttool.operations.diff import tensors as walking
from ckpttool.operations.diff.elements import Comparison, Tolerance
from ckpttool.operations.diff.results import ABSENT, Diff, ObjectDifference, Only, Side, TensorDifference, Total
from ckpttool.operations.diff.sides import Chosen
from ckpttool.producers import open as opening
from ckpttool.storage import files
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress

__all__ = ["ABSENT", "Diff", "ObjectDifference", "Only", "Side", "TensorDifference", "Total", "diff"]


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    tensors: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: str | Sequence[str] = (),
    strip_wrappers: bool = False,
    strip_prefix: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    ulp: int | None = None,
    ignore_dtype: bool = False,
    sharded: bool = False,
    shapes: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Every difference between the checkpoints at `a` and `b`. See `docs/reference/cli.md` for the options.

    With none of `rtol`, `atol` and `ulp`, elements are equal when their bits are. With `ignore_dtype` another dtype is
    no difference by itself; with `sharded` another cut is one. `progress(done, total)` is called with bytes from this
    thread. Raises ReadError or CorruptError for a checkpoint that cannot be read whole, and UsageError.
    """
    began = time.monotonic()
    paths = os.fspath(a), os.fspath(b)
    only, drop, tensors, exclude = map(several, (only, drop, tensors, exclude))
    rename = rulefiles.rules(rename, "--rename")
    tolerance = _tolerance(rtol, atol, ulp)
    chosen = Chosen(only, drop, tensors, exclude, rename, strip_wrappers, strip_prefix)
    made = Diff(Side(paths[0]), Side(paths[1]), _in_words(rtol, atol, ulp))
    with ExitStack() as stack:
        sources = tuple(_opened(stack, path, shapes) for path in paths)
        before = files.fingerprint(f.location for s in sources for f in s.catalogue.own_files if not f.missing)
        laid = sides.lay_out((sources[0], sources[1]), paths, chosen, made.notes)
        for side, source, catalogue in zip((made.a, made.b), sources, laid, strict=True):
            _count(side, source, catalogue)
        compare_sources(
            (sources[0], sources[1]), laid, made, tolerance=tolerance, ignore_dtype=ignore_dtype, sharded=sharded,
            threads=threads, progress=progress,
        )  # fmt: skip
        files.check_unchanged(before)
    made.seconds = time.monotonic() - began
    return made


def compare_sources(
    sources: tuple[Source, Source],
    catalogues: sides.Two,
    result: Diff | None = None,
    *,
    tolerance: Tolerance | None = None,
    ignore_dtype: bool = False,
    sharded: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare two open sources, entry by entry, and return `result` with every difference.

    `catalogues` say what is compared of each, under which names. Raises what reading the sources raises.
    """
    result = result or Diff(Side("A"), Side("B"))
    comparing = _Comparing(result, sources, catalogues, tolerance, ignore_dtype, sharded)
    comparing.run(threads or DEFAULT_THREADS, progress)
    return result


def _tolerance(rtol: float | None, atol: float | None, ulp: int | None) -> Tolerance | None:
    for flag, value in (("--rtol", rtol), ("--atol", atol), ("--ulp", ulp)):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"`{flag} {value}` is no distance", hint="write a number that is not negative")
    if ulp is not None and ulp >= 1 << 64:
        raise UsageError(f"`--ulp {ulp}`: no two numbers are that far apart")
    if rtol is None and atol is None and ulp is None:
        return None
    return Tolerance(atol or 0.0, rtol or 0.0, ulp or 0)


def _in_words(rtol: float | None, atol: float | None, ulp: int | None) -> str | None:
    said = [f"{name} {value}" for name, value in (("rtol", rtol), ("atol", atol), ("ulp", ulp)) if value is not None]
    return ", ".join(said) or None


def _opened(stack: ExitStack, path: str, shapes: str | None) -> Source:
    with opening.naming(path):
        return stack.enter_context(opening.opened(path, shapes))


def _count(side: Side, source: Source, laid: Catalogue) -> None:
    side.format, side.world_size = source.catalogue.format, source.catalogue.world_size
    side.tensors, side.objects = sum(1 for _ in laid.tensors), sum(1 for _ in laid.objects)
    side.bytes = sum(t.nbytes for t in laid.tensors if t.alias is None)


class _Match(NamedTuple):
    name: str
    a: Entry
    b: Entry


class _Comparing:
    def __init__(
        self,
        made: Diff,
        sources: tuple[Source, Source],
        laid: sides.Two,
        tolerance: Tolerance | None,
        ignore_dtype: bool,
        sharded: bool,
    ) -> None:
        self._made, self._sources, self._laid = made, sources, laid
        self._tolerance, self._ignore_dtype, self._sharded = tolerance, ignore_dtype, sharded
        self._there: dict[Path, Path] = {}  # of each path of A, the path of B
        self._here: dict[Path, Path] = {}  # and the other way
        self._links: tuple[dict[Path, Path], dict[Path, Path]] = ({}, {})

    def run(self, threads: int, progress: Progress | None) -> None:
        made, (one, other) = self._made, self._laid
        matches = self._matched()
        made.matched = len(matches)
        self._links = self._linked()
        made.only_a = [_only(e) for e in one.entries.values() if e.path not in self._there]
        made.only_b = [_only(e) for e in other.entries.values() if e.path not in self._here]
        tensors: list[tuple[str, Tensor, Tensor]] = []
        for name, a, b in matches:
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                tensors.append((name, a, b))
            elif isinstance(a, Object) and isinstance(b, Object):
                self._object(name, a, b)
            else:
                made.kinds.append(name)
        self._tensors(tensors, threads, progress)
        if made.only_a and made.only_b:
            made.hint = sides.advice(self._laid)

    def _matched(self) -> list[_Match]:
        """Entries of one path; then those whose keys are only spelt otherwise, integers as text or one key as two."""
        one, other = self._laid
        there: dict[str, list[Entry]] = {}
        for path, entry in other.entries.items():
            if path not in one.entries:
                there.setdefault(entry.name, []).append(entry)
        found: list[_Match] = []
        for path, entry in one.entries.items():
            match = other.entries.get(path)
            if match is None:
                named = there.get(entry.name, [])
                match = named.pop() if len(named) == 1 else None
            if match is not None:
                self._there[path], self._here[match.path] = match.path, path
                found.append(_Match(entry.name, entry, match))
        return found

    # Objects ---------------------------------------------------------------------------------------------------------

    def _object(self, name: str, a: Object, b: Object) -> None:
        one, other = layout.relinked(a.value, self._links[0]), layout.relinked(b.value, self._links[1])
        for at, x, y in objects.differences(one, other, self._tolerance):
            self._made.objects.append(ObjectDifference(name, str(a.part), at, x, y))

    def _linked(self) -> tuple[dict[Path, Path], dict[Path, Path]]:
        """For references to tensors: one path for those that are compared with each other, and for tied ones."""
        one, other = self._laid
        there = {t.path: _indistinct(other, t) for t in other.tensors}
        here: dict[Path, Path] = {}
        for tensor in one.tensors:
            path = self._there.get(tensor.path)
            here[tensor.path] = there.get(path, path) if path is not None else _indistinct(one, tensor)
        return here, there

    # Tensors ---------------------------------------------------------------------------------------------------------

    def _tensors(self, matches: list[tuple[str, Tensor, Tensor]], threads: int, progress: Progress | None) -> None:
        """Tied tensors are read once."""
        pairs: list[walking.Two] = []
        numbers: dict[tuple[int, int], int] = {}
        for _, a, b in matches:
            one, other = _origin(a), _origin(b)
            kind = widening.common(one.dtype, other.dtype)
            key = (id(self._laid[0].first(a)), id(self._laid[1].first(b)))
            if one.shape == other.shape and kind is not None and key not in numbers:
                numbers[key] = len(pairs)
                pairs.append(walking.Two(one, other, kind))
        self._made.bytes = sum(pair.a.nbytes for pair in pairs)
        paths = self._made.a.path, self._made.b.path
        found = walking.compare(pairs, self._sources, paths, self._tolerance, threads, progress)
        totals: dict[Part, Total] = {}
        for name, a, b in matches:
            number = numbers.get((id(self._laid[0].first(a)), id(self._laid[1].first(b))))
            self._tensor(name, a, b, number is not None, None if number is None else found.get(number), totals)
        self._made.parts = [totals[part] for part in parts.parts(self._laid[0]) if part in totals]

    def _tensor(
        self, name: str, a: Tensor, b: Tensor, compared: bool, found: Comparison | None, totals: dict[Part, Total]
    ) -> None:
        made = TensorDifference(name, str(a.part), [], (a.dtype.name, b.dtype.name), (a.shape, b.shape))
        if a.dtype != b.dtype and not self._ignore_dtype:
            made.kinds.append("dtype")
        if a.shape != b.shape:
            made.kinds.append("shape")
        elif not compared and a.dtype != b.dtype:
            made.why = f"no dtype has all the values of {a.dtype} and of {b.dtype}"
            if self._ignore_dtype:
                made.kinds.append("dtype")
        if found is not None:
            made.values = found.result()
            made.values.numel = a.numel
            made.index = made.values.index(a.shape)
            if made.values.differing if self._tolerance is None else made.values.beyond:
                made.kinds.append("values")
        if compared:
            for total in (totals.setdefault(a.part, Total(str(a.part))), self._made.total):
                total.count(a.numel, found, "values" in made.kinds)
        made.ties = self._ties(a, b)
        if made.ties is not None:
            made.kinds.append("tie")
        if self._sharded:
            made.sharding = self._sharding(a, b)
            if made.sharding is not None:
                made.kinds.append("sharding")
        if made.kinds:
            self._made.tensors.append(made)

    def _ties(self, a: Tensor, b: Tensor) -> tuple[str | None, str | None] | None:
        """With which tensor each shares its bytes, where that is one on one side and two on the other."""
        one, other = self._laid
        first, second = one.first(a), other.first(b)
        kept, keeper = self._there.get(first.path), self._here.get(second.path)
        apart = first is not a and kept is not None and other.first(other.tensor(kept)) is not second
        joined = second is not b and keeper is not None and one.first(one.tensor(keeper)) is not first
        if not apart and not joined:
            return None
        return first.name if apart else None, second.name if joined else None

    def _sharding(self, a: Tensor, b: Tensor) -> tuple[str, str] | None:
        cut = [
            (origin, source.catalogue.files)
            for origin, source in zip((_origin(a), _origin(b)), self._sources, strict=True)
        ]
        if sharding.pieces(*cut[0]) == sharding.pieces(*cut[1]):
            return None
        return sharding.in_words(*cut[0]), sharding.in_words(*cut[1])


def _origin(tensor: Tensor) -> Tensor:
    return tensor.origin or tensor


def _indistinct(laid: Catalogue, tensor: Tensor) -> Path:
    """One path for tensors of which nobody can tell which is which: tied ones, and those without elements."""
    if tensor.embedded and not tensor.numel:
        return (tensor.dtype.name, *tensor.shape)
    return laid.first(tensor).path


def _only(entry: Entry) -> Only:
    if isinstance(entry, Tensor):
        return Only(entry.name, str(entry.part), entry.dtype.name, entry.shape)
    return Only(entry.name, str(entry.part))
