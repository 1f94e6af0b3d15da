"""Uploads of files that are not written to this machine: gathered from a checkpoint as they are sent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import constants
from huggingface_hub.utils._xet import XET_CONNECTION_INFO_CACHE, abort_xet_session
from safetensors.torch import load, save_file
from support.hub_server import Handler, Hub, drop
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import CkptError, CorruptError, ReadError, StorageError
from ckpttool.remote.hub import upload, xet

SHARDED = CHECKPOINTS / "dcp/hsdp_w4/ckpt"  # each tensor is split into rows


@pytest.fixture(params=["lfs", "xet"])
def store(request: pytest.FixtureRequest, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub, over LFS and over Xet with a store of ours."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", request.param == "lfs")
    monkeypatch.setenv("HF_XET_XORB_COMPRESSION_POLICY", "none")
    hub.cas = request.param == "xet"
    abort_xet_session()
    XET_CONNECTION_INFO_CACHE.clear()
    yield hub
    abort_xet_session()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files of weights that are written to this machine."""
    names: list[str] = []

    class Written(upload.WrittenFile):
        def __init__(self, file: Any, folder: str, *, keep: bool) -> None:
            if file.name.endswith(".safetensors"):
                names.append(file.name)
            super().__init__(file, folder, keep=keep)

    monkeypatch.setattr(upload, "WrittenFile", Written)
    return names


def over(hub: Hub) -> str:
    """The request that has the bytes of weights."""
    return "/cas/v1/xorbs/" if hub.cas else "^/lfs/"


def count_scratch(hub: Hub, folder: Path) -> list[int]:
    """Bytes of weights below a folder at each request that sends some."""
    counts: list[int] = []

    def count(handler: Handler) -> bool:
        counts.append(sum(path.stat().st_size for path in folder.rglob("*.safetensors")))
        return False

    hub.fail("POST" if hub.cas else "PUT", over(hub), act=count)
    return counts


def test_nothing_is_written_to_this_machine(store: Hub, tmp_path: Path, written: list[str]) -> None:
    """And what is sent is what an export to a directory writes."""
    counts = count_scratch(store, tmp_path / "tmp")
    progress: list[tuple[int, int]] = []
    options: dict[str, Any] = {"max_shard_size": "1KB", "card": False}
    made = ckpttool.export(SHARDED, tmp_path / "local", **options)
    sent = ckpttool.export(
        SHARDED, "hf://me/model", **options, progress=lambda done, total: progress.append((done, total))
    )
    assert counts and not any(counts) and written == [] and os.listdir(tmp_path / "tmp") == []
    there = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    assert store.files("me/model") == there and len(there) > 3
    assert (sent.checked_bytes, sent.unchecked_bytes) == (made.checked_bytes, made.unchecked_bytes)
    assert sent.file_bytes < 2000 < made.file_bytes, "bytes of disk that it takes"
    assert progress[-1][0] == progress[-1][1] and [done for done, _ in progress] == sorted(done for done, _ in progress)
    # Nor is it to be compared with what is there.
    assert {file.status for file in ckpttool.export(SHARDED, "hf://me/model", **options).sent.files} == {"unchanged"}
    assert written == []


def test_the_disk_need_not_have_room(
    store: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    save_file({"w": torch.randn(300, 300)}, tmp_path / "x.safetensors", {"format": "pt"})
    monkeypatch.setattr("ckpttool.storage.free_space.free_bytes", lambda _: 10_000)
    ckpttool.export(tmp_path / "x.safetensors", "hf://me/model")
    with pytest.raises(StorageError, match=r"needs 180 kB, but 10\.0 kB are free"):
        ckpttool.export(tmp_path / "x.safetensors", "hf://me/other", dtype="bfloat16")
    assert written == [] and store.history("me/other") == ["initial commit"]


def test_what_has_to_be_calculated_is_written(
    store: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    """A cast; columns of several files; and everything, for a library behind Xet that takes no streams."""
    saved = torch.randn(300, 300)
    save_file({"w": saved}, tmp_path / "x.safetensors", {"format": "pt"})
    ckpttool.export(tmp_path / "x.safetensors", "hf://me/cast", dtype="bfloat16")
    assert torch.equal(load(store.files("me/cast")["model.safetensors"])["w"], saved.bfloat16())
    ckpttool.export(CHECKPOINTS / "dcp/fsdp2_tp_w4/ckpt", "hf://me/columns")
    ckpttool.export(CHECKPOINTS / "dcp/fsdp2_tp_w4/ckpt", tmp_path / "columns")
    name = "model.safetensors"
    assert store.files("me/columns")[name] == (tmp_path / "columns" / name).read_bytes()
    assert written == [name, name]
    monkeypatch.setattr(xet, "has_streams", lambda: False)
    ckpttool.export(tmp_path / "x.safetensors", "hf://me/model")
    assert written == [name] * (2 + store.cas)
    assert torch.equal(load(store.files("me/model")[name])["w"], saved)
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("touched", [True, False])
def test_a_source_that_changes_on_the_way(store: Hub, tmp_path: Path, touched: bool) -> None:
    """An error, never a wrong upload, also where the time of the last change is put back."""
    source = tmp_path / "x.safetensors"
    save_file({"w": torch.randn(1000, 1000)}, source, {"format": "pt"})

    def change(_: Handler) -> bool:
        before = os.stat(source)
        with open(source, "r+b") as stream:
            stream.seek(-1000, os.SEEK_END)
            stream.write(bytes(10))
        if not touched:
            os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
        return False

    # The digest is known then, or the file is still unread.
    store.fail(*(("GET", "/xet-write-token/") if store.cas else ("POST", "/objects/batch")), act=change, times=1)
    with pytest.raises(ReadError, match=f"`{source}` changed while it was being read") as raised:
        ckpttool.export(source, "hf://me/model")
    assert raised.value.exit_code == 3 and raised.value.hint and store.failed == 1
    assert store.history("me/model") == ["initial commit"]


def test_a_damaged_source(store: Hub, tmp_path: Path) -> None:
    """Checksums of the source are compared, as where it is written."""
    dcp.save({"w": torch.randn(300, 300)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (data,) = (tmp_path / "ckpt").glob("*.distcp")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    messages = []
    for dst in (str(tmp_path / "local"), "hf://me/model"):
        with pytest.raises(CorruptError, match="CRC") as raised:
            ckpttool.export(tmp_path / "ckpt", dst)
        messages.append(raised.value.message)
    assert messages[0] == messages[1]
    assert store.history("me/model") == ["initial commit"] and not store.files("me/model")


def test_a_file_of_another_save(store: Hub, tmp_path: Path, written: list[str]) -> None:
    """Of which several files together have all bytes: the last one of them is not sent."""
    for n in (0.0, 1.0):
        torch.save({"model": {f"w{i}": torch.full((100, 40), n) for i in range(3)}}, tmp_path / "a.pt")
        ckpttool.convert(tmp_path / "a.pt", tmp_path / f"{n}", to="dcp", to_world=2)
    ckpttool.export(tmp_path / "0.0", "hf://me/model", max_shard_size="20kB", card=False)
    shutil.copy(tmp_path / "1.0/__1_0.distcp", tmp_path / "0.0")
    with pytest.raises(CorruptError, match="in the manifest beside it"):
        ckpttool.export(tmp_path / "0.0", "hf://me/other", max_shard_size="20kB", card=False)
    assert not written and store.history("me/other") == ["initial commit"] and not store.files("me/other")


def test_what_breaks_on_the_way_is_sent_anew(store: Hub, tmp_path: Path) -> None:
    """From its start, or from that of a part, which begins in the middle of a block."""
    store.part = 1_500_000
    saved = torch.randn(1000, 1000)
    save_file({"w": saved}, tmp_path / "x.safetensors", {"format": "pt"})
    broken: list[int] = []

    def half(handler: Handler) -> bool:
        broken.append(len(handler.rfile.read(int(handler.headers["Content-Length"]) // 2)))
        return drop(handler)

    for skip in (0, 1):
        store.fail("POST" if store.cas else "PUT", over(store), act=half, times=1, skip=skip)
    ckpttool.export(tmp_path / "x.safetensors", "hf://me/model", card=False)
    assert broken and min(broken) > 100_000
    assert store.files("me/model") == {"model.safetensors": (tmp_path / "x.safetensors").read_bytes()}
    assert torch.equal(load(store.files("me/model")["model.safetensors"])["w"], saved)
    assert store.history("me/model") == ["Upload with ckpttool", "initial commit"]


def test_it_is_tried_again_as_a_whole(store: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure that the library does not repeat."""
    save_file({"w": torch.randn(300, 300)}, tmp_path / "x.safetensors", {"format": "pt"})
    preupload, calls = upload._RepositoryUpload._preupload, []

    def fail_once(self: upload._RepositoryUpload, operation: Any) -> None:
        preupload(self, operation)
        if operation.path_in_repo == "model.safetensors":
            calls.append(operation)
            if len(calls) == 1:
                operation._is_uploaded = False
                shutil.rmtree(store.store)
                store.store.mkdir()
                store.unverified.clear()
                raise upload.errors._Http.ReadError("it broke", request=upload.errors._Http.Request("PUT", store.url))

    monkeypatch.setattr(upload._RepositoryUpload, "_preupload", fail_once)
    made = ckpttool.export(tmp_path / "x.safetensors", "hf://me/model", card=False)
    assert len(calls) == 2 and made.checked_bytes + made.unchecked_bytes == 360_000, "counted once"
    assert store.files("me/model") == {"model.safetensors": (tmp_path / "x.safetensors").read_bytes()}


def test_small_weights_that_git_keeps(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `.gitattributes` of the repository: they are in the commit itself."""
    monkeypatch.setattr("support.hub_server.is_large", lambda path, size: False)
    ckpttool.export(SHARDED, "hf://me/model", card=False)
    assert not hub.asked("PUT", "/lfs/") and load(hub.files("me/model")["model.safetensors"])
    assert ckpttool.export(SHARDED, "hf://me/model", card=False).sent.commit is None


def test_an_error_of_the_source_is_not_one_of_the_hub(store: Hub, tmp_path: Path) -> None:
    save_file({"w": torch.randn(1000, 1000)}, tmp_path / "x.safetensors", {"format": "pt"})
    store.fail(
        *(("GET", "/xet-write-token/") if store.cas else ("POST", "/objects/batch")),
        act=lambda _: os.truncate(tmp_path / "x.safetensors", 3_000_000) is not None,
    )
    with pytest.raises(CkptError, match="changed while it was being read") as raised:
        ckpttool.export(tmp_path / "x.safetensors", "hf://me/model")
    assert raised.value.exit_code == 3 and store.history("me/model") == ["initial commit"]
