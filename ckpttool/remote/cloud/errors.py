"""Exceptions of obstore as errors of `ckpttool.errors`, with a hint.

Of most failures obstore has the text only: the status, and the code that the store gives it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from ckpttool.errors import CkptError, CorruptError, RemoteError, UsageError
from ckpttool.storage.errors import written_meanwhile

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_SAYS = re.compile(r"<Message>([^<]*)")
_BROKEN = re.compile(
    r"error decoding response body|response body error|connection (closed|reset)|incomplete message", re.I
)
_PART = re.compile(r"[?&](partNumber|blockid)=")  # of an object that is completed by another request
_AGAIN = "run the command again"
# What is in the text, also in the part for developers, of errors without a status; why, and what to do.
_WITHOUT_STATUS = (
    (
        re.compile(r"kind: Timeout|operation timed out|deadline has elapsed", re.I),
        "the store does not answer in time",
        f"{_AGAIN}, or with a longer time-out: `CKPTTOOL_CLOUD_TIMEOUT=300`",
    ),
    (_BROKEN, "the connection broke several times", _AGAIN),
    (
        re.compile(r"invalid \w+ response|unable to extract metadata", re.I),
        "the answer is not that of an object store",
        f"check the endpoint and the proxy, and {_AGAIN}",
    ),
    (
        re.compile(r"error sending request|tcp connect|dns error", re.I),
        "the store cannot be reached",
        f"check the network, the proxy and the endpoint, and {_AGAIN}",
    ),
)
# Where a machine is asked for its role, which is last.
_ROLES = re.compile(r"://(169\.254\.\d+\.\d+|metadata\.google\.internal)[:/]", re.I)
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired")
_SKEWED = ("RequestTimeTooSkewed", "RequestTimeTooOld")
_WRONG_KEY = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed", "InvalidSecurity")
_ELSEWHERE = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
)
_LOG_IN = {
    "s3": "set `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or `AWS_PROFILE` with boto3 installed; "
    "`AWS_SKIP_SIGNATURE=true` is for public buckets",
    "gs": "log in with `gcloud auth application-default login`, or set `GOOGLE_APPLICATION_CREDENTIALS`",
    "az": "set `AZURE_STORAGE_CONNECTION_STRING`, or `AZURE_STORAGE_ACCOUNT_NAME` and `AZURE_STORAGE_ACCOUNT_KEY`",
}


class ShortError(Exception):
    """An answer had fewer bytes than it said, several times."""

    def __init__(self, found: int, expected: int) -> None:
        super().__init__(f"the server sent {found} bytes instead of {expected}")


def may_be_done(error: BaseException) -> bool:
    """Return whether the store may have done what was asked, or still do it: it gave no answer, or none that says."""
    text = _first_lines(error)
    status = _STATUS.search(text)
    is_refusal = isinstance(error, FileNotFoundError | AlreadyExistsError | PreconditionError) or (
        status is not None and (status[1] < "500" or status[1] == "503")
    )
    return isinstance(error, BaseError) and not is_refusal and _PART.search(text) is None


def is_broken(error: BaseException) -> bool:
    """Return whether an answer broke off, after which a request can be made again."""
    return isinstance(error, ShortError) or _BROKEN.search(_first_lines(error)) is not None


@contextmanager
def translate_errors(address: str, doing: str = "read") -> Iterator[None]:
    """Translate what obstore raises in the block. `doing` is `read` or `write`."""
    try:
        yield
    except CkptError:
        raise
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
            raise _no_bucket(address) from None
        if doing == "write":
            raise translate(error, address, doing) from None
        raise FileNotFoundError(errno.ENOENT, "no such object", address) from None
    except (BaseError, ShortError, OSError, ValueError, RuntimeError) as error:
        raise translate(error, address, doing) from None


def translate(error: BaseException, address: str, doing: str) -> CkptError:
    """Return the error of `ckpttool.errors` for an exception of obstore."""
    failed = f"`{address}`: cannot be {'written' if doing == 'write' else 'read'}"
    text, scheme = _first_lines(error), address.partition("://")[0]
    hint: str | None
    status, code = _STATUS.search(text), _CODE.search(text)
    log_in = _LOG_IN.get(scheme, "check the address, and whether it has expired")
    if isinstance(error, FileNotFoundError):
        message = f"{failed}: what was sent before is gone" + (f" ({code[1]})" if code else "")
        return RemoteError(
            message, hint="look what else deletes objects there, and run the command again", file=address
        )
    if isinstance(error, AlreadyExistsError | PreconditionError) and doing == "write":
        return written_meanwhile(address)
    if isinstance(error, PreconditionError):
        return changed(address)
    if isinstance(error, InvalidPathError):
        return CorruptError(f"{failed}: {_clean(text)}", file=address)
    if isinstance(error, NotSupportedError) and scheme in ("http", "https"):
        hint = "download the file, and read that"
        return RemoteError(f"{failed}: the server does not serve ranges of files", hint=hint, file=address)
    reason, hint = _reason(error, text, code[1] if code else "", int(status[1]) if status else 0, log_in)
    if reason is None:
        return _no_bucket(address)
    facts = {"found": int(status[1])} if status else {}
    return RemoteError(f"{failed}: {reason}", hint=hint, file=address, **facts)


def _reason(error: BaseException, text: str, code: str, status: int, log_in: str) -> tuple[str | None, str | None]:
    """Return why a request failed, None where there is no such bucket, and what to do."""
    shown = f" ({code or status})" if code or status else ""
    says = _SAYS.search(text)
    if _ROLES.search(str(error)):
        return "there are no credentials", log_in
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return None, None
    if code in _EXPIRED:
        return f"the credentials have expired{shown}", "log in again, and run the command again"
    if code in _SKEWED:
        return f"the clock of this machine is wrong{shown}", "set the clock, and run the command again"
    if code in _ELSEWHERE or "redirect without LOCATION" in text:
        return f"the bucket is in another region{shown}", "set `AWS_REGION` to the region of the bucket"
    if code in _WRONG_KEY or isinstance(error, UnauthenticatedError) or status == 401:
        return f"the credentials are not valid{shown}", log_in
    if isinstance(error, PermissionDeniedError) or status == 403:
        return f"the credentials do not allow this{shown}", log_in
    if status == 429 or status >= 500 or code in ("SlowDown", "InternalError"):
        return f"the store has failed several times{shown}", f"wait a minute, and {_AGAIN}"
    if status:
        return f"the store refused the request{shown}" + (f": {_clean(says[1])}" if says else ""), None
    if isinstance(error, ShortError):
        return str(error), _AGAIN
    for pattern, reason, hint in _WITHOUT_STATUS:
        if pattern.search(text if pattern is _BROKEN else str(error)):
            return reason, hint
    return _clean(text), None


def _no_bucket(address: str) -> RemoteError:
    bucket = "/".join(address.split("/")[:3])
    return RemoteError(f"`{bucket}`: there is no such bucket", hint="check the name and the account", file=address)


def changed(address: str) -> RemoteError:
    """Return the error for an object that is not the one that was listed."""
    return RemoteError(
        f"`{address}` changed while it was being read",
        hint="run this again when nothing else writes to it",
        file=address,
    )


def too_many(address: str, most: int) -> UsageError:
    """Return the error for a folder of more objects than are listed."""
    return UsageError(f"`{address}` has more than {most:,} objects", hint="name the folder of one checkpoint")


def _first_lines(error: BaseException) -> str:
    """Return the text without what is for the developers of obstore."""
    return str(error).partition("\n\nDebug source")[0]


def _clean(text: str) -> str:
    """Return a text on one line, without addresses, which may contain signatures."""
    return re.sub(r"https?://\S+", "...", " ".join(text.split()))[:200].rstrip(".")
