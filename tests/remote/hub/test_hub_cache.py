"""The cache as huggingface_hub leaves it since 1.32: what came over Xet lies in `blobs/` of the whole cache, by its Xet
hash, and the blob of the repository is a link to it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import hf_xet
import pytest
import torch
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.utils._xet import abort_xet_session
from safetensors.torch import load_file, save_file
from support.hub_server import Hub

import ckpttool
from ckpttool.errors import CorruptError, RemoteError

pytest.importorskip("huggingface_hub.utils._shared_blobs", reason="older clients do not share blobs")


@pytest.fixture
def weights(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights of `org/name`, two shards of a model that are served over Xet."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(constants, "HF_XET_CACHE", str(tmp_path / "xet"))
    abort_xet_session()
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.randn(300, 300)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    hub.make("org/name", folder)
    hub.make("org/other")
    HfApi(endpoint=hub.url).upload_folder(repo_id="org/other", folder_path=folder)
    path = folder / "model.safetensors"
    hub.xet_hashes[hashlib.sha256(path.read_bytes()).hexdigest()] = hf_xet.hash_files([str(path)])[0].hash
    return path


def shared(path: Path) -> Path:
    """The file that a file of a snapshot is in the end, which is in the store of the whole cache."""
    real = path.resolve()
    assert real.parents[1] == Path(constants.HF_HUB_CACHE).resolve() / "blobs"
    return real


def test_a_snapshot_of_the_client(hub: Hub, weights: Path, tmp_path: Path) -> None:
    snapshot = Path(snapshot_download("org/name", cache_dir=constants.HF_HUB_CACHE, endpoint=hub.url))
    shared(snapshot / "model.safetensors")
    assert [tensor.name for tensor in ckpttool.inspect(snapshot).tensors] == ["w"]
    ckpttool.convert(snapshot, tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], load_file(weights)["w"])
    # A link to anywhere else is what it was.
    os.remove(snapshot / "model.safetensors")
    (snapshot / "model.safetensors").symlink_to(weights)
    with pytest.raises(CorruptError, match="a link that leaves the checkpoint"):
        ckpttool.inspect(snapshot)


def test_offline_after_a_conversion(hub: Hub, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpttool.convert("hf://org/name", tmp_path / "online.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.seen)
    assert [tensor.name for tensor in ckpttool.inspect("hf://org/name").tensors] == ["w"]
    done = ckpttool.convert("hf://org/name", tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], load_file(weights)["w"])
    assert done.checked_bytes >= 360_000 and len(hub.seen) == asked


def test_a_shared_file_that_has_changed(
    hub: Hub, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Path(snapshot_download("org/name", cache_dir=constants.HF_HUB_CACHE, endpoint=hub.url))
    blob = shared(snapshot / "model.safetensors")
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(RemoteError, match="does not match its digest") as raised:
            ckpttool.convert("hf://org/name", tmp_path / "out.safetensors")
        assert str(blob) in str(raised.value.hint)
    ckpttool.convert("hf://org/name", tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], load_file(weights)["w"])
