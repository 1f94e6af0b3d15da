"""Checks of all that an endpoint answers, whichever part of the client asked.

The hooks see each request and each response of the session, in the blocks of `checked`:

    who      the token goes to the host of `HF_ENDPOINT` alone
    form     commits, digests and ranges are those that were asked for, before a path is made of them
    size     a body ends at its limit, also a compressed one; a listing at a number of pages
    speed    a connection that moves less than `limits.LOWEST_RATE` is given up

They do nothing to requests of others in this process, which may be a training script.
"""

from __future__ import annotations

import os
import re
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants
from huggingface_hub.utils import _http
from huggingface_hub.utils._http import hf_raise_for_status

from ckpttool.remote.hub import limits

if TYPE_CHECKING:
    from ckpttool.remote.hub.listing import RepoFile

# httpx, or httpx2 in later versions of the library.
http: Any = next(getattr(_http, name) for name in ("httpx2", "httpx") if hasattr(_http, name))

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_XET_TOKEN = re.compile(r".*/api/models/[^/]+/[^/]+/xet-(read|write)-token/[^/]+")
_LIMIT = re.compile(r"\bt\s*=\s*(\d+)")
STORAGES = ("https", "http")  # schemes of the address of Xet's storage; hf_xet also knows one for directories
_PORTS = {"http": 80, "https": 443}
_PIECE = 1 << 20  # bytes that are decompressed at once, and that are sent between two looks at the clock


class AnswerError(ValueError):
    """Raised for an answer that no Hub gives."""

    def __init__(self, text: str, request: Any = None) -> None:
        super().__init__(text)
        self._request = request


class ChangedFileError(AnswerError):
    """Raised for a file that is another one than it was in the listing of its bucket."""


@dataclass(slots=True)
class _Block:
    """The requests of a block of `checked`, and what their answers must be of."""

    file: RepoFile | None = None
    commit: str | None = None
    tags: dict[str, str] = field(default_factory=dict)  # host -> strong ETag of the file there
    requests: int = 0
    redirections: int = 0
    moved: int = 0  # bytes
    pages: list[str] | None = None  # addresses of the next pages of a listing
    listed: int = 0  # bytes of it


@dataclass(slots=True)
class _Exchange:
    """A request that this thread makes: what has moved, and how long it waited for that."""

    request: Any
    block: _Block
    moved: int = 0
    head: int = 0  # bytes received before the answer
    waited: float = 0.0
    is_answered: bool = False


_block: ContextVar[_Block | None] = ContextVar("_block", default=None)
_thread = threading.local()


@contextmanager
def checked(
    file: RepoFile | None = None, commit: str | None = None, tags: dict[str, str] | None = None
) -> Iterator[None]:
    """Check the answers to the requests that are made in the block; they are about a file of a commit, if one is
    given. `tags` are the ETags that storage servers have for it, by their hosts, which must not change."""
    before = _block.set(_Block(file, commit, {} if tags is None else tags))
    try:
        yield
    finally:
        _block.reset(before)


@contextmanager
def listing() -> Iterator[None]:
    """Limit the pages of the listing that is read in the block."""
    block = _block.get()
    if block is not None:
        block.pages, block.listed = [], 0
    try:
        yield
    finally:
        if block is not None:
            block.pages = None


def check_commit(text: object, request: Any = None) -> str:
    """Return the hash of a commit that an endpoint names. Raises AnswerError if it is none. Pure."""
    if not isinstance(text, str) or not COMMIT.fullmatch(text):
        raise AnswerError(f"a commit is named `{_short(text)}`, which is not 40 hexadecimal digits", request)
    return text


def endpoint() -> str:
    """Return the address of the Hub."""
    return os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)


def watch(session: Any) -> None:
    """Let the hooks see all requests of a session, and the bytes of its connections."""
    hooks = session.event_hooks
    session.event_hooks = {
        **hooks,
        "request": [*hooks["request"], _check_request],
        "response": [_check_response, *hooks["response"]],
    }
    for transport in (getattr(session, "_transport", None), *getattr(session, "_mounts", {}).values()):
        pool: Any = getattr(transport, "_pool", None)
        if hasattr(pool, "_network_backend"):
            pool._network_backend = _Network(pool._network_backend)


# Requests ------------------------------------------------------------------------------------------------------------


def _check_request(request: Any) -> None:
    block = _block.get()
    if block is None and "ckpttool" not in request.headers.get("user-agent", ""):
        _thread.exchange = None
        return
    block = block or _Block()
    if "authorization" in request.headers and not _is_of_endpoint(str(request.url)):
        del request.headers["authorization"]
    if request.headers.get("accept-encoding") != "identity":
        request.headers["accept-encoding"] = "gzip"
    block.requests += 1
    if block.requests > limits.REQUESTS + (block.moved >> 20):
        raise AnswerError(f"it has not sent the requested data after {block.requests - 1} requests", request)
    _thread.exchange = _Exchange(request, block)


def _is_of_endpoint(address: str) -> bool:
    """Return whether the token may be sent to an address: to the endpoint, or by https to it in place of http."""
    there, own = _origin(address), _origin(endpoint())
    return there == own or (own[::2] == ("http", 80) and there == ("https", own[1], 443))


def _origin(address: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(address)
        return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        return "", "", 0


# Responses -----------------------------------------------------------------------------------------------------------


def _check_response(response: Any) -> None:
    exchange: _Exchange | None = getattr(_thread, "exchange", None)
    if exchange is None or exchange.request is not response.request:
        return
    exchange.is_answered = True
    block = exchange.block
    is_short = response.status_code >= HTTPStatus.BAD_REQUEST or response.has_redirect_location
    block.redirections = block.redirections + 1 if response.has_redirect_location else 0
    if block.redirections > limits.REDIRECTIONS:
        raise AnswerError(f"it redirects {block.redirections} times, one after the other", response.request)
    is_json = block.file is None or _XET_TOKEN.fullmatch(response.request.url.path) is not None
    if block.file is not None and block.file.xet is not None:
        _check_unchanged(response, block.file)
    _check_names(response, block)
    if block.file is not None and not is_json and not is_short:
        _check_file(response, block, block.file)
    _check_pages(response, block)
    _check_xet(response)
    coding = response.headers.get("content-encoding", "identity").lower()
    if coding not in ("identity", "gzip", ""):
        raise AnswerError(f"its body is encoded with `{_short(coding)}`, which was not requested", response.request)
    if is_short:
        limit = limits.ERROR
    else:
        limit = limits.JSON if is_json or block.file is None else _size_of_body(response, block.file)
    response.stream = _Body(response, exchange, limit, cuts=is_short, is_json=is_json and not is_short)
    if coding == "gzip" and response.request.method != "HEAD":
        # The body is decompressed here, where it is counted.
        for name in ("content-encoding", "content-length"):
            response.headers.pop(name, None)
    if _asked_wait(response) > limits.WAIT:
        # The client would wait for as long as that.
        hf_raise_for_status(response)


def _asked_wait(response: Any) -> float:
    """Return the seconds for which the client would wait before it repeats a request, as it reads the headers."""
    if response.status_code < HTTPStatus.BAD_REQUEST:
        return 0
    texts = (response.headers.get("retry-after", "").strip(), *_LIMIT.findall(response.headers.get("ratelimit", "")))
    return max((float(text) for text in texts if text.isdecimal()), default=0.0)


def _check_names(response: Any, block: _Block) -> None:
    """Raise AnswerError if what becomes a name in the cache is not a name, or one of another file."""
    headers, file = response.headers, block.file
    commit = headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
    if commit is not None and check_commit(commit, response.request) != (block.commit or commit):
        raise AnswerError(f"it answers for the commit {commit} in place of {block.commit}", response.request)
    linked = headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG)
    is_of_storage = commit is None and linked is None and response.request.method != "HEAD"
    if file is None or is_of_storage or response.status_code >= HTTPStatus.BAD_REQUEST:
        return
    # As the client makes a name of it.
    tag = (linked or headers.get("etag") or "").lstrip("W/").strip('"')
    if (
        file.xet is None
        and tag
        and tag != (file.sha256 or file.blob)
        and not (response.has_redirect_location and commit is None)
    ):
        raise AnswerError(
            f"the ETag of `{file.name}` is `{_short(tag)}`, and its digest is {file.sha256 or file.blob}",
            response.request,
        )
    size = headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_SIZE)
    if size is not None and size != str(file.size):
        raise AnswerError(f"`{file.name}` has {_short(size)} bytes, not {file.size}", response.request)


def _check_unchanged(response: Any, file: RepoFile) -> None:
    """Raise ChangedFileError if a file of a bucket has other bytes than when the bucket was listed."""
    headers = response.headers
    total = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    for now, before in (
        (headers.get(constants.HUGGINGFACE_HEADER_X_XET_HASH), file.xet),
        (headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_SIZE), str(file.size)),
        (total and total[3], str(file.size)),
    ):
        if now not in (None, before) and response.status_code < HTTPStatus.BAD_REQUEST:
            raise ChangedFileError(f"`{file.name}` is {_short(now)}, and was {before}", response.request)


def _check_file(response: Any, block: _Block, file: RepoFile) -> None:
    """Raise AnswerError if a storage server has another version of a file than before."""
    tag, host = response.headers.get("etag", ""), response.request.url.host
    if tag and not tag.startswith("W/") and tag != block.tags.setdefault(host, tag):
        raise AnswerError(f"the ETag of `{file.name}` has changed while it was read", response.request)


def _check_pages(response: Any, block: _Block) -> None:
    """Raise AnswerError for pages without end."""
    following = response.links.get("next", {}).get("url")
    if block.pages is None or following is None:
        return
    if following in block.pages:
        raise AnswerError("a page of its listing is followed by one before it", response.request)
    block.pages.append(following)
    if len(block.pages) >= limits.PAGES:
        raise AnswerError(f"its listing has more than {limits.PAGES} pages", response.request)


def _check_xet(response: Any) -> None:
    """Raise AnswerError if a token for Xet, which is asked for with that of the user, is not given out by the endpoint,
    or if the storage is not a server."""
    linked = response.links.get(constants.HUGGINGFACE_HEADER_LINK_XET_AUTH_KEY, {}).get("url")
    for route in (linked, response.headers.get(constants.HUGGINGFACE_HEADER_X_XET_REFRESH_ROUTE)):
        # The client turns to a mirror for what the Hub says of itself.
        is_of_hub = route is not None and route.startswith("https://huggingface.co/")
        if route is not None and not is_of_hub and not _is_of_endpoint(urljoin(str(response.request.url), route)):
            raise AnswerError(f"it sends the client elsewhere with the token: `{_server(route)}`", response.request)
    storage = response.headers.get(constants.HUGGINGFACE_HEADER_X_XET_ENDPOINT)
    if storage is not None and urlsplit(storage).scheme not in STORAGES:
        raise AnswerError(f"its storage of large files is not a server: `{_short(storage)}`", response.request)


def _size_of_body(response: Any, file: RepoFile) -> int:
    """Return the bytes of a file that a response may have. Raises AnswerError if they are not those asked for."""
    headers, request = response.headers, response.request
    nbytes = file.size
    if response.status_code == HTTPStatus.PARTIAL_CONTENT:
        wanted, text = _RANGE.fullmatch(request.headers.get("range", "")), headers.get("content-range", "")
        given = _CONTENT_RANGE.fullmatch(text)
        if wanted is None or given is None:
            raise AnswerError(f"a part of `{file.name}` is answered with `Content-Range: {_short(text)}`", request)
        start, end = int(wanted[1]), min(int(wanted[2] or file.size), file.size - 1)
        if tuple(map(int, given.groups())) != (start, end, file.size):
            raise AnswerError(
                f"`{file.name}`: bytes {start}-{end} of {file.size} were requested, but it sends `{_short(text)}`",
                request,
            )
        nbytes = end + 1 - start
    # Without a range, the whole file may be compressed.
    length = headers.get("content-length")
    if length not in (None, str(nbytes)) and headers.get("content-encoding", "identity").lower() != "gzip":
        raise AnswerError(f"`{file.name}` has {_short(length)} bytes, not {nbytes}", request)
    return nbytes


class _Body(http.SyncByteStream):  # type: ignore[misc] # its type is unknown
    """The body of a response up to a limit, decompressed. It is cut off there, or raises AnswerError."""

    def __init__(self, response: Any, exchange: _Exchange, limit: int, *, cuts: bool, is_json: bool) -> None:
        self._stream, self._exchange, self._limit = response.stream, exchange, limit
        self._cuts, self._is_json = cuts, is_json
        is_gzip = response.headers.get("content-encoding", "").lower() == "gzip"
        self._decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16) if is_gzip else None
        self._values = 0

    @property
    def elapsed(self) -> Any:
        return self._stream.elapsed

    def __iter__(self) -> Iterator[bytes]:
        raw = done = 0
        for piece in self._stream:
            raw += len(piece)
            for data in self._decompress(piece):
                if done + len(data) > self._limit and self._cuts:
                    yield data[: self._limit - done]
                    return
                done += len(data)
                self._check(done, data)
                yield data
            if raw > self._limit + (1 << 16) and not self._cuts:
                self._check(raw, b"")
        if self._decompressor is not None and raw and not self._decompressor.eof and not self._cuts:
            raise AnswerError("its body ends in the middle of what is compressed", self._exchange.request)

    def _decompress(self, data: bytes) -> Iterator[bytes]:
        if self._decompressor is None:
            yield data
            return
        try:
            while data and not self._decompressor.eof:
                yield self._decompressor.decompress(data, _PIECE)
                data = self._decompressor.unconsumed_tail
        except zlib.error:
            raise AnswerError("its body is not compressed as it says", self._exchange.request) from None

    def _check(self, done: int, data: bytes) -> None:
        block, request = self._exchange.block, self._exchange.request
        if done > self._limit:
            what = "its answer" if self._is_json or block.file is None else f"`{block.file.name}`"
            raise AnswerError(f"{what} is larger than {self._limit} bytes", request)
        if self._is_json:
            self._values += sum(map(data.count, (b",", b"{", b"[")))
            if self._values > limits.VALUES:
                raise AnswerError(f"its answer has more than {limits.VALUES} values", request)
        if block.pages is not None:
            block.listed += len(data)
            if block.listed > limits.LISTING:
                raise AnswerError(f"its listing is larger than {limits.LISTING} bytes", request)

    def close(self) -> None:
        self._stream.close()


# Connections ---------------------------------------------------------------------------------------------------------


class _Network:
    """The network of a session, whose connections are watched."""

    def __init__(self, network: Any) -> None:
        self._network = network

    def connect_tcp(self, *args: Any, **options: Any) -> _Connection:
        return _Connection(self._network.connect_tcp(*args, **options))

    def connect_unix_socket(self, *args: Any, **options: Any) -> _Connection:
        return _Connection(self._network.connect_unix_socket(*args, **options))

    def sleep(self, seconds: float) -> None:
        self._network.sleep(seconds)


class _Connection:
    """A connection that ends once it is slower than it may be. A time-out is of one read or write only: a server that
    sends a byte a second has none."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        before = time.monotonic()
        data: bytes = self._stream.read(max_bytes, timeout)
        _advance(len(data), time.monotonic() - before)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for at in range(0, len(buffer), _PIECE):
            before = time.monotonic()
            self._stream.write(buffer[at : at + _PIECE], timeout)
            _advance(len(buffer[at : at + _PIECE]), time.monotonic() - before, is_sent=True)

    def start_tls(self, *args: Any, **options: Any) -> _Connection:
        return _Connection(self._stream.start_tls(*args, **options))

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _advance(nbytes: int, seconds: float, *, is_sent: bool = False) -> None:
    """Count bytes of the request that this thread makes. Raises AnswerError if they came too slowly, or if there is no
    end of what comes before the answer."""
    exchange: _Exchange | None = getattr(_thread, "exchange", None)
    if exchange is None:
        return
    exchange.moved += nbytes
    exchange.block.moved += nbytes
    # One that is longer is of a process that was stopped.
    exchange.waited += min(seconds, limits.timeout())
    if exchange.waited > limits.longest_wait(exchange.moved):
        raise AnswerError(f"only {exchange.moved} bytes moved in {exchange.waited:.0f} s", exchange.request)
    exchange.head += 0 if is_sent or exchange.is_answered else nbytes
    if exchange.head > limits.HEAD:
        raise AnswerError("the headers of its answer have no end", exchange.request)


def _server(address: str) -> str:
    scheme, host, port = _origin(address)
    return _short(f"{scheme}://{host}:{port}")


def _short(text: object) -> str:
    return "".join(char if char.isprintable() else "?" for char in str(text))[:80]
