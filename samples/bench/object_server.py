"""An S3 server for measurements: `python object_server.py FOLDER`, which prints its address.

Objects are files of FOLDER, sent by `sendfile`, and what comes is written as it comes, so that the client is what takes
time. It knows the requests of obstore, of botocore and of the CRT, looks at no signature, and counts: `GET /counts`
returns requests by kind and bytes as JSON, and begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

_BLOCK = 1 << 18
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def place_of(folder: Path, bucket: str, key: str) -> Path:
    """Return where an object lies. All of a bucket are in one folder: a key may be the beginning of another."""
    return folder / bucket / quote(key, safe="")


class _Counts:
    """What was asked for since the last look. A copy within the store has no bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, number: int = 1) -> None:
        with self._lock:
            self._counts[kind] += number

    def take(self) -> bytes:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return json.dumps(counts).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # a header is one packet
    folder: Path
    counts: _Counts
    tags: dict[str, str]
    lengths: dict[str, int]  # of the parts of uploads

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY

    def handle_expect_100(self) -> bool:
        self.send_response_only(100)
        self.end_headers()
        self.wfile.flush()
        return True

    def _parsed(self) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return bucket, key, query

    def _path(self, bucket: str, key: str) -> Path:
        return place_of(self.folder, bucket, key)

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

    def _tag(self, path: Path) -> str:
        return self.tags.get(path.name) or f'"{path.stat().st_mtime_ns:x}"'

    # Reading ---------------------------------------------------------------------------------------------------------

    def do_HEAD(self) -> None:
        bucket, key, _ = self._parsed()
        self.counts.add("HEAD")
        path = self._path(bucket, key)
        if not key or not path.exists():
            self._fail(200 if not key else 404, "NotFound")
            return
        self.send_response(200)
        self._describe(path, path.stat().st_size)

    def _describe(self, path: Path, length: int) -> None:
        self.send_header("ETag", self._tag(path))
        self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def do_GET(self) -> None:
        bucket, key, query = self._parsed()
        if bucket == "counts":
            self._answer(200, self.counts.take())
            return
        if not key:
            self.counts.add("LIST")
            self._list(bucket, query)
            return
        self.counts.add("GET")
        path = self._path(bucket, key)
        if not path.exists():
            self._fail(404, "NoSuchKey")
            return
        wanted = self.headers.get("If-Match")
        if wanted is not None and wanted != self._tag(path):
            self._fail(412, "PreconditionFailed")
            return
        size = path.stat().st_size
        first, last = 0, size - 1
        if (match := _RANGE.fullmatch(self.headers.get("Range", ""))) is not None:
            first = int(match[1]) if match[1] else max(0, size - int(match[2]))
            last = min(last, int(match[2])) if match[1] and match[2] else last
            if first >= size:
                self._fail(416, "InvalidRange")
                return
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self._describe(path, last + 1 - first)
        self.wfile.flush()
        with open(path, "rb") as stream:
            at = first
            while at <= last:
                sent = os.sendfile(self.connection.fileno(), stream.fileno(), at, last + 1 - at)
                if not sent:
                    break
                at += sent
        self.counts.add("bytes out", at - first)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        most = int(query.get("max-keys", 1000))
        after = query.get("continuation-token", query.get("start-after", ""))
        keys = sorted(unquote(path.name) for path in (self.folder / bucket).iterdir())
        parts, folders = [], dict[str, None]()
        is_cut, last = False, ""
        for key in keys:
            if not key.startswith(prefix) or key <= after:
                continue
            if len(parts) + len(folders) == most:
                is_cut = True
                break
            inside = key[len(prefix) :]
            last = key
            if delimiter and delimiter in inside:
                folders[prefix + inside.partition(delimiter)[0] + delimiter] = None
                continue
            path = self._path(bucket, key)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(path.stat().st_mtime))
            parts.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{stamp}</LastModified><ETag>"
                f"{escape(self._tag(path))}</ETag><Size>{path.stat().st_size}</Size></Contents>"
            )
        parts += [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders]
        more = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if is_cut else ""
        self._xml(
            "ListBucketResult",
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(parts)}</KeyCount>"
            f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(is_cut).lower()}</IsTruncated>{more}{''.join(parts)}",
        )

    def _xml(self, name: str, inside: str) -> None:
        namespace = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} {namespace}>{inside}</{name}>'
        self._answer(200, text.encode(), Content_Type="application/xml")

    # Writing ---------------------------------------------------------------------------------------------------------

    def do_PUT(self) -> None:
        bucket, key, query = self._parsed()
        if not key:
            (self.folder / bucket).mkdir(exist_ok=True)
            self._answer(200)
            return
        source = self.headers.get("x-amz-copy-source")
        self.counts.add("COPY" if source else "PUT part" if "uploadId" in query else "PUT")
        target = self._path(bucket, key)
        at = 0
        if "uploadId" in query:
            place = self._upload(query["uploadId"]) / query["partNumber"]
            length = int(self.headers.get("x-amz-decoded-content-length") or self.headers.get("Content-Length", 0))
            if not source and length == self.lengths.setdefault(place.parent.name, length):
                # In place: only the last part has another length.
                place, at = place.with_name("whole"), (int(place.name) - 1) * length
        else:
            place = target.with_name(f".{threading.get_ident()}")
        digest = self._copy(source, place) if source else self._receive(place, at)
        tag = f'"{digest}"'
        if place.parent == target.parent:
            there = self._tag(target) if target.exists() else None
            wanted = self.headers.get("If-Match")
            if (self.headers.get("If-None-Match") == "*" and there) or (wanted is not None and wanted != there):
                place.unlink()
                self._fail(412, "PreconditionFailed")
                return
            place.rename(target)
            self.tags[target.name] = tag
        if source:
            name = "CopyPartResult" if "uploadId" in query else "CopyObjectResult"
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
            self._xml(name, f"<LastModified>{stamp}</LastModified><ETag>{escape(tag)}</ETag>")
        else:
            self._answer(200, ETag=tag)

    def _receive(self, place: Path, at: int) -> str:
        """Write the body to a file, at an offset, and return its MD5."""
        digest = hashlib.md5(usedforsecurity=False)
        total = 0
        is_framed = "aws-chunked" in self.headers.get("Content-Encoding", "")
        with open(os.open(place, os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as stream:
            stream.seek(at)
            for block in self._frames() if is_framed else self._blocks(int(self.headers.get("Content-Length", 0))):
                digest.update(block)
                stream.write(block)
                total += len(block)
        self.counts.add("bytes in", total)
        return digest.hexdigest()

    def _blocks(self, left: int) -> Any:
        buffer = memoryview(bytearray(_BLOCK))
        while left:
            count = self.rfile.readinto1(buffer[: min(left, _BLOCK)])  # type: ignore[attr-defined]
            if not count:
                raise OSError("the body is short")
            left -= count
            yield buffer[:count]

    def _frames(self) -> Any:
        while length := int(self.rfile.readline().partition(b";")[0], 16):
            yield from self._blocks(length)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def _copy(self, source: str, place: Path) -> str:
        bucket, _, key = unquote(source).lstrip("/").partition("/")
        path = self._path(bucket, key)
        first, last = 0, path.stat().st_size - 1
        if (match := _RANGE.fullmatch(self.headers.get("x-amz-copy-source-range", ""))) is not None:
            first, last = int(match[1]), int(match[2])
        digest = hashlib.md5(usedforsecurity=False)
        with open(path, "rb") as old, open(place, "wb", buffering=0) as new:
            old.seek(first)
            left = last + 1 - first
            while left and (block := old.read(min(left, _BLOCK))):
                digest.update(block)
                new.write(block)
                left -= len(block)
        return digest.hexdigest()

    def _upload(self, name: str) -> Path:
        return self.folder / ".uploads" / re.sub(r"\W", "", name)

    def do_POST(self) -> None:
        bucket, key, query = self._parsed()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "delete" in query:
            self.counts.add("DELETE many")
            names = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for name in map(unescape, names):
                self._path(bucket, name).unlink(missing_ok=True)
            self._xml("DeleteResult", "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names))
        elif "uploads" in query:
            self.counts.add("POST uploads")
            name = f"{time.time_ns():x}{threading.get_ident():x}"
            self._upload(name).mkdir(parents=True)
            inside = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
            self._xml("InitiateMultipartUploadResult", inside)
        else:
            self.counts.add("POST complete")
            self._complete(bucket, key, query["uploadId"], body.decode())

    def _complete(self, bucket: str, key: str, upload: str, body: str) -> None:
        numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", body)]
        tags = [bytes.fromhex(tag) for tag in re.findall(r"([0-9a-f]{32})", body)]
        folder, target = self._upload(upload), self._path(bucket, key)
        with open(os.open(folder / "whole", os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as stream:
            for number in numbers:
                if not (folder / str(number)).exists():
                    stream.seek(self.lengths[folder.name], os.SEEK_CUR)
                    continue
                with open(folder / str(number), "rb") as part:
                    left = os.fstat(part.fileno()).st_size
                    while left:
                        left -= os.sendfile(stream.fileno(), part.fileno(), None, left)  # type: ignore[arg-type]
                (folder / str(number)).unlink()
        (folder / "whole").rename(target)
        whole = hashlib.md5(b"".join(tags), usedforsecurity=False).hexdigest()
        self.tags[target.name] = f'"{whole}-{len(numbers)}"'
        inside = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><ETag>{escape(self.tags[target.name])}</ETag>"
        self._xml("CompleteMultipartUploadResult", inside)

    def do_DELETE(self) -> None:
        bucket, key, query = self._parsed()
        self.counts.add("DELETE")
        if "uploadId" in query:
            for part in self._upload(query["uploadId"]).iterdir():
                part.unlink()
        else:
            self._path(bucket, key).unlink(missing_ok=True)
        self._answer(204)


def main() -> None:
    """Serve until standard input ends."""
    folder = Path(sys.argv[1])
    (folder / "bucket").mkdir(parents=True)
    own = type("Handler", (_Handler,), {"folder": folder, "counts": _Counts(), "tags": {}, "lengths": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), own)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
