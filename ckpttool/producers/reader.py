"""Opening the directory of a framework: each component by its own format, all of them in one catalogue."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool import formats
from ckpttool.catalogue import identity, parts
from ckpttool.catalogue.entries import KINDS, Catalogue, Part, Path, Tensor, dotted
from ckpttool.catalogue.models import is_averaged
from ckpttool.catalogue.protocols import OpenOptions, Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.formats import documents, rankfiles, torchsave
from ckpttool.formats.detect import detect
from ckpttool.formats.rankfiles.rank_file import mentions_shards
from ckpttool.layout.optimizer.parse import shapes_of_moments
from ckpttool.producers import contents
from ckpttool.producers.combined import CombinedSource
from ckpttool.producers.components import Component, Layout, Mounted, Producer, deepest, weight_map
from ckpttool.producers.template import is_copied
from ckpttool.serialization.directory import Directory
from ckpttool.storage.stores import Location
from ckpttool.text import plural, some
from ckpttool.transfer import twins

_OF_STATE = re.compile(rf"({'|'.join(KINDS)})(-.*)?\.safetensors(\.index\.json)?")  # as a state names its parts


def open_directory(directory: Directory, options: OpenOptions, producer: Producer) -> Source:
    """Open a directory of a framework, with the files that the framework does not know. A component that cannot be
    opened is a fault, unless it is the only one. Raises ReadError or CorruptError."""
    layout = producer.layout(directory)
    own = {component.root for component in layout.components}
    contents.layout(directory, named=layout)
    source = open_layout(layout, directory, options)
    source.catalogue.faults += _too_few_ranks(layout, directory, source.catalogue.world_size)
    source.catalogue.warnings += _absent_parts(layout.absent, own, source.catalogue)
    return said_by(producer, source)


def said_by(producer: Producer | None, source: Source) -> Source:
    """Return a source with the name of the framework whose row describes it, if its contents confirm that."""
    if producer is not None and (producer.confirm is None or producer.confirm(source.catalogue)):
        source.catalogue.facts["producer"] = producer.name
    return source


def _absent_parts(absent: Collection[str], own: Collection[Path], catalogue: Catalogue) -> Iterator[Warning]:
    """Yield a warning of the parts that no file of the framework holds, unless a file of others does, such as the
    `unet/` that a hook of accelerate saves in place of its model."""
    others = {one.root: one.name for one in catalogue.facts.get("components", ()) if one.root not in own}
    if absent and others:
        parts.assign(catalogue)
        beside = (entry for path, entry in catalogue.entries.items() if deepest(path, others) is not None)
        held = {entry.part.kind for entry in beside if not is_averaged(entry.part.root)}
        absent = [part for part in absent if (parts.kind_of_key(part) or part) not in held]
    if absent:
        yield Warning("missing-part", f"there is no {' and no '.join(dict.fromkeys(absent))} in it")


def open_layout(layout: Layout, directory: Directory, options: OpenOptions) -> Source:
    """Open the components of a directory, and what a format has left in it. Raises ReadError or CorruptError."""
    source = _Opening(directory, layout.components, options).source()
    of_components = {name for component in layout.components for name in (component.name, *component.files)}
    if unused := {*source.catalogue.facts.pop("unused", ())} - of_components:
        source.close()
        contents.layout(directory, unused, named=layout)
        source = _Opening(directory, layout.components, options).source()
        source.catalogue.facts.pop("unused", None)
    catalogue = source.catalogue
    # Files that an index does not mention are other components or assets, or cannot be read.
    catalogue.warnings[:] = [w for w in catalogue.warnings if w.kind != "unlisted-file"]
    annotate(catalogue, layout, directory)
    return source


def annotate(catalogue: Catalogue, layout: Layout, directory: Directory) -> None:
    """Add what a layout has beside components: assets, warnings, and what is missing or cannot be read."""
    if layout.assets:
        catalogue.facts["assets"] = [name.rstrip("/") for name in layout.assets]
        places = [(name, directory.at(name).absolute()) for name in layout.assets if not directory.leads_out(name)]
        assets = [Mounted(Component(name), name, "asset", copies=(place,)) for name, place in places if place.is_file()]
        catalogue.facts["components"] = [*catalogue.facts.get("components", ()), *assets]
    catalogue.warnings += layout.warnings
    catalogue.faults += [_of_component(error, directory, name, name) for name, error in layout.unreadable.items()]
    catalogue.faults += [incomplete(text, directory) for text in layout.missing]
    indexes = () if layout.missing else {*layout.assets}.difference(layout.unreadable)
    for index in sorted(name for name in indexes if name.endswith(".bin.index.json")):
        names = {path[-1] for path in catalogue.entries}
        if absent := [name for name in weight_map(directory, index) if name not in names]:
            text = f"`{index}` names {some(absent)}, which its files do not have"
            catalogue.faults.append(incomplete(text, directory))


def incomplete(text: str, directory: Directory, **facts: Any) -> CorruptError:
    """Return the error for a directory from which a file is missing."""
    return CorruptError(text, hint="copy what is missing, or name another checkpoint", file=directory.path, **facts)


def _of_component(error: CkptError, directory: Directory, name: str, root: str) -> CkptError:
    """Return the error of a file as the fault of the part that it would be."""
    is_named = error.names(directory.path) or not name
    message = error.message if is_named else f"`{name}`: {error.message}"
    absent = {"absent": root} if root else {}
    return type(error)(message, hint=error.hint, **{"file": directory.at(name), **error.facts, **absent})


def _too_few_ranks(layout: Layout, directory: Directory, world_size: int) -> Iterator[CorruptError]:
    """Yield a fault for each set of one file per rank that ends before the last rank of the checkpoint."""
    components = layout.components
    last_file = {c.root[:-1]: c.name for c in components if c.kind == "per rank"}.values()
    sets = [c for c in components if c.kind == "rank files" and "*" in c.name and not c.glob]
    counts = [(c, 1 + max(rank for rank, _ in _by_rank(c))) for c in sets]
    counts += [(c, 1 + (c.rank or 0)) for c in components if c.name in last_file]
    for c, count in counts:
        if count < world_size:
            text = f"`{c.name}` is of {plural(count, 'rank')}, but {world_size} have written: the rest is missing"
            yield incomplete(text, directory, **({"concerns": [dotted(c.root[:1])]} if c.root else {}))


@dataclass(frozen=True, slots=True)
class _Opening:
    """Opens the components of a layout one after the other. `warnings` have the components that each is of, `faults`
    are the errors of those that cannot be opened, `unused` the files in the folders of components that are of none,
    `lacking` the files that are missing beside components, with what each has, by their folders."""

    directory: Directory
    components: list[Component]
    options: OpenOptions
    warnings: dict[Warning, list[str]] = field(default_factory=dict)
    faults: list[CkptError] = field(default_factory=list)
    mounted: list[Mounted] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    lacking: dict[tuple[str, str, str], list[Component]] = field(default_factory=dict)

    def source(self) -> Source:
        path = self.directory.path
        if not self.components:
            raise ReadError(f"`{path}`: none of the files that it should have", file=path)
        first = self.components[0]
        if len(self.components) == 1 and not (first.root or first.key) and first.kind in ("single", "shard"):
            source = self.open(first, only=self.options.only)
            if first.name:
                source.catalogue.facts["components"] = [_mounted(first, source.catalogue)]
            return source
        with ExitStack() as on_error:
            combined = on_error.enter_context(closing(CombinedSource(Catalogue(""))))
            for component in self.components:
                self.add(combined, component)
            if not combined.catalogue.entries:
                raise self.faults[0] if self.faults else ReadError(f"`{path}` holds nothing", file=path)
            self.faults.extend(self._without_rest())
            combined.catalogue.faults += self.faults
            combined.catalogue.facts |= {"mounted": _listed(self.mounted), "components": self.mounted}
            combined.catalogue.facts |= {"unused": self.unused} if self.unused else {}
            # Warnings have the name of their component, and appear once where all ranks have the same.
            for warning, (name, *others) in self.warnings.items():
                named = f"`{name}` and {len(others)} more" if others else f"`{name}`"
                combined.catalogue.warnings.append(warning.prefixed(named) if name else warning)
            on_error.pop_all()
        return combined

    def add(self, combined: CombinedSource, component: Component) -> None:
        """Add one component to the catalogue, or the error with which it cannot be opened to the faults."""
        name = component.name.rstrip("/")
        is_set = component.kind == "rank files" and len(component.files) > 1
        try:
            if is_set and not self._is_one_format(component):
                self._add_by_rank(combined, component)
                return
            source = self.open(component, combined.catalogue)
        except (CorruptError, ReadError) as error:
            self.faults.append(_of_component(error, self.directory, name, dotted(component.root)))
            return
        catalogue = source.catalogue
        folder = component.name if component.name.endswith("/") else ""
        self.unused.extend(f"{folder}{name}" for name in catalogue.facts.pop("unused", ()))
        if (lost := catalogue.facts.pop("lacks", None)) is not None:
            self.lacking.setdefault((component.name.rpartition("/")[0], *lost), []).append(component)
        if component.spare and (twin := twins.find(source, combined, [one.root for one in self.mounted])) is not None:
            source.close()
            model = f"`{dotted(twin.root)}`" if twin.root else "the model"
            names = " under other names" if twin.is_renamed else ""
            text = f"`{component.name}` has the tensors of {model}{names}, and is not read"
            self.warnings.setdefault(Warning("superseded-file", text, file=component.name), []).append("")
            return
        if not any(True for _ in combined.catalogue.tensors):
            # The facts of the first component with tensors are those of the whole.
            combined.catalogue.format = catalogue.format
            combined.catalogue.facts |= {k: v for k, v in catalogue.facts.items() if k in ("torch", "buffers")}
        if not component.root and len(self.components) > 1 and _is_no_dict(catalogue):
            # Its keys have no place beside those of others.
            component = replace(component, root=contents.stem(component))
        self.mounted.append(_mounted(component, catalogue))
        for warning in catalogue.warnings:
            self.warnings.setdefault(warning, []).append(name)
        catalogue.warnings = []
        combined.mount(source, component.root, _part_below(catalogue, component.key))

    def _without_rest(self) -> Iterator[CorruptError]:
        """Yield an error for each folder with two or more parts of a training state, or of a model with an index, and
        without the file that has the rest. Models alone, or parts under other names than those of a state, may have
        been copied from one, or several: each has a warning."""
        for (_, file, rest), found in self.lacking.items():
            is_of_state = not file.endswith(".index.json")
            names = (_OF_STATE.fullmatch(one.name.rpartition("/")[2]) for one in found)
            is_part = any(match is not None and match[1] != "model" for match in names)
            if len(found) > 1 and (is_part or not is_of_state):
                concerns = [dotted(one.root) for one in found if one.root != ("model",) or not is_of_state]
                yield incomplete(f"`{file}` is missing, which has {rest}", self.directory, concerns=concerns)

    def _add_by_rank(self, combined: CombinedSource, component: Component) -> None:
        """Add files of ranks that no format joins: once if they are equal, else one per rank."""
        if not _is_rank_local(component) and self._are_equal(component.files):
            self.add(combined, replace(component, name=component.files[0], kind="single"))
            return
        for rank, name in _by_rank(component):
            root = (*component.root, parts.rank_key(rank))
            self.add(combined, replace(component, name=name, files=(name,), root=root, rank=rank, kind="per rank"))

    def _is_one_format(self, component: Component) -> bool:
        """Return whether a format joins the files of all ranks, which it does not do with values of single ranks."""
        if component.glob or _is_rank_local(component):
            return bool(component.glob)
        if component.by_name and not any(mentions_shards(self.directory.at(name)) for name in component.files):
            return self._are_copies(component)
        return any(row.recognise(self._pattern(component)) for row in formats.FORMATS)

    def _are_copies(self, component: Component) -> bool:
        """Return whether all ranks have the same tensors, but for what is of a kind of which each has its own."""
        with suppress(CkptError), closing(rankfiles.FORMAT.open(self._pattern(component), self.options)) as source:
            parts.assign(source.catalogue)
            entries = source.catalogue.entries.items()
            own = {entry.part.kind for path, entry in entries if parts.find_rank(path) is not None}
            return not source.catalogue.faults and own.issubset(parts.PER_RANK) and any(source.catalogue.tensors)
        return False

    def open(
        self, component: Component, opened: Catalogue | None = None, only: Collection[str] | None = None
    ) -> Source:
        options, other = replace(self.options, only=only), component.shapes_from
        if options.shapes is None and opened is not None and other and other in self.directory:
            # An optimizer of DCP has both the names and the shapes of the parameters.
            with closing(self.open(Component(other.rstrip("/")))) as source:
                options = shapes_of_moments(source.catalogue)
        if component.name.endswith("/"):
            self.directory.folder(component.name)  # for all that look at it
        path = self.directory.at(component.name) if component.name else self.directory.path
        if "*" in component.name:
            path = self.directory.at(component.files[0]) if len(component.files) == 1 else self._pattern(component)
        row = documents.JSON if component.kind == "json" else detect(path)
        if row is rankfiles.FORMAT and component.kind in ("single", "per rank") and not mentions_shards(path):
            # By itself, and not with those that are called alike.
            row = torchsave.FORMAT
        source = row.open(path, options)
        folder = component.name.rpartition("/")[0]
        for file in source.catalogue.files:
            if folder and not file.scratch:
                file.name = f"{folder}/{file.name}"
            if component.rank is not None:
                file.rank = component.rank
        return source

    def _pattern(self, component: Component) -> Location:
        return self.directory.path.escaped() / component.pattern

    def _are_equal(self, names: Sequence[str]) -> bool:
        """Return whether files hold the same; not if one of them cannot be opened."""
        with suppress(CorruptError, ReadError):
            return len({self._digest(name) for name in names}) == 1
        return False

    def _digest(self, name: str) -> str:
        """Return the contents of a small file, tensors by their checksums."""
        values: list[object] = []
        with closing(self.open(Component(name))) as source:
            for entry in source.catalogue.entries.values():
                if isinstance(entry, Tensor):
                    records = [chunk.extent.record for chunk in entry.chunks]
                    # A tensor without a checksum is equal to no other.
                    crcs = [r.crc if r is not None and r.crc else id(entry) for r in records]
                    values.append((entry.name, entry.dtype.name, entry.shape, crcs))
                else:
                    values.append((entry.name, identity.key(entry.value)))
            return identity.key(values)


def is_of_each_rank(catalogue: Catalogue) -> bool:
    """Return whether files of ranks hold what each rank has of its own: they contradict each other, and none has a
    piece of a tensor."""
    return (
        bool(catalogue.faults)
        and not any(len(tensor.chunks) > 1 or "_flat_param" in tensor.name for tensor in catalogue.tensors)
        and not any(mentions_shards(file.location) for file in catalogue.own_files)
    )


def _is_no_dict(catalogue: Catalogue) -> bool:
    """Return whether a file holds one tensor or value, or a list of them, and no state dict."""
    return () in catalogue.entries or (() in catalogue.containers and catalogue.containers[()].kind == "list")


def _is_rank_local(component: Component) -> bool:
    return bool(component.root) and parts.kind_of_key(component.root[-1]) in parts.PER_RANK


def _by_rank(component: Component) -> list[tuple[int, str]]:
    begin, _, end = component.name.partition("*")
    return [(int(name[len(begin) : len(name) - len(end)]), name) for name in component.files]


def _mounted(component: Component, catalogue: Catalogue) -> Mounted:
    layout, count = catalogue.facts.get("layout"), len(catalogue.own_files)
    one = Mounted(component, component.name, catalogue.format, layout, count, is_copied=is_copied(catalogue))
    if component.name.endswith(".index.json"):
        return one._replace(files=component.files)
    if component.kind == "single" and component.name in component.files[:1]:
        return one._replace(copies=component.files[1:])
    if "*" not in component.name or component.glob:
        return one
    if len(component.files) == 1:
        return one._replace(name=component.files[0])
    return one._replace(files=component.files)


def _listed(mounted: Iterable[Mounted]) -> list[dict[str, Any]]:
    """Return the components for people, the files of all ranks as one."""
    rows: list[dict[str, Any]] = []
    for one in mounted:
        root, path = one.root, one.component.name
        if one.component.kind == "per rank":
            root = root[:-1]
            if rows and rows[-1]["root"] == dotted(root):
                rows[-1]["file_count"] += 1
                continue
            before, _, after = path.rpartition(str(one.component.rank))
            path = f"{before}*{after}"
        how = {"format": one.format, "layout": one.layout, "file_count": one.file_count}
        rows.append({"path": path, "root": dotted(root), **how})
    return rows


def _part_below(catalogue: Catalogue, key: str) -> Part | None:
    """Return everything as one part below the key around all of it; None when there is no such key."""
    if not key or any(path[:1] != (key,) or len(path) < 2 for path in catalogue.entries):
        return None
    part = Part("other", (key,))
    for entry in catalogue.entries.values():
        entry.part = part
    return part
