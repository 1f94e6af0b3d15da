"""Faults at every request of an upload and of a download: what passes is tried again, and what does not is told."""

from __future__ import annotations

import functools
import json
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save, save_file
from support.hub_client import patience
from support.hub_server import Handler, Hub, drop, stall
from support.paths import CHECKPOINTS
from typer.testing import CliRunner

import ckpttool
from ckpttool.cli.app import application
from ckpttool.errors import RemoteError, UsageError
from ckpttool.remote.hub import client

TENSOR = torch.arange(90_000.0).reshape(300, 300)


def run(*words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(application(), [*words, "--json"])
    return done.exit_code, json.loads(done.stdout)


def send(hub: Hub, folder: Path) -> dict[str, Any] | None:
    """Export to a new repository. The error, if there was one; a repeated run must succeed then."""
    save_file({"w": TENSOR}, folder / "x.safetensors")
    return sent(hub, *run("export", str(folder / "x.safetensors"), "hf://me/model"))


def sent(hub: Hub, code: int, result: dict[str, Any]) -> dict[str, Any] | None:
    if code:
        if "me/model" in hub.repos:
            assert hub.history("me/model") in (["initial commit"], ["Upload with ckpttool", "initial commit"])
        return {"code": code, **result["error"]}
    assert hub.history("me/model") == ["Upload with ckpttool", "initial commit"], "one commit"
    return None


def convert(hub: Hub, folder: Path) -> dict[str, Any] | None:
    """Convert to a new repository, as `send` exports; nothing is left on this machine."""
    done = run("convert", str(CHECKPOINTS / "dcp/hsdp_w4/ckpt"), "hf://me/model/step-1", "--to", "dcp")
    assert list((folder / "tmp").iterdir()) == []
    return sent(hub, *done)


def receive(hub: Hub, folder: Path) -> dict[str, Any] | None:
    hub.make("me/model", {"config.json": b"{}", "model.safetensors": save({"w": TENSOR})})
    for left in (folder / "cache", folder / "out.safetensors"):
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    code, result = run("convert", "hf://me/model", str(folder / "out.safetensors"))
    if code:
        assert not (folder / "out.safetensors").exists()
        return {"code": code, **result["error"]}
    assert torch.equal(load_file(folder / "out.safetensors")["w"], TENSOR)
    return None


JOBS: dict[str, Callable[[Hub, Path], dict[str, Any] | None]] = {"send": send, "convert": convert, "receive": receive}


def html(handler: Handler) -> bool:
    return other(handler, b"<!DOCTYPE html><html><body>Please log in</body></html>")


def other(handler: Handler, data: bytes) -> bool:
    handler._drain()
    handler._answer(200, data, {"Content-Type": "text/html" if data.startswith(b"<") else "application/json"})
    return True


# What each fault does, and whether the job succeeds all the same.
FAULTS: dict[str, tuple[dict[str, Any], bool]] = {
    "503": ({"status": 503, "times": 1}, True),
    "429": ({"status": 429, "times": 1, "headers": {"Retry-After": "3"}}, True),
    "500": ({"status": 500, "times": 1}, True),
    "drop": ({"act": drop, "times": 1}, True),
    "answer lost": ({"after": True, "times": 1}, True),
    "503 for ever": ({"status": 503}, False),
    "429 for an hour": ({"status": 429, "headers": {"Retry-After": "3600"}}, False),
    "html": ({"act": html}, False),
} | {
    f"shape {data.decode()}": ({"act": functools.partial(other, data=data)}, False)
    for data in (b"[]", b"null", b'{"error": 1}', b'[{"path": 1}]', b'"x"')
}  # fmt: skip
# Those of each kind: what passes, what stays, and what is not an answer. Xet repeats the rest as LFS does.
BRIEF = {
    ("send", "lfs"): {"503", "429", "drop", "answer lost", "503 for ever", "429 for an hour", "html", "shape []"},
    ("send", "xet"): {"503", "answer lost", "503 for ever"},
    ("receive", "lfs"): {"503", "drop", "503 for ever", "html", "shape []", 'shape [{"path": 1}]'},
}
# The client needs no answer to these, or not this one, or Xet repeats them by itself.
OPTIONAL = re.compile(r"/validate-yaml|/lfs-verify|^/lfs/|/cdn/|/resolve/|/xet-write-token/")


def requests(hub: Hub) -> list[tuple[str, str]]:
    """Those that were made, each once."""
    found = ((one.method, one.path.partition("?")[0]) for one in hub.seen if "agent-harnesses" not in one.path)
    return list(dict.fromkeys(found))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("job", "transport", "fault"),
    [
        pytest.param(job, transport, fault, marks=[pytest.mark.long] * (fault not in BRIEF.get((job, transport), ())))
        for job, transport in (*BRIEF, ("convert", "lfs"), ("convert", "xet"))
        for fault in FAULTS
    ],
)
def test_at_every_request(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, transport: str, fault: str
) -> None:
    if transport == "xet":
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
        monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "2")
        monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "20ms")

    def reset() -> None:
        hub.faults.clear()
        hub.seen.clear()
        hub.slept.clear()
        hub.repos.clear()
        for stored in (hub.store, hub.xet):
            shutil.rmtree(stored, ignore_errors=True)
            stored.mkdir()

    reset()
    assert JOBS[job](hub, tmp_path) is None
    made = requests(hub)
    assert len(made) >= 5
    how, succeeds = FAULTS[fault]
    for method, path in made:
        reset()
        hub.failed = 0
        hub.fail(method, rf"^{re.escape(path)}(\?|$)", **how)
        error = JOBS[job](hub, tmp_path)
        assert hub.failed, (method, path)
        where = f"{fault} at {method} {path}: {error}, slept {hub.slept}"
        if succeeds:
            assert error is None, where
            if fault == "429":
                assert max(hub.slept, default=0) >= 3 or OPTIONAL.search(path), where
        elif error is None:
            # An empty list is one of the files of a new repository.
            assert OPTIONAL.search(path) or (fault == "shape []" and "/tree/" in path), where
        else:
            if error["code"] == 3 and fault == "shape []" and "/tree/" in path:
                assert "an empty directory" in error["message"]
                continue
            assert error["code"] == 8 and error["hint"], where
            assert "Signature" not in error["message"] and "\n" not in error["message"], where
            # The client tries six times itself, and must not be repeated in its turn; files are sent three at once.
            assert len(hub.slept) < (36 if job == "convert" else 12), where


def test_a_link_that_expired_is_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    # Of a range, and of a whole file.
    for skip in (0, 1):
        hub.seen.clear()
        hub.faults.clear()
        hub.fail("GET", "^/cdn/", status=403, times=1, skip=skip)
        assert receive(hub, tmp_path) is None
        assert [one.status for one in hub.asked("GET", "^/cdn/")].count(403) == 1
    hub.seen.clear()
    hub.fail("PUT", "^/lfs/", status=403, times=1)
    hub.repos.clear()
    shutil.rmtree(hub.store)
    hub.store.mkdir()
    assert send(hub, tmp_path) is None
    assert len(hub.asked("POST", "/objects/batch")) == 2


@pytest.mark.parametrize("endpoint", ["notaurl", "ftp://x", "http://", "http://[", "http://h:x"])
def test_an_endpoint_that_is_none(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UsageError, match=re.escape(f"`HF_ENDPOINT` is not the address of a server: `{endpoint}`")):
        client.api()


def test_what_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    """Refused, no such name, and a proxy that is not there."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    patience(monkeypatch, 5)
    for variables, said in (
        ({"HF_ENDPOINT": "http://user:secret@127.0.0.1:9"}, r"`http://127\.0\.0\.1:9`: .*[Rr]efused"),
        ({"HF_ENDPOINT": "http://nowhere.invalid"}, r"`http://nowhere\.invalid`: .*(not known|resolution|hostname)"),
        (
            {"HF_ENDPOINT": "http://hub.example", "HTTP_PROXY": "http://user:secret@127.0.0.1:9"},
            r"`http://hub\.example` by the proxy `http://127\.0\.0\.1:9`: .*[Rr]efused",
        ),
    ):
        with monkeypatch.context() as changed:
            for name, value in variables.items():
                changed.setenv(name, value)
            patience(changed, 5)
            with pytest.raises(RemoteError, match=f"the Hub cannot be reached: {said}") as raised:
                ckpttool.open("hf://me/model")
            assert "secret" not in raised.value.message and "HF_ENDPOINT" in str(raised.value.hint)
    assert not hub.slept, "told at once"


@pytest.mark.parametrize(
    ("job", "method", "path"),
    [("receive", "GET", "/tree/"), ("send", "POST", "/preupload/"), ("send", "POST", "/objects/batch")],
)
def test_a_silent_hub_is_given_up_in_time(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, method: str, path: str
) -> None:
    """Also at the requests that the library itself tries six times."""
    hub.fail(method, path, act=stall)
    patience(monkeypatch, 0.3)
    error = JOBS[job](hub, tmp_path)
    assert error is not None and error["code"] == error["exit_code"] == 8 and hub.failed == 1
    assert error["kind"] == "remote" and "CKPTTOOL_HUB_TIMEOUT" in error["hint"]
    assert "does not answer within 0.3 s: `http://127.0.0.1" in error["message"]


def test_headers_of_many_shards_are_fetched_at_the_same_time(hub: Hub) -> None:
    """Those of a few are in flight together, each is asked for once, and no weights are."""
    in_flight: list[int] = []
    now = [0]

    def count(handler: Handler) -> bool:
        with hub.lock:
            now[0] += 1
            in_flight.append(now[0])
        time.sleep(0.05)
        with hub.lock:
            now[0] -= 1
        return False

    names = [f"model-{i + 1:05d}-of-00012.safetensors" for i in range(12)]
    weight_map = {f"layers.{i}": name for i, name in enumerate(names)}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    files = {name: save({f"layers.{i}": torch.ones(300, 300)}) for i, name in enumerate(names)}
    hub.make("me/model", {**files, "model.safetensors.index.json": index})
    hub.fail("GET", "^/cdn/", act=count)
    with ckpttool.open("hf://me/model") as checkpoint:
        assert set(checkpoint) == set(weight_map)
    assert max(in_flight) >= 6 and len(hub.asked("GET", "^/cdn/")) == 12
    assert sum(one.sent for one in hub.asked("GET", "^/cdn/")) <= 12 << 16


def test_a_server_that_ignores_ranges_is_stopped(hub: Hub) -> None:
    """Once it has sent the bytes that were asked for, of a file that would be 256 MB in memory."""
    ends = {"before": 20 << 20, "w": (20 << 20) + 5, "after": 256 << 20}
    entries = {
        name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for (name, end), start in zip(ends.items(), (0, *ends.values()), strict=False)
    }
    header = json.dumps(entries).encode()
    head = len(header).to_bytes(8, "little") + header
    size = len(head) + ends["after"]
    hub.make("me/model", {})
    hub.commit("me/model", {"model.safetensors": hub.pointer("0" * 64, size)})
    sent = []

    def whole(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(size))
        handler.end_headers()
        handler.wfile.write(head)
        sent.append(len(head))
        piece = bytes(1 << 20)
        with pytest.raises(ConnectionError):
            while sent[-1] < size:
                handler.wfile.write(piece)
                sent[-1] += len(piece)
        return True

    hub.fail("GET", "^/cdn/", act=whole)
    tracemalloc.start()
    try:
        assert ckpttool.show("hf://me/model", "w").nbytes == 5
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The rest fills the buffers of two sockets.
    assert len(sent) == 2 and sent[0] < 24 << 20 and 20 << 20 <= sent[1] < 48 << 20
    assert peak < 24 << 20
