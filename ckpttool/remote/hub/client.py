"""The client of huggingface_hub with time-outs; by default, it waits for a silent server for ever.

The library itself finds the token and the endpoint: `HF_TOKEN`, `hf auth login`, `HF_ENDPOINT`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from logging import ERROR, LogRecord
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import HfApi, file_download
from huggingface_hub.utils import _http, logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ckpttool.errors import UsageError
from ckpttool.remote.hub import answers
from ckpttool.remote.hub.answers import http
from ckpttool.remote.hub.limits import timeout
from ckpttool.version import __version__

_sent: deque[tuple[float, int, str, str]] = deque(maxlen=256)  # time, thread, method, address of the last requests
# When the requests that are not answered were sent, by method and address, in the block of `bounded`.
_unanswered: ContextVar[dict[tuple[str, str], float] | None] = ContextVar("_unanswered", default=None)


# What ends the requests of a thread, in the block of `stoppable`.
_stopped: ContextVar[threading.Event | None] = ContextVar("_stopped", default=None)


class SilentError(http.TransportError):  # type: ignore[misc] # its type is unknown
    """Raised instead of a request that the server has not answered within the time-out, when it is to be repeated; or
    instead of any, once the thread is stopped.

    The library repeats most requests up to five times after a time-out, without a word, but not after this."""


def api() -> HfApi:
    """Return a client with time-outs. Raises UsageError if `HF_ENDPOINT` is not an address."""
    _prepare()
    endpoint = os.environ.get("HF_ENDPOINT") or None
    if endpoint is not None and not _is_address(endpoint):
        raise UsageError(
            "`HF_ENDPOINT` is not the address of a server" + ("" if "@" in endpoint else f": `{endpoint}`"),
            hint="unset it, or set `HF_ENDPOINT=https://huggingface.co`",
        )
    return HfApi(endpoint=endpoint, library_name="ckpttool", library_version=__version__)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


@contextmanager
def bounded() -> Iterator[None]:
    """Wait for one time-out at most for the answer to a request that the library makes in the block."""
    before = _unanswered.set({})
    try:
        yield
    finally:
        _unanswered.reset(before)


@contextmanager
def stoppable(stopped: threading.Event) -> Iterator[None]:
    """Make no request in the block once `stopped`. The library would repeat those that broke, and close the connections
    of other threads when it cannot connect."""
    before = _stopped.set(stopped)
    try:
        yield
    finally:
        _stopped.reset(before)


def was_repeated(request: Any, since: float) -> bool:
    """Return whether this thread has sent a request more than once since a time of `time.monotonic`."""
    key = (threading.get_ident(), request.method, str(request.url)) if request is not None else None
    return sum(sent >= since and tuple(of) == key for sent, *of in list(_sent)) > 1


def _hide_signatures(record: LogRecord) -> bool:
    record.msg, record.args = re.sub(r"(https?://[^\s?]*\?)\S+", r"\1...", record.getMessage()), ()
    return True


@cache
def _prepare() -> None:
    seconds = timeout()
    # Xet reads them when it creates its session, at the first file.
    os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{seconds:g}s")
    os.environ.setdefault("HF_XET_CLIENT_CONNECT_TIMEOUT", f"{seconds:g}s")

    # The messages before a retry contain addresses, some with signatures.
    for name in (_http.__name__, file_download.__name__):
        logging.get_logger(name).addFilter(_hide_signatures)
    huggingface_hub.set_client_factory(partial(_with_timeout, _http._GLOBAL_CLIENT_FACTORY))


def _with_timeout(create: Callable[[], Any]) -> Any:
    session = create()
    # A default time-out of the session has no effect: many calls of the library override it with none.
    hooks = session.event_hooks
    session.event_hooks = {
        **hooks,
        "request": [*hooks["request"], _set_timeout, _note_request],
        "response": [*hooks["response"], _note_response],
    }
    answers.watch(session)
    return session


def _set_timeout(request: Any) -> None:
    if (stopped := _stopped.get()) is not None and stopped.is_set():
        raise SilentError("given up", request=request)
    _sent.append((time.monotonic(), threading.get_ident(), request.method, str(request.url)))
    given = {kind: value for kind, value in request.extensions.get("timeout", {}).items() if value is not None}
    request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), timeout()) | given


def _note_request(request: Any) -> None:
    unanswered = _unanswered.get()
    # A file may be sent for longer, and then be cut off.
    if unanswered is not None and request.method != "PUT":
        key, now = (request.method, str(request.url)), time.monotonic()
        if now - unanswered.setdefault(key, now) >= timeout():
            raise SilentError("no answer", request=request)
        unanswered[key] = now


def _note_response(response: Any) -> None:
    (_unanswered.get() or {}).pop((response.request.method, str(response.request.url)), None)


class _Quiet:
    """Context manager that turns off the progress bars and warnings of the library.

    The warnings contain addresses with signatures. The settings are restored at the end, since the process may be a
    training script.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = (False, 0)

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = (not are_progress_bars_disabled(), logging.get_verbosity())
                disable_progress_bars()
                if not os.environ.get("HF_HUB_VERBOSITY") and not os.environ.get("HF_DEBUG"):
                    logging.set_verbosity(ERROR)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                bars, level = self._before
                logging.set_verbosity(level)
                if bars:
                    enable_progress_bars()


quiet = _Quiet()


def token() -> str | None:
    """Return the token of the user, or None. It must not appear in any output."""
    return huggingface_hub.get_token()
