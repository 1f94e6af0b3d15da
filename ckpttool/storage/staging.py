"""Writes a local destination beside its place, syncs it, and renames it once it is complete.

    .out.partial-4242           the unfinished `out`
    .out.partial-4242.journal   which process writes it, and has it locked; then lines on what it has written
    .out.partial-4242.before    what an earlier run left to resume from, until its files have been moved
    .out.old-4242               the old `out`, while it is replaced

The journal of a run whose `out` is in its place, but not yet what belongs to it (`After`), ends with a line on that.

The lock ends with its process, and the next run finds what that left. Where a file system has no locks, the process id
is looked up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.errors import CkptError, OverwriteError, RemoteError, StorageError, UsageError
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.errors import from_os_error, not_expanded, os_errors
from ckpttool.storage.stores import is_remote

_MARK = ".journal"
# Errors of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_LOCKS = (
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.ENOLCK,
    errno.EINVAL,
    errno.EBADF,
)  # the last: a directory
_BLOCK = 1 << 20


class Log:
    """Lines of JSON at an open descriptor, each behind the CRC-32 of its text; one that is torn or damaged ends them.

    The methods raise OSError.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __iter__(self) -> Iterator[Any]:
        return (json.loads(line[9:]) for line in self._undamaged())

    def append(self, lines: Iterable[Any]) -> None:
        """Append values, a line each."""
        texts = [json.dumps(line, separators=(",", ":")).encode() for line in lines]
        data = b"".join([b"%08x %s\n" % (crc32(text), text) for text in texts])
        while data:
            data = data[os.write(self.descriptor, data) :]

    def cut(self, *, keep: bool) -> None:
        """Cut off what is behind the last undamaged line, or everything."""
        end = sum(map(len, self._undamaged())) if keep else 0
        if end != os.lseek(self.descriptor, 0, os.SEEK_END):
            os.truncate(self.descriptor, end)
        os.lseek(self.descriptor, end, os.SEEK_SET)

    def _undamaged(self) -> Iterator[bytes]:
        with open(os.dup(self.descriptor), "rb") as stream:
            stream.seek(0)
            for line in stream:
                if not line.endswith(b"\n") or line[:9] != b"%08x " % crc32(line[9:-1]):
                    return
                yield line


class After(NamedTuple):
    """What is done once a destination is in its place: `do` writes the file `path`. If the process is killed before it
    has, `take_unfinished` returns the path."""

    path: str
    do: Callable[[], None]


class Stage:
    """Where a destination is written: `stage.path`, a file or a directory beside it.

    `held` is the bytes on disk of an earlier run that this one resumes (`resumes`), and `log` has its lines; a run that
    can be resumed itself sets `keep`, so that an I/O error or an interrupt leaves all of it.
    """

    def __init__(self, dst: str, path: str, descriptor: int) -> None:
        self.dst, self.path = dst, path
        self.before = f"{path}.before"
        self.old = ".old-".join(path.rsplit(".partial-", 1))
        self.log = Log(descriptor)
        self.held = 0
        self.resumes = self.keep = False

    def restart(self, lines: Iterable[Any]) -> None:
        """Begin the log anew with these lines, behind that on this process."""
        self.log.cut(keep=False)
        self.log.append([_owner(), *lines])

    def take_over(self, payloads: Mapping[str, Sequence[tuple[int, int]]]) -> set[str]:
        """Move the files that an earlier run filled in place of new ones of the same size, by whose paths `payloads`
        has the ranges to keep, in order; all other bytes are copied from the new ones. The rest of that run is removed.
        Return the paths of the files."""
        taken = set()
        for new, ranges in payloads.items():
            old = os.path.normpath(os.path.join(self.before, os.path.relpath(new, self.path)))
            with os_errors(new, "write"):
                if os.path.isfile(old) and os.path.getsize(old) == os.path.getsize(new):
                    _copy_around(new, old, ranges)
                    os.rename(old, new)
                    taken.add(new)
        files.remove(self.before)
        return taken

    def remove(self) -> None:
        """Remove all of it, the journal last: as long as that exists, the next run finds the rest."""
        files.remove(self.path)
        files.remove(self.before)
        if os.path.lexists(self.dst):
            files.remove(self.old)
        with suppress(OSError):
            os.unlink(self.path + _MARK)

    def unlock(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            os.close(self.log.descriptor)


def _copy_around(new: str, old: str, ranges: Sequence[tuple[int, int]]) -> None:
    """Copy all of `new` but some ranges to `old`. Raises OSError."""
    size, at = os.path.getsize(new), 0
    with open(new, "rb") as source, open(old, "r+b") as target:
        for start, end in (*ranges, (size, size)):
            source.seek(at)
            target.seek(at)
            while at < start:
                data = source.read(min(_BLOCK, start - at))
                target.write(data)
                at += len(data)
            at = max(at, end)


@contextmanager
def stage(
    dst: str,
    *,
    overwrite: bool,
    is_file: bool,
    resume: bool = False,
    notes: list[str] | None = None,
    after: After | None = None,
) -> Iterator[Stage]:
    """Yield where to write `dst`. That is renamed to `dst` when the block ends without an error; else it is removed.

    With `overwrite`, the old `dst` is moved aside first and removed last. With `resume`, what an earlier run has kept
    is taken over, and this one may `keep` its own. `notes` gets a line for everything that was found. An error of
    `after` leaves the destination.
    """
    dst = dst.rstrip("/") or dst if not is_file else dst
    check_free(dst, overwrite=overwrite, is_file=is_file)
    if os.path.islink(dst) and os.path.isdir(dst):
        # A link to another disk: the target is replaced, and the link stays.
        dst = os.path.realpath(dst)
    notes = [] if notes is None else notes
    above = Path(dst).absolute().parent
    created = missing_folders(dst)
    if created:
        notes.append(f"created the directory `{above}`")
    try:
        above.mkdir(parents=True, exist_ok=True)
        earlier = _left(dst, notes, resume)
        # `_left` may have restored an old one.
        check_free(dst, overwrite=overwrite, is_file=is_file)
        current = earlier or _claimed(dst)
    except OSError as error:
        _unmake(created)
        raise from_os_error(error, dst, "write") from None
    kept = False
    try:
        yield current
        files.sync_tree(current.path)
        # Another run may have written it meanwhile.
        check_free(dst, overwrite=overwrite, is_file=is_file)
        try:
            if after is not None:
                current.log.append([{"after": os.path.abspath(after.path)}])
                os.fsync(current.log.descriptor)
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
        current.keep = False
        if after is not None:
            after.do()
    except CkptError as error:
        kept = resume and current.keep and isinstance(error, (StorageError, RemoteError))
        raise _renamed(error, current.path, dst, kept) from None
    except KeyboardInterrupt as stop:
        kept = resume and current.keep
        # For the last message of the command.
        stop.kept = kept  # type: ignore[attr-defined]
        raise
    finally:
        if not kept:
            current.remove()
        current.unlock()
        if not kept:
            _unmake(created)


def check_free(dst: str, *, overwrite: bool, is_file: bool) -> None:
    """Raise UsageError or OverwriteError if `dst` cannot be created."""
    path = Path(dst)
    if is_remote(dst):
        raise UsageError(f"`{dst}` is not on this machine", hint="name a file or a directory")
    if not dst or os.path.basename(os.path.normpath(dst)) in ("", ".", ".."):
        message = f"`{dst}` cannot be replaced" if dst else "the destination has no name"
        raise UsageError(message, hint="name a new file or directory")
    if is_file and (dst.endswith("/") or path.is_dir()):
        raise UsageError(
            f"`{dst}` is a directory, and one file is written", hint=f"name the file: `{dst.rstrip('/')}/NAME`"
        )
    if hint := not_expanded(dst):
        raise UsageError(f"`{dst}`: there is no directory `{dst.partition('/')[0]}`", hint=hint)
    if path.is_dir() and not is_file and not any(path.iterdir()):
        return
    if os.path.lexists(path) and stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        # Root could replace /dev/null by a checkpoint.
        raise OverwriteError(f"`{dst}` is a pipe or a device", hint="name a file or a directory", file=dst)
    if os.path.lexists(path) and not overwrite:
        raise OverwriteError(f"`{dst}` exists", hint="pass `--overwrite` to replace it", file=dst)


def missing_folders(dst: str) -> list[Path]:
    """Return the folders above `dst` that do not exist, the innermost first."""
    above = Path(dst).absolute().parent
    return [folder for folder in (above, *above.parents) if not folder.exists()]


def check_writable(dst: str) -> None:
    """Raise StorageError if nothing can be created beside `dst`, and creates nothing itself."""
    folder = next(folder for folder in Path(dst).absolute().parents if folder.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"`{dst}`: cannot write: no permission to write in `{folder}`", file=dst)


def _renamed(error: CkptError, partial: str, dst: str, kept: bool) -> CkptError:
    """Return the error with the destination in place of the staging path, which is removed."""
    facts = {k: v.replace(partial, dst) if isinstance(v, str) else v for k, v in error.facts.items()}
    hints = [error.hint, "run the same command again to continue from what has been copied" if kept else None]
    return type(error)(error.message.replace(partial, dst), hint="; ".join(filter(None, hints)) or None, **facts)


def _unmake(folders: list[Path]) -> None:
    for folder in folders:
        # Not those in which another process has put something meanwhile.
        with suppress(OSError):
            folder.rmdir()


def _swap_in(partial: str, dst: str, old: str, overwrite: bool) -> None:
    place = Path(dst)
    if place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
        place.rmdir()
    if not overwrite and os.path.isfile(partial):
        # A rename would replace what another process has created meanwhile.
        try:
            os.link(partial, dst)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(partial, dst)
        else:
            os.unlink(partial)
        return
    if not overwrite:
        os.rename(partial, dst)
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
        mark, log = claimed.path + _MARK, claimed.log
        if any(map(os.path.lexists, (claimed.path, claimed.before, claimed.old, mark))):
            continue
        with suppress(FileExistsError):
            log.descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                if _is_locked(log.descriptor, mark) is not False:
                    log.append([_owner()])
                    return claimed
            except BaseException:
                claimed.remove()
                claimed.unlock()
                raise
            claimed.unlock()
    raise AssertionError("there are always more numbers")


def _is_locked(descriptor: int, path: str) -> bool | None:
    """Try to lock a journal. Return whether it is locked now and still the one at `path`; None where there are no
    locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise


@contextmanager
def scratch_directory(prefix: str, folder: str | None = None) -> Iterator[str]:
    """Yield a temporary directory in `folder` or `TMPDIR`, which is removed at the end of the block. Those of killed
    runs are removed first."""
    import tempfile

    # Some network file systems lock within one machine only.
    prefix = f"{prefix}{os.uname().nodename}-"
    top = os.path.realpath(folder or tempfile.gettempdir())
    for path in Path(top).glob(f"{glob.escape(prefix)}*"):
        with _locked_directory(str(path)) as is_locked:
            if is_locked:
                files.remove(str(path))
    with contextlib.ExitStack() as stack:
        with os_errors(top, "write"):
            os.makedirs(top, exist_ok=True)
            scratch = tempfile.mkdtemp(prefix=prefix, dir=top)
        # Another run may have removed it before it was locked.
        while stack.enter_context(_locked_directory(scratch)) is False:
            scratch = tempfile.mkdtemp(prefix=prefix, dir=top)
        stack.callback(files.remove, scratch)
        yield scratch


@contextmanager
def _locked_directory(path: str) -> Iterator[bool | None]:
    """Try to lock a directory for the block. Yield what `_is_locked` returns."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _is_locked(descriptor, path)
    finally:
        os.close(descriptor)


def take_unfinished(dst: str) -> list[str]:
    """Return what killed runs have put `dst` in its place without: the paths of their `After`. Forget these runs.

    Raises StorageError.
    """
    dst = dst.rstrip("/") or dst
    if os.path.islink(dst) and os.path.isdir(dst):
        dst = os.path.realpath(dst)
    missing = []
    if os.path.lexists(dst):
        with os_errors(dst, "write"):
            for stage in _all_abandoned(dst, [], resume=False):
                last = [*stage.log][-1:]
                match last:
                    case [{"after": str() as path}] if not os.path.lexists(stage.path):
                        missing.append(path)
                        stage.remove()
                stage.unlock()
    return missing


def _all_abandoned(dst: str, notes: list[str], resume: bool) -> list[Stage]:
    path = Path(dst)
    journal = re.compile(re.escape(f".{path.name}.partial-") + r"\d+" + re.escape(_MARK))
    with os.scandir(path.absolute().parent) as entries:
        names = sorted(e.name for e in entries if journal.fullmatch(e.name) and e.is_file(follow_symlinks=False))
    paths = [str(path.with_name(name.removesuffix(_MARK))) for name in names]
    return [one for one in (_abandoned(dst, candidate, notes, resume) for candidate in paths) if one is not None]


def _left(dst: str, notes: list[str], resume: bool) -> Stage | None:
    """Remove what killed runs left; with `resume`, return the newest of it instead. A destination that was moved aside
    and not replaced is restored."""
    over = _all_abandoned(dst, notes, resume)
    over.sort(key=lambda one: os.fstat(one.log.descriptor).st_mtime_ns)
    taken = over.pop() if resume and over else None
    for one in over:
        _put_back(one, notes)
        one.remove()
        one.unlock()
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
        owner, this = next(iter(Log(descriptor)), None), _owner()
        if not isinstance(owner, dict):
            owner = {}
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
    except (OSError, ValueError, TypeError) as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _put_back(left: Stage, notes: list[str]) -> None:
    if os.path.lexists(left.old) and not os.path.lexists(left.dst):
        os.rename(left.old, left.dst)
        notes.append(f"restored `{left.dst}`: a run that was to replace it was killed")


def _set_aside(left: Stage) -> None:
    """Move the files of a run where `take_over` looks for them. It may have been doing that itself when killed."""
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
    below = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(os.lstat(file).st_blocks * 512 for file in (path, *below) if os.path.isfile(file))
