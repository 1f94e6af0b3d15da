"""Files of a directory each of which is a checkpoint of a run, and no part of one: told by what they hold.

best_acc.pt best_loss.pt last.pt         the same tensors, and all names say which of the run it is
net_loss=-3.pt net_loss=-6.pt            the same
100.weight.pt 200.weight.pt              the same, of several tensors each
checkpoint.pth.tar model_best.pth.tar    the same tensors, a model with its optimizer each
a.pt b.pt c.pt latest.pt -> b.pt         the same tensors, and a link or a text names one of them
G_A.pth G_B.pth model.pt ema.pt          the same tensors, and parts of one checkpoint
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from posixpath import splitext

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Path, Tensor
from ckpttool.catalogue.models import is_averaged
from ckpttool.catalogue.protocols import NO_HINTS
from ckpttool.catalogue.step_names import MEASURED, OF_TENSOR, pattern_of, step_in, step_said
from ckpttool.errors import UsageError
from ckpttool.formats.detect import detect
from ckpttool.producers import runs
from ckpttool.producers.components import Mounted, deepest
from ckpttool.producers.runs import COPY, LAST, RunCheckpoint, RunDirectory
from ckpttool.serialization.directory import Directory
from ckpttool.storage.stores import Location
from ckpttool.transfer import twins


def run_in(directory: Directory, catalogue: Catalogue) -> RunDirectory | None:
    """Return the run whose checkpoints are files of a directory that was opened whole, with the newest chosen; None if
    they are parts. Raises ReadError when nothing says which is the newest."""
    components: list[Mounted] = catalogue.facts.get("components", [])
    holders = {one.root: one for one in components if one.format != "asset" and one.name and not one.name.endswith("/")}
    if len(holders) < 2 or step_in(directory.name) is not None:
        return None
    if any(directory.leads_out(one.name) for one in holders.values()):
        return None  # which is an error of the whole
    parts.assign(catalogue)
    entries: dict[str, list[Entry]] = {one.name: [] for one in holders.values()}
    for path, entry in catalogue.entries.items():
        if (root := deepest(path, holders)) is not None:
            entries[holders[root].name].append(entry)
    alike: dict[object, list[str]] = defaultdict(list)
    for root, one in holders.items():
        form = frozenset((e.path[len(root) :], e.shape) for e in entries[one.name] if isinstance(e, Tensor))
        if any(path for path, _ in form) and not one.files:
            alike[one.name.rpartition("/")[0], is_averaged(root), form].append(one.name)
    groups = [names for names in alike.values() if len(names) > 1]
    folders = [directory.folder(group[0].rpartition("/")[0]) for group in groups[:1]]
    targets = {target for folder in folders for _, target in runs.pointers(folder)}
    pointed = {name for group in groups[:1] for name in group if name.rpartition("/")[2] in targets}
    all_said = all(len(names) > 1 and all(map(_said, names)) for names in alike.values())
    if not groups or not all(_are_apart(names, entries, pointed, all_said=all_said) for names in groups):
        return None
    if not pointed and any(_are_of_others(directory, names) for names in groups):
        return None
    checkpoints = _checkpoints(groups)
    newest = checkpoints and (_newest(checkpoints, pointed) or _not_renamed(checkpoints, entries))
    listed: list[RunCheckpoint] = []
    for names in checkpoints:
        others = [one.name for one in holders.values() if one.name not in names]
        name = names[0] if len(names) == 1 else pattern_of(names, others) or " ".join(names)
        at, nbytes, is_newest = directory.at(names[0]), sum(map(directory.size, names)), names is newest
        step = int(word) if (word := _said(names[0])).isdecimal() else None
        own = (tuple(names), () if step is None else (step,), is_newest)
        listed.append(RunCheckpoint(name, at, step, nbytes, None, catalogue.format, None, *own))
    return runs.with_newest(directory, listed) if listed else None


def check_one_step(location: Location, folder: Location, names: Collection[str], catalogue: Catalogue) -> None:
    """Raise UsageError if a pattern names one model at several steps, as words in the names say. A number alone may be
    that of an expert or of a trial."""
    steps = {name.rstrip("/"): step for name in names if (step := step_said(name)) is not None}
    components: list[Mounted] = catalogue.facts.get("components", []) if len({*steps.values()}) > 1 else []
    named = {one.root: name for one in components for name in steps if f"{one.name}/".startswith(f"{name}/")}
    parts.assign(catalogue)
    tensors: dict[Path, list[Tensor]] = defaultdict(list)
    for tensor in catalogue.tensors if named else ():
        if (root := deepest(tensor.path, named)) is not None:
            tensors[root].append(tensor)
    found: dict[object, set[int]] = defaultdict(set)
    for root, own in tensors.items():
        form = frozenset((e.path[len(root) :], e.shape) for e in [e for e in own if e.part.kind == "model"] or own)
        found[re.sub(r"\d+", "#", named[root]), form].add(steps[named[root]])
    of_steps = max(found.values(), key=len, default=set[int]())
    if len(of_steps) > 1:
        newest = [name for name, step in steps.items() if step == max(of_steps)]
        pattern = pattern_of(newest, steps.keys() - {*newest}) if len(newest) > 1 else newest[0]
        hint = f"name the newest, `{folder / (pattern or newest[0])}`, or the run itself"
        raise UsageError(f"`{location}` names {len(of_steps)} checkpoints of a run, not one", hint=hint)


def _are_apart(
    names: Sequence[str], entries: Mapping[str, Sequence[Entry]], pointed: set[str], *, all_said: bool
) -> bool:
    """Return whether files with the same tensors are checkpoints of a run each."""
    said = [name for name in names if _said(name)]
    if not pointed.isdisjoint(names) or (all_said and len(said) == len(names)):
        return True
    is_whole = all({"model", "optimizer"} <= {entry.part.kind for entry in entries[name]} for name in names)
    return is_whole and (bool(said) or len({counted(entries[name]) for name in names}) > 1)


def _are_of_others(directory: Directory, names: Sequence[str]) -> bool:
    """Return whether files that are numbered alike, but for what was measured, are of trainings of their own, as the
    folds of a validation: `fold0_best.pt fold1_best.pt`, whose weights have nothing in common."""
    bare = [MEASURED.sub("", name) for name in names]
    if len({*bare}) < len(bare) or len({re.sub(r"\d+", "#", name) for name in bare}) > 1:
        return False
    one, other = (directory.at(name) for name in (names[0], names[-1]))
    with closing(detect(one).open(one, NO_HINTS)) as first, closing(detect(other).open(other, NO_HINTS)) as last:
        return twins.are_unrelated(first, last)


def _not_renamed(every: Sequence[list[str]], entries: Mapping[str, Sequence[Entry]]) -> list[str] | None:
    """Return the one whose name the others begin with, if its counters say that it is newer: `last.pt last.pt.1`."""
    first, *others = sorted(every)
    new, *old = (counted(entry for name in names for entry in entries[name]) for names in (first, *others))
    are_older = all(is_later(new, of) for of in old) and all(names[0].startswith(first[0]) for names in others)
    return first if are_older else None


def is_later(one: Iterable[tuple[object, int]], other: Iterable[tuple[object, int]]) -> bool:
    """Return whether some counters of a checkpoint are higher than those of another, and none is lower."""
    new, old = (dict(sorted(counts, key=lambda item: item[1])) for counts in (one, other))
    both = new.keys() & old.keys()
    return any(new[key] > old[key] for key in both) and all(new[key] >= old[key] for key in both)


def _said(name: str) -> str:
    """Return what a name says of which of a run it is, "" if nothing: `best`, `loss=-3`, `100` of `100.weight.pt`."""
    last = name.rpartition("/")[2]
    match = COPY.search(last) or MEASURED.search(last) or OF_TENSOR.search(last)
    return match[0].lower() if match is not None else ""


def counted(entries: Iterable[Entry]) -> frozenset[tuple[object, int]]:
    """Return the counters of a file, of steps or of epochs."""
    objects = (e for e in entries if isinstance(e, Object) and e.path and parts.kind_of_key(e.path[-1]) == "progress")
    return frozenset((e.path[-1], e.value) for e in objects if e.is_read and type(e.value) is int)


def _checkpoints(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the files of each checkpoint: of several that are alike in more than one way those of one word; none where
    the words do not say which belong together."""
    if len(groups) == 1:
        return [[name] for name in groups[0]]
    by_word = [{_said(name): name for name in names} for names in groups]
    if any(len(of) < len(names) or of.keys() != by_word[0].keys() for of, names in zip(by_word, groups, strict=True)):
        return []
    return [[of[word] for of in by_word] for word in by_word[0]]


def _newest(every: Sequence[list[str]], pointed: set[str]) -> list[str] | None:
    """Return the newest: the one that is pointed to, else the last by name, else the only one that is not the best."""
    words = {names[0]: _said(names[0]) for names in every}
    candidates = (
        [names for names in every if not pointed.isdisjoint(names)],
        [names for names in every if LAST.fullmatch(splitext(names[0].rpartition("/")[2])[0])],
        [names for names in every if LAST.search(words[names[0]])],
        [names for names in every if not words[names[0]]],
    )
    chosen = next(filter(None, candidates), [])
    return chosen[0] if len(chosen) == 1 else None
