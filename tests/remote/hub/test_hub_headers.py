"""Headers that are kept for the next look, and what a look at one tensor fetches."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load, save
from support.hub_server import Handler, Hub

import ckpttool
from ckpttool.errors import CkptError, CorruptError, RemoteError, UsageError
from ckpttool.remote.hub import headers
from ckpttool.storage import cache


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
    """The kept headers; beside them are the index, the config, and the files of the revision."""
    contents = {path: path.read_bytes()[32:] for path in sorted(headers._folder().iterdir())}
    return [path for path, data in contents.items() if data[8:9] == b"{"]


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
    with pytest.raises(CorruptError, match="begins with b'#'"):
        look()
    digest.write_bytes(shards[0])
    asked(hub)
    assert len(look()) == 4 and len(kept()) == 4


def test_what_is_kept_is_bounded(hub: Hub, shards: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    look()
    size = max(path.stat().st_size for path in kept())
    assert len(list(headers._folder().iterdir())) == 4 + 4
    assert size <= 32 + (64 << 10)
    monkeypatch.setattr(cache, "_MAX_SIZE", 2 * size)
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


def shards_asked(hub: Hub) -> list[str]:
    """The files whose bytes were asked for since the last time."""
    paths = [one.path.partition("n=")[2] for one in hub.asked("GET", "/cdn/")]
    hub.seen.clear()
    return paths


def test_one_tensor_needs_one_header(hub: Hub, shards: list[bytes]) -> None:
    third = "model-00003-of-00004.safetensors"
    shown = ckpttool.show("hf://org/name", "layers.2.weight")
    assert shown.shape == (200, 200) and shown.chunks[0].file == third
    assert set(shards_asked(hub)) == {third}
    with ckpttool.open("hf://org/name") as checkpoint:
        tensor = checkpoint["layers.1.weight"]
        assert shards_asked(hub) == ["model-00002-of-00004.safetensors"]
        # Whoever needs those of two files needs all, which are fetched together; but the third is kept.
        other = checkpoint["layers.3.weight"]
        assert sorted(shards_asked(hub)) == ["model-00001-of-00004.safetensors", "model-00004-of-00004.safetensors"]
        assert len(checkpoint) == 4 and "layers.4.weight" not in checkpoint
        for i, one in ((1, tensor), (3, other)):
            assert torch.equal(one.torch(), load(shards[i])[f"layers.{i}.weight"])
            again = pickle.loads(pickle.dumps(one))
            assert torch.equal(again.torch(), one.torch())


def test_one_tensor_needs_no_header_of_the_pieces(hub: Hub, shards: list[bytes]) -> None:
    """torch's writer leaves them in `sharded/`; those of a tensor in a file that was not read are no other save."""
    pieces = {f"layers.{i}.weight": torch.zeros(200, 200) for i in range(4)}
    offsets = json.dumps({name: {"saved_offsets": [0, 0]} for name in pieces})
    metadata = {"DCP_SHARDING_INFO": offsets, "DCP_VERSION": "1.0", "format": "pt"}
    hub.commit("org/name", {"sharded/shard-00001-model-00001-of-00001.safetensors": save(pieces, metadata)})
    assert len(look()) == 4
    asked(hub)
    assert torch.equal(ckpttool.open("hf://org/name")["layers.2.weight"].torch(), load(shards[2])["layers.2.weight"])


def test_a_look_at_one_tensor_takes_nothing_on_trust(hub: Hub, shards: list[bytes]) -> None:
    """Its file must be there, and have it; a name that the index does not have is looked for in all headers."""
    names = {f"layers.{i}.weight": f"model-0000{i + 1}-of-00004.safetensors" for i in range(4)}
    wrong = {**names, "layers.2.weight": names["layers.1.weight"]}
    index = "model.safetensors.index.json"
    hub.commit("org/name", {index: json.dumps({"weight_map": wrong, "metadata": {"head": "layers.0.weight"}}).encode()})
    for read in (lambda: ckpttool.show("hf://org/name", "layers.2.weight"), look):
        with pytest.raises(CorruptError, match=r"says that tensor `layers.2.weight` is in `model-00002.*, (but|which)"):
            read()
    # It is in another file than the one that the index names, which says nothing of the others.
    assert ckpttool.show("hf://org/name", "layers.0.weight").shape == (200, 200)
    assert ckpttool.show("hf://org/name", "head").shape == (200, 200)
    unlisted = {tensor: file for tensor, file in names.items() if tensor != "layers.3.weight"}
    more = {**load(shards[2]), "layers.3.weight": torch.zeros(2)}
    hub.commit("org/name", {index: json.dumps({"weight_map": unlisted}).encode(), names["layers.2.weight"]: save(more)})
    assert ckpttool.show("hf://org/name", "layers.3.weight").shape == (2,)
    with pytest.raises(UsageError, match=r"no tensor `layers\.9\.weight`"):
        ckpttool.show("hf://org/name", "layers.9.weight")
    hub.commit("org/name", {index: json.dumps({"weight_map": {**names, "x": "model-5.safetensors"}}).encode()})
    with pytest.raises(CorruptError, match=r"is not there, but the index names it"):
        ckpttool.show("hf://org/name", "layers.2.weight")
    with pytest.raises(CorruptError, match=r"is not there, but the index names it"):
        ckpttool.open("hf://org/name")


def test_scales_are_looked_for_in_all_headers(hub: Hub, shards: list[bytes]) -> None:
    """A quantized weight whose scale is in no file stays an error."""
    weight_map = {"a.weight": "x-00001-of-00002.safetensors", "b.weight_scale_inv": "x-00002-of-00002.safetensors"}
    files = {file: save({tensor: torch.zeros(4, 4)}) for tensor, file in weight_map.items()}
    hub.make("org/fp8", {**files, "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()})
    hub.seen.clear()
    with contextlib.suppress(CkptError):
        ckpttool.show("hf://org/fp8", "a.weight")
    assert len(set(shards_asked(hub))) == 2


def test_kept_headers_are_read_offline(hub: Hub, shards: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the model is in the cache of the library: what an earlier look fetched is enough for another."""
    first = look()
    oid = hub.repos["org/name"].refs["main"]
    hub.seen.clear()
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert look() == first
        tensors = ckpttool.inspect(f"hf://org/name@{oid}").tensors
        assert {tensor.name: tuple(tensor.shape) for tensor in tensors} == first
        with pytest.raises(RemoteError, match="`HF_HUB_OFFLINE` disables"):
            ckpttool.verify("hf://org/name")
        with pytest.raises(CkptError, match="not in the cache"):
            ckpttool.inspect("hf://org/name@another")
        offline.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(CkptError, match="not in the cache"):
            look()
    assert not hub.seen
    # The branch is at another commit, which a look notices; the one before is known by its hash only.
    hub.commit("org/name", {"model-00002-of-00004.safetensors": save({"layers.1.weight": torch.zeros(10, 4)})})
    second = look()
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert look() == second != first
        tensors = ckpttool.inspect(f"hf://org/name@{oid}").tensors
        assert {tensor.name: tuple(tensor.shape) for tensor in tensors} == first
        # Damaged, it is as if it were not kept.
        for path in headers._folder().glob("revision-*"):
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        with pytest.raises(CkptError, match="not in the cache"):
            look()


def test_an_index_that_was_damaged_on_the_way_is_not_kept(hub: Hub, shards: list[bytes]) -> None:
    assert len(look()) == 4
    data = hub.files("org/name")["model.safetensors.index.json"]
    entry = next(p for p in headers._folder().iterdir() if p.read_bytes()[32:] == data)
    entry.unlink()
    changed = data.replace(b"layers.3", b"layers.5")

    def lie(handler: Handler) -> bool:
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(changed)))
        handler.send_header("Content-Range", f"bytes 0-{len(changed) - 1}/{len(changed)}")
        handler.end_headers()
        handler.wfile.write(changed)
        return True

    hub.fail("GET", "index.json", act=lie)
    with pytest.raises(CorruptError, match=r"layers\.5\.weight"):
        look()
    hub.faults.clear()
    assert not entry.exists() and len(look()) == 4 and entry.exists()


@pytest.mark.parametrize(
    "kept", [b"[" * 200_000, b"[", b"3", b"[3]", b'["c", [[]]]', b'["c", [3]]', b'["c", {"a": 1}]', b"\xff"]
)
def test_a_listing_of_somebody_else_is_none(kept: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path))
    headers._write(headers._of_revision("https://hub", "org/name", "main"), kept)
    assert headers.load_listing("https://hub", "org/name", "main") == ("main", {})


@pytest.mark.parametrize("header", [b'{"a":' + b"[" * 200_000, b'{"a":[' + b"[]," * 2_000_000 + b"[]]}", b"[]"])
def test_a_header_of_somebody_else_is_none(header: bytes) -> None:
    assert not headers._is_header(header, len(header))
