"""Several sources under one catalogue: the parts of a run directory, or a part taken from another checkpoint
(`--model-from`, `--optim-from`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from operator import itemgetter

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Chunk, Extent, Part, Path, Tensor, dotted
from ckpttool.catalogue.protocols import ByteRange, Itemised, Source
from ckpttool.catalogue.validation import concerns
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout import select
from ckpttool.layout.move import move
from ckpttool.layout.optimizer.misspelt import unmatched
from ckpttool.text import none_or, some

_ROOTS = {"model": ("model",), "optimizer": ("optim",)}


class CombinedSource(Source):
    """Several sources with one catalogue, in which their files are numbered one after the other. Itself a `Source`;
    closing it closes them. `replaced` are the paths of entries that were replaced by those of another source."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.replaced: list[Path] = []
        self._sources: list[tuple[int, Source]] = []  # each with the number of its first file
        self._attached: dict[Tensor, tuple[Source, Tensor]] = {}
        self._closing = ExitStack()

    @classmethod
    def over(cls, source: Source, close: Callable[[], object] = lambda: None) -> CombinedSource:
        """Start with one source as it is; `close` is called when it is closed."""
        combined = cls(source.catalogue)
        combined._append(source, 0)
        combined._closing.callback(close)
        return combined

    def _append(self, source: Source, start: int) -> None:
        self._sources.append((start, source))
        self._closing.callback(source.close)

    def mount(self, other: Source, root: Path = (), part: Part | None = None) -> None:
        """Add the entries of another source, or one part of it without its root key, under `root`. Raises CorruptError
        when a path is taken already."""
        shift = len(self.catalogue.files)
        self._append(other, shift)
        depth = len(part.root) if part is not None else 0
        added = other.catalogue if part is None else select.select(other.catalogue, lambda entry: entry.part == part)
        moved = move(added, {path: (*root, *path[depth:]) for path in added.entries})
        for entry in moved.entries.values():
            if isinstance(entry, Tensor):
                entry = replace(entry, origin=None, chunks=entry.chunks.shifted(shift))
            else:
                entry.origin = entry.path
            if part is not None:
                entry.part = Part(part.kind, root)
            self.catalogue.add(entry)
        of_part = {path: container for path, container in added.containers.items() if len(path) >= depth}
        self.catalogue.containers |= {(*root, *path[depth:]): container for path, container in of_part.items()}
        self.catalogue.files += other.catalogue.files
        self.catalogue.versions |= other.catalogue.versions
        self.catalogue.warnings += other.catalogue.warnings
        names = [entry.name for entry in added.entries.values()]
        self.catalogue.faults += [
            _moved(fault, root if names else (), depth)
            for fault in other.catalogue.faults
            if concerns(fault, None) or part is None or any(concerns(fault, name) for name in names)
        ]

    def attach(self, other: Source) -> list[Tensor]:
        """Add the files of another source, and return its tensors, which are not entries here. The catalogue of the
        first source stays as it is; closing leaves the other open."""
        shift = len(self.catalogue.files)
        self._sources.append((shift, other))
        self.catalogue = replace(
            self.catalogue,
            files=[*self.catalogue.files, *other.catalogue.files],
            versions=self.catalogue.versions | other.catalogue.versions,
        )
        added: list[Tensor] = []
        for tensor in other.catalogue.tensors:
            added.append(replace(tensor, origin=None, chunks=tensor.chunks.shifted(shift)))
            self._attached[added[-1]] = other, tensor
        return added

    def replace_part(self, kind: str, other: Source, name: str) -> None:
        """Replace the part `kind` by that of `other`, which is called `name` in messages. Raises UsageError when one of
        them has several, or `other` has none."""
        of_kind = [p for p in parts.parts(other.catalogue) if p.kind == kind]
        if len(of_kind) != 1:
            raise UsageError(f"`{name}` has {none_or(len(of_kind), 'part')} of kind {kind}, and one is needed")
        count = sum(1 for p in parts.parts(self.catalogue) if p.kind == kind)
        if count > 1:
            raise UsageError(f"the source has {count} parts of kind {kind}, so it is not clear which to replace")
        before = self.catalogue
        self.replaced += [path for path, entry in before.entries.items() if entry.part.kind == kind]
        rooted = self._with_roots()
        root = next((p.root for p in parts.parts(rooted) if p.kind == kind), _ROOTS[kind])
        self.catalogue = select.select(rooted, lambda entry: entry.part.kind != kind)
        self.catalogue.files = list(before.files)
        self.catalogue.versions = dict(before.versions)
        self.catalogue.warnings = [*before.warnings]
        names = [entry.name for entry in before.entries.values() if entry.part.kind != kind]
        self.catalogue.faults = [
            fault if rooted is before else _concerning(fault)
            for fault in before.faults
            if (concerns(fault, None) or any(concerns(fault, name) for name in names))
            and parts.kind_of_key(fault.facts.get("absent")) != kind
        ]
        self.mount(other, root, of_kind[0])
        self.catalogue.warnings.append(Warning("chosen", f"{kind} taken from `{name}`"))
        if unknown := unmatched(self.catalogue):
            text = f"the optimizer has state of {len(unknown)} parameters that the model does not have: "
            self.catalogue.warnings.append(Warning("unmatched-optimizer", text + some(unknown)))

    def _with_roots(self) -> Catalogue:
        """Return the catalogue with models and optimizers at the root under a key: another part fits beside."""
        catalogue = self.catalogue
        for part in [part for part in parts.parts(catalogue) if not part.root and part.kind in _ROOTS]:
            root = _ROOTS[part.kind]
            alone = all(entry.part == part for entry in catalogue.entries.values())
            moved = {path: (*root, *path) for path, entry in catalogue.entries.items() if entry.part == part}
            catalogue = move(catalogue, moved)
            for path in moved.values():
                catalogue.entries[path].part = Part(part.kind, root)
            # The dict at the root is the model's own if it has nothing else.
            if alone and () in catalogue.containers:
                catalogue.containers[root] = catalogue.containers.pop(())
        return catalogue

    def items(self) -> Iterator[tuple[str, ByteRange]]:
        """Yield the items of all sources."""
        for start, source in self._sources:
            if isinstance(source, Itemised):
                yield from ((name, run._replace(file=run.file + start)) for name, run in source.items())

    def require(self, tensor: Tensor) -> None:
        attached = self._attached.get(tensor)
        if attached is None:
            super().require(tensor)
        else:
            attached[0].require(attached[1])

    def lookup(self, tensor: Tensor, chunk: Chunk) -> Extent:
        start, source = self._sources[bisect_right(self._sources, chunk.extent.file, key=itemgetter(0)) - 1]
        if not start:
            return source.lookup(tensor, chunk)
        return source.lookup(tensor, chunk._replace(extent=chunk.extent.shifted(-start))).shifted(start)

    def close(self) -> None:
        self._closing.close()


def _moved(fault: CkptError, root: Path, depth: int) -> CkptError:
    """Return the fault with the names that it concerns under `root`; without names, all that is under it."""
    if not root:
        return _concerning(fault) if depth else fault
    if depth or "concerns" not in fault.facts:
        return _concerning(fault, [dotted(root)])
    return _concerning(fault, [f"{dotted(root)}.{name}".rstrip(".") for name in fault.facts["concerns"]])


def _concerning(fault: CkptError, names: list[str] | None = None) -> CkptError:
    """Return the fault of entries that have other names now, by default as one of the whole checkpoint."""
    facts = {key: value for key, value in fault.facts.items() if key != "concerns"}
    return type(fault)(fault.message, hint=fault.hint, **facts, **({} if names is None else {"concerns": names}))
