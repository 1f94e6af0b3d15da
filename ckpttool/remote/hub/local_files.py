"""What is sent to the Hub: files that are on this machine, and files that are gathered from the source meanwhile."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

from huggingface_hub import CommitOperationAdd
from huggingface_hub.lfs import UploadInfo
from huggingface_hub.utils._runtime import is_xet_available

from ckpttool.remote.hub import listing, xet
from ckpttool.remote.hub.listing import RepoFile
from ckpttool.remote.hub.retries import Result
from ckpttool.storage.errors import os_errors
from ckpttool.storage.gathered import GatheredFile
from ckpttool.storage.senders import SendingStopped
from ckpttool.storage.stores import Outgoing, local_path

_SAMPLE = 512  # bytes by which the Hub tells whether git is to keep a file


class WrittenFile:
    """A file that is on this machine, or is written to `folder` now; without `keep`, the latter is removed by `close`.
    `digest` is its SHA-256 if that is known."""

    def __init__(self, file: Outgoing, folder: str, *, keep: bool) -> None:
        self._path = path = file.path or os.path.join(folder, *file.name.split("/"))
        self._is_temporary = file.path is None and not keep
        sha256 = None
        with os_errors(path, "write"):
            if file.write is not None:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                Path(path).unlink(missing_ok=True)
                sha256 = file.write(local_path(path))
            size = os.path.getsize(path)
        assert size == file.size, f"{file.name}: {size} bytes were written, not {file.size}"
        self.digest = RepoFile(path, size, sha256, None) if sha256 is not None else None

    def compute_digest(self, stopped: threading.Event, *, in_git: bool) -> RepoFile:
        """Read the file, and return the digest by which the Hub names it if git keeps it, or if not."""
        with os_errors(self._path, "read"):
            return listing.compute_digest(self._path, in_git)

    def operation(self, name: str, digest: RepoFile | None, stopped: threading.Event) -> CommitOperationAdd:
        """Return what adds the file to the repository as `name`."""
        operation = CommitOperationAdd(path_in_repo=name, path_or_fileobj=self._path)
        if digest is not None and digest.sha256 is not None:
            operation.upload_info.sha256 = bytes.fromhex(digest.sha256)
        return operation

    @contextmanager
    def sending(self, operation: CommitOperationAdd, report: Callable[[int], None]) -> Iterator[None]:
        """Call `report` with the bytes sent so far while the client sends the file of an operation in the block: it
        reads from an open file, whose position is the progress. It would not send an open file by Xet, and reports
        nothing there."""
        if is_xet_available():
            yield
            return
        with _ReportingFile(io.FileIO(self._path)) as stream:
            stream.report = report
            operation.path_or_fileobj = stream
            try:
                yield
            finally:
                if operation.path_or_fileobj is stream:
                    operation.path_or_fileobj = self._path

    def xet_digest(self) -> RepoFile:
        """Read the file, and return the digest by which a bucket names it."""
        with os_errors(self._path, "read"):
            return listing.xet_digest(self._path)

    def send_over_xet(self, send: Callable[[str | None], Result], report: Callable[[int], None]) -> Result:
        """Return what `send` returns, which is called with the path of the file; without one, if it is `streamed`."""
        return send(self._path)

    def contents(self) -> bytes:
        """Return all of the file."""
        return Path(self._path).read_bytes()

    def close(self) -> None:
        if self._is_temporary:
            Path(self._path).unlink(missing_ok=True)


class _ReportingFile(io.BufferedReader):
    report: Callable[[int], None]

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.report(self.tell())
        return data


class Gathered:
    """A file that is read from the source as it is sent, with the methods of `WrittenFile`. For LFS, which names a file
    by its digest before it is sent, it is read twice."""

    digest = None

    def __init__(self, name: str, file: GatheredFile) -> None:
        self._name, self._file = name, file

    def compute_digest(self, stopped: threading.Event, *, in_git: bool) -> RepoFile:
        return replace(listing.digest_of(self._blocks(stopped), self._file.size, in_git), name=self._name)

    def _blocks(self, stopped: threading.Event) -> Iterator[bytes]:
        for block in self._file.blocks():
            if stopped.is_set():
                raise SendingStopped
            yield block

    def operation(self, name: str, digest: RepoFile | None, stopped: threading.Event) -> CommitOperationAdd:
        operation = CommitOperationAdd(path_in_repo=name, path_or_fileobj=b"")
        sha256 = None
        # Over Xet, it is that of the bytes that are sent, in any case.
        if not is_xet_available():
            if digest is None or digest.sha256 is None:
                digest = self.compute_digest(stopped, in_git=False)
            assert digest.sha256 is not None
            sha256 = bytes.fromhex(digest.sha256)
        sample = self._file.read(_SAMPLE)
        operation.upload_info = UploadInfo(size=self._file.size, sample=sample, sha256=sha256, source_path="")
        return operation

    @contextmanager
    def sending(self, operation: CommitOperationAdd, report: Callable[[int], None]) -> Iterator[None]:
        if is_xet_available():
            with xet.streamed(self._file, report):
                yield
            return
        self._file.seek(0)
        self._file.noted = report
        operation.path_or_fileobj = cast(BinaryIO, self._file)
        try:
            yield
        finally:
            operation.path_or_fileobj = b""

    def xet_digest(self) -> RepoFile:
        raise NotImplementedError("it is known once the file was sent")

    def send_over_xet(self, send: Callable[[str | None], Result], report: Callable[[int], None]) -> Result:
        with xet.streamed(self._file, report):
            return send(None)

    def contents(self) -> bytes:
        return b"".join(self._file.blocks())

    def close(self) -> None:
        self._file.close()


Local = WrittenFile | Gathered


def gather(file: Outgoing) -> Gathered | None:
    """Return a file that need not be written, or None."""
    gathered = file.gather() if file.gather is not None and can_gather() else None
    assert gathered is None or gathered.size == file.size, f"{file.name}: {gathered} bytes, not {file.size}"
    return None if gathered is None else Gathered(file.name, gathered)


def can_gather() -> bool:
    """Return whether the client sends what is gathered meanwhile."""
    return not is_xet_available() or xet.has_streams()
