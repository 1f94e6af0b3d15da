"""A directory of several components created empty, as one sink: what a framework leaves, each by its own format.

    component                                                               catalogue          in the component
    OutputComponent("pytorch_model_fsdp_0", DCP, ("model",), ("model",))    model.w            model.w
    OutputComponent("random_states_1.pkl", TORCH, ("rng", "rank1"))         rng.rank1.step     step
    OutputComponent("trainer_state.json", None, ("trainer_state",))         trainer_state.x    {"x": 3}

The catalogue has the paths that the reader of the framework's directories gives, so that a transfer and `--check` treat
it like any other. The files of the components are numbered one after the other.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, File, Object, Path, Tensor
from ckpttool.catalogue.protocols import Crcs, Format, Loss, Sink, SinkOptions
from ckpttool.catalogue.warning import Warning
from ckpttool.layout import rechunk, select
from ckpttool.producers.components import Constant
from ckpttool.storage import files
from ckpttool.storage.crc import crc32

_SCRATCH = ".piece"


@dataclass(frozen=True, slots=True)
class OutputComponent:
    """A component to write: `OutputComponent("optimizer_0", dcp.FORMAT, ("optimizer",), ("optimizer",))`.

    `name` is a path below the destination, with `{rank}` for a file of each rank, empty for the destination itself;
    `root` is its root in the catalogue, `key` the key around everything in it. Without a format it is JSON, and
    `values` are written in it beside the entries.
    """

    name: str
    format: Format | None
    root: Path = ()
    key: Path = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    constants: Sequence[Constant] = ()

    def inner(self, path: Path) -> Path:
        """The path in the piece."""
        return (*self.key, *path[len(self.root) :])

    def outer(self, path: Path) -> Path:
        """The path in the catalogue."""
        return (*self.root, *path[len(self.key) :])


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """What is written where. `component_of` is the number of the component of each entry; `lost` is what has none."""

    catalogue: Catalogue
    components: Sequence[OutputComponent]
    component_of: Mapping[Path, int]
    lost: Sequence[Loss]

    def losses(self, laid: Catalogue, path: str) -> list[Loss]:
        """What has no piece, and what a piece cannot hold."""
        found = list(self.lost)
        for component, piece in _pieces(self, laid):
            if component.format is None:
                found += [Loss(e.name, "JSON has no words for it") for e in piece.entries.values() if not _is_plain(e)]
            elif component.format.losses is not None:
                told = component.format.losses(piece, component.name)
                names = {entry.name: component.outer(path) for path, entry in piece.entries.items()}
                found += [Loss(".".join(map(str, names.get(one.name, (one.name,)))), one.why) for one in told]
        return found

    def create(self, path: str, laid: Catalogue, options: SinkOptions) -> Sink:
        """Every piece of full size at `path`, which does not exist yet."""
        try:
            return self._created(path, laid, options)
        except OSError as error:
            raise files.failed(error, path, "write") from None

    def _created(self, path: str, laid: Catalogue, options: SinkOptions) -> Sink:
        os.mkdir(path)
        made = Catalogue("", facts={"layout": f"{len(self.components)} pieces"})
        sinks: list[tuple[Sink, int]] = []
        found: dict[Path, Entry] = {}
        known: dict[tuple[int, int], int] = {}
        for component, piece in _pieces(self, laid):
            location = os.path.join(path, component.name) if component.name else path
            sink = _created(component, location, piece, options)
            start = len(made.files)
            for file in sink.catalogue.files:
                file.name = os.path.relpath(file.location, path)
            made.files += sink.catalogue.files
            name = component.name.replace("{rank}", "*")
            made.warnings += [w.prefixed(f"`{name}`") if name else w for w in sink.catalogue.warnings]
            constants = {component.inner(c.path): c.data for c in component.constants}
            known |= _fill(sink.catalogue, constants, start)
            for inner, entry in sink.catalogue.entries.items():
                if inner not in constants:
                    found[component.outer(inner)] = _back(component, entry, start, laid)
            made.replicas += [
                _moved(component, tensor, start) for tensor in sink.catalogue.replicas if tensor.path not in constants
            ]
            made.containers |= {
                component.outer(p): c for p, c in sink.catalogue.containers.items()
                if p[: len(component.key)] == component.key
            }  # fmt: skip
            sinks.append((sink, start))
        if options.max_shard_size is not None and not any(c.format and c.format.splits for c in self.components):
            text = "`--max-shard-size` has no effect: no component is of safetensors"
            made.warnings.append(Warning("no-effect", text))
        made.entries = {p: found[p] for p in laid.entries if p in found}
        return _Composite(made, sinks, known)


class _Composite:
    def __init__(self, catalogue: Catalogue, sinks: list[tuple[Sink, int]], known: Mapping[tuple[int, int], int]):
        self.catalogue = catalogue
        self._sinks = sinks
        self._known = known

    def finish(self, crcs: Crcs) -> None:
        """The pieces in their order."""
        starts = [start for _, start in self._sinks]
        shares: list[dict[tuple[int, int], int]] = [{} for _ in starts]
        for (file, offset), crc in chain(crcs.items(), self._known.items()):
            # Of pieces that begin at the same file, all but the last have none.
            number = bisect_right(starts, file) - 1
            shares[number][file - starts[number], offset] = crc
        for (sink, _), share in zip(self._sinks, shares, strict=True):
            sink.finish(share)


def _pieces(layout: OutputLayout, laid: Catalogue) -> Iterator[tuple[OutputComponent, Catalogue]]:
    """Each component with what it holds. There is one for each rank, so that the state is gone through once for all."""
    held: list[list[Entry]] = [[] for _ in layout.components]
    for path, entry in laid.entries.items():
        number = layout.component_of.get(path)
        if number is None and isinstance(entry, Tensor) and entry.embedded:
            # It goes with the object that it is in.
            above = (path[:depth] for depth in range(len(path)))
            number = next((layout.component_of[p] for p in above if p in layout.component_of), None)
        if number is not None:
            held[number].append(entry)
    for component, entries in zip(layout.components, held, strict=True):
        yield component, _piece(component, laid, entries, alone=len(held) == 1)


def _piece(component: OutputComponent, laid: Catalogue, entries: list[Entry], *, alone: bool) -> Catalogue:
    """What a component holds, under the paths that it has there."""
    depth = len(component.root)
    containers = {
        path: container for path, container in laid.containers.items()
        if path[:depth] == component.root and _within(path, entries, alone=alone)
    }  # fmt: skip
    # A tensor that was tied to one of another piece gets bytes of its own.
    taken = select.select(select.rebuilt(laid, entries, containers), lambda entry: True)
    # An entry of a list keeps its index when it goes with all of its list, as it does here.
    piece = select.move(taken, {path: component.inner(path) for path in taken.entries})
    for constant in component.constants:
        shape: tuple[int, ...] = ()
        chunks = Chunks.placed([(((), ()), 0)])
        inner = component.inner(constant.path)
        piece.entries[inner] = Tensor(inner, constant.dtype, shape, chunks)
    piece.containers = {component.inner(path): container for path, container in containers.items()}
    if component.format is None or not component.format.chunked:
        piece = rechunk.whole(piece)
    # What is known of the whole has been said of it.
    piece.files, piece.warnings, piece.facts = laid.files, [], {}
    return piece


def _within(path: Path, entries: list[Entry], *, alone: bool) -> bool:
    """Whether a container is one of this piece: the root of the whole state belongs to none of several."""
    return (bool(path) or alone) and any(entry.path[: len(path)] == path for entry in entries)


def _created(component: OutputComponent, location: str, piece: Catalogue, options: SinkOptions) -> Sink:
    _make_folder(component, location)
    if component.format is None:
        return _create_json(location, piece, component.values)
    assert component.format.create is not None
    if "{rank}" in component.name:
        return _create_by_rank(component.format, location, piece, options)
    one_file = component.format.is_file(location)
    if component.format.splits and options.max_shard_size is not None:
        return _create_beside(component.format, location, piece, options)
    return component.format.create(location, piece, replace(options, one_file=one_file))


def _make_folder(component: OutputComponent, location: str) -> None:
    """The directory of the piece, when it has one below the destination."""
    if os.path.dirname(component.name):
        os.makedirs(os.path.dirname(location), exist_ok=True)


def _create_by_rank(form: Format, location: str, piece: Catalogue, options: SinkOptions) -> Sink:
    """Files of ranks are laid down under names of their own; here they get those that the framework knows."""
    assert form.create is not None
    folder = os.path.dirname(location)
    scratch = os.path.join(folder, _SCRATCH)
    sink = form.create(scratch, piece, options)
    for file in sink.catalogue.files:
        final = location.replace("{rank}", str(file.rank))
        os.rename(file.location, final)
        file.location = final
    os.rmdir(scratch)
    return sink


def _create_beside(form: Format, location: str, piece: Catalogue, options: SinkOptions) -> Sink:
    """A model that is split lies beside the other pieces, with its index."""
    assert form.create is not None
    folder = os.path.dirname(location)
    scratch = os.path.join(folder, _SCRATCH)
    return _Emptied(form.create(scratch, piece, replace(options, one_file=False)), scratch, folder)


class _Emptied:
    """A sink whose files move up from a directory of its own when they are complete."""

    def __init__(self, sink: Sink, scratch: str, folder: str) -> None:
        self.catalogue = sink.catalogue
        self._sink, self._scratch, self._folder = sink, scratch, folder
        for file in self.catalogue.files:
            final = os.path.join(folder, os.path.basename(file.location))
            os.rename(file.location, final)
            file.location = final

    def finish(self, crcs: Crcs) -> None:
        self._sink.finish(crcs)
        for name in os.listdir(self._scratch):
            os.rename(os.path.join(self._scratch, name), os.path.join(self._folder, name))
        os.rmdir(self._scratch)


# Pieces of JSON -------------------------------------------------------------------------------------------------------


class _JsonSink:
    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def finish(self, crcs: Crcs) -> None:
        """Nothing: it was written when it was made."""


def _create_json(location: str, piece: Catalogue, plain: Mapping[str, Any]) -> Sink:
    tree = nesting.unflatten(piece, _value) if piece.entries else {}
    text = json.dumps({**plain, **tree}, indent=2).encode() + b"\n"
    files.write_file(location, text)
    piece.files = [File(location, os.path.basename(location), len(text))]
    return _JsonSink(piece)


def _value(entry: Entry) -> Any:
    assert isinstance(entry, Object)
    return entry.value


def _is_plain(entry: Entry) -> bool:
    if not isinstance(entry, Object):
        return False
    try:
        # What JSON gives back for a tuple or a key that is a number is another value.
        return bool(json.loads(json.dumps(entry.value)) == entry.value)
    except (TypeError, ValueError, RecursionError):
        return False


# Back into the one catalogue ------------------------------------------------------------------------------------------


def _back(component: OutputComponent, entry: Entry, start: int, laid: Catalogue) -> Entry:
    # An object is the one that was laid out: its links have the paths of the whole.
    return _moved(component, entry, start) if isinstance(entry, Tensor) else laid.entries[component.outer(entry.path)]


def _moved(component: OutputComponent, tensor: Tensor, start: int) -> Tensor:
    alias = component.outer(tensor.alias) if tensor.alias is not None else None
    return replace(tensor, path=component.outer(tensor.path), alias=alias, chunks=tensor.chunks.shifted(start))


def _fill(catalogue: Catalogue, constants: Mapping[Path, bytes], start: int) -> dict[tuple[int, int], int]:
    """Write what is known already; its checksums, by where it lies in the whole."""
    known: dict[tuple[int, int], int] = {}
    holders = [t for t in (*catalogue.tensors, *catalogue.replicas) if t.path in constants]
    if not holders:
        return known
    pool = files.Pool(writing=True)
    try:
        for tensor in holders:
            data = constants[tensor.path]
            for chunk in tensor.chunks:
                pool.write(catalogue.files[chunk.extent.file].location, chunk.extent.offset, data)
                known[chunk.extent.file + start, chunk.extent.offset] = crc32(data)
    finally:
        pool.close()
    return known
