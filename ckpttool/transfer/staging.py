"""Writes a destination beside its place, syncs it, and renames it once it is complete; finds what killed runs left.

    .out.partial-4242           the unfinished `out`
    .out.partial-4242.journal   which process writes it, and has it locked; then what has been copied (`journal`)
    .out.partial-4242.before    what an earlier run left to resume from, until its files have been moved
    .out.old-4242               the old `out`, while it is replaced

The lock ends with its process. Where a file system has no locks, the process id is looked up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CkptError, OverwriteError, RemoteError, StorageError
from ckpttool.storage import files, local
from ckpttool.storage.errors import from_os_error
from ckpttool.transfer import journal

_MARK = ".journal"
# Errors of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


class Stage:
    """Where a destination is written: `Stage("out", "/data/.out.partial-4242", descriptor)`. The descriptor is of the
    journal, and holds its lock; `held` is the bytes on disk of an earlier run that this one resumes."""

    def __init__(self, dst: str, path: str, descriptor: int) -> None:
        self.dst, self.path, self.descriptor = dst, path, descriptor
        self.held = 0
        self.resumes = False
        self.journal: journal.Journal | None = None

    @property
    def before(self) -> str:
        return f"{self.path}.before"

    @property
    def old(self) -> str:
        head, _, number = self.path.rpartition(".partial-")
        return f"{head}.old-{number}"

    def begin(self, created: Catalogue, digest: str, notes: list[str], *, every: bool) -> journal.Journal:
        """Return the journal of what is copied into `created`, which lies at `path`. The files of an earlier run
        replace the new ones if it followed the same plan. With `every`, all bytes are checksummed."""
        log = journal.Journal(self.descriptor, every=every)
        try:
            self._begin(log, created, digest, notes)
        except OSError as error:
            raise from_os_error(error, self.path, "write") from None
        self.journal = log
        return log

    def _begin(self, log: journal.Journal, created: Catalogue, digest: str, notes: list[str]) -> None:
        if self.resumes and log.read(digest):
            log.keep(journal.taken_over(created, self.path, self.before, {file for file, _ in log.done}))
        elif self.resumes:
            notes.append("partial output is from another source or other options: starting over")
        files.remove(self.before)
        if not log.done:
            log.begin(digest, _owner())

    def remove(self) -> None:
        """Remove all of it, the journal last: as long as that exists, the next run finds the rest."""
        files.remove(self.path)
        files.remove(self.before)
        if os.path.lexists(self.dst):
            files.remove(self.old)
        with suppress(OSError):
            os.unlink(self.path + _MARK)

    def let_go(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            os.close(self.descriptor)


@contextmanager
def staged(dst: str, *, overwrite: bool, is_file: bool, notes: list[str] | None = None) -> Iterator[str]:
    """Yield a path beside `dst` to write the destination at. It is renamed to `dst` when the block ends without an
    error; else it is removed. With `overwrite`, the old `dst` is moved aside first and removed last."""
    with stage(dst, overwrite=overwrite, is_file=is_file, notes=notes) as current:
        yield current.path


@contextmanager
def stage(
    dst: str, *, overwrite: bool, is_file: bool, resume: bool = False, notes: list[str] | None = None
) -> Iterator[Stage]:
    """The same for a run that can be resumed. With `resume`, the files of an earlier run are taken over, and those of
    this one are kept after an I/O error or an interrupt. `notes` gets a line for everything that was found.
    """
    dst = dst.rstrip("/") or dst if not is_file else dst
    local.check_free(dst, overwrite=overwrite, is_file=is_file)
    if os.path.islink(dst) and os.path.isdir(dst):
        # A link to another disk: the target is replaced, and the link stays.
        dst = os.path.realpath(dst)
    notes = [] if notes is None else notes
    above = Path(dst).absolute().parent
    created = [folder for folder in (above, *above.parents) if not folder.exists()]
    try:
        above.mkdir(parents=True, exist_ok=True)
        earlier = _left(dst, notes, resume)
        # `_left` may have restored an old one.
        local.check_free(dst, overwrite=overwrite, is_file=is_file)
        current = earlier or _claimed(dst)
    except OSError as error:
        _unmake(created)
        raise from_os_error(error, dst, "write") from None
    kept = False
    try:
        yield current
        files.sync_tree(current.path)
        # Another run may have written it meanwhile.
        local.check_free(dst, overwrite=overwrite, is_file=is_file)
        try:
            _swap_in(current.path, dst, current.old, overwrite)
            files.sync(str(above))
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise OverwriteError(
                    f"`{dst}` exists: another run has written it meanwhile",
                    hint="pass `--overwrite` to replace it",
                    file=dst,
                ) from None
            raise from_os_error(error, dst, "write") from None
    except CkptError as error:
        kept = resume and current.journal is not None and isinstance(error, (StorageError, RemoteError))
        raise _renamed(error, current.path, dst, kept) from None
    except KeyboardInterrupt as stop:
        kept = resume and current.journal is not None
        # For the last message of the command.
        stop.kept = kept  # type: ignore[attr-defined]
        raise
    finally:
        if kept and current.journal is not None:
            current.journal.close()
        else:
            current.remove()
        current.let_go()
        if not kept:
            _unmake(created)


def _renamed(error: CkptError, partial: str, dst: str, kept: bool) -> CkptError:
    """Return the error with the destination in place of the staging path, which is removed."""
    facts = {k: v.replace(partial, dst) if isinstance(v, str) else v for k, v in error.facts.items()}
    hint = error.hint
    if kept:
        hint = f"{hint}; " if hint else ""
        hint += "run the same command again to continue from what has been copied"
    return type(error)(error.message.replace(partial, dst), hint=hint, **facts)


def _unmake(folders: list[Path]) -> None:
    for folder in folders:
        # Not those in which another process has put something meanwhile.
        with suppress(OSError):
            folder.rmdir()


def _swap_in(partial: str, dst: str, old: str, overwrite: bool) -> None:
    place = Path(dst)
    if place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
        place.rmdir()
    if not overwrite:
        _name(partial, dst)
        return
    if os.path.isfile(partial) and os.path.lexists(dst) and (place.is_symlink() or place.is_file()):
        # Renaming a file replaces the other atomically.
        os.rename(partial, dst)
        return
    try:
        if os.path.lexists(dst):
            os.rename(dst, old)
        os.rename(partial, dst)
    except BaseException:
        # Also for Ctrl-C, before a rename or after it.
        if os.path.lexists(old) and not os.path.lexists(dst):
            os.rename(old, dst)
        raise


def _name(partial: str, dst: str) -> None:
    """Rename a destination. Raises OSError when another process has created that name."""
    if os.path.isfile(partial):
        # A rename would replace it.
        try:
            os.link(partial, dst)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(partial, dst)
        else:
            os.unlink(partial)
    else:
        os.rename(partial, dst)


# Ownership ------------------------------------------------------------------------------------------------------------


def _owner() -> dict[str, Any]:
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": os.uname().nodename, "boot": boot, "pid": os.getpid()}


def _claimed(dst: str) -> Stage:
    """Return a new stage. Raises OSError."""
    path = Path(dst)
    # The thread's number: two threads may write one DST, as two processes may. It is reused, also on another machine
    # that shares the disk.
    first = threading.get_native_id()
    for number in itertools.chain((first,), (f"{first}{n:03}" for n in itertools.count())):
        claimed = Stage(dst, str(path.with_name(f".{path.name}.partial-{number}")), -1)
        if any(os.path.lexists(name) for name in (claimed.path, claimed.before, claimed.old)):
            continue
        try:
            claimed.descriptor = os.open(claimed.path + _MARK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        try:
            if _is_locked(claimed.descriptor, claimed.path + _MARK) is not False:
                journal.put(claimed.descriptor, _owner())
                return claimed
        except BaseException:
            claimed.remove()
            claimed.let_go()
            raise
        claimed.let_go()
    raise AssertionError("there are always more numbers")


def _is_locked(descriptor: int, path: str) -> bool | None:
    """Try to lock a journal. Return whether it is locked now and still the one at `path`; None where there are no
    locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _left(dst: str, notes: list[str], resume: bool) -> Stage | None:
    """Remove what killed runs left; with `resume`, return the newest of it instead. A destination that was moved aside
    and not replaced is restored."""
    path = Path(dst)
    name = re.compile(re.escape(f".{path.name}.partial-") + r"\d+" + re.escape(_MARK))
    paths = []
    for entry in sorted(os.scandir(path.absolute().parent), key=lambda entry: entry.name):
        if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            paths.append(str(path.with_name(entry.name.removesuffix(_MARK))))
    over = [one for one in (_abandoned(dst, candidate, notes, resume) for candidate in paths) if one is not None]
    over.sort(key=lambda one: os.fstat(one.descriptor).st_mtime_ns)
    taken = over.pop() if resume and over else None
    for one in over:
        _put_back(one, notes)
        one.remove()
        one.let_go()
        notes.append(f"removed what an interrupted run left at `{dst}` (`{Path(one.path).name}`)")
    if taken is not None:
        _put_back(taken, notes)
        if os.path.lexists(dst):
            # It was replaced and not yet removed.
            files.remove(taken.old)
        _set_aside(taken)
    return taken


def _abandoned(dst: str, path: str, notes: list[str], resume: bool) -> Stage | None:
    """Return the stage at `path`, locked, if the run that created it has ended."""
    try:
        descriptor = os.open(path + _MARK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        locked = _is_locked(descriptor, path + _MARK)
        if locked is False:
            return None
        owner, this = journal.owner(descriptor), _owner()
        machine = not owner or owner.get("boot") == this["boot"] != "" or owner.get("host") == this["host"]
        if locked is None and (not machine or _is_running(owner, this)):
            return None
        if not machine and not resume:
            # Some network file systems lock within one machine only.
            notes.append(
                f"a run on {owner.get('host')} left `{Path(path).name}*` beside `{dst}`: remove them once it has ended"
            )
            return None
        stack.pop_all()
    return Stage(dst, path, descriptor)


def _is_running(owner: dict[str, Any], this: dict[str, Any]) -> bool:
    if not owner or owner.get("boot") != this["boot"]:
        return False
    try:
        os.kill(int(owner.get("pid", 0)) or os.getpid(), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, TypeError):
        return True
    return True


def _put_back(left: Stage, notes: list[str]) -> None:
    if os.path.lexists(left.old) and not os.path.lexists(left.dst):
        os.rename(left.old, left.dst)
        notes.append(f"restored `{left.dst}`: a run that was to replace it was killed")


def _set_aside(left: Stage) -> None:
    """Move the files of a run where `taken_over` looks for them. It may have been doing that itself when killed."""
    left.resumes = True
    if os.path.isdir(left.before) and os.path.isdir(left.path):
        for folder, _, names in os.walk(left.path):
            for name in names:
                target = os.path.join(left.before, os.path.relpath(folder, left.path), name)
                if not os.path.lexists(target):
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    os.rename(os.path.join(folder, name), target)
    if os.path.lexists(left.before):
        files.remove(left.path)
    elif os.path.lexists(left.path):
        os.rename(left.path, left.before)
    left.held = _on_disk(left.before)


def _on_disk(path: str) -> int:
    """Return the bytes on disk of a file, or of all files below a directory."""
    if not os.path.isdir(path):
        return os.stat(path).st_blocks * 512 if os.path.lexists(path) else 0
    below = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(os.lstat(file).st_blocks * 512 for file in below)
