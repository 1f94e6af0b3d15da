"""A bucket of the Hub as a source: what is opened from there is what lies here, of the bytes that were listed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save
from support.hub_client import check_told_to_nobody, everything_logged
from support.hub_server import READER, STRANGER, Handler, Hub, cut
from support.paths import CHECKPOINTS
from test_hub_reading import fetched, large, outline, told

import ckpttool
from ckpttool.errors import CkptError, CorruptError, ReadError, RemoteError, UsageError
from ckpttool.storage.stores import locate

pytestmark = pytest.mark.skipif(huggingface_hub.__version__ < "2", reason="earlier clients do not know what failed")

SOME = ["dcp/zstd_w2", "hf/sharded_w2", "rank/fsdp1_w2", "torch/full", "run/accelerate_fsdp2_sharded_w2", "run/trainer"]


@pytest.mark.parametrize("name", SOME)
def test_it_is_what_lies_here(hub: Hub, tmp_path: Path, name: str) -> None:
    # What has the same letters before it is another run.
    files = {p.relative_to(CHECKPOINTS / name): p.read_bytes() for p in (CHECKPOINTS / name).rglob("*") if p.is_file()}
    hub.make_bucket("org/name", {f"run{i}/{p.as_posix()}": data for i in ("", "2") for p, data in files.items()})
    below = [p for p in ("ckpt.pt", "ckpt", "run") if (CHECKPOINTS / name / p).exists()][:1]
    src, here = "/".join(["hf://buckets/org/name/run", *below]), "/".join([str(CHECKPOINTS / name), *below])
    assert outline(ckpttool.inspect(src)) == outline(ckpttool.inspect(here))
    assert len(hub.asked("GET", "/tree")) <= 2
    ckpttool.convert(here, tmp_path / "near.pt")
    ckpttool.convert(src, tmp_path / "far.pt")
    assert (tmp_path / "far.pt").read_bytes() == (tmp_path / "near.pt").read_bytes()
    assert os.listdir(tmp_path / "tmp") == []


def test_what_is_looked_at_is_what_is_read(hub: Hub, tmp_path: Path) -> None:
    data = large(8)
    hub.make_bucket("org/name", {"step-1/model.safetensors": data, "step-1/config.json": b"{}"})
    ckpttool.inspect("hf://buckets/org/name/step-1")
    assert fetched(hub) <= (64 << 10) + 2
    shown = ckpttool.show("hf://buckets/org/name/step-1/model.safetensors", "layers.3.weight")
    assert shown.nbytes <= fetched(hub) <= shown.nbytes + 5 * (64 << 10)
    before = fetched(hub)
    assert ckpttool.verify("hf://buckets/org/name/step-1").checked_bytes == 8 << 20
    assert len(data) <= fetched(hub) - before <= len(data) + (64 << 10), "each byte once"
    model = torch.nn.Linear(1024, 256, bias=False)
    hub.put_in_bucket("org/name", {"one.safetensors": save({"weight": torch.ones(256, 1024)})})
    ckpttool.load("hf://buckets/org/name/one.safetensors", model)
    assert torch.equal(model.weight, torch.ones(256, 1024))


def test_headers_are_kept_by_the_hash(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTTOOL_HUB_NO_CACHE")
    hub.make_bucket("org/name", CHECKPOINTS / "hf/sharded_w2/ckpt")
    address = "hf://buckets/org/name"
    first = outline(ckpttool.inspect(address))
    before = fetched(hub)
    assert outline(ckpttool.inspect(address)) == first and fetched(hub) == before > 0
    files = hub.in_bucket("org/name")
    hub.put_in_bucket("org/name", {name: data.replace(b'"F32"', b'"I32"') for name, data in files.items()})
    assert outline(ckpttool.inspect(address)) != first


def test_the_newest_complete_step_of_a_run(hub: Hub) -> None:
    """Of one listing."""
    sample = {p.name: p.read_bytes() for p in (CHECKPOINTS / "dcp/single/ckpt").iterdir()}
    steps = {f"run/step-{n}/{name}": data for n in (5, 10, 20) for name, data in sample.items()}
    del steps["run/step-20/.metadata"]  # is being written
    hub.make_bucket("org/name", steps | {"run-old/step-30/.metadata": b"", "latest": b"x"})
    catalogue = ckpttool.inspect("hf://buckets/org/name/run")
    assert catalogue.location == "hf://buckets/org/name/run/step-10"
    assert len(hub.asked("GET", "/tree")) == 1
    assert "step-20" in told("inspect", "hf://buckets/org/name/run")


def test_a_bucket_of_many_files(hub: Hub) -> None:
    hub.make_bucket("org/name", {f"a/{i}": b"%d" % i for i in range(120)})
    location = locate("hf://buckets/org/name/a")
    assert len(location.names()) == 120 and (location / "77").read() == b"77"
    location.store.close()


def test_ranks_beside_a_file(hub: Hub) -> None:
    """A file of one rank is a part of what all have: the folders beside its own are listed, too."""
    ranks = sorted((CHECKPOINTS / "rank/fsdp2_w2/ckpt").glob("model_*.pt"))
    hub.make_bucket("org/name", {f"rank_{i}/model.pt": path.read_bytes() for i, path in enumerate(ranks)})
    alone, both = "hf://buckets/org/name/rank_0/model.pt", "hf://buckets/org/name/rank_*/model.pt"
    assert outline(ckpttool.inspect(alone)) == outline(ckpttool.inspect(both))
    assert ckpttool.inspect(alone).world_size == 2


def test_equal_hashes_are_equal_bytes(hub: Hub) -> None:
    """`diff` reads no weights that lie in files with the same hash, nor their checksums."""
    first, second = large(1, "a."), large(1, "b.")
    index = {
        "metadata": {},
        "weight_map": {f"{x}.layers.0.weight": f"model-0000{i}-of-00002.safetensors" for i, x in ((1, "a"), (2, "b"))},
    }
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second,
             "model.safetensors.index.json": json.dumps(index).encode()}  # fmt: skip
    changed = bytearray(second)
    changed[-1] ^= 1
    hub.make_bucket("org/name", {f"{step}/{name}": data for step in "12" for name, data in files.items()})
    hub.put_in_bucket("org/name", {f"3/{name}": data for name, data in files.items()})
    hub.put_in_bucket("org/name", {"3/model-00002-of-00002.safetensors": bytes(changed)})
    hub.make("org/repo", files)
    hub.make("org/other", files)
    for one, other in (("buckets/org/name/1", "buckets/org/name/2"), ("org/repo", "org/other")):
        before = fetched(hub)
        same = ckpttool.diff(f"hf://{one}", f"hf://{other}")
        assert same.same and same.total.tensor_count == 2 and same.payload_bytes == 2 << 20
        assert same.notes == ["2.10 MB are in files with the same digest in both, and were not read"]
        assert fetched(hub) - before <= 4 * (64 << 10) + 4096
    before = fetched(hub)
    other = ckpttool.diff("hf://buckets/org/name/1", "hf://buckets/org/name/3")
    assert [one.name for one in other.tensors] == ["b.layers.0.weight"] and other.total.equal == 1
    assert fetched(hub) - before <= (2 << 20) + 4 * (64 << 10) + 4096
    # A file of this machine has no digest before it is read, and neither has one of another kind of store.
    assert ckpttool.diff("hf://org/repo", "hf://buckets/org/name/2").notes == []


def replace_it(hub: Hub) -> Callable[[Handler], bool]:
    def act(handler: Handler) -> bool:
        hub.put_in_bucket("org/name", {"model.safetensors": large(2)})
        return False

    return act


FAULTS: dict[str, tuple[str, Callable[[Hub], dict[str, object]], type[CkptError], str]] = {
    "replaced": ("/resolve/", lambda hub: {"act": replace_it(hub), "skip": 1}, ReadError, "changed while it was"),
    "removed": ("/resolve/", lambda hub: {"status": 404, "skip": 1}, RemoteError, r"does not have this address.*404"),
    "503": ("/resolve/", lambda hub: {"status": 503, "skip": 1}, RemoteError, r"server error.*\(503\)"),
    "short": ("/cdn/", lambda hub: {"act": cut, "skip": 1}, RemoteError, "bucket|broke|answer"),
    "no list": ("/tree", lambda hub: {"status": 500}, RemoteError, r"\(500\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_arrive(hub: Hub, tmp_path: Path, fault: str) -> None:
    where, how, kind, message = FAULTS[fault]
    hub.make_bucket("org/name", {"model.safetensors": large(2)})
    hub.fail("GET", where, **how(hub))
    with pytest.raises(kind, match=message) as raised:
        ckpttool.convert("hf://buckets/org/name", tmp_path / "x.pt")
    assert raised.value.hint and "hf://buckets/org/name" in raised.value.message
    assert not (tmp_path / "x.pt").exists() and os.listdir(tmp_path / "tmp") == []


def test_what_may_pass_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    hub.make_bucket("org/name", {"model.safetensors": large(1)})
    for path in ("/tree", "/resolve/", "/cdn/"):
        hub.fail("GET", path, status=503, times=1)
    ckpttool.convert("hf://buckets/org/name", tmp_path / "x.pt")
    assert hub.failed == 3


def test_bytes_of_another_file(hub: Hub, tmp_path: Path) -> None:
    """Storage that keeps other bytes than the hash says."""
    data = large(1)
    hub.make_bucket("org/name", {"model.safetensors": data})
    oid, _ = hub.of_xet[hub.buckets["org/name"].files["model.safetensors"]]
    (hub.store / oid).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RemoteError, match="the downloaded file is not the one on the Hub"):
        ckpttool.convert("hf://buckets/org/name", tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def answering(rows: object) -> Callable[[Handler], bool]:
    """A server that answers with these rows."""

    def act(handler: Handler) -> bool:
        handler._json(rows)
        return True

    return act


ROW = {"type": "file", "path": "x.pt", "size": 3, "xetHash": "a" * 64}


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        ([{**ROW, "path": "../x.pt"}], CorruptError, "outside|not a path"),
        ([{**ROW, "path": "a//x.pt"}], CorruptError, "not a path"),
        ([{**ROW, "path": 3}], RemoteError, "not a name"),
        ([{**ROW, "size": -1}], RemoteError, "with the size -1"),
        ([{**ROW, "size": "3"}], RemoteError, "with the size 3"),
        ([{**ROW, "xetHash": "../../x"}], RemoteError, "with the digest"),
        ([{**ROW, "xetHash": None}], RemoteError, "without a digest"),
        ([{"type": "file", "path": "x.pt"}], RemoteError, "does not answer as the Hub does"),
        ([ROW, {**ROW, "path": "x.pt/y"}], RemoteError, "lists `x.pt` as a file, and `x.pt/y` in it"),
        ({"error": "no list"}, RemoteError, "does not answer as the Hub does"),
    ],
)
def test_a_listing_that_no_bucket_has(hub: Hub, rows: object, kind: type[CkptError], message: str) -> None:
    hub.make_bucket("org/name")
    hub.fail("GET", "/tree", act=answering(rows))
    with pytest.raises(kind, match=message) as raised:
        ckpttool.inspect("hf://buckets/org/name")
    assert "hf://buckets/org/name" in raised.value.message


@pytest.mark.parametrize("size", ["3", "x", str(10**30)])
def test_another_size_than_was_listed(hub: Hub, size: str) -> None:
    hub.make_bucket("org/name", {"x.safetensors": large(1)})
    oid, _ = hub.of_xet[hub.buckets["org/name"].files["x.safetensors"]]

    def act(handler: Handler) -> bool:
        handler._answer(302, b"", {"Location": f"{hub.url}/cdn/{oid}", "X-Linked-Size": size})
        return True

    hub.fail("GET", "/resolve/", act=act)
    with pytest.raises(ReadError, match="changed while it was being read"):
        ckpttool.inspect("hf://buckets/org/name")


def test_who_may_read(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.make_bucket("org/name", {"model.safetensors": large(1)}, private=True)
    with everything_logged() as log:
        check_told_to_nobody([told("inspect", "hf://buckets/org/name")], log, tmp_path, hub)
    assert all(one.authorization is None for one in hub.asked("GET", "/cdn/")), "another server"
    monkeypatch.setenv("HF_TOKEN", READER)
    ckpttool.inspect("hf://buckets/org/name")
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    for address in ("hf://buckets/org/name", "hf://buckets/org/none"):
        with pytest.raises(RemoteError, match="no such bucket"):
            ckpttool.inspect(address)


def test_what_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.make_bucket("org/name", {"a/x.pt": b"x"})
    for address, kind, message in (
        ("hf://buckets/org/name@main/a", UsageError, "a bucket has no revisions"),
        ("hf://buckets/org", UsageError, "not an address"),
        ("hf://buckets/org/name/../x", UsageError, "not a path"),
        ("hf://buckets/org/name/b", RemoteError, "no such file or folder in the bucket"),
        ("https://hf.co/buckets/org/name", UsageError, "write `hf://buckets/org/name`"),
        ("https://huggingface.co/buckets/org/name/tree/run/a?x=1", UsageError, "`hf://buckets/org/name/run/a`"),
    ):
        with pytest.raises(kind) as raised:
            ckpttool.inspect(address)
        assert raised.value.hint and message in f"{raised.value.message} {raised.value.hint}"
    monkeypatch.setattr(huggingface_hub, "__version__", "1.22.0")
    with pytest.raises(UsageError, match=r"huggingface_hub 2\.0 or later, and 1\.22\.0 is installed"):
        ckpttool.inspect("hf://buckets/org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.undo()
