"""The Hub as a source: what is opened from there is what lies here, and no more of it is fetched than is looked at."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants, hf_hub_download
from safetensors.torch import load_file, save_file
from support.hub_client import check_told_to_nobody, everything_logged, patience
from support.hub_server import READER, Handler, Hub, cut, drop, freeze, stall
from support.paths import CHECKPOINTS, all_samples
from typer.testing import CliRunner

import ckpttool
from ckpttool.catalogue.entries import Catalogue
from ckpttool.cli.app import application
from ckpttool.errors import CkptError, CorruptError, RemoteError, UsageError
from ckpttool.remote.hub import address, blocks, store

SOME = [
    "dcp/fsdp2_w2", "dcp/single", "dcp/zstd_w2", "hf/sharded_w2", "rank/fsdp1_w2", "rank/fsdp2_w2", "torch/full",
    "run/accelerate_fsdp2_sharded_w2", "run/trainer", "run/torchtitan_w2", "torch/legacy", "torch/tar",
]  # fmt: skip


def large(mib: int = 4, prefix: str = "") -> bytes:
    """A safetensors file of some MiB in many tensors."""
    import safetensors.torch

    made = {f"{prefix}layers.{i}.weight": torch.randn(256, 1024) for i in range(mib)}
    return safetensors.torch.save(made, metadata={"format": "pt"})


def fetched(hub: Hub) -> int:
    """Bytes that left the store of large files."""
    return sum(one.sent for one in hub.asked("GET", "/cdn/"))


def outline(catalogue: Catalogue) -> list[tuple[object, ...]]:
    tensors = [(t.path, t.dtype.name, t.shape, str(t.part), len(t.chunks)) for t in catalogue.tensors]
    objects = [(o.path, repr(o.value)) for o in catalogue.objects if o.is_read]
    return [*tensors, *objects, catalogue.format, catalogue.world_size]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", SOME)
def test_it_is_what_lies_here(hub: Hub, tmp_path: Path, name: str) -> None:
    if not (CHECKPOINTS / name).exists():
        pytest.skip("no such sample")
    check_same(hub, tmp_path, name)


@pytest.mark.long
def test_every_sample_is_what_lies_here(hub: Hub, tmp_path: Path) -> None:
    for name in all_samples():
        check_same(hub, tmp_path / name, name)


def check_same(hub: Hub, folder: Path, name: str) -> None:
    """Opened, shown and converted from the Hub, a sample is what it is from the disk."""
    repo = f"org/{name.replace('/', '_')}"
    hub.make(repo, CHECKPOINTS / name)
    src, here = f"hf://{repo}", str(CHECKPOINTS / name)
    below = [p for p in ("ckpt.pt", "ckpt", "run") if (CHECKPOINTS / name / p).exists()]
    if below:
        src, here = f"{src}/{below[0]}", f"{here}/{below[0]}"
    try:
        expected = outline(ckpttool.inspect(here))
    except CkptError as error:
        with pytest.raises(type(error)) as raised:
            ckpttool.inspect(src)
        assert raised.value.message.replace(src, here) == error.message.replace(str(CHECKPOINTS / name), here)
        return
    assert outline(ckpttool.inspect(src)) == expected
    with ckpttool.open(src) as far, ckpttool.open(here) as near:
        try:
            tensors = [*near.tensors()]
        except CkptError as error:
            with pytest.raises(type(error)):
                list(far.tensors())
            return
        for one, other in zip(far.tensors(), tensors, strict=True):
            try:
                expected_bits = other.bits()
            except CkptError as error:  # of what only one rank saved
                with pytest.raises(type(error)):
                    one.bits()
                continue
            np.testing.assert_array_equal(one.bits(), expected_bits)
    try:
        ckpttool.convert(here, folder / "near.pt")
    except CkptError:
        return
    ckpttool.convert(src, folder / "far.pt")
    assert (folder / "far.pt").read_bytes() == (folder / "near.pt").read_bytes()


def test_inspect_reads_headers_and_no_weights(hub: Hub) -> None:
    files = {f"model-0000{i}-of-00003.safetensors": large(prefix=f"{i}.") for i in (1, 2, 3)}
    hub.make("org/name", files)
    catalogue = ckpttool.inspect("hf://org/name")
    assert sum(t.nbytes for t in catalogue.tensors) > 11 << 20
    assert fetched(hub) <= 3 * (64 << 10), "a block of each file"
    assert len(hub.asked("GET", "/cdn/")) == 3
    assert not os.path.exists(constants.HF_HUB_CACHE) or not any(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))


def test_show_reads_one_tensor(hub: Hub) -> None:
    data = large(8)
    hub.make("org/name", {"model.safetensors": data})
    shown = ckpttool.show("hf://org/name/model.safetensors", "layers.3.weight")
    assert shown.chunks[0][1] == "model.safetensors"
    assert shown.nbytes <= fetched(hub) <= shown.nbytes + 3 * (64 << 10)


def test_convert_takes_each_file_once(hub: Hub, tmp_path: Path) -> None:
    data = large()
    hub.make("org/name", {"model.safetensors": data, "config.json": b"{}"})
    ckpttool.convert("hf://org/name", tmp_path / "ckpt", to="dcp", to_world=8)
    assert len(data) <= fetched(hub) <= len(data) + (64 << 10)
    back = tmp_path / "back.safetensors"
    ckpttool.convert(tmp_path / "ckpt", back)
    (tmp_path / "given.safetensors").write_bytes(data)
    expected = load_file(tmp_path / "given.safetensors")
    found = load_file(back)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Again: from the cache.
    before = fetched(hub)
    ckpttool.convert("hf://org/name", tmp_path / "again.pt")
    assert fetched(hub) == before


def told(*words: str) -> str:
    """What `ckpttool words...` says, on one line."""
    done = CliRunner().invoke(application(), list(words))
    assert done.exit_code == 0, (done.output, done.exception)
    return " ".join(done.output.split())


def test_what_is_said_to_be_checked_was(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of safetensors has no checksums, but the Hub knows its digest, with which it is compared."""
    hub.make("org/name", {"model.safetensors": large(2), "config.json": b"{}"})
    said = told("convert", "hf://org/name", str(tmp_path / "out.pt"))
    assert "checked checksums of 2.10 MB of the source" in said and "without a checksum" not in said
    assert ".gitattributes" not in said, "no part of the model"
    said = told("verify", "hf://org/name")
    assert "checked 1 checksum over 2.10 MB" in said and "without a checksum" not in said
    # As it is without the Hub.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "checked checksums of 2.10 MB" in told("convert", "hf://org/name", str(tmp_path / "again.pt"))
    # The same file, when nobody knows what it should be.
    (tmp_path / "here.safetensors").write_bytes(large(2))
    assert "no checksums in the source (2.10 MB unverified)" in told(
        "convert", str(tmp_path / "here.safetensors"), str(tmp_path / "here.pt")
    )
    assert "2.10 MB without checksums" in told("verify", str(tmp_path / "here.safetensors"))


def test_checksums_of_the_file_itself_are_compared_too(hub: Hub, tmp_path: Path) -> None:
    torch.save({"w": torch.randn(300, 1000), "v": torch.randn(10)}, tmp_path / "x.pt")
    hub.make("org/name", {"x.pt": (tmp_path / "x.pt").read_bytes()})
    said = told("convert", "hf://org/name/x.pt", str(tmp_path / "out.safetensors"))
    assert "checked checksums of 1.20 MB of the source" in said and "without" not in said
    near, far = ckpttool.verify(tmp_path / "x.pt"), ckpttool.verify("hf://org/name/x.pt")
    assert (far.checked_bytes, far.unchecked_bytes, far.records) == (near.checked_bytes, 0, near.records + 1)
    # Whole as the Hub has it, and damaged before it came there.
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[len(data) // 2] ^= 1
    hub.commit("org/name", {"x.pt": bytes(data)})
    assert [finding.kind for finding in ckpttool.verify("hf://org/name/x.pt").findings] == ["checksum"]
    with pytest.raises(CorruptError, match="CRC"):
        ckpttool.convert("hf://org/name/x.pt", tmp_path / "other.safetensors")


def test_what_does_not_arrive_is_not_called_damaged(hub: Hub) -> None:
    data = large(1)
    hub.make("org/name", {"model.safetensors": data})
    oid = hub.repos["org/name"].commits[hub.repos["org/name"].refs["main"]].files["model.safetensors"].sha256
    (hub.store / str(oid)).write_bytes(corrupt(data))
    with pytest.raises(RemoteError, match="the downloaded file is not the one on the Hub"):
        ckpttool.verify("hf://org/name")
    (hub.store / str(oid)).write_bytes(data)
    hub.fail("GET", "/cdn/", status=503, skip=1)
    with pytest.raises(RemoteError, match=r"a server error.*\(503\)"):
        ckpttool.verify("hf://org/name")


def slowly(handler: Handler) -> bool:
    """A large file in ten pieces."""
    data = (handler.hub.store / handler.route.rpartition("/")[2]).read_bytes()
    if handler.command != "GET" or handler.headers.get("Range"):
        return False
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    for at in range(0, len(data), len(data) // 10 + 1):
        handler.wfile.write(data[at : at + len(data) // 10 + 1])
        handler.wfile.flush()
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("how", ["convert", "export", "verify"])
def test_progress_counts_what_is_fetched(
    hub: Hub, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    data, told = large(2), []
    hub.make("org/name", {"model.safetensors": data})
    hub.fail("GET", "/cdn/", act=slowly)
    doing = {
        "convert": lambda: ckpttool.convert("hf://org/name", tmp_path / "out.pt", progress=lambda *n: told.append(n)),
        "export": lambda: ckpttool.export("hf://org/name", tmp_path / "out", progress=lambda *n: told.append(n)),
        "verify": lambda: ckpttool.verify("hf://org/name", progress=lambda *n: told.append(n)),
    }
    doing[how]()
    assert "%" not in capfd.readouterr().err, "the library has no bar of its own"
    values = len(data) if how == "verify" else 2 << 20
    totals, done = {total for _, total in told}, [done for done, _ in told]
    assert totals == {len(data) + values} and done == sorted(done)
    # The headers are not read again.
    assert done[-1] >= len(data) + (2 << 20) and len({n for n in done if 0 < n < len(data)}) >= 2
    # What is here already is not waited for.
    told.clear()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (tmp_path / "out.pt").unlink(missing_ok=True)
    doing[how]()
    assert {total for _, total in told} == {values}


def test_progress_over_xet() -> None:
    """The client's own reporter, told of a download as the library below it tells."""
    reporting = pytest.importorskip("huggingface_hub.utils._xet_progress_reporting")
    if not hasattr(reporting, "XetDownloadProgressReporter"):
        pytest.skip("older clients pass the bytes on themselves")
    told: list[int] = []
    bar = store.progress_bar(told.append)
    with reporting.XetDownloadProgressReporter(
        reconstruction_desc="x", total=100, log_level=20, tqdm_class=bar
    ) as reporter:
        for here, over in ((0, 30), (40, 35), (100, 80)):
            reporter.update_progress(
                SimpleNamespace(
                    total_bytes_completed=here, total_transfer_bytes_completed=over, total_bytes=100,
                    total_bytes_completion_rate=1.0, total_transfer_bytes_completion_rate=None,
                )
            )  # fmt: skip
    assert told == [0, 40, 100]


def test_a_dry_run_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.make("org/name", {"model.safetensors": large()})
    ckpttool.convert("hf://org/name", tmp_path / "ckpt", to="dcp", dry_run=True)
    assert fetched(hub) <= 64 << 10


def test_what_other_tools_cached_is_used(hub: Hub, tmp_path: Path) -> None:
    hub.make("org/name", {"model.safetensors": large(), "config.json": b"{}"})
    for name in ("model.safetensors", "config.json"):
        hf_hub_download("org/name", name, endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE)
    before = fetched(hub)
    ckpttool.inspect("hf://org/name")
    ckpttool.convert("hf://org/name", tmp_path / "out.pt")
    assert fetched(hub) == before


def test_without_the_hub_from_the_cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.make("org/name", {"model.safetensors": large(1), "config.json": b"{}"})
    for name in ("model.safetensors", "config.json"):
        path = hf_hub_download("org/name", name, endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.seen)
    ckpttool.convert("hf://org/name", tmp_path / "out.pt")
    assert len(hub.seen) == asked
    with pytest.raises(CkptError, match="is not in the cache"):
        ckpttool.inspect("hf://org/other")
    blob = Path(os.path.realpath(Path(path).with_name("model.safetensors")))
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    with pytest.raises(RemoteError, match="does not match its digest"):
        ckpttool.convert("hf://org/name", tmp_path / "other.pt")


def test_a_model_is_loaded(hub: Hub, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    hub.make("org/name", {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
    other = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    ckpttool.load("hf://org/name", other)
    for one, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, its)


def test_the_revision_is_pinned(hub: Hub, tmp_path: Path) -> None:
    first, second = large(1), large(1)
    hub.make("org/name", {"model.safetensors": first})
    old = hub.repos["org/name"].refs["main"]
    with ckpttool.open("hf://org/name") as opened:
        hub.commit("org/name", {"model.safetensors": second})
        bits = opened["layers.0.weight"].bits()
    (tmp_path / "first.safetensors").write_bytes(first)
    np.testing.assert_array_equal(bits.view(np.float32), load_file(tmp_path / "first.safetensors")["layers.0.weight"])
    ckpttool.convert(f"hf://org/name@{old}", tmp_path / "old.safetensors")
    ckpttool.convert("hf://org/name", tmp_path / "new.safetensors")
    assert not torch.equal(
        load_file(tmp_path / "old.safetensors")["layers.0.weight"],
        load_file(tmp_path / "new.safetensors")["layers.0.weight"],
    )


def test_nothing_is_left_in_the_scratch_folder(hub: Hub, tmp_path: Path) -> None:
    hub.make("org/name", {"model.safetensors": large(1)})
    ckpttool.inspect("hf://org/name")
    ckpttool.convert("hf://org/name", tmp_path / "out.pt")
    with pytest.raises(CkptError):
        ckpttool.show("hf://org/name", "not there")
    assert os.listdir(tmp_path / "tmp") == []


# What can be wrong --------------------------------------------------------------------------------------------------


def corrupt(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[-5] ^= 0xFF
    return bytes(changed)


def test_a_body_of_the_right_size_and_other_bytes_is_refused(hub: Hub, tmp_path: Path) -> None:
    data = large(1)
    hub.make("org/name", {"model.safetensors": data})
    oid = hub.repos["org/name"].commits[hub.repos["org/name"].refs["main"]].files["model.safetensors"].sha256
    (hub.store / str(oid)).write_bytes(corrupt(data))
    with pytest.raises(RemoteError, match="the downloaded file is not the one on the Hub") as raised:
        ckpttool.convert("hf://org/name", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
    assert "hf://org/name/model.safetensors" in raised.value.message
    # The bad copy is not in the way of the next run.
    (hub.store / str(oid)).write_bytes(data)
    ckpttool.convert("hf://org/name", tmp_path / "out.pt")


def test_a_cached_file_that_has_rotted_is_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    data = large(1)
    hub.make("org/name", {"model.safetensors": data})
    blob = Path(hf_hub_download("org/name", "model.safetensors", endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE))
    real = Path(os.path.realpath(blob))
    real.chmod(0o644)
    real.write_bytes(corrupt(data))
    ckpttool.convert("hf://org/name", tmp_path / "out.safetensors")
    (tmp_path / "given.safetensors").write_bytes(data)
    given = load_file(tmp_path / "given.safetensors")
    assert all(torch.equal(given[name], tensor) for name, tensor in load_file(tmp_path / "out.safetensors").items())


@pytest.mark.parametrize(
    "text, said",
    [
        ("hf://org/none", "no such repository"),
        ("hf://org/name@none", "no such revision"),
        ("hf://org/name/none.safetensors", "no such file or folder"),
        ("hf://org", "is not an address on the Hub"),
        ("hf://org/name/../x", "is not a path in a repository"),
        ("hf://datasets/org/name", "datasets are not supported"),
        ("hf://org/na--me..", "hf://org/na--me.."),
    ],
)
def test_what_is_not_there(hub: Hub, text: str, said: str) -> None:
    hub.make("org/name", {"model.safetensors": large(1)})
    with pytest.raises((RemoteError, UsageError)) as raised:
        ckpttool.inspect(text)
    assert said in raised.value.message
    assert raised.value.hint


def test_who_may_not_read(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.make("org/secret", {"model.safetensors": large(1)}, private=True)
    ckpttool.inspect("hf://org/secret")
    monkeypatch.setenv("HF_TOKEN", READER)
    ckpttool.inspect("hf://org/secret")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(RemoteError, match=r"the token is not valid.*401"):
        ckpttool.inspect("hf://org/secret")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "absent"))
    with pytest.raises(RemoteError, match="no such repository, or you have no access"):
        ckpttool.inspect("hf://org/secret")


FAULTS = {
    "401": ({"status": 401}, "token|no such repository"),
    "404": ({"status": 404}, r"\(404\)|no such"),
    "409": ({"status": 409}, r"\(409\)"),
    "412": ({"status": 412}, r"\(412\)"),
    "403": ({"status": 403}, r"\(403\)"),
    "429": ({"status": 429, "headers": {"Retry-After": "0"}}, r"too many requests.*\(429\)"),
    "500": ({"status": 500}, r"a server error.*\(500\)"),
    "503": ({"status": 503}, r"a server error.*\(503\)"),
    "drop": ({"act": drop}, "the connection to the Hub broke"),
    "stall": ({"act": stall}, "does not answer within 0.3 s"),
    # In the middle of the weights, after the header.
    "cut": ({"act": cut, "skip": 1}, "the connection to the Hub broke"),
    "freeze": ({"act": freeze, "skip": 1}, "does not answer within 0.3 s"),
}
INFO, TREE, STORE = "/revision/|/api/models/org/name$", "/tree/", "/cdn/"
RARE = ("401", "404", "409", "412")


def _combinations() -> Iterator[Any]:
    for where in (INFO, TREE, STORE):
        for fault in FAULTS:
            if where == STORE or fault not in ("cut", "freeze"):
                seldom = fault in RARE and where != STORE
                yield pytest.param(where, fault, marks=pytest.mark.long if seldom else ())


@pytest.mark.parametrize("where, fault", [*_combinations()])
def test_what_the_hub_may_do(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, where: str) -> None:
    how, said = FAULTS[fault]
    hub.make("org/name", {"model.safetensors": large(1)})
    hub.fail("GET", where, **how)
    if fault in ("stall", "freeze"):
        patience(monkeypatch, 0.3)
    with pytest.raises(RemoteError, match=said) as raised:
        ckpttool.convert("hf://org/name", tmp_path / "out.pt")
    assert raised.value.hint
    assert raised.value.exit_code == 8
    assert "hf://org/name" in raised.value.message
    assert "?" not in raised.value.message, "an address may have a signature in it"
    assert not (tmp_path / "out.pt").exists()
    assert os.listdir(tmp_path / "tmp") == []
    # How long it took, were each try as long as it may be.
    assert 1 <= hub.failed <= 6 and sum(hub.slept) <= 31


@pytest.mark.parametrize("fault", [cut, freeze])
def test_what_stops_in_the_middle_is_gone_on_with(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Handler], bool]
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    if fault is freeze:
        patience(monkeypatch, 0.3)
    data = large(1)
    hub.make("org/name", {"model.safetensors": data})
    hub.fail("GET", STORE, act=fault, skip=1, times=2)
    ckpttool.convert("hf://org/name", tmp_path / "out.pt")
    assert hub.failed == 2 and hub.asked("GET", STORE)[-1].sent < len(data) // 2


def test_the_token_is_told_to_nobody(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.make("org/secret", {"model.safetensors": large(1), "config.json": b"{}"}, private=True)
    monkeypatch.setenv("HF_DEBUG", "1")
    said = []
    with everything_logged() as log:
        for where, fault in (("org/secret$", "401"), (TREE, "403"), (STORE, "503"), (STORE, "cut"), (TREE, "drop")):
            hub.faults.clear()
            hub.fail("GET", where, **FAULTS[fault][0])
            done = CliRunner().invoke(application(), ["convert", "hf://org/secret", str(tmp_path / "out.pt"), "--json"])
            assert done.exit_code == 8
            said.append(done.output)
        hub.faults.clear()
        for words in (["convert", "hf://org/secret", str(tmp_path / "out.pt")], ["verify", "hf://org/secret", "-v"]):
            said.append(told(*words))
    check_told_to_nobody([*said, *capfd.readouterr()], log, tmp_path, hub)
    assert not any(one.authorization for one in hub.asked("GET", STORE)), "but not to another host"


def test_a_server_that_is_not_there(hub: Hub) -> None:
    hub.close()
    with pytest.raises(RemoteError, match="cannot be reached"):
        ckpttool.inspect("hf://org/name")


def test_samples_of_two_models_are_fetched_at_the_same_time(hub: Hub, tmp_path: Path) -> None:
    """`check --content` does not wait for the server once for each sample, and fetches no block twice."""
    save_file({f"layers.{i}.weight": torch.randn(1024, 1024) for i in range(2)}, tmp_path / "model.safetensors")
    hub.make("org/name", {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
    several = threading.Barrier(4)

    def wait(handler: Handler) -> bool:
        several.wait(timeout=60)
        return False

    hub.fail("GET", "^/cdn/", act=wait, skip=1, times=8)
    fits = ckpttool.check(tmp_path / "model.safetensors", "hf://org/name", content=True)
    assert (fits.verdict, fits.compared, fits.similarity) == ("fits", 2, pytest.approx(1.0))
    assert hub.failed == 8
    assert fetched(hub) <= 17 * blocks.BLOCK


def test_a_block_that_another_thread_could_not_fetch_is_fetched_again(hub: Hub) -> None:
    hub.make("org/name", {"model.safetensors": large(1)})
    location = store.locate("hf://org/name") / "model.safetensors"
    found: list[int] = []

    def read() -> None:
        buffer = memoryview(bytearray(100))
        try:
            found.append(location.store.read_into(location.name, blocks.BLOCK, buffer))
        except RemoteError:
            found.append(0)

    hub.fail("GET", "/model.safetensors", status=404, times=1)
    with closing(location.store):
        readers = [threading.Thread(target=read) for _ in range(4)]
        for one in readers:
            one.start()
        for one in readers:
            one.join()
    assert sorted(found) == [0, 100, 100, 100]


def test_hf_is_not_a_folder(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is not on this machine"):
        ckpttool.repair(CHECKPOINTS / "dcp/single/ckpt", "hf://org/name")
    assert not (tmp_path / "hf:").exists()


def test_nothing_of_the_client_is_imported_for_a_file(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    code = "import sys, ckpttool as v; v.inspect(sys.argv[1]); assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.safetensors")], check=True, timeout=300)


@pytest.mark.parametrize(
    "text, repo, revision, path",
    [
        ("hf://org/name", "org/name", None, ""),
        ("hf://org/name/", "org/name", None, ""),
        ("hf://org/name@v1.0", "org/name", "v1.0", ""),
        ("hf://org/name@refs/pr/3/step-1", "org/name", "refs/pr/3", "step-1"),
        ("hf://org/name@feature%2Fx/a/b.pt", "org/name", "feature/x", "a/b.pt"),
        ("hf://models/org/name/a", "org/name", None, "a"),
    ],
)
def test_addresses(text: str, repo: str, revision: str | None, path: str) -> None:
    found = address.parse(text)
    assert (found.repo, found.revision, found.path) == (repo, revision, path)
    assert address.parse(str(found)) == found
    assert not re.search(r"/$", str(found))
