"""Matches the entries of two catalogues and compares them: names, kinds, dtypes, shapes, values, ties, sharding."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from ckpttool.analysis.differences import elements, tensors
from ckpttool.analysis.differences.elements import Comparison, Tolerance
from ckpttool.analysis.differences.results import (
    Diff,
    ModuleDifference,
    ObjectDifference,
    Only,
    Side,
    TensorDifference,
    Total,
)
from ckpttool.analysis.differences.same_files import SameFiles
from ckpttool.analysis.differences.tensors import BY_BITS, Options, Sources
from ckpttool.analysis.result import ABSENT
from ckpttool.analysis.statistics.places import module_of, parameter_names
from ckpttool.catalogue import identity, parts
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.chosen import taken
from ckpttool.catalogue.entries import Catalogue, Entry, File, Object, Part, Path, Tensor
from ckpttool.catalogue.shown import shown
from ckpttool.catalogue.values import TorchSize
from ckpttool.errors import CkptError
from ckpttool.layout.move import relinked
from ckpttool.layout.select import interchangeable
from ckpttool.text import rank_ranges, size

_MAX_DEPTH = 100  # values in values that are compared one by one


def compare_sources(
    sources: Sources, catalogues: tuple[Catalogue, Catalogue], result: Diff | None = None, options: Options = BY_BITS
) -> Diff:
    """Compare two open sources, entry by entry, and return `result` with every difference.

    The sources may be anything that follows the protocol, with files or in memory. `catalogues` say what is compared of
    each, under which names: `layout.select.start(source.catalogue)` for all of it. Their tensors may have another name
    than their `origin`, the tensor of the source.
    """
    result = result or Diff(Side(""), Side(""))
    _Comparing(result, sources, *catalogues, options).run()
    return result


@dataclass(slots=True)
class _Comparing:
    result: Diff
    sources: Sources
    a: Catalogue
    b: Catalogue
    options: Options
    a_to_b: dict[Path, Path] = field(default_factory=dict)  # of the entries that match
    b_to_a: dict[Path, Path] = field(default_factory=dict)
    links: tuple[dict[Path, Path], dict[Path, Path]] = ({}, {})

    def run(self) -> None:
        result = self.result
        matches = self._matches()
        result.matched = len(matches)
        self.links = self._linked()
        result.only_a = [_only(entry) for path, entry in self.a.entries.items() if path not in self.a_to_b]
        result.only_b = [_only(entry) for path, entry in self.b.entries.items() if path not in self.b_to_a]
        pairs: list[tuple[Tensor, Tensor]] = []
        for a, b in matches:
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                pairs.append((a, b))
            elif isinstance(a, Object) and isinstance(b, Object):
                self._compare_objects(a, b)
            else:
                result.kinds.append(a.name)
        self._compare_tensors(pairs)

    def _matches(self) -> list[tuple[Entry, Entry]]:
        """Return the entries of one path; then those of one name, whose keys are integers in one and strings in the
        other, or one key with dots."""
        by_name: dict[str, list[Entry]] = {}
        for path, entry in self.b.entries.items():
            if path not in self.a.entries and not self.options.exact:
                by_name.setdefault(entry.name, []).append(entry)
        matches: list[tuple[Entry, Entry]] = []
        for path, entry in self.a.entries.items():
            match = self.b.entries.get(path)
            if match is None and len(named := by_name.get(entry.name, [])) == 1:
                match = named.pop()
            if match is not None:
                self.a_to_b[path], self.b_to_a[match.path] = match.path, path
                matches.append((entry, match))
        return matches

    def _compare_objects(self, a: Object, b: Object) -> None:
        try:
            values = relinked(a.value, self.links[0]), relinked(b.value, self.links[1])
        except CkptError as error:
            if self.options.failures is None:
                raise
            self.options.failures[a.name] = error
            return
        if self.options.exact:
            found = [] if identity.same(*values) else [("", a.value, b.value)]
        else:
            found = list(differences(*values, self.options.tolerance))
        self.result.objects += [ObjectDifference(a.name, str(a.part), *difference) for difference in found]

    def _linked(self) -> tuple[dict[Path, Path], dict[Path, Path]]:
        """Return, for references to tensors, one path for those that match, are tied or have no elements."""
        from_a, from_b = interchangeable(self.a), interchangeable(self.b)
        matches = {a.path: self.a_to_b[a.path] for a in self.a.tensors if a.path in self.a_to_b}
        return from_a | {a: from_b.get(b, b) for a, b in matches.items()}, from_b

    def _compare_tensors(self, matches: list[tuple[Tensor, Tensor]]) -> None:
        options, result = self.options, self.result
        pairs: list[tensors.Pair] = []
        numbers: dict[tuple[int, int], int] = {}  # of the pairs; tied tensors are read once
        for a, b in matches:
            one, other = a.origin or a, b.origin or b
            common = elements.common(one.dtype, other.dtype) if one.dtype == other.dtype or not options.exact else None
            if one.shape != other.shape or common is None or a.name in options.skip:
                continue
            if numbers.setdefault(self._key(a, b), len(pairs)) == len(pairs):
                pairs.append(tensors.Pair(one, other, common))
        result.payload_bytes = sum(pair.a.nbytes for pair in pairs)
        same = SameFiles(self.sources)
        known = {n for n, pair in enumerate(pairs) if same.have(pair.a, pair.b)}
        if known:
            nbytes = size(sum(pairs[n].a.nbytes for n in known))
            result.notes.append(f"{nbytes} are in files with the same digest in both, and were not read")
        sides = zip((result.a, result.b), self.sources, strict=True)
        a_path, b_path = (taken(side.path, source.catalogue) for side, source in sides)
        compared, failures = tensors.compare(pairs, self.sources, (a_path, b_path), options, known)
        totals: dict[Part, Total] = {}
        modules: dict[tuple[str, str, str], ModuleDifference] = {}
        parameters = parameter_names(self.a)
        for a, b in matches:
            number = numbers.get(self._key(a, b))
            if number in failures and options.failures is not None:
                options.failures[a.name] = failures[number]
                number = None
            values = None if number is None else compared.get(number)
            difference = self._difference(a, b, number is not None, values)
            if number is not None:
                is_counter = a.part.kind == "optimizer" and not a.shape
                for total in (totals.setdefault(a.part, Total(str(a.part))), result.total):
                    total.count(a.numel, values, "values" in difference.kinds, is_counter=is_counter)
                if (module := module_of(a, parameters)) is not None:
                    of_module = modules.setdefault(module, ModuleDifference(*module))
                    of_module.count(difference.values, "values" in difference.kinds)
            if difference.kinds:
                result.tensors.append(difference)
        result.parts = [totals[part] for part in parts.parts(self.a) if part in totals]
        result.modules = [*modules.values()]

    def _key(self, a: Tensor, b: Tensor) -> tuple[int, int]:
        return id(self.a.first(a)), id(self.b.first(b))

    def _difference(self, a: Tensor, b: Tensor, is_compared: bool, values: Comparison | None) -> TensorDifference:
        options = self.options
        result = TensorDifference(a.name, str(a.part), [], (a.dtype.name, b.dtype.name), (a.shape, b.shape))
        if a.dtype != b.dtype and not options.ignore_dtype:
            result.kinds.append("dtype")
        if a.shape != b.shape:
            result.kinds.append("shape")
        elif not is_compared and a.dtype != b.dtype:
            result.why = f"no dtype has all the values of {a.dtype} and of {b.dtype}"
            if options.ignore_dtype:
                result.kinds.append("dtype")
        if values is not None:
            result.values = values.result()
            result.values.numel = a.numel
            result.index = result.values.index(a.shape)
            if result.values.differing if options.tolerance is None else result.values.beyond:
                result.kinds.append("values")
        result.ties = self._ties(a, b)
        result.kinds += ["tie"] if result.ties is not None else []
        if options.sharded:
            one, other = (_shards(t.origin or t, s.catalogue.files) for t, s in zip((a, b), self.sources, strict=True))
            if one != other:
                result.sharding = _describe(one), _describe(other)
                result.kinds.append("sharding")
        return result

    def _ties(self, a: Tensor, b: Tensor) -> tuple[str | None, str | None] | None:
        """Return with which tensor each shares its bytes, where that is one on one side and two on the other."""
        first_a, first_b = self.a.first(a), self.b.first(b)
        of_a, of_b = self.a_to_b.get(first_a.path), self.b_to_a.get(first_b.path)
        only_a = first_a is not a and of_a is not None and self.b.first(self.b.tensor(of_a)) is not first_b
        only_b = first_b is not b and of_b is not None and self.a.first(self.a.tensor(of_b)) is not first_a
        if not only_a and not only_b:
            return None
        return first_a.name if only_a else None, first_b.name if only_b else None


def _only(entry: Entry) -> Only:
    return Only(entry.name, str(entry.part), *((entry.dtype.name, entry.shape) if isinstance(entry, Tensor) else ()))


_Shard = tuple[Ints, Ints, int | None]


def _shards(tensor: Tensor, files: Sequence[File]) -> list[_Shard]:
    """Return offsets, sizes and the rank of each chunk with elements, sorted. Pure."""
    chunks = tensor.chunks
    shards = [
        (offsets, sizes, files[file].rank)
        for offsets, sizes, file in zip(chunks.offsets, chunks.sizes, chunks.file, strict=True)
        if 0 not in sizes
    ]
    return sorted(shards, key=lambda shard: (shard[0], shard[1], -1 if shard[2] is None else shard[2]))


def _describe(shards: list[_Shard]) -> str:
    """Return `whole, rank 0`; `4 along dimension 0, ranks 0-3`; `4 x 2, ranks 0-7`; `3 pieces, ranks 0, 2`."""
    ranks = sorted({rank for _, _, rank in shards if rank is not None})
    counts = [len(set(starts)) for starts in zip(*(offsets for offsets, _, _ in shards), strict=True)]
    split = [dim for dim, count in enumerate(counts) if count > 1]
    if len(shards) <= 1:
        text = "whole"
    elif len(split) == 1 and counts[split[0]] == len(shards):
        text = f"{len(shards)} along dimension {split[0]}"
    else:
        text = " x ".join(map(str, counts)) if math.prod(counts) == len(shards) else f"{len(shards)} pieces"
    return f"{text}, {rank_ranges(ranks)}" if ranks else text


def differences(
    one: Any, other: Any, tolerance: Tolerance | None = None, at: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield where two values differ, and both values there: `("[1]", 0.95, 0.99)`; a missing one is `ABSENT`. Pure.

    Dicts are equal in any order, ordered ones only in the same. A list is not a tuple and 1 is neither 1.0 nor
    True; a NaN is equal to itself, and a reference to a tensor to one with the same path. With a tolerance, close
    numbers are equal, 1 and 1.0 too. Two containers are compared once, however often both are shared: the first place
    stands for all. `at` is where in the whole the two values are.
    """
    yield from _Differences(tolerance).between(one, other, at, 0)


class _Differences:
    def __init__(self, tolerance: Tolerance | None) -> None:
        self._tolerance = tolerance
        self._pairs: set[tuple[int, int]] = set()

    def between(self, one: Any, other: Any, at: str, depth: int) -> Iterator[tuple[str, Any, Any]]:
        if depth > _MAX_DEPTH or not _is_divided(one, other):
            if not _same(one, other, self._tolerance):
                yield at, one, other
        elif (id(one), id(other)) not in self._pairs:
            self._pairs.add((id(one), id(other)))
            other = _with_keys_of(one, other)
            if isinstance(one, OrderedDict) and one.keys() == other.keys() and list(one) != list(other):
                yield at, list(one), list(other)
            for where, a, b in _children(one, other):
                yield from self.between(a, b, at + where, depth + 1)


def _is_divided(one: Any, other: Any) -> bool:
    """Return whether what is in two values is compared one by one: in containers of one kind."""
    return type(one) is type(other) and (isinstance(one, dict) or type(one) in (list, tuple, TorchSize))


def _children(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Return the pairs in two containers, and where. What one does not have is `ABSENT` there."""
    if isinstance(one, dict):
        keys = dict.fromkeys([*one, *other])
        return ((f"[{shown(key)}]", one.get(key, ABSENT), other.get(key, ABSENT)) for key in keys)
    return ((f"[{i}]", a, b) for i, (a, b) in enumerate(zip_longest(one, other, fillvalue=ABSENT)))


def _with_keys_of(one: Any, other: Any) -> Any:
    """Return a dict with those keys of `one` in place of its own that are the same: an object of one file, such as a
    member of an enum, is equal to none of another."""
    if not isinstance(one, dict) or one.keys() == other.keys():
        return other
    keys: dict[str, list[Any]] = {}
    for key in reversed(one):
        keys.setdefault(identity.key(key), []).append(key)
    return type(other)((same.pop() if (same := keys.get(identity.key(key))) else key, v) for key, v in other.items())


def _same(one: Any, other: Any, tolerance: Tolerance | None) -> bool:
    if tolerance is not None and type(one) in (int, float) and type(other) in (int, float):
        if one == other or (math.isnan(one) and math.isnan(other)):
            return True
        apart = abs(one - other)
        return math.isfinite(apart) and apart <= tolerance.absolute + tolerance.relative * abs(other)
    if type(one) is type(other) and isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if type(one) is type(other) and isinstance(one, (str, bytes, bytearray, int)):
        return bool(one == other)
    return one is not ABSENT and other is not ABSENT and identity.same(one, other)
