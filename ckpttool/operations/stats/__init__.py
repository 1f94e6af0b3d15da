"""`stats`: statistics of every tensor of a checkpoint and of groups of them, in one pass and in constant memory.

`histogram` counts elements, `moments` and `elements` calculate figures of a tensor, `collect` reads, `places` and
`findings` say where a tensor stands and what stands out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.parts import matcher, stop_at_absent
from ckpttool.catalogue.patterns import any_of, several
from ckpttool.catalogue.validation import validate
from ckpttool.errors import UsageError
from ckpttool.operations.inspect import stored_twice, summary
from ckpttool.operations.stats.collect import Collected, Group, GroupKey, collect
from ckpttool.operations.stats.conditions import condition
from ckpttool.operations.stats.elements import Accumulator, Channels, Statistics
from ckpttool.operations.stats.findings import Finding, findings
from ckpttool.operations.stats.places import place_of
from ckpttool.operations.stats.results import COLUMNS, GroupStatistics, Stats, TensorStatistics
from ckpttool.producers import open
from ckpttool.storage import files
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress

__all__ = ["Channels", "Finding", "GroupStatistics", "Statistics", "Stats", "TensorStatistics", "stats"]


def stats(
    path: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    tensors: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    where: str | None = None,
    fail_on: str | None = None,
    shapes: str | None = None,
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
        shapes: a checkpoint or JSON file with the shapes of parameters, for FSDP1 flat parameters.
        threads: how many threads read and calculate.
        progress: called with bytes done and in all, from this thread.

    Raises:
        UsageError: if there is no such part, or a condition is none.
        ReadError: if there is no checkpoint at `path`, or it cannot be read.
        CorruptError: if it is damaged.
    """
    began = time.monotonic()
    path = os.fspath(path)
    is_listed = condition(where, COLUMNS, "--where") if where is not None else None
    fails = condition(fail_on, COLUMNS, "--fail-on") if fail_on is not None else None
    with open.opened(path, shapes) as source:
        catalogue = source.catalogue
        with open.naming(path):
            stop_at_absent(catalogue, several(only))
            validate(catalogue)
            selected = _selected(catalogue, several(only), several(drop), several(tensors), several(exclude))
            before = files.fingerprint(f.location for f in catalogue.own_files if not f.missing)
            aliases = find_aliases(selected)
            own = [tensor for tensor in selected if tensor.path not in aliases]
            collected, groups = collect(own, source, threads or DEFAULT_THREADS, progress)
            files.check_unchanged(before)
        catalogue.warnings += stored_twice(source)
        result = Stats(path, str(summary.head(catalogue)[0]), summary.step(catalogue), fail_on=fail_on)
        names = {tensor.path: tensor.name for tensor in selected}
        every = [_row(tensor, collected, aliases, names) for tensor in selected]
    result.groups = [_group(key, group) for key, group in groups.items()]
    result.findings = findings(every)
    result.failed = [row.name for row in every if fails is not None and fails(row.values())]
    result.tensors = [row for row in every if is_listed is None or is_listed(row.values())]
    result.elements = sum(tensor.numel for tensor in own)
    result.read_bytes = sum(tensor.nbytes for tensor in own)
    result.seconds = time.monotonic() - began
    return result


def _selected(
    catalogue: Catalogue, only: Sequence[str], drop: Sequence[str], tensors: Sequence[str], exclude: Sequence[str]
) -> list[Tensor]:
    is_wanted = matcher(only, catalogue) if only else None
    is_dropped = matcher(drop, catalogue) if drop else None
    included, excluded = any_of(tensors or ["*"]), any_of(exclude)
    selected = [
        tensor
        for tensor in catalogue.tensors
        if (is_wanted is None or is_wanted(tensor.part))
        and not (is_dropped is not None and is_dropped(tensor.part))
        and included(tensor.name)
        and not excluded(tensor.name)
    ]
    if not selected and (tensors or exclude):
        raise UsageError("no tensor matches", hint="`ckpttool inspect PATH --tensors '*'` lists them")
    return selected


def _row(
    tensor: Tensor, collected: dict[Path, Collected], aliases: dict[Path, Path], names: dict[Path, str]
) -> TensorStatistics:
    place = place_of(tensor)
    first = aliases.get(tensor.path)
    found = collected.get(first or tensor.path)
    if found is None:
        found = Collected(Accumulator(tensor.dtype).result(), None, None, None, None)
    tied = names[first] if first is not None else None
    row = TensorStatistics(
        tensor.name, *place[:2], *place[2:], tensor.dtype.name, tensor.shape, tensor.nbytes, tied, found.statistics
    )
    row.histogram, row.rows, row.columns, row.update = found.histogram, found.rows, found.columns, found.update
    return row


def _group(key: GroupKey, group: Group) -> GroupStatistics:
    histogram = group.total.histogram
    row = GroupStatistics(*key, len(group.names), group.total.result())
    row.histogram = histogram.compact() if histogram is not None else None
    group.total.pack()
    return row
