"""Summarises a catalogue for `inspect`: headline, parts, module trees, objects, warnings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpttool.analysis.describe import module_tree
from ckpttool.analysis.describe.copies import note_copies
from ckpttool.analysis.describe.counters import note_counters
from ckpttool.analysis.describe.format_value import peek
from ckpttool.analysis.describe.headline import Headline, headline
from ckpttool.analysis.describe.inventory import inventory
from ckpttool.analysis.describe.optimizers import optimizers
from ckpttool.analysis.describe.warnings import copies, findings
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.counters import epoch, step
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import KINDS, Catalogue, Entry, Object, Part, Path, Tensor, dotted
from ckpttool.catalogue.findings import DAMAGE
from ckpttool.catalogue.models import Models, models
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.shown import LIMIT, shown
from ckpttool.catalogue.warning import Warning
from ckpttool.serialization.unpickler import no_garbage_collection
from ckpttool.text import ranges

DEPTH = 4


@dataclass(slots=True)
class PartFigures:
    """The figures of a part."""

    part: str  #: `model`, `optimizer`, `scheduler`, `rng`, `dataloader`, `scaler`, `progress` or `other`
    root: str  #: its key
    _name: str = ""  # with its key if that has another name
    tensor_count: int = 0  #: number of tensors
    numel: int = 0  #: number of their elements, tied ones counted once
    payload_bytes: int = 0  #: bytes of values, tied ones counted once
    dtypes: dict[str, int] = field(default_factory=dict)  #: those bytes by dtype
    object_count: int = 0  #: number of objects
    parameters: int | None = None  #: number of a model's parameters, without buffers and ties; null for other parts
    #: key of the model that this one is an average (EMA, SWA) or a copy of; null for others
    average_of: str | None = None
    #: keys of the models whose parameters this optimizer has; empty if unknown
    optimizer_of: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self._name


@dataclass(frozen=True, slots=True)
class ObjectLine:
    """`ObjectLine("scheduler.last_epoch", "3", 1)`; `times` > 1 for neighbours whose names differ in one number."""

    name: str
    text: str
    times: int = 1


@dataclass(slots=True)
class Summary:
    """What `inspect` prints. `holds` is what there is, in one line; `internal` are attributes that a scheduler keeps
    for itself."""

    headline: Headline
    holds: str
    parts: list[PartFigures]
    trees: list[tuple[Part, list[module_tree.ModuleLine]]]
    objects: list[ObjectLine]
    internal: list[ObjectLine]
    ties: list[tuple[str, str]]
    warnings: list[Warning]


@no_garbage_collection()
def summarise(catalogue: Catalogue, *, depth: int = DEPTH, limit: int = LIMIT) -> Summary:
    """Summarise a catalogue. `depth` is the levels of the module trees, `limit` the characters of a value."""
    aliases = find_aliases(catalogue.tensors)
    by_part = _by_part(catalogue)
    every = models(catalogue)
    found = _headline(catalogue, every, aliases)
    tables = [optimizer.table for optimizer in found.optimizers if optimizer.table is not None]
    shown = {path for table in tables for path in table.paths}
    values = (e for entries in by_part.values() for e in entries if isinstance(e, Object) and e.path not in shown)
    rest: dict[bool, list[Object]] = {False: [], True: []}
    for value in values:
        rest[_is_internal(value)].append(value)
    trees = {p: [e for e in by_part[p] if isinstance(e, Tensor)] for p in by_part if p.kind == "model"}
    return Summary(
        headline=found,
        holds=inventory(catalogue, every, found.optimizers, found.step, {*aliases, *copies(catalogue)}),
        parts=_parts(by_part, every, aliases),
        trees=[(part, module_tree.lines(tensors, part.root, aliases, depth)) for part, tensors in trees.items()],
        objects=_folded(ObjectLine(e.name, value_text(e, catalogue, limit)) for e in rest[False]),
        internal=[ObjectLine(e.name, value_text(e, catalogue, limit)) for e in rest[True]],
        ties=[(dotted(path), dotted(kept)) for path, kept in aliases.items()],
        warnings=[w for w in (*catalogue.warnings, *findings(catalogue, aliases)) if w.gravity != DAMAGE],
    )


def damage(catalogue: Catalogue) -> list[Warning]:
    """Return what is wrong with the checkpoint, which stops every operation but `inspect`; nothing where everything but
    its bytes is sound."""
    return [warning for warning in catalogue.warnings if warning.gravity == DAMAGE]


def _is_internal(entry: Object) -> bool:
    key = entry.path[-1] if entry.path else None
    return entry.part.kind == "scheduler" and isinstance(key, str) and key.startswith("_") and key != "_last_lr"


def head(catalogue: Catalogue, source: Source | None) -> tuple[Headline, list[PartFigures]]:
    """Return the headline, and a line for each part. Its `source`, if it is still open, says first which weights are
    stored twice, and what its counters are; of a catalogue that `inspect` returned this is known."""
    if source is not None:
        note_copies(source)
        note_counters(source)
    aliases = find_aliases(catalogue.tensors)
    every = models(catalogue)
    return _headline(catalogue, every, aliases), _parts(_by_part(catalogue), every, aliases)


def _headline(catalogue: Catalogue, every: Models, aliases: Mapping[Path, Path]) -> Headline:
    entries = [entry for entry in catalogue.entries.values() if entry.part.kind == "optimizer"]
    tied = {*aliases, *copies(catalogue)}
    return headline(
        catalogue, every, optimizers(entries, catalogue.entries, aliases), step(catalogue), tied, epoch(catalogue)
    )


def _by_part(catalogue: Catalogue) -> dict[Part, list[Entry]]:
    by_part: dict[Part, list[Entry]] = {}
    for entry in catalogue.entries.values():
        by_part.setdefault(entry.part, []).append(entry)
    return {part: by_part[part] for part in sorted(by_part, key=lambda part: KINDS.index(part.kind))}


def _parts(by_part: Mapping[Part, Iterable[Entry]], every: Models, aliases: Mapping[Path, Path]) -> list[PartFigures]:
    lines = {part: _part(part, entries, aliases) for part, entries in by_part.items()}
    for model in every.models:
        line = lines[model.part]
        line.parameters = sum(tensor.numel for tensor in model.parameters(aliases))
        line.average_of = None if model.average_of is None else dotted(model.average_of.root)
    for part, owners in every.optimizer_of.items():
        lines[part].optimizer_of = [dotted(owner.root) for owner in owners]
    return [*lines.values()]


def _part(part: Part, entries: Iterable[Entry], aliases: Mapping[Path, Path]) -> PartFigures:
    line = PartFigures(part.kind, dotted(part.root), str(part))
    elements: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry, Object):
            line.object_count += 1
            continue
        line.tensor_count += 1
        own = entry.numel if entry.path not in aliases else 0
        name = entry.dtype.name
        elements[name] = elements.get(name, 0) + own
    nbytes = {name: numel * dtype(name).itemsize for name, numel in elements.items()}
    line.numel, line.payload_bytes = sum(elements.values()), sum(nbytes.values())
    line.dtypes = dict(sorted(nbytes.items(), key=lambda item: -item[1]))
    return line


def value_text(entry: Object, catalogue: Catalogue, limit: int = LIMIT) -> str:
    """Return one line for an object's value; its size where it is large, the reason where it cannot be read."""
    value, instead = peek(entry)
    return shown(value, catalogue.entries, limit) if instead is None else instead


_NUMBER = re.compile(r"\d+")


def _folded(lines: Iterable[ObjectLine]) -> list[ObjectLine]:
    """Fold neighbours with equal values whose names differ in one number to one line: `state.0-7.step`."""
    runs: list[tuple[list[ObjectLine], int | None]] = []  # with the number that differs
    for line in lines:
        run, place = runs[-1] if runs else ([], None)
        differing = _differing(run[0].name, line.name) if run and run[0].text == line.text else None
        if differing is not None and place in (None, differing):
            run.append(line)
            runs[-1] = run, differing
        else:
            runs.append(([line], None))
    return [run[0] if place is None else _run(run, place) for run, place in runs]


def _differing(a: str, b: str) -> int | None:
    """Return which number of two names differs, when nothing else does."""
    pairs = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=False)
    differing = [i for i, (x, y) in enumerate(pairs) if x != y] if _NUMBER.sub("#", a) == _NUMBER.sub("#", b) else []
    return differing[0] if len(differing) == 1 else None


def _run(lines: list[ObjectLine], place: int) -> ObjectLine:
    numbers = ranges((int(_NUMBER.findall(line.name)[place]) for line in lines), ",", module_tree.RANGES)
    name, at = lines[0].name, list(_NUMBER.finditer(lines[0].name))[place]
    return ObjectLine(name[: at.start()] + numbers + name[at.end() :], lines[0].text, len(lines))
