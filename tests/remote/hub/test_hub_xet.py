"""Faults of the store behind Xet, which a library in Rust speaks to: its address is what the Hub says it is, so that it
can be a server of ours."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils._xet import XET_CONNECTION_INFO_CACHE, abort_xet_session
from safetensors.torch import load, save, save_file
from support.hub_client import patience
from support.hub_server import WRITER, Hub, drop, halve, spoil, stall

import ckpttool
from ckpttool.errors import RemoteError
from ckpttool.remote.hub import xet

FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "401": ({"status": 401}, r"\(401\)"),
    "403": ({"status": 403}, r"\(403\)"),
    "503": ({"status": 503}, r"a server error.*\(503\)"),
    "drop": ({"act": drop}, "cannot be (read|written): the connection to the storage of large files broke"),
    "stall": ({"act": stall}, "broke or timed out"),
}


@pytest.fixture
def store(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub with a store of ours, and a client that does not try for minutes. The library reads its environment once
    for each session."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    patience(monkeypatch, 0.5)
    for name, value in {
        "RETRY_MAX_ATTEMPTS": "2", "RETRY_BASE_DELAY": "50ms", "READ_TIMEOUT": "500ms", "CONNECT_TIMEOUT": "500ms",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"HF_XET_CLIENT_{name}", value)
    hub.cas = True
    abort_xet_session()
    yield hub
    abort_xet_session()


def check(error: RemoteError) -> None:
    """One of ours, with the next thing to do, and nothing secret."""
    assert error.exit_code == 8 and error.hint
    assert "?" not in error.message and "xet-token" not in error.message and WRITER not in error.message
    # The address of the Hub may be there.
    message = re.sub(r"`http://127\.0\.0\.1:\d+`", "", error.message)
    assert message.startswith("`hf://") and "://" not in message[6:]
    if not re.search("within|broke", error.message):
        assert "are not" not in error.hint or ("sent" in error.hint) == ("written" in error.message)


@pytest.mark.parametrize("fault", FAULTS)
def test_sending(store: Hub, tmp_path: Path, fault: str) -> None:
    how, said = FAULTS[fault]
    store.make("me/model", {"config.json": b"{}"})
    before = store.history("me/model")
    for method in ("GET", "POST", "PUT", "HEAD"):
        store.fail(method, "^/cas/", **how)
    save_file({"w": torch.randn(300, 300)}, tmp_path / "x.safetensors")
    with pytest.raises(RemoteError, match=said) as raised:
        ckpttool.export(tmp_path / "x.safetensors", "hf://me/model")
    check(raised.value)
    # What it asks first may fail, and each of its requests is tried three times at most.
    assert 1 <= store.failed <= 9 and store.history("me/model") == before
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_reading(store: Hub, tmp_path: Path, fault: str) -> None:
    how, said = FAULTS[fault]
    store.make("org/name", {"model.safetensors": save({"w": torch.randn(300, 300)})})
    for method in ("GET", "POST", "HEAD"):
        store.fail(method, "^/cas/", **how)
    with pytest.raises(RemoteError, match=said) as raised:
        ckpttool.convert("hf://org/name", tmp_path / "out.pt")
    check(raised.value)
    assert 1 <= store.failed <= 9 and not (tmp_path / "out.pt").exists()
    assert os.listdir(tmp_path / "tmp") == []


JOBS = {
    "send": lambda folder: ckpttool.export(folder / "x.safetensors", "hf://me/model"),
    "receive": lambda folder: ckpttool.convert("hf://org/name", folder / "out.pt"),
}


@pytest.mark.parametrize(("job", "where"), [("send", "^/cas/"), ("receive", "^/cas/"), ("send", "/xet-write-token/")])
def test_a_store_that_is_silent_for_ever(
    store: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, job: str, where: str
) -> None:
    """It is told, and given up after the time-out, while the library would try for minutes."""
    for name, value in {"RETRY_MAX_ATTEMPTS": "5", "READ_TIMEOUT": "900s", "CONNECT_TIMEOUT": "900s"}.items():
        monkeypatch.setenv(f"HF_XET_CLIENT_{name}", value)
    monkeypatch.setattr(xet, "TELL_AFTER", 0.5)
    abort_xet_session()
    save_file({"w": torch.randn(300, 300)}, tmp_path / "x.safetensors")
    store.make("org/name", {"model.safetensors": (tmp_path / "x.safetensors").read_bytes()})
    for method in ("GET", "POST", "PUT", "HEAD"):
        store.fail(method, where, act=stall)
    patience(monkeypatch, 1)
    with pytest.raises(RemoteError, match=r"(timed out|within).*1 s") as raised:
        JOBS[job](tmp_path)
    assert store.failed
    check(raised.value)
    assert caplog.messages == ["the storage of large files has been silent for 0.5 s; it is given up after 1 s"]
    # What comes next has a session that works.
    store.faults.clear()
    store.cas = False
    ckpttool.export(tmp_path / "x.safetensors", "hf://me/other")
    assert store.history("me/other") == ["Upload with ckpttool", "initial commit"]


# What a request meets, whether the job succeeds all the same, and where that is otherwise.
UNREAD = "/chunks/|/xorb-grants/|/v2/"  # the client reads the status alone, 404 here, and none of the first
MET: dict[str, tuple[dict[str, Any], bool, str]] = {
    "503": ({"status": 503, "times": 1}, True, "nowhere"),
    "500": ({"status": 500, "times": 1}, True, "nowhere"),
    "429": ({"status": 429, "times": 1, "headers": {"Retry-After": "1"}}, True, "nowhere"),
    "drop": ({"act": drop, "times": 1}, True, "nowhere"),
    "truncated": ({"act": halve, "times": 1}, True, "nowhere"),
    "answer lost": ({"after": True, "times": 1}, True, "nowhere"),
    # For the answer about shards, the library itself waits for ever; a silent Hub is given up after one time-out.
    "silent": ({"act": stall, "times": 1}, True, "/v1/shards|/xet-(read|write)-token/"),
    # A signed link is asked for again.
    "403": ({"status": 403, "times": 1}, False, "/chunks/|^/xorb/"),
    "403 for ever": ({"status": 403}, False, "/chunks/"),
    "429 for an hour": ({"status": 429, "headers": {"Retry-After": "3600"}}, False, "/chunks/"),
    "truncated for ever": ({"act": halve}, False, UNREAD),
    "another byte": ({"act": spoil}, False, UNREAD),
}
SHORT = ("503", "truncated", "403", "429 for an hour", "another byte")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("met", [pytest.param(met, marks=() if met in SHORT else pytest.mark.long) for met in MET])
@pytest.mark.parametrize("job", JOBS)
def test_at_every_request(store: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, met: str) -> None:
    how, succeeds, except_at = MET[met]
    monkeypatch.setenv("HF_XET_XORB_COMPRESSION_POLICY", "none")
    # A request that is not answered is made again before the transfer is given up.
    monkeypatch.setenv("HF_XET_CLIENT_READ_TIMEOUT", "200ms")
    patience(monkeypatch, 3)
    save_file({"w": torch.randn(300, 300)}, tmp_path / "x.safetensors")
    data, out = (tmp_path / "x.safetensors").read_bytes(), tmp_path / "out.pt"

    def run() -> RemoteError | None:
        for left in (store.store, tmp_path / "cache", tmp_path / "xet"):
            shutil.rmtree(left, ignore_errors=True)
        store.store.mkdir()
        store.repos.clear()
        store.xorbs.clear()
        store.seen.clear()
        store.failed = 0
        store.make("org/name", {"model.safetensors": data})
        out.unlink(missing_ok=True)
        abort_xet_session()
        XET_CONNECTION_INFO_CACHE.clear()
        if job == "send":
            shutil.rmtree(store.store)
            store.store.mkdir()
        try:
            JOBS[job](tmp_path)
        except RemoteError as error:
            check(error)
            assert not out.exists()
            assert job == "receive" or store.history("me/model") == ["initial commit"]
            return error
        if job == "receive":
            assert torch.equal(torch.load(out)["w"], load(data)["w"])
        else:
            assert torch.equal(load(store.files("me/model")["model.safetensors"])["w"], load(data)["w"])
            assert store.history("me/model") == ["Upload with ckpttool", "initial commit"]
        return None

    assert run() is None
    paths = ((one.method, re.sub("[0-9a-f]{20,}", "[0-9a-f]+", one.path.partition("?")[0])) for one in store.seen)
    made = [(method, path) for method, path in dict.fromkeys(paths) if re.search("^/cas/|^/xorb/|/xet-", path)]
    assert len(made) == {"send": 6, "receive": 5}[job]
    for method, path in made:
        store.faults.clear()
        store.fail(method, rf"^{path}(\?|$)", **how)
        error = run()
        assert store.failed, path
        if met == "another byte" and re.search("/xet-(read|write)-token/", path):
            continue  # of this answer, the headers are read
        assert (error is None) == (succeeds != bool(re.search(except_at, path))), (path, error)
        assert error is None or met != "another byte" or not path.startswith("/xorb/") or "not the one" in error.message


def test_a_file_that_is_given_up_leaves_the_session_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that does not exist yet waits for the session: it is aborted once it is there, and nothing else."""
    aborted: list[str] = []
    monkeypatch.setattr(xet._xet, "abort_xet_session", lambda: aborted.append("session"))
    monkeypatch.setattr(xet, "_POLL", 0.01)
    stopped, answered = threading.Event(), threading.Event()

    class Commit:
        def __enter__(self) -> None:
            for _ in range(500):
                if aborted:
                    raise RuntimeError("aborted")
                time.sleep(0.01)

        def abort(self) -> None:
            aborted.append("transfer")

        def progress(self) -> None:
            return None

    def create() -> Commit:
        stopped.set()
        answered.wait(0.2)
        assert aborted == []
        return Commit()

    with xet.watched(stopped), pytest.raises(RuntimeError, match="aborted"), xet._Transfer(create):
        pass
    assert aborted == ["transfer"]
