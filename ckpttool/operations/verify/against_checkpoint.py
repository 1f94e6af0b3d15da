"""Compares a checkpoint with another one that should hold the same: names, dtypes, shapes, values, ties and objects,
whatever the formats and the sharding. docs/explanation/equality.md says what is equal."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.analysis.differences.compare import compare_sources
from ckpttool.analysis.differences.results import Diff, Only, TensorDifference
from ckpttool.analysis.differences.tensors import Options
from ckpttool.catalogue.entries import Catalogue, Entry, Tensor
from ckpttool.catalogue.findings import DIFFERENCE, Finding
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CkptError
from ckpttool.layout import select
from ckpttool.operations.verify.report import Verification

_SHORT = 60  # characters of a value that is shown


def check(run: Verification, other: Source) -> Iterator[Finding]:
    """Yield every difference from another checkpoint. Tensors that are damaged are not compared by value."""
    catalogues = select.start(run.catalogue), select.start(other.catalogue)
    failures: dict[str, CkptError] = {}
    options = Options(exact=True, skip=run.damaged, failures=failures, threads=run.threads, progress=run.progress)
    result = compare_sources((run.source, other), catalogues, None, options)
    entries = {entry.name: entry for entry in catalogues[0].entries.values()}
    yield from _entries(result, catalogues, entries)
    for difference in result.tensors:
        tensor = entries[difference.name]
        if isinstance(tensor, Tensor):
            yield from _tensor(difference, tensor)
    for name, error in failures.items():
        if isinstance(entries[name], Tensor):  # an object that cannot be read is a finding already
            yield Finding.of(error, "unreadable", tensor=name)


def _entries(result: Diff, catalogues: tuple[Catalogue, Catalogue], entries: dict[str, Entry]) -> Iterator[Finding]:
    names = [{entry.name for entry in catalogue.entries.values()} for catalogue in catalogues]

    def keys(only: Only, others: set[str]) -> str:
        return " by these keys, which differ there" if only.name in others else ""

    for only in result.only_a:
        yield _finding("only here", only.name, f"is not in the other{keys(only, names[1])}", only.dtype is not None)
    for only in result.only_b:
        yield _finding("only there", only.name, f"is only in the other{keys(only, names[0])}", only.dtype is not None)
    for name in result.kinds:
        is_tensor = isinstance(entries[name], Tensor)
        kinds = ("a tensor", "an object") if is_tensor else ("an object", "a tensor")
        yield _finding("kind", name, f"is {kinds[0]}, but {kinds[1]} in the other", is_tensor)
    for entry in result.objects:
        values = shown(entry.a), shown(entry.b)
        both = f": {values[0]} here, {values[1]} there" if max(map(len, values)) < _SHORT else ""
        yield _finding("object", entry.name, f"has another value{both}", False)


def _tensor(difference: TensorDifference, tensor: Tensor) -> Iterator[Finding]:
    kinds, name = difference.kinds, difference.name
    if "dtype" in kinds or "shape" in kinds:
        layouts = zip(difference.dtypes, difference.shapes, strict=True)
        here, there = (f"{dtype} {list(shape)}" for dtype, shape in layouts)
        yield _finding("layout", name, f"is {here}, but {there} in the other")
    if difference.ties is not None and not tensor.embedded:
        here_to, there_to = difference.ties
        if here_to is not None:
            yield _finding("tie", name, f"is tied to `{here_to}` here, and not tied in the other")
        if there_to is not None:
            yield _finding("tie", name, f"is not tied to `{there_to}` here, and tied in the other")
    # The values of tied tensors are those of the first.
    if difference.values is not None and "values" in kinds and (tensor.alias is None or difference.ties is not None):
        text = f"{difference.values.differing:,} of {tensor.numel:,} elements differ, the first at {difference.index}"
        yield _finding("values", name, text)


def _finding(kind: str, name: str, text: str, is_tensor: bool = True) -> Finding:
    return Finding(DIFFERENCE, kind, f"{'tensor' if is_tensor else 'object'} `{name}`: {text}", tensor=name)
