"""A copy of a checkpoint with everything put right that can be without guessing.

    directories of several nodes         one directory; files of one name must be the same
    an index for each rank               one `.metadata`
    no index                             one after that of another step of the run (`--like`)
    files that nothing mentions          left out, as are the remains of a save that stopped

The copy is verified before it gets its name: what cannot be put right is refused, and the source is never touched. A
dry run does all of it to a directory that is planned only: its files are read where they are.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckpttool.errors import CorruptError, OverwriteError, ReadError, StorageError, UsageError
from ckpttool.formats.dcp import rebuild_index as rebuilding
from ckpttool.operations import manifest as manifests
from ckpttool.operations import verify as verifying
from ckpttool.operations.verify import Report
from ckpttool.storage import files, local
from ckpttool.storage.stores import Entry, Location, Stat, Store, locate
from ckpttool.text import some
from ckpttool.transfer import staging
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress, Work, on_threads

_OF_RANK = re.compile(r"__\d+\.metadata")


@dataclass(slots=True)
class Repaired:
    """The result of a repair, or its plan (`dry_run`). Sizes are bytes."""

    source: str  #: path of SRC
    destination: str  #: path of DST
    merged: list[str] = field(default_factory=list)  #: paths of `--merge`
    like: str | None = None  #: path of `--like`
    done: list[str] = field(default_factory=list)  #: what was repaired, for people
    dropped: list[str] = field(default_factory=list)  #: files that were left out
    files: int = 0  #: number of files of DST
    bytes: int = 0  #: bytes of the files of DST
    records: int = 0  #: number of checksums compared
    checked: int = 0  #: bytes whose checksum was compared
    unchecked: int = 0  #: bytes without a checksum
    notes: list[str] = field(default_factory=list)  #: warnings, for people
    seconds: float = 0.0  #: duration
    dry_run: bool = False  #: whether nothing was written


def repair(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    merge: Sequence[str | os.PathLike[str]] = (),
    like: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Write a whole checkpoint to `dst` out of the directory `src` and those of `merge`. `like` is another step of the
    same run, for a DCP directory that has lost its index. With `dry_run` everything is read and nothing is written.

    Raises UsageError when there is nothing to repair, CorruptError when it would not be whole after that; then there is
    nothing at `dst`.
    """
    began = time.monotonic()
    sources = [os.fspath(path) for path in (src, *merge)]
    made = Repaired(sources[0], os.fspath(dst), sources[1:], None if like is None else os.fspath(like))
    made.dry_run = dry_run
    for path in sources:
        _check_directory(path)
    _check_apart(made.destination, [*sources, *([made.like] if made.like is not None else [])])
    found, before = _gathered(sources, made)
    if dry_run:
        made.notes += _in_the_way(made.destination, overwrite, found)
        folder = Location(made.destination, _Planned(made.destination.rstrip("/"), dict(found)))
        _put_right(folder, made, before, threads, progress)
    else:
        with staging.staged(made.destination, overwrite=overwrite, is_file=False) as partial:
            _copy(found, partial, made, threads, progress)
            _put_right(locate(partial), made, before, threads)
    made.seconds = time.monotonic() - began
    return made


def _put_right(
    folder: Location, made: Repaired, before: files.Fingerprint, threads: int | None, progress: Progress | None = None
) -> None:
    """Everything that can be, in a folder with all files. Raises CorruptError or UsageError when that is not enough."""
    _mend_indexes(folder, made)
    report = verifying.verify(folder, threads=threads, progress=progress)
    report = _drop(folder, report, made, threads)
    files.check_unchanged(before)
    if not made.done:
        raise UsageError(
            f"`{made.source}`: there is nothing to repair" + ("" if report.whole else " without guessing"),
            hint=f"`ckpttool verify {made.source}` says what is wrong, if anything",
        )
    _check_whole(report, made)
    names = folder.below()
    made.files, made.bytes = len(names), sum((folder / name).size() for name in names)


# Before anything is written -------------------------------------------------------------------------------------------


def _check_directory(path: str) -> None:
    location = locate(path)
    if location.kind() != "dir":
        raise UsageError(
            f"`{path}`: one file, in which nothing can be put right",
            hint=f"`ckpttool verify {path}` says what is wrong",
        )


def _check_apart(dst: str, sources: Sequence[str]) -> None:
    target = locate(dst).real()
    for path in sources:
        real = locate(path).real()
        if target.is_below(real) or real.is_below(target):
            raise UsageError(f"`{dst}` and `{path}` are one, or inside each other", hint="write somewhere else")


def _gathered(sources: Sequence[str], made: Repaired) -> tuple[dict[str, Location], files.Fingerprint]:
    """Every file by its name, of all directories. Raises CorruptError for two of one name that are not the same."""
    found: dict[str, Location] = {}
    for root in map(locate, sources):
        names = root.below()
        left = _remains(root)
        if left:
            made.dropped += left
            made.done.append(f"left out what a save left that stopped: {some(left)}")
        for name in names:
            location = root / name
            if name not in found:
                found[name] = location
            elif not _same(found[name], location):
                raise CorruptError(
                    f"`{name}` is in `{found[name].parent}` and in `{root}`, and they are not the same",
                    hint="they are of different saves: name the directories of one", file=name,
                )  # fmt: skip
    if not found:
        raise ReadError(f"`{sources[0]}`: an empty directory", file=sources[0])
    if len(sources) > 1:
        made.done.append(f"merged {len(sources)} directories")
    return found, files.fingerprint(found.values())


def _remains(root: Location, below: str = "") -> list[str]:
    """The names below a directory of what an interrupted save left; a whole directory counts once."""
    found: list[str] = []
    for entry in (root / below).entries() if below else root.entries():
        name = f"{below}/{entry.name}" if below else entry.name
        if files.REMAINS.fullmatch(entry.name):
            found.append(name)
        elif entry.is_dir and not (root / name).is_link():
            found += _remains(root, name)
    return found


def _same(one: Location, other: Location) -> bool:
    if one.size() != other.size():
        return False
    hashed = [manifests.of_files(path.parent, [path.name], 1, Work()) for path in (one, other)]
    return list(hashed[0].values()) == list(hashed[1].values())


# A dry run ------------------------------------------------------------------------------------------------------------


class _Planned(Store):
    """The directory that a repair would make: files that are read where they are, and the indexes, kept in memory."""

    def __init__(self, root: str, found: dict[str, Location]) -> None:
        self.root = root
        self._found = found
        self._written: dict[str, bytes] = {}

    def _names(self) -> set[str]:
        return {*self._found, *self._written}

    def stat(self, name: str) -> Stat:
        if name in self._written:
            return Stat(len(self._written[name]), "file")
        if name in self._found:
            return Stat(self._found[name].size(), "file")
        if not name or any(other.startswith(f"{name}/") for other in self._names()):
            return Stat(0, "dir")
        raise FileNotFoundError(errno.ENOENT, "no such file or directory", name)

    def entries(self, name: str) -> list[Entry]:
        start = f"{name}/" if name else ""
        below = (other[len(start) :].partition("/") for other in self._names() if other.startswith(start))
        return sorted({Entry(first, is_dir=bool(slash)) for first, slash, _ in below})

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        if name in self._found:
            return self._found[name].read_into(offset, buffer)
        data = self._written[name][offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def put(self, name: str, write: Callable[[Callable[[bytes], object]], None]) -> None:
        data = bytearray()
        write(data.extend)
        self._written[name] = bytes(data)

    def remove(self, name: str) -> None:
        self._found.pop(name, None)
        self._written.pop(name, None)


def _in_the_way(dst: str, overwrite: bool, found: dict[str, Location]) -> list[str]:
    """What would stop the run that is not dry."""
    said = []
    try:
        local.check_free(dst, overwrite=overwrite, is_file=False)
    except OverwriteError as error:
        said.append(f"{error.message}: {error.hint}")
    wanted, free = sum(file.size() for file in found.values()), files.free_space(dst)
    if wanted > free:
        said.append(f"`{dst}`: needs {wanted} bytes, but {free} are free")
    return said


# Making it ------------------------------------------------------------------------------------------------------------


def _copy(
    found: dict[str, Location], partial: str, made: Repaired, threads: int | None, progress: Progress | None
) -> None:  # fmt: skip
    sizes = {name: location.size() for name, location in found.items()}
    wanted, free = sum(sizes.values()), files.free_space(made.destination)
    if wanted > free:
        raise StorageError(
            f"`{made.destination}`: needs {wanted} bytes, but {free} are free", hint="write somewhere else",
            file=made.destination, found=free, expected=wanted,
        )  # fmt: skip
    work = Work(wanted, progress)

    def copy_one(name: str) -> None:
        files.copy(found[name], locate(partial) / name)
        work.note(sizes[name])

    on_threads(iter(found), copy_one, threads or DEFAULT_THREADS, work)


def _mend_indexes(root: Location, made: Repaired) -> None:
    """Give every directory of DCP in it one index."""
    used = False
    for below, names in sorted(_directories(root).items()):
        folder = root / below if below else root
        where = f"`{below}`: " if below else ""
        if ".metadata" in names or not any(name.endswith(".distcp") for name in names):
            continue
        ranked = sorted(name for name in names if _OF_RANK.fullmatch(name))
        if ranked:
            _check_all_ranks(ranked, where)
            rebuilding.write(folder, rebuilding.merged(folder))
            for name in ranked:
                (folder / name).remove()
            made.done.append(f"{where}one `.metadata` out of {len(ranked)}, an index for each rank")
        elif made.like is not None:
            like = locate(made.like) / below if below else locate(made.like)
            rebuilding.write(folder, rebuilding.rebuilt(folder, like))
            made.done.append(f"{where}`.metadata` made after that of `{like}`: every item has its dtype and shape")
            used = True
        else:
            raise ReadError(
                f"{where or f'`{made.source}`: '}a DCP checkpoint without `.metadata`",
                hint="copy it from where the checkpoint was saved; or pass `--like` with another step of the same run",
                file=made.source,
            )
    if made.like is not None and not used:
        raise UsageError(f"`--like {made.like}`: no index is lost", hint="leave it out")


def _directories(root: Location) -> dict[str, list[str]]:
    """The names of the files in each directory, by its name below the root."""
    found: dict[str, list[str]] = {}
    for name in root.below():
        folder, _, last = name.rpartition("/")
        found.setdefault(folder, []).append(last)
    return found


def _check_all_ranks(names: Sequence[str], where: str) -> None:
    ranks = {int(re.sub(r"\D", "", name)) for name in names}
    absent = sorted(set(range(max(ranks) + 1)) - ranks)
    if absent:
        raise CorruptError(
            f"{where}`__{absent[0]}.metadata` is missing, the index of rank {absent[0]}",
            hint="pass the directory of its node with `--merge`", file=f"__{absent[0]}.metadata",
        )  # fmt: skip


def _drop(folder: Location, report: Report, made: Repaired, threads: int | None) -> Report:
    """Take out what belongs to nothing."""
    stray = [f.file for f in report.findings if f.kind in ("stale", "remains") and f.file is not None]
    if not stray:
        return report
    for name in stray:
        folder.inside(name).remove()
    made.dropped += stray
    made.done.append(f"left out what nothing mentions: {some(stray)}")
    return verifying.verify(folder, threads=threads)


def _check_whole(report: Report, made: Repaired) -> None:
    report.settle()
    if not report.whole:
        first = report.findings[0]
        count = report.counts["damage"]
        raise CorruptError(
            f"`{made.source}`: cannot be put right: {first.message}" + (f", and {count - 1} more" if count > 1 else ""),
            hint=f"`ckpttool verify {made.source}` says everything; take another copy, or an older step",
            file=first.file, tensor=first.tensor,
        )  # fmt: skip
    made.records, made.checked, made.unchecked = report.records, report.checked, report.unchecked
    made.notes += [f.message for f in report.findings if f.gravity == "suspect"]
