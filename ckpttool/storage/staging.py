"""Writes a local destination in a workspace beside its place, syncs it, and renames it once it is complete.

What killed runs left there is input: the next run restores, resumes or removes only what a run of this user made, as
`workspace` proves, and what its journal says of an old destination (`StagingArea`) or of a file that is still to be
written (`After`). Whatever else has such a name is left alone, and named.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ckpttool.errors import CkptError, OverwriteError, RemoteError, StorageError, UsageError
from ckpttool.storage import files, remnants, workspace
from ckpttool.storage.errors import from_os_error, not_expanded, of_windows, os_errors, written_meanwhile
from ckpttool.storage.stage import StagingArea
from ckpttool.storage.stores import Location, is_remote


class After(NamedTuple):
    """What belongs to a destination and is not in it: the file `path`. `make` is called with where the destination
    lies, complete, before it gets its name, and returns what writes the file afterwards: a function, or None if there
    is nothing left to do. If the process is killed before that has ended, `finish` does it."""

    path: str
    make: Callable[[Location], Callable[[], None] | None]


@contextmanager
def stage(
    dst: str,
    *,
    overwrite: bool,
    is_file: bool,
    resume: bool = False,
    notes: list[str] | None = None,
    after: After | None = None,
) -> Iterator[StagingArea]:
    """Yield where to write `dst`. That is renamed to `dst` when the block ends without an error; else it is removed.

    With `overwrite`, the old `dst` is moved aside first and removed last. With `resume`, what an earlier run has kept
    is taken over, and this one may `keep` its own. `notes` gets a line for everything that was found. An error of
    what `after` returns leaves the destination.
    """
    dst = dst.rstrip("/") or dst if not is_file else dst
    check_free(dst, overwrite=overwrite, is_file=is_file)
    dst = _followed(dst)
    notes = [] if notes is None else notes
    above, name = _place(dst)
    created = missing_folders(dst)
    if created:
        notes.append(f"created the directory `{above}`")
    try:
        os.makedirs(above, exist_ok=True)
        earlier = _left(dst, notes, resume)
        # `_left` may have restored an old one.
        check_free(dst, overwrite=overwrite, is_file=is_file)
        current = earlier or StagingArea(dst, workspace.create(above, f".{name}.partial-"))
    except OSError as error:
        _unmake(created)
        raise from_os_error(error, dst, "write") from None
    kept = gone = False
    try:
        yield current
        rest = after.make(current.path) if after is not None else None
        files.sync_tree(current.path)
        # Another run may have written it meanwhile.
        check_free(dst, overwrite=overwrite, is_file=is_file)
        try:
            if after is not None and rest is not None:
                current.log.record({"after": str(Path(after.path).absolute())})
            current.publish(overwrite=overwrite)
            os.fsync(current.place.above)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise written_meanwhile(dst) from None
            raise from_os_error(error, dst, "write") from None
        current.keep = False
        if rest is not None:
            rest()
    except CkptError as error:
        kept = resume and current.keep and isinstance(error, (StorageError, RemoteError))
        gone = not kept and _remove(current, notes)
        raise _renamed(error, current, dst, kept, is_left=not (kept or gone)) from None
    except KeyboardInterrupt as stop:
        kept = resume and current.keep
        # For the last message of the command.
        stop.kept = kept  # type: ignore[attr-defined]
        raise
    finally:
        if not (kept or gone):
            _remove(current, notes)
        current.unlock()
        if not kept:
            _unmake(created)


def discard(path: str) -> None:
    """Remove a file or a directory that is no link: it is moved into a workspace, and removed there. Raises
    StorageError, also if something is left of it."""
    above, name = _place(path.rstrip("/"))
    with os_errors(path, "write"):
        place = workspace.create(above, f".{name}.partial-")
        try:
            found = os.stat(name, dir_fd=place.above, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                raise StorageError(f"`{path}` is a link, which is not removed", file=path)
            os.rename(name, f"{workspace.NEW}/{name}", src_dir_fd=place.above, dst_dir_fd=place.descriptor)
            os.fsync(place.above)
        finally:
            try:
                place.remove()
            finally:
                place.close()


def _place(dst: str) -> tuple[str, str]:
    """Return the folder of a destination and its name in there."""
    # `os.path.abspath` would take `link/..` for the folder of the link.
    path = Path(dst).absolute()
    return str(path.parent), path.name


def _followed(dst: str) -> str:
    # A link to another disk: the target is replaced, and the link stays.
    return os.path.realpath(dst) if os.path.islink(dst) and os.path.isdir(dst) else dst


def _remove(one: StagingArea, notes: list[str]) -> bool:
    """Remove what a run made besides the destination, or note that it is still there. Return whether it is gone."""
    try:
        one.remove()
    except OSError as error:
        left = one.old if one.has_old() else one.place.name
        folder, reason = os.path.dirname(one.dst) or ".", (error.strerror or str(error)).lower()
        notes.append(f"`{left}` is left beside `{one.dst}`: {reason}; remove it with `ckpttool clean {folder} --yes`")
        return False
    return True


def check_free(dst: str, *, overwrite: bool, is_file: bool) -> None:
    """Raise UsageError or OverwriteError if `dst` cannot be created."""
    if is_remote(dst):
        raise UsageError(f"`{dst}` is not on this machine", hint="name a file or a directory")
    with os_errors(dst, "write"):
        _check_free(dst, overwrite=overwrite, is_file=is_file)


def _check_free(dst: str, *, overwrite: bool, is_file: bool) -> None:
    path = Path(dst)
    if not dst or path.name in ("", ".."):
        message = f"`{dst}` cannot be replaced" if dst else "the destination has no name"
        raise UsageError(message, hint="name a new file or directory")
    if is_file and (dst.endswith("/") or path.is_dir()):
        raise UsageError(
            f"`{dst}` is a directory, and one file is written", hint=f"name the file: `{dst.rstrip('/')}/NAME`"
        )
    if hint := not_expanded(dst):
        raise UsageError(f"`{dst}`: there is no directory `{dst.partition('/')[0]}`", hint=hint)
    if hint := of_windows(dst):
        raise UsageError(f"`{dst}` is a path of Windows", hint=hint)
    if os.path.ismount(os.path.realpath(dst)):
        message = f"`{dst}` is where a file system is mounted, which cannot be replaced"
        raise UsageError(message, hint=f"name a directory in it: `{dst.rstrip('/')}/NAME`")
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
    with os_errors(dst, "write"):
        return [folder for folder in (above, *above.parents) if not folder.exists()]


def check_writable(dst: str) -> None:
    """Raise StorageError if nothing can be created beside `dst`, and creates nothing itself."""
    folder = next(folder for folder in Path(dst).absolute().parents if folder.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"`{dst}`: cannot write: no permission to write in `{folder}`", file=dst)


def _renamed(error: CkptError, stage: StagingArea, dst: str, kept: bool, *, is_left: bool) -> CkptError:
    """Return the error with the destination in place of the staging path, which is removed."""

    def renamed(text: str) -> str:
        return text.replace(stage.path, dst).replace(stage.shared_path, dst)

    facts = {k: renamed(v) if isinstance(v, str) else v for k, v in error.facts.items()}
    hints = [error.hint, "run the same command again to continue from what has been copied" if kept else None]
    if is_left:
        hints.append(f"what was written is left: `ckpttool clean {os.path.dirname(dst) or '.'} --yes` removes it")
    return type(error)(renamed(error.message), hint="; ".join(filter(None, hints)) or None, **facts)


def _unmake(folders: list[Path]) -> None:
    for folder in folders:
        # Not those in which another process has put something meanwhile.
        with suppress(OSError):
            folder.rmdir()


# What earlier runs left -----------------------------------------------------------------------------------------------


def finish(dst: str, path: str | None, do: Callable[[], None]) -> bool | None:
    """Do what a killed run has not, which put `dst` in its place without its `After`: if that was to write `path`,
    `do` is called, and the run is forgotten. Return whether it was; None if there is no such run.

    Whatever else a journal says is not believed. Raises StorageError, and the errors of `do`.
    """
    dst = _followed(dst.rstrip("/") or dst)
    wanted, done = path and str(Path(path).absolute()), None
    if not os.path.lexists(dst):
        return None
    with os_errors(dst, "write"):
        ended = _ended(dst, [], resume=False)
    try:
        for stage in ended:
            if (said := stage.said("after")) is None or not stage.is_published():
                continue
            if wanted is None or said != wanted:
                done = bool(done)
                continue
            if not os.path.lexists(wanted):
                do()
                done = True
            _remove(stage, [])
    finally:
        for stage in ended:
            stage.unlock()
    return done


def _left(dst: str, notes: list[str], resume: bool) -> StagingArea | None:
    """Remove what killed runs left; with `resume`, return the newest of it instead. A destination that was moved aside
    and not replaced is restored. Raises OSError."""
    ended = _ended(dst, notes, resume)
    begun = [one for one in ended if not one.place.is_empty and not one.is_published()]
    taken = begun[-1] if resume and begun else None
    try:
        for one in ended:
            if one.put_back():
                notes.append(f"restored `{dst}`: a run that was to replace it was killed")
            if one is not taken and _remove(one, notes):
                notes.append(f"removed what an interrupted run left at `{dst}` (`{one.place.name}`)")
        if taken is not None:
            taken.place.adopt()
            taken.set_aside()
    except BaseException:
        if taken is not None:
            taken.unlock()
        raise
    finally:
        for one in ended:
            if one is not taken:
                one.unlock()
    return taken


def _ended(dst: str, notes: list[str], resume: bool) -> list[StagingArea]:
    """Return what ended runs of this user left at `dst`, the oldest first. What else is there is noted. Raises
    OSError."""
    ended, foreign = [], []
    folder, name = _place(dst)
    for one in remnants.beside(folder, name):
        if one.stage is None:
            if not one.running:
                foreign.append(f"`{one.names[0]}` ({one.why})")
        elif (host := one.stage.place.host) is not None and not resume:
            # Some network file systems lock within one machine only.
            notes.append(f"a run on {host} left `{one.names[0]}` beside `{dst}`: remove it once it has ended")
            one.stage.unlock()
        else:
            ended.append(one.stage)
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        notes.append(f"not of a run that could be continued, and left alone: {', '.join(foreign[:3])}{more}")
    return sorted(ended, key=lambda one: os.fstat(one.log.descriptor).st_mtime_ns)
