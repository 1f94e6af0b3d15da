"""The write pipeline of convert, reshard and export: check for losses, create, fill, verify, commit.

Nothing appears at the destination unless all of it does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from ckpttool import formats, producers
from ckpttool.analysis.result import FileSize, Written
from ckpttool.catalogue.chosen import chosen_of_run, notes_of_run, taken
from ckpttool.catalogue.entries import Catalogue, Container, Object, Path, Tensor, dotted
from ckpttool.catalogue.protocols import Format, Sink, SinkOptions, Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import DONE, CkptError, CorruptError, LossError, OverwriteError, StorageError, UsageError
from ckpttool.formats import dcp
from ckpttool.formats.detect import detect
from ckpttool.layout.optimizer import respell
from ckpttool.layout.optimizer.misspelt import MISSPELT, misspelt
from ckpttool.operations import arguments
from ckpttool.operations.manifest import check_wanted, of_checkpoint
from ckpttool.operations.manifest import write as write_manifest
from ckpttool.producers import writable
from ckpttool.producers.combined import CombinedSource
from ckpttool.producers.open import naming, open_source
from ckpttool.serialization.directory import Directory
from ckpttool.serialization.manifest import content
from ckpttool.serialization.unpickler import no_garbage_collection
from ckpttool.serialization.unsafe_globals import harmful, harmful_attributes
from ckpttool.storage import files, free_space, staging, stores, workspace
from ckpttool.storage.errors import FREE_SPACE
from ckpttool.storage.stage import StagingArea
from ckpttool.storage.staging import After
from ckpttool.storage.stores import Location, Outgoing, local_path
from ckpttool.text import plural, size, some
from ckpttool.transfer import journal
from ckpttool.transfer.check_destination import check_written
from ckpttool.transfer.execute import BUFFER, Transferred, budget
from ckpttool.transfer.file_by_file import FileByFile, sealing
from ckpttool.transfer.origins import is_index
from ckpttool.transfer.plan import whole_files
from ckpttool.transfer.processes import Coordinator
from ckpttool.transfer.threads import Progress

# Indexes by which a whole directory is one checkpoint. Beside that of a model there may be the directories of a run.
_OF_A_DIRECTORY = (".metadata", "__0.metadata", "ckpttool.json")
_NUMPY_MEMORY = 24 << 20
_ON_DISK = 3  # files that are sent, wait for that, or are written
_WORTH_STREAMING = 64 << 10  # bytes of a chunk, on average


@dataclass(slots=True, repr=False)
class Conversion(Written):
    """The result of a conversion, or its plan (`dry_run`). Sizes are bytes."""

    command: ClassVar[str] = "convert"

    source: str  #: path of SRC, as it was typed
    source_format: str  #: format of SRC
    destination: str  #: path of DST
    format: str  #: format of DST
    files: list[FileSize] = field(default_factory=list)  #: files of DST
    tensor_count: int = 0  #: number of tensors, tied ones counted once
    object_count: int = 0  #: number of objects
    payload_bytes: int = 0  #: bytes of values, tied ones counted once
    file_bytes: int = 0  #: bytes that DST needs here, also to pack it; for a store, of the files there at a time
    free_bytes: int = 0  #: bytes that were free on the disk
    memory_bytes: int | None = None  #: with `--dry-run`, the expected peak of the process
    renamed: list[tuple[str, str]] = field(default_factory=list)  #: pairs: old name, new name
    cast: list[tuple[str, str, str]] = field(default_factory=list)  #: triples: name, old dtype, new dtype
    ties: list[tuple[str, str]] = field(default_factory=list)  #: pairs: name, and the name whose bytes it shares
    dropped: list[str] = field(default_factory=list)  #: names that are in SRC and not in DST
    notes: list[str] = field(default_factory=list)  #: remarks on what was done, for people
    checked_bytes: int = 0  #: bytes of SRC whose checksum, or whose file's digest on the Hub, was compared
    unchecked_bytes: int = 0  #: bytes of SRC without a checksum
    resumed_bytes: int = 0  #: bytes that an interrupted run had copied (`--resume`)
    seconds: float = 0.0  #: duration
    processes: int = 1  #: number of processes that divided the work
    sent: Any = None  #: what was sent to the Hub; null for a destination on this machine
    _layout: Catalogue | None = None  # of DST, if it was written or planned by copying bytes
    dry_run: bool = False  #: whether nothing was written
    exit_code: int = DONE  #: with `--dry-run`, the exit code of the real run

    @property
    def lines(self) -> Iterable[str]:
        """What `--quiet` prints: nothing, or the planned files."""
        return (file.path for file in self.files if self.dry_run)

    @property
    def facts(self) -> Iterable[tuple[str, str]]:
        """What there is to say of this operation alone."""
        return [("processes", f"{self.processes} of torchrun divided the work")] if self.processes > 1 else []

    @property
    def contents(self) -> str:
        """What is in it: `19 tensors, 1 object, 4.86 kB of values`."""
        counts = (plural(self.tensor_count, "tensor"), plural(self.object_count, "object"))
        return f"{', '.join(counts)}, {size(self.payload_bytes)} of values"


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a destination is written, whatever its format: `WriteOptions(overwrite=True, threads=4)`."""

    overwrite: bool = False
    dry_run: bool = False
    threads: int | None = None
    max_memory: int | None = None
    check: bool = False
    progress: Progress | None = None
    resume: bool = False
    manifest: str | None = None  # where to write one of everything
    carried: bool = True  # whether a DCP directory carries its own
    if_full: str = FREE_SPACE  # what to do if it does not fit on the disk
    check_values: Callable[[Catalogue], None] | None = None  # raises an error for what must not be there
    # Sends files of DST as they are completed; the function that it gets returns the rest, once all of these are.
    send: Callable[[list[Outgoing], Callable[[], list[Outgoing]]], None] | None = None
    streams: bool = False  # whether large ones are sent while they are filled
    in_store: str = "auto"  # or `never`
    can_copy: Callable[[Location], bool] | None = None  # whether ranges of a file may be copied by the store of DST

    def after(self, dst: str) -> After | None:
        """Return what belongs to `dst` besides what the format writes: its manifest, in it or beside it."""
        path = self.manifest
        if path is None:
            return None
        real = local_path(path).real()

        def make(written: Location) -> Callable[[], None] | None:
            made = of_checkpoint(written, self.threads)
            if written.is_file():
                name = local_path(dst).name
                (digest,), (nbytes,), (crc,) = made.files.values(), made.sizes.values(), made.crcs.values()
                made.files, made.sizes, made.crcs = {name: digest}, {name: nbytes}, {name: crc}
            if real.parent == local_path(dst).real():
                (written / real.name).put(content(made))
                return None
            return lambda: write_manifest(path, made)

        return After(path, make)


@dataclass(frozen=True, slots=True)
class OpenSource:
    """An open source, the versions of its files from before it was opened, and its path if it is only one."""

    source: Source
    before: files.Fingerprint
    path: str | None


@dataclass(frozen=True, slots=True)
class Planned:
    """What to write: `Planned(catalogue, SinkOptions(world=8))`. `folded` are entries of the source that are part of
    other values in it."""

    catalogue: Catalogue
    options: SinkOptions
    folded: frozenset[Path] = frozenset()


@contextmanager
def open_sources(
    src: str, shapes: str | None = None, model_from: str | None = None, optim_from: str | None = None
) -> Iterator[OpenSource]:
    """Open the source, parts of which may come from other checkpoints. Raises ReadError or CorruptError."""
    parts = {"model": model_from, "optimizer": optim_from}
    given = {kind: path for kind, path in parts.items() if path is not None}
    with closing(CombinedSource.over(open_source(src, shapes)) if given else open_source(src, shapes)) as source:
        if isinstance(source, CombinedSource):
            for kind, path in given.items():
                other = open_source(path)
                source.replace_part(kind, other, path)
                source.catalogue.warnings += (Warning("chosen", note) for note in notes_of_run(other.catalogue, path))
        # Of several sources, an error names the file only.
        yield OpenSource(source, source.catalogue.versions, None if given else taken(src, source.catalogue))


@contextmanager
def destination(
    result: Conversion, target: Format, options: WriteOptions, *sources: str | None, is_first: bool = True
) -> Iterator[None]:
    """The frame of an operation that writes `result.destination`: the arguments are checked before the block, and the
    manifest that a killed run has not written is. Of several processes, the first does that.

    Raises UsageError or OverwriteError.
    """
    began = time.monotonic()
    dst = result.destination
    arguments.check_apart(dst, *sources)
    if is_first:
        check_wanted(options.manifest, dst, is_file=target.is_file(dst), dry_run=options.dry_run)
        if not options.dry_run and not options.overwrite:
            _finish_killed(dst, options)
        check_free(result, target, options)
    yield
    result.seconds = time.monotonic() - began


def _finish_killed(dst: str, options: WriteOptions) -> None:
    """Write the manifest of a run that was killed when `dst` was in its place. Raises OverwriteError to say so."""
    path = options.manifest

    def write() -> None:
        if path is not None:
            write_manifest(path, of_checkpoint(dst, options.threads))

    done = staging.finish(dst, path, write)
    if done:
        message = f"`{dst}` exists: a killed run had written all but its manifest `{path}`, which is written now"
        raise OverwriteError(message, hint="nothing is left to do; pass `--overwrite` to write it again", file=dst)
    if done is False:
        message = f"`{dst}` exists: a killed run had written everything except the requested manifest"
        hint = f"`ckpttool verify {dst} --write-manifest FILE` writes one; pass `--overwrite` to write it again"
        raise OverwriteError(message, hint=hint, file=dst)


@dataclass(frozen=True, slots=True)
class Write:
    """One destination that is written or, for a dry run, planned: `Write(opened, planned, target, result).run()`.

    `result` is filled in; where several processes share the copies, it is complete in the first of them.
    """

    opened: OpenSource
    planned: Planned
    target: Format
    result: Conversion
    options: WriteOptions = WriteOptions()
    coordinator: Coordinator = field(default_factory=Coordinator)

    @property
    def dst(self) -> Location:
        return local_path(self.result.destination)

    def run(self) -> None:
        """Write the destination. Raises the errors of `ckpttool.errors`; then there is nothing at the destination."""
        self.prepare()
        if self.options.dry_run:
            self._dry_run()
        elif self.coordinator.is_first or self.options.send is not None:
            self._write()
        else:
            with self._scratch() as partial:
                self._fill(self._create(partial), partial)

    @no_garbage_collection()
    def prepare(self) -> None:
        """Refuse what must not be written, and start the summary. Raises UsageError, CorruptError or LossError."""
        source, planned = self.opened.source, self.planned.catalogue
        arguments.check_apart(self.dst, *(file.location for file in source.catalogue.own_files))
        names = (file.name for file in source.catalogue.own_files if source.catalogue.format == self.target.name)
        formats.check_suffix(self.result.destination, self.target, names)
        with naming(self.opened.path):
            _check_harmless(planned, self.result.source)
            _check_losses(planned, self.target, self.result.source, self.dst)
            if self.options.check_values is not None:
                self.options.check_values(planned)
        _summarise(self.result, source, self.planned, self.target)

    def read_back(self, partial: Location, catalogue: Catalogue) -> None:
        """With `--check`, compare what was written to `partial` with the source. Raises CorruptError."""
        options = self.options
        if options.check:
            total, threads, memory = self.result.payload_bytes, options.threads, options.max_memory
            source = self.opened.source
            check_written(self.target, partial, catalogue, source, total=total, threads=threads, memory=memory)

    def _write(self) -> None:
        result, options = self.result, self.options
        is_file = self.target.is_file(self.dst)
        with self.dst.stage(
            overwrite=options.overwrite,
            is_file=is_file,
            resume=options.resume,
            notes=result.notes,
            after=options.after(self.dst),
        ) as stage:
            # Other processes find it by its name only.
            path = stage.path if self.coordinator.size == 1 else stage.shared_path
            sink = self._create(path)
            result.notes += _lost_attributes(self.planned.catalogue, sink.catalogue)
            self._note_files(sink, path)
            if self.options.send is not None and self.coordinator.size > 1 and not self._can_be_sent(sink):
                why = "`--check` reads all of DST" if self.options.check else "DST is one file"
                message = f"{why}, and each of {self.coordinator.size} processes writes files of its own"
                raise UsageError(message, hint="run the command without torchrun")
            if self._can_be_sent(sink):
                moved = self._send(sink, path)
                result.checked_bytes, result.unchecked_bytes = moved.checked, moved.unchecked
                note_overflow(result, moved.overflowed)
                return
            free_space.check(self.dst, result.file_bytes, result.free_bytes + stage.held, options.if_full)
            log = self._journal(stage, sink) if self.coordinator.size == 1 else None
            moved = self._fill(sink, path, log)
            files.check_unchanged(self.opened.before)
            self._finish(sink, moved)
            self.read_back(path, sink.catalogue)
        result.checked_bytes, result.unchecked_bytes, result.resumed_bytes = (
            moved.checked,
            moved.unchecked,
            moved.resumed,
        )
        if options.resume and not moved.resumed:
            result.notes.append("nothing to resume: copied everything")
        note_overflow(result, moved.overflowed)

    def _can_be_sent(self, sink: Sink) -> bool:
        """Return whether files can be sent and removed while others are written: not if they are read back."""
        is_sent = self.options.send is not None and not self.options.check and sealing(sink) is not None
        count = len(sink.catalogue.files)
        alone = self.coordinator.size == 1 and (self._can_stream(sink) or self._can_copy(sink))
        return is_sent and (count > 1 or (count == 1 and alone))

    def _can_copy(self, sink: Sink) -> bool:
        """Return whether the store may copy some of the files itself."""
        can_copy, sources = self.options.can_copy, self.opened.source.catalogue.files
        may_be = can_copy is not None and any(can_copy(file.location) for file in sources)
        return may_be and self._is_worth_it(sink)

    def _can_stream(self, sink: Sink) -> bool:
        """Return whether files can be sent while they are filled: not if their tensors are tiny, between which two
        threads would wait for each other."""
        return self.options.streams and getattr(sink, "seals_in_order", False) and self._is_worth_it(sink)

    def _is_worth_it(self, sink: Sink) -> bool:
        count = sum(len(tensor.chunks) for tensor in sink.catalogue.tensors if tensor.alias is None)
        return self.result.payload_bytes >= count * _WORTH_STREAMING

    def _send(self, sink: Sink, partial: Location) -> Transferred:
        """Fill one file after the other, and send each."""
        assert self.options.send is not None
        result, coordinator = self.result, self.coordinator
        free_space.check(self.dst, result.file_bytes, result.free_bytes, self.options.if_full)
        own = whole_files(sink.catalogue, coordinator.rank, coordinator.size)
        filling = FileByFile(
            sink,
            self.opened.source,
            result.payload_bytes,
            coordinator,
            own,
            self.options.can_copy,
            progress=self.options.progress,
            threads=self.options.threads,
            memory=self.options.max_memory,
        )
        is_file = self.target.is_file(self.dst)
        names = [self.dst.name if is_file else file.location.relative_to(partial) for file in sink.catalogue.files]

        def finish() -> None:
            files.check_unchanged(self.opened.before)
            filling.finish()

        def rest() -> list[Outgoing]:
            finish()
            others = (name for name in partial.below() if name not in names)
            return [Outgoing(name, (partial / name).size(), path=partial / name) for name in others]

        # Of other processes, the names.
        outgoing = [Outgoing(name, file.size) for name, file in zip(names, sink.catalogue.files, strict=True)]
        can_stream, can_copy = self._can_stream(sink), self._can_copy(sink)
        for number in own:
            write = functools.partial(filling.write, number)
            stream = functools.partial(filling.stream, number) if can_stream else None
            assemble = functools.partial(filling.assemble, number) if can_copy else None
            outgoing[number] = replace(outgoing[number], write=write, stream=stream, assemble=assemble)
        with naming(self.opened.path):
            if is_file:
                # It is there with its last byte.
                filling.end, filling.is_one = finish, True
                self.options.send([], lambda: outgoing)
            else:
                self.options.send(outgoing, rest)
        return filling.moved

    @no_garbage_collection()
    def _finish(self, sink: Sink, moved: Transferred) -> None:
        sink.finish(moved.crcs)
        moved.crcs.clear()  # of a million tensors as many

    @no_garbage_collection()
    def _create(self, partial: Location) -> Sink:
        assert self.target.create is not None
        how = replace(self.planned.options, manifest=self.options.carried)
        sink = self.target.create(partial, self.planned.catalogue, how)
        self.result.payload_bytes += sum(tensor.nbytes for tensor in sink.catalogue.replicas)
        self._note_untied(sink)
        copied = sink.catalogue.facts.get("copied", ())
        if assets := [name for name in self.opened.source.catalogue.facts.get("assets", ()) if name not in copied]:
            self.result.notes.append(f"not copied (not part of the state): {some(assets, 5)}")
        self.result.notes += map(str, sink.catalogue.warnings)
        return sink

    def _note_untied(self, sink: Sink) -> None:
        """Count the tied tensors that the format stores separately, such as one whose name safetensors reserves."""
        separate = {t.origin.path for t in sink.catalogue.tensors if t.origin is not None and t.alias is None}
        tied = (t for t in self.planned.catalogue.tensors if t.alias is not None)
        untied = [t for t in tied if t.origin is not None and t.origin.path in separate]
        if untied:
            names = dict.fromkeys(t.name for t in untied)
            self.result.ties = [tie for tie in self.result.ties if tie[0] not in names]
            self.result.payload_bytes += sum(t.nbytes for t in untied)
            self.result.notes.append(f"stored separately, not tied: {some([*names])}")

    @no_garbage_collection()
    def _journal(self, stage: StagingArea, sink: Sink) -> journal.Journal:
        before = self.opened.before
        indexes = [path for path in before if is_index(path)]
        digest = journal.digest(self.opened.source, sink.catalogue, self.target.name, before, indexes)
        return journal.begin(stage, sink.catalogue, digest, self.result.notes, every=self.options.resume)

    @no_garbage_collection()
    def _fill(self, sink: Sink, partial: Location, log: journal.Journal | None = None) -> Transferred:
        created, source, total = sink.catalogue, self.opened.source, self.result.payload_bytes
        threads, memory = self.options.threads, self.options.max_memory
        with naming(self.opened.path):
            progress = with_downloads(self.options.progress, self.opened, created)
            return self.coordinator.transfer(
                partial, created, source, total=total, threads=threads, memory=memory, progress=progress, journal=log
            )

    def _dry_run(self) -> None:
        """Create the sink for real, but sparse and in a scratch directory: the sizes are then exact."""
        result, options = self.result, self.options
        before = result.payload_bytes, [*result.notes], [*result.ties]
        for folder in (*files.temporary_folders(), None):
            try:
                with self._scratch(folder) as partial:
                    sink = self._create(partial)
                    self._note_files(sink, partial)
                break
            except StorageError:
                if folder is None:
                    raise
                # A full one is no reason: nothing is to be written.
                result.payload_bytes, result.notes[:], result.ties = before
        if error := free_space.shortage(self.dst, result.file_bytes, result.free_bytes, options.if_full):
            note_obstacle(result, error)
        result.memory_bytes = expected_memory(self.planned.catalogue, result.cast, options.threads, options.max_memory)

    @contextmanager
    def _scratch(self, folder: str | None = None) -> Iterator[Location]:
        with workspace.scratch_directory("ckpttool-plan-", folder) as scratch:
            yield local_path(scratch) / self.dst.name

    def _note_files(self, sink: Sink, partial: Location) -> None:
        self.result._layout = sink.catalogue
        # Users see the destination in place of the staging path.
        name = self.dst.name
        self.result.files = [FileSize(name if f.location == partial else f.name, f.size) for f in sink.catalogue.files]
        sizes = sorted(file.nbytes for file in self.result.files)
        on_disk = [] if self._can_stream(sink) or self._can_copy(sink) else sizes[-_ON_DISK:]
        self.result.file_bytes = sum(on_disk if self._can_be_sent(sink) else sizes)
        self.result.file_bytes += sink.catalogue.facts.get("more_bytes", 0)
        check_place(self.options.manifest, self.dst, (file.path for file in self.result.files))


def with_downloads(progress: Progress | None, opened: OpenSource, planned: Catalogue) -> Progress | None:
    """Return `progress`, which also counts what has to be downloaded of the files that `planned` is copied from."""
    files_ = opened.source.catalogue.files
    if progress is None or not any(stores.has_digest(file.location) for file in files_):
        return progress
    used: set[int] = set()
    for tensor in planned.tensors:
        while tensor.origin is not None:
            tensor = tensor.origin
        used.update(tensor.chunks.file)
    paths = (files_[number].location for number in used)
    return stores.with_fetching(progress, (path for path in paths if stores.has_digest(path)))


def note_overflow(result: Conversion, overflowed: Mapping[str, int]) -> None:
    """Note values that were out of range in a cast: their number by the name of the tensor."""
    if overflowed:
        values = f"{sum(overflowed.values())} values of {len(overflowed)} tensors"
        became = "out of range of their new dtype, and are inf, NaN or its largest number"
        result.notes.append(f"{values} were {became}: {some(sorted(overflowed))}")


# Before anything is written -------------------------------------------------------------------------------------------


def _checkpoint_around(location: Location) -> Location | None:
    """Return the directory around a location that is one checkpoint by its index, if there is one."""
    above = location.absolute()
    while above.parent != above:
        above = above.parent
        for name in _OF_A_DIRECTORY:
            # Other programs have a `.metadata`, too.
            if (above / name).is_file() and (not name.endswith(".metadata") or dcp.FORMAT.recognise(above / name)):
                return above
    return None


def _check_not_inside(dst: str) -> None:
    """Raise UsageError for a destination in the directory of another checkpoint, which would have a file more."""
    if (around := _checkpoint_around(local_path(dst))) is not None:
        message = f"`{dst}` is inside the checkpoint `{around}`, which it would change"
        raise UsageError(message, hint=f"write it next to that: `{around.parent / local_path(dst).name}`")


def check_free(result: Conversion, target: Format, options: WriteOptions) -> None:
    """Raise UsageError, OverwriteError or StorageError for a destination that cannot be created; for a dry run, notes
    the latter two."""
    dst = result.destination
    try:
        staging.check_free(dst, overwrite=options.overwrite, is_file=target.is_file(dst))
        _check_not_inside(dst)
        if options.dry_run:
            staging.check_writable(dst)
            if missing := staging.missing_folders(dst):
                result.notes.append(f"would create the directory `{missing[0]}`")
    except (OverwriteError, StorageError) as error:
        if isinstance(error, OverwriteError) and not options.dry_run and local_path(dst).is_dir():
            check_is_checkpoint(local_path(dst))  # or the hint would lead to the next error
        # With `--overwrite`, what stops it is a pipe or a device: nothing is planned for that.
        if not options.dry_run or (options.overwrite and isinstance(error, OverwriteError)):
            raise
        note_obstacle(result, error)
        return
    location = local_path(dst)
    if options.overwrite and location.is_dir() and location.names():
        check_is_checkpoint(location)


class DryRun(Protocol):
    """The result of a dry run."""

    notes: list[str]
    exit_code: int


def note_obstacle(result: DryRun, error: CkptError) -> None:
    """Note an error that would stop the real run. The first one gives the exit code."""
    result.notes.append(f"{error.message}: {error.hint}" if error.hint else error.message)
    result.exit_code = result.exit_code or error.exit_code


def check_is_checkpoint(dst: Location) -> None:
    """Raise OverwriteError for a directory of something else: `--overwrite` removes all that is in it."""
    try:
        directory = Directory(dst)
        if len(directory.names) == 2 and "latest" in directory and directory.folders:
            directory = directory.folder(directory.folders[0])  # as `--producer deepspeed:zero3` writes it
        if producers.recognise(directory) is None:
            detect(directory.path)
    except CkptError:
        text = f"`{dst}` is a directory and not a checkpoint, and `--overwrite` would remove all that is in it"
        hint = f"name a new destination, such as `{dst.rstrip('/')}/NAME`, or remove it yourself"
        raise OverwriteError(text, hint=hint, file=dst) from None


def check_place(manifest: str | None, dst: str, names: Iterable[str]) -> None:
    """Raise OverwriteError for a manifest where one of these files of the destination will be."""
    if manifest is not None:
        path, root = local_path(manifest).real(), local_path(dst)
        taken = any((root / name).real() == path for name in names)
        if taken or (path.parent == root.real() and is_index(path)):
            raise OverwriteError(
                f"`{manifest}` is a file of the checkpoint", hint="call the manifest `integrity.json`", file=manifest
            )


def _check_harmless(planned: Catalogue, src: str) -> None:
    """Raise CorruptError for an object that runs code when loaded. Attributes of a dict are removed, as no
    option excludes them: opening the source has warned of them."""
    for name, called in harmful(planned.objects):
        raise CorruptError(
            f"`{src}`: `{name}` names `{called}`, which runs code when loaded, and is not passed on",
            hint=f"look where this file came from; `--exclude '{name}'` leaves the entry out",
            file=src,
            found=called,
        )
    for path in {path for path, _ in harmful_attributes(planned)}:
        planned.containers[path] = planned.containers[path]._replace(attrs=None)


def _check_losses(planned: Catalogue, target: Format, src: str, dst: str) -> None:
    lost = target.losses(planned, dst)
    if not lost:
        return
    # A file that is one value and no dict has an entry without a name.
    names = ", ".join(f"`{loss.name}`" if loss.name else "all of it" for loss in lost[:5])
    names += ", ..." if len(lost) > 5 else ""
    whys = "; ".join(sorted({loss.why for loss in lost}))
    others = formats.options(row for row in formats.FORMATS if row.any_state and row is not target)
    keep = "a directory as DST" if target.is_file(dst) and target.splits else others
    count = f"{len(lost):,} {'entry' if len(lost) == 1 else 'entries'}"
    has_model = any(entry.part.kind == "model" for entry in planned.entries.values())
    alone = "`--only model` writes the model alone; " if has_model else ""
    raise LossError(
        f"`{src}` cannot be written as {target.target} at `{dst}`: {count} would be lost ({names}): {whys}",
        hint=f"{alone}{keep} keeps everything; `--drop`, `--exclude` skip entries",
        lost=[loss.name for loss in lost],
    )


# The summary ----------------------------------------------------------------------------------------------------------


def left_out(source: Catalogue, kept: Collection[Path], replaced: Iterable[Path] = ()) -> list[str]:
    """Return the names of the entries of the source, and of those that were `replaced`, that are not `kept`. Pure."""
    stored = dict.fromkeys(replaced)
    stored |= dict.fromkeys(
        e.origin if isinstance(e, Object) else (e.origin or e).path for e in source.entries.values()
    )
    # A tuple that is the whole state has no name: of its elements each is an entry.
    return [dotted(path) for path in stored if path and path not in kept]


def _summarise(result: Conversion, source: Source, plan: Planned, target: Format) -> None:
    planned, dst = plan.catalogue, result.destination
    result.source_format, result.format = source.catalogue.format, target.name
    kept = plan.folded | respell.origins(planned)
    result.renamed = [(dotted(o.origin), o.name) for o in planned.objects if o.origin != o.path]
    result.object_count = sum(1 for _ in planned.objects)
    count_tensors(result, planned)
    # What was replaced by a part from elsewhere is left out too.
    result.dropped = left_out(source.catalogue, kept, source.replaced if isinstance(source, CombinedSource) else ())
    result.notes[:0] = map(str, source.catalogue.warnings + planned.warnings)
    result.notes += [f"{text}; {MISSPELT}" for text in misspelt(source.catalogue)]
    # `format` names the library that wrote the file, and is written anew.
    remarks = {str(name) for name in source.catalogue.facts.get("metadata", ())} - {"format"}
    if remarks and target.name not in (source.catalogue.format, writable.SAME):
        names = ", ".join(f"`{name}`" for name in sorted(remarks)[:5])
        result.notes.append(f"`__metadata__` of the source is dropped, {target.name} has no place for it: {names}")
    result.notes[:0] = chosen_of_run(source.catalogue)
    result.free_bytes = free_space.free_bytes(dst)


def count_tensors(result: Conversion, planned: Catalogue) -> None:
    """Add the tensors to the result."""
    for tensor in planned.tensors:
        origin = tensor.origin or tensor
        result.tensor_count += 1
        stored = origin.origin or origin  # the origin itself may be a view
        if stored.path != tensor.path and stored.name != tensor.name:
            result.renamed.append((stored.name, tensor.name))
        if origin.dtype != tensor.dtype:
            result.cast.append((tensor.name, origin.dtype.name, tensor.dtype.name))
        if tensor.alias is not None:
            result.ties.append((tensor.name, dotted(tensor.alias)))
        else:
            result.payload_bytes += tensor.nbytes


def _lost_attributes(planned: Catalogue, written: Catalogue) -> list[str]:
    """Return a note on attributes of dicts (`_metadata` of a state dict) that the destination cannot store."""
    lost = {
        f"{dotted(path)}.{name}".lstrip(".")
        for path, container in planned.containers.items()
        for name, value in (container.attrs or {}).items()
        if name not in ((written.containers.get(path) or Container("dict")).attrs or {})
        # By default, every module is of version 1.
        and not (name == "_metadata" and isinstance(value, dict) and all(v == {"version": 1} for v in value.values()))
    }
    return [f"Python attributes of dicts are dropped: {some(sorted(lost))}"] if lost else []


def expected_memory(planned: Catalogue, cast: object, threads: int | None, memory: int | None) -> int:
    """Return the bytes that the process is expected to hold at most while it copies `planned`; `cast` is whether
    values change."""
    count, tile = budget(threads, memory)
    total = arguments.BASE_MEMORY + count * BUFFER
    if cast or any(_may_be_gathered(tensor) for tensor in planned.tensors):
        total += _NUMPY_MEMORY + 2 * count * tile
    return total


def _may_be_gathered(tensor: Tensor) -> bool:
    """Return whether elements may lie in another order than they are written in, as in an unopened item."""
    chunks = (tensor.origin or tensor).chunks
    return bool(chunks.item or chunks.strides or chunks.codecs) or len({len(o) and o[1:] for o in chunks.offsets}) > 1
