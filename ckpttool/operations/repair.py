"""`repair`: a copy of a checkpoint in which everything is repaired that needs no guess.

    directories of several nodes         merged; files of one name must be the same
    an index for each rank               merged into one `.metadata`
    no index                             rebuilt after that of another step of the run (`--like`)
    files that the index does not name   left out, as is what an interrupted save left

The copy is verified before it gets its name; one that is still damaged is refused, and the source is never changed.
A dry run repairs a planned directory, whose files are read where they are.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import eq
from typing import ClassVar

from ckpttool.analysis.result import FileSize, Written
from ckpttool.errors import DONE, CkptError, CorruptError, OverwriteError, ReadError, StorageError, UsageError
from ckpttool.formats.dcp import manifest as manifests
from ckpttool.formats.dcp import rebuild_index
from ckpttool.operations.arguments import check_apart, check_source
from ckpttool.operations.verify import verify
from ckpttool.operations.verify.strays import absent_ranks
from ckpttool.operations.write import note_obstacle
from ckpttool.producers.contents import is_remnant, without_remains
from ckpttool.producers.open import opened
from ckpttool.reports.report import Block, Facts, Line, bold
from ckpttool.serialization.directory import Directory
from ckpttool.serialization.manifest import NAME as MANIFEST
from ckpttool.storage import files, free_space, staging
from ckpttool.storage.stores import DirectoryEntry, Location, Stat, Store, Write, content, local_path, path_text
from ckpttool.text import duration, plural, size, some
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress, Work, on_threads

_BLOCK = 1 << 20
_OF_RANK = re.compile(r"__\d+\.metadata")


@dataclass(slots=True, repr=False)
class Repaired(Written):
    """The result of a repair, or its plan (`dry_run`). Sizes are bytes."""

    command: ClassVar[str] = "repair"

    source: str  #: path of SRC
    destination: str  #: path of DST
    merged: list[str] = field(default_factory=list)  #: paths of `--merge`
    like: str | None = None  #: path of `--like`
    done: list[str] = field(default_factory=list)  #: what was repaired, for people
    dropped: list[str] = field(default_factory=list)  #: files that were left out
    files: list[FileSize] = field(default_factory=list)  #: files of DST
    file_bytes: int = 0  #: bytes of the files of DST
    records: int = 0  #: number of checksums compared
    checked_bytes: int = 0  #: bytes whose checksum was compared
    unchecked_bytes: int = 0  #: bytes without a checksum
    notes: list[str] = field(default_factory=list)  #: remarks on what was done, for people
    seconds: float = 0.0  #: duration
    dry_run: bool = False  #: whether nothing was written
    exit_code: int = DONE  #: with `--dry-run`, the exit code of the real run

    @property
    def verdict(self) -> str:
        """`written`, `planned` or `refused`; `whole` if there was nothing to repair and nothing was written."""
        # A dataclass with slots is another class than the one that `super()` knows.
        return super(Repaired, self).verdict if self.done or self.exit_code else "whole"

    @property
    def message(self) -> str:
        """What was written, or would be, or why it would not; or that nothing was to be repaired."""
        if self.verdict == "whole":
            return f"{self.source} is whole: nothing to repair, nothing written"
        return super(Repaired, self).message

    @property
    def contents(self) -> str:
        """What is in it: `8 files, 4.12 GB; merged 2 directories`."""
        return "; ".join((f"{plural(len(self.files), 'file')}, {size(self.file_bytes)}", *self.done))


def repair(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    merge: Sequence[str | os.PathLike[str]] = (),
    like: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    manifest: bool = True,
    progress: Progress | None = None,
) -> Repaired:
    """Write a repaired checkpoint to `dst` from the directory `src` and those of `merge`.

    If there is nothing to repair, nothing is written, and `done` of the result is empty.

    Args:
        src: the directory to repair, which is never changed.
        dst: the directory to write, with missing parents.
        merge: directories with files that `src` lacks, such as those of other nodes.
        like: another step of the same run, for a DCP directory that has lost its index.
        overwrite: whether to replace `dst`; the old one is kept until the new one is complete.
        dry_run: whether to read everything and write nothing.
        threads: number of threads that read and write; None chooses it.
        manifest: whether each DCP directory carries its manifest.
        progress: called with the bytes done and the bytes in all, several times a second, from this thread.

    Raises:
        UsageError: if the arguments do not fit each other or the checkpoint.
        ReadError: if there is no checkpoint at `src`, or it cannot be read.
        CorruptError: if the result would not be whole; then there is nothing at `dst`.
        OverwriteError: if `dst` exists, without `overwrite`.
        StorageError: if `dst` cannot be written, or does not fit on the disk.
    """
    began = time.monotonic()
    sources = [path_text(path) for path in (src, *merge)]
    result = Repaired(sources[0], path_text(dst), sources[1:], None if like is None else path_text(like))
    result.dry_run = dry_run
    check_source(sources[0], result.destination)
    for path in sources:
        if local_path(path).kind() != "dir":
            hint = f"`ckpttool verify {path}` says what is wrong"
            if path != sources[0]:
                hint = "`--merge` takes the directory of another node, with its files of the same save"
            raise UsageError(f"`{path}` is one file, in which nothing can be repaired", hint=hint)
        if run := _checkpoints_of_run(path):
            text = f"`{path}`: a run with {plural(len(run), 'checkpoint')}, and not a checkpoint"
            raise UsageError(text, hint=f"name one: `{run[-1]}`")
    check_apart(result.destination, *sources, result.like)
    originals, before = _gathered(sources, result)
    if dry_run:
        _note_obstacles(result, overwrite, originals)
        folder = Location(result.destination, _Planned(result.destination.rstrip("/"), originals))
        with suppress(_Whole):
            _repair(folder, result, before, threads, manifest, progress)
    else:
        with (
            suppress(_Whole),
            local_path(result.destination).stage(overwrite=overwrite, is_file=False, notes=result.notes) as stage,
        ):
            _copy(originals, stage.path, result, threads, progress)
            _repair(stage.path, result, before, threads, manifest)
    result.seconds = time.monotonic() - began
    return result


def _checkpoints_of_run(path: str) -> list[str]:
    """Return the paths of the checkpoints of a run; none for a checkpoint, or for a directory that cannot be opened."""
    with suppress(CkptError), opened(path) as source:
        run = source.catalogue.facts.get("run", ())
        return [str(entry["path"]) for entry in run] if any(entry["taken"] for entry in run) else []
    return []


class _Whole(Exception):
    """Raised when the source is whole, so that nothing is written."""


def _repair(
    folder: Location,
    result: Repaired,
    before: files.Fingerprint,
    threads: int | None,
    manifest: bool,
    progress: Progress | None = None,
) -> None:
    """Repair a directory that has all files. Raises _Whole if it was whole, CorruptError if it is still damaged."""
    _merge_indexes(folder, result)
    report = verify(folder, threads=threads, progress=progress)
    strays = [f.file for f in report.findings if f.kind in ("stale", "remains") and f.file is not None]
    if strays:
        for name in strays:
            folder.inside(name).remove()
        result.dropped += strays
        result.done.append(f"skipped files that nothing mentions: {some(strays)}")
        report = verify(folder, threads=threads)
    files.check_unchanged(before)
    if not report.whole:
        first, count = report.findings[0], report.counts["damage"]
        more = f", and {count - 1} more" if count > 1 else ""
        hint = f"`ckpttool verify {result.source}` lists everything; take another copy, or an older step"
        text = f"`{result.source}`: cannot be repaired: {first.message}{more}"
        raise CorruptError(text, hint=hint, file=first.file, tensor=first.tensor)
    result.records, result.checked_bytes, result.unchecked_bytes = (
        report.records,
        report.checked_bytes,
        report.unchecked_bytes,
    )
    result.notes += [f.message for f in report.findings if f.gravity == "suspect"]
    if not result.done:
        raise _Whole
    for name in folder.below() if manifest else ():
        if name.rpartition("/")[2] == ".metadata" and not ((folder / name).parent / MANIFEST).exists():
            manifests.write((folder / name).parent)
    names = folder.below()
    result.files = [FileSize(name, (folder / name).size()) for name in names]
    result.file_bytes = sum(file.nbytes for file in result.files)


def _gathered(sources: Sequence[str], result: Repaired) -> tuple[dict[str, Location], files.Fingerprint]:
    """Return the files of all directories by their names. Raises CorruptError for two of one name that differ."""
    originals: dict[str, Location] = {}
    for root in map(local_path, sources):
        if remains := _remains(Directory(root)):
            result.dropped += remains
            result.done.append(f"skipped remains of an interrupted save: {some(remains)}")
        for name in without_remains(root.below(), remains):
            location = root / name
            if name not in originals:
                originals[name] = location
            elif not _same(originals[name], location):
                text = f"`{name}` is in `{originals[name].parent}` and in `{root}`, and they are not the same"
                raise CorruptError(text, hint="they are from different saves: name the directories of one", file=name)
    if not originals:
        raise ReadError(f"`{sources[0]}`: an empty directory", file=sources[0])
    if len(sources) > 1:
        result.done.append(f"merged {len(sources)} directories")
    return originals, files.fingerprint(originals.values())


def _remains(directory: Directory, above: str = "") -> list[str]:
    """Return the names below a directory of what an interrupted save left; a whole directory counts once."""
    names: list[str] = []
    for name in directory.names:
        if is_remnant(directory, name):
            names.append(above + name.rstrip("/"))
        elif name.endswith("/") and not directory.at(name.rstrip("/")).is_link():
            names += _remains(directory.folder(name), above + name)
    return names


def _same(one: Location, other: Location) -> bool:
    return one.size() == other.size() and all(map(eq, one.blocks(_BLOCK), other.blocks(_BLOCK)))


class _Planned(Store):
    """The directory that a repair would write: files that are read where they are, and indexes in memory."""

    def __init__(self, root: str, originals: dict[str, Location]) -> None:
        self.root = root
        self._files: dict[str, Location | bytes] = {**originals}

    def stat(self, name: str) -> Stat:
        if name in self._files:
            file = self._files[name]
            return Stat(len(file) if isinstance(file, bytes) else file.size(), "file")
        if not name or any(other.startswith(f"{name}/") for other in self._files):
            return Stat(0, "dir")
        raise FileNotFoundError(errno.ENOENT, "no such file or directory", name)

    def entries(self, name: str) -> list[DirectoryEntry]:
        if self.stat(name).kind != "dir":
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", name)
        start = f"{name}/" if name else ""
        below = (other[len(start) :].partition("/") for other in self._files if other.startswith(start))
        return sorted({DirectoryEntry(first, is_dir=bool(slash)) for first, slash, _ in below})

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        self.stat(name)
        file = self._files[name]
        if not isinstance(file, bytes):
            return file.read_into(offset, buffer)
        data = file[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def put(self, name: str, write: Write) -> None:
        self._files[name] = content(write)

    def remove(self, name: str) -> None:
        self._files.pop(name, None)


def _note_obstacles(result: Repaired, overwrite: bool, originals: dict[str, Location]) -> None:
    """Note what would stop a run that is not dry."""
    dst = result.destination
    try:
        staging.check_free(dst, overwrite=overwrite, is_file=False)
        staging.check_writable(dst)
    except (OverwriteError, StorageError) as error:
        note_obstacle(result, error)
    needed = sum(file.size() for file in originals.values())
    if shortage := free_space.shortage(dst, needed, free_space.free_bytes(dst)):
        note_obstacle(result, shortage)


def _copy(
    originals: dict[str, Location], partial: str, result: Repaired, threads: int | None, progress: Progress | None
) -> None:
    sizes = {name: location.size() for name, location in originals.items()}
    work = Work(sum(sizes.values()), progress)
    free_space.check(result.destination, work.total, free_space.free_bytes(result.destination))

    def copy_one(name: str) -> None:
        files.copy(originals[name], local_path(partial) / name)
        work.note(sizes[name])

    on_threads(iter(originals), copy_one, threads or DEFAULT_THREADS, work)


def _merge_indexes(root: Location, result: Repaired) -> None:
    """Write one index in every DCP directory. Raises ReadError, CorruptError or UsageError."""
    is_like_used = False
    directories: dict[str, list[str]] = defaultdict(list)
    for name in root.below():
        directories[name.rpartition("/")[0]].append(name.rpartition("/")[2])
    for below, names in sorted(directories.items()):
        folder = root / below if below else root
        where = f"`{below}`: " if below else ""
        if ".metadata" in names or not any(name.endswith(".distcp") for name in names):
            continue
        ranked = sorted(name for name in names if _OF_RANK.fullmatch(name))
        if ranked:
            if absent := absent_ranks(names):
                name = f"__{absent[0]}.metadata"
                text = f"{where}`{name}` is missing, the index of rank {absent[0]}"
                raise CorruptError(text, hint="pass the directory of its node with `--merge`", file=name)
            rebuild_index.merge(folder)
            for name in ranked:
                (folder / name).remove()
            result.done.append(f"{where}one `.metadata` out of {len(ranked)}, an index for each rank")
        elif result.like is not None:
            like = local_path(result.like) / below if below else local_path(result.like)
            rebuild_index.rebuild(folder, like)
            result.done.append(f"{where}`.metadata` made after that of `{like}`: every item has its dtype and shape")
            is_like_used = True
        else:
            text = f"{where or f'`{result.source}`: '}a DCP checkpoint without `.metadata`"
            hint = "copy it from where the checkpoint was saved; or pass `--like` with another step of the same run"
            raise ReadError(text, hint=hint, file=result.source)
    if result.like is not None and not is_like_used:
        raise UsageError(f"`--like {result.like}`: no index is lost", hint="leave it out")


def blocks(result: Repaired, verbose: bool = False) -> Iterator[Block]:
    """Yield what was written or would be, what was repaired, and what was checked."""
    checked = f"{plural(result.records, 'checksum')} over {size(result.checked_bytes)}"
    if not result.done:
        yield Line([result.message])
        yield Facts([("checked", checked)])
        return
    yield Line(["would write " if result.dry_run else "wrote ", bold(result.destination)])
    done = zip(("done", *[""] * len(result.done)), result.done, strict=False)
    files = f"{plural(len(result.files), 'file')}, {size(result.file_bytes)}"
    yield Facts([*done, ("files", files), ("checked", checked), ("time", duration(result.seconds))])
