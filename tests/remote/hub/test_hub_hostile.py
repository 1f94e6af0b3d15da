"""An endpoint that lies: what it answers is input, as what is in a checkpoint is.

Each answer meets `inspect`, `convert`, `show` or `export`, and must end in one error of the right class, with nothing
written outside of the cache and DST, nothing sent to another host that only the endpoint may have, and an end.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils._xet import XET_CONNECTION_INFO_CACHE, abort_xet_session
from safetensors.torch import save, save_file
from support.cli import run
from support.hub_server import WRITER, Handler, Hub

from ckpttool.remote.hub import answers, blocks, limits

COMMIT, SHA256 = "c0" * 20, "5a" * 32
READ = ("inspect", "convert", "show")
FETCH = ("convert",)  # what asks for whole files
SEND = ("export",)
MOST = 24 << 20  # bytes that a server of endless answers sends at most


@dataclass
class Lie:
    """An answer: to which requests, what it is, which commands it meets, and what the error says."""

    method: str
    path: str
    act: Callable[[Handler], bool]
    said: str
    jobs: tuple[str, ...] = READ
    xet: bool = False
    exit_codes: tuple[int, ...] = (8,)


# What an answer may be ------------------------------------------------------------------------------------------------


def headers(**changed: str | None) -> Callable[[Handler], bool]:
    """The answer with other headers; None leaves one out. `{}` is the address of the other host."""

    def act(handler: Handler) -> bool:
        answer = handler._answer

        def change(status: int, data: bytes, given: dict[str, str] | None = None) -> None:
            del handler._answer
            ours = {name.replace("_", "-"): value for name, value in changed.items()}
            kept = {k: v for k, v in (given or {}).items() if k.lower() not in map(str.lower, ours)}
            new = {name: filled(handler, value) for name, value in ours.items() if value is not None}
            answer(status, data, {**kept, **new})

        handler._answer = change  # type: ignore[method-assign]
        return False

    return act


def filled(handler: Handler, text: str) -> str:
    """With the addresses and the places that are known when it is said."""
    hub: Any = handler.hub
    places = {"{}": hub.other.url, "OTHER": hub.other.url, "HUB": hub.url, "VICTIM": str(hub.folder.parent / "victim")}
    for name, place in places.items():
        text = text.replace(name, place)
    return text


def body(change: Callable[[Any], Any], **more: str) -> Callable[[Handler], bool]:
    """The answer with another value in its JSON."""

    def act(handler: Handler) -> bool:
        answer = handler._answer

        def changed(status: int, data: bytes, given: dict[str, str] | None = None) -> None:
            del handler._answer
            text = filled(handler, json.dumps(change(json.loads(data))))
            answer(status, text.encode(), {**(given or {}), **more})

        handler._answer = changed  # type: ignore[method-assign]
        return False

    return act


def says(data: bytes, status: int = 200, **more: str) -> Callable[[Handler], bool]:
    """This answer, whatever was asked."""

    def act(handler: Handler) -> bool:
        handler._drain()
        handler._answer(status, data, {name.replace("_", "-"): filled(handler, value) for name, value in more.items()})
        return True

    return act


def endless(
    piece: bytes, status: int = 200, pause: float = 0.0, head: bytes = b"", **more: str
) -> Callable[[Handler], bool]:
    """A body that has no end, but for that of this test."""

    def act(handler: Handler) -> bool:
        handler._drain()
        handler.close_connection = True
        handler.send_response(status)
        for name, value in more.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        pour(handler, piece, pause, head)
        return True

    return act


def pour(handler: Handler, piece: bytes, pause: float = 0.0, head: bytes = b"") -> None:
    with suppress(OSError):
        handler.wfile.write(head)
        for _ in range(MOST // len(piece) if not pause else 400):
            handler.wfile.write(piece)
            handler.said.sent += len(piece)
            handler.wfile.flush()
            if pause and handler.hub_stopped.wait(pause):
                break
    handler.hang_up()


def raw(piece: bytes, pause: float = 0.0) -> Callable[[Handler], bool]:
    """Bytes before any answer."""

    def act(handler: Handler) -> bool:
        handler._drain()
        pour(handler, piece, pause)
        return True

    return act


def of_all(act: Callable[[Handler], bool]) -> Callable[[Handler], bool]:
    """What is answered when no range is asked for."""
    return lambda handler: "Range" not in handler.headers and act(handler)


def every_page(handler: Handler) -> bool:
    """A page with one file, and always another page."""
    number = len(handler.hub.seen)
    row = {"type": "file", "path": f"file-{number}", "oid": COMMIT, "size": 1}
    handler._json([row], {"Link": f'<{handler.hub.url}{handler.route}?cursor={number}>; rel="next"'})
    return True


def rows(**changed: Any) -> Callable[[Handler], bool]:
    """The listing, of which the file of weights is changed."""

    def change(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for row in listed:
            if row["path"] == "model.safetensors":
                row.update(changed)
        return listed

    return body(change)


def added(path: object) -> Callable[[Handler], bool]:
    return body(lambda listed: [*listed, {"type": "file", "path": path, "oid": COMMIT, "size": 3}])


def lfs(**changed: Any) -> dict[str, Any]:
    return {"lfs": {"oid": SHA256, "size": 400_000, "pointerSize": 134, **changed}}


SOME = json.dumps([list(range(99))]).encode()
BOMB = gzip.compress(bytes(MOST))
NEXT = '<{}/api/models/org/name/tree/main?cursor=1>; rel="next"'
INFO, TREE = r"^/api/models/org/name(/revision/|$)", "/tree/"
WEIGHTS = "/resolve/.*/model.safetensors"
TOKEN = "the error, if there is one, is that of a server that is not given the token"
UP = "../../../../../victim/"
LIES = {
    # Names: of a commit, a blob, a file.
    "sha is a path": Lie(
        "GET", INFO, body(lambda said: {**said, "sha": UP + "PWN"}), "a commit is named", (*READ, "export")
    ),
    "sha is absolute": Lie("GET", INFO, body(lambda said: {**said, "sha": "VICTIM/PWN"}), "a commit is named"),
    "sha is short": Lie("GET", INFO, body(lambda said: {**said, "sha": "c0ffee"}), "a commit is named"),
    "sha is a number": Lie("GET", INFO, body(lambda said: {**said, "sha": 7}), "a commit is named"),
    "sha is missing": Lie(
        "GET", INFO, body(lambda said: {**said, "sha": None}), "a commit is named", (*READ, "export")
    ),
    "sha with a line": Lie("GET", INFO, body(lambda said: {**said, "sha": COMMIT + "\n"}), "a commit is named"),
    "commit is a path": Lie("HEAD", WEIGHTS, headers(X_Repo_Commit=UP + "PWN"), "a commit is named", FETCH),
    "commit is a command": Lie("HEAD", WEIGHTS, headers(X_Repo_Commit="touch PWNED #"), "a commit is named", FETCH),
    "another commit": Lie("HEAD", WEIGHTS, headers(X_Repo_Commit=COMMIT), "answers for the commit", FETCH),
    "commit of no file": Lie(
        "HEAD",
        WEIGHTS,
        says(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=UP + "x"),
        "a commit is named",
        FETCH,
    ),
    "etag is a path": Lie("HEAD", WEIGHTS, headers(X_Linked_Etag=f'"{UP}key"'), "the ETag of", FETCH),
    "etag is absolute": Lie("HEAD", WEIGHTS, headers(X_Linked_Etag='"VICTIM/key"'), "the ETag of", FETCH),
    "etag is weak": Lie("HEAD", WEIGHTS, headers(X_Linked_Etag=f'W/"{UP}key"'), "the ETag of", FETCH),
    "etag of another": Lie("HEAD", WEIGHTS, headers(X_Linked_Etag=f'"{SHA256}"'), "the ETag of", FETCH),
    "plain etag": Lie("HEAD", WEIGHTS, headers(X_Linked_Etag=None, ETag=f'"{UP}key"'), "the ETag of", FETCH),
    "another size": Lie("HEAD", WEIGHTS, headers(X_Linked_Size="7"), "has 7 bytes", FETCH),
    "etag of git": Lie("HEAD", "/config.json", headers(ETag=f'"{UP}key"'), "the ETag of", ("export-like",)),
    "file above": Lie("GET", TREE, added("../../x"), "outside the checkpoint", exit_codes=(4,)),
    "file at the root": Lie("GET", TREE, added("/etc/x"), "outside the checkpoint", exit_codes=(4,)),
    "file with a backslash": Lie("GET", TREE, added("a\\..\\x"), "outside the checkpoint", exit_codes=(4,)),
    "file with nul": Lie("GET", TREE, added("a\0b"), "outside the checkpoint", exit_codes=(4,)),
    "file with a surrogate": Lie("GET", TREE, added("a\ud800"), "not a valid file name", exit_codes=(4,)),
    "file of Windows": Lie("GET", TREE, added("C:/x"), "outside the checkpoint", exit_codes=(4,)),
    "file without a name": Lie("GET", TREE, added(""), "outside the checkpoint", exit_codes=(4,)),
    "file is a number": Lie("GET", TREE, added(7), "is not a name"),
    "file too deep": Lie("GET", TREE, added("a/" * 90 + "b"), "too long for one"),
    "file in a file": Lie("GET", TREE, added("model.safetensors/x"), "as a file, and"),
    "negative size": Lie("GET", TREE, rows(**lfs(size=-1)), "with the size"),
    "huge size": Lie("GET", TREE, rows(**lfs(size=1 << 70)), "with the size"),
    "size is a truth": Lie("GET", TREE, rows(**lfs(size=True)), "with the size"),
    "digest is a path": Lie("GET", TREE, rows(**lfs(oid=UP + "x")), "with the digest"),
    "oid is a path": Lie("GET", TREE, rows(oid=UP + "x"), "with the digest"),
    # Bodies without an end.
    "endless info": Lie("GET", INFO, endless(b" " * 65536), "larger than", (*READ, "export")),
    "endless tree": Lie("GET", TREE, endless(b" " * 65536), "larger than"),
    "values": Lie("GET", TREE, endless(b"[]," * 2000, head=b"["), "more than 50000 values"),
    "a bomb": Lie("GET", TREE, says(BOMB, Content_Encoding="gzip"), "larger than"),
    "a bomb of two": Lie("GET", TREE, says(gzip.compress(BOMB), Content_Encoding="gzip, gzip"), "was not requested"),
    "another coding": Lie("GET", TREE, says(b"x", Content_Encoding="br"), "was not requested"),
    "half a coding": Lie("GET", TREE, says(gzip.compress(SOME)[:-20], Content_Encoding="gzip"), "compressed"),
    "no coding": Lie("GET", TREE, says(b"[]", Content_Encoding="gzip"), "not compressed as it says"),
    "endless error": Lie("GET", INFO, endless(b"x" * 65536, 404), "404", (*READ, "export")),
    "endless error of a file": Lie("GET", "^/cdn/", endless(b"x" * 65536, 400), "400", ("inspect", "convert")),
    "endless pages": Lie("GET", TREE, every_page, "more than 30 pages"),
    "pages in a ring": Lie(
        "GET", TREE, headers(Link='<HUB/api/models/org/name/tree/main>; rel="next"'), "followed by one"
    ),
    "endless file": Lie("GET", "^/cdn/", of_all(endless(b"x" * 65536)), "larger than", FETCH),
    "file that is larger": Lie(
        "GET", "^/cdn/", headers(Content_Length="9999999"), "has 9999999 bytes", ("inspect", "convert")
    ),
    "endless redirections": Lie(
        "GET", INFO, lambda handler: says(b"", 307, Location=handler.path)(handler), "redirect", READ
    ),
    "endless headers": Lie("GET", INFO, raw(b"HTTP/1.1 103 Early Hints\r\nX: " + b"x" * 1000 + b"\r\n\r\n"), "no end"),
    "one long header": Lie("GET", INFO, raw(b"x" * 65536), "broke|no end"),
    "nested": Lie("GET", TREE, says(b"[" * 40_000), "cannot be read"),
    "not JSON": Lie("GET", TREE, says(b"<html>"), "does not answer as the Hub does"),
    "not a list": Lie("GET", TREE, says(b'{"a": {"b": 1}}'), "does not answer as the Hub does"),
    # One byte after the other.
    "slow info": Lie("GET", INFO, endless(b" ", pause=0.05), "bytes moved in"),
    "slow headers": Lie("GET", INFO, raw(b"x", pause=0.05), "bytes moved in", ("inspect",)),
    "slow file": Lie("GET", "^/cdn/", of_all(endless(b"x", pause=0.05)), "bytes moved in", FETCH),
    "slow range": Lie("GET", "^/cdn/", endless(b"x", pause=0.05), "bytes moved in", ("show",)),
    "slow error": Lie("GET", INFO, endless(b"x", 404, pause=0.05), "bytes moved in", ("inspect",)),
    "wait for a day": Lie("GET", INFO, says(b"", 429, Retry_After="86400"), "too many requests", (*READ, "export")),
    "wait for a day by another name": Lie(
        "GET", INFO, says(b"", 429, ratelimit='"api";r=0;t=86400'), "too many requests", READ
    ),
    # Ranges.
    "another range": Lie(
        "GET", "^/cdn/", headers(Content_Range="bytes 8-65543/362000"), "were requested", ("inspect", "show")
    ),
    "no range": Lie("GET", "^/cdn/", headers(Content_Range=None), "is answered with", ("inspect", "show")),
    "range of another file": Lie(
        "GET", "^/cdn/", headers(Content_Range="bytes 0-65535/65536"), "were requested", ("inspect", "show")
    ),
    "whole in place of a range": Lie("GET", "^/cdn/", says(b"x" * 1000), "has 1000 bytes", READ),
    "etag of a range": Lie(
        "GET", "/resolve/", headers(X_Linked_Etag=f'"{SHA256}"'), "the ETag of", ("inspect", "show")
    ),
    "commit of a range": Lie(
        "GET", "/resolve/", headers(X_Repo_Commit=COMMIT), "answers for the commit", ("inspect", "show")
    ),
    # Other hosts. They have no token, and what they say is what an endpoint says.
    "next page elsewhere": Lie("GET", TREE, headers(Link=NEXT), TOKEN, READ),
    "info elsewhere": Lie("GET", INFO, says(b"", 307, Location="OTHER/api/models/org/name"), TOKEN, (*READ, "export")),
    "listing elsewhere": Lie("GET", TREE, says(b"", 307, Location="OTHER/api/models/org/name/tree/main"), TOKEN, READ),
    "file elsewhere": Lie(
        "GET", "/resolve/", headers(Location="{}/org/name/resolve/main/model.safetensors"), TOKEN, ("inspect", "show")
    ),
    "file elsewhere, whole": Lie(
        "HEAD", WEIGHTS, headers(Location="{}/org/name/resolve/main/model.safetensors"), TOKEN, FETCH
    ),
    "file of this machine": Lie(
        "GET", "/resolve/", headers(Location="file:///etc/passwd"), "unsupported protocol", ("inspect", "show")
    ),
    "Xet elsewhere": Lie(
        "HEAD",
        WEIGHTS,
        headers(X_Xet_Hash=SHA256, Link='<{}/x>; rel="xet-auth"'),
        "elsewhere with the token",
        FETCH,
        xet=True,
    ),
    "Xet route elsewhere": Lie(
        "HEAD",
        WEIGHTS,
        headers(X_Xet_Hash=SHA256, Link=None, X_Xet_Refresh_Route="{}/x"),
        "elsewhere with the token",
        FETCH,
        xet=True,
    ),
    "Xet in a directory": Lie(
        "GET", "/xet-read-token/", headers(X_Xet_Cas_Url="local://VICTIM"), "is not a server", FETCH, xet=True
    ),
    "Xet of a file": Lie(
        "GET", "/xet-read-token/", headers(X_Xet_Cas_Url="file:///VICTIM"), "is not a server", FETCH, xet=True
    ),
    "endless token for Xet": Lie("GET", "/xet-read-token/", endless(b" " * 65536), "larger than", FETCH, xet=True),
    # Uploads.
    "Xet in a directory, sent": Lie(
        "GET", "/xet-write-token/", headers(X_Xet_Cas_Url="local://VICTIM"), "is not a server", SEND, xet=True
    ),
    "batch elsewhere": Lie("POST", "/objects/batch", says(b"", 307, Location="{}/org/name.git/batch"), TOKEN, SEND),
    "verify elsewhere": Lie("POST", "/objects/batch", body(lambda said: verify_at(said, "{}/lfs-verify")), TOKEN, SEND),
    "upload to a file": Lie(
        "POST",
        "/objects/batch",
        body(lambda said: upload_to(said, "file:///VICTIM/x")),
        "the connection to the Hub broke",
        SEND,
    ),
    "batch is a list": Lie("POST", "/objects/batch", says(b"[1]"), "does not answer as the Hub does", SEND),
    "batch without objects": Lie("POST", "/objects/batch", says(b'{"objects": {}}'), "Malformed", SEND),
    "endless batch": Lie("POST", "/objects/batch", endless(b" " * 65536), "larger than", SEND),
    "endless preupload": Lie("POST", "/preupload/", endless(b" " * 65536), "larger than", SEND),
    "preupload is text": Lie("POST", "/preupload/", says(b"hello"), "does not answer as the Hub does", SEND),
    "endless answer to a part": Lie("PUT", "^/lfs/", endless(b"x" * 65536, 403), "403", SEND),
    "commit is a path, sent": Lie(
        "POST",
        "/commit/",
        body(lambda said: {**said, "commitOid": UP + "x"}),
        "wrote hf://org/name",  # what is on the branch is what was sent
        SEND,
        exit_codes=(0,),
    ),
    "commit is text": Lie("POST", "/commit/", says(b"done"), "does not answer as the Hub does", SEND),
    "endless commit": Lie("POST", "/commit/", endless(b" " * 65536), "larger than", SEND),
    "commit elsewhere": Lie(
        "POST", "/commit/", says(b"", 307, Location="{}/api/models/org/name/commit/main"), TOKEN, SEND
    ),
}


def verify_at(said: dict[str, Any], href: str) -> dict[str, Any]:
    for one in said["objects"]:
        one["actions"]["verify"] = {"href": href, "header": {}}
    return said


def upload_to(said: dict[str, Any], href: str) -> dict[str, Any]:
    for one in said["objects"]:
        one["actions"]["upload"] = {"href": href}
    return said


# The test ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def liar(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub, another one on another host, a directory that is a victim, and small limits."""
    hub.other = other = Hub(tmp_path / "other")  # type: ignore[attr-defined]
    other.url = other.url.replace("127.0.0.1", "localhost")
    hub.make("org/name", {"model.safetensors": save({"w": torch.arange(90_000.0)}), "config.json": b"{}"})
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "key").write_text("a key")
    (tmp_path / "home" / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / "home" / ".bash_profile").write_text("# mine\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(answers, "STORAGES", ("https", "http"))
    for name, value in {"JSON": 300_000, "VALUES": 50_000, "ERROR": 10_000, "HEAD": 200_000, "PAGES": 30}.items():
        monkeypatch.setattr(limits, name, value)
    save_file({"w": torch.arange(3000.0)}, tmp_path / "x.safetensors")
    yield hub
    other.close()


def tree(folder: Path) -> dict[str, str]:
    """Every file and its digest, but for those of the servers and what the command may write: the cache, of which Xet's
    is at home."""
    ours = ("hub", "other", "cache", "assets", "tmp", "out", "xet-cache", "xet")
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
        for path in folder.rglob("*")
        if path.relative_to(folder).parts[0] not in ours and "huggingface" not in path.parts
    }


def command(job: str, folder: Path) -> list[str]:
    return {
        "inspect": ["inspect", "hf://org/name"],
        "show": ["show", "hf://org/name", "w"],
        "convert": ["convert", "hf://org/name", str(folder / "out" / "x.pt")],
        "export": ["export", str(folder / "x.safetensors"), "hf://org/name"],
        "export-like": [
            "export",
            str(folder / "x.safetensors"),
            str(folder / "out" / "y"),
            "--assets",
            "hf://org/name",
        ],
    }[job]


@pytest.mark.parametrize("kind", ["names", "bodies", "speed", "hosts"])
def test_an_endpoint_that_lies(liar: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    names = list(LIES)
    starts = ["sha is a path", "endless info", "slow info", "another range"]
    first = names.index(starts[["names", "bodies", "speed", "hosts"].index(kind)])
    last = next((names.index(start) for start in starts if names.index(start) > first), len(names))
    before = tree(tmp_path)
    failures = []
    for name in names[first:last]:
        lie = LIES[name]
        for job in lie.jobs:
            for attempt in range(3):
                try:
                    meet(liar, tmp_path, monkeypatch, name, lie, job)
                except AssertionError as failure:
                    # A busy machine may not have begun to answer within 0.2 seconds.
                    if "does not answer within" in str(failure) and attempt < 2:
                        continue
                    failures.append(str(failure))
                break
            assert tree(tmp_path) == before, (name, job)
    assert not failures, "\n\n".join(failures)


def meet(liar: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lie: Lie, job: str) -> None:
    """One command meets one lie."""
    where = (name, job)
    other: Hub = liar.other  # type: ignore[attr-defined]
    for hub in (liar, other):
        hub.seen.clear()
        hub.faults.clear()
        hub.bodies.clear()
        hub.failed = 0
    forget(tmp_path, liar)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not lie.xet)
    monkeypatch.setattr(constants, "HF_XET_CACHE", str(tmp_path / "xet-cache"))
    liar.cas = lie.xet
    if lie.xet:
        abort_xet_session()
        XET_CONNECTION_INFO_CACHE.clear()
    # Five of these without enough bytes are too long.
    is_slow = "moved in" in lie.said
    monkeypatch.setenv("CKPTTOOL_HUB_TIMEOUT", "0.2" if is_slow else "30")
    for setting in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setattr(constants, setting, 0.2 if is_slow else 30)
    huggingface_hub.close_session()

    liar.fail(lie.method, lie.path, act=lie.act)
    started = time.monotonic()
    done = run(*command(job, tmp_path))
    assert time.monotonic() - started < 120, where  # of a machine that does much else; there is none without a limit
    shown = done.stderr or done.output
    assert liar.failed, (where, shown)
    assert done.exit_code in lie.exit_codes or (lie.said == TOKEN and done.exit_code == 0), (where, shown)
    assert done.exception is None or isinstance(done.exception, SystemExit), (where, done.exception)
    check_shown(shown, lie, done.exit_code, where)
    # The token is for one host, and no server of endless bytes got rid of all.
    assert not any(one.authorization for one in other.seen), where
    assert WRITER.encode() not in b"".join(other.bodies), where
    assert max((one.sent for one in liar.seen), default=0) < MOST // 2, where
    assert len(liar.seen) + len(other.seen) < 200, where
    assert not (tmp_path / "out" / "x.pt").exists() or done.exit_code == 0, where
    left = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert left < 1 << 20, where
    assert not list((tmp_path / "tmp").iterdir()), where


def check_shown(shown: str, lie: Lie, code: int, where: object) -> None:
    """One message, which names what was asked for."""
    assert "Traceback" not in shown and WRITER not in shown and "X-Signature" not in shown, (where, shown)
    if code:
        assert len(re.findall("^error:", shown, re.MULTILINE)) == 1, (where, shown)
        text = " ".join(shown.split())
        assert lie.said == TOKEN or re.search(lie.said, text), (where, shown)


def forget(tmp_path: Path, liar: Hub) -> None:
    for folder in ("cache", "assets", "out", "xet-cache"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    (tmp_path / "out").mkdir()
    repo = liar.repos["org/name"]
    first = next(iter([oid for oid, commit in repo.commits.items() if commit.title == "somebody's"]))
    repo.refs["main"] = first


def test_the_limits_of_an_answer() -> None:
    """Those that SECURITY.md promises, and docs/reference/limits.md lists."""
    assert (limits.JSON, limits.ERROR, limits.LISTING) == (32 << 20, 64 << 10, 256 << 20)
    assert (limits.VALUES, limits.PAGES, limits.REDIRECTIONS, limits.REQUESTS) == (2_000_000, 1_000, 20, 1_000)
    assert (limits.HEAD, limits.LOWEST_RATE, limits.WAIT, answers.STORAGES) == (1 << 20, 10_000, 300, ("https", "http"))
    assert limits.longest_wait(10_000_000) == 5 * limits.timeout() + 1000


@pytest.mark.parametrize(
    ("endpoint", "address", "is_sent"),
    [
        ("https://hub.example", "https://hub.example/api/x", True),
        ("https://hub.example", "https://HUB.example:443/api/x", True),
        ("http://hub.example", "https://hub.example/api/x", True),
        ("https://hub.example", "http://hub.example/api/x", False),
        ("https://hub.example", "https://hub.example:8443/api/x", False),
        ("https://hub.example", "https://hub.example.evil/api/x", False),
        ("https://hub.example", "https://hub.example@evil/api/x", False),
        ("https://hub.example", "https://cdn.hub.example/api/x", False),
        ("http://hub.example:8000", "https://hub.example/api/x", False),
        ("https://hub.example/mirror", "https://huggingface.co/api/x", False),
    ],
)
def test_where_the_token_goes(monkeypatch: pytest.MonkeyPatch, endpoint: str, address: str, is_sent: bool) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    request = answers.http.Request("GET", address, headers={"authorization": f"Bearer {WRITER}"})
    with answers.checked():
        answers._check_request(request)
    assert ("authorization" in request.headers) == is_sent
    # Requests of others are left as they are.
    other = answers.http.Request("GET", address, headers={"authorization": f"Bearer {WRITER}", "user-agent": "theirs"})
    answers._check_request(other)
    assert "authorization" in other.headers


def test_a_corrupt_file_that_the_cache_links_to_elsewhere(liar: Hub, tmp_path: Path) -> None:
    """It is removed from the cache only, whatever the client, or somebody else, has put there."""
    commit = liar.repos["org/name"].refs["main"]
    key = tmp_path / "victim" / "key"
    key.write_bytes(bytes(len(liar.files("org/name")["model.safetensors"])))
    link = tmp_path / "cache" / "models--org--name" / "snapshots" / commit / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(key)
    for job in ("inspect", "convert"):
        done = run(*command(job, tmp_path))
        assert done.exit_code == 4 and "a link that leaves the cache of the Hub" in done.stderr, done.output
        assert f"`rm{link}`" in "".join(done.stderr.split())
    assert key.exists() and link.is_symlink()


REVISIONS = [
    "..%2F..%2Fx",
    "%2Fetc%2Fx",
    "a%00b",
    "a..b",
    "x%0Ay",
    "a%5Cb",
    ".x",
    "x%2F.y",
    "a.lock",
    "x" * 300,
    "-x",
    "a%20b",
]


@pytest.mark.parametrize("offline", [False, True])
def test_a_revision_that_is_a_path(liar: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    before = tree(tmp_path)
    for revision in REVISIONS:
        done = run("inspect", f"hf://org/name@{revision}")
        assert done.exit_code == 2 and "is not the name of a revision" in " ".join(done.stderr.split()), done.output
    assert tree(tmp_path) == before and not liar.seen


def test_a_reference_in_the_cache_that_is_a_path(liar: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ref = tmp_path / "cache" / "models--org--name" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("../../../victim")
    done = run("inspect", "hf://org/name")
    assert done.exit_code == 4 and "is not the hash of a commit" in " ".join(done.stderr.split()), done.output


def test_a_cache_that_cannot_be_written(liar: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the repository is named, what cannot be written, and what to set."""
    (tmp_path / "cache").write_text("a file\n")
    done = run(*command("convert", tmp_path))
    said = " ".join(done.stderr.split())
    assert done.exit_code == 7 and "`hf://org/name/model.safetensors`: the cache of the Hub cannot be written" in said
    assert f"`{tmp_path}/cache` is a file" in said and "`HF_HUB_CACHE`" in said and "cannot be read" not in said
    if os.geteuid():
        (tmp_path / "cache").unlink()
        (tmp_path / "cache").mkdir(0o555)
        done = run(*command("convert", tmp_path))
        said = " ".join(done.stderr.split())
        assert done.exit_code == 7 and "the cache of the Hub cannot be written" in said and "permission denied" in said


def test_errors_name_the_file_of_the_repository(liar: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the sparse file that it is read into."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blocks, "open", full, raising=False)
    done = run(*command("inspect", tmp_path))
    said = " ".join(done.stderr.split())
    assert done.exit_code == 7 and "`hf://org/name/model.safetensors`: what is read of its" in said, done.output
    assert "no space left" in said and "TMPDIR" in said and "ckpttool-hub-" not in said


def test_show_says_that_a_range_is_not_checked(liar: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that was flipped on the way has no checksum that tells; what has one, says so."""
    stored = liar.repos["org/name"].commits[liar.repos["org/name"].refs["main"]].files["model.safetensors"]
    data = bytearray((liar.store / str(stored.sha256)).read_bytes())
    data[-1] ^= 1
    (liar.store / str(stored.sha256)).write_bytes(data)
    done = run("show", "hf://org/name", "w")
    assert done.exit_code == 0 and "no checksums in the source (360 kB unverified)" in done.stdout
    shown = json.loads(run("show", "hf://org/name", "w", "--json").stdout)
    assert (shown["checked_bytes"], shown["unchecked_bytes"]) == (0, 360_000)
    torch.save({"w": torch.arange(90_000.0)}, tmp_path / "y.pt")
    shown = json.loads(run("show", str(tmp_path / "y.pt"), "w", "--json").stdout)
    assert (shown["checked_bytes"], shown["unchecked_bytes"]) == (360_000, 0)
    # All of it is compared with the digest of the listing, before any is used.
    done = run(*command("convert", tmp_path))
    assert done.exit_code == 8 and "the downloaded file is not the one on the Hub" in " ".join(done.stderr.split())
