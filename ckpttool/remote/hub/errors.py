"""Exceptions of the client as errors of `ckpttool.errors`, with a hint.

The client raises its own exceptions and those of the HTTP library. It wraps them in a RuntimeError or ConnectionError
when an upload fails; of the errors of Xet, it keeps the text only.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants
from huggingface_hub.errors import (
    BucketNotFoundError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ckpttool.errors import CkptError, RemoteError, StorageError, UsageError
from ckpttool.remote.hub import answers, client, limits
from ckpttool.remote.hub.address import BUCKETS
from ckpttool.storage import files
from ckpttool.storage.errors import from_os_error

_Http = answers.http
# The last four: the response is not JSON or has other fields, for example because a proxy sent it.
CAUGHT = (_Http.HTTPError, _Http.InvalidURL, OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)
_OF_ANSWERS = (ValueError, LookupError, TypeError, AttributeError)
_STATUS = re.compile(r"\b(?:status(?: code)?:?|HTTP(?: status)?(?: \w+ error)?:? ?\(?) ?(4\d\d|5\d\d)\b", re.I)
# Messages of Xet for a broken connection or a time-out.
_CONNECTION_LOST = re.compile(
    r"error sending request|error decoding response body|timed? ?out|connection (closed|reset)", re.I
)
LOG_IN = "log in with `hf auth login`, or set `HF_TOKEN`"


@contextmanager
def translate_errors(address: str, doing: str = "read", **facts: Any) -> Iterator[None]:
    """Translate what the client raises in the block. `doing` is `read` or `write`."""
    with client.quiet, client.bounded(), answers.checked():
        try:
            yield
        except CAUGHT as error:
            if isinstance(error, TypeError | AttributeError) and not _is_of_client(error):
                raise
            if isinstance(error.__cause__, CkptError):
                raise error.__cause__ from None  # of a file that the client was to send
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
            return _local_error(one, address, doing)
    if any(isinstance(one, ConnectionError | RuntimeError) and _CONNECTION_LOST.search(str(one)) for one in chain):
        hint = f"{_again(doing)}, or with a longer time-out: `CKPTTOOL_HUB_TIMEOUT=300`"
        message = f"the connection to the storage of large files broke or timed out ({limits.timeout():g} s)"
        return RemoteError(f"`{address}`: {_failure(doing)}: {message}", hint=hint, **facts)
    if isinstance(error, _OF_ANSWERS):
        message = (
            f"{_endpoint()} does not answer as the Hub does: {_clean(f'{type(error).__name__}: {error}').rstrip('.')}"
        )
        hint = "check the network, the proxy and `HF_ENDPOINT`, and run the command again"
        return RemoteError(f"`{address}`: {_failure(doing)}: {message}", hint=hint, **facts)
    message = _clean(f"{type(error).__name__}: {error}".partition("\n")[0])
    return RemoteError(f"`{address}`: {_failure(doing)}: {message}", hint=_again(doing), **facts)


def _local_error(error: OSError, address: str, doing: str) -> CkptError:
    """Return the error for a file of this machine. Those in the cache are written by who reads from the Hub."""
    path, cache = str(error.filename or address), os.path.abspath(constants.HF_HUB_CACHE)
    if not os.path.abspath(path).startswith(cache):
        return from_os_error(error, path, "write" if error.errno == errno.ENOSPC else doing)
    reason = str(from_os_error(error, path, "write")).partition(": ")[2].removeprefix("cannot write: ")
    return StorageError(
        f"`{address}`: the cache of the Hub cannot be written: `{path}`: {reason}",
        hint="set `HF_HUB_CACHE` to a directory that you can write to, with room for the files",
        file=path,
    )


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the response that caused an exception, or None."""
    response = response_of(error)
    if response is not None:
        return int(response.status_code)
    match = _STATUS.search(str(error))
    return int(match[1]) if match is not None else None


def is_outcome_unknown(error: BaseException) -> bool:
    """Return whether the server may have carried out the request.

    There was no response, one that cannot be read, a server error or a conflict, which may be with the same request,
    sent before.
    """
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in (408, 409, 412)
    return isinstance(error, _OF_ANSWERS) or _is_disconnection(error)


def is_temporary(error: BaseException) -> bool:
    """Return whether a retry may succeed."""
    status = status_of(error)
    if status is None:
        return _is_disconnection(error)
    return status == 429 or (is_outcome_unknown(error) and status not in (409, 412))


def _is_disconnection(error: BaseException) -> bool:
    return any(isinstance(one, _Http.TransportError | ConnectionError) for one in _chain(error))


def is_expired_link(error: BaseException) -> bool:
    """Return whether a storage server refused an address that the Hub had signed."""
    response = response_of(error)
    if response is None or response.status_code != 403 or any(isinstance(one, GatedRepoError) for one in _chain(error)):
        return False
    return "Authorization" not in response.request.headers


def is_unreachable(error: BaseException) -> bool:
    """Return whether there is no server at the address, or one that was silent for as long as it may be."""
    kinds = (
        _Http.TimeoutException | client.SilentError | _Http.ConnectError | _Http.ProxyError | _Http.UnsupportedProtocol
    )
    return any(isinstance(one, kinds) for one in _chain(error))


def response_of(error: BaseException) -> Any:
    """Return the response that caused an exception, or None."""
    found = (getattr(one, "response", None) for one in _chain(error))
    return next((response for response in found if response is not None), None)


def request_of(error: BaseException) -> Any:
    """Return the request whose failure caused an exception, or None."""
    # The attribute raises RuntimeError if it is not set.
    found = (getattr(one, "_request", None) for one in _chain(error))
    response = response_of(error)
    return response.request if response is not None else next((one for one in found if one is not None), None)


def retry_after(error: BaseException) -> float:
    """Return the seconds after which the server allows the next attempt, 0 if it does not say."""
    response = response_of(error)
    headers = {} if response is None else response.headers
    text = headers.get("Retry-After", "")
    limit = re.search(r"\bt=(\d+)", headers.get("ratelimit", "")) if response is not None and not text else None
    if limit is not None:
        return float(limit[1]) + 1
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time()) if text else 0.0
    except ValueError:
        return 0.0


def _is_of_client(error: BaseException) -> bool:
    """Return whether the client raised an exception, and not ckpttool."""
    traceback = error.__traceback__
    name = ""
    while traceback is not None:
        name, traceback = str(traceback.tb_frame.f_globals.get("__name__")), traceback.tb_next
    return not name.startswith("ckpttool.")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _translate_known(one: BaseException, address: str, doing: str, facts: dict[str, Any]) -> CkptError | None:
    prefix = f"`{address}`"
    what = "bucket" if address.startswith(BUCKETS) else "repository"
    if isinstance(one, answers.ChangedFileError):
        return files.changed(address)
    if isinstance(one, answers.AnswerError):
        message = f"{_endpoint(one)} does not answer as the Hub does: {one}"
        hint = "check the network, the proxy and `HF_ENDPOINT`, and run the command again"
        return RemoteError(f"{prefix}: {_failure(doing)}: {message}", hint=hint, **facts)
    if isinstance(one, LocalEntryNotFoundError):
        return None  # the reason is its cause
    if isinstance(one, GatedRepoError):
        hint = "request access on its page, then log in with `hf auth login`"
        return RemoteError(
            f"{prefix}: the repository is gated, and its owner has not granted you access", hint=hint, **facts
        )
    if isinstance(one, RepositoryNotFoundError | BucketNotFoundError):
        hint = f"check the name; for a private {what}, {LOG_IN}"
        return RemoteError(f"{prefix}: no such {what}, or you have no access to it", hint=hint, **facts)
    if isinstance(one, RevisionNotFoundError):
        hint = "name a branch, a tag or a commit: `hf://org/name@main`"
        return RemoteError(f"{prefix}: the repository has no such revision", hint=hint, **facts)
    if isinstance(one, EntryNotFoundError):
        return RemoteError(f"{prefix}: no such file in the {what}", hint="check the path on the Hub", **facts)
    if isinstance(one, OfflineModeIsEnabled):
        hint = "unset `HF_HUB_OFFLINE`; offline, only files in the cache can be read"
        return RemoteError(f"{prefix}: `HF_HUB_OFFLINE` disables access to the Hub", hint=hint, **facts)
    if isinstance(one, HFValidationError):
        return UsageError(f"{prefix}: {_clean(str(one)).rstrip('.')}", hint="write `hf://org/name`", **facts)
    if isinstance(one, _Http.TimeoutException | client.SilentError):
        hint = f"{_again(doing)}, or with a longer time-out: `CKPTTOOL_HUB_TIMEOUT=300`"
        message = f"the Hub does not answer within {limits.timeout():g} s: {_endpoint(one)}"
        return RemoteError(f"{prefix}: {message}", hint=hint, **facts)
    if isinstance(one, _Http.ConnectError | _Http.ProxyError):
        hint = "check the network, the proxy and `HF_ENDPOINT`; `HF_HUB_OFFLINE=1` reads from the cache"
        message = f"the Hub cannot be reached: {_endpoint(one)}: {_reason(one)}"
        return RemoteError(f"{prefix}: {message}", hint=hint, **facts)
    if isinstance(one, _Http.TransportError):
        message = f"the connection to the Hub broke: {_endpoint(one)}: {_reason(one)}"
        return RemoteError(f"{prefix}: {message}", hint=_again(doing), **facts)
    return None


def _status_error(status: int, message: str | None, address: str, doing: str, facts: dict[str, Any]) -> CkptError:
    no_token = None if client.token() is not None else "there is no token"
    write_access = "use a token with write access to the repository; `--create-pr` needs none"
    is_broken = status >= 500
    reason, hint = {
        401: (no_token or "the token is not valid", LOG_IN),
        403: (no_token or "the token does not allow this", write_access if doing == "write" else LOG_IN),
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


def _endpoint(error: BaseException | None = None) -> str:
    """Return the server of a request, by default the Hub, and the proxy in front of it, without credentials."""
    request = request_of(error) if error is not None else None
    address = str(request.url) if request is not None else str(client.api().endpoint)
    host = urlsplit(address).hostname or ""
    proxies = {} if proxy_bypass(host) else getproxies()
    proxy = proxies.get(urlsplit(address).scheme) or proxies.get("all")
    return f"`{_server(address)}`" + (f" by the proxy `{_server(proxy)}`" if proxy else "")


def _server(address: str) -> str:
    parts = urlsplit(address if "://" in address else f"http://{address}")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _again(doing: str) -> str:
    done = "files that were sent are not sent" if doing == "write" else "files in the cache are not downloaded"
    return f"run the command again; {done} again"


def _failure(doing: str) -> str:
    return "cannot be written" if doing == "write" else "cannot be read"


def _reason(error: BaseException) -> str:
    return _clean(str(error)).rstrip(".") or type(error).__name__


def _clean(text: str) -> str:
    """Return a message on one line, without addresses, which may contain signatures, and without the token."""
    text = re.sub(r"https?://\S+", "...", " ".join(text.split()))
    token = client.token()
    return (text.replace(token, "...") if token else text)[:200]
