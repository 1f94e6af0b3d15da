"""A client of the key-value store that `torchrun` keeps for its processes, `torch.distributed.TCPStore`, without torch.

    connect    VALIDATE magic, PING nonce                  -> nonce
    set        SET key value
    get        CHECK 1 key, until it is there; GET key     -> value
    add        ADD key number                              -> number
    check      CHECK count keys                            -> 0 if all are there

A request begins with a byte for its kind; keys and values have their length before them, in 8 bytes. Numbers are
little-endian, as processors are. The protocol has been that since torch 2.1; a server that does not answer the ping is
of another version, and torch itself is asked then.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_VALIDATE, _SET, _GET, _ADD, _CHECK, _PING = 0, 1, 3, 4, 5, 13
_MAGIC = 0x3C85F7CE
_NONCE = b"ckpt"
_ANSWER = 10.0  # seconds that a server takes to answer, at most
_AGAIN = 1.0  # seconds in which a connection that was lost is made again
_POLL = 0.05
_MOST = 64 << 20  # bytes of a value: more is no answer of this protocol


class UnknownProtocolError(Exception):
    """A server does not speak the protocol."""


class TorchrunStore:
    """A connection to the store at an address, which threads may share. Keys are below `prefix`.

    Raises ConnectionError if the store cannot be reached within `timeout` seconds, and from all methods if it is gone;
    UnknownProtocolError if the server is another one.
    """

    def __init__(self, host: str, port: int, prefix: str, *, timeout: float) -> None:
        self.address, self.prefix = (host, port), prefix
        self._lock, self._timeout = threading.Lock(), timeout
        self._socket: socket.socket | None = self._connected(timeout)

    def set_timeout(self, timeout: float) -> None:
        """Set after how many seconds a value that is not there is an error."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        data = value.encode() if isinstance(value, str) else value
        with self._asked(_SET, self._key(key) + struct.pack("<Q", len(data)) + data):
            pass

    def get(self, key: str) -> bytes:
        """Return a value, as soon as it is there. Raises ConnectionError if it does not come."""
        until = time.monotonic() + self._timeout
        while not self.check([key]):
            if time.monotonic() > until:
                raise ConnectionError(f"`{key}` is not in the store of torchrun after {self._timeout:.0f} s")
            time.sleep(_POLL)
        with self._asked(_GET, self._key(key)) as answer:
            (size,) = struct.unpack("<Q", _received(answer, 8))
            if size > _MOST:
                raise ConnectionError(f"the store of torchrun has a value of {size} bytes for `{key}`")
            return _received(answer, size)

    def add(self, key: str, number: int) -> int:
        """Add to a number, 0 if it is not there, and return the sum."""
        with self._asked(_ADD, self._key(key) + struct.pack("<q", number)) as answer:
            return int(struct.unpack("<q", _received(answer, 8))[0])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys are there."""
        with self._asked(_CHECK, struct.pack("<Q", len(keys)) + b"".join(map(self._key, keys))) as answer:
            return _received(answer, 1) == b"\0"

    def _key(self, key: str) -> bytes:
        data = f"/{self.prefix}/{key}".encode()
        return struct.pack("<Q", len(data)) + data

    @contextmanager
    def _asked(self, kind: int, request: bytes) -> Iterator[socket.socket]:
        """Send a request, and let its answer be read. A signal in between leaves a connection on which the rest of an
        answer would be taken for the next one, so that there is a new one then."""
        with self._lock:
            try:
                if self._socket is None:
                    self._socket = self._connected(_AGAIN)
                self._socket.sendall(bytes([kind]) + request)
                yield self._socket
            except BaseException as error:
                if self._socket is not None:
                    self._socket.close()
                self._socket = None
                if isinstance(error, (OSError, UnknownProtocolError)):
                    raise ConnectionError(f"the store of torchrun is gone: {error}") from error
                raise

    def _connected(self, timeout: float) -> socket.socket:
        until = time.monotonic() + timeout
        while True:
            try:
                found = socket.create_connection(self.address, timeout=_ANSWER)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise ConnectionError(str(error)) from error
                time.sleep(_POLL)
        try:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found.sendall(struct.pack("<BI", _VALIDATE, _MAGIC) + bytes([_PING]) + _NONCE)
            answer = _received(found, len(_NONCE))
        except OSError as error:
            found.close()
            raise UnknownProtocolError(f"{self.address}: {error}") from error
        if answer != _NONCE:
            found.close()
            raise UnknownProtocolError(f"{self.address} answers a ping with {answer.hex()}")
        return found


def _received(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return bytes(data)
