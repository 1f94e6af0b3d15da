"""A directory of several components created empty, as one sink: what a framework leaves, each by its own format.

    component                                                               catalogue          in the component
    OutputComponent("pytorch_model_fsdp_0", DCP, ("model",), ("model",))    model.w            model.w
    OutputComponent("random_states_1.pkl", TORCH, ("rng", "rank1"))         rng.rank1.step     step
    OutputComponent("trainer_state.json", JSON, ("trainer_state",))         trainer_state.x    {"x": 3}

The catalogue has the paths that the reader of the framework's directories gives, so that a transfer and `--check` treat
it like any other. The files of the components are numbered one after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, File, Object, Part, Path, Tensor, above
from ckpttool.catalogue.protocols import Crcs, CreatedSink, Format, FormatLoss, Sink, SinkOptions
from ckpttool.catalogue.warning import Warning
from ckpttool.layout import rechunk, select
from ckpttool.layout.move import move, rebuilt
from ckpttool.producers.components import Constant
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import Location, local_path
from ckpttool.transfer.checksums import WrittenCrcs

_SCRATCH = ".component"


@dataclass(frozen=True, slots=True)
class OutputComponent:
    """A component to write: `OutputComponent("optimizer_0", dcp.FORMAT, ("optimizer",), ("optimizer",))`.

    `name` is a path below the destination, with `{rank}` for a file of each rank, empty for the destination itself;
    `root` is its root in the catalogue, `key` the key around everything in it. `values` are written in it beside the
    entries. A rank in a name has at least so many `digits`; `world` is the number of ranks, None for that of the
    destination.
    """

    name: str
    format: Format
    root: Path = ()
    key: Path = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    constants: Sequence[Constant] = ()
    digits: int = 1
    world: int | None = None

    def inner(self, path: Path) -> Path:
        """Return the path in the component."""
        return (*self.key, *path[len(self.root) :])

    def outer(self, path: Path) -> Path:
        """Return the path in the catalogue of the directory."""
        return (*self.root, *path[len(self.key) :])


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """What is written where. `component_of` is the number of the component of each entry; `lost` is what has none.
    `copies` are files that are written with the names of others that are to hold the same."""

    catalogue: Catalogue
    components: Sequence[OutputComponent]
    component_of: Mapping[Path, int]
    lost: Sequence[FormatLoss]
    copies: Sequence[tuple[str, str]] = ()

    def losses(self, catalogue: Catalogue, path: str) -> list[FormatLoss]:
        """Return the entries that are in no component, or that the format of theirs cannot store."""
        losses = list(self.lost)
        for component, contents in self._split(catalogue):
            if component.world is not None:
                contents.files = [File(local_path(""), "", 0, rank=component.world - 1)]
            names = {entry.name: component.outer(path) for path, entry in contents.entries.items()}
            losses += [
                FormatLoss(".".join(map(str, names.get(loss.name, (loss.name,)))), loss.why)
                for loss in component.format.losses(contents, component.name)
            ]
        return losses

    def create(self, root: Location, catalogue: Catalogue, options: SinkOptions) -> Sink:
        """Create every component at its full size below `root`, which does not exist yet."""
        files.make_directory(root)
        result = Catalogue("", facts={"layout": f"{len(self.components)} pieces"})
        sinks: list[tuple[Sink, int]] = []
        entries: dict[Path, Entry] = {}
        crcs: dict[tuple[int, int], int] = {}
        for component, contents in self._split(catalogue):
            name = component.name
            sink = _create_component(component, root / name if name else root, contents, options)
            written, start = sink.catalogue, len(result.files)
            sinks.append((sink, start))
            for file in written.files:
                file.name = file.location.relative_to(root)
            result.files += written.files
            result.warnings += [w.prefixed(f"`{name.replace('{rank}', '*')}`") if name else w for w in written.warnings]
            constants = {component.inner(c.path): c.data for c in component.constants}
            crcs |= _write_constants(written, constants, start)
            for inner, entry in written.entries.items():
                outer = component.outer(inner)
                if isinstance(entry, Object):
                    # That of the whole state, unless it is one of `values`: its links have the paths there.
                    entries |= {outer: catalogue.entries[outer]} if outer in catalogue.entries else {}
                elif inner not in constants:
                    entries[outer] = _moved(component, entry, start)
            result.replicas += [_moved(component, t, start) for t in written.replicas if t.path not in constants]
            key = component.key
            within = {p: c for p, c in written.containers.items() if p[: len(key)] == key}
            result.containers |= {component.outer(path): container for path, container in within.items()}
        if options.max_shard_size is not None and not any(c.format.splits for c in self.components):
            text = "`--max-shard-size` has no effect: no component is a safetensors file"
            result.warnings.append(Warning("no-effect", text))
        result.entries = {path: entries[path] for path in catalogue.entries if path in entries}
        copies = [(name if isinstance(name, Location) else root / name, root / to) for name, to in self.copies]
        more = sum(sink.catalogue.facts.get("more_bytes", 0) for sink, _ in sinks)
        result.facts["more_bytes"] = more + sum(path.size() for path, _ in copies if path.exists())
        result.facts["copied"] = [to for _, to in self.copies]
        return CreatedSink(result, partial(_finish, sinks, copies, crcs))

    def _split(self, catalogue: Catalogue) -> Iterator[tuple[OutputComponent, Catalogue]]:
        """Yield each component with its contents. There may be one per rank, so the state is walked once for all."""
        entries: list[list[Entry]] = [[] for _ in self.components]
        for path, entry in catalogue.entries.items():
            number = self.component_of.get(path)
            if number is None and entry.embedded:
                # It goes with the object that it is in.
                number = next((self.component_of[p] for p in above(path) if p in self.component_of), None)
            if number is not None:
                entries[number].append(entry)
        for component, of_component in zip(self.components, entries, strict=True):
            yield component, _contents(component, catalogue, of_component, alone=len(entries) == 1)


def _contents(component: OutputComponent, catalogue: Catalogue, entries: list[Entry], *, alone: bool) -> Catalogue:
    """Return the entries of a component, under their paths in it."""
    # The container at the root of the whole state belongs to none of several components.
    within = {entry.path[:depth] for entry in entries for depth in range(0 if alone else 1, len(entry.path) + 1)}
    depth = len(component.root)
    all_containers = catalogue.containers.items()
    containers = {path: c for path, c in all_containers if path[:depth] == component.root and path in within}
    # A tensor that is tied to one of another component gets bytes of its own.
    selected = select.select(rebuilt(catalogue, entries, containers), lambda entry: True)
    # An entry of a list keeps its index when it goes with all of its list, as it does here.
    contents = move(selected, {path: component.inner(path) for path in selected.entries})
    for constant in component.constants:
        inner = component.inner(constant.path)
        contents.entries[inner] = Tensor(inner, constant.dtype, (), Chunks.placed([(((), ()), 0)]))
    contents.containers = {component.inner(path): container for path, container in containers.items()}
    values = (Object((key,), value) for key, value in component.values.items())
    contents.entries = {**{value.path: value for value in values}, **contents.entries}
    if not component.format.chunked:
        contents = rechunk.whole(contents, (component.world or 1) if "{rank}" in component.name else 1)
    elif component.format.even and component.world is not None:
        contents = rechunk.over_world(contents, component.world, everywhere=True)
    if component.format.name == "safetensors" and component.name:
        # One file of tensors, whatever they are of.
        part = Part("model", component.key)
        for entry in contents.entries.values():
            entry.part = part if isinstance(entry, Tensor) else entry.part
    # Warnings and facts are those of the whole state.
    contents.files, contents.warnings, contents.facts = catalogue.files, [], {}
    if component.format.name == "safetensors" and not component.root and "metadata" in catalogue.facts:
        contents.facts["metadata"] = catalogue.facts["metadata"]  # `__metadata__` of the files of a model that is all
    return contents


def _moved(component: OutputComponent, tensor: Tensor, start: int) -> Tensor:
    alias = component.outer(tensor.alias) if tensor.alias is not None else None
    return replace(tensor, path=component.outer(tensor.path), alias=alias, chunks=tensor.chunks.shifted(start))


def _write_constants(catalogue: Catalogue, constants: Mapping[Path, bytes], start: int) -> dict[tuple[int, int], int]:
    """Write the values that are known already, and return their checksums by file and offset in the whole."""
    crcs: dict[tuple[int, int], int] = {}
    with closing(files.Pool(writing=True)) as pool:
        for tensor in chain(catalogue.tensors, catalogue.replicas) if constants else ():
            for chunk in tensor.chunks if tensor.path in constants else ():
                extent, data = chunk.extent, constants[tensor.path]
                pool.write(catalogue.files[extent.file].location, extent.offset, data)
                crcs[extent.file + start, extent.offset] = crc32(data)
    return crcs


def _finish(
    sinks: Sequence[tuple[Sink, int]], copies: Sequence[tuple[Location, Location]], constants: Crcs, crcs: Crcs
) -> None:
    """Finish components in their order, each with the number of its first file; `constants` are checksums too."""
    starts = [start for _, start in sinks]
    shares = [WrittenCrcs() for _ in starts]
    for (file, offset), crc in chain(crcs.items(), constants.items()):
        # Of components that begin at the same file, all but the last have none.
        number = bisect_right(starts, file) - 1
        shares[number].add(file - starts[number], offset, crc)
    for (sink, _), share in zip(sinks, shares, strict=True):
        sink.finish(share)
    for path, to in copies:
        files.make_directory(to.parent, exist_ok=True)
        path.copy_to(to) if path.is_remote else files.copy(path, to)


def _create_component(
    component: OutputComponent, location: Location, contents: Catalogue, options: SinkOptions
) -> Sink:
    form = component.format
    options = options if component.world is None else replace(options, world=component.world)
    folder = location.parent if component.name else location
    if "/" in component.name:
        files.make_directory(location.parent, exist_ok=True)
    assert form.create is not None
    by_rank = "{rank}" in component.name
    if not by_rank and not (form.splits and (options.max_shard_size is not None or not component.name)):
        return form.create(location, contents, replace(options, one_file=form.is_file(location)))
    # Files of ranks get the names of the framework; split files lie beside the other components, with their index.
    scratch = folder / _SCRATCH
    sink = form.create(scratch, contents, options if by_rank else replace(options, one_file=False))
    for file in sink.catalogue.files:
        number = str(file.rank).zfill(component.digits)
        name = location.name.replace("{rank}", number) if by_rank else file.location.name
        files.rename(file.location, folder / name)
        file.location = folder / name
    if by_rank:
        scratch.remove()
        return sink

    def finish(crcs: Crcs) -> None:
        sink.finish(crcs)
        for name in scratch.names():
            files.rename(scratch / name, scratch.parent / name)
        scratch.remove()

    return CreatedSink(sink.catalogue, finish)
