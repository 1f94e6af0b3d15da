"""Several sources under one catalogue: the parts of a run directory, or a part taken from another checkpoint
(`--model-from`, `--optim-from`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

from ckpttool.catalogue import flatten, parts
from ckpttool.catalogue.entries import Catalogue, Chunk, Extent, Part, Path, Tensor, dotted
from ckpttool.catalogue.protocols import Itemised, Run, Source
from ckpttool.catalogue.validation import concerns
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout import select
from ckpttool.text import some

_ROOTS = {"model": ("model",), "optimizer": ("optim",)}


class CombinedSource:
    """Sources whose files stand behind each other in one catalogue. Itself a `Source`, and closes what is mounted.

    `given_way` are entries that another source's took the place of.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.given_way: list[Path] = []
        self._sources: list[Source] = []
        self._starts: list[int] = []
        self._closing = ExitStack()

    @classmethod
    def over(cls, source: Source) -> CombinedSource:
        """One source as it stands, for others to be mounted beside it."""
        made = cls(source.catalogue)
        made._hold(source, 0)
        return made

    def _hold(self, source: Source, start: int) -> None:
        self._sources.append(source)
        self._starts.append(start)
        self._closing.callback(source.close)

    def mount(self, other: Source, root: Path = (), part: Part | None = None) -> None:
        """Add what another source holds, or one part of it without its root key, under `root`.

        Raises CorruptError when something is there already.
        """
        shift = len(self.catalogue.files)
        self._hold(other, shift)
        theirs = other.catalogue
        depth = len(part.root) if part is not None else 0
        alone = theirs if part is None else select.select(theirs, lambda entry: entry.part == part)
        moved = select.move(alone, {path: (*root, *path[depth:]) for path in alone.entries})
        for entry in moved.entries.values():
            if isinstance(entry, Tensor):
                entry = replace(entry, origin=None, chunks=entry.chunks.shifted(shift))
            else:
                entry.origin = entry.path
            if part is not None:
                entry.part = Part(part.kind, root)
            self.catalogue.add(entry)
        for path, container in alone.containers.items():
            if len(path) >= depth:
                self.catalogue.containers[(*root, *path[depth:])] = container
        self.catalogue.files += theirs.files
        self.catalogue.warnings += theirs.warnings
        named = [entry.name for entry in alone.entries.values()]
        self.catalogue.faults += [
            _moved(fault, root if named else (), depth) for fault in theirs.faults
            if concerns(fault, None) or part is None or any(concerns(fault, name) for name in named)
        ]  # fmt: skip

    def add_values(self, values: Mapping[str, Any], root: Path = ()) -> None:
        """Add plain values, such as those of a JSON file, under `root`."""
        flatten.flatten(dict(values), self.catalogue, (), _no_tensor, root)

    def replace_part(self, kind: str, other: Source, name: str) -> None:
        """Take the part `kind` of `other` in place of ours. Raises UsageError when it has none, or several."""
        theirs = _only_part(other.catalogue, kind, name)
        ours = [p for p in parts.parts(self.catalogue) if p.kind == kind]
        if len(ours) > 1:
            raise UsageError(f"the source has {len(ours)} parts of kind {kind}, so it is not clear which to replace")
        before = self.catalogue
        self.given_way += [path for path, entry in before.entries.items() if entry.part.kind == kind]
        made = self._named()
        root = next((p.root for p in parts.parts(made) if p.kind == kind), _ROOTS[kind])
        self.catalogue = select.select(made, lambda entry: entry.part.kind != kind)
        self.catalogue.files = list(before.files)
        self.catalogue.warnings = [*before.warnings]
        left = [entry.name for entry in before.entries.values() if entry.part.kind != kind]
        self.catalogue.faults = [
            fault if made is before else _unbound(fault) for fault in before.faults
            if (concerns(fault, None) or any(concerns(fault, name) for name in left))
            and parts.kind_of_key(fault.facts.get("absent")) != kind
        ]  # fmt: skip
        self.mount(other, root, theirs)
        self.catalogue.warnings.append(Warning("chosen", f"{kind} taken from `{name}`"))
        strangers = _strangers(self.catalogue)
        if strangers:
            text = f"the optimizer has state of {len(strangers)} parameters that the model does not have: "
            self.catalogue.warnings.append(Warning("unmatched-optimizer", text + some(strangers)))

    def _named(self) -> Catalogue:
        """Ours, with a bare model (or optimizer) moved under a key, so that another part has room beside it."""
        made = self.catalogue
        for part in parts.parts(made):
            if part.root or part.kind not in _ROOTS:
                continue
            root = _ROOTS[part.kind]
            alone = all(entry.part == part for entry in made.entries.values())
            moved = {path: (*root, *path) for path, entry in made.entries.items() if entry.part == part}
            made = select.move(made, moved)
            for path in moved.values():
                made.entries[path].part = Part(part.kind, root)
            # The dict at the root was the model's own only when nothing else is in it.
            if alone and () in made.containers:
                made.containers[root] = made.containers.pop(())
        return made

    def items(self) -> Iterator[tuple[str, Run]]:
        """Those of all sources."""
        for source, start in zip(self._sources, self._starts, strict=True):
            if isinstance(source, Itemised):
                yield from ((name, run._replace(file=run.file + start)) for name, run in source.items())

    def resolve(self, tensor: Tensor, chunk: Chunk) -> Extent:
        i = bisect_right(self._starts, chunk.extent.file) - 1
        start = self._starts[i]
        if not start:
            return self._sources[i].resolve(tensor, chunk)
        return self._sources[i].resolve(tensor, chunk._replace(extent=chunk.extent.shifted(-start))).shifted(start)

    def closing(self, done: Callable[[], object]) -> None:
        """Something else to do when this is closed."""
        self._closing.callback(done)

    def close(self) -> None:
        self._closing.close()


def _moved(fault: CkptError, root: Path, depth: int) -> CkptError:
    """The same fault where what it concerns is mounted under `root`: all that is there, unless it says otherwise."""
    if not root:
        return _unbound(fault) if depth else fault
    names = [dotted(root)]
    if not depth and "concerns" in fault.facts:
        names = [f"{dotted(root)}.{name}".rstrip(".") for name in fault.facts["concerns"]]
    return type(fault)(fault.message, hint=fault.hint, **{**fault.facts, "concerns": names})


def _unbound(fault: CkptError) -> CkptError:
    """The same fault as one of the whole checkpoint: what it concerns has another name now."""
    facts = {key: value for key, value in fault.facts.items() if key != "concerns"}
    return type(fault)(fault.message, hint=fault.hint, **facts)


def _only_part(catalogue: Catalogue, kind: str, name: str) -> Part:
    found = [p for p in parts.parts(catalogue) if p.kind == kind]
    if len(found) != 1:
        raise UsageError(f"`{name}` has {len(found) or 'no'} parts of kind {kind}, and one is needed")
    return found[0]


def _strangers(catalogue: Catalogue) -> list[str]:
    """Parameters that the optimizer names and no model has."""
    models = {dotted(path[len(e.part.root) :]) for path, e in catalogue.entries.items() if e.part.kind == "model"}
    named: dict[str, None] = {}
    for path, entry in catalogue.entries.items():
        if entry.part.kind == "optimizer":
            below = path[len(entry.part.root) :]
            flat = select.flattened(below[0]) if below and isinstance(below[0], str) else None
            if flat is not None:
                named[flat[1]] = None
            elif len(below) > 1 and below[0] == "state" and isinstance(below[1], str):
                named[below[1]] = None
    return [name for name in named if name not in models]


def _no_tensor(value: Any, path: Path, embedded: bool) -> NoReturn:
    raise AssertionError("plain values hold no tensors")
