"""Ends transfers over Xet in which nothing moves.

The library behind Xet repeats its requests to a silent server for minutes, and says nothing meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from huggingface_hub import HfApi
from huggingface_hub.utils import _xet
from huggingface_hub.utils._http import hf_raise_for_status, http_backoff

from ckpttool.remote.hub import limits
from ckpttool.storage.gathered import GatheredFile

TELL_AFTER = 10.0  # seconds without a byte
_POLL = 0.25  # seconds between two looks at a transfer

# In the block of `watched`: the time-out in seconds, and what ends the transfer before.
_limits: ContextVar[tuple[float, threading.Event] | None] = ContextVar("_limits", default=None)
# A file that is sent as it is read in place of what the client sends, and what is called with the bytes so far.
_streamed: ContextVar[tuple[GatheredFile, Callable[[int], object]] | None] = ContextVar("_streamed", default=None)
_preparing = threading.Lock()
log = logging.getLogger("ckpttool")


@contextmanager
def watched(stopped: threading.Event | None = None) -> Iterator[None]:
    """Watch the transfers that the client makes in the block, and abort them once `stopped`."""
    with _preparing:
        _prepare()
    before = _limits.set((limits.timeout(), stopped or threading.Event()))
    try:
        yield
    finally:
        _limits.reset(before)


def has_streams() -> bool:
    """Return whether the library behind Xet takes bytes of files that are not there."""
    import hf_xet  # type: ignore[import-untyped]

    return hasattr(getattr(hf_xet, "XetUploadCommit", None), "start_upload_stream")


@contextmanager
def streamed(file: GatheredFile, report: Callable[[int], object]) -> Iterator[None]:
    """Send a file in place of the bytes that the client sends in the block, which is within one of `watched`."""
    before = _streamed.set((file, report))
    try:
        yield
    finally:
        _streamed.reset(before)


def write_access(api: HfApi, bucket: str) -> dict[str, Any]:
    """Return the arguments of a transfer to a bucket: where to send files, and the token for that, which the Hub gives
    to those only who may write. Raises the exceptions of the client."""
    headers = api._build_hf_headers()
    address = _xet.xet_connection_info_refresh_url(
        token_type=_xet.XetTokenType.WRITE, repo_id=bucket, repo_type="bucket", endpoint=api.endpoint
    )
    sent = _xet.xet_headers_without_auth(headers)
    return _connected({"token_refresh_url": address, "token_refresh_headers": headers, "custom_headers": sent})


def send(api: HfApi, bucket: str, path: str | None) -> tuple[str, int]:
    """Send a local file to the storage of a bucket, or what is `streamed` in the block around it, and return its hash
    and size. The bucket does not have it yet. Raises the exceptions of the client."""
    from hf_xet import SKIP_SHA256

    get_session: Any = _xet.get_xet_session  # as `_prepare` has left it
    with get_session().new_upload_commit(**write_access(api, bucket)) as transfer:
        if path is None:
            sending = transfer.start_upload_bytes(b"", sha256=SKIP_SHA256)
        else:
            sending = transfer.start_upload_file(path, sha256=SKIP_SHA256)
    info = sending.result().xet_info
    return str(info.hash), int(info.file_size)


@cache
def _prepare() -> None:
    get_session: Any = _xet.get_xet_session
    _xet.get_xet_session = lambda: get_session() if _limits.get() is None else _Session(get_session())


class _Session:
    """A session of Xet whose transfers are watched."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def new_upload_commit(self, **arguments: Any) -> _Transfer:
        return _Transfer(lambda: self._session.new_upload_commit(**_connected(arguments)))

    def new_file_download_group(self, **arguments: Any) -> _Transfer:
        return _Transfer(lambda: self._session.new_file_download_group(**_connected(arguments)))


def _connected(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a transfer with the address of the storage and the token for it, so that the first answer
    about them is one that is checked."""
    if arguments.get("endpoint") is not None:
        return arguments
    address, sent = arguments["token_refresh_url"], arguments["token_refresh_headers"]
    response = http_backoff("GET", address, headers=sent)
    hf_raise_for_status(response)
    found = _xet.parse_xet_connection_info_from_headers(response.headers)
    if found is None:
        raise ValueError("it gives no token for the storage of large files")
    return {
        **arguments,
        "endpoint": found.endpoint,
        "token": found.access_token,
        "token_expiry_unix_secs": found.expiration_unix_epoch,
    }


class _Streaming:
    """A transfer of one file that is sent as it is read."""

    def __init__(self, transfer: Any, file: GatheredFile, report: Callable[[int], object]) -> None:
        self._transfer, self._file, self._report = transfer, file, report

    def start_upload_bytes(self, data: bytes, **arguments: Any) -> _Streamed:
        """Send the file in place of `data`, which is empty."""
        assert not data
        stream, sent = self._transfer.start_upload_stream(**arguments), 0
        try:
            for block in self._file.blocks():
                stream.write(block)
                sent += len(block)
                self._report(sent)
            return _Streamed(stream.finish())
        except BaseException:
            with suppress(RuntimeError):
                stream.abort()
            raise


class _Streamed(NamedTuple):
    """A file that was sent."""

    metadata: Any

    def result(self) -> Any:
        """Return what the client asks for: its digest."""
        return self.metadata


class _Transfer:
    """Context manager for a transfer, which is aborted once nothing has moved for the time-out. Raises ConnectionError
    then."""

    def __init__(self, create: Callable[[], Any]) -> None:
        self._create = create
        self._transfer: Any = None
        self._streamed = _streamed.get()
        self._is_silent = False
        self._over = threading.Event()
        limits = _limits.get()
        assert limits is not None
        self._watch = threading.Thread(target=self._watch_transfer, args=limits, daemon=True)

    def __enter__(self) -> Any:
        self._watch.start()
        try:
            # It asks for a token.
            self._transfer = self._create()
            entered = self._transfer.__enter__()
            return entered if self._streamed is None else _Streaming(entered, *self._streamed)
        except BaseException as error:
            self._end(error)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> Any:
        try:
            result = self._transfer.__exit__(kind, error, trace)
        except BaseException as raised:
            self._end(raised)
            raise
        self._end(error)
        return result

    def _end(self, error: BaseException | None) -> None:
        self._over.set()
        self._watch.join()
        if error is not None and self._is_silent:
            raise ConnectionError("the transfer timed out") from error

    def _watch_transfer(self, seconds: float, stopped: threading.Event) -> None:
        before, moved, is_logged = self._moved(), time.monotonic(), False
        while not self._over.wait(min(_POLL, seconds / 4)):
            now = self._moved()
            silent = time.monotonic() - moved
            if stopped.is_set():
                # Before there is a transfer, the session waits, which others have, too.
                if self._transfer is not None:
                    self._abort()
                    return
            elif now != before:
                before, moved, is_logged = now, time.monotonic(), False
            elif silent >= seconds:
                self._is_silent = True
                self._abort()
                return
            elif silent >= TELL_AFTER and not is_logged:
                is_logged = True
                log.warning(
                    "the storage of large files has been silent for %g s; it is given up after %g s",
                    TELL_AFTER,
                    seconds,
                )

    def _abort(self) -> None:
        # Without a transfer, it is the session that waits.
        with suppress(RuntimeError):
            (_xet.abort_xet_session if self._transfer is None else self._transfer.abort)()

    def _moved(self) -> tuple[Any, ...]:
        """Return numbers that change while bytes move, or while the server reports that it works on them."""
        progress = None if self._transfer is None else self._transfer.progress()
        shard = getattr(progress, "shard", None)
        return tuple(
            getattr(part, name)
            for part in (progress, shard)
            for name in sorted(dir(part))
            if type(getattr(part, name)) is int
        )
