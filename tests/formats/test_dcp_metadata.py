"""The index of a DCP directory: what we write against torch's own classes and the table of its fields, what we read
against what torch wrote, and nothing that it says is believed."""

from __future__ import annotations

import io
import itertools
import pickle
import pickletools
import random
import re
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hang import no_hang
from support.paths import CHECKPOINTS
from support.pickle_payloads import payloads, set_trap
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.errors import CkptError, CorruptError
from ckpttool.formats.dcp import metadata_writer as dcpspelling
from ckpttool.serialization import pickle_opcodes
from ckpttool.serialization.dcp import metadata as dcpmetadata
from ckpttool.serialization.dcp import metadata_classes as classes
from ckpttool.serialization.dcp import metadata_fast as dcpruns
from ckpttool.serialization.dcp.metadata import IndexItem, StoredTensor
from ckpttool.serialization.dcp.metadata_tensors import Descriptions, TensorRun


def by_torch(world: int = 3, names: int = 2) -> Metadata:
    """An index as torch pickles it."""
    tensors: dict[str, Any] = {
        f"w{n}": TensorStorageMetadata(
            TensorProperties(torch.bfloat16),
            torch.Size([4 * world, 5]),
            [ChunkStorageMetadata(torch.Size([4 * r, 0]), torch.Size([4, 5])) for r in range(world)],
        )
        for n in range(names)
    }
    storage = {
        MetadataIndex(name, [4 * r, 0], r): _StorageInfo(f"__{r}_0.distcp", 1000 * n, 900)
        for r in range(world) for n, name in enumerate(tensors)
    }  # fmt: skip
    tensors["step"] = BytesStorageMetadata()
    storage[MetadataIndex("step")] = _StorageInfo("__0_0.distcp", 5000, 70, ["stream.zstd/1"])
    paths = {"w0": ("model", "w0"), "w1": ("model", 1), "step": ("step",)}
    return Metadata(tensors, paths, storage, StorageMeta(checkpoint_id=Path("/x")), "1.0.0")


def read(value: Any, protocol: int = 4) -> dcpmetadata.IndexContents:
    return dcpmetadata.read(io.BytesIO(pickle.dumps(value, protocol)), ".metadata")


def ours() -> dcpmetadata.IndexContents:
    """One of everything that an index can hold."""
    whole = StoredTensor(
        DTYPES["float8_e4m3fn"], (), [()], [()], array("l", [1]), array("q", [0]), array("q", [10])
    )  # fmt: skip
    halves = StoredTensor(
        DTYPES["float32"], (6, 70_000), [(0, 0), (5, 300)], [(5, 70_000), (1, 69_700)],
        array("l", [0, 1]), array("q", [7, 2**40]), array("q", [2**33, 255]),
    )  # fmt: skip
    five = StoredTensor(
        DTYPES["int64"], (1, 1, 1, 1, 2), [(0,) * 5], [(1, 1, 1, 1, 2)],
        array("l", [0]), array("q", [65536]), array("q", [256]),
    )  # fmt: skip
    entries: dict[str, StoredTensor | IndexItem] = {"a": whole, "b.ü": halves, "c": five, "d": IndexItem(0, 3, 4)}
    paths = {"a": ("a",), "b.ü": ("b", "ü"), "c": ("c", 0), "d": ("d",)}
    extra = {"format": 1, "paths": {"a": (0,)}, "containers": [((), "dict", None)]}
    return dcpmetadata.IndexContents(".metadata", ["__0_0.distcp", "__1_0.distcp"], entries, paths, extra)


def written(metadata: dcpmetadata.IndexContents) -> bytes:
    out = io.BytesIO()
    dcpspelling.write(metadata, out.write)
    return out.getvalue()


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_wrote_is_read(protocol: int) -> None:
    found = read(by_torch(), protocol)
    tensor = found.entries["w1"]
    assert isinstance(tensor, StoredTensor)
    assert (tensor.dtype.name, tensor.shape) == ("bfloat16", (12, 5))
    assert tensor.offsets == [(0, 0), (4, 0), (8, 0)] and tensor.sizes == [(4, 5)] * 3
    assert [tensor.item(i) for i in range(3)] == [IndexItem(r, 1000, 900) for r in range(3)]
    assert found.entries["step"] == IndexItem(0, 5000, 70, ("stream.zstd/1",))
    assert found.paths == {"w0": ("model", "w0"), "w1": ("model", 1), "step": ("step",)}
    assert found.files == [f"__{r}_0.distcp" for r in range(3)] and found.extra is None and not found.strays


def test_hints_are_only_hints() -> None:
    value = by_torch()
    wrong = {MetadataIndex(k.fqn, k.offset, (k.index or 0) + 1): v for k, v in value.storage_data.items()}
    value.storage_data = wrong
    tensor = read(value).entries["w0"]
    assert isinstance(tensor, StoredTensor) and list(tensor.files) == [0, 1, 2]


def test_a_file_that_looks_like_one() -> None:
    assert dcpmetadata.looks_like(pickle.dumps(by_torch())[:2048])
    assert dcpmetadata.looks_like(written(ours())[:2048])
    for other in (b"", b"PK\3\4", pickle.dumps({"a": 1}), pickle.dumps({"Metadata": 1})):
        assert not dcpmetadata.looks_like(other)


# Writing --------------------------------------------------------------------------------------------------------------


def test_torch_reads_what_we_write() -> None:
    found = pickle.loads(written(ours()))
    assert type(found) is Metadata and found.version == "1.0.0" and type(found.storage_meta) is StorageMeta
    assert vars(found.storage_meta) == {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    assert found.planner_data == ours().paths and found.ckpttool == ours().extra
    assert list(found.state_dict_metadata) == ["a", "b.ü", "c", "d"]
    for name, kind, size, chunks in (
        ("a", torch.float8_e4m3fn, [], [([], [])]),
        ("b.ü", torch.float32, [6, 70_000], [([0, 0], [5, 70_000]), ([5, 300], [1, 69_700])]),
        ("c", torch.int64, [1, 1, 1, 1, 2], [([0] * 5, [1, 1, 1, 1, 2])]),
    ):
        assert found.state_dict_metadata[name] == TensorStorageMetadata(
            TensorProperties(kind), torch.Size(size),
            [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks],
        )  # fmt: skip
    assert found.state_dict_metadata["d"] == BytesStorageMetadata()
    assert found.storage_data == {
        MetadataIndex("a", []): _StorageInfo("__1_0.distcp", 0, 10),
        MetadataIndex("b.ü", [0, 0]): _StorageInfo("__0_0.distcp", 7, 2**33),
        MetadataIndex("b.ü", [5, 300]): _StorageInfo("__1_0.distcp", 2**40, 255),
        MetadataIndex("c", [0] * 5): _StorageInfo("__0_0.distcp", 65536, 256),
        MetadataIndex("d"): _StorageInfo("__0_0.distcp", 3, 4),
    }
    assert [k.index for k in found.storage_data] == [0, 0, 1, 0, None]
    # What torch makes of it can be pickled by torch again.
    assert pickle.loads(pickle.dumps(found)) == found


MODULE = "torch.distributed.checkpoint.metadata"
OF_TORCH_2_6 = {
    *((MODULE, name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch", "float32"), ("torch", "float8_e4m3fn"), ("torch", "int64"),
    ("torch.serialization", "_get_layout"),
}  # fmt: skip


class States(pickle.Unpickler):
    """torch's module names answered with classes that keep the states they are given."""

    seen: dict[str, list[Any]]

    def find_class(self, module: str, name: str, /) -> Any:
        if module in ("torch", "torch.serialization"):
            return super().find_class(module, name)
        states = self.seen.setdefault(name, [])
        return type(name, (), {
            "__init__": lambda self, *args: None, "__setstate__": lambda self, state: states.append(state),
        })  # fmt: skip


def test_fields_are_those_that_every_torch_since_2_6_knows() -> None:
    data = written(ours())
    assert max(op.proto for op, _, _ in pickletools.genops(data)) <= 4
    named = {tuple(arg.split(" ")) for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL"}
    assert named == OF_TORCH_2_6
    reader = States(io.BytesIO(data))
    reader.seen = {}
    reader.load()
    assert {tuple(state) for state in reader.seen["Metadata"]} == {
        ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "ckpttool")
    }
    # Five elements: with the sixth of torch 2.15, torch up to 2.14 fails.
    assert [len(state) for state in reader.seen["TensorProperties"]] == [5, 5, 5]
    assert {tuple(state) for state in reader.seen["TensorStorageMetadata"]} == {("properties", "size", "chunks")}
    assert {tuple(state) for state in reader.seen["ChunkStorageMetadata"]} == {("offsets", "sizes")}
    assert {tuple(state) for state in reader.seen["_StorageInfo"]} == {("relative_path", "offset", "length")}
    assert {tuple(state) for state in reader.seen["MetadataIndex"]} == {("fqn", "offset", "index"), ("fqn", "index")}
    assert reader.seen["BytesStorageMetadata"] == []


def test_we_read_what_we_write() -> None:
    found, expected = dcpmetadata.read(io.BytesIO(written(ours())), ".metadata"), ours()
    # Files are numbered in the order in which they are met.
    assert found.files == ["__1_0.distcp", "__0_0.distcp"]
    assert found.paths == expected.paths and found.extra == expected.extra
    for name, entry in expected.entries.items():
        have = found.entries[name]
        if isinstance(entry, IndexItem):
            assert have == entry._replace(file=1 - entry.file)
            continue
        assert isinstance(have, StoredTensor)
        assert (have.dtype, have.shape, have.offsets, have.sizes) == (
            entry.dtype, entry.shape, entry.offsets, entry.sizes,
        )  # fmt: skip
        assert [have.item(i) for i in range(len(have.files))] == [
            entry.item(i)._replace(file=1 - entry.files[i]) for i in range(len(entry.files))
        ]


def test_large_indexes_take_seconds() -> None:
    """A tenth of 256 ranks x 2,930 tensors, there and back: what takes a time that grows faster than the index takes
    minutes. How long it takes on a machine of its own is measured by the benchmarks."""
    files = [f"__{r}_0.distcp" for r in range(256)]
    n = len(files)
    offsets, sizes = [(16 * r, 0) for r in range(n)], [(16, 4096)] * n
    entries: dict[str, StoredTensor | IndexItem] = {
        f"layers.{i}.weight": StoredTensor(
            DTYPES["float32"], (16 * n, 4096), offsets, sizes,
            array("l", range(n)), array("q", [i * 263_000] * n), array("q", [263_000] * n),
        )
        for i in range(293)
    }  # fmt: skip
    metadata = dcpmetadata.IndexContents(".metadata", files, entries, {k: (k,) for k in entries}, {})
    with no_hang():
        found = dcpmetadata.read(io.BytesIO(written(metadata)), ".metadata")
    assert len(found.entries) == 293 and found.files == files


# Runs -----------------------------------------------------------------------------------------------------------------

# Paddle's have the same name, and nothing else in common.
INDEXES = sorted(p for p in CHECKPOINTS.rglob("*.metadata") if p.is_file() and "paddle" not in p.parts)


def outcome(data: bytes) -> Any:
    """Everything that the index says, to compare; None when it is refused."""
    try:
        found = dcpmetadata.read(io.BytesIO(data), "x")
    except CorruptError:
        return None
    entries = {
        name: e if isinstance(e, IndexItem) else
        (e.dtype, e.shape, e.offsets, e.sizes, e.files, e.starts, e.lengths, e.transforms)
        for name, e in found.entries.items()
    }  # fmt: skip
    said = (found.files, list(found.paths.items()) if found.paths else None, found.extra, found.strays, found.harmful)
    return list(entries.items()), said, found.facts


def both_ways(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """By runs, guarded, and without either; guarded alone has to say the same as the last."""
    whole = outcome(data)
    with monkeypatch.context() as patch:
        patch.setattr(pickle_opcodes, "_GUARDED", 0)
        assert outcome(data) == whole
        patch.setattr(dcpmetadata, "_LARGE", 0)
        by_runs = outcome(data)
    return by_runs, whole


def runs_of(data: bytes) -> dcpruns.Runs | None:
    return dcpruns.find(data, classes.EXPECTED)


def columns(found: dcpruns.Runs) -> list[dcpruns.RunColumns]:
    return [run for run in found.all if isinstance(run, dcpruns.RunColumns)]


def tensors_of(found: dcpruns.Runs) -> list[TensorRun]:
    return [run for run in found.all if isinstance(run, TensorRun)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("path", INDEXES, ids=lambda path: str(path.relative_to(CHECKPOINTS)))
def test_runs_change_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_runs, whole = both_ways(path.read_bytes(), monkeypatch)
    assert by_runs == whole and whole is not None


def test_torch_writes_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FSDP2 saves is regular but for the first of each kind, or `inspect` would take twice as long."""
    monkeypatch.setattr(dcpruns, "_LEAST", 4)
    data = (CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt" / ".metadata").read_bytes()
    found = runs_of(data)
    assert found is not None
    read = dcpmetadata._read(found.data, "x", lambda share: None, found)
    assert sum(run.count for run in columns(found) if len(run._tables) == 2) >= 183
    assert all(run.used for run in found.all) and len(read.entries) > 50


def our_own(world: int, names: int) -> bytes:
    """An index as ckpttool writes it, with items of all kinds, without its checksum, so that bytes can be changed."""
    contents = read(by_torch(world, names))
    for n, tensor in enumerate(e for e in contents.entries.values() if isinstance(e, StoredTensor)):
        tensor.starts = array("q", [2 ** (4 * n % 62) + start for start in tensor.starts])
    contents.extra = ours().extra
    data = written(contents)
    return data[: -dcpmetadata._CHECKSUM_LENGTH] + b"."


@pytest.mark.parametrize(("world", "names"), [(1, 4000), (4, 300), (64, 20)])
def test_ckpttool_writes_runs(world: int, names: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across tensors, and of chunks where there are many of one."""
    data = our_own(world, names)
    found = runs_of(data)
    assert found is not None
    of_items = [run.count for run in columns(found) if len(run._expected) > 8]
    of_chunks = [run.count for run in columns(found) if len(run._expected) <= 8]
    assert sum(of_items) >= 0.95 * world * names
    assert sum(of_chunks) >= 0.95 * world * names or world < 8
    assert len(of_items) < 4 + len(data) / 20_000
    assert dcpmetadata._read(found.data, "x", lambda share: None, found).extra == ours().extra
    by_runs, whole = both_ways(data, monkeypatch)
    assert by_runs == whole and whole is not None


def _unlike(names: int) -> Metadata:
    """Tensors of five shapes and two dtypes, scalars among them, as one rank saves them; here and there a value."""
    value = by_torch(1, 1)
    value.state_dict_metadata.clear()
    value.storage_data.clear()
    for n in range(names):
        name = f"h.{n}.w\x94" if n % 97 == 5 else f"h.{n}.weight"
        place = _StorageInfo("__0_0.distcp", n * 1000, 900)
        if n % 50 == 0:
            value.state_dict_metadata[name] = BytesStorageMetadata()
            value.storage_data[MetadataIndex(name)] = place
            continue
        shape = torch.Size([(), (3,), (0, 3), (4, 300), (1, 2, 70_000, 5)][n // 500 % 5])
        corner = torch.Size([0] * len(shape))
        properties = TensorProperties(torch.float32 if n // 250 % 2 else torch.int8)
        value.state_dict_metadata[name] = TensorStorageMetadata(
            properties, shape, [ChunkStorageMetadata(corner, torch.Size([*shape]))]
        )
        value.storage_data[MetadataIndex(name, [*corner], 0)] = place
    value.planner_data = {name: (name,) for name in value.state_dict_metadata}
    return value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_is_said_of_a_tensor_is_read_once(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is between them, and whatever names look like."""
    data = pickle.dumps(_unlike(3000), protocol)
    found = runs_of(data)
    assert found is not None
    by_runs, whole = both_ways(data, monkeypatch)
    assert by_runs == whole and len(whole[0]) == 3000
    if protocol > 3:
        runs = tensors_of(found)
        assert sum(len(run.names) for run in runs) > 2500
        read = dcpmetadata._read(found.data, "x", lambda share: None, found)
        assert sum(len(run.descriptions) for run in runs) < 1000 and len(read.entries) == 3000


def test_our_own_tensors_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = read(_unlike(3000))
    data = written(contents)
    found = runs_of(data)
    assert found is not None and sum(len(run.names) for run in tensors_of(found)) > 2500
    by_runs, whole = both_ways(data, monkeypatch)
    assert by_runs == whole and len(whole[0]) == 3000


def test_tensors_of_which_no_two_are_alike_are_left_to_the_unpickler(monkeypatch: pytest.MonkeyPatch) -> None:
    value = by_torch(1, 1)
    for n in range(3000):
        shape = torch.Size([n, 7])
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([*shape]))
        value.state_dict_metadata[f"h.{n}"] = TensorStorageMetadata(TensorProperties(torch.int8), shape, [chunk])
        value.storage_data[MetadataIndex(f"h.{n}", [0, 0], 0)] = _StorageInfo("__0_0.distcp", n * 1000, 900)

    def kind(self: Descriptions, text: bytes) -> None:
        raise AssertionError(text)

    monkeypatch.setattr(Descriptions, "_kind", kind)
    found = runs_of(unframed(value))
    assert found is not None and columns(found) and not tensors_of(found)


@pytest.mark.parametrize("places", ["h.1111 h.1121 h.1141", "h.1121 h.1111 h.1131", "h.1111 h.1121 h.1131"])
def test_a_name_that_comes_twice_is_what_it_is_last(places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for torch: in runs, and outside of them, where the dict has the place of the first and the value of the
    last."""
    value = _unlike(1200)
    for name, shape in ("h.1111.weight", torch.Size([7, 4])), ("h.1141.weight", torch.Size([7, 5])):
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([*shape]))
        value.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(torch.int8), shape, [chunk])
    value.planner_data = None
    data = unframed(value)
    for place in places.split():
        data = data.replace(place.encode() + b".weight", b"h.9999.weight", 1)
    monkeypatch.setattr(dcpmetadata, "_LARGE", 1 << 30)
    whole = outcome(data)
    assert dict(whole[0])["h.9999.weight"][1] == (*pickle.loads(data).state_dict_metadata["h.9999.weight"].size,)
    monkeypatch.setattr(dcpmetadata, "_LARGE", 0)
    assert outcome(data) == whole


def test_names_of_bytes_that_look_like_opcodes() -> None:
    """Each might begin a name: to look for its end behind each of them took six seconds for one of 60 kB."""
    value = _unlike(3000)
    described = list(value.state_dict_metadata.items())
    for n in range(20):
        name = "\x8c" * 30_000 + str(n)
        described.insert(150 * n, (name, BytesStorageMetadata()))
        value.storage_data[MetadataIndex(name)] = _StorageInfo("__0_0.distcp", 0, 900)
    value.state_dict_metadata = dict(described)
    value.planner_data = None
    with no_hang():
        found = runs_of(pickle.dumps(value, 4))
    assert found is not None and tensors_of(found)


@pytest.mark.parametrize("ours", [False, True])
def test_tensors_of_a_broken_index(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some bytes of two entries inside a run, each three ways: the answer is the unpickler's."""
    value = _unlike(100)
    data = written(read(value))[: -dcpmetadata._CHECKSUM_LENGTH] + b"." if ours else unframed(value)
    begin, end = data.index(b"h.61.weight"), data.index(b"h.63.weight")
    refused = 0
    for at in range(begin - 8, end, 7):
        for byte in (0x00, 0x94, ord("(")):
            changed = data[:at] + bytes((byte,)) + data[at + 1 :]
            by_runs, whole = both_ways(changed, monkeypatch)
            assert by_runs == whole, (at - begin, byte)
            refused += whole is None
    assert refused > 9


def test_an_index_without_runs_is_not_searched_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what looks like an entry a few are tried at each place, not all."""
    data, tries = our_own(64, 200), 0

    def learn(put: dcpruns._Put, *_: Any) -> None:
        nonlocal tries
        tries += 1

    monkeypatch.setattr(dcpruns._Put, "learn", learn)
    assert runs_of(data) is None
    assert 0 < tries <= dcpruns._SAMPLES * dcpruns._TRIES


def test_chunks_alone_are_left_to_the_unpickler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank saved has a chunk for each tensor: a run of one takes as long as 20 of them."""
    value = by_torch(1, 4000)
    some = by_torch(8, 20)
    for name in some.state_dict_metadata:
        value.state_dict_metadata[f"sharded.{name}"] = some.state_dict_metadata[name]
    for index, info in some.storage_data.items():
        index = MetadataIndex(f"sharded.{index.fqn}", index.offset, index.index)
        value.storage_data[index] = info
    data = pickle.dumps(value, 4)
    found = runs_of(data)
    assert found is not None
    assert len(found.all) < 400 and min(run.count for run in columns(found)) >= 4
    by_runs, whole = both_ways(data, monkeypatch)
    assert by_runs == whole and whole is not None and len(whole[0]) == 4022


def _odd(world: int = 4) -> Metadata:
    """Names, files and numbers of all kinds, in runs and between them."""
    value = by_torch(world, 9)
    for n, size in enumerate(([3] * 4, [70_000, 2**33], [255], [256, 65_535])):
        value.state_dict_metadata[f"größe.{n}" * n] = TensorStorageMetadata(
            TensorProperties(torch.int8), torch.Size(size),
            [ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))],
        )  # fmt: skip
        for again in range(3):
            index = MetadataIndex(f"größe.{n}" * n, torch.Size([0] * len(size)), again)
            value.storage_data[index] = _StorageInfo("__0_0.distcp", 2 ** (12 * n + again), 5)
    value.storage_data[MetadataIndex("stray", torch.Size([1, 2]), 0)] = _StorageInfo("__1_0.distcp", 0, 5)
    value.storage_data[MetadataIndex("w0", torch.Size([1, 2]), 0)] = _StorageInfo("__9_0.distcp", 0, 5)
    return value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_runs_of_odd_entries(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(_odd(8), protocol)
    found = runs_of(data)
    assert found is not None and len(found.all) > 5
    by_runs, whole = both_ways(data, monkeypatch)
    assert by_runs == whole and whole is not None
    assert whole[1][3] == ["w0", "stray"] and "__9_0.distcp" in whole[1][0]


def _shared(value: Metadata) -> Metadata:
    """Items refer to the names and the offsets of the tensors."""
    names = {name: name for name in value.state_dict_metadata}
    for index in value.storage_data:
        vars(index)["fqn"] = names.get(index.fqn, index.fqn)
        for chunk in getattr(value.state_dict_metadata.get(index.fqn), "chunks", ()):
            if chunk.offsets == index.offset:
                vars(index)["offset"] = chunk.offsets
    return value


def _with_fields(value: Metadata) -> Metadata:
    """As a later torch might write it."""
    for n, (index, info) in enumerate(value.storage_data.items()):
        vars(index).update(rank=n, shape=torch.Size([n, 3]), kind=f"x{n % 3}")
        vars(info).update(checksum=None, is_whole=True, kind=f"y{n}")
    return value


def _reversed(value: Metadata) -> Metadata:
    for index, info in value.storage_data.items():
        for item in (index, info):
            fields = dict(reversed(vars(item).items()))
            vars(item).clear()
            vars(item).update(fields)
    return value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("change", [_shared, _with_fields, _reversed])
def test_runs_of_other_spellings(
    change: Callable[[Metadata], Metadata], protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(change(_odd(16)), protocol)
    found = runs_of(data)
    # What refers to something inside a run is read without runs in the protocols that number what is memoized.
    assert (found is None) == (change is _shared and protocol < 4)
    assert found is None or sum(run.count for run in columns(found)) > 200
    by_runs, whole = both_ways(data, monkeypatch)
    assert by_runs == whole and whole is not None
    assert found is None or dcpmetadata._read(found.data, "x", lambda share: None, found).entries


def test_runs_of_chunks_without_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regular, but nothing in them that a column could be made of."""
    good = unframed(by_torch(16, 9))
    start = good.index(b"storage_data")
    bad = re.sub(
        rb"(h.\)\x81\x94}\x94\()(?:h.h.K.K.\x86\x94\x85\x94R\x94){2}(?=ub)", rb"\1", good[:start], flags=re.DOTALL
    )
    assert len(bad) < start - 1000
    by_runs, whole = both_ways(bad + good[start:], monkeypatch)
    assert by_runs is whole is None


def test_runs_whose_numbers_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in the memo that are given twice, or left out: a reference finds what it finds without runs."""
    good = pickle.dumps(_odd(8), 2)
    puts = [match.span() for match in re.finditer(rb"(?<=[)}(R\x81\x85\x86])r..\0\0", good, re.DOTALL)]
    gets = [match.span() for match in re.finditer(rb"(?<=[(h])j..\0\0", good, re.DOTALL)]
    chance = random.Random(2)
    differ = 0
    for _ in range(150):
        bad = bytearray(good)
        for spans in (puts, gets):
            begin, end = chance.choice(spans)
            other, _ = chance.choice(puts + gets)
            bad[begin + 1 : end] = good[other + 1 : other + 5]
        by_runs, whole = both_ways(bytes(bad), monkeypatch)
        assert by_runs == whole
        differ += whole is not None
    assert differ
    # All from the middle on, by one.
    shifted = bytearray(good)
    for begin, end in [span for span in puts + gets if int.from_bytes(good[span[0] + 1 : span[1]], "little") > 450]:
        number = int.from_bytes(good[begin + 1 : end], "little") + 1
        shifted[begin + 1 : end] = number.to_bytes(4, "little")
    by_runs, whole = both_ways(bytes(shifted), monkeypatch)
    assert by_runs == whole


@pytest.mark.sweep(2)
@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("framed", [True, False, None, "ours"])
def test_runs_of_a_broken_index(framed: bool | str | None, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever byte is another: what the runs say is what the unpickler alone says."""
    if framed == "ours":
        good = our_own(8, 6)
    else:
        good = pickle.dumps(_odd(3), 4) if framed else pickle.dumps(_odd(3), 2) if framed is None else unframed(_odd(3))
    chance = random.Random(1)
    differ = 0
    for _ in range(times):
        bad = bytearray(good)
        bad[chance.randrange(11 if framed is True else 2, len(bad))] = chance.choice(
            (0x94, 0x68, 0x4B, chance.randrange(256))
        )
        by_runs, whole = both_ways(bytes(bad), monkeypatch)
        assert by_runs == whole
        differ += whole is not None
    assert 0.07 < differ / times < 0.95


def test_runs_elsewhere_than_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    good = unframed(by_torch(4, 9))
    start = good.index(b"storage_data")
    second = good.split(b")\x81\x94}\x94(")[4]
    offsets, sizes = second[:4], second.split(b"R\x94")[1][:4]
    assert offsets[:1] + offsets[2:3] == sizes[:1] + sizes[2:3] == b"hh"
    for bad in (
        # The items in a dict within another; the whole index in a string; a name of our own in it.
        good[: start + 14] + b"N0}(K\x01" + good[start + 14 : -2] + b"ub.",
        b"\x80\x04B" + len(good).to_bytes(4, "little") + good + b".",
        # Two numbers, of which a tuple takes one, in the last of the chunks; keys that are not what they should be.
        b"\x85\x94\x85\x94R\x94ub".join(good[:start].rsplit(b"\x86\x94\x85\x94R\x94ub", 1)) + good[start:],
        good.replace(offsets, b"swap").replace(sizes, offsets).replace(b"swap", sizes),
        good.replace(b"__0_0.distcp", b"ckpttool in\n", 1).replace(b"w0", b"ckpttool index run", 1),
    ):
        by_runs, whole = both_ways(bad, monkeypatch)
        assert by_runs == whole


# Nothing is believed --------------------------------------------------------------------------------------------------


def pickled(name: str, args: bytes, how: bytes, state: bytes) -> bytes:
    """A pickle of one object of torch's: made with `args` by `how`, then given `state`."""
    return b"\x80\x04c" + f"{MODULE}\n{name}\n".encode() + args + how + state + b"."


NAMES = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "_StorageInfo", "StorageMeta",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_class_with_junk_in_it(name: str) -> None:
    """Arguments of none, an integer, a list and a dict, to `new` and to a call, and any state."""
    states = (b"", b"}b", b"]b", b"K\x01b", b"Nb", b")b", b"N}\x86b", b"}X\x03\x00\x00\x00fqn]sb", b"K\x01K\x02\x86b")
    for args, how, state in itertools.product((b")", b"K\x01\x85", b"]\x85", b"}\x85"), (b"\x81", b"R"), states):
        with pytest.raises(CkptError, match=r"\.metadata"):
            dcpmetadata.read(io.BytesIO(pickled(name, args, how, state)), ".metadata")


@pytest.mark.parametrize("name", NAMES)
def test_a_class_itself_cannot_be_changed_for_the_next_pickle(name: str) -> None:
    """BUILD of a class with slot state sets attributes on it."""
    setting = b"N}X\x06\x00\x00\x00fieldsK\x01s\x86b"
    with pytest.raises(CkptError):
        dcpmetadata.read(io.BytesIO(pickled(name, b"", b"", setting)), ".metadata")
    assert isinstance(read(by_torch()).entries["w0"], StoredTensor)


def test_fields_that_never_came() -> None:
    for change in (
        lambda m: vars(m).clear(),
        lambda m: m.state_dict_metadata.update(w0=TensorStorageMetadata.__new__(TensorStorageMetadata)),
        lambda m: setattr(m.state_dict_metadata["w0"], "properties", None),
        lambda m: m.state_dict_metadata["w0"].chunks.append(ChunkStorageMetadata.__new__(ChunkStorageMetadata)),
    ):
        value = by_torch()
        change(value)
        with pytest.raises(CorruptError, match=r"\.metadata"):
            read(value)
    # torch's own MetadataIndex without fields has no hash and cannot be a key.
    index = b"c" + f"{MODULE}\nMetadataIndex\n".encode() + b")\x81"
    info = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81"
    state = b"}(X\x13\x00\x00\x00state_dict_metadata}X\x0c\x00\x00\x00storage_data}" + index + info + b"sub"
    with pytest.raises(CorruptError, match=r"`\.metadata`: an object of the index has no fields"):
        dcpmetadata.read(io.BytesIO(pickled("Metadata", b")", b"\x81", state)), ".metadata")


@pytest.mark.parametrize("place", ["storage_meta", "version", "planner_data", "ckpttool", "in planner_data"])
def test_payloads_do_not_run(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    set_trap(tmp_path, marker)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, fragment in payloads(marker).items():
        value = by_torch()
        if place == "in planner_data":
            value.planner_data["w0"] = "PAYLOAD"
        else:
            setattr(value, place, "PAYLOAD")
        spelt = b"\x8c\x07PAYLOAD\x94"
        whole = unframed(value)
        assert whole.count(spelt) == 1
        with suppress(CkptError):
            dcpmetadata.read(io.BytesIO(whole.replace(spelt, fragment + b"\x94")), ".metadata")
        assert not marker.exists(), name


def unframed(value: Any) -> bytes:
    """Protocol 4 without frames, so that bytes can be put in."""
    out = io.BytesIO()
    pickler = pickle._Pickler(out, 4)
    pickler.framer.start_framing = lambda: None  # type: ignore[method-assign]
    pickler.dump(value)
    return out.getvalue()
