"""The streams of torch before 1.6: made by today's torch, by hand to the grammar of its reader, cut and damaged."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.catalogue.values import Stub, stub_name
from ckpttool.errors import CkptError, CorruptError
from ckpttool.serialization import torch_legacy as torchlegacy
from ckpttool.serialization.torch_pickle import StorageRef, TensorRef
from ckpttool.storage.stores import locate

MAGIC = 0x1950A86A20F9469CFC6C


def saved(state: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream, _use_new_zipfile_serialization=False, **options)
    return stream.getvalue()


def opened(data: bytes) -> torchlegacy.Stream:
    def read(offset: int, nbytes: int) -> bytes:
        assert offset >= 0 and nbytes >= 0 and offset + nbytes <= len(data), "reads outside the file"
        return data[offset : offset + nbytes]

    return torchlegacy.open_stream(read, len(data), name="`a.pt`")


def values(data: bytes, stream: torchlegacy.Stream, ref: TensorRef | StorageRef) -> bytes:
    """The elements, row-major."""
    extent = stream.extent(ref if isinstance(ref, TensorRef) else ref.whole())
    found = data[extent.offset : extent.offset + extent.nbytes]
    assert len(found) == extent.nbytes
    if extent.strides is not None:
        assert isinstance(ref, TensorRef)
        flat = torch.frombuffer(bytearray(found), dtype=getattr(torch, ref.dtype.name))
        found = flat.as_strided(ref.shape, extent.strides).contiguous().numpy().tobytes()
    return found


BASE = torch.arange(35, dtype=torch.float32).reshape(5, 7)
STATE = {
    "w": BASE, "t": BASE.t(), "part": BASE[1:3, 2:5], "n": torch.arange(5), "h": torch.ones(3, dtype=torch.bfloat16),
    "b": torch.tensor([True, False]), "c": torch.tensor(1 + 2j), "e": torch.empty(0, 3), "s": BASE.untyped_storage(),
    "i": 7, "o": OrderedDict(x=[1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_as_torch_writes_it(protocol: int) -> None:
    data = saved({k: v for k, v in STATE.items() if k != "s"}, pickle_protocol=protocol)
    assert torchlegacy.is_stream(data[:64])
    stream = opened(data)
    expected = torch.load(io.BytesIO(data), weights_only=False)
    assert list(stream.tree) == list(expected) and stream.tree["i"] == 7 and stream.tree["o"] == {"x": [1, 2]}
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            ref = stream.tree[name]
            assert ref.shape == tuple(value.shape) and f"torch.{ref.dtype}" == str(value.dtype)
            assert values(data, stream, ref) == bytes(value.contiguous().untyped_storage())[: value.nbytes]
    assert stream.extent(stream.tree["w"]).offset == stream.extent(stream.tree["t"]).offset


def test_new_dtypes_that_torch_itself_cannot_read() -> None:
    state = {
        "f8": torch.arange(9.0).to(torch.float8_e4m3fn),
        "u": torch.arange(300, dtype=torch.int32).to(torch.uint32),
    }
    data = saved(state)
    with pytest.raises(AttributeError):
        torch.load(io.BytesIO(data), weights_only=False)
    stream = opened(data)
    for name, value in state.items():
        assert values(data, stream, stream.tree[name]) == bytes(value.untyped_storage())


def test_storages_as_values() -> None:
    data = saved({"typed": torch.FloatStorage([1.0, 2.0]), "untyped": torch.UntypedStorage(b"sixteen bytes :)")})
    stream = opened(data)
    assert values(data, stream, stream.tree["typed"]) == struct.pack("<2f", 1, 2)
    assert values(data, stream, stream.tree["untyped"]) == b"sixteen bytes :)"


def test_the_byte_order_of_the_header_means_nothing() -> None:
    """torch's C++ writes little endian on every machine, and its reader ignores what `sys_info` says."""
    data = saved(STATE["w"])
    at = data.index(b"little_endian")
    other = data[:at] + data[at:].replace(b"\x88", b"\x89", 1)
    assert other != data
    assert torch.equal(torch.load(io.BytesIO(other)), BASE)
    assert values(other, opened(other), opened(other).tree) == BASE.numpy().tobytes()


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))


def test_modules_bring_their_source() -> None:
    data = saved(Named())
    assert b"class Named" in data
    tree = opened(data).tree
    assert isinstance(tree, Stub) and (stub_name(tree) or "").endswith("Named")


def handmade(tree: bytes, keys: Any, *payloads: bytes) -> bytes:
    header = b"".join(pickle.dumps(v, protocol=2) for v in (MAGIC, 1001, {"little_endian": True}))
    return header + tree + pickle.dumps(keys, protocol=2) + b"".join(payloads)


class Storage:
    """Pickles as a persistent id."""

    def __init__(self, *pid: Any) -> None:
        self.pid = pid


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Storage) else None


def tree_of(value: Any) -> bytes:
    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(value)
    return stream.getvalue()


def storage(numel: int = 4, view: Any = None, key: str = "9") -> Storage:
    return Storage("storage", torch.FloatStorage, key, "cpu", numel, view)


FOUR = struct.pack("<q4f", 4, 1, 2, 3, 4)


def test_views_of_storages() -> None:
    data = handmade(tree_of([storage(), storage(view=("10", 1, 2))]), ["9"], FOUR)
    stream = opened(data)
    assert values(data, stream, stream.tree[1]) == struct.pack("<2f", 2, 3)
    assert bytes(torch.load(io.BytesIO(data), weights_only=False)[1].untyped()) == struct.pack("<2f", 2, 3)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (handmade(tree_of([storage(5)]), ["9"], FOUR), "16 bytes, but 20 are needed"),
        (handmade(tree_of([storage(view=("10", 3, 2))]), ["9"], FOUR), "16 bytes, but 20 are needed"),
        (handmade(tree_of([storage(view=("10", -1, 2))]), ["9"], FOUR), "are needed"),
        (handmade(tree_of([storage(view="no")]), ["9"], FOUR), "storage view"),
        (handmade(tree_of([Storage("other", 1)]), ["9"], FOUR), "unknown kind"),
        (pickle.dumps(5), "version 1001"),
    ],
)
def test_what_contradicts_itself(data: bytes, words: str) -> None:
    with pytest.raises(CorruptError, match=words):
        stream = opened(data)
        for ref in stream.tree:
            stream.extent(ref if isinstance(ref, TensorRef) else ref.whole())


DAMAGED = saved({"w": torch.arange(6.0), "b": torch.ones(2, 2).t()})


@settings(max_examples=500)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_flipped_anywhere(at: int, value: int) -> None:
    data = bytearray(DAMAGED)
    data[at % len(data)] = value
    try:
        stream = opened(bytes(data))
        refs = [r for r in stream.tree.values() if isinstance(r, TensorRef)] if isinstance(stream.tree, dict) else []
        extents = [stream.extent(r) for r in refs]
    except CkptError:
        return
    assert all(e.offset >= 0 and e.offset + e.nbytes <= len(data) for e in extents)


def test_a_pickle_larger_than_the_first_read() -> None:
    state = {f"layers.{i}": i for i in range(30_000)}
    assert opened(saved(state)).tree == state


# The tar --------------------------------------------------------------------------------------------------------------


class Key:
    def __init__(self, key: Any) -> None:
        self.key = key


class TarPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.key if isinstance(value, Key) else None


def member_pickle(value: Any) -> bytes:
    stream = io.BytesIO()
    TarPickler(stream, protocol=2).dump(value)
    return stream.getvalue()


def tensor_record(key: int, root: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> bytes:
    head = pickle.dumps((key, root, torch.FloatTensor), protocol=2)
    return head + struct.pack(f"<ii{2 * len(shape) + 1}q", len(shape), 0, *shape, *strides, offset)


def members(**changes: bytes) -> dict[str, bytes]:
    storages = pickle.dumps(1, protocol=2) + pickle.dumps((1, "cpu", torch.FloatStorage), protocol=2)
    storages += struct.pack("<q6f", 6, *range(6)) + pickle.dumps([(2, 1, 2, 3)], protocol=2)
    tensors = (
        pickle.dumps(2, protocol=2) + tensor_record(11, 1, (2, 3), (3, 1), 0) + tensor_record(12, 2, (2,), (1,), 1)
    )
    return {
        "sys_info": pickle.dumps({"little_endian": True}, protocol=2), "storages": storages, "tensors": tensors,
        "pickle": member_pickle(OrderedDict(a=Key("11"), b=Key("12"), step=3)),
    } | changes  # fmt: skip


def tar(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as archive:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def open_tar(path: Path) -> tuple[bytes, torchlegacy.Stream]:
    data = path.read_bytes()
    return data, torchlegacy.open_tar(lambda o, n: data[o : o + n], locate(str(path)), name="`a.tar`")


def test_a_tar(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.pt", members())
    data, stream = open_tar(path)
    assert torchlegacy.is_tar(data[:512], locate(str(path)))
    expected = torch.load(path, weights_only=False)
    assert list(stream.tree) == list(expected) == ["a", "b", "step"]
    for name in ("a", "b"):
        assert values(data, stream, stream.tree[name]) == expected[name].contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pickle": member_pickle(Key("13"))}, "names tensor `13`"),
        ({"tensors": pickle.dumps(-1)}, "number of tensors"),
        ({"tensors": pickle.dumps(1) + tensor_record(11, 7, (2,), (1,), 0)}, "not .key, storage, class"),
        ({"tensors": pickle.dumps(1) + tensor_record(11, 1, (7,), (1,), 0)}, "needs 28 bytes"),
        ({"tensors": pickle.dumps(1) + tensor_record(11, 2, (4,), (1,), 0)}, "needs 16 bytes"),
        ({"tensors": pickle.dumps(1) + tensor_record(11, 1, (2,), (1,), 0)[:-3]}, "ends at byte"),
        ({"tensors": pickle.dumps(1) + pickle.dumps((1, 1, 1)) + struct.pack("<ii", 99, 0)}, "99 dimensions"),
        ({"storages": pickle.dumps(1) + pickle.dumps((1, "cpu"))}, "not .key, location, class"),
        ({"storages": pickle.dumps(1) + pickle.dumps((1, "cpu", torch.FloatTensor))}, "unknown dtype"),
        ({"storages": pickle.dumps(0) + pickle.dumps([(2, 1, 0, 1)])}, "storage view"),
    ],
)
def test_tars_that_contradict_themselves(changes: dict[str, bytes], words: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=words):
        open_tar(tar(tmp_path / "a.pt", members(**changes)))


def test_other_tars_are_not_ours(tmp_path: Path) -> None:
    path = tar(tmp_path / "model.nemo", {"model_config.yaml": b"", "model_weights.ckpt": b""})
    assert not torchlegacy.is_tar(path.read_bytes()[:512], locate(str(path)))
    with pytest.raises(CorruptError, match="no member"):
        open_tar(path)


def test_a_second_save_in_the_file_is_not_passed_over() -> None:
    first, second = saved({"a": torch.ones(3)}), saved({"b": torch.zeros(4)})
    with pytest.raises(CorruptError, match=f"{len(second)} bytes after the end of the saved data, at {len(first)}"):
        opened(first + second)
