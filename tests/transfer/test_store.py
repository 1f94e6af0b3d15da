"""The client of torchrun's store, beside torch's own on the same server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from ckpttool.transfer import store
from ckpttool.transfer.store import TorchrunStore, UnknownProtocolError

SECONDS = timedelta(seconds=60)


@pytest.fixture(params=[True, False], ids=["libuv", "plain"])
def server(request: pytest.FixtureRequest) -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, None, True, SECONDS, wait_for_workers=False, use_libuv=request.param)


def connected(server: TCPStore, prefix: str = "job0") -> TorchrunStore:
    return TorchrunStore("127.0.0.1", server.port, prefix, timeout=60)


def test_what_it_says_is_what_torch_understands(server: TCPStore) -> None:
    ours, theirs = connected(server), PrefixStore("job0", TCPStore("127.0.0.1", server.port, None, False, SECONDS))
    large = bytes(range(256)) * 16_000
    ours.set("a", "text")
    theirs.set("b", large)
    ours.set("c", large)
    ours.set("empty", b"")
    assert (theirs.get("a"), ours.get("b") == large, theirs.get("c") == large, ours.get("empty")) == (
        b"text",
        True,
        True,
        b"",
    )
    assert (ours.add("n", 3), theirs.add("n", -5), ours.add("n", 0)) == (3, -2, -2)
    assert (ours.check(["a", "b"]), ours.check(["a", "absent"]), ours.check([])) == (True, False, True)
    assert not connected(server, "job1").check(["a"])


def test_a_value_is_waited_for_until_it_is_an_error(server: TCPStore) -> None:
    ours, other = connected(server), connected(server)
    threading.Timer(0.2, other.set, ("late", "1")).start()
    assert ours.get("late") == b"1"
    ours.set_timeout(0.1)
    with pytest.raises(ConnectionError, match="`absent` is not in the store of torchrun"):
        ours.get("absent")
    assert ours.check(["late"])


def test_threads_share_a_connection(server: TCPStore) -> None:
    ours = connected(server)
    threads = [threading.Thread(target=lambda: [ours.add("n", 1) for _ in range(50)]) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert ours.add("n", 0) == 200


def test_an_answer_that_was_not_read_is_no_answer_to_what_is_asked_next(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = connected(server)
    ours.set("a", "1")

    def interrupted(connection: socket.socket, size: int) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_received", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours.add("n", 7)
    time.sleep(0.05)
    assert (ours.get("a"), ours.add("n", 0)) == (b"1", 7)


def test_another_server_is_none_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_ANSWER", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(UnknownProtocolError):  # it says nothing
            TorchrunStore("127.0.0.1", port, "job0", timeout=60)
        threading.Thread(target=lambda: [listening.accept()[0].sendall(b"HTTP/1.1 400\r\n") for _ in range(2)]).start()
        with pytest.raises(UnknownProtocolError):
            for _ in range(2):
                TorchrunStore("127.0.0.1", port, "job0", timeout=60)
    with pytest.raises(ConnectionError):
        TorchrunStore("127.0.0.1", port, "job0", timeout=0.1)


def test_a_store_that_is_gone_is_an_error_at_once() -> None:
    own = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with own.accept()[0] as client:
            client.recv(64)
            client.sendall(store._NONCE)
            own.close()

    thread = threading.Thread(target=answer)
    thread.start()
    ours = TorchrunStore("127.0.0.1", own.getsockname()[1], "job0", timeout=60)
    thread.join()
    with pytest.raises(ConnectionError, match="the store of torchrun is gone"):
        ours.check(["a"])
