"""Compressed items of a DCP directory, when there is far less room for them than they need."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from same import assert_same
from support import checkpoints
from support.upstream_samples import loaded, original, path_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpttool
from ckpttool.errors import CorruptError, StorageError
from ckpttool.formats.detect import detect
from ckpttool.serialization.dcp import decompress as scratch
from ckpttool.storage.stores import locate
from ckpttool.transfer import execute as transfer

SOURCE = path_of("dcp/zstd_w2")
CAST = ("*=bfloat16",)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=[(1, 0), (2048, 1), (8192, 2)], ids=str)
def cramped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every segment, or nearly, is emptied before the conversion ends."""
    monkeypatch.setattr(scratch, "_SEGMENT", request.param[0])
    monkeypatch.setattr(scratch, "_SEGMENTS", request.param[1])


def tensors(tree: Any, at: tuple[Any, ...] = ()) -> dict[str, torch.Tensor]:
    """Every tensor of a nested state by its dotted name."""
    if isinstance(tree, torch.Tensor):
        return {".".join(map(str, at)): tree.detach().contiguous()}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    found: dict[str, torch.Tensor] = {}
    for key, value in pairs:
        found |= tensors(value, (*at, key))
    return found


def read_back(out: Path, kind: str) -> dict[str, torch.Tensor]:
    if kind == "torch":
        return tensors(loaded(str(out)))
    if kind == "dcp":
        dcp_to_torch_save(out, out.with_suffix(".pt"))
        return tensors(loaded(str(out.with_suffix(".pt"))))
    found: dict[str, torch.Tensor] = {}
    for path in out.glob("*.safetensors"):
        found |= load_file(path)
    return {name if name == "seen" else f"model.{name}": tensor for name, tensor in found.items()}


@pytest.mark.sweep(3)
@pytest.mark.usefixtures("cramped")
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in ("torch", "dcp", "safetensors") for options in ({}, {"dtype": CAST})),
        ("dcp", {"to_world": 3}),
        ("dcp", {"to_world": 3, "dtype": CAST}),
    ],
    ids=str,
)
def test_a_conversion_needs_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any], threads: int
) -> None:
    monkeypatch.setattr(transfer, "TASK", 700)
    out = tmp_path / ("out.pt" if kind == "torch" else "out")
    done = ckpttool.convert(SOURCE, str(out), to=kind, threads=threads, **options)
    expected = tensors(original("dcp/zstd_w2"))
    if "dtype" in options:
        expected = {k: t.to(torch.bfloat16) if t.is_floating_point() else t for k, t in expected.items()}
    found = read_back(out, kind)
    assert len(found) > 10 and set(found) == set(expected)
    for name, tensor in expected.items():
        assert_same(found[name], tensor, at=name)
    assert done.checked_bytes > 0 and done.unchecked_bytes == 0


@pytest.mark.usefixtures("cramped")
def test_two_compressed_sources(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(SOURCE, other)
    ckpttool.convert(SOURCE, str(tmp_path / "out.pt"), model_from=str(other), threads=4)
    expected, found = tensors(original("dcp/zstd_w2")), read_back(tmp_path / "out.pt", "torch")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert_same(found[name], tensor, at=name)


@pytest.mark.usefixtures("cramped")
@pytest.mark.parametrize("numbers", [1, 3])
def test_what_is_held_stays(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    """All extents of the checkpoint held at once, by more threads than there are files for."""
    monkeypatch.setattr(scratch, "RESERVED", numbers)
    source = detect(locate(SOURCE)).open(locate(SOURCE))
    files = len(source.catalogue.files)
    expected = tensors(original("dcp/zstd_w2"))
    wanted = [(t, chunk) for t in source.catalogue.tensors for chunk in t.chunks if chunk.extent.item]
    assert len(wanted) > 20
    failures: list[BaseException] = []

    def work() -> None:
        try:
            held = [(tensor, chunk, source.resolve(tensor, chunk)) for tensor, chunk in wanted]
            for tensor, chunk, extent in held:
                assert extent.record is None
                data = Path(source.catalogue.files[extent.file].location).read_bytes()[extent.offset :][: extent.nbytes]
                if extent.plain:
                    elements = checkpoints.bits(expected[tensor.name])[(..., *checkpoints.within(chunk[:2]))]
                    assert data == elements.tobytes()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]
    assert len(source.catalogue.files) == files
    source.close()


def test_damaged_bytes_are_found_when_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = scratch._Segment.add

    def damaged(self: Any, data: bytes) -> None:
        """Another bit in the first byte of the payload."""
        changed = bytearray(data)
        at = changed.find(b"PK\3\4", changed.find(b"/byteorder")) if b"/data/0" in data else -1
        if at >= 0:
            name, extra = struct.unpack_from("<HH", changed, at + 26)
            assert changed[at + 30 : at + 30 + name].endswith(b"/data/0")
            changed[at + 30 + name + extra] ^= 1
        add(self, bytes(changed))

    monkeypatch.setattr(scratch._Segment, "add", damaged)
    with pytest.raises(CorruptError, match=r"`__\d_0.distcp`: `.*`: decompresses to bytes with CRC ") as caught:
        ckpttool.convert(SOURCE, str(tmp_path / "out.pt"))
    assert caught.value.facts["tensor"] in tensors(original("dcp/zstd_w2"))
    assert caught.value.facts["file"].endswith(".distcp")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
def test_no_room_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(StorageError, match=os.strerror(number).lower()):
        ckpttool.convert(SOURCE, str(tmp_path / "out.pt"))


def test_the_disk_is_full_while_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=f"`{tempfile.gettempdir()}`: no space left"):
        ckpttool.convert(SOURCE, str(tmp_path / "out.pt"))
