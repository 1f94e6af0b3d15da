"""Several sources under one catalogue: a part taken from another checkpoint (`--model-from`, `--optim-from`)."""

from __future__ import annotations

from dataclasses import replace

from ckpttool import layout, parts
from ckpttool.catalogue import Catalogue, Chunk, Chunks, Extent, Part, Path, Tensor
from ckpttool.contract import Source
from ckpttool.errors import UsageError

_ROOTS = {"model": ("model",), "optimizer": ("optim",)}


class Mounted:
    """Sources whose files stand behind each other in one catalogue. Itself a `Source`."""

    def __init__(self, first: Source) -> None:
        self.catalogue: Catalogue = first.catalogue
        self.main: Catalogue = first.catalogue
        self._sources = [first]
        self._starts = [0]
        self._originals: dict[Path, Tensor] = {}

    def replace_part(self, kind: str, other: Source, name: str) -> None:
        """Take the part `kind` of `other` in place of ours. Raises UsageError when it has none, or several."""
        theirs = _only_part(other.catalogue, kind, name)
        ours = [p for p in parts.parts(self.catalogue) if p.kind == kind]
        if len(ours) > 1:
            raise UsageError(f"the source has {len(ours)} parts of kind {kind}, so it is not clear which to replace")
        made = self._named()
        root = next((p.root for p in parts.parts(made) if p.kind == kind), _ROOTS[kind])
        kept = layout.select(made, lambda entry: entry.part.kind != kind)
        shift = len(self.catalogue.files)
        kept.files = [*self.catalogue.files, *other.catalogue.files]
        kept.warnings = [*kept.warnings, *other.catalogue.warnings, f"{kind} taken from `{name}`"]
        self._sources.append(other)
        self._starts.append(shift)
        self.catalogue = kept
        self._mount(other.catalogue, theirs, root, shift)

    def _named(self) -> Catalogue:
        """Ours, with a bare model (or optimizer) moved under a key, so that another part has room beside it."""
        made = self.catalogue
        for part in parts.parts(made):
            if part.root or part.kind not in _ROOTS:
                continue
            root = _ROOTS[part.kind]
            alone = all(entry.part == part for entry in made.entries.values())
            moved = {path: (*root, *path) for path, entry in made.entries.items() if entry.part == part}
            made = layout.move(made, moved)
            for path in moved.values():
                made.entries[path].part = Part(part.kind, root)
            # The dict at the root was the model's own only when nothing else is in it.
            if alone and () in made.containers:
                made.containers[root] = made.containers.pop(())
        return made

    def _mount(self, theirs: Catalogue, part: Part, root: Path, shift: int) -> None:
        depth = len(part.root)
        alone = layout.select(theirs, lambda entry: entry.part == part)
        for entry in layout.move(alone, {path: (*root, *path[depth:]) for path in alone.entries}).entries.values():
            entry.part = Part(part.kind, root)
            if isinstance(entry, Tensor):
                assert entry.origin is not None
                self._originals[entry.path] = entry.origin
                entry = replace(entry, origin=None, chunks=_shifted(entry.chunks, shift))
            else:
                entry.origin = entry.path
            self.catalogue.add(entry)
        for path, container in alone.containers.items():
            if path[:depth] == part.root and len(path) >= depth:
                self.catalogue.containers[(*root, *path[depth:])] = container

    def resolve(self, tensor: Tensor, chunk: Chunk) -> Extent:
        i = max(n for n, start in enumerate(self._starts) if start <= chunk.extent.file)
        shift = self._starts[i]
        if not shift:
            return self._sources[0].resolve(tensor, chunk)
        found = self._sources[i].resolve(
            self._originals[tensor.path], chunk._replace(extent=_shift(chunk.extent, -shift))
        )
        return _shift(found, shift)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def _only_part(catalogue: Catalogue, kind: str, name: str) -> Part:
    found = [p for p in parts.parts(catalogue) if p.kind == kind]
    if len(found) != 1:
        raise UsageError(f"`{name}` has {len(found) or 'no'} parts of kind {kind}, and one is needed")
    return found[0]


def _shift(extent: Extent, by: int) -> Extent:
    record = extent.record
    return extent._replace(
        file=extent.file + by, record=record._replace(file=record.file + by) if record is not None else None
    )


def _shifted(chunks: Chunks, by: int) -> Chunks:
    return Chunks.of(chunk._replace(extent=_shift(chunk.extent, by)) for chunk in chunks)
