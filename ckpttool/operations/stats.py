"""`stats`: statistics of every tensor of a checkpoint and of groups of them, in one pass and in constant memory.

`histogram` counts elements, `moments` and `elements` calculate figures of a tensor, `collect` reads, `places` and
`findings` say where a tensor stands and what stands out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ckpttool.analysis.describe import summary
from ckpttool.analysis.statistics import cached
from ckpttool.analysis.statistics.collect import GroupKey, TensorGroup, collect
from ckpttool.analysis.statistics.findings import findings, uneven_ranks
from ckpttool.analysis.statistics.places import parameter_names
from ckpttool.analysis.statistics.results import (
    CONDITION,
    GroupStatistics,
    Stats,
    StepStatistics,
    row_of,
)
from ckpttool.analysis.statistics.spectral import spectra
from ckpttool.catalogue import counters
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.chosen import notes_of_run, taken
from ckpttool.catalogue.conditions import condition
from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.findings import Finding
from ckpttool.catalogue.parts import stop_at_absent
from ckpttool.catalogue.patterns import pattern_meant
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import UsageError
from ckpttool.layout.select import matching
from ckpttool.layout.selection import Selection
from ckpttool.operations import arguments
from ckpttool.producers import open
from ckpttool.producers.runs import chosen_steps
from ckpttool.storage import files
from ckpttool.storage.stores import locate, path_text
from ckpttool.text import some
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress

_MAX_THREADS = 4  # of one interpreter, which counts elements one thread at a time


def stats(
    path: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    tensors: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    where: str | None = None,
    fail_on: str | None = None,
    spectral: bool = False,
    steps: str | Sequence[int | str] | None = None,
    shapes: str | None = None,
    cache: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Stats:
    """Return the statistics of the tensors of the checkpoint at `path`.

    Args:
        path: a checkpoint of any format; of a run directory, its newest complete checkpoint.
        only: parts to read, by kind (`model`) or key; all without any.
        drop: parts to leave out.
        tensors: globs of the dotted names to read; all without any.
        exclude: globs of names to leave out.
        where: a condition, `"nan > 0 or absmax > 1e4"`: others are read, and count in groups, but are not listed.
        fail_on: a condition; `failed` has the names of the tensors for which it is true.
        spectral: whether to estimate the largest singular values of matrices too, which reads them four times more.
        steps: of a run directory, the steps to read too, oldest first, in `Stats.steps`: `"all"` complete ones, or some
            by their numbers, `"500,1000"`, `"500..900"` or `[500, 1000]`.
        shapes: a checkpoint or JSON file with the shapes of parameters, for FSDP1 flat parameters.
        cache: whether to keep the result, and to take one that was kept of the same files; not of the Hub's. With
            `fail_on` they are read.
        threads: how many threads read and calculate.
        progress: called with bytes done and in all, from this thread.

    Raises:
        UsageError: if there is no such part, or a condition is none.
        ReadError: if there is no checkpoint at `path`, or it cannot be read.
        CorruptError: if it is damaged.
    """
    began = time.monotonic()
    path = path_text(path)
    is_listed = condition(where, CONDITION, "--where") if where is not None else None
    fails = condition(fail_on, CONDITION, "--fail-on") if fail_on is not None else None
    selection = arguments.selection(only, drop, tensors, exclude)
    # A gate reads the bytes: what passes here is not looked at again.
    may_load = cache and fails is None
    threads = threads or min(DEFAULT_THREADS, _MAX_THREADS)
    reading = _ReadOptions(selection, shapes, spectral, cache, may_load, threads, progress)
    checkpoints = chosen_steps(locate(path), steps) if steps is not None else []
    result = Stats(path, fail_on=fail_on)
    if checkpoints:
        for checkpoint in checkpoints:
            for one in result.steps[-1].tensors if result.steps else ():
                one.thumbnail = None  # which takes memory, and is shown of the last step
            of_step = Stats(str(checkpoint.path))
            uneven = _collect(of_step, reading)
            found = [*findings(of_step.tensors), *uneven]
            row = StepStatistics(of_step.path, checkpoint.step, of_step.tensors, of_step.groups, found)
            result.steps.append(row)
            result.cached, result.read_bytes = of_step.cached, result.read_bytes + of_step.read_bytes
            result.headline, result.step = of_step.headline, of_step.step
        result.tensors, result.groups = list(result.steps[-1].tensors), result.steps[-1].groups
        result.findings = result.steps[-1].findings
    else:
        uneven = _collect(result, reading)
        result.findings = [*findings(result.tensors), *uneven]
    result.failed = [row.name for row in result.tensors if fails is not None and fails(row.known())]
    result.numel = sum(row.statistics.numel for row in result.tensors if row.tied_to is None)
    result.tensors = [row for row in result.tensors if is_listed is None or is_listed(row.known())]
    result.seconds = time.monotonic() - began
    return result


class _ReadOptions(NamedTuple):
    selection: Selection
    shapes: str | None
    spectral: bool
    keeps: bool  # the result in the cache
    may_load: bool  # a result that was kept
    threads: int
    progress: Progress | None


def _collect(result: Stats, reading: _ReadOptions) -> list[Finding]:
    """Set what is known of the checkpoint at the path of `result`, and return what stands out of its ranks."""
    with ExitStack() as stack:
        source = stack.enter_context(open.opened(result.path, reading.shapes))
        catalogue = source.catalogue
        stack.enter_context(open.naming(taken(result.path, catalogue)))
        stop_at_absent(catalogue, reading.selection.only)
        validate(catalogue)
        selected = _selected(catalogue, reading.selection)
        before = catalogue.versions
        headline, _ = summary.head(catalogue, source)
        result.headline, result.step = str(headline), counters.step(catalogue)
        result.notes += notes_of_run(catalogue)
        is_local = all(file.missing or file.location in before for file in catalogue.own_files)
        key = cached.key_of(before, selected, reading.spectral) if reading.keeps and is_local else None
        rows = cached.load(key) if key is not None and reading.may_load else None
        result.cached = rows is not None
        if rows is None:
            rows = _read(selected, source, reading.threads, reading.progress)
            if reading.spectral:
                of_matrices = spectra(selected, source)
                for row in rows[0]:
                    row.spectrum = of_matrices.get(row.tied_to or row.name)
            files.check_unchanged(before)
            if key is not None:
                cached.store(key, *rows)
            result.read_bytes = sum(row.nbytes for row in rows[0] if row.tied_to is None)
        result.tensors, result.groups = rows
        return uneven_ranks(catalogue)


def _read(selected: Sequence[Tensor], source: Source, threads: int, progress: Progress | None) -> cached.Rows:
    aliases = find_aliases(selected)
    own = [tensor for tensor in selected if tensor.path not in aliases]
    parameters = parameter_names(source.catalogue)
    collected, groups = collect(own, source, threads, progress, parameters)
    names = {tensor.path: tensor.name for tensor in selected}
    firsts = [aliases.get(tensor.path) for tensor in selected]
    tensors = [
        row_of(tensor, collected.get(first or tensor.path), names[first] if first is not None else None, parameters)
        for tensor, first in zip(selected, firsts, strict=True)
    ]
    return tensors, [_group(key, group) for key, group in groups.items()]


def _selected(catalogue: Catalogue, selection: Selection) -> list[Tensor]:
    is_wanted, matches = selection.wanted_parts(catalogue), matching(selection.tensors, selection.exclude, catalogue)
    selected = [tensor for tensor in catalogue.tensors if is_wanted(tensor.part) and matches(tensor)]
    if not selected and (selection.tensors or selection.exclude):
        patterns = [*selection.tensors, *(f"--exclude {pattern}" for pattern in selection.exclude)]
        names = [tensor.name for tensor in catalogue.tensors]
        otherwise = "`ckpttool inspect PATH --tensors '*'` lists the tensors"
        hint = pattern_meant(patterns[0], names, otherwise)
        raise UsageError(f"no tensor matches {some(patterns)}", hint=hint)
    return selected


def _group(key: GroupKey, group: TensorGroup) -> GroupStatistics:
    histogram = group.total.histogram
    row = GroupStatistics(*key, len(group.names), group.total.result())
    row.histogram = histogram.compact() if histogram is not None else None
    group.total.pack()
    return row
