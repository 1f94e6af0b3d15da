"""The store of this machine's file system; names are paths."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

from ckpttool.storage import files, staging, unfinished, versions
from ckpttool.storage.errors import from_os_error, os_errors
from ckpttool.storage.stage import StagingArea
from ckpttool.storage.stores import DirectoryEntry, Location, Outgoing, Stat, Store, Write


class LocalStore(Store):
    """The store of local files."""

    is_local = True

    def stat(self, name: str) -> Stat:
        status = os.stat(name)
        versions.note(name, status)
        mode = status.st_mode
        return Stat(status.st_size, "file" if stat.S_ISREG(mode) else "dir" if stat.S_ISDIR(mode) else "other")

    def entries(self, name: str) -> list[DirectoryEntry]:
        with os.scandir(name) as entries:
            return sorted(DirectoryEntry(entry.name, _is_dir(entry)) for entry in entries)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        with open(name, "rb", buffering=0) as stream:
            versions.note_open(name, stream.fileno())
            data = os.pread(stream.fileno(), len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

    def open(self, name: str) -> BinaryIO:
        stream = open(name, "rb")  # noqa: SIM115 # whoever asked closes it
        versions.note_open(name, stream.fileno())
        return stream

    def check_readable(self, name: str) -> None:
        os.close(os.open(name, os.O_RDONLY | os.O_CLOEXEC))

    def sizes(self, name: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with os.scandir(name) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat()
                    versions.note(entry.path.removeprefix("./"), status)
                    found[entry.name] = status.st_size
        return found

    def glob(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern))

    def below(self, name: str) -> list[str]:
        """Return the names of all files below a directory, but not below a link to another."""
        result: list[str] = []

        def refuse(error: OSError) -> None:
            raise from_os_error(error, name, "read")

        for folder, folders, names in os.walk(name, onerror=refuse):
            folders[:] = sorted(one for one in folders if not unfinished.is_trace(one))
            paths = [os.path.join(folder, one) for one in sorted(names) if not unfinished.is_trace(one)]
            result += [os.path.relpath(path, name) for path in paths if _is_file(path)]
        return result

    def real(self, name: str) -> str:
        return os.path.realpath(name)

    def create(self, name: str, size: int) -> None:
        with os_errors(name, "write"):
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "xb", buffering=0) as stream:
                os.ftruncate(stream.fileno(), size)

    def put(self, name: str, write: Write) -> None:
        with os_errors(name, "write"), open(name, "xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())

    def append(self, name: str, data: bytes) -> None:
        with os_errors(name, "write"):
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            # Whoever else writes here does so at the end, too.
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, name: str) -> None:
        files.remove(name)

    def discard(self, name: str, is_index: Callable[[str], bool]) -> None:
        staging.discard(name)

    def replace(self, name: str, other: str) -> None:
        with staging.stage(name, overwrite=True, is_file=os.path.isfile(other)) as stage, os_errors(name, "write"):
            os.rename(other, stage.path)

    def stage(self, name: str, **options: Any) -> AbstractContextManager[StagingArea]:
        return staging.stage(name, **options)

    def publish(  # type: ignore[override] # options are the store's own
        self,
        name: str,
        outgoing: Sequence[Outgoing],
        *,
        overwrite: bool = False,
        notes: list[str] | None = None,
        check: Callable[[Location], object] | None = None,
        after: staging.After | None = None,
    ) -> None:
        """Write files below a new directory. `check` is called with where they are before they appear there."""
        with self.stage(name, overwrite=overwrite, is_file=False, notes=notes, after=after) as stage:
            folder = Location(stage.path, self)
            for file in outgoing:
                assert file.write is not None
                files.make_directory((folder / file.name).parent, exist_ok=True)
                file.write(folder / file.name)
            if check is not None:
                check(folder)


def _is_file(path: str) -> bool:
    """Return whether a regular file is at a path, or at the end of a link. Raises OSError if that cannot be told."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link that loops, or into a directory of another user: no reason to refuse its neighbours.
        return False
