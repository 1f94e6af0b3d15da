"""Archives: read where torch's reader finds things, refuse what is cut or contradicts itself, write as torch writes."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import tracemalloc
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config

from ckpttool.catalogue.dtypes import DTYPES, dtype
from ckpttool.errors import CkptError, CorruptError
from ckpttool.serialization import torch_zip as torchzip
from ckpttool.serialization.torch_pickle import NewTensor, TensorRef
from ckpttool.serialization.torch_zip import Archive, load_tree, open_archive, resolve_item
from ckpttool.serialization.torch_zip_writer import lay_out


def saved(state: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream, **options)
    return stream.getvalue()


def opened(data: bytes, base: int = 0, length: int | None = None) -> Archive:
    length = len(data) - base if length is None else length

    def read(offset: int, nbytes: int) -> bytes:
        assert nbytes >= 0 and base <= offset and offset + nbytes <= base + length, "reads outside the archive"
        return data[offset : offset + nbytes]

    return open_archive(read, base, length, name="`a.pt`")


STATE = {
    "w": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    "h": torch.arange(5, dtype=torch.bfloat16),
    "f8": torch.arange(9, dtype=torch.float32).to(torch.float8_e4m3fn),
    "u": torch.arange(3, dtype=torch.int32).to(torch.uint16),
    "n": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "step": 3,
}


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [0, 1, 13, 4096])
@pytest.mark.parametrize("alignment", [64, 1, 512])
def test_records_lie_where_torch_says(base: int, alignment: int) -> None:
    with config.patch("save.storage_alignment", alignment):
        data = saved(STATE)
    archive = opened(b"\xee" * base + data + b"\xee" * 99, base, len(data))
    theirs = torch._C.PyTorchFileReader(io.BytesIO(data))
    assert archive.root == "archive"
    assert list(archive.records) == theirs.get_all_records()
    for name in archive.records:
        record = archive.payload(name)
        assert record.offset - base == theirs.get_record_offset(name)
        assert archive.content(name) == theirs.get_record(name)
        assert record.crc == zlib.crc32(archive.content(name))


def test_extents_are_the_tensors() -> None:
    data = saved(STATE)
    archive = opened(data)
    tree = load_tree(archive)
    for name, value in STATE.items():
        if isinstance(value, torch.Tensor):
            extent = archive.extent(tree[name])
            assert extent.strides is None and extent.codec == ()
            assert data[extent.offset :][: extent.nbytes] == bytes(value.untyped_storage())[: extent.nbytes]
            assert extent.nbytes == value.numel() * value.element_size()


def test_views_and_codecs() -> None:
    line = torch.arange(12).to(torch.complex64)
    state = {
        "t": line.view(3, 4).t()[1:],
        "conj": line.conj(),
        "neg": torch._neg_view(line),
        "one": line[3:4].view(1, 1),
    }
    archive = opened(saved(state))
    tree = load_tree(archive)
    start = archive.payload("data/0").offset
    assert archive.extent(tree["t"])[:5] == (0, start + 8, 88, (1, 4), ())
    assert archive.extent(tree["conj"]).codec == ("conj",)
    assert archive.extent(tree["neg"]).codec == ("neg",)
    assert archive.extent(tree["one"])[:4] == (0, start + 24, 8, None)


def test_the_byte_order_is_honoured() -> None:
    data = saved(STATE)
    for crc in (zlib.crc32(b"little"), 0):
        # The second time as a writer without checksums leaves it.
        changed = data.replace(b"little", b"bigger")
        changed = changed.replace(struct.pack("<I", zlib.crc32(b"little")), struct.pack("<I", crc and 0x12345678))
        with pytest.raises(CorruptError, match="CRC" if crc else "byte order"):
            load_tree(opened(changed))


@pytest.mark.parametrize("count", [1, 500, pytest.param(70_000, marks=pytest.mark.long)])
def test_many_records(count: int) -> None:
    """More than 65535 need the zip64 end record; the directory does not fit the first read."""
    data = saved([torch.tensor(i) for i in range(count)])
    archive = opened(data)
    tree = load_tree(archive)
    assert len(tree) == count
    last = archive.extent(tree[-1])
    assert data[last.offset :][:8] == struct.pack("<q", count - 1)


# Damage ---------------------------------------------------------------------------------------------------------------


def everything(data: bytes) -> dict[str, bytes]:
    archive = opened(data)
    tree = load_tree(archive)
    found = {}
    for name, value in (tree if isinstance(tree, dict) else {}).items():
        if isinstance(value, TensorRef):
            extent = archive.extent(value)
            assert extent.offset >= 0 and extent.offset + extent.nbytes <= len(data)
            found[name] = data[extent.offset :][: extent.nbytes]
    return found


@settings(max_examples=500)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_flipped_anywhere(at: int, value: int) -> None:
    """An error of ours, or bytes of the file: nothing else."""
    data = bytearray(DAMAGED)
    data[at % len(data)] = value
    with suppress(CkptError):
        everything(bytes(data))


@settings(max_examples=300)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_flipped_in_the_directory(at: int, value: bytes) -> None:
    data = bytearray(DAMAGED)
    start = data.index(b"PK\1\2")
    data[start + at : start + at + len(value)] = value
    with suppress(CkptError):
        everything(bytes(data[: len(DAMAGED)]))


DAMAGED = saved({"w": torch.arange(6.0), "b": torch.ones(2, 2).t()})


def test_stored_again_by_another_program() -> None:
    """`zip -0` knows nothing of alignment or descriptors."""
    data = saved(STATE)
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert everything(stream.getvalue()) == everything(data)


def test_without_checksums() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(STATE)
    finally:
        torch.serialization.set_crc32_options(True)
    archive = opened(data)
    assert not archive.has_crcs and archive.payload("data/0").crc is None
    assert everything(data) == everything(saved(STATE))


def test_skipped_data_has_no_checksums() -> None:
    stream = io.BytesIO()
    with torch.serialization.skip_data():
        torch.save(STATE, stream)
    assert opened(stream.getvalue()).payload("data/0").crc is None


# Items of DCP ---------------------------------------------------------------------------------------------------------


def item(data: bytes, kind: str, sizes: tuple[int, ...]) -> Any:
    return resolve_item(
        lambda o, n: data[o : o + n], 5, len(data) - 5, name="x", file=3, dtype=dtype(kind), sizes=sizes
    )


def test_one_item() -> None:
    data = b"12345" + saved(torch.arange(6, dtype=torch.int16).view(2, 3))
    extent = item(data, "int16", (2, 3))
    assert extent.file == 3 and data[extent.offset :][: extent.nbytes] == struct.pack("<6h", *range(6))
    for kind, sizes in (("int16", (3, 2)), ("uint16", (2, 3)), ("int16", (6,))):
        with pytest.raises(CorruptError, match="metadata says"):
            item(data, kind, sizes)
    with pytest.raises(CorruptError, match="a value where"):
        item(b"12345" + saved({"a": 1}), "int16", (2, 3))


# Writing --------------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """What a directory and a local header say of one record."""

    name: str
    flags: int
    method: int
    crc: int
    nbytes: int
    header: int
    payload: int
    local: bytes
    central_extra: bytes
    descriptor: bytes


def entries(data: bytes) -> list[Entry]:
    """Every field of an archive by Python's `zipfile` and by hand, so that two archives can be compared."""
    found = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            at = info.header_offset
            name_len, extra_len = struct.unpack_from("<HH", data, at + 26)
            payload = at + 30 + name_len + extra_len
            behind = payload + info.file_size
            found.append(
                Entry(
                    info.filename, info.flag_bits, info.compress_type, info.CRC, info.file_size, at, payload,
                    data[at:payload], info.extra, data[behind : behind + 16],
                )
            )  # fmt: skip
    return found


def slots(state: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            kind = DTYPES[str(value.dtype).removeprefix("torch.")]
            made[name] = NewTensor(str(len(made)), kind, tuple(value.shape))
        else:
            made[name] = value
    return made


def raw(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().untyped_storage())


def write(state: dict[str, Any], base: int = 0, **options: Any) -> bytes:
    tree = slots(state)
    layout = lay_out(tree, lambda v: v if isinstance(v, NewTensor) else None, base=base, root="archive", **options)
    out = bytearray(b"\xee" * base + bytes(layout.size))
    payloads = {tree[name].key: raw(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    for key, record in layout.storages.items():
        out[record.offset : record.offset + record.nbytes] = payloads[key]
    by_offset = {layout.storages[key].offset: zlib.crc32(data) for key, data in payloads.items()}
    for offset, piece in [*layout.pieces, *layout.patches(lambda record: by_offset[record.offset])]:
        assert base <= offset and offset + len(piece) <= base + layout.size
        out[offset : offset + len(piece)] = piece
    return bytes(out)


@pytest.mark.parametrize("base", [0, 7])
def test_written_archives_are_torchs(base: int) -> None:
    """Each record at the same place with the same flags, sizes, extra field and descriptor; the pickle is ours."""
    ours, theirs = write(STATE, base)[base:], saved(STATE)
    mine, other = entries(ours), entries(theirs)
    assert [(e.name, e.flags, e.method, e.nbytes) for e in mine if e.name != "archive/data.pkl"] == [
        (e.name, e.flags, e.method, e.nbytes) for e in other if e.name != "archive/data.pkl"
    ]
    for one, two in zip(mine, other, strict=True):
        assert one.payload % 64 == two.payload % 64 == 0
        assert one.local[4:26] == two.local[4:26] and one.central_extra == two.central_extra
        if one.nbytes:
            assert one.descriptor[:4] == two.descriptor[:4] == b"PK\7\10"
            assert struct.unpack("<III", one.descriptor[4:]) == (one.crc, one.nbytes, one.nbytes)
        if not one.name.endswith(("data.pkl", "serialization_id")):
            assert one.crc == two.crc
    assert ours[-22:-14] == theirs[-22:-14] and ours[-98:-94] == theirs[-98:-94] == b"PK\6\6"


def test_written_archives_open_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(write(STATE))
    for options in ({}, {"mmap": True}):
        back = torch.load(path, weights_only=True, **options)
        assert list(back) == list(STATE)
        for name, value in STATE.items():
            if isinstance(value, torch.Tensor):
                assert back[name].dtype == value.dtype and back[name].shape == value.shape
                assert raw(back[name].clone()) == raw(value)
    assert zipfile.ZipFile(path).testzip() is None
    subprocess.run(["unzip", "-tqq", path], check=True) if _has_unzip() else None
    everything(path.read_bytes())


def _has_unzip() -> bool:
    return any(os.access(os.path.join(folder, "unzip"), os.X_OK) for folder in os.get_exec_path())


def test_deterministic() -> None:
    assert write(STATE) == write(STATE)


@pytest.mark.parametrize("count", [0, 1, pytest.param(70_000, marks=pytest.mark.long)])
def test_writing_many(count: int, tmp_path: Path) -> None:
    state = {str(i): torch.tensor(i) for i in range(count)}
    (tmp_path / "a.pt").write_bytes(write(state))
    back = torch.load(tmp_path / "a.pt", weights_only=True)
    assert len(back) == count and all(int(v) == int(k) for k, v in list(back.items())[-5:])


def huge(path: Path, sizes: list[int]) -> list[int]:
    """A sparse file of uint8 tensors with a mark at both ends of each; their offsets."""
    tree = {str(i): NewTensor(str(i), DTYPES["uint8"], (n,)) for i, n in enumerate(sizes)}
    layout = lay_out(tree, lambda v: v if isinstance(v, NewTensor) else None, root="archive")
    with open(path, "wb") as stream:
        stream.truncate(layout.size)
        for offset, piece in [*layout.pieces, *layout.patches(lambda record: 0xDEAD)]:
            stream.seek(offset)
            stream.write(piece)
        for i, record in enumerate(layout.storages.values()):
            for at in (record.offset, record.offset + record.nbytes - 1):
                stream.seek(at)
                stream.write(bytes([i + 1]))
    return [record.offset for record in layout.storages.values()]


G = 1 << 30
LIMITS = {
    "record past 4 GiB": [5 * G, 10],
    "offset past 4 GiB": [3 * G, 2 * G, 10, 20],
    "just below": [4 * G - 2, 10],
    "the marker itself": [4 * G - 1, 10],
    "just above": [4 * G, 10],
    "header of the next at 4 GiB": [4 * G - 64 * 40, 64 * 10, 100, 100, 100, 100, 100, 100],
}


@pytest.mark.parametrize("sizes", LIMITS.values(), ids=LIMITS)
def test_past_4_gib(sizes: list[int], tmp_path: Path) -> None:
    path = tmp_path / "huge.pt"
    offsets = huge(path, sizes)
    with open(path, "rb") as stream:

        def read(offset: int, nbytes: int) -> bytes:
            stream.seek(offset)
            return stream.read(nbytes)

        archive = open_archive(read, 0, path.stat().st_size, name="huge")
        tree = load_tree(archive)
        for i, (offset, nbytes) in enumerate(zip(offsets, sizes, strict=True)):
            extent = archive.extent(tree[str(i)])
            assert (extent.offset, extent.nbytes) == (offset, nbytes)
            assert read(offset, 1) == read(offset + nbytes - 1, 1) == bytes([i + 1])
    theirs = torch._C.PyTorchFileReader(str(path))
    assert [theirs.get_record_offset(f"data/{i}") for i in range(len(sizes))] == offsets
    loaded = torch.load(path, mmap=True, weights_only=True)
    for i, nbytes in enumerate(sizes):
        value = loaded[str(i)]
        assert value.shape == (nbytes,) and int(value[0]) == int(value[-1]) == i + 1
    with zipfile.ZipFile(path) as other:
        assert [other.getinfo(f"archive/data/{i}").file_size for i in range(len(sizes))] == sizes


@pytest.mark.long
def test_past_4_gib_as_torch_writes_it(tmp_path: Path) -> None:
    """The same headers, descriptors and extra fields as torch's own around a record of 4 GiB."""
    sizes = [4 * G + 5, 10, 300]
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    huge(ours, sizes)
    with torch.serialization.skip_data():
        torch.save({str(i): torch.empty(n, dtype=torch.uint8) for i, n in enumerate(sizes)}, theirs)

    def frames(path: Path) -> list[Any]:
        found = []
        with zipfile.ZipFile(path) as archive, open(path, "rb") as stream:
            for info in archive.infolist():
                stream.seek(info.header_offset)
                head = stream.read(30)
                name_len, extra_len = struct.unpack_from("<HH", head, 26)
                extra = stream.read(name_len + extra_len)[name_len:]
                stream.seek(info.file_size, os.SEEK_CUR)
                behind = stream.read(24)
                large = info.file_size >= 2**32 or info.header_offset >= 2**32
                descriptor = behind[:4] + (behind[8:24] if large else behind[8:16])
                fields = [struct.unpack_from("<HH", extra)] if large else []
                if not info.filename.endswith("data.pkl"):
                    short = info.filename.partition("/")[2]
                    found.append((short, head[4:26], fields, descriptor if info.file_size else b""))
        return found

    assert frames(ours) == frames(theirs)


def test_a_large_directory_takes_little_memory() -> None:
    state = {str(i): NewTensor(str(i), DTYPES["float32"], (100, 100)) for i in range(5_000)}
    tracemalloc.start()
    lay_out(state, lambda v: v if isinstance(v, NewTensor) else None, root="archive")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 15e6


def test_records_that_are_known_are_not_asked_for() -> None:
    """Empty storages have no payload, so nobody brings their CRC."""
    layout = lay_out(
        {"a": NewTensor("0", DTYPES["int8"], (0,))}, lambda v: v if isinstance(v, NewTensor) else None, root="archive"
    )

    def crc_of(record: Any) -> int:
        raise AssertionError("asked")

    assert [*layout.patches(crc_of)]
    assert layout.storages["0"].nbytes == 0 and torchzip.ALIGNMENT == 64


def test_whether_a_record_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("root/version", "root/folder/inner.pkl", "other/stray.pkl", "root/data.pkl", "root/data/0"):
            archive.writestr(name, b"1")
    data = path.read_bytes()
    read = lambda at, nbytes: data[at : at + nbytes]  # noqa: E731
    wanted = ("version", "data.pkl", "data/0", "inner.pkl", "stray.pkl", "data.pk", "")
    assert [torchzip.listed(read, len(data), name, name="x") for name in wanted] == [True] * 3 + [False] * 4
    with pytest.raises(CorruptError, match="no end record"):
        torchzip.listed(read, len(data) - 30, "data.pkl", name="x")


def test_a_second_save_in_the_file_is_not_passed_over() -> None:
    # Of the same names and sizes: the locator of the second leads to the end record of the first.
    first, second = saved({"a": torch.ones(3)}), saved({"b": torch.zeros(3)})
    assert len(first) == len(second)
    with pytest.raises(CorruptError, match="the zip64 end record is not where its locator says"):
        opened(first + second)


def test_archives_that_are_read_in_turn(tmp_path: Path) -> None:
    """Each has its own bytes, and only those of one archive are read ahead: of 256 ranks, they were 16 MB."""
    files = []
    for rank in range(32):
        torch.save({str(i): torch.full((300,), i + 100 * rank) for i in range(40)}, tmp_path / f"rank{rank:02}.pt")
        files.append((tmp_path / f"rank{rank:02}.pt").read_bytes())
    archives = [opened(data) for data in files]
    tracemalloc.start()
    try:
        for i in range(40):
            for rank, (data, archive) in enumerate(zip(files, archives, strict=True)):
                at = archive.payload(f"data/{i}")
                assert data[at.offset : at.offset + at.nbytes] == torch.full((300,), i + 100 * rank).numpy().tobytes()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 600 * 32 * 40, taken / 32 / 40  # what was located
