"""Writes the `.metadata` of a DCP directory, byte-compatible with torch 2.9 to 2.14 (grammar: `metadata`).

`TensorProperties` has five elements, or torch up to 2.14 could not open it; torch keeps what it does not know as
attributes. In a large index of millions of objects, what comes again and again is opcodes that are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.values import stub_type
from ckpttool.formats.dcp.index import NAME
from ckpttool.serialization.dcp.metadata import IndexContents, IndexItem, StoredTensor, checksum
from ckpttool.serialization.pickler import PickleWriter
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import Location

_MODULE = "torch.distributed.checkpoint.metadata"
_BATCH = 1000  # as pickle does: the reader's stack stays small


class _Opcodes:
    """Opcodes of the classes and keys that come again and again, each a reference to the pickle's memo."""

    def __init__(self, writer: PickleWriter) -> None:
        self._writer = writer
        self.size = self._named("torch", "Size")
        self.chunk = self._named(_MODULE, "ChunkStorageMetadata") + b")\x81}("
        self.tensor = self._named(_MODULE, "TensorStorageMetadata") + b")\x81}("
        self.bytes = self._named(_MODULE, "BytesStorageMetadata") + b")\x81"
        self.index = self._named(_MODULE, "MetadataIndex") + b")\x81}("
        self.info = self._named("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b")\x81}("
        keys = "offsets sizes properties size chunks fqn offset index relative_path length"
        self.key = {name: self.text(name) for name in keys.split()}
        self._sizes: dict[Ints, bytes] = {}
        self._new_properties = self._named(_MODULE, "TensorProperties") + b")\x81"
        self._layout = stub_type("torch.serialization", "_get_layout")("torch.strided")
        self._memory_format = stub_type(_MODULE, "_MEM_FORMAT_ENCODING")(0)
        self._states: dict[Dtype, bytes] = {}
        self.whole: dict[tuple[Dtype, Ints], bytes] = {}  # how a tensor of one chunk is described the second time

    def properties(self, dtype: Dtype) -> bytes:
        """Return the `TensorProperties` of a dtype, whose state is written once."""
        state = self._states.get(dtype)
        if state is None:
            fields = stub_type("torch", dtype.name), self._layout, False, self._memory_format, False
            state = self._states[dtype] = self._reference(self._writer.write, fields)
        return self._new_properties + state + b"b"

    def text(self, value: str) -> bytes:
        return self._reference(self._writer.text, value)

    def _named(self, module: str, name: str) -> bytes:
        return self._reference(self._writer.named, module, name)

    def _reference(self, write: Callable[..., None], *values: object) -> bytes:
        """Return what `write` writes the second time. The first result is popped off the reader's stack."""
        out = self._writer.out
        write(*values)
        out += b"0"
        mark = len(out)
        write(*values)
        opcodes = bytes(out[mark:])
        del out[mark:]
        return opcodes

    def ints(self, values: Ints) -> bytes:
        """Return a `torch.Size`."""
        opcodes = self._sizes.get(values)
        if opcodes is None:
            body = b"".join(map(_integer, values))
            packed = body + (b")", b"\x85", b"\x86", b"\x87")[len(values)] if len(values) < 4 else b"(" + body + b"t"
            opcodes = self._sizes[values] = self.size + packed + b"\x85R"
        return opcodes


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + value.to_bytes(1, "little")
    if -(2**31) <= value < 2**31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def publish(folder: Location, metadata: IndexContents) -> None:
    """Write `.metadata` in a directory whose other files are on disk: under another name, which is then changed."""
    files.make_directory(folder, exist_ok=True)  # there is no file yet in that of an empty checkpoint
    draft, final = (folder / (NAME + end) for end in (".tmp", ""))
    draft.put(lambda stream: write(metadata, stream.write))
    files.rename(draft, final)
    files.sync(folder)


def write(metadata: IndexContents, flush: Callable[[bytes], object]) -> None:
    """Pass the pickle of `metadata` to `flush`, piece by piece."""
    writer = PickleWriter(protocol=4)
    opcodes = _Opcodes(writer)
    out = writer.out
    crc = 0

    def drain(least: int = 1 << 16) -> None:
        nonlocal crc
        if len(out) > least:
            crc = crc32(out, crc)
            flush(bytes(out))
            out.clear()

    writer.named(_MODULE, "Metadata")
    out.extend(b")\x81}(")
    writer.text("state_dict_metadata")
    out.extend(b"}")
    for key, entry in metadata.entries.items():
        out.extend(b"(")
        writer.text(key)
        _describe(writer, opcodes, entry)
        out.extend(b"u")
        drain()
    writer.text("planner_data")
    writer.write(metadata.paths)
    writer.text("storage_data")
    out.extend(b"}")
    # What is between the key of an item and its offset.
    info = b"ub" + opcodes.info + opcodes.key["relative_path"]
    infos = [info + opcodes.text(name) + opcodes.key["offset"] for name in metadata.files]
    places = chain.from_iterable(
        _placed(opcodes, opcodes.text(key), entry, infos) for key, entry in metadata.entries.items()
    )
    while batch := b"".join(islice(places, _BATCH)):
        out.extend(b"(%bu" % batch)
        drain()
    writer.text("storage_meta")
    writer.named(_MODULE, "StorageMeta")
    out.extend(b")\x81")
    writer.write({"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []})
    out.extend(b"b")
    for name, value in (("version", "1.0.0"), ("ckpttool", metadata.extra)):
        writer.text(name)
        writer.write(value)
    out.extend(b"ub")
    drain(0)
    out.extend(checksum(crc))
    flush(writer.done())


def _describe(writer: PickleWriter, opcodes: _Opcodes, entry: StoredTensor | IndexItem) -> None:
    if isinstance(entry, IndexItem):
        writer.out += opcodes.bytes
        return
    if entry.is_whole:
        kind = entry.dtype, entry.shape
        if known := opcodes.whole.get(kind):
            writer.out += known
            return
        start = len(writer.out)
        _describe_chunks(writer, opcodes, entry)
        opcodes.whole[kind] = bytes(writer.out[start:]) if kind in opcodes.whole else b""
        return
    _describe_chunks(writer, opcodes, entry)


def _describe_chunks(writer: PickleWriter, opcodes: _Opcodes, entry: StoredTensor) -> None:
    key, ints = opcodes.key, opcodes.ints
    writer.out += opcodes.tensor + key["properties"] + opcodes.properties(entry.dtype)
    writer.out += key["size"] + ints(entry.shape) + key["chunks"] + b"]"
    first, second = opcodes.chunk + key["offsets"], key["sizes"]
    for at in range(0, len(entry.offsets), _BATCH):
        batch = zip(entry.offsets[at : at + _BATCH], entry.sizes[at : at + _BATCH], strict=True)
        writer.out += b"("
        writer.out += b"".join([b"%b%b%b%bub" % (first, ints(o), second, ints(s)) for o, s in batch])
        writer.out += b"e"
    writer.out += b"ub"


def _placed(opcodes: _Opcodes, name: bytes, entry: StoredTensor | IndexItem, infos: list[bytes]) -> Iterator[bytes]:
    """Return the items of an entry in `storage_data`."""
    key, ints = opcodes.key, opcodes.ints
    index, hint = opcodes.index + key["fqn"] + name, key["index"]
    offset, length = key["offset"], key["length"]
    if isinstance(entry, IndexItem):
        place = _integer(entry.offset) + length + _integer(entry.length)
        return iter((b"%b%bN%b%bub" % (index, hint, infos[entry.file], place),))
    rows = zip(entry.offsets, entry.files, entry.starts, entry.lengths, strict=True)
    return (
        b"%b%b%b%b%b%b%b%b%bub"
        % (index, offset, ints(at), hint, _integer(i), infos[file], _integer(start), length, _integer(size))
        for i, (at, file, start, size) in enumerate(rows)
    )
