"""Directories in which one run works, and the proof that a run of this user made them.

    .out.partial-9f86d081a3c4/      mode 0700
        journal                     who works in it, and has it locked; then lines on what it has written
        new/out                     what is being made
        before/                     what an earlier run left to resume from, until its files have been moved

A name proves nothing: whoever may write beside a destination can make it, and so can an archive that is unpacked there.
A workspace is believed if it belongs to this user, nobody else may write to it, and the journal in it, a regular file
with one name, begins with the inode of the directory. Nobody chooses that, and a copy has another.

The lock ends with its process, and the next run finds what that left. Where a file system has no locks, the process id
is looked up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.errors import OverwriteError
from ckpttool.storage import tree
from ckpttool.storage.errors import os_errors
from ckpttool.storage.log import Log

JOURNAL, NEW, BEFORE = "journal", "new", "before"
SUFFIX = "[0-9a-f]{12}"
_SUFFIX_BYTES = 6
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EBADF)
# A pipe in place of a file would wait for a writer.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FoundWorkspace(NamedTuple):
    """What lies at the name of a workspace: `workspace` if it is one of this user whose run has ended, else why it is
    left alone. `running` is whether a run works in it."""

    workspace: Workspace | None = None
    why: str = ""
    running: bool = False


class Workspace:
    """A directory `name` in `folder` in which this run works, or one that has ended. `log` is its journal, locked.

    What is in it is reached through open descriptors, so that it does not matter what happens to its name. `is_bare` is
    whether it was an empty directory when it was found.
    """

    def __init__(self, folder: str, name: str, above: int, descriptor: int, log: Log, *, is_bare: bool = False) -> None:
        self.folder, self.name, self.log, self.is_bare = folder, name, log, is_bare
        self.above, self.descriptor = above, descriptor

    @property
    def path(self) -> str:
        """The path by which other processes find it."""
        return os.path.join(self.folder, self.name)

    @property
    def anchor(self) -> str:
        """A path for this process and its children, which leads to this directory whatever happens to its name."""
        here = f"/proc/self/fd/{self.descriptor}"
        with suppress(OSError):
            if os.path.samestat(os.stat(here), os.fstat(self.descriptor)):
                return here
        return self.path

    @property
    def suffix(self) -> str:
        """What its name has of its own."""
        return self.name[-2 * _SUFFIX_BYTES :]

    @property
    def host(self) -> str | None:
        """The machine of its run; None if that is this one."""
        owner, this = _last_owner(self.log), owner_now()
        is_here = not owner or owner.get("boot") == this["boot"] != "" or owner.get("host") == this["host"]
        return None if is_here else str(owner.get("host"))

    @property
    def is_empty(self) -> bool:
        """Whether its run was killed before it had begun."""
        return next(iter(self.log), None) is None

    def adopt(self) -> None:
        """Make this process the owner, behind the last undamaged line. Raises OSError."""
        self.log.cut()
        # No reason to give up what is there: the disk may be full still.
        with suppress(OSError):
            self.log.append([owner_now()])

    def restart(self, lines: list[Any]) -> None:
        """Begin the log anew with these lines, behind those on the directory and this process. Raises OSError."""
        self.log.cut(1)
        owner = owner_now()
        is_known = owner.items() <= _last_owner(self.log).items()
        self.log.append(lines if is_known else [owner, *lines])

    def remove(self) -> None:
        """Remove it, the journal last: as long as that exists, the next run finds the rest. Raises OSError."""
        if self.is_bare:
            # Without a lock: its run may have gone on meanwhile, and then it is not empty.
            os.rmdir(self.name, dir_fd=self.above)
            return
        for name in os.listdir(self.descriptor):
            if name != JOURNAL:
                tree.remove(name, self.descriptor)
        _remove_empty(self.name, self.above, self.descriptor)

    def close(self) -> None:
        """Release the lock, and close all descriptors."""
        for descriptor in (self.log.descriptor, self.descriptor, self.above):
            with suppress(OSError):
                os.close(descriptor)


def _remove_empty(name: str, above: int, descriptor: int) -> None:
    if not os.fstat(descriptor).st_mode & stat.S_IWUSR:
        _quietly(os.fchmod, descriptor, stat.S_IRWXU)
    with suppress(FileNotFoundError):
        os.unlink(JOURNAL, dir_fd=descriptor)
    # Nothing else is removed if another directory has the name by now.
    found = tree.status(name, above)
    if found is not None and found.st_ino == os.fstat(descriptor).st_ino:
        os.rmdir(name, dir_fd=above)


def owner_now() -> dict[str, Any]:
    """Return what a journal says about this process."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    processes = ""
    with suppress(OSError):
        processes = os.readlink("/proc/self/ns/pid")
    return {"host": os.uname().nodename, "boot": boot, "processes": processes, "pid": os.getpid()}


def create(folder: str, prefix: str) -> Workspace:
    """Make a workspace whose name begins with `prefix`, with an empty directory `new` in it. Raises OSError."""
    while True:
        name = prefix + os.urandom(_SUFFIX_BYTES).hex()
        with contextlib.ExitStack() as stack:
            above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, above)
            try:
                os.mkdir(name, 0o700, dir_fd=above)
            except FileExistsError:
                continue
            stack.callback(_quietly, os.rmdir, name, dir_fd=above)
            try:
                descriptor = os.open(name, tree.DIRECTORY, dir_fd=above)
                stack.callback(os.close, descriptor)
                journal = os.open(
                    JOURNAL, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=descriptor
                )
            except FileNotFoundError:
                # Another run took the empty directory for one of a killed run.
                continue
            stack.callback(os.close, journal)
            stack.callback(_quietly, os.unlink, JOURNAL, dir_fd=descriptor)
            if _is_locked(journal, descriptor) is False:
                continue
            log = Log(journal)
            log.record(owner_now() | {"inode": os.fstat(descriptor).st_ino})
            os.mkdir(NEW, dir_fd=descriptor)
            stack.pop_all()
        return Workspace(folder, name, above, descriptor, log)


def _quietly(call: Callable[..., None], *args: Any, **keywords: Any) -> None:
    with suppress(OSError):
        call(*args, **keywords)


def find(folder: str, name: str) -> FoundWorkspace:
    """Return what lies at the name of a workspace. One that holds nothing needs no proof."""
    with contextlib.ExitStack() as stack:
        try:
            above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, above)
            descriptor = os.open(name, tree.DIRECTORY, dir_fd=above)
        except OSError as error:
            return FoundWorkspace(why=_not_opened(error, "a directory"))
        stack.callback(os.close, descriptor)
        if why := not_ours(os.fstat(descriptor)):
            return FoundWorkspace(why=why)
        try:
            journal = os.open(JOURNAL, os.O_RDWR | _FILE, dir_fd=descriptor)
        except FileNotFoundError:
            if os.listdir(descriptor):
                return FoundWorkspace(why="no journal is in it")
            # Its run was killed as it made it.
            journal = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            stack.pop_all()
            return FoundWorkspace(Workspace(folder, name, above, descriptor, Log(journal), is_bare=True))
        except OSError as error:
            return FoundWorkspace(why=f"its journal: {_not_opened(error, 'a file')}")
        stack.callback(os.close, journal)
        status, log = os.fstat(journal), Log(journal)
        if not stat.S_ISREG(status.st_mode):
            return FoundWorkspace(why="its journal: not a file")
        if why := not_ours(status):
            return FoundWorkspace(why=f"its journal: {why}")
        is_locked = _is_locked(journal, descriptor)
        if is_locked is False or (is_locked is None and is_running(_last_owner(log))):
            return FoundWorkspace(why="a run is working in it", running=True)
        first = next(iter(log), None)
        is_empty = is_locked and not status.st_size and os.listdir(descriptor) == [JOURNAL]
        is_of_it = isinstance(first, dict) and first.get("inode") == os.fstat(descriptor).st_ino
        if not is_of_it and not is_empty:
            return FoundWorkspace(why="its journal is not of this directory: it is a copy, or no run made it")
        stack.pop_all()
        return FoundWorkspace(Workspace(folder, name, above, descriptor, log))


def not_ours(status: os.stat_result) -> str:
    """Return why a file or directory may not be one that a run of this user made; empty if it may."""
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        return "the file has another name, too"
    return ""


def _not_opened(error: OSError, what: str) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
        return f"not {what}"
    return (error.strerror or str(error)).lower()


def _last_owner(log: Log) -> dict[str, Any]:
    owners = [line for line in log if isinstance(line, dict) and "pid" in line]
    return owners[-1] if owners else {}


def _is_locked(journal: int, descriptor: int) -> bool | None:
    """Try to lock a journal. Return whether it is locked now and still the one in its directory; None where there are
    no locks."""
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = tree.status(JOURNAL, descriptor)
        return there is not None and os.path.samestat(os.fstat(journal), there)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise


def is_running(owner: dict[str, Any]) -> bool:
    """Return whether the process of an owner may be running, without locks."""
    this = owner_now()
    if not owner:
        return False
    if owner.get("boot") != this["boot"]:
        # On the machine itself, it ended when that was started again.
        return bool(owner.get("host") != this["host"])
    if owner.get("processes") != this["processes"]:
        # A container sees its own processes only.
        return True
    try:
        os.kill(int(owner.get("pid", 0)) or os.getpid(), 0)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        return not isinstance(error, ProcessLookupError)
    return True


# Scratch directories --------------------------------------------------------------------------------------------------


@contextmanager
def scratch_directory(prefix: str, folder: str | None = None) -> Iterator[str]:
    """Yield a temporary directory in `folder` or `TMPDIR`, which is removed at the end of the block. Those of killed
    runs are removed first. Raises StorageError."""
    import tempfile

    # Some network file systems lock within one machine only.
    prefix = f"{prefix}{os.uname().nodename}-"
    with os_errors(folder or os.environ.get("TMPDIR", "the temporary directory"), "write"):
        top = os.path.realpath(folder or tempfile.gettempdir())
    name_of = re.compile(re.escape(prefix) + SUFFIX)
    with os_errors(top, "write"):
        os.makedirs(top, exist_ok=True)
        for name in filter(name_of.fullmatch, os.listdir(top)):
            if (left := find(top, name).workspace) is not None:
                _quietly(left.remove)
                left.close()
        workspace = create(top, prefix)
    try:
        yield os.path.join(workspace.path, NEW)
    finally:
        _quietly(workspace.remove)
        workspace.close()


def kept_folder(stack: contextlib.ExitStack, keep: str | os.PathLike[str] | None, prefix: str) -> str:
    """Return the folder `keep`, which must be new or empty, or without one a temporary folder that goes with `stack`.

    Raises OverwriteError if there is something in it.
    """
    if keep is None:
        return stack.enter_context(scratch_directory(prefix))
    path = checked_folder(keep)
    os.makedirs(path, exist_ok=True)
    return path


def checked_folder(keep: str | os.PathLike[str]) -> str:
    """Return the path of a folder that is new or empty. Raises OverwriteError for another one."""
    path = os.path.abspath(keep)
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        hint = "pass an empty or a new folder to `--keep`"
        raise OverwriteError(f"`{os.fspath(keep)}` exists and is not empty", hint=hint)
    return path
