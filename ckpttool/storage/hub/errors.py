"""Exceptions of the client as errors of `ckpttool.errors`, with a hint.

The client raises its own exceptions and those of the HTTP library. It wraps them in a RuntimeError or ConnectionError
when an upload fails; of the errors of Xet, it keeps the text only.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import _http

from ckpttool.errors import CkptError, RemoteError, UsageError
from ckpttool.storage.errors import from_os_error
from ckpttool.storage.hub import client

# httpx, or httpx2 in later versions of the library.
_Http: Any = next(getattr(_http, name) for name in ("httpx2", "httpx") if hasattr(_http, name))
# A LookupError: the response lacks a field, for example because a proxy sent it.
CAUGHT = (_Http.HTTPError, OSError, RuntimeError, ValueError, LookupError)
_STATUS = re.compile(r"\b(?:status(?: code)?:?|HTTP(?: status)?(?: \w+ error)?:? ?\(?) ?(4\d\d|5\d\d)\b", re.I)
# Messages of Xet for a broken connection or a time-out.
_CONNECTION_LOST = re.compile(
    r"error sending request|error decoding response body|timed? ?out|connection (closed|reset)", re.I
)
_LOG_IN = "log in with `hf auth login`, or set `HF_TOKEN`"


@contextmanager
def translate_errors(address: str, doing: str = "read", **facts: Any) -> Iterator[None]:
    """Translate what the client raises in the block. `doing` is `read` or `write`."""
    with client.quiet:
        try:
            yield
        except CAUGHT as error:
            raise translate(error, address, doing, **facts) from None


def translate(error: BaseException, address: str, doing: str, **facts: Any) -> CkptError:
    """Return the error of `ckpttool.errors` for an exception of the client."""
    chain = list(_chain(error))
    facts = {"file": address, **facts}
    for one in chain:
        result = _translate_known(one, address, doing, facts)
        if result is not None:
            return result
    status = status_of(error)
    if status is not None:
        message = next((one.server_message for one in chain if isinstance(one, HfHubHTTPError)), None)
        return _status_error(status, message, address, doing, facts)
    for one in chain:
        if isinstance(one, OSError) and one.errno is not None and not isinstance(one, ConnectionError):
            return from_os_error(one, str(one.filename or address), "write" if one.errno == errno.ENOSPC else doing)
    if any(isinstance(one, ConnectionError | RuntimeError) and _CONNECTION_LOST.search(str(one)) for one in chain):
        hint = f"{_again(doing)}, or with a longer time-out: `CKPTTOOL_HUB_TIMEOUT=300`"
        message = "the connection to the storage of large files broke or timed out"
        return RemoteError(f"`{address}`: {_failure(doing)}: {message}", hint=hint, **facts)
    message = _clean(f"{type(error).__name__}: {error}".partition("\n")[0])
    return RemoteError(f"`{address}`: {_failure(doing)}: {message}", hint=_again(doing), **facts)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the response that caused an exception, or None."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if response is not None:
            return int(response.status_code)
    match = _STATUS.search(str(error))
    return int(match[1]) if match is not None else None


def is_outcome_unknown(error: BaseException) -> bool:
    """Return whether the server may have carried out the request: there was no response, a server error or a conflict.

    The conflict may be with the same request, sent before.
    """
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in (408, 409, 412)
    return any(isinstance(one, _Http.TransportError | ConnectionError) for one in _chain(error))


def is_temporary(error: BaseException) -> bool:
    """Return whether a retry may succeed."""
    status = status_of(error)
    return is_outcome_unknown(error) and status not in (409, 412)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _translate_known(one: BaseException, address: str, doing: str, facts: dict[str, Any]) -> CkptError | None:
    prefix = f"`{address}`"
    if isinstance(one, LocalEntryNotFoundError):
        return None  # the reason is its cause
    if isinstance(one, GatedRepoError):
        hint = "request access on its page, then log in with `hf auth login`"
        return RemoteError(
            f"{prefix}: the repository is gated, and its owner has not granted you access", hint=hint, **facts
        )
    if isinstance(one, RepositoryNotFoundError):
        hint = f"check the name; for a private repository, {_LOG_IN}"
        return RemoteError(f"{prefix}: no such repository, or you have no access to it", hint=hint, **facts)
    if isinstance(one, RevisionNotFoundError):
        hint = "name a branch, a tag or a commit: `hf://org/name@main`"
        return RemoteError(f"{prefix}: the repository has no such revision", hint=hint, **facts)
    if isinstance(one, EntryNotFoundError):
        return RemoteError(f"{prefix}: no such file in the repository", hint="check the path on the Hub", **facts)
    if isinstance(one, OfflineModeIsEnabled):
        hint = "unset `HF_HUB_OFFLINE`; offline, only files in the cache can be read"
        return RemoteError(f"{prefix}: `HF_HUB_OFFLINE` disables access to the Hub", hint=hint, **facts)
    if isinstance(one, HFValidationError):
        return UsageError(f"{prefix}: {_clean(str(one)).rstrip('.')}", hint="write `hf://org/name`", **facts)
    if isinstance(one, _Http.TimeoutException):
        hint = f"{_again(doing)}, or with a longer time-out: `CKPTTOOL_HUB_TIMEOUT=300`"
        return RemoteError(f"{prefix}: the Hub does not answer within {client.timeout():g} s", hint=hint, **facts)
    if isinstance(one, _Http.ConnectError):
        hint = "check the network, the proxy and `HF_ENDPOINT`; `HF_HUB_OFFLINE=1` reads from the cache"
        return RemoteError(f"{prefix}: the Hub cannot be reached", hint=hint, **facts)
    if isinstance(one, _Http.TransportError):
        return RemoteError(f"{prefix}: the connection to the Hub broke", hint=_again(doing), **facts)
    return None


def _status_error(status: int, message: str | None, address: str, doing: str, facts: dict[str, Any]) -> CkptError:
    no_token = None if client.token() is not None else "there is no token"
    write_access = "use a token with write access to the repository; `--create-pr` needs none"
    is_broken = status >= 500
    reason, hint = {
        401: (no_token or "the token is not valid", _LOG_IN),
        403: (no_token or "the token does not allow this", write_access if doing == "write" else _LOG_IN),
        404: ("the Hub does not have this address", "check the name and `HF_ENDPOINT`"),
        409: ("another commit is in progress", _again(doing)),
        412: (
            "the branch changed during the upload, and nothing was committed",
            "check what the branch contains now, and run the command again",
        ),
        413: ("a request was too large", "export smaller files with `--max-shard-size`"),
        429: ("too many requests", f"wait a few minutes and {_again(doing)}"),
    }.get(status, ("the Hub has a server error", _again(doing)) if is_broken else ("the Hub refused the request", None))
    if message:
        reason = f"{reason}: {_clean(message).rstrip('.')}"
    return RemoteError(f"`{address}`: {_failure(doing)}: {reason} ({status})", hint=hint, found=status, **facts)


def _again(doing: str) -> str:
    done = "files that were sent are not sent" if doing == "write" else "files in the cache are not downloaded"
    return f"run the command again; {done} again"


def _failure(doing: str) -> str:
    return "cannot be written" if doing == "write" else "cannot be read"


def _clean(text: str) -> str:
    """Return a message on one line, without addresses, which may contain signatures, and without the token."""
    text = re.sub(r"https?://\S+", "...", " ".join(text.split()))
    token = client.token()
    return (text.replace(token, "...") if token else text)[:200]
