"""Checkpoints in buckets: what is read is what is read from a disk, by few requests, and every failure is said."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.cli import run
from support.paths import CHECKPOINTS
from support.s3_server import Fault, Request, S3Server, error

import ckpttool
from ckpttool.errors import CkptError, MissingPackageError, RemoteError, UsageError
from ckpttool.storage.stores import locate

SAMPLES = {
    "dcp": "dcp/fsdp2_w4/ckpt",
    "safetensors": "safetensors/indexed/ckpt",
    "torch": "torch/full/ckpt.pt",
    "rank": "rank/fsdp1_w4/ckpt",
    "run": "run/accelerate_fsdp2_sharded_w2/ckpt",
}


@pytest.mark.parametrize("name", SAMPLES.values(), ids=SAMPLES)
def test_a_checkpoint_is_the_same(name: str, server: S3Server, tmp_path: Path) -> None:
    local = CHECKPOINTS / name
    address = server.put(f"a run/{name}", local)
    here, there = (ckpttool.inspect(one) for one in (str(local), address))
    assert here.format == there.format and list(here.entries) == list(there.entries)
    listed = [one for one in server.requests if "?" in one]
    assert len(listed) == 1 and len(server.requests) < 16
    ckpttool.convert(str(local), tmp_path / "one.pt")
    ckpttool.convert(address, tmp_path / "two.pt", check=True)
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()


def test_commands(server: S3Server, tmp_path: Path) -> None:
    local = str(CHECKPOINTS / "dcp/fsdp2_w4/ckpt")
    address = server.put("run7/step-1000", Path(local))
    for words in (["show", "model.lm_head.weight"], ["stats"], ["verify"], ["inspect", "--depth", "9"]):
        one, two = (run(words[0], path, *words[1:]) for path in (local, address))
        assert two.exit_code == one.exit_code == 0, two.stderr
    assert run("diff", local, address).exit_code == 0
    assert run("inspect", "s3://bucket/run7").exit_code == 0
    assert run("export", address, str(tmp_path / "model"), "--no-strict").exit_code in (0, 2, 5)
    state = ckpttool.open(address)["model"]
    expected = torch.load(CHECKPOINTS / "dcp/fsdp2_w4/reference.pt", weights_only=False)["model"]
    for name, tensor in expected.items():
        assert torch.equal(state[name].torch(), tensor)


def test_a_model_is_loaded(server: S3Server, tmp_path: Path) -> None:
    model, other = torch.nn.Linear(30, 30), torch.nn.Linear(30, 30)
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    ckpttool.load(server.put("run/model.pt", tmp_path / "model.pt"), other)
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(UsageError, match="web servers are only read"):
        ckpttool.save("https://host/new", other)


def test_small_tensors_between_large_ones_are_read_with_them(server: S3Server, tmp_path: Path) -> None:
    state = {f"{i}.{name}": torch.rand(n) for i in range(8) for name, n in (("norm", 512), ("weight", 1 << 19))}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    address = server.put("run/step-1", tmp_path / "ckpt")
    ckpttool.convert(address, tmp_path / "all.pt", threads=1)  # the order of several is not the same each time
    read = torch.load(tmp_path / "all.pt")
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    gets = [one for one in server.requests if one.startswith("GET") and "distcp" in one]
    assert len(gets) < 13 and server.sent < 18 << 20  # 16 MiB; each small tensor by itself would be 17 requests


def test_patterns_and_markers(server: S3Server, tmp_path: Path) -> None:
    """Browsers of buckets put empty objects where a folder is to be seen."""
    for rank in range(2):
        torch.save({"w": torch.full((2, 2), float(rank))}, tmp_path / f"rank{rank}.pt")
        server.put(f"run/step-1/rank{rank}.pt", tmp_path / f"rank{rank}.pt")
    server.put("run/step-1/", b"")
    server.put("run/", b"")
    assert [one.key for one in locate("s3://bucket/run/step-*/rank?.pt").matches()] == [
        "run/step-1/rank0.pt",
        "run/step-1/rank1.pt",
    ]
    assert locate("s3://bucket/run").names() == ["step-1"]
    assert run("inspect", "s3://bucket/run/step-1/rank*.pt").exit_code == 0


def test_bulk_reads_are_few_and_large(server: S3Server, tmp_path: Path) -> None:
    state = {f"w{i}": torch.rand(1 << 20) for i in range(10)} | {f"b{i}": torch.rand(8) for i in range(100)}
    save_file(state, tmp_path / "model.safetensors")
    address = server.put("model.safetensors", tmp_path / "model.safetensors")
    server.requests.clear()
    ckpttool.convert(address, tmp_path / "two.safetensors", threads=2)
    gets = [one for one in server.requests if one.startswith("GET model.safetensors")]
    assert len(gets) <= 2 + 6  # 40 MiB
    assert server.sent < 1.2 * (tmp_path / "model.safetensors").stat().st_size
    assert ckpttool.diff(tmp_path / "model.safetensors", tmp_path / "two.safetensors").same


# Failures ------------------------------------------------------------------------------------------------------


def model(server: S3Server, tmp_path: Path, nbytes: int = 3 << 20) -> str:
    torch.save({"w": torch.rand(nbytes // 4), "step": 3}, tmp_path / "model.pt")
    return server.put("run/model.pt", tmp_path / "model.pt")


def once(fault: Fault, method: str = "GET", after: int = 0) -> Any:
    """A fault of one request, the one after so many of its method."""
    left = [after + 1]

    def decide(request: Request) -> Fault | None:
        if request.method != method:
            return None
        left[0] -= 1
        return fault if left[0] == 0 else None

    return decide


PASSING = {
    "503": error(503, "SlowDown"),
    "500": error(500, "InternalError"),
    "dropped": Fault(drops=True),
    "refused": Fault(refuses=True),
    "slow": Fault(seconds=0.3),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_passes_is_repeated(fault: Fault, after: int, server: S3Server, tmp_path: Path) -> None:
    address = model(server, tmp_path)
    server.faults = [once(fault, after=after)]
    ckpttool.convert(address, tmp_path / "out.pt", check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"], torch.load(tmp_path / "model.pt")["w"])


LASTING = {
    "503": (error(503, "SlowDown"), "has failed several times"),
    "expired": (error(400, "ExpiredToken"), "credentials have expired"),
    "skewed": (error(403, "RequestTimeTooSkewed"), "clock of this machine"),
    "wrong key": (error(403, "InvalidAccessKeyId"), "credentials are not valid"),
    "denied": (error(403, "AccessDenied"), "do not allow this"),
    "elsewhere": (error(301, "PermanentRedirect"), "another region"),
    "dropped": (Fault(drops=True), "the connection broke several times"),
    "refused": (Fault(refuses=True), "cannot be reached|connection broke"),
    "412": (error(412, "PreconditionFailed"), "changed while it was being read"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("fault", "said"), LASTING.values(), ids=LASTING)
@pytest.mark.parametrize("after", [0, 3])
def test_what_does_not_pass_is_said(
    fault: Fault, said: str, after: int, server: S3Server, tmp_path: Path
) -> None:  # fmt: skip
    address = model(server, tmp_path)
    seen: list[Request] = []

    def always(request: Request) -> Fault | None:
        seen.append(request)
        return fault if len(seen) > after and request.method == "GET" else None

    server.faults = [always]
    with pytest.raises(CkptError, match=said) as raised:
        ckpttool.convert(address, tmp_path / "out.pt")
    assert address in str(raised.value)
    for secret in ("AKIDOFTESTS", "s3cretOfTests", "127.0.0.1"):
        assert secret not in f"{raised.value} {raised.value.facts}"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model.pt"]


def test_a_listing_that_is_none(server: S3Server, tmp_path: Path) -> None:
    model(server, tmp_path)
    server.faults = [lambda request: Fault(changes="list-type" in request.query)]
    with pytest.raises(RemoteError, match="the answer is not that of an object store"):
        ckpttool.inspect("s3://bucket/run")


def test_wrong_bytes_are_found_by_the_checksums_of_the_file(server: S3Server, tmp_path: Path) -> None:
    address = model(server, tmp_path)
    server.faults = [lambda request: Fault(changes=True) if request.method == "GET" else None]
    with pytest.raises(CkptError):
        ckpttool.convert(address, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_an_object_that_changes_is_an_error(server: S3Server, tmp_path: Path) -> None:
    address = model(server, tmp_path)
    other = bytearray((tmp_path / "model.pt").read_bytes())
    other[1 << 20] ^= 1
    asked: list[str] = []

    def change(request: Request) -> Fault | None:
        if request.method == "GET" and request.name:
            asked.append(request.headers.get("range", ""))
            if len(asked) == 2:
                server.put("run/model.pt", bytes(other))
        return None

    server.faults = [change]
    with pytest.raises(RemoteError, match="changed while it was being read"):
        ckpttool.convert(address, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_server_that_says_nothing_is_given_up(server: S3Server, tmp_path: Path, monkeypatch: Any) -> None:
    address = model(server, tmp_path)
    monkeypatch.setenv("CKPTTOOL_CLOUD_TIMEOUT", "0.2")
    monkeypatch.setattr("ckpttool.remote.cloud.address.RETRIES", 0)
    server.faults = [lambda request: Fault(seconds=1) if request.method == "GET" else None]
    with pytest.raises(RemoteError, match="does not answer in time"):
        ckpttool.inspect(address)


def test_what_is_not_there(server: S3Server, tmp_path: Path) -> None:
    model(server, tmp_path)
    for address, said in (
        ("s3://bucket/run/nothing", "no such object or folder"),
        ("s3://bucket/run/modle.pt", r"did you mean `s3://bucket/run/model.pt`\?"),
        ("s3://elsewhere/run", "`s3://elsewhere`: there is no such bucket"),
    ):
        with pytest.raises(RemoteError, match=said):
            ckpttool.inspect(address)
    for address in ("s3://", "s3://bucket//x", "s3://bucket/a/../b", "s3://me@bucket/x"):
        with pytest.raises(UsageError):
            ckpttool.inspect(address)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("ckpttool.remote.cloud")]:
        monkeypatch.delitem(sys.modules, name)
    for where in ("importlib.util", "ckpttool.errors"):
        monkeypatch.setattr(f"{where}.find_spec", lambda name: None)
    for address in ("s3://bucket/run", "gs://bucket/run", "az://container/run", "https://host/x.safetensors"):
        with pytest.raises(MissingPackageError, match=r"pip install 'ckpttool\[cloud\]'"):
            ckpttool.inspect(address)


# Web servers and file systems ------------------------------------------------------------------------------------


class Ranges(SimpleHTTPRequestHandler):
    """A file by ranges, for those who know the signature."""

    serves_ranges = True

    def do_HEAD(self) -> None:
        self.send_error(403)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        data = Path(self.directory, path.lstrip("/")).read_bytes()
        if query != "Signature=t0psecret":
            self.send_error(403)
            return
        first, last = (int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1] if self.serves_ranges else data
        self.send_response(206 if self.serves_ranges else 200)
        if self.serves_ranges:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Last-Modified", "Thu, 26 Nov 2026 20:00:00 GMT")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("serves_ranges", [True, False])
def test_a_file_of_a_web_server(serves_ranges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(Ranges, "serves_ranges", serves_ranges)
    (tmp_path / "web" / "a").mkdir(parents=True)
    save_file({"w": torch.rand(1 << 18)}, tmp_path / "web" / "a" / "model.safetensors")
    web = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(tmp_path / "web")))
    threading.Thread(target=web.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{web.server_address[1]}/a/model.safetensors"
    try:
        signed = f"{address}?Signature=t0psecret"
        done = run("inspect", signed, "--json")
        assert "t0psecret" not in done.stdout + done.stderr
        assert done.exit_code == (0 if serves_ranges else 8), done.stderr
        if serves_ranges:
            assert json.loads(done.stdout)["path"] == address
            ckpttool.convert(signed, tmp_path / "out.safetensors")
            assert ckpttool.diff(tmp_path / "out.safetensors", tmp_path / "web/a/model.safetensors").same
        else:
            assert "does not serve ranges" in done.stdout
    finally:
        web.shutdown()


def test_other_schemes_are_read_by_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    folder = CHECKPOINTS / "safetensors/indexed/ckpt"
    for path in folder.iterdir():
        memory.pipe_file(f"/run/{path.name}", path.read_bytes())
    ckpttool.convert("memory://run", tmp_path / "one.pt")
    ckpttool.convert(str(folder), tmp_path / "two.pt")
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()
    with pytest.raises(RemoteError, match="no such file or directory"):
        ckpttool.inspect("memory://nothing")
    with pytest.raises(UsageError, match="only read"):
        ckpttool.convert(str(folder), "memory://out")


def test_what_is_no_state_is_copied_from_a_store(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    torch.save({"w": torch.arange(3)}, tmp_path / "a.pt")
    torch.save({"w": torch.arange(4)}, tmp_path / "b.pt")
    notes = bytes(range(32, 127)) * 30_000  # of several blocks
    for name, data in {"a.pt": None, "b.pt": None, "notes.md": notes}.items():
        memory.pipe_file(f"/own/{name}", (tmp_path / name).read_bytes() if data is None else data)
    ckpttool.convert("memory://own", tmp_path / "same", producer="same")
    assert (tmp_path / "same/notes.md").read_bytes() == notes
    assert torch.load(tmp_path / "same/b.pt")["w"].tolist() == [0, 1, 2, 3]


def test_the_indexes_of_a_run_are_asked_for_at_once(server: S3Server) -> None:
    for n in range(12):
        server.put(f"run/step-{n}", CHECKPOINTS / "dcp/fsdp2_w4/ckpt")
    running, most, lock = [0], [0], threading.Lock()

    def count(request: Request) -> Fault | None:
        if not request.name.endswith(".metadata"):
            return None
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.2)
        with lock:
            running[0] -= 1
        return None

    server.faults = [count]
    ckpttool.inspect("s3://bucket/run")
    assert most[0] >= 6
    indexes = [one for one in server.requests if one.endswith(".metadata")]
    assert len(indexes) == 12 and len([one for one in server.requests if "list-type" in one]) == 1
