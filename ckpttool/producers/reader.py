"""Opening what a producer left: every mount by the format that it has, all of them in one catalogue."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from ckpttool import formats
from ckpttool.catalogue import parts, typed_json
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, File, Part, Path, Tensor, dotted
from ckpttool.catalogue.protocols import OpenOptions, Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.producers.directory import Listing
from ckpttool.producers.mount import Mounted
from ckpttool.producers.names import STEPS, step_in
from ckpttool.producers.pieces import EACH, ONE, SET, VALUES, Layout, Mount, Producer
from ckpttool.text import some


def open_source(row: Producer, listing: Listing, options: OpenOptions) -> Source:
    """The catalogue of a directory of this producer. What cannot be opened is a fault of it, unless it is all there is.
    Raises ReadError or CorruptError."""
    layout = row.mounts(listing)
    opening = _Opening(listing, layout, options)
    source = opening.source()
    catalogue = source.catalogue
    if row.confirms is not None and not row.confirms(catalogue):
        # Somebody else's directory of that name.
        return source
    catalogue.facts["producer"] = row.name
    if (step := step_in(listing.name, STEPS)) is not None:
        catalogue.facts["step"] = step
    # Files that a DCP index does not mention are pieces here, or are named below.
    catalogue.warnings[:] = [w for w in catalogue.warnings if w.kind != "unlisted-file"]
    if layout.assets:
        catalogue.facts["assets"] = [name.rstrip("/") for name in layout.assets]
    catalogue.warnings += layout.warnings
    if layout.strangers:
        catalogue.warnings.append(Warning("left-out", f"{some(layout.strangers)}: not known here, and left out"))
    catalogue.faults += [
        CorruptError(text, hint="copy what is missing, or name another checkpoint", file=listing.path, **about)
        for text, about in [*((text, {}) for text in layout.missing), *_too_few(layout, catalogue)]
    ]
    return source


def _too_few(layout: Layout, catalogue: Catalogue) -> list[tuple[str, dict[str, list[str]]]]:
    """Sets of one file per rank that end before the last rank which has written anything, and what that concerns."""
    last: dict[Path, str] = {m.root[:-1]: m.name for m in layout.mounts if m.how == EACH}
    sets = {m.name: m.names for m in layout.mounts if m.how == SET and "*" in m.name and not m.glob}
    ranks_of = {name: 1 + max(rank for rank, _ in _by_rank(m)) for m in layout.mounts if (name := m.name) in sets}
    ranks_of |= {name: 1 + (m.rank or 0) for m in layout.mounts if (name := m.name) in last.values()}
    world = catalogue.world_size
    roots = {m.name: m.root[:1] for m in layout.mounts if m.root}
    return [
        (
            f"`{name}` is of {count} rank{'s' if count > 1 else ''}, but {world} have written: the rest is missing",
            {"concerns": [dotted(roots[name])]} if name in roots else {},
        )
        for name, count in ranks_of.items() if count < world
    ]  # fmt: skip


class _Opening:
    """Opens the mounts of a layout one after the other."""

    def __init__(self, listing: Listing, layout: Layout, options: OpenOptions) -> None:
        self._listing = listing
        self._mounts = layout.mounts
        self._options = options
        self._told: dict[Warning, list[str]] = {}

    def source(self) -> Source:
        if not self._mounts:
            raise ReadError(f"`{self._listing.path}`: none of the files that it should have", file=self._listing.path)
        first = self._mounts[0]
        if len(self._mounts) == 1 and not (first.root or first.below) and first.how != VALUES:
            return self._open(first)
        made = Mounted(Catalogue(""))
        try:
            faults = [fault for mount in self._mounts if (fault := self._mount(made, mount)) is not None]
        except BaseException:
            made.close()
            raise
        if not made.catalogue.entries:
            made.close()
            raise faults[0] if faults else ReadError(f"`{self._listing.path}`: holds nothing", file=self._listing.path)
        made.catalogue.faults += faults
        made.catalogue.warnings += _folded(self._told)
        return made

    def _mount(self, made: Mounted, mount: Mount) -> CkptError | None:
        """Put one mount into the catalogue; what is wrong with it otherwise."""
        where = mount.name.rstrip("/")
        try:
            if mount.how == VALUES:
                values = self._listing.json(mount.name)
                made.add_values(values if isinstance(values, dict) else {"value": values}, mount.root)
                _list(made.catalogue, mount, Catalogue("json", [File(mount.name, mount.name, 0)]))
                return None
            if mount.how == SET and len(mount.names) > 1 and not (mount.glob or _is_set(self._pattern(mount), mount)):
                return self._mount_plain(made, mount)
            source = self._open(mount, made.catalogue)
        except (CorruptError, ReadError) as error:
            named = self._listing.path in error.message or not where
            message = error.message if named else f"`{where}`: {error.message}"
            absent = {"absent": dotted(mount.root)} if mount.root else {}
            return type(error)(message, hint=error.hint, **{"file": self._listing.at(where), **error.facts, **absent})
        theirs = source.catalogue
        _note(made.catalogue, theirs, mount)
        for warning in theirs.warnings:
            self._told.setdefault(warning, []).append(where)
        theirs.warnings = []
        made.mount(source, mount.root, _part(theirs, mount.below))
        return None

    def _mount_plain(self, made: Mounted, mount: Mount) -> CkptError | None:
        """Files by rank with nothing in them that says so: once what is the same in all, else for each rank."""
        spelt = set()
        for name in mount.names if not _by_rank_only(mount) else ():
            with closing(self._open(Mount(name))) as source:
                spelt.add(_spelt(source.catalogue))
        if len(spelt) == 1:
            return self._mount(made, replace(mount, name=mount.names[0], names=mount.names[:1], how=ONE))
        for rank, name in _by_rank(mount):
            root = (*mount.root, parts.rank_key(rank))
            fault = self._mount(made, replace(mount, name=name, names=(name,), root=root, rank=rank, how=EACH))
            if fault is not None:
                return fault
        return None

    def _open(self, mount: Mount, opened: Catalogue | None = None) -> Source:
        options = self._options
        if options.shapes is None and mount.shapes_from and opened is not None:
            options = self._shapes(mount.shapes_from)
        path = self._listing.at(mount.name) if mount.name else self._listing.path
        if "*" in mount.name:
            path = self._listing.at(mount.names[0]) if len(mount.names) == 1 else self._pattern(mount)
        source = formats.open_source(path.rstrip("/") or path, options)
        folder = mount.name.rpartition("/")[0]
        for file in source.catalogue.files:
            if folder and not file.scratch:
                file.name = f"{folder}/{file.name}"
            if mount.rank is not None:
                file.rank = mount.rank
        return source

    def _pattern(self, mount: Mount) -> str:
        return os.path.join(glob.escape(self._listing.path), mount.pattern)

    def _shapes(self, name: str) -> OpenOptions:
        """The shapes of parameters from their moments: an optimizer of DCP keeps both names and shapes."""
        if name not in self._listing:
            return self._options
        source = formats.open_source(self._listing.at(name.rstrip("/")))
        try:
            return shapes_of_moments(source.catalogue)
        finally:
            source.close()


def shapes_of_moments(catalogue: Catalogue) -> OpenOptions:
    """`state.<name>.exp_avg` has the shape of its parameter; of several, `step` is the one that has not.

    The order of the model is that of the names in `param_groups`, when there is only one of those. Pure.
    """
    found: dict[str, Tensor] = {}
    for tensor in catalogue.tensors:
        below = tensor.path[1:]
        if len(below) == 3 and below[0] == "state" and isinstance(below[1], str):
            first = found.setdefault(below[1], tensor)
            if (tensor.numel, len(tensor.shape)) > (first.numel, len(first.shape)):
                found[below[1]] = tensor
    groups = [o for o in catalogue.objects if o.path[1:2] == ("param_groups",) and o.path[-1] == "params"]
    order: list[str] = []
    for group in groups:
        value = group.value
        order += [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
    shapes: Mapping[str, Ints] = {name: found[name].shape for name in dict.fromkeys([*order, *found]) if name in found}
    return OpenOptions(shapes, ordered=len(groups) == 1 and set(order) == set(found)) if shapes else OpenOptions()


def _is_set(pattern: str, mount: Mount) -> bool:
    """Whether the files are put together by a format; one for each rank of what every rank has its own of is not."""
    return not _by_rank_only(mount) and any(row.recognise(pattern) for row in formats.FORMATS)


def _by_rank_only(mount: Mount) -> bool:
    return bool(mount.root) and parts.kind_of_key(mount.root[-1]) in parts.PER_RANK


def _by_rank(mount: Mount) -> list[tuple[int, str]]:
    begin, _, end = mount.name.partition("*")
    return [(int(name[len(begin) : len(name) - len(end)]), name) for name in mount.names]


def _spelt(catalogue: Catalogue) -> str:
    """Everything that a small file says, tensors by their checksums."""
    said: list[object] = []
    for entry in catalogue.entries.values():
        if isinstance(entry, Tensor):
            records = [entry.chunks.extent(i).record for i in range(len(entry.chunks))]
            # A tensor without a checksum is like no other.
            sums = [r.crc if r is not None and r.crc else id(entry) for r in records]
            said.append((entry.name, entry.dtype.name, entry.shape, sums))
        else:
            said.append((entry.name, typed_json.key(entry.value, name=entry.name)))
    return repr(said)


def _note(made: Catalogue, theirs: Catalogue, mount: Mount) -> None:
    """The facts of the first are those of the whole; each mount is listed."""
    if not made.format:
        made.format = theirs.format
        made.facts |= {k: v for k, v in theirs.facts.items() if k == "torch"}
    _list(made, mount, theirs)


def _list(made: Catalogue, mount: Mount, theirs: Catalogue) -> None:
    pieces: list[dict[str, Any]] = made.facts.setdefault("mounted", [])
    if mount.how == EACH and pieces and pieces[-1].get("root") == dotted(mount.root[:-1]):
        pieces[-1]["files"] += 1
        return
    root, path = mount.root, mount.name
    if mount.how == EACH:
        before, _, after = path.rpartition(str(mount.rank))
        root, path = root[:-1], f"{before}*{after}"
    layout = theirs.facts.get("layout")
    pieces.append({
        "path": path, "root": dotted(root), "format": theirs.format, "layout": layout,
        "files": len(theirs.own_files),
    })  # fmt: skip


def _part(theirs: Catalogue, below: str) -> Part | None:
    """Everything as one part below the key that all of it hangs under; None when it does not."""
    if not below or any(path[:1] != (below,) or len(path) < 2 for path in theirs.entries):
        return None
    inside = Part("other", (below,))
    for entry in theirs.entries.values():
        entry.part = inside
    return inside


def _folded(told: Mapping[Warning, list[str]]) -> list[Warning]:
    """Warnings of the mounts with the name of where they come from; what all ranks say is said once."""
    said = []
    for warning, names in told.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        said.append(warning.prefixed(f"`{names[0]}`{more}") if names[0] else warning)
    return said
