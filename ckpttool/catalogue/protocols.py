"""Protocols that each format implements: `Format`, `Source`, `Sink`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Chunk, Extent, Record, Tensor
from ckpttool.catalogue.validation import require

if TYPE_CHECKING:
    from ckpttool.storage.stores import Location

Crcs = Mapping[tuple[int, int], int]
"""CRC-32 of each record that was filled, by `(file, offset)` of the destination."""

activity: ContextVar[Callable[[str, int, int], None]] = ContextVar("activity", default=lambda text, done, total: None)
"""Is told what takes long before any tensor is read, `("reading .metadata", 512, 1024)`: how many of how many bytes are
done, 0 of 0 if nobody knows. At the end the text is empty."""


class Source:
    """Base class of open checkpoints. Everything that the index says is in `catalogue`; payloads are read by the
    transfer, from where `resolve` says that they are.

    That is the one door from a catalogue to values: `resolve` and `require` answer for a tensor only after nothing was
    found to be wrong with it, and the locations of the catalogue's files have the versions that are to be read.
    """

    catalogue: Catalogue

    def require(self, tensor: Tensor) -> None:
        """Raise CorruptError unless a tensor is whole, as far as the index and the sizes of the files tell."""
        require(tensor, self.catalogue)

    def resolve(self, tensor: Tensor, chunk: Chunk) -> Extent:
        """Return where the elements of `chunk` lie, to be read; the chunk's own extent unless that is an unopened item.
        Thread-safe. Raises CorruptError for a tensor that is not whole, and when what is there does not fit it."""
        self.require(tensor)
        return self.lookup(tensor, chunk)

    def lookup(self, tensor: Tensor, chunk: Chunk) -> Extent:
        """Return where the elements of `chunk` lie, also of a tensor that is not whole: for who reports on it."""
        extent = chunk.extent
        file = self.catalogue.files[extent.file]
        if extent.record is None and file.crc is not None and extent.plain and extent.nbytes:
            # The writer left no checksum in the file: that of all of it in a manifest is one.
            return extent._replace(record=Record(extent.file, 0, file.size, file.crc))
        return extent

    def close(self) -> None:
        """Let go of files and scratch space."""


class PlacedSource(Source):
    """A source whose chunks say where they lie, as those of torch.save files and of safetensors do."""

    def __init__(self, catalogue: Catalogue, close: Callable[[], None] = lambda: None) -> None:
        self.catalogue, self._close = catalogue, close

    def close(self) -> None:
        self._close()


class ByteRange(NamedTuple):
    """Bytes of a file of the catalogue: `ByteRange(file=0, offset=704, nbytes=1462)`. A `packed` one is compressed."""

    file: int
    offset: int
    nbytes: int
    packed: bool = False


@runtime_checkable
class Itemised(Protocol):
    """A source whose files are made of whole archives, of which the catalogue's chunks are not all."""

    def items(self) -> Iterator[tuple[str, ByteRange]]:
        """Return the others, each with the name that the index has for it."""


class Sink(Protocol):
    """A checkpoint of full size whose payloads are still empty, lying at the staging path given to `create`.

    One that can complete its files one by one also has `seal(number, crcs)`, for a file whose payloads are there;
    `finish` leaves that alone, so that it may lie elsewhere by then. If the sink `seals_in_order`, it asks for the
    checksum of a payload once all before it is written.

    `catalogue` has the entries under the names that a reader of the result finds, each tensor with the `origin` of the
    planned one, and its chunks at their final extents; an extent with a `record` wants that record's CRC at `finish`.
    A tensor with an `alias` shares the extents of another and is not filled; one without is, even if it was tied.
    """

    catalogue: Catalogue

    def finish(self, crcs: Crcs) -> None:
        """Write what could only be known after the payloads: checksums, and the format's commit mark."""


@dataclass(slots=True)
class CreatedSink:
    """A sink of files that are created, and the functions that finish them."""

    catalogue: Catalogue
    finish: Callable[[Crcs], None]
    seal: Callable[[int, Crcs], None] | None = None


@dataclass(frozen=True, slots=True)
class FormatLoss:
    """One thing that a format cannot hold: `FormatLoss("lr_scheduler.last_epoch", "not a tensor")`."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What a checkpoint does not say about itself: `OpenOptions({"embed.weight": (29, 7)})`. `shapes` are those of the
    model's parameters, for files of flat parameters; `ordered` says whether they come in the order in which the model
    registers them (a safetensors file is sorted). `only` are the names of the tensors that are needed: of a model that
    is not on this machine, headers of other files are not read, and the catalogue has the fact `partial`, the names in
    the index."""

    shapes: Mapping[str, Ints] | None = None
    ordered: bool = True
    only: Collection[str] | None = None


NO_HINTS = OpenOptions()
TENSOR_CLASS = re.compile(r"sharded_tensor|dtensor(:\w+){0,2}")


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """How a sink may be laid down. `max_shard_size` is bytes of payload per file, for formats that split by size.
    `one_file` is `is_file` of what the user typed: `create` gets a staging name, which does not tell. `world` is the
    number of ranks, also of those that hold no chunk; `tensor_class` what a sharded tensor is written as in files of
    one rank: `sharded_tensor`, or `dtensor:cuda:fsdp` with the device and the dimension of its mesh, `cpu` and none
    when left out. With `manifest`, a DCP directory carries its own. With `keep_order`, the tensors of a safetensors
    file have the order of the catalogue; with `bare`, it has nothing but what the library itself writes."""

    max_shard_size: int | None = None
    one_file: bool = False
    world: int = 1
    tensor_class: str = "sharded_tensor"
    manifest: bool = False
    keep_order: bool = False
    bare: bool = False


def deferred(module: str, name: str) -> Callable[..., Any]:
    """Return a function that is `name` of `module`, imported when it is called: a command needs one format, or two."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table of formats, e.g. `Format("dcp", "torch.distributed.checkpoint directory", ...)`.

    `recognise(location)` must be cheap and raise nothing; the first row of the table that recognises a location opens
    it, so a format of a directory must not claim directories of others. `open(location, options)`, whose
    options may be left out, returns a source whose `catalogue.format` is `name`.

    `create(path, planned, options)` gets a path that does not exist yet: a file if `is_file(path as the user typed
    it)`, else a directory, and a catalogue whose chunks have the rank that holds them (all 0 unless `chunked`). It
    returns a `Sink`. `losses` lists the entries of a catalogue that the format cannot hold; formats that are only read
    have no `create`.

    `suffixes` are those of a DST in this format, `data_suffixes` those of other files that hold its tensors; `splits`
    says that files are split by `max_shard_size`, `even` that chunks are always those of FSDP, `any_state` that one of
    every kind is kept, and `sorts_names` that tensors are not in the order of the state. `component_only` says that
    such files lie beside checkpoints: they are read, and written as a part of a layout, but are no `--to`. `marks` is
    a sentence about what the format is known by, for hints. `to` is what `--to` calls the format if that is not its
    name.
    """

    name: str
    title: str
    recognise: Callable[[Location], bool]
    open: Callable[..., Source]
    create: Callable[[Location, Catalogue, SinkOptions], Sink] | None = None
    losses: Callable[[Catalogue, str], list[FormatLoss]] = lambda planned, path: []
    is_file: Callable[[str], bool] = lambda path: False
    chunked: bool = False
    splits: bool = False  # by `max_shard_size`
    suffixes: tuple[str, ...] = ()
    data_suffixes: tuple[str, ...] = ()
    to: str | None = None
    even: bool = False
    any_state: bool = False
    sorts_names: bool = False
    component_only: bool = False
    marks: str = ""

    @property
    def target(self) -> str:
        """What `--to` calls it."""
        return self.to or self.name


def beside(package: str, what: str, name: str, title: str) -> Format:
    """Return the row of files of a format that lie beside checkpoints. `is_WHAT` and `open_WHAT` are functions of the
    `reader` in its package, `create_WHAT` and `WHAT_losses` of the `writer`."""
    return Format(
        name,
        f"{title} beside a checkpoint",
        recognise=deferred(f"{package}.reader", f"is_{what}"),
        open=deferred(f"{package}.reader", f"open_{what}"),
        create=deferred(f"{package}.writer", f"create_{what}"),
        losses=deferred(f"{package}.writer", f"{what}_losses"),
        is_file=lambda path: True,
        component_only=True,
    )
