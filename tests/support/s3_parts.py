"""What S3 does and moto does not, of objects in parts: conditions on what is copied, and checksums of parts."""

from __future__ import annotations

import zlib
from base64 import b64encode
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from ckpttool.storage.crc import combine

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.s3_server import Request


class Parts:
    """The uploads of a server, which `ask` asks. With `tells_sums` false it has no checksums, as others than S3."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask
        self.tells_sums = True
        self.copied = 0  # bytes
        self.instead: dict[str, str] = {}  # ranges that are copied in place of others
        self._sums: dict[str, dict[int, tuple[int, int]]] = {}  # CRC-32 and sizes, by numbers of parts, by uploads

    def refusal(self, request: Request) -> tuple[int, str] | None:
        """Return the status and the code with which S3 would refuse a request."""
        query, headers = _query(request), request.headers
        if (source := headers.get("x-amz-copy-source")) is not None and "uploadId" in query:
            answer = self._ask("HEAD", _path(source))
            if answer.status_code != 200:
                return 404, "NoSuchKey"
            first, last = _range(headers)
            assert 0 <= first <= last < int(answer.headers["Content-Length"])
            assert last - first < 5 << 30
            if headers.get("x-amz-copy-source-if-match", answer.headers["ETag"]) != answer.headers["ETag"]:
                return 412, "PreconditionFailed"
        wanted, sums = headers.get("x-amz-checksum-crc32"), self._sums.get(query.get("uploadId", ""))
        if request.method == "POST" and wanted is not None and sums is not None:
            whole = 0
            for _, (crc, nbytes) in sorted(sums.items()):
                whole = combine(whole, crc, nbytes)
            return None if _encoded(whole) == wanted else (400, "BadDigest")
        return None

    def taken(self, span: str) -> str:
        """Return the range that is copied where this one is asked for."""
        return self.instead.get(span, span)

    def answer(self, request: Request, body: bytes, data: bytes) -> bytes:
        """Return an answer with the checksum of the part that was copied."""
        query, headers = _query(request), request.headers
        if request.method == "POST" and "uploads" in query and "x-amz-checksum-algorithm" in headers:
            assert (headers["x-amz-checksum-algorithm"], headers["x-amz-checksum-type"]) == ("CRC32", "FULL_OBJECT")
            self._sums[data.partition(b"<UploadId>")[2].partition(b"<")[0].decode()] = {}
        sums = self._sums.get(query.get("uploadId", ""))
        if sums is None or "partNumber" not in query:
            return data
        if (source := headers.get("x-amz-copy-source")) is not None:
            body = self._ask(
                "GET", _path(source), headers={"Range": self.taken(headers["x-amz-copy-source-range"])}
            ).data
            self.copied += len(body)
        sums[int(query["partNumber"])] = zlib.crc32(body), len(body)
        told = f"<ChecksumCRC32>{_encoded(zlib.crc32(body))}</ChecksumCRC32></CopyPartResult>"
        return data.replace(b"</CopyPartResult>", told.encode()) if self.tells_sums else data


def _query(request: Request) -> dict[str, str]:
    return dict(one.partition("=")[::2] for one in request.query.split("&"))


def _path(source: str) -> str:
    bucket, _, name = unquote(source).lstrip("/").partition("/")
    return f"/{bucket}/{quote(name)}"


def _range(headers: dict[str, str]) -> tuple[int, int]:
    first, _, last = headers["x-amz-copy-source-range"].removeprefix("bytes=").partition("-")
    return int(first), int(last)


def _encoded(crc: int) -> str:
    return b64encode(crc.to_bytes(4, "big")).decode()
