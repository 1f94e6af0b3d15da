"""What the client raises, as one of our errors with the next thing to do.

The client raises its own errors, those of the HTTP library below it, and for a file that could not be sent a bare
RuntimeError or ConnectionError around them; of what Xet met, only a text is left.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import errors as theirs
from huggingface_hub.utils import _http

from ckpttool.errors import CkptError, RemoteError, UsageError
from ckpttool.storage.files import failed
from ckpttool.storage.hub import client

# httpx, or httpx2 of later versions of the library.
_Http: Any = next(getattr(_http, name) for name in ("httpx2", "httpx") if hasattr(_http, name))
# A LookupError is an answer that lacks something, as of a proxy that is no Hub.
CAUGHT = (_Http.HTTPError, OSError, RuntimeError, ValueError, LookupError)
_STATUS = re.compile(r"\b(?:status(?: code)?:?|HTTP(?: status)?(?: \w+ error)?:? ?\(?) ?(4\d\d|5\d\d)\b", re.I)
# Xet's own words for a connection that broke, or on which nothing came for too long.
_BROKE = re.compile(r"error sending request|error decoding response body|timed? ?out|connection (closed|reset)", re.I)
_LOG_IN = "log in with `hf auth login`, or set `HF_TOKEN`"


@contextmanager
def speaking(address: str, doing: str = "read", **facts: Any) -> Iterator[None]:
    """Let the client work; what it raises becomes one of our errors. `doing` is `read` or `write`."""
    with client.quietly:
        try:
            yield
        except CkptError:
            raise
        except CAUGHT as error:
            raise translated(error, address, doing, **facts) from None


def translated(error: BaseException, address: str, doing: str, **facts: Any) -> CkptError:
    """One of our errors for what the client raised."""
    chain = list(_chain(error))
    facts = {"file": address, **facts}
    for one in chain:
        known = _known(one, address, doing, facts)
        if known is not None:
            return known
    status = status_of(error)
    if status is not None:
        said = next((one.server_message for one in chain if isinstance(one, theirs.HfHubHTTPError)), None)
        return _answered(status, said, address, doing, facts)
    for one in chain:
        if isinstance(one, OSError) and one.errno is not None and not isinstance(one, ConnectionError):
            return failed(one, str(one.filename or address), "write" if one.errno == errno.ENOSPC else doing)
    if any(isinstance(one, ConnectionError | RuntimeError) and _BROKE.search(str(one)) for one in chain):
        hint = f"{_again(doing)}, or give it longer: `CKPTTOOL_HUB_TIMEOUT=300`"
        said = "the connection to the store of large files broke, or nothing came for too long"
        return RemoteError(f"`{address}`: {_did(doing)}: {said}", hint=hint, **facts)
    said = _clean(f"{type(error).__name__}: {error}".partition("\n")[0])
    return RemoteError(f"`{address}`: {_did(doing)}: {said}", hint=_again(doing), **facts)


def status_of(error: BaseException) -> int | None:
    """The status of the answer that is at the bottom of an error."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if response is not None:
            return int(response.status_code)
    found = _STATUS.search(str(error))
    return int(found[1]) if found is not None else None


def is_lost(error: BaseException) -> bool:
    """Whether the server may have done what it was asked for all the same: no answer came, or one of its own trouble,
    or that somebody was there before, which may have been us."""
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in (408, 409, 412)
    return any(isinstance(one, _Http.TransportError | ConnectionError) for one in _chain(error))


def is_passing(error: BaseException) -> bool:
    """Whether another try may have better luck."""
    status = status_of(error)
    return is_lost(error) and status not in (409, 412)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _known(one: BaseException, address: str, doing: str, facts: dict[str, Any]) -> CkptError | None:
    where = f"`{address}`"
    if isinstance(one, theirs.LocalEntryNotFoundError):
        return None  # why the Hub could not be asked is its cause
    if isinstance(one, theirs.GatedRepoError):
        hint = "ask for access on its page, then log in with `hf auth login`"
        return RemoteError(f"{where}: access is granted by the owner of the repository", hint=hint, **facts)
    if isinstance(one, theirs.RepositoryNotFoundError):
        hint = f"check the name; for a private one, {_LOG_IN}"
        return RemoteError(f"{where}: no such repository, or one that is hidden from you", hint=hint, **facts)
    if isinstance(one, theirs.RevisionNotFoundError):
        hint = "name a branch, a tag or a commit of it: `hf://org/name@main`"
        return RemoteError(f"{where}: the repository has no such revision", hint=hint, **facts)
    if isinstance(one, theirs.EntryNotFoundError):
        return RemoteError(f"{where}: no such file in the repository", hint="look at it on the Hub", **facts)
    if isinstance(one, theirs.OfflineModeIsEnabled):
        hint = "unset `HF_HUB_OFFLINE`; without the Hub only what is in the cache can be read"
        return RemoteError(f"{where}: the Hub is switched off here by `HF_HUB_OFFLINE`", hint=hint, **facts)
    if isinstance(one, theirs.HFValidationError):
        return UsageError(f"{where}: {_clean(str(one)).rstrip('.')}", hint="write `hf://org/name`", **facts)
    if isinstance(one, _Http.TimeoutException):
        hint = f"{_again(doing)}, or give it longer: `CKPTTOOL_HUB_TIMEOUT=300`"
        return RemoteError(f"{where}: the Hub does not answer within {client.timeout():g} s", hint=hint, **facts)
    if isinstance(one, _Http.ConnectError):
        hint = "check the network, the proxy and `HF_ENDPOINT`; `HF_HUB_OFFLINE=1` reads from the cache"
        return RemoteError(f"{where}: the Hub cannot be reached", hint=hint, **facts)
    if isinstance(one, _Http.TransportError):
        return RemoteError(f"{where}: the connection to the Hub broke", hint=_again(doing), **facts)
    return None


def _answered(status: int, said: str | None, address: str, doing: str, facts: dict[str, Any]) -> CkptError:
    asked = client.token() is not None
    what, hint = {
        401: ("the token is not valid" if asked else "there is no token", _LOG_IN),
        403: (
            "the token does not allow this" if asked else "there is no token",
            "use a token with write access to the repository; `--create-pr` needs none"
            if doing == "write"
            else _LOG_IN,
        ),
        404: ("it has no such place", "check the name and `HF_ENDPOINT`"),
        409: ("another change is being made", _again(doing)),
        412: (
            "the branch has changed since this began, and nothing was committed",
            "look at what is there now, and run it again",
        ),
        413: ("a request was too large", "export into smaller files: `--max-shard-size`"),
        429: ("too many requests", f"wait a few minutes and {_again(doing)}"),
    }.get(
        status,
        ("the Hub is in trouble" if status >= 500 else "the Hub refuses", _again(doing) if status >= 500 else None),
    )
    if said:
        what = f"{what}: {_clean(said).rstrip('.')}"
    return RemoteError(f"`{address}`: {_did(doing)}: {what} ({status})", hint=hint, found=status, **facts)


def _again(doing: str) -> str:
    if doing == "write":
        return "run it again; what was sent is not sent a second time"
    return "run it again; files that have arrived are not fetched a second time"


def _did(doing: str) -> str:
    return "cannot be written" if doing == "write" else "cannot be read"


def _clean(text: str) -> str:
    """One line without addresses, whose queries hold signatures, and without the token."""
    text = re.sub(r"https?://\S+", "...", " ".join(text.split()))
    hidden = client.token()
    return (text.replace(hidden, "...") if hidden else text)[:200]
