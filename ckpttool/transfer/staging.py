"""A destination is made beside its place, synced, and given its name in one rename. What a killed run left is found.

    .out.partial-4242           what is being made of `out`
    .out.partial-4242.journal   whose it is, and held locked as long as it is; then what has been copied (`journal`)
    .out.partial-4242.before    what a run left that this one goes on from, until the files have changed places
    .out.old-4242               what stood at `out`, while the two change places

The lock ends with its process, however that ends. Where a file system has no locks, the number of the process is asked.
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
from ckpttool.transfer import journal

_MARK = ".journal"
# What file systems without hard links say.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


class Stage:
    """Where a destination is made: `Stage("out", "/data/.out.partial-4242", descriptor)`. The descriptor is of the
    journal, and holds its lock; `held` is bytes on disk that an earlier run left there to go on from."""

    def __init__(self, dst: str, path: str, descriptor: int) -> None:
        self.dst, self.path, self.descriptor = dst, path, descriptor
        self.held = 0
        self.goes_on = False
        self.journal: journal.Journal | None = None

    @property
    def before(self) -> str:
        return f"{self.path}.before"

    @property
    def old(self) -> str:
        head, _, number = self.path.rpartition(".partial-")
        return f"{head}.old-{number}"

    def begin(self, created: Catalogue, digest: str, notes: list[str], *, every: bool) -> journal.Journal:
        """The journal of what is copied into `created`, which lies at `path`. What an earlier run left takes its place
        there when it was made by the same plan. With `every`, bytes that nobody wants a CRC of get one too."""
        made = journal.Journal(self.descriptor, every=every)
        try:
            self._begin(made, created, digest, notes)
        except OSError as error:
            raise files.failed(error, self.path, "write") from None
        self.journal = made
        return made

    def _begin(self, made: journal.Journal, created: Catalogue, digest: str, notes: list[str]) -> None:
        if self.goes_on and made.read(digest):
            made.keep(journal.taken_over(created, self.path, self.before, {file for file, _ in made.done}))
        elif self.goes_on:
            notes.append("what an interrupted run left was made of another source or with other flags: started anew")
        files.remove(self.before)
        if not made.done:
            made.begin(digest, _owner())

    def remove(self) -> None:
        """All of it, the journal last: as long as that is there, somebody finds the rest."""
        files.remove(self.path)
        files.remove(self.before)
        if os.path.lexists(self.dst):
            files.remove(self.old)
        with suppress(OSError):
            os.unlink(self.path + _MARK)

    def let_go(self) -> None:
        """Leave it to whoever comes next."""
        with suppress(OSError):
            os.close(self.descriptor)


@contextmanager
def staged(dst: str, *, overwrite: bool, is_file: bool, notes: list[str] | None = None) -> Iterator[str]:
    """A path beside `dst` to make the destination at. It becomes `dst` when the block ends well, in one rename; else
    it is removed. With `overwrite`, what was there is moved aside first and removed last."""
    with stage(dst, overwrite=overwrite, is_file=is_file, notes=notes) as made:
        yield made.path


@contextmanager
def stage(
    dst: str, *, overwrite: bool, is_file: bool, resume: bool = False, notes: list[str] | None = None
) -> Iterator[Stage]:
    """The same with what goes on from an earlier run. With `resume`, what that left is taken over, and what this one
    has done is kept when the machine refuses or the run is stopped. `notes` says what was found, and what became of it.
    """
    dst = dst.rstrip("/") or dst if not is_file else dst
    local.check_free(dst, overwrite=overwrite, is_file=is_file)
    if os.path.islink(dst) and os.path.isdir(dst):
        # A link to another disk: made there, and the link stays.
        dst = os.path.realpath(dst)
    notes = [] if notes is None else notes
    above = Path(dst).absolute().parent
    made = [folder for folder in (above, *above.parents) if not folder.exists()]
    try:
        above.mkdir(parents=True, exist_ok=True)
        found = _left(dst, notes, resume)
        # One that was moved aside may be back.
        local.check_free(dst, overwrite=overwrite, is_file=is_file)
        here = found or _claimed(dst)
    except OSError as error:
        _unmake(made)
        raise files.failed(error, dst, "write") from None
    kept = False
    try:
        yield here
        files.sync_tree(here.path)
        # Somebody else may have made it meanwhile.
        local.check_free(dst, overwrite=overwrite, is_file=is_file)
        try:
            _swap_in(here.path, dst, here.old, overwrite)
            files.sync(str(above))
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise OverwriteError(
                    f"`{dst}` exists: another run has made it meanwhile",
                    hint="pass `--overwrite` to replace it",
                    file=dst,
                ) from None
            raise files.failed(error, dst, "write") from None
    except CkptError as error:
        kept = resume and here.journal is not None and isinstance(error, (StorageError, RemoteError))
        raise _renamed(error, here.path, dst, kept) from None
    except KeyboardInterrupt as stop:
        kept = resume and here.journal is not None
        # The last word of a command says that nothing was written.
        stop.kept = kept  # type: ignore[attr-defined]
        raise
    finally:
        if kept and here.journal is not None:
            here.journal.close()
        else:
            here.remove()
        here.let_go()
        if not kept:
            _unmake(made)


def _renamed(error: CkptError, partial: str, dst: str, kept: bool) -> CkptError:
    """A file that is gone when the message is read is no help: it would have been this one."""
    facts = {k: v.replace(partial, dst) if isinstance(v, str) else v for k, v in error.facts.items()}
    hint = error.hint
    if kept:
        hint = f"{hint}; " if hint else ""
        hint += "run the same command again to continue from what has been copied"
    return type(error)(error.message.replace(partial, dst), hint=hint, **facts)


def _unmake(folders: list[Path]) -> None:
    for folder in folders:
        # Not those in which somebody else has put something meanwhile.
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
        # A file takes the place of another at once: there is no moment without one.
        os.rename(partial, dst)
        return
    try:
        if os.path.lexists(dst):
            os.rename(dst, old)
        os.rename(partial, dst)
    except BaseException:
        # Ctrl-C too, which may come before a rename or after it.
        if os.path.lexists(old) and not os.path.lexists(dst):
            os.rename(old, dst)
        raise


def _name(partial: str, dst: str) -> None:
    """Give it its name, which somebody else may have taken this very moment: raises OSError then."""
    if os.path.isfile(partial):
        # To rename a file is to replace another.
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


def check_space(dst: str, needed: int, free: int) -> None:
    """Raises StorageError when more bytes are needed at `dst` than are free."""
    if needed > free:
        raise StorageError(
            f"`{dst}`: {no_space(needed, free)}",
            hint="free some space, or write somewhere else",
            file=dst,
            found=free,
            expected=needed,
        )


def no_space(needed: int, free: int) -> str:
    """Return the message for a disk without enough space."""
    return f"needs {needed} bytes, but {free} are free"


# Whose it is ----------------------------------------------------------------------------------------------------------


def _owner() -> dict[str, Any]:
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": os.uname().nodename, "boot": boot, "pid": os.getpid()}


def _claimed(dst: str) -> Stage:
    """A stage of our own. Raises OSError."""
    path = Path(dst)
    # The thread's number: two threads may convert into one DST, as two processes may. It comes round again, and is
    # somebody else's on another machine that shares the disk.
    first = threading.get_native_id()
    for number in itertools.chain((first,), (f"{first}{n:03}" for n in itertools.count())):
        made = Stage(dst, str(path.with_name(f".{path.name}.partial-{number}")), -1)
        if any(os.path.lexists(there) for there in (made.path, made.before, made.old)):
            continue
        try:
            made.descriptor = os.open(made.path + _MARK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        try:
            if _is_locked(made.descriptor, made.path + _MARK) is not False:
                journal.put(made.descriptor, _owner())
                return made
        except BaseException:
            made.remove()
            made.let_go()
            raise
        made.let_go()
    raise AssertionError("there are always more numbers")


def _is_locked(descriptor: int, path: str) -> bool | None:
    """Lock a journal: whether it is ours now, and still the one that lies at `path`; None where there are no locks."""
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
    """Remove what runs left that nobody cleans up any more, but, with `resume`, for the newest, which is given back to
    go on from. What was moved aside and never replaced gets its place again."""
    path = Path(dst)
    name = re.compile(re.escape(f".{path.name}.partial-") + r"\d+" + re.escape(_MARK))
    found = []
    for entry in sorted(os.scandir(path.absolute().parent), key=lambda entry: entry.name):
        if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            found.append(str(path.with_name(entry.name.removesuffix(_MARK))))
    over = [one for one in (_abandoned(dst, there, notes, resume) for there in found) if one is not None]
    over.sort(key=lambda one: os.fstat(one.descriptor).st_mtime_ns)
    taken = over.pop() if resume and over else None
    for one in over:
        _put_back(one, notes)
        one.remove()
        one.let_go()
        notes.append(f"what an interrupted run had left at `{dst}` was removed (`{Path(one.path).name}`)")
    if taken is not None:
        _put_back(taken, notes)
        if os.path.lexists(dst):
            # It had been replaced, and was about to be removed.
            files.remove(taken.old)
        _set_aside(taken)
    return taken


def _abandoned(dst: str, path: str, notes: list[str], resume: bool) -> Stage | None:
    """The stage at `path`, ours now, if the run that made it is over."""
    try:
        descriptor = os.open(path + _MARK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        locked = _is_locked(descriptor, path + _MARK)
        if locked is False:
            return None
        owner, here = journal.owner(descriptor), _owner()
        machine = not owner or owner.get("boot") == here["boot"] != "" or owner.get("host") == here["host"]
        if locked is None and (not machine or _is_running(owner, here)):
            return None
        if not machine and not resume:
            # Some network file systems lock within one machine only.
            notes.append(
                f"a run on {owner.get('host')} left `{Path(path).name}*` beside `{dst}`: remove them when it is over"
            )
            return None
        stack.pop_all()
    return Stage(dst, path, descriptor)


def _is_running(owner: dict[str, Any], here: dict[str, Any]) -> bool:
    if not owner or owner.get("boot") != here["boot"]:
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
        notes.append(f"`{left.dst}` is back: a run that was to replace it was killed")


def _set_aside(left: Stage) -> None:
    """Put what a run has made where `taken_over` looks for it. It may have been doing that itself when killed."""
    left.goes_on = True
    if os.path.isdir(left.before) and os.path.isdir(left.path):
        for folder, _, names in os.walk(left.path):
            for name in names:
                there = os.path.join(left.before, os.path.relpath(folder, left.path), name)
                if not os.path.lexists(there):
                    os.makedirs(os.path.dirname(there), exist_ok=True)
                    os.rename(os.path.join(folder, name), there)
    if os.path.lexists(left.before):
        files.remove(left.path)
    elif os.path.lexists(left.path):
        os.rename(left.path, left.before)
    left.held = _on_disk(left.before)


def _on_disk(path: str) -> int:
    """Bytes that a file, or all below a directory, take."""
    if not os.path.isdir(path):
        return os.stat(path).st_blocks * 512 if os.path.lexists(path) else 0
    below = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(os.lstat(file).st_blocks * 512 for file in below)
