"""Objects that S3 assembles from ranges of others: `UploadPartCopy`, which boto3 has and obstore has not.

The parts are copied first, on the condition that each source is the version that was listed; then what is around them
is sent, which may need the checksums of what was copied. S3 tells the CRC-32 of each part, and compares that of the
whole object with ours. Of a store that tells none, what was copied is read afterwards.
"""

from __future__ import annotations

import hashlib
import re
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

from obstore.exceptions import GenericError, PermissionDeniedError, PreconditionError

from ckpttool.remote.cloud import errors
from ckpttool.remote.cloud.boto import RefusedError
from ckpttool.remote.cloud.store import CloudStore
from ckpttool.storage.assembled import AssembledFile
from ckpttool.storage.crc import combine, crc32
from ckpttool.storage.senders import SendingStopped
from ckpttool.storage.stores import Location

_AT_ONCE = 16  # requests
_POLL = 0.1  # seconds
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class AssembledObject:
    """One object, which `copy` begins and `send` completes."""

    def __init__(
        self,
        client: Any,
        bucket: str,
        key: str,
        file: AssembledFile,
        check: Callable[[], None],
        stopped: threading.Event,
    ) -> None:
        self.file, self.stopped, self._check = file, stopped, check
        self._client, self.key, self._place = client, key, {"Bucket": bucket, "Key": key}
        self._upload: dict[str, Any] = {}
        self.size = sum(part.nbytes for part in file.parts)
        self.copied = sum(part.nbytes for part in file.parts if part.source is not None)
        self.sums: list[int | None] = [None] * len(file.parts)
        self._tags = [""] * len(file.parts)
        self.may_be_complete = False

    @property
    def has_sums(self) -> bool:
        """Whether the store has told the checksums of all that it copied."""
        return all(part.source is None or crc is not None for part, crc in zip(self.file.parts, self.sums, strict=True))

    @property
    def tag(self) -> str | None:
        """The tag that the object has, None where those of its parts are no MD5."""
        found = [_MD5.fullmatch(tag) for tag in self._tags]
        digests = b"".join(bytes.fromhex(one[1]) for one in found if one is not None)
        md5 = hashlib.md5(digests, usedforsecurity=False).hexdigest()
        return f"{md5}-{len(found)}" if all(found) else None

    def copy(self, report: Callable[[], None]) -> None:
        """Copy what is copied; `report` is called meanwhile. Raises RefusedError if the store does not do that."""
        answer = self._ask("create_multipart_upload", ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT")
        self._upload = {"UploadId": answer["UploadId"]}
        first, *others = [i for i, part in enumerate(self.file.parts) if part.source is not None]
        for numbers in ([first], others):
            self._do(self._copy, numbers, report=report)
            if self.file.needs_sums and any(self.sums[number] is None for number in numbers):
                raise RefusedError("neither the store nor the source has checksums of what it would copy")

    def _copy(self, number: int) -> None:
        part = self.file.parts[number]
        assert part.source is not None
        store = part.source.store
        assert isinstance(store, CloudStore)
        answer = self._ask(
            "upload_part_copy",
            source=part.source,
            PartNumber=number + 1,
            CopySource={"Bucket": store.bucket, "Key": part.source.key},
            CopySourceRange=f"bytes={part.offset}-{part.offset + part.nbytes - 1}",
            CopySourceIfMatch=store.strong_tag(part.source.key),
            **self._upload,
        )["CopyPartResult"]
        self._tags[number] = answer["ETag"]
        if crc := answer.get("ChecksumCRC32"):
            self.sums[number] = int.from_bytes(b64decode(crc), "big")

    def send(self, path: Location, condition: dict[str, Any], completing: Callable[[], None]) -> str:
        """Send what is not copied, and return the tag of the object, which is made on a condition on what is there.
        `completing` is called before that."""

        def send(number: int) -> None:
            part = self.file.parts[number]
            data = path.read(part.start, part.nbytes)
            self.sums[number] = crc32(data)
            answer = self._ask(
                "upload_part", PartNumber=number + 1, Body=data, ChecksumCRC32=_encoded(crc32(data)), **self._upload
            )
            self._tags[number] = answer["ETag"]

        self._do(send, [i for i, part in enumerate(self.file.parts) if part.source is None], 2)
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(self._tags, 1)]
        more: dict[str, Any] = {"MultipartUpload": {"Parts": parts}}
        if self.has_sums:
            whole = 0
            for part, crc in zip(self.file.parts, self.sums, strict=True):
                whole = combine(whole, crc or 0, part.nbytes)
            more |= {"ChecksumCRC32": _encoded(whole), "ChecksumType": "FULL_OBJECT"}
        self._check()
        completing()
        self.may_be_complete = True
        try:
            answer = self._ask("complete_multipart_upload", **condition, **more, **self._upload)
        except GenericError as error:
            if not condition or "status code: 501" not in str(error):
                raise
            # It knows no conditions here, as for objects that obstore sends in parts.
            answer = self._ask("complete_multipart_upload", **more, **self._upload)
        self._upload = {}
        return str(answer["ETag"])

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """A block in which an error removes what was copied and sent, if it is not an object yet."""
        try:
            yield
        except Exception:
            if self._upload:
                with suppress(Exception):
                    self._client.abort_multipart_upload(**self._place, **self._upload)
            raise

    def _do(
        self,
        call: Callable[[int], None],
        numbers: Sequence[int],
        threads: int = _AT_ONCE,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """Call a function with each number in a few threads. Whoever stops this does not wait for an answer."""

        def do(number: int) -> None:
            if self.stopped.is_set():
                raise SendingStopped
            self._check()
            call(number)

        pool = ThreadPoolExecutor(threads, "ckpttool-assembly")
        try:
            for each in [pool.submit(do, number) for number in numbers]:
                while not wait([each], _POLL).done:
                    report()
                    if self.stopped.is_set():
                        raise SendingStopped
                each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, operation: str, *, source: Location | None = None, **options: Any) -> Any:
        """Make a request, and raise what obstore would."""
        from botocore.exceptions import (  # type: ignore[import-untyped]
            BotoCoreError,
            ClientError,
            HTTPClientError,
        )

        begins = operation in ("create_multipart_upload", "upload_part_copy")
        try:
            return getattr(self._client, operation)(**self._place, **options)
        except ClientError as error:
            said = error.response
            status = said.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code, message = said.get("Error", {}).get("Code", ""), said.get("Error", {}).get("Message", "")
            text = f"status code: {status}: <Code>{code}</Code><Message>{message}</Message>"
            if source is not None and (code == "NoSuchKey" or status == 412):
                raise errors.changed(str(source)) from None
            if status == 412:
                raise PreconditionError(text) from None
            if begins and (status == 501 or (400 <= status < 500 and code not in _PASSING)):
                raise RefusedError(f"the store refused it ({code or status})") from None
            raise (PermissionDeniedError if status == 403 else GenericError)(text) from None
        except HTTPClientError as error:
            what = "operation timed out" if "Timeout" in type(error).__name__ else "connection closed"
            raise GenericError(f"{what}: {type(error).__name__}") from None
        except BotoCoreError as error:
            # No credentials, or a version that does not know a parameter.
            raise (RefusedError if begins else GenericError)(f"boto3 says {type(error).__name__}") from None


# What the store says to anybody some time; and what it says of an upload that somebody else has aborted.
_PASSING = (
    "NoSuchUpload",
    "NoSuchBucket",
    "RequestTimeout",
    "SlowDown",
    "TooManyRequests",
    "RequestTimeTooSkewed",
    "ExpiredToken",
)


def _encoded(crc: int) -> str:
    return b64encode(crc.to_bytes(4, "big")).decode()
