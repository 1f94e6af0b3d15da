"""Keeps what a run writes into its output directory, as it was after each save: in its process, or from outside.

    versions/<n>.<pid>           a file as it was: a copy, or of a large one a second name (hard link)
    snapshots/<time>.<pid>.json  the directory as it was, one file for each save

A save is anything that has changed but files that only grow, as logs do. In the process of a script the directory is
looked at where a step of an optimizer begins, by which what belongs to the step before is written, and before Python
opens a file in it for writing, replaces or removes one. This module needs the standard library alone.
"""

import functools
import glob
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from typing import Any

Note = Callable[[str, BaseException], None]
_WRITES = os.O_WRONLY | os.O_RDWR
_LARGE = 1 << 26  # bytes of a file from which on it gets a second name in place of a copy


class Keeper:
    """Keeps the directory `out` in `folder`. With `folder` None, changes are seen and nothing is kept."""

    def __init__(self, out: str, folder: str | None, note: Note | None = None) -> None:
        self._out, self._folder, self._note = os.path.realpath(out), folder, note
        self._kept: dict[str, tuple[Any, str]] = {}  # by name in `out`: what it was, and its version
        self._saved: dict[str, Any] = {}  # the directory at the last save
        self._seen: dict[str, Any] = {}  # the directory as it was looked at last
        self._writes: dict[str, int] = {}  # how often Python was seen to write a file
        self._is_busy = False

    def keep(self, step: int | None = None, number: int | None = None, taken: Mapping[str, int] | None = None) -> int:
        """Keep the directory if something was saved, where `step` begins; return how many bytes were, at least 1.

        That is the step `number` of all optimizers, each of which has `taken` some.
        """
        tree = self._tree()
        before, self._seen = self._seen, tree
        growing = {
            name for name, now in tree.items()
            if name in before and now != before[name] and now[:2] == before[name][:2] and now[2] > before[name][2]
        }  # fmt: skip
        changed = {name for name in tree.keys() | self._saved.keys() if tree.get(name) != self._saved.get(name)}
        if not changed - growing:
            return 0
        self._saved = tree
        if self._folder is not None:
            self._write(self._folder, tree, growing, {"step": step, "number": number, "taken": taken})
        return max(1, sum(int(tree[name][2]) for name in changed - growing if name in tree))

    def stop(self) -> None:
        """Keep nothing more: another process of the run does."""
        self._folder = None

    def _tree(self) -> dict[str, Any]:
        """Return the files of the directory by name: writes, inode, size, time; of links and folders what they are."""
        tree: dict[str, Any] = {}
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                entries = [*os.scandir(os.path.join(self._out, folder))]
            except OSError:
                continue
            for entry in entries:
                name = os.path.join(folder, entry.name)
                try:
                    if entry.is_symlink():
                        tree[name] = "link", os.readlink(entry.path), 0
                    elif entry.is_dir():
                        tree[name] = "folder", "", 0
                        folders.append(name)
                    elif stat.S_ISREG((status := entry.stat()).st_mode):
                        times = status.st_mtime_ns
                        tree[name] = self._writes.get(name, 0), status.st_ino, status.st_size, times
                except OSError:  # it was removed meanwhile
                    continue
        return tree

    def _write(self, folder: str, tree: Mapping[str, Any], growing: set[str], moment: dict[str, Any]) -> None:
        versions, snapshots = os.path.join(folder, "versions"), os.path.join(folder, "snapshots")
        for each in (versions, snapshots):
            os.makedirs(each, exist_ok=True)
        files, links, folders = {}, {}, []
        for name, now in sorted(tree.items()):
            if now[0] == "link":
                links[name] = now[1]
            elif now[0] == "folder":
                folders.append(name)
            elif (version := self._version(versions, name, now)) is not None:
                status = os.stat(os.path.join(versions, version))
                files[name] = [version, status.st_size, status.st_mtime_ns, name in growing]
        record = {**moment, "process": str(os.getpid()), "files": files, "links": links, "folders": folders}
        path = os.path.join(snapshots, f"{time.time_ns()}.{os.getpid()}.json")
        with open(f"{path}.tmp", "w", encoding="utf-8") as stream:
            json.dump(record, stream)
        os.rename(f"{path}.tmp", path)

    def _version(self, folder: str, name: str, now: Any) -> str | None:
        if self._kept.get(name, (None, ""))[0] == now:
            return self._kept[name][1]
        version, path = f"{len(self._kept)}.{time.time_ns()}.{os.getpid()}", os.path.join(self._out, name)
        try:
            place(path, os.path.join(folder, version))
        except OSError:  # it was removed meanwhile
            return None
        self._kept[name] = now, version
        return version

    # in the process of a script ---------------------------------------------------------------------------------------

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Look at an event of `sys.addaudithook`, which must never raise."""
        if event == "open":
            flags = args[2] if isinstance(args[2], int) else 0
            if flags & _WRITES:
                self._before_writing(args[0], flags)
        elif event == "os.rename":
            self._before_writing(args[1], None)
        elif event == "os.remove":
            self._before_writing(args[0], None)

    def watch(self, torch: Any) -> None:
        """Watch `torch.save`, whose writer opens files by itself."""
        save = torch.save

        @functools.wraps(save)
        def kept(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_writing(f, os.O_WRONLY | os.O_TRUNC)
            return save(obj, f, *args, **kwargs)

        torch.save = torch.serialization.save = kept

    def _before_writing(self, path: Any, flags: int | None) -> None:
        """Keep what is there before a file is opened with `flags`, or replaced or removed if there are none."""
        if self._is_busy or not isinstance(path, (str, bytes, os.PathLike)):
            return
        self._is_busy = True
        try:
            folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
            # A link is followed to be written into, and not to be removed.
            path = os.path.realpath(folder if flags is None else os.path.join(folder, name))
            path = os.path.join(path, name) if flags is None else path
            if not path.startswith(self._out + os.sep):
                return
            if os.path.isfile(path) and not (flags or 0) & os.O_APPEND:
                self.keep()
            if flags is not None:
                _detach(path, is_truncated=bool(flags & os.O_TRUNC))
            if not (flags or 0) & os.O_APPEND:
                # Two versions within a tick of the clock may have one inode and one size.
                name = os.path.relpath(path, self._out)
                self._writes[name] = self._writes.get(name, 0) + 1
        except Exception as error:
            if self._note is not None:
                self._note("a copy of what was saved", error)
        finally:
            self._is_busy = False


def place(path: str, target: str) -> None:
    """Copy a file, with its time; give a large one a second name instead, where it can have one."""
    status = os.stat(path)
    if status.st_size >= _LARGE:
        try:
            os.link(path, target)
            return
        except OSError:
            pass
    shutil.copyfile(path, target)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _detach(path: str, *, is_truncated: bool) -> None:
    """Give a file that has a second name contents of its own, before something is written into it."""
    try:
        if os.stat(path).st_nlink < 2:
            return
    except OSError:
        return
    if is_truncated:
        os.unlink(path)
        return
    shutil.copyfile(path, f"{path}.detached")
    os.replace(f"{path}.detached", path)


def snapshots(folder: str) -> list[str]:
    """Return the paths of the snapshots in the folder of a keeper, oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "snapshots", "*.json")))


def moment(snapshot: str, key: str = "step") -> Any:
    """Return the `step` that began at a snapshot, its `number` or what was `taken` before; None if another process
    made it than the run itself, which is its `process`."""
    with open(snapshot, encoding="utf-8") as stream:
        return json.load(stream)[key]


def restore(snapshot: str, out: str, *, is_read_only: bool = False) -> None:
    """Make a directory as it was at a snapshot. Files that are only read are not copied.

    Raises ValueError for a file that was written over in place, by another writer than Python.
    """
    versions = os.path.join(os.path.dirname(os.path.dirname(snapshot)), "versions")
    with open(snapshot, encoding="utf-8") as stream:
        record = json.load(stream)
    for name in ("", *record["folders"]):
        os.makedirs(os.path.join(out, name), exist_ok=True)
    for name, text in record["links"].items():
        os.symlink(text, os.path.join(out, name))
    for name, (version, size, time_ns, is_growing) in record["files"].items():
        path, target = os.path.join(versions, version), os.path.join(out, name)
        status = os.stat(path)
        if is_growing and status.st_size > size:
            with open(path, "rb") as source, open(target, "wb") as stream:
                stream.write(source.read(size))
        elif (status.st_size, status.st_mtime_ns) != (size, time_ns):
            raise ValueError(name)
        elif is_read_only:
            os.link(path, target)
        else:
            place(path, target)
