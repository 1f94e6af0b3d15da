"""A copy of a checkpoint with everything put right that can be without guessing.

    directories of several nodes         one directory; files of one name must be the same
    an index for each rank               one `.metadata`
    no index                             one after that of another step of the run (`--like`)
    files that nothing mentions          left out, as are the remains of a save that stopped

The copy is verified before it gets its name: what cannot be put right is refused, and the source is never touched. A
dry run does all of it to files without bytes, which are read where they are.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath

from ckpttool.errors import CkptError, CorruptError, OverwriteError, ReadError, StorageError, UsageError
from ckpttool.formats.dcp import rebuild_index as rebuilding
from ckpttool.operations import manifest as manifests
from ckpttool.operations import verify as verifying
from ckpttool.operations.verify import Report
from ckpttool.storage import files, folders, mirrors
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
        with _borrowed(found, made.destination) as folder:
            _put_right(folder, made, before, threads, progress)
    else:
        with staging.staged(made.destination, overwrite=overwrite, is_file=False) as partial:
            _copy(found, partial, made, threads, progress)
            _put_right(partial, made, before, threads)
    made.seconds = time.monotonic() - began
    return made


def _put_right(
    folder: str, made: Repaired, before: files.Fingerprint, threads: int | None, progress: Progress | None = None
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
    names = folders.all_below(folder)
    made.files, made.bytes = len(names), sum(files.size_of(os.path.join(folder, name)) for name in names)


# Before anything is written -------------------------------------------------------------------------------------------


def _check_directory(path: str) -> None:
    if not os.path.isdir(path):
        if not os.path.lexists(path):
            raise ReadError(f"`{path}`: cannot read: no such file or directory", file=path)
        raise UsageError(
            f"`{path}`: one file, in which nothing can be put right",
            hint=f"`ckpttool verify {path}` says what is wrong",
        )


def _check_apart(dst: str, sources: Sequence[str]) -> None:
    there = os.path.realpath(dst)
    for path in sources:
        here = os.path.realpath(path)
        if there == here or there.startswith(here + os.sep) or here.startswith(there + os.sep):
            raise UsageError(f"`{dst}` and `{path}` are one, or inside each other", hint="write somewhere else")


def _gathered(sources: Sequence[str], made: Repaired) -> tuple[dict[str, str], files.Fingerprint]:
    """Every file by its name, of all directories. Raises CorruptError for two of one name that are not the same."""
    found: dict[str, str] = {}
    for root in sources:
        names = folders.all_below(root)
        left = [name for name in _everything(root) if name not in set(names)]
        if left:
            made.dropped += left
            made.done.append(f"left out what a save left that stopped: {some(left)}")
        for name in names:
            location = os.path.join(root, name)
            if name not in found:
                found[name] = location
            elif not _same(found[name], location):
                raise CorruptError(
                    f"`{name}` is in `{os.path.dirname(found[name])}` and in `{root}`, and they are not the same",
                    hint="they are of different saves: name the directories of one", file=name,
                )  # fmt: skip
    if not found:
        raise ReadError(f"`{sources[0]}`: an empty directory", file=sources[0])
    if len(sources) > 1:
        made.done.append(f"merged {len(sources)} directories")
    return found, files.fingerprint(found.values())


def _everything(root: str) -> list[str]:
    """Names that end with what is left of a save: whole directories count once."""
    below = (path.relative_to(root) for path in sorted(FilePath(root).rglob("*")))
    left = [path for path in below if folders.REMAINS.fullmatch(path.name)]
    return [str(path) for path in left if not any(folders.REMAINS.fullmatch(p.name) for p in path.parents)]


def _same(one: str, other: str) -> bool:
    if files.size_of(one) != files.size_of(other):
        return False
    hashed = [manifests.of_files(os.path.dirname(p), [os.path.basename(p)], 1, Work()) for p in (one, other)]
    return list(hashed[0].values()) == list(hashed[1].values())


# A dry run ------------------------------------------------------------------------------------------------------------


class _Borrowed:
    """A mirror of files that lie here: they have their sizes and no bytes, which are read where they are."""

    digests = False

    def __init__(self, dst: str) -> None:
        self.root = self.path = os.path.realpath(tempfile.mkdtemp(prefix="ckpttool-plan-"))
        self.address = dst
        self._lenders: dict[str, str] = {}

    def borrow(self, name: str, location: str) -> None:
        """Have a file of this name that is read at `location`."""
        path = os.path.join(self.root, name)
        files.create(path, files.size_of(location))
        self._lenders[path] = location

    def arrive(self, path: str, offset: int, nbytes: int | None) -> str:
        return self._lenders.get(path, path)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


@contextmanager
def _borrowed(found: dict[str, str], dst: str) -> Iterator[str]:
    """A folder in which the copy seems to lie. Errors call it `dst`."""
    made = _Borrowed(dst)
    mirrors.lay(made)
    try:
        for name, location in found.items():
            made.borrow(name, location)
        yield made.root
    except CkptError as error:
        raise mirrors.in_their_words(error) from None
    finally:
        mirrors.unmount(made)


def _in_the_way(dst: str, overwrite: bool, found: dict[str, str]) -> list[str]:
    """What would stop the run that is not dry."""
    said = []
    try:
        files.check_free(dst, overwrite=overwrite, is_file=False)
    except OverwriteError as error:
        said.append(f"{error.message}: {error.hint}")
    wanted, free = sum(map(files.size_of, found.values())), files.free_space(dst)
    if wanted > free:
        said.append(f"`{dst}`: needs {wanted} bytes, but {free} are free")
    return said


# Making it ------------------------------------------------------------------------------------------------------------


def _copy(
    found: dict[str, str], partial: str, made: Repaired, threads: int | None, progress: Progress | None
) -> None:  # fmt: skip
    sizes = {name: files.size_of(location) for name, location in found.items()}
    wanted, free = sum(sizes.values()), files.free_space(made.destination)
    if wanted > free:
        raise StorageError(
            f"`{made.destination}`: needs {wanted} bytes, but {free} are free", hint="write somewhere else",
            file=made.destination, found=free, expected=wanted,
        )  # fmt: skip
    work = Work(wanted, progress)

    def copy_one(name: str) -> None:
        to = FilePath(partial, name)
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found[name], to)
        except OSError as error:
            doing = "read" if error.filename == found[name] else "write"
            raise files.failed(error, error.filename or str(to), doing) from None
        work.note(sizes[name])

    FilePath(partial).mkdir(parents=True, exist_ok=True)
    on_threads(iter(found), copy_one, threads or DEFAULT_THREADS, work)


def _mend_indexes(partial: str, made: Repaired) -> None:
    """Give every directory of DCP in it one index."""
    used = False
    for folder, _, names in sorted(os.walk(partial)):
        below = os.path.relpath(folder, partial)
        where = "" if below == "." else f"`{below}`: "
        if ".metadata" in names or not any(name.endswith(".distcp") for name in names):
            continue
        ranked = sorted(name for name in names if _OF_RANK.fullmatch(name))
        if ranked:
            _check_all_ranks(ranked, where)
            metadata = rebuilding.merged(folder)
            rebuilding.write(folder, metadata)
            for name in ranked:
                files.remove(os.path.join(folder, name))
            made.done.append(f"{where}one `.metadata` out of {len(ranked)}, an index for each rank")
        elif made.like is not None:
            like = made.like if below == "." else os.path.join(made.like, below)
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


def _check_all_ranks(names: Sequence[str], where: str) -> None:
    ranks = {int(re.sub(r"\D", "", name)) for name in names}
    absent = sorted(set(range(max(ranks) + 1)) - ranks)
    if absent:
        raise CorruptError(
            f"{where}`__{absent[0]}.metadata` is missing, the index of rank {absent[0]}",
            hint="pass the directory of its node with `--merge`", file=f"__{absent[0]}.metadata",
        )  # fmt: skip


def _drop(partial: str, report: Report, made: Repaired, threads: int | None) -> Report:
    """Take out what belongs to nothing."""
    stray = [f.file for f in report.findings if f.kind in ("stale", "remains") and f.file is not None]
    if not stray:
        return report
    for name in stray:
        files.remove(files.inside(partial, name))
    made.dropped += stray
    made.done.append(f"left out what nothing mentions: {some(stray)}")
    return verifying.verify(partial, threads=threads)


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
