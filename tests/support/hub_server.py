"""A small Hub on 127.0.0.1 that answers the real client: repositories with commits, branches and pull requests, files
in git or in a large file store, tokens, and faults when a test asks for them.

Large files go over LFS, in one part or several; or over Xet, whose store is a directory that hf_xet writes to itself,
or (`cas`) this server, which takes chunks that are not compressed (`HF_XET_XORB_COMPRESSION_POLICY=none`). The Xet hash
of a file of a repository that it sends is its SHA-256 backwards; the client does not compare it. That of a file in a
bucket is the real one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import mmap
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import hf_xet  # type: ignore[import-untyped]

WRITER, READER, STRANGER = "hf_writerSecretToken123", "hf_readerSecretToken456", "hf_nobodySecretToken789"
LARGE = 2048  # bytes from which a file is large; weights always are
_BLOCK = 1 << 16
_CHUNK, _IN_XORB = 1 << 16, 3  # bytes of a chunk, chunks of a xorb, of files that are sent over Xet


@dataclass
class Stored:
    """A file of a commit."""

    size: int
    sha256: str | None  # of a large one
    blob: str
    data: bytes | None  # of a small one


@dataclass
class Commit:
    oid: str
    parent: str | None
    title: str
    files: dict[str, Stored]


@dataclass
class Repo:
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[int, str] = field(default_factory=dict)  # number -> title


@dataclass
class Bucket:
    """Files of a bucket, by their paths: the Xet hash of each, and the batches of operations on them."""

    private: bool = False
    files: dict[str, str] = field(default_factory=dict)
    batches: list[list[tuple[str, str]]] = field(default_factory=list)  # (type, path)
    refused: set[str] = field(default_factory=set)  # paths of which nothing is done


@dataclass
class Fault:
    """What to do with requests that match, `times` of them: answer with a status, or `act`."""

    method: str
    path: str
    status: int | None = None
    act: Callable[[Handler], bool] | None = None
    times: int = 10**6
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False  # do what was asked for, then lose the answer
    skip: int = 0


@dataclass
class Seen:
    method: str
    path: str
    authorization: str | None
    received: int = 0
    sent: int = 0
    status: int = 0


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients are killed on purpose."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Hub:
    """The server. `part` is the size of a part of an upload in several."""

    def __init__(self, folder: Path, part: int | None = None, gated: frozenset[str] = frozenset()) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.store.mkdir(parents=True)
        self.xet = folder / "xet"
        self.cas = False
        self.xorbs: dict[str, list[bytes]] = {}  # chunks that were received
        self.xet_hashes: dict[str, str] = {}  # SHA-256 -> name in the directory behind Xet
        self.slept: list[float] = []  # by the client, between its tries
        self.failed = 0  # requests for which there was a fault
        self.part = part
        self.gated = gated
        self.repos: dict[str, Repo] = {}
        self.buckets: dict[str, Bucket] = {}
        self.of_xet: dict[str, tuple[str, int]] = {}  # real Xet hash -> SHA-256 and size
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.unverified: set[str] = set()  # large files that the client has sent and not asked about
        self.bodies: list[bytes] = []  # of all requests, but those that end up in the store
        self.lock = threading.RLock()
        handler = type("Bound", (Handler,), {"hub": self})
        self.server = Server(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    # What tests do and ask ------------------------------------------------------------------------------------------

    def make(self, name: str, files: dict[str, bytes] | Path | None = None, private: bool = False) -> Repo:
        """A repository with one commit, and a second one with `files`."""
        repo = self.repos[name] = Repo(private)
        self._commit(repo, "main", "initial commit", {".gitattributes": self.stored(".gitattributes", b"")})
        if isinstance(files, Path):
            files = {p.relative_to(files).as_posix(): p.read_bytes() for p in sorted(files.rglob("*")) if p.is_file()}
        if files:
            self.commit(name, files)
        return repo

    def make_bucket(self, name: str, files: dict[str, bytes] | Path | None = None, private: bool = False) -> Bucket:
        self.buckets[name] = Bucket(private)
        if isinstance(files, Path):
            files = {p.relative_to(files).as_posix(): p.read_bytes() for p in sorted(files.rglob("*")) if p.is_file()}
        self.put_in_bucket(name, files or {})
        return self.buckets[name]

    def put_in_bucket(self, name: str, files: Mapping[str, bytes]) -> None:
        """Somebody's files, by the real client's Xet hash."""
        for path, data in files.items():
            oid = hashlib.sha256(data).hexdigest()
            (self.store / oid).write_bytes(data)
            (hashed,) = hf_xet.hash_files([str(self.store / oid)])
            self.of_xet[hashed.hash] = oid, len(data)
            self.buckets[name].files[path] = hashed.hash

    def in_bucket(self, name: str, folder: str = "") -> dict[str, bytes]:
        """The files of a bucket below a folder."""
        files = self.buckets[name].files
        inside = {path: (self.store / self.of_xet[xet][0]).read_bytes() for path, xet in files.items()}
        return {path.removeprefix(folder): data for path, data in inside.items() if path.startswith(folder)}

    def commit(
        self, name: str, files: Mapping[str, bytes | Stored], branch: str = "main", removed: tuple[str, ...] = ()
    ) -> str:
        """Somebody's commit."""
        repo = self.repos[name]
        there = dict(repo.commits[repo.refs[branch]].files)
        there.update({p: f if isinstance(f, Stored) else self.stored(p, f) for p, f in files.items()})
        for path in removed:
            del there[path]
        return self._commit(repo, branch, "somebody's", there)

    def stored(self, path: str, data: bytes) -> Stored:
        if not is_large(path, len(data)):
            return Stored(len(data), None, git_blob(data), data)
        oid = hashlib.sha256(data).hexdigest()
        (self.store / oid).write_bytes(data)
        return self.pointer(oid, len(data))

    @staticmethod
    def pointer(oid: str, size: int) -> Stored:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()
        return Stored(size, oid, git_blob(text), None)

    def _commit(self, repo: Repo, ref: str, title: str, files: dict[str, Stored]) -> str:
        parent = repo.refs.get(ref)
        said = json.dumps([parent, title, len(repo.commits), sorted((n, f.blob) for n, f in files.items())])
        oid = hashlib.sha1(said.encode()).hexdigest()
        repo.commits[oid] = Commit(oid, parent, title, files)
        repo.refs[ref] = oid
        return oid

    def files(self, name: str, ref: str = "main") -> dict[str, bytes]:
        """All files of a branch, but for the one that every repository has."""
        repo = self.repos[name]
        found = repo.commits[repo.refs[ref]].files
        return {path: self.bytes_of(file) for path, file in found.items() if path != ".gitattributes"}

    def bytes_of(self, file: Stored) -> bytes:
        return file.data if file.data is not None else (self.store / str(file.sha256)).read_bytes()

    def received(self) -> bytes:
        """All that was ever sent to it, and what it is when it is decoded."""
        plain = [*self.bodies, *(one.path.encode() for one in self.seen)]
        for coded in re.findall(rb'"(?:sample|content)": ?"([A-Za-z0-9+/]+=*)"', b"\n".join(self.bodies)):
            plain.append(base64.b64decode(coded + b"=" * (-len(coded) % 4)))
        return b"\n".join([*plain, *(p.read_bytes() for p in self.folder.rglob("*") if p.is_file())])

    def history(self, name: str, ref: str = "main") -> list[str]:
        """Titles of its commits, newest first."""
        repo = self.repos[name]
        oid: str | None = repo.refs[ref]
        titles = []
        while oid is not None:
            titles.append(repo.commits[oid].title)
            oid = repo.commits[oid].parent
        return titles

    def fail(self, method: str, path: str, status: int | None = None, **how: Any) -> None:
        """From now on, requests whose path matches the expression fail."""
        self.faults.append(Fault(method, path, status, **how))

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for one in self.faults:
                if one.times and one.method == method and re.search(one.path, path):
                    if one.skip:
                        one.skip -= 1
                        continue
                    one.times -= 1
                    self.failed += 1
                    return one
        return None

    def asked(self, method: str, path: str) -> list[Seen]:
        return [one for one in self.seen if one.method == method and re.search(path, one.path)]


def is_large(path: str, size: int) -> bool:
    return path.endswith((".safetensors", ".bin", ".pt", ".distcp")) or size >= LARGE


class Problem(Exception):
    def __init__(self, status: int, code: str | None = None, message: str | None = None) -> None:
        self.status, self.code, self.message = status, code, message


# What a fault can do -------------------------------------------------------------------------------------------------


def drop(handler: Handler) -> bool:
    """Read some of what is sent, then hang up."""
    handler.rfile.read(min(1000, int(handler.headers.get("Content-Length") or 0)))
    handler.hang_up()
    return True


def cut(handler: Handler) -> bool:
    """Half of a large file, or of what is wanted of it, and no more."""
    return _half(handler, wait=False)


def freeze(handler: Handler) -> bool:
    """Half of it, and then nothing."""
    return _half(handler, wait=True)


def _half(handler: Handler, wait: bool) -> bool:
    data = (handler.hub.store / handler.route.rpartition("/")[2]).read_bytes()
    at = int((re.match(r"bytes=(\d+)", handler.headers.get("Range") or "") or [0, 0])[1])
    handler.send_response(206 if at else 200)
    handler.send_header("Content-Length", str(len(data) - at))
    if at:
        handler.send_header("Content-Range", f"bytes {at}-{len(data) - 1}/{len(data)}")
    handler.end_headers()
    handler.wfile.write(data[at : (at + len(data)) // 2])
    handler.wfile.flush()
    return stall(handler) if wait else drop(handler)


def halve(handler: Handler) -> bool:
    """Half of any answer."""
    answer = handler._answer

    def half(status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        answer(status, data[: len(data) // 2], {**(headers or {}), "Content-Length": str(len(data))})
        handler.hang_up()

    handler._answer = half  # type: ignore[method-assign]
    return False


def spoil(handler: Handler) -> bool:
    """Another last byte."""
    answer = handler._answer

    def spoilt(status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        answer(status, data[:-1] + bytes([data[-1] ^ 1]), headers)
        del handler._answer

    handler._answer = spoilt  # type: ignore[method-assign]
    return False


def stall(handler: Handler) -> bool:
    """Say nothing for longer than any test waits."""
    handler.hub_stopped.wait(30)
    handler.hang_up()
    return True


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    hub_stopped = threading.Event()
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body is written after its headers, and would wait 40 ms for the client

    def log_message(self, *_: Any) -> None:
        pass

    def hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(2)

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _serve(self) -> None:
        parsed = urlsplit(self.path)
        self.route, self.query = parsed.path, parse_qs(parsed.query)
        self.said = Seen(self.command, self.path, self.headers.get("Authorization"))
        self.hub.seen.append(self.said)
        self.body_read = False
        fault = self.hub.fault(self.command, self.path)
        if fault is not None and fault.act is not None and fault.act(self):
            return
        if fault is not None and fault.status is not None and not fault.after:
            self._drain()
            self._answer(fault.status, b'{"error":"made to fail"}', fault.headers)
            return
        self.lose_answer = fault is not None and fault.after
        try:
            self._dispatch()
        except Problem as problem:
            self._drain()
            headers = {}
            if problem.code:
                headers["X-Error-Code"] = problem.code
            if problem.message:
                headers["X-Error-Message"] = problem.message
            self._answer(problem.status, json.dumps({"error": problem.message or problem.code}).encode(), headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    # Plumbing --------------------------------------------------------------------------------------------------------

    def _length(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def _body(self) -> bytes:
        self.body_read = True
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b"".join(iter(self._chunk, b""))
        else:
            data = self.rfile.read(self._length())
        self.said.received += len(data)
        self.hub.bodies.append(data)
        if len(data) < self._length():
            raise ConnectionResetError  # the client was killed
        return data

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline().split(b";")[0], 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def _drain(self) -> None:
        if not self.body_read and self.command in ("POST", "PUT"):
            self._body()

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.said.status = status
        if getattr(self, "lose_answer", False):
            self.hang_up()
            return
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.said.sent += len(data)
            self.wfile.write(data)

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    # Who asks --------------------------------------------------------------------------------------------------------

    def _token(self) -> str | None:
        said = self.headers.get("Authorization")
        if said is None:
            return None
        token = said.removeprefix("Bearer ")
        if token not in (WRITER, READER, STRANGER):
            raise Problem(401, None, "Invalid credentials in Authorization header")
        return token

    def _repo(self, name: str, write: bool = False) -> Repo:
        token = self._token()
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and token not in (WRITER, READER)):
            raise Problem(404 if token else 401, "RepoNotFound", "Repository not found")
        if name in self.hub.gated and token != WRITER:
            raise Problem(403, "GatedRepo", "Access is restricted")
        if write and token is None:
            raise Problem(401, None, "Log in")
        if write and token != WRITER and "create_pr" not in self.query:
            raise Problem(403, None, "You don't have the rights to write here")
        return repo

    def _at(self, repo: Repo, revision: str) -> Commit:
        oid = repo.refs.get(revision) or repo.tags.get(revision, revision)
        if oid not in repo.commits:
            raise Problem(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo.commits[oid]

    # What is asked ---------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        path = self.route
        for method, pattern, name in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found is not None and self.command in method.split("|"):
                getattr(self, name)(*map(unquote, found.groups("")))
                return
        raise Problem(404, None, "no such route")

    def whoami(self) -> None:
        if self._token() is None:
            raise Problem(401, None, "Invalid username or password.")
        self._json({"name": "me", "type": "user", "auth": {"type": "access_token"}, "orgs": []})

    def create(self) -> None:
        said = json.loads(self._body())
        token = self._token()
        if token is None:
            raise Problem(401, None, "Log in")
        if token != WRITER:
            raise Problem(403, None, "You don't have the rights to create a model under this namespace")
        name = f"{said['organization']}/{said['name']}" if said.get("organization") else said["name"]
        with self.hub.lock:
            if name in self.hub.repos:
                raise Problem(409, None, "You already created this model repo")
            self.hub.make(name, private=said.get("visibility") == "private" or said.get("private", False))
        self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def info(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        commit = self._at(repo, revision or "main")
        self._json(
            {"id": name, "modelId": name, "sha": commit.oid, "private": repo.private, "tags": [], "downloads": 0,
             "likes": 0, "siblings": [{"rfilename": path} for path in commit.files]}
        )  # fmt: skip

    def tree(self, name: str, revision: str, folder: str) -> None:
        commit = self._at(self._repo(name), revision)
        inside = f"{folder}/" if folder else ""
        deep = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        rows: dict[str, dict[str, Any]] = {}
        for path, file in commit.files.items():
            if not path.startswith(inside):
                continue
            parts = path[len(inside) :].split("/")
            for depth in range(1, len(parts)):
                above = inside + "/".join(parts[:depth])
                if deep or depth == 1:
                    rows[above] = {"type": "directory", "path": above, "oid": "0" * 40, "size": 0}
            if deep or len(parts) == 1:
                row: dict[str, Any] = {"type": "file", "path": path, "oid": file.blob, "size": file.size}
                if file.sha256 is not None:
                    row["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
                rows[path] = row
        if folder and not rows:
            raise Problem(404, "EntryNotFound", f"{folder} does not exist")
        listed = list(rows.values())
        at = int(self.query.get("cursor", ["0"])[0])
        headers = {}
        if at + 50 < len(listed):
            later = f"{self.hub.url}{self.route}?recursive={str(deep).lower()}&cursor={at + 50}"
            headers["Link"] = f'<{later}>; rel="next"'
        self._json(listed[at : at + 50], headers)

    def commits(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        oid: str | None = self._at(repo, revision).oid
        rows = []
        while oid is not None:
            commit = repo.commits[oid]
            rows.append(
                {"id": oid, "title": commit.title, "message": "", "authors": [{"user": "me"}],
                 "date": "2026-01-01T00:00:00.000Z"}
            )  # fmt: skip
            oid = commit.parent
        self._json(rows)

    def discussions(self, name: str) -> None:
        repo = self._repo(name)
        rows = [
            {"title": title, "num": number, "author": {"name": "me"}, "createdAt": "2026-01-01T00:00:00.000Z",
             "status": "open", "repo": {"name": name, "type": "model"}, "isPullRequest": True}
            for number, title in repo.pulls.items()
        ]  # fmt: skip
        self._json({"discussions": rows, "count": len(rows), "start": 0})

    def _bucket(self, name: str, write: bool = False) -> Bucket:
        token = self._token()
        bucket = self.hub.buckets.get(name)
        if bucket is None or (bucket.private and token not in (WRITER, READER)):
            raise Problem(404 if token else 401, "RepoNotFound", "Repository not found")
        if write and token != WRITER:
            raise Problem(403 if token else 401, None, "You don't have the rights to write here")
        return bucket

    def bucket_tree(self, name: str, prefix: str) -> None:
        """Paths that begin with the letters of a prefix, at any depth: the client asks for nothing else."""
        bucket = self._bucket(name)
        assert self.query["recursive"] == ["true"]
        paths = sorted(path for path in bucket.files if path.startswith(prefix))
        at = int(self.query.get("cursor", ["0"])[0])
        headers = {}
        if at + 50 < len(paths):
            headers["Link"] = f'<{self.hub.url}{self.route}?recursive=true&cursor={at + 50}>; rel="next"'
        self._json([self._bucket_row(bucket, path) for path in paths[at : at + 50]], headers)

    def _bucket_row(self, bucket: Bucket, path: str) -> dict[str, Any]:
        xet = bucket.files[path]
        return {"type": "file", "path": path, "size": self.hub.of_xet[xet][1], "xetHash": xet,
                "mtime": "2026-01-01T00:00:00.000Z", "uploadedAt": "2026-01-01T00:00:00.000Z"}  # fmt: skip

    def bucket_info(self, name: str) -> None:
        bucket = self._bucket(name)
        self._json({"id": name, "private": bucket.private, "createdAt": "2026-01-01T00:00:00.000Z",
                    "size": 0, "totalFiles": len(bucket.files)})  # fmt: skip

    def create_bucket(self, name: str) -> None:
        said, token = json.loads(self._body()), self._token()
        if token != WRITER:
            raise Problem(403 if token else 401, None, "You don't have the rights to create a bucket here")
        if name in self.hub.buckets:
            raise Problem(409, None, "You already created this bucket")
        self.hub.make_bucket(name, private=said.get("visibility") == "private" or said.get("private", False))
        self._json({"url": f"{self.hub.url}/buckets/{name}"})

    def bucket_token(self, name: str, kind: str) -> None:
        self._bucket(name, write=kind == "write")
        self._xet_token()

    def bucket_batch(self, name: str) -> None:
        """Do what can be done of the lines, and say of which it cannot."""
        lines = [json.loads(line) for line in self._body().splitlines()]
        bucket, failed = self._bucket(name, write=True), []
        for line in lines:
            kind, path = line["type"], line["path"]
            known = (kind == "deleteFile" and path in bucket.files) or line.get("xetHash") in self.hub.of_xet
            if path in bucket.refused or not known:
                failed.append({"path": path, "error": "refused by the test" if known else "Not found"})
            elif kind == "addFile":
                bucket.files[path] = line["xetHash"]
            else:
                del bucket.files[path]
        bucket.batches.append([(line["type"], line["path"]) for line in lines])
        said = {"success": not failed, "processed": len(lines), "succeeded": len(lines) - len(failed), "failed": failed}
        self._answer(422 if len(failed) == len(lines) else 200, json.dumps(said).encode())

    def bucket_resolve(self, name: str, path: str) -> None:
        xet = self._bucket(name).files.get(path)
        if xet is None:
            raise Problem(404, "EntryNotFound", "Entry not found")
        oid, size = self.hub.of_xet[xet]
        there = self.hub.url.replace("127.0.0.1", "localhost")
        self._answer(
            302,
            b"",
            {"Location": f"{there}/cdn/{oid}?X-Signature=secret", "X-Xet-Hash": xet, "X-Linked-Size": str(size),
             "X-Linked-ETag": f'"{xet}"',
             "Link": f'<{self.hub.url}/api/buckets/{name}/xet-read-token>; rel="xet-auth"'},
        )  # fmt: skip

    def branch(self, name: str, branch: str) -> None:
        said = json.loads(self._body())
        repo = self._repo(name, write=True)
        if branch in repo.refs:
            raise Problem(409, None, f"Reference already exists: {branch}")
        repo.refs[branch] = self._at(repo, said.get("startingPoint", "main")).oid
        self._json({})

    def tag(self, name: str, revision: str) -> None:
        tag = json.loads(self._body())["tag"]
        repo = self._repo(name, write=True)
        if tag in repo.tags:
            raise Problem(409, None, f"Tag reference exists already: {tag}")
        repo.tags[tag] = self._at(repo, revision).oid
        self._json({})

    def list_refs(self, name: str) -> None:
        repo = self._repo(name)
        rows = {
            kind: [{"name": ref, "ref": f"refs/{folder}/{ref}", "targetCommit": oid} for ref, oid in refs.items()]
            for kind, folder, refs in (("branches", "heads", repo.refs), ("tags", "tags", repo.tags))
        }
        self._json({**rows, "converts": []})

    def validate(self) -> None:
        said = json.loads(self._body())
        wrong = "not_yaml: [" in said["content"]
        self._json({"errors": [{"message": "bad yaml"}] if wrong else [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        said = json.loads(self._body())
        repo = self._repo(name, write=True)
        there = self._at(repo, revision).files
        ignored = b"".join(f.data or b"" for n, f in there.items() if n == ".gitignore").decode().split()
        rows = []
        for file in said["files"]:
            row = {
                "path": file["path"],
                "uploadMode": "lfs" if is_large(file["path"], file["size"]) else "regular",
                "shouldIgnore": file["path"] in ignored,
            }
            if file["path"] in there:
                row["oid"] = there[file["path"]].sha256 or there[file["path"]].blob
            rows.append(row)
        self._json({"files": rows})

    def batch(self, name: str) -> None:
        said = json.loads(self._body())
        self._repo(name, write=True)
        rows = []
        for one in said["objects"]:
            oid, size = one["oid"], one["size"]
            row: dict[str, Any] = {"oid": oid, "size": size}
            if not (self.hub.store / oid).exists() or oid in self.hub.unverified:
                href = f"{self.hub.url}/lfs/{oid}?X-Signature=secret"
                upload: dict[str, Any] = {"href": href}
                part = self.hub.part
                if part is not None and size > part:
                    count = -(-size // part)
                    upload = {
                        "href": f"{self.hub.url}/lfs-complete/{oid}",
                        "header": {
                            "chunk_size": str(part),
                            **{f"{i + 1:05d}": f"{self.hub.url}/lfs/{oid}/{i}" for i in range(count)},
                        },
                    }
                row["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/lfs-verify"}}
            rows.append(row)
        self._json({"transfer": "basic", "objects": rows})

    def put(self, oid: str, part: str) -> None:
        data_at = self.hub.folder / f"incoming-{oid}-{part}-{threading.get_native_id()}-{time.monotonic_ns()}"
        left = self._length()
        self.body_read = True
        with open(data_at, "wb") as stream:
            while left:
                data = self.rfile.read(min(_BLOCK, left))
                if not data:
                    # The client is gone, and so is what it sent.
                    data_at.unlink()
                    self.close_connection = True
                    return
                stream.write(data)
                left -= len(data)
                self.said.received += len(data)
        if part:
            data_at.rename(self.hub.folder / f"part-{oid}-{part}")
        else:
            self._keep(oid, data_at)
        self._answer(200, b"", {"ETag": f'"{oid}-{part}"'})

    def _keep(self, oid: str, path: Path) -> None:
        with open(path, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else oid
        if found != oid:
            path.unlink()
            raise Problem(400, None, "the content is not what its name says")
        path.rename(self.hub.store / oid)
        self.hub.unverified.add(oid)

    def complete(self, oid: str) -> None:
        said = json.loads(self._body())
        whole = self.hub.folder / f"whole-{oid}-{threading.get_native_id()}"
        with open(whole, "wb") as stream:
            for one in said["parts"]:
                part = self.hub.folder / f"part-{oid}-{one['partNumber'] - 1}"
                with open(part, "rb") as piece:
                    shutil.copyfileobj(piece, stream)
        self._keep(oid, whole)
        self._json({})

    def verify(self) -> None:
        said = json.loads(self._body())
        self._token()
        if not (self.hub.store / said["oid"]).exists():
            raise Problem(404, None, "no such object")
        self.hub.unverified.discard(said["oid"])
        self._json({})

    def post_commit(self, name: str, revision: str) -> None:
        lines = [json.loads(line) for line in self._body().splitlines()]
        repo = self._repo(name, write=True)
        with self.hub.lock:
            head = self._at(repo, revision)
            header = lines[0]["value"]
            if header.get("parentCommit") not in (None, head.oid):
                raise Problem(412, None, "A commit has happened since. Please refresh and try again.")
            files = dict(head.files)
            for line in lines[1:]:
                self._apply(files, line["key"], line["value"])
            ref = revision
            answer: dict[str, Any] = {}
            if "create_pr" in self.query:
                number = len(repo.pulls) + 1
                repo.pulls[number] = header["summary"]
                ref = f"refs/pr/{number}"
                repo.refs[ref] = head.oid
                answer["pullRequestUrl"] = f"{self.hub.url}/{name}/discussions/{number}"
            oid = self.hub._commit(repo, ref, header["summary"], files)
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, **answer})

    def _apply(self, files: dict[str, Stored], key: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = Stored(*_small(base64.b64decode(value["content"])))
        elif key == "lfsFile":
            if not (self.hub.store / value["oid"]).exists() and (self.hub.cas or not self.hub.xet.exists()):
                raise Problem(400, None, f"{path}: its bytes were not sent")
            files[path] = self.hub.pointer(value["oid"], value["size"])
        elif key == "deletedFile":
            if path not in files:
                raise Problem(404, "EntryNotFound", "A file with this name doesn't exist")
            del files[path]
        else:
            raise Problem(400, None, f"no such operation: {key}")

    def resolve(self, name: str, revision: str, path: str) -> None:
        commit = self._at(self._repo(name), revision)
        file = commit.files.get(path)
        if file is None:
            raise Problem(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.blob}"', "Accept-Ranges": "bytes"}
        if file.sha256 is None:
            self._bytes(file.data or b"", headers)
            return
        xet_hash = file.sha256[::-1] if self.hub.cas else self.hub.xet_hashes.get(file.sha256)
        if xet_hash is not None:
            headers["X-Xet-Hash"] = xet_hash
            headers["Link"] = f'<{self.hub.url}/api/models/{name}/xet-read-token/{commit.oid}>; rel="xet-auth"'
        headers |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"'}
        # Another host, to the client: what it is sent there must not have the token.
        there = self.hub.url.replace("127.0.0.1", "localhost")
        headers["Location"] = f"{there}/cdn/{file.sha256}?X-Signature=secret&n={quote(path)}"
        self._answer(302, b"", headers)

    def cdn(self, oid: str) -> None:
        with (self.hub.store / oid).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self._bytes(data, {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    # The store behind Xet --------------------------------------------------------------------------------------------

    def reconstruct(self, xet_hash: str) -> None:
        """Say of which chunks a part of a file consists, and where they are: in xorbs of a few chunks each."""
        oid = xet_hash[::-1]
        size = (self.hub.store / oid).stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-")
        assert wanted is not None
        start, end = int(wanted[1]), min(int(wanted[2] or size - 1) + 1, size)
        if start >= size:
            raise Problem(416)
        first, last = start // _CHUNK, -(-end // _CHUNK)
        terms, fetched = [], {}
        for xorb in range(first // _IN_XORB, -(-last // _IN_XORB)):
            at = xorb * _IN_XORB
            chunks = {"start": max(first, at) - at, "end": min(last, at + _IN_XORB) - at}
            nbytes = min((at + chunks["end"]) * _CHUNK, size) - (at + chunks["start"]) * _CHUNK
            name = hashlib.sha256(f"{oid}/{xorb}".encode()).hexdigest()
            terms.append({"hash": name, "unpacked_length": nbytes, "range": chunks})
            begin = chunks["start"] * (_CHUNK + 8)
            in_xorb = {"start": begin, "end": begin + nbytes + 8 * (chunks["end"] - chunks["start"]) - 1}
            url = f"{self.hub.url}/xorb/{oid}/{xorb}?X-Signature=secret"
            fetched[name] = [{"range": chunks, "url": url, "url_range": in_xorb}]
        self._json({"offset_into_first_range": start % _CHUNK, "terms": terms, "fetch_info": fetched})

    def xorb(self, oid: str, number: str) -> None:
        data = (self.hub.store / oid).read_bytes()
        packed = b""
        for at in range(int(number) * _IN_XORB, (int(number) + 1) * _IN_XORB):
            chunk = data[at * _CHUNK : (at + 1) * _CHUNK]
            length = len(chunk).to_bytes(3, "little")
            packed += b"\0" + length + b"\0" + length + chunk if chunk else b""
        self._bytes(packed, {})

    def post_xorb(self, name: str) -> None:
        data, at, chunks = self._body(), 0, []
        while at < len(data) and data[at] == 0:
            assert data[at + 4] == 0, "it is not compressed"
            end = at + 8 + int.from_bytes(data[at + 1 : at + 4], "little")
            chunks.append(data[at + 8 : end])
            at = end
        self.hub.xorbs[name] = chunks
        self._json({"was_inserted": True})

    def post_shard(self) -> None:
        """Keep the files that a shard describes: for each a head, its terms, as many hashes, and its SHA-256."""
        rows = self._body()[48:]
        while rows[:32] != b"\xff" * 32:
            flags, count = (int.from_bytes(rows[at : at + 4], "little") for at in (32, 36))
            content = b""
            for row in range(1, count + 1):
                term = rows[row * 48 : row * 48 + 48]
                first, last = (int.from_bytes(term[at : at + 4], "little") for at in (40, 44))
                content += b"".join(self.hub.xorbs[_hash_text(term[:32])][first:last])
            (self.hub.store / hashlib.sha256(content).hexdigest()).write_bytes(content)
            self.hub.of_xet[_hash_text(rows[:32])] = hashlib.sha256(content).hexdigest(), len(content)
            rows = rows[48 * (1 + count * (1 + (flags >> 31 & 1)) + (flags >> 30 & 1)) :]
        self._json({"result": 1})

    def _bytes(self, data: bytes | mmap.mmap, headers: dict[str, str]) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            self._answer(200, data[:], headers)
            return
        start, end = int(wanted[1]), int(wanted[2] or len(data) - 1) + 1
        headers["Content-Range"] = f"bytes {start}-{min(end, len(data)) - 1}/{len(data)}"
        self._answer(206, data[start:end], headers)

    def xet_token(self, name: str, kind: str, revision: str) -> None:
        self._repo(name, write=kind == "write")
        self._xet_token()

    def _xet_token(self) -> None:
        where = f"{self.hub.url}/cas" if self.hub.cas else f"local://{self.hub.xet}"
        said = {"casUrl": where, "accessToken": "xet-token", "exp": int(time.time()) + 3600}
        self.hub.xet.mkdir(exist_ok=True)
        self._json(
            said,
            {"X-Xet-Cas-Url": said["casUrl"], "X-Xet-Access-Token": "xet-token",
             "X-Xet-Token-Expiration": str(said["exp"])},
        )  # fmt: skip


def _hash_text(data: bytes) -> str:
    return b"".join(data[at : at + 8][::-1] for at in range(0, 32, 8)).hex()


def _small(data: bytes) -> tuple[int, None, str, bytes]:
    return len(data), None, git_blob(data), data


_NAME = r"([^/]+/[^/]+)"
_ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("GET", rf"/api/models/{_NAME}/tree/([^/]+)(?:/(.*))?", "tree"),
    ("GET", rf"/api/models/{_NAME}/commits/([^/]+)", "commits"),
    ("GET", rf"/api/models/{_NAME}/discussions", "discussions"),
    ("POST", rf"/api/models/{_NAME}/preupload/([^/]+)", "preupload"),
    ("POST", rf"/api/models/{_NAME}/branch/([^/]+)", "branch"),
    ("POST", rf"/api/models/{_NAME}/tag/([^/]+)", "tag"),
    ("GET", rf"/api/models/{_NAME}/refs", "list_refs"),
    ("POST", rf"/api/models/{_NAME}/commit/([^/]+)", "post_commit"),
    ("GET", rf"/api/models/{_NAME}/xet-(read|write)-token/([^/]+)", "xet_token"),
    ("GET", rf"/api/models/{_NAME}(?:/revision/([^/]+))?", "info"),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/([0-9a-f]+)(?:/(\d+))?", "put"),
    ("POST", r"/lfs-complete/([0-9a-f]+)", "complete"),
    ("POST", r"/lfs-verify", "verify"),
    ("GET|HEAD", r"/cdn/([0-9a-f]+)", "cdn"),
    ("GET", r"/cas/v1/reconstructions/([0-9a-f]+)", "reconstruct"),
    ("GET", r"/xorb/([0-9a-f]+)/(\d+)", "xorb"),
    ("POST", r"/cas/v1/xorbs/default/([0-9a-f]+)", "post_xorb"),
    ("POST", r"/cas/v1/shards", "post_shard"),
    ("GET|HEAD", rf"/{_NAME}/resolve/([^/]+)/(.+)", "resolve"),
    ("GET", rf"/api/buckets/{_NAME}", "bucket_info"),
    ("POST", rf"/api/buckets/{_NAME}", "create_bucket"),
    ("POST", rf"/api/buckets/{_NAME}/batch", "bucket_batch"),
    ("GET", rf"/api/buckets/{_NAME}/xet-(read|write)-token", "bucket_token"),
    ("GET", rf"/api/buckets/{_NAME}/tree(?:/(.*))?", "bucket_tree"),
    ("GET|HEAD", rf"/buckets/{_NAME}/resolve/(.+)", "bucket_resolve"),
]
