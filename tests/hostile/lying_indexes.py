# ruff: noqa: E501  (a table of lies, one to a line)
"""DCP directories that lie: what `.metadata` says of its tensors and files, what it makes, and where it points."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lying_pickles import COST, TOO_DEEP, doubled_memoized
from support.damage import place_of
from support.faults import save_dcp
from support.lying_files import READ, STORAGE, TOUCH, lie, pickled
from support.pickle_payloads import named, text
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

Index = Any
Change = Callable[[Index], object]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="dcp-")


@functools.cache
def _original() -> str:
    ckpt = Path(_folder().name, "ckpt")
    save_dcp(ckpt, {"w": torch.arange(6.0).reshape(2, 3), "x": torch.arange(4), "lr": 0.1})
    return str(ckpt)


def directory(*steps: Callable[[Path], object]) -> Callable[[Path], Path]:
    """An honest directory, then these steps."""

    def make(folder: Path) -> Path:
        path = Path(shutil.copytree(_original(), folder / "ckpt"))
        (folder / "outside.distcp").write_bytes((path / "__0_0.distcp").read_bytes())
        for step in steps:
            step(path)
        return path

    return make


def indexed(*changes: Change) -> Callable[[Path], Path]:
    """An honest directory whose `.metadata` was changed as an object."""

    def change(path: Path) -> None:
        index = pickle.loads((path / ".metadata").read_bytes())
        for step in changes:
            step(index)
        (path / ".metadata").write_bytes(pickle.dumps(index, 4))

    return directory(change)


def raw(data: bytes) -> Callable[[Path], Path]:
    return directory(lambda path: (path / ".metadata").write_bytes(data))


def chunk(index: Index) -> Any:
    return index.state_dict_metadata["w"].chunks[0]


def put(name: str, **fields: Any) -> Change:
    """Change where the item of `name` lies."""
    return lambda index: vars(place_of(index, name)).update(fields)


def tiles(offsets: list[tuple[int, ...]], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Change:
    """Describe `w` as these boxes, all of them in one item."""

    def change(index: Index) -> None:
        where = place_of(index, "w")
        for key in [k for k in index.storage_data if k.fqn == "w"]:
            del index.storage_data[key]
        described = index.state_dict_metadata["w"]
        described.size = torch.Size(shape)
        described.chunks[:] = [ChunkStorageMetadata(torch.Size(o), torch.Size(sizes)) for o in offsets]
        index.storage_data.update({MetadataIndex("w", torch.Size(o), i): where for i, o in enumerate(offsets)})

    return change


def grid(dims: int) -> list[tuple[int, ...]]:
    return [tuple(n >> d & 1 for d in range(dims)) for n in range(2**dims)]


def item(data: bytes, name: str = "lr") -> Callable[[Path], Path]:
    """An honest index, and at the end of the data file other bytes for one item."""

    def change(path: Path) -> None:
        index = pickle.loads((path / ".metadata").read_bytes())
        file = path / "__0_0.distcp"
        put(name, offset=file.stat().st_size, length=len(data))(index)
        with file.open("ab") as stream:
            stream.write(data)
        (path / ".metadata").write_bytes(pickle.dumps(index, 4))

    return directory(change)


class Planted:
    """Calls something when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def planner(**more: Any) -> Change:
    return lambda index: index.planner_data.update(more)


OUT = "outside the checkpoint"
NOTHING = r"`w`.* holds float32 \[2, 3\], but the metadata says a tensor without elements"
LINK = "a link that leaves"
SET = setattr
DIRECTORIES = sys.getrecursionlimit()

for name, make, pattern in (
    # The pickle
    ("empty", raw(b""), "is empty"),
    ("cut", directory(lambda p: (p / ".metadata").write_bytes((p / ".metadata").read_bytes()[:-40])), r"`\.metadata`: not a complete pickle: it ends too early"),
    ("a pickle of something else", raw(pickled(b"}")), r"`\.metadata`: a pickle of dict, not of a DCP `Metadata`"),
    ("a pickle that runs a command", raw(b"\x80\x02cos\nsystem\n(" + text(TOUCH) + b"tR."), r"`\.metadata`: a pickle of os\.system, not of a DCP `Metadata`"),
    ("a hole of a tebibyte", directory(lambda p: os.truncate(p / ".metadata", 1 << 40)), r"`\.metadata`: a pickle of \d+ bytes is more than the \d+ that we read"),
    ("zeros", raw(bytes(1 << 16)), r"`\.metadata`: opcode 0x00 at byte 0 is not one that a checkpoint needs"),
    ("a memo index of 2**31", raw(b"\x80\x02Nr\xff\xff\xff\x7f."), r"`\.metadata`: memo index \d+ in a pickle that has room for 9"),
    ("a key of shared tuples", raw(b"\x80\x04}" + doubled_memoized(60) + b"Ns."), COST),
    ("a Metadata that has no fields", raw(b"\x80\x02" + named("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81."), "no fields"),
    ("a Metadata whose fields are a list", raw(b"\x80\x02" + named("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81]b."), r"`\.metadata`: a `Metadata` has a list for its fields"),
    ("a Metadata of nothing", raw(b"\x80\x02" + named("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81}b."), "state_dict_metadata"),
    ("no storage data", indexed(lambda i: SET(i, "storage_data", None)), r"`\.metadata`: it has no `storage_data`"),
    ("storage data of words", indexed(lambda i: SET(i, "storage_data", {"a": "b"})), "storage_data"),
    ("an index that is a pipe", directory(lambda p: (p / ".metadata").unlink(), lambda p: os.mkfifo(p / ".metadata")), "pipe"),
    ("an index that is a device", directory(lambda p: (p / ".metadata").unlink(), lambda p: (p / ".metadata").symlink_to("/dev/zero")), "a pipe or a device, not a regular file"),
    ("an index that is a directory", directory(lambda p: (p / ".metadata").unlink(), lambda p: (p / ".metadata").mkdir()), "a directory, not a regular file"),
    # Paths
    ("a file above", indexed(put("w", relative_path="../outside.distcp")), OUT),
    ("an absolute path", indexed(put("w", relative_path="/etc/passwd")), OUT),
    ("a drive", indexed(put("w", relative_path="C:\\x.distcp")), OUT),
    ("a URL", indexed(put("w", relative_path="s3://bucket/__0_0.distcp")), OUT),
    ("a path that climbs", indexed(put("w", relative_path="a/b/../../../outside.distcp")), OUT),
    ("a path with a zero", indexed(put("w", relative_path="__0_0.distcp\0")), OUT),
    ("a path of half a character", indexed(put("w", relative_path="\ud800")), r"ud800', which is not a valid file name"),
    ("a path that is a number", indexed(put("w", relative_path=7)), r"`\.metadata`: `w`: its file is not a path: int, not a string"),
    ("a path that is a list", indexed(put("w", relative_path=["x"])), r"`\.metadata`: `w`: its file is not a path: list, not a string"),
    ("a link out", directory(lambda p: (p / "__0_0.distcp").unlink(), lambda p: (p / "__0_0.distcp").symlink_to("../outside.distcp")), LINK),
    ("a pipe for data", directory(lambda p: (p / "__0_0.distcp").unlink(), lambda p: os.mkfifo(p / "__0_0.distcp")), "pipe"),
    ("a directory for data", directory(lambda p: (p / "__0_0.distcp").unlink(), lambda p: (p / "__0_0.distcp").mkdir()), "a directory, not a regular file"),
    # Tensors
    ("a name that is a number", indexed(lambda i: i.state_dict_metadata.update({3: i.state_dict_metadata.pop("w")})), r"`\.metadata`: a name is int, not a string"),
    ("a tensor described by text", indexed(lambda i: i.state_dict_metadata.update(w="float32")), r"`\.metadata`: `w`: described by a str, not as a tensor or bytes"),
    ("20,000 dimensions", indexed(tiles([(0,) * 20_000], (1,) * 20_000, (1,) * 20_000)), "a tensor of 20000 dimensions, more than 64"),
    ("20,000 dimensions of 2**62", indexed(lambda i: SET(i.state_dict_metadata["w"], "size", torch.Size((2**62,) * 20_000))), r"`\.metadata`: `w`: a tensor of \d+ dimensions, more than 64"),
    ("no tensors", indexed(lambda i: SET(i, "state_dict_metadata", [])), "no `state_dict_metadata`"),
    ("no dtype", indexed(lambda i: SET(i.state_dict_metadata["w"].properties, "dtype", None)), r"`\.metadata`.*its dtype is not one of torch's"),
    ("a layout for a dtype", indexed(lambda i: SET(i.state_dict_metadata["w"].properties, "dtype", torch.strided)), r"`\.metadata`.*its dtype|unknown dtype"),
    ("a dtype of nobody", directory(lambda p: (p / ".metadata").write_bytes((p / ".metadata").read_bytes().replace(b"\x8c\x07float32", b"\x8c\x07float33"))), "`w`.*float33"),
    ("a shape of text", indexed(lambda i: SET(i.state_dict_metadata["w"], "size", "ab")), "tuple of integers"),
    ("a chunk that is a number", indexed(lambda i: SET(i.state_dict_metadata["w"], "chunks", [1])), "not a `ChunkStorageMetadata`"),
    ("a chunk of other dimensions", indexed(lambda i: SET(chunk(i), "sizes", torch.Size([1]))), "tuple of 2 integers"),
    ("a chunk of floats", indexed(lambda i: SET(chunk(i), "sizes", (1.5, 2))), "tuple of 2 integers"),
    ("a chunk without offsets", indexed(lambda i: delattr(chunk(i), "offsets")), "tuple of 2 integers"),
    ("a chunk in no file", indexed(lambda i: i.storage_data.pop(MetadataIndex("w", torch.Size((0, 0)), 0))), r"`\.metadata`: `w`: the chunk at \[0, 0\] is in no file"),
    ("bytes in no file", indexed(lambda i: i.storage_data.pop(MetadataIndex("lr"))), "`lr`"),
    ("an offset that is text", indexed(put("w", offset="12")), r"`\.metadata`: `w`: an item whose offset or length is not an integer"),
    ("transforms that are a number", indexed(put("w", transform_descriptors=7)), "not a list of names"),
    ("a sparse layout", indexed(lambda i: SET(i.state_dict_metadata["w"].properties, "layout", torch.sparse_coo)), "layout"),
    ("an offset of 2**70", indexed(put("w", offset=2**70)), r"`\.metadata`: `w`: an item whose offset or length is not an integer"),
    ("an item that is described as two things", indexed(lambda i: i.planner_data.update(w=("lr",))), "the index calls an entry `w`, but its key path spells `lr`"),
    ("a path of floats", indexed(planner(w=(1.5,))), r"`\.metadata`: `w`: its path in `planner_data` holds something else than strings and indexes"),
    ("a path of tuples", indexed(planner(w=(("a",),))), r"`\.metadata`: `w`: its path in `planner_data` holds something else than strings and indexes"),
    ("a path through a value", indexed(planner(w=("lr", "x"))), "`w`.*`lr.x`|`lr.x`.*`w`"),
    ("a path of a number past the list", indexed(planner(w=("list", 10**9))), "`w`.*list.1000000000|list.1000000000.*`w`"),
    ("a path of nothing", indexed(planner(w=())), r"`\.metadata`: `w`: its path in `planner_data` is not a tuple of keys"),
    ("a path below zero", indexed(planner(w=(-1,))), r"`\.metadata`: `w`: its path in `planner_data` holds something else than strings and indexes"),
    ("a path 100,000 deep", indexed(planner(w=("a",) * 100_000)), "its path in `planner_data` has 100000 keys, more than 256"),
):  # fmt: skip
    lie(f"dcp: {name}", make, pattern, code=(READ, 4))

for name, make, pattern in (
    ("a file that is not there", indexed(put("w", relative_path="__9_9.distcp")), "__9_9.distcp` is missing"),
    ("a hole between chunks", indexed(tiles([(0, 0)], (1, 3), (2, 3))), r"tensor `w` \[2, 3\] is not covered exactly: 3 of 6 elements are in no chunk"),
    ("an overlap of chunks", indexed(tiles([(0, 0), (0, 1)], (2, 2), (2, 3))), r"tensor `w` \[2, 3\] is not covered exactly: chunks at \[0, 0\] and \[0, 1\] overlap"),
    ("a chunk outside", indexed(tiles([(5, 0)], (2, 3), (2, 3))), r"tensor `w` \[2, 3\] is not covered exactly: chunk \[2, 3\] at \[5, 0\] reaches outside \[2, 3\]"),
    ("a chunk of a negative size", indexed(tiles([(0, 0)], (-2, -3), (2, 3))), r"tensor `w` \[2, 3\] is not covered exactly: chunk \[-2, -3\] at \[0, 0\] reaches outside \[2, 3\]"),
    ("4,096 chunks in 12 dimensions", indexed(tiles(grid(12), (1,) * 12, (2,) * 12)), r"`__0_0\.distcp`: `w` holds float32 \[2, 3\], but the metadata says float32 \[1, 1, 1, 1, 1,"),
    ("4,095 chunks in 12 dimensions", indexed(tiles(grid(12)[1:], (1,) * 12, (2,) * 12)), r"tensor `w` \[2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2\] is not covered exactly: 1 of \d+"),
    ("a tensor that is larger than said", indexed(tiles([(0, 0)], (2, 2), (2, 2))), r"`__0_0\.distcp`: `w` holds float32 \[2, 3\], but the metadata says float32 \[2, 2\]"),
    ("a tensor of 2**62 rows of nothing", indexed(tiles([(0, 0)], (2**62, 0), (2**62, 0))), NOTHING),
    ("a tensor of no rows", indexed(tiles([(0, 0)], (0, 3), (0, 3))), NOTHING),
    ("a tensor of nothing in the item of an object", indexed(tiles([(0,)], (0,), (0,)), lambda i: put("w", **vars(place_of(i, "lr")))(i)), "holds a value, but the metadata says a tensor without elements"),
    ("a tensor of 2**62 elements", indexed(tiles([(0,)], (2**62,), (2**62,))), r"2\*\*58 elements"),
    ("a tensor of 2**57 elements", indexed(tiles([(0,)], (2**57,), (2**57,))), r"`w` holds float32|needs [^ ]+ .?B, but [^ ]+ .?B are free|cannot write: file too large"),
    ("a tensor of 2**40 elements", indexed(tiles([(0,)], (2**40,), (2**40,))), r"`w` holds float32|needs [^ ]+ .?B, but [^ ]+ .?B are free|cannot write: file too large"),
    ("the item of another tensor", indexed(lambda i: vars(place_of(i, "x")).update(vars(place_of(i, "w")))), r"`__0_0\.distcp`: `x` holds float32 \[2, 3\], but the metadata says int64 \[4\]"),
    ("an item behind the end", indexed(put("w", offset=10**9)), "outside the file"),
    ("an item across the end", indexed(put("w", length=10**9)), "outside the file"),
    ("an item before the beginning", indexed(put("w", offset=-8)), "outside the file"),
    ("an item of -1 bytes", indexed(put("w", length=-1)), "outside the file"),
    ("an item of no bytes", indexed(put("w", length=0)), r"`__0_0\.distcp`: `w`: not a complete torch\.save archive: it has 0 bytes"),
    ("an item cut short", indexed(put("w", length=700)), r"`__0_0\.distcp`: `w`: not a complete torch\.save archive"),
    ("an object of no bytes", indexed(put("lr", length=0)), "`lr`"),
    ("an object at 2**63", indexed(put("lr", offset=2**63)), "`lr`"),
    ("another shape", indexed(lambda i: SET(i.state_dict_metadata["x"], "size", torch.Size((7,)))), r"`x` \[7\]"),
    ("another dtype", indexed(lambda i: SET(i.state_dict_metadata["x"].properties, "dtype", torch.float32)), r"`__0_0\.distcp`: `x` holds int64 \[4\], but the metadata says float32"),
    ("no chunks", indexed(lambda i: i.state_dict_metadata["w"].chunks.clear()), "tensor `w`"),
    ("an item in the directory itself", indexed(put("w", relative_path=".")), "a directory"),
    ("an item in a file without a name", indexed(put("w", relative_path="")), OUT),
    ("an item inside another", indexed(lambda i: put("w", offset=place_of(i, "w").offset + 64)(i)), r"`__0_0\.distcp`: `w`: not a complete torch\.save archive: bytes after the end record"),
    ("a transform that nobody knows", indexed(put("w", transform_descriptors=["exec.sh/1"])), "exec.sh/1"),
    ("a transform of zstd over what is none", indexed(put("w", transform_descriptors=["stream.zstd/1"])), r"`__0_0\.distcp`: `w`: cannot be decompressed"),
    ("a thousand transforms", indexed(put("w", transform_descriptors=["stream.zstd/1"] * 1000)), r"`__0_0\.distcp`: `w`: written with \d+ extensions, more than 8"),
):  # fmt: skip
    lie(f"dcp: {name}", make, pattern, code=(READ, 4, STORAGE), late=True)

LEVELS = {
    "none, pop": b"N0\x85",
    "text, pop": b"\x8c\x01a0\x85",
    "a list, pop": b"](K\x01e0\x85",
    "mark, pop": b"(0\x85",
    "mark, none, pop all": b"(NN1\x85",
    "memo, pop, get": b"q\x010h\x01\x85",
    "long memo, pop, get": b"r\x01\0\0\x000j\x01\0\0\0\x85",
    "mark, get, tuple": b"q\x010(h\x01t",
    "mark, get between numbers": b"q\x010(K\x01h\x01K\x02t",
    "with numbers": b"K\x01K\x02\x87",
    "torch.Size": b"q\x010h\x00h\x01\x85\x85R",
    "nothing built": b"Nb\x85",
    "nothing set": b"(u\x85",
    "nothing appended": b"(e\x85",
    "nothing added": b"(\x90\x85",
    "a get that looks like a number": b"q\x4b0h\x4b0h\x4b\x85",
    "a frame": b"\x95" + b"\0" * 8 + b"\x85",
}
for name, level in LEVELS.items():
    lie(
        f"deep: an index, {name}",
        raw(b"\x80\x04" + named("torch", "Size") + b"q\x000})" + level * TOO_DEEP + b"K\x01s."),
        # A Size is of something else than integers.
        "not made of a tuple of integers" if level.endswith(b"R") else r"nested more than \d+ deep",
    )

lie(
    "dcp: a command in planner_data",
    indexed(planner(evil=(Planted(os.system, TOUCH),))),
    r"`\.metadata`: `evil`: its path in `planner_data` holds something else than strings and",
)
lie(
    "dcp: a command for a tensor",
    indexed(lambda i: i.state_dict_metadata.update(evil=Planted(os.system, TOUCH))),
    r"`\.metadata`: `evil`: described by a posix\.system, not as a tensor or bytes",
)
lie(
    "dcp: a command for the storage data",
    indexed(lambda i: SET(i, "storage_data", Planted(os.system, TOUCH))),
    r"`\.metadata`: it has no `storage_data`",
)
lie(
    "dcp: a value that is a bare pickle",
    item(pickled(b"cos\nsystem\n(" + text(TOUCH) + b"tR")),
    r"`__0_0\.distcp`: `lr`: not a complete torch\.save archive: no end record",
    late=True,
)
