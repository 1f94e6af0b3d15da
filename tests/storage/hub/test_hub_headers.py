"""Headers that are kept for the next look, and what a look at one tensor fetches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save
from support.hub_server import Hub

import ckpttool
from ckpttool.errors import CkptError
from ckpttool.storage import cache
from ckpttool.storage.hub import headers


@pytest.fixture
def shards(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files of `org/name`: four shards and their index."""
    monkeypatch.delenv("CKPTTOOL_HUB_NO_CACHE")
    tensors = {f"layers.{i}.weight": torch.randn(200, 200) for i in range(4)}
    names = {tensor: f"model-0000{i + 1}-of-00004.safetensors" for i, tensor in enumerate(tensors)}
    files = {names[tensor]: save({tensor: value}) for tensor, value in tensors.items()}
    index = {"metadata": {"total_size": 640_000}, "weight_map": names}
    hub.make("org/name", {**files, "model.safetensors.index.json": json.dumps(index).encode(), "config.json": b"{}"})
    return list(files.values())


def look() -> dict[str, tuple[int, ...]]:
    return {tensor.name: tuple(tensor.shape) for tensor in ckpttool.inspect("hf://org/name").tensors}


def asked(hub: Hub) -> int:
    """How often bytes of weights were asked for since the last time."""
    count = len(hub.asked("GET", "/cdn/"))
    hub.seen.clear()
    return count


def kept() -> list[Path]:
    return sorted(headers._folder().iterdir())


def test_the_next_look_fetches_no_header(hub: Hub, shards: list[bytes]) -> None:
    first = look()
    assert asked(hub) == 4 and len(kept()) == 4 and len(first) == 4
    assert look() == first
    assert asked(hub) == 0
    # Another commit has other files: what is kept is that of a digest.
    hub.commit("org/name", {"model-00002-of-00004.safetensors": save({"layers.1.weight": torch.zeros(10, 4)})})
    assert look() == first | {"layers.1.weight": (10, 4)}
    assert asked(hub) == 1
    assert headers._folder().stat().st_mode & 0o777 == 0o700
    # The whole files are fetched and compared with their digests all the same.
    ckpttool.verify("hf://org/name")
    assert asked(hub) == 4


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:50] + b"x" + data[51:], lambda _: b""])
def test_a_damaged_copy_is_fetched_again(hub: Hub, shards: list[bytes], damage: object) -> None:
    first = look()
    for path in kept():
        path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    asked(hub)
    assert look() == first and asked(hub) == 4
    assert look() == first and asked(hub) == 0


def test_a_damaged_header_is_not_kept(hub: Hub, shards: list[bytes]) -> None:
    """One that the server sends damaged once."""
    digest = next(file for file in hub.store.iterdir() if file.read_bytes() == shards[0])
    digest.write_bytes(shards[0][:8] + b"#" + shards[0][9:])
    with pytest.raises(CkptError):
        ckpttool.open("hf://org/name").tensors["layers.0.weight"].numpy()
    digest.write_bytes(shards[0])
    assert len(look()) == 4


def test_what_is_kept_is_bounded(hub: Hub, shards: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    look()
    size = max(path.stat().st_size for path in kept())
    assert size <= 32 + (64 << 10)
    monkeypatch.setattr(cache, "_MOST", 2 * size)
    hub.commit("org/name", {"model-00002-of-00004.safetensors": save({"layers.1.weight": torch.zeros(10, 4)})})
    look()
    assert len(kept()) <= 3 and sum(path.stat().st_size for path in kept()) <= 2 * size


def test_nothing_is_kept_where_it_is_not_wanted(hub: Hub, shards: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    look()
    asked(hub)
    monkeypatch.setenv("CKPTTOOL_HUB_NO_CACHE", "1")
    look()
    assert asked(hub) == 4


def test_a_folder_that_cannot_be_written(hub: Hub, shards: list[bytes], tmp_path: Path) -> None:
    Path(constants.HF_ASSETS_CACHE).write_text("not a folder")
    assert len(look()) == 4
