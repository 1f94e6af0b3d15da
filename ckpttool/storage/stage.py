"""A destination that is being written in a workspace, and the old one that it replaces.

    .out.partial-9f86d081a3c4/new/out.partial      the unfinished `out`
    .out.partial-9f86d081a3c4/before/out.partial   what an earlier run left to resume from, until its files are moved
    .out.old-9f86d081a3c4                          the old `out`, while it is replaced

The journal of a run that is about to move an old `out` aside says which inode that has. It is restored or removed only
where that is so.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpttool.storage import tree
from ckpttool.storage.errors import os_errors
from ckpttool.storage.stores import local_path
from ckpttool.storage.workspace import BEFORE, NEW, Workspace

# Errors of file systems without hard links, or with none from one directory to another.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_BLOCK = 1 << 20


class StagingArea:
    """Where a destination is written: `path`, a file or a directory in the workspace of the run. The path is for this
    process; others find the same at `shared_path`.

    `held` is the bytes on disk of an earlier run that this one resumes (`resumes`), and `log` has its lines; a run that
    can be resumed itself sets `keep`, so that an I/O error or an interrupt leaves all of it.
    """

    def __init__(self, dst: str, place: Workspace) -> None:
        self.dst, self.place, self.log = dst, place, place.log
        self.name = Path(dst).name
        self.old = f".{self.name}.old-{place.suffix}"
        # No suffix from which a format would be told.
        self._new, self._before = (f"{root}/{self.name}.partial" for root in (NEW, BEFORE))
        self.path, self.shared_path = (local_path(os.path.join(root, self._new)) for root in (place.anchor, place.path))
        self.held = 0
        self.resumes = self.keep = False

    def restart(self, lines: Iterable[Any]) -> None:
        """Begin the log anew with these lines, behind those on this run. Raises OSError."""
        self.place.restart([*lines])

    def take_over(self, payloads: Mapping[str, Sequence[tuple[int, int]]]) -> set[str]:
        """Move the files that an earlier run filled in place of new ones of the same size, by whose paths `payloads`
        has the ranges to keep, in order; all other bytes are copied from the new ones. The rest of that run is removed.
        Return the paths of the files."""
        taken = set()
        inside = self.place.descriptor
        for new, ranges in payloads.items():
            below = os.path.relpath(new, self.path)
            name, old = (os.path.normpath(os.path.join(root, below)) for root in (self._new, self._before))
            with os_errors(new, "write"):
                found, made = tree.status(old, inside), tree.status(name, inside)
                if found is None or made is None or not stat.S_ISREG(found.st_mode) or found.st_size != made.st_size:
                    continue
                _copy_around(name, old, inside, found.st_size, ranges)
                os.rename(old, name, src_dir_fd=inside, dst_dir_fd=inside)
                taken.add(new)
        with os_errors(self.path, "write"):
            tree.remove(BEFORE, inside)
        return taken

    def set_aside(self) -> None:
        """Move the files of an earlier run where `take_over` looks for them. It may have been doing that itself when it
        was killed. Raises OSError."""
        self.resumes, inside = True, self.place.descriptor
        for root in (NEW, BEFORE):
            tree.remove_links(root, inside)
        if tree.status(self._before, inside) is not None:
            for name in tree.files_below(inside, NEW):
                target = f"{BEFORE}/{name}"
                if tree.status(target, inside) is None:
                    _make_above(target, inside)
                    os.rename(f"{NEW}/{name}", target, src_dir_fd=inside, dst_dir_fd=inside)
            tree.remove(NEW, inside)
        elif tree.status(self._new, inside) is not None:
            tree.remove(BEFORE, inside)
            os.rename(NEW, BEFORE, src_dir_fd=inside, dst_dir_fd=inside)
        if tree.status(NEW, inside) is None:
            os.mkdir(NEW, dir_fd=inside)
        self.held = tree.disk_bytes(BEFORE, inside)

    def said(self, key: str) -> Any:
        """Return what the journal says last under a key; None if it does not."""
        lines = [line[key] for line in self.log if isinstance(line, dict) and key in line]
        return lines[-1] if lines else None

    def has_old(self) -> bool:
        """Return whether the old destination lies where this run has moved it."""
        found = tree.status(self.old, self.place.above)
        if found is None or stat.S_IFMT(found.st_mode) not in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK):
            return False
        return bool(self.said("old") == [found.st_ino, stat.S_IFMT(found.st_mode)])

    def is_published(self) -> bool:
        """Return whether the destination is in its place."""
        inside = self.place.descriptor
        made, there = tree.status(self._new, inside), tree.status(self.name, self.place.above)
        if there is None or tree.status(self._before, inside) is not None:
            return False
        # A file has both names if the run was killed between them; to resume would write into the destination.
        return made is None or os.path.samestat(made, there)

    def put_back(self) -> bool:
        """Restore the old destination, if it was moved aside and not replaced. Return whether it was. Raises
        OSError."""
        above = self.place.above
        if tree.status(self.name, above) is not None or not self.has_old():
            return False
        os.rename(self.old, self.name, src_dir_fd=above, dst_dir_fd=above)
        return True

    def remove_old(self) -> None:
        """Remove the old destination, if it was replaced. Raises OSError."""
        above = self.place.above
        if tree.status(self.name, above) is not None and self.has_old():
            found = tree.status(self.old, above)
            tree.remove(self.old, above, inode=None if found is None else found.st_ino)

    def remove(self) -> None:
        """Remove all of it, the journal last: as long as that exists, the next run finds the rest. Raises OSError."""
        self.remove_old()
        if not self.has_old():
            self.place.remove()

    def unlock(self) -> None:
        """Release the lock."""
        self.place.close()

    def publish(self, *, overwrite: bool) -> None:
        """Give the destination its name. With `overwrite`, an old one is moved aside first. Raises OSError."""
        above, inside = self.place.above, self.place.descriptor
        there, made = tree.status(self.name, above), os.stat(self._new, dir_fd=inside, follow_symlinks=False)
        if there is not None and stat.S_ISDIR(there.st_mode) and self._remove_empty():
            there = None
        is_file = stat.S_ISREG(made.st_mode)
        if is_file and not overwrite:
            # A rename would replace what another process has created meanwhile.
            try:
                os.link(self._new, self.name, src_dir_fd=inside, dst_dir_fd=above, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
            else:
                os.unlink(self._new, dir_fd=inside)
                return
        if overwrite and there is not None and not (is_file and not stat.S_ISDIR(there.st_mode)):
            # A file replaces another in one step.
            self._move_aside(there)
            try:
                self._rename_new()
            except BaseException:
                # Also for Ctrl-C, before a rename or after it.
                self.put_back()
                raise
            return
        self._rename_new()

    def _remove_empty(self) -> bool:
        try:
            os.rmdir(self.name, dir_fd=self.place.above)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def _move_aside(self, there: os.stat_result) -> None:
        above = self.place.above
        self._record_old(there)
        try:
            os.rename(self.name, self.old, src_dir_fd=above, dst_dir_fd=above)
            moved = tree.status(self.old, above)
            if moved is not None and moved.st_ino != there.st_ino:
                # What another run has put there meanwhile has to come back, or to be removed, as well.
                self._record_old(moved)
        except FileNotFoundError:
            # Another run is replacing it, too.
            return
        except BaseException:
            self.put_back()
            raise

    def _record_old(self, old: os.stat_result) -> None:
        self.log.record({"old": [old.st_ino, stat.S_IFMT(old.st_mode)]})

    def _rename_new(self) -> None:
        os.rename(self._new, self.name, src_dir_fd=self.place.descriptor, dst_dir_fd=self.place.above)


def _make_above(name: str, folder: int) -> None:
    """Make the directories above a name in an open directory."""
    parts = os.path.dirname(name).split("/")
    for count in range(1, len(parts) + 1):
        with suppress(FileExistsError):
            os.mkdir("/".join(parts[:count]), dir_fd=folder)


def _copy_around(new: str, old: str, folder: int, size: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Copy all of `new` but some ranges to `old`, both in an open directory. Raises OSError."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)

    at = 0
    with open(new, "rb", opener=opener) as source, open(old, "r+b", opener=opener) as target:
        for start, end in (*ranges, (size, size)):
            source.seek(at)
            target.seek(at)
            while at < start:
                data = source.read(min(_BLOCK, start - at))
                target.write(data)
                at += len(data)
            at = max(at, end)
