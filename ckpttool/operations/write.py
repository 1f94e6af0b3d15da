"""Making a destination out of a source that is laid out anew: refuse what would be lost, create, fill, check, commit.

What `convert` and `reshard` have in common. Nothing appears at the destination unless all of it does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from ckpttool import formats, producers
from ckpttool.catalogue.entries import Catalogue, Container, Object, Path, Tensor, dotted
from ckpttool.catalogue.protocols import Format, Sink, SinkOptions, Source
from ckpttool.errors import CkptError, CorruptError, LossError, OverwriteError, StorageError, UsageError
from ckpttool.formats.detect import detect
from ckpttool.operations import arguments
from ckpttool.producers import open as opening
from ckpttool.producers.combined import CombinedSource
from ckpttool.producers.directory import Directory
from ckpttool.storage import files, mirrors
from ckpttool.text import some
from ckpttool.transfer import journal, plan, staging
from ckpttool.transfer import readback as rereading
from ckpttool.transfer.execute import BUFFER, Transferred, budget, transfer
from ckpttool.transfer.processes import ALONE, Crew
from ckpttool.transfer.threads import Progress

_TORCH_MEMORY = 230 << 20
_NUMPY_MEMORY = 24 << 20


@dataclass(slots=True)
class Conversion:
    """The result of a conversion, or its plan (`dry_run`). Sizes are bytes."""

    source: str  #: path of SRC, as it was typed
    source_format: str  #: format of SRC
    destination: str  #: path of DST
    format: str  #: format of DST
    files: list[tuple[str, int]] = field(default_factory=list)  #: name and size of each file of DST
    tensors: int = 0  #: number of tensors, tied ones counted once
    objects: int = 0  #: number of objects
    bytes: int = 0  #: bytes of values, tied ones counted once
    disk: int = 0  #: bytes that the files of DST take
    free: int = 0  #: bytes that were free on the disk
    memory: int = 0  #: with `--dry-run`, the expected peak of the process; else 0
    renamed: list[tuple[str, str]] = field(default_factory=list)  #: pairs: old name, new name
    cast: list[tuple[str, str, str]] = field(default_factory=list)  #: triples: name, old dtype, new dtype
    ties: list[tuple[str, str]] = field(default_factory=list)  #: pairs: name, and the name whose bytes it shares
    dropped: list[str] = field(default_factory=list)  #: names that are in SRC and not in DST
    notes: list[str] = field(default_factory=list)  #: warnings, for people
    checked: int = 0  #: bytes of SRC whose checksum, or whose file's digest on the Hub, was compared
    unchecked: int = 0  #: bytes of SRC without a checksum
    resumed: int = 0  #: bytes that an interrupted run had copied (`--resume`)
    seconds: float = 0.0  #: duration
    dry_run: bool = False  #: whether nothing was written


@dataclass(frozen=True, slots=True)
class How:
    """How a destination is made, whatever stands in it: `How(overwrite=True, threads=4)`."""

    overwrite: bool = False
    dry_run: bool = False
    threads: int | None = None
    max_memory: int | None = None
    check: bool = False
    progress: Progress | None = None
    resume: bool = False
    manifest: str | None = None  # where one is to be written when all is done


@dataclass(frozen=True, slots=True)
class Given:
    """An open source, its files as they were before it was opened, and its path if it is only one."""

    source: Source
    before: files.Fingerprint
    known: str | None

    @property
    def catalogue(self) -> Catalogue:
        return self.source.catalogue


@dataclass(frozen=True, slots=True)
class Laid:
    """What is to be written: `Laid(catalogue, SinkOptions(world=8))`. `folded` are entries of the source that stand in
    other values now."""

    catalogue: Catalogue
    options: SinkOptions
    folded: frozenset[Path] = frozenset()


@contextmanager
def given(
    src: str, shapes: str | None = None, model_from: str | None = None, optim_from: str | None = None
) -> Iterator[Given]:
    """Open the source, parts of which may come from other checkpoints. Raises ReadError or CorruptError."""
    seen = _before(src, model_from, optim_from)
    with ExitStack() as stack:
        source = _open_all(stack, src, shapes, model_from, optim_from)
        # Of several sources, the one at fault is known by its file only.
        known = src if model_from is None and optim_from is None else None
        yield Given(source, _watched(source.catalogue, seen), known)


def make(have: Given, laid: Laid, dst: str, target: Format, made: Conversion, how: How, crew: Crew = ALONE) -> None:
    """Write `laid` to `dst`, or plan it, and say in `made` what was done. With a crew, several processes share the
    copies; `made` is complete in the first of them.

    Raises the errors of `ckpttool.errors`; then there is nothing at `dst`.
    """
    prepare(have, laid, dst, target, made)
    if how.dry_run:
        _plan_only(made, target, laid, how)
    elif crew.is_first:
        _write(have, laid, dst, target, made, how, crew)
    else:
        _assist(have, laid, dst, target, made, how, crew)


def prepare(have: Given, laid: Laid, dst: str, target: Format, made: Conversion) -> None:
    """Refuse what must not be written, and say in `made` what is to be.

    Raises UsageError, CorruptError or LossError.
    """
    source, catalogue = have.source, laid.catalogue
    check_apart(dst, *(file.location for file in source.catalogue.own_files))
    with opening.naming(have.known):
        _check_harmless(catalogue, made.source)
        _check_losses(catalogue, target, made.source, dst)
    _summarise(made, source, laid, target)


def _write(have: Given, laid: Laid, dst: str, target: Format, made: Conversion, how: How, crew: Crew) -> None:
    with staging.stage(
        dst, overwrite=how.overwrite, is_file=target.is_file(dst), resume=how.resume, notes=made.notes
    ) as stage:
        partial = stage.path
        sink = _create(target, partial, laid)
        made.bytes += sum(tensor.nbytes for tensor in sink.catalogue.replicas)
        made.notes += map(str, sink.catalogue.warnings)
        made.notes += _unsaid(laid.catalogue, sink.catalogue)
        _note_files(made, sink, partial, dst)
        check_place(how.manifest, dst, (name for name, _ in made.files))
        check_space(dst, made.disk, made.free + stage.held)
        log = _journal(stage, have, sink, target, made, how) if crew.size == 1 else None
        crew.begin(partial, sink.catalogue)
        moved = crew.gathered(_fill(have, sink, made, how, crew, log), have.source, sink.catalogue, how)
        files.check_unchanged(have.before)
        sink.finish(moved.crcs)
        if how.check:
            rereading.check_written(
                target, partial, sink.catalogue, have.source,
                total=made.bytes, threads=how.threads, memory=how.max_memory,
            )  # fmt: skip
    made.checked, made.unchecked, made.resumed = moved.checked, moved.unchecked, moved.resumed
    if how.resume and not moved.resumed:
        made.notes.append("there was nothing to go on from")
    if moved.overflowed:
        made.notes.append(
            f"{sum(moved.overflowed.values())} values of {len(moved.overflowed)} tensors are too large for their "
            f"new dtype and are no numbers now: {some(sorted(moved.overflowed))}"
        )


def _journal(
    stage: staging.Stage, have: Given, sink: Sink, target: Format, made: Conversion, how: How
) -> journal.Journal:
    seen = have.before
    indexes = [path for path in seen if _is_index(path)]
    digest = journal.digest(have.catalogue, sink.catalogue, target.name, seen, indexes)
    return stage.begin(sink.catalogue, digest, made.notes, every=how.resume)


def _assist(have: Given, laid: Laid, dst: str, target: Format, made: Conversion, how: How, crew: Crew) -> None:
    """One of the other processes: lay the same sink down sparse in a scratch directory, and fill a share of the files
    that the first process made."""
    with tempfile.TemporaryDirectory(prefix="ckpttool-plan-") as scratch:
        partial = str(FilePath(scratch, "out"))
        sink = _create(target, partial, laid)
        made.bytes += sum(tensor.nbytes for tensor in sink.catalogue.replicas)
        crew.join(partial, sink.catalogue)
        moved = _fill(have, sink, made, how, crew)
        crew.hand_in(moved, sink.catalogue)


def _fill(
    have: Given, sink: Sink, made: Conversion, how: How, crew: Crew, log: journal.Journal | None = None
) -> Transferred:
    with opening.naming(have.known):
        return transfer(
            plan.plan(sink.catalogue, crew.share), have.source, sink.catalogue,
            total=made.bytes, threads=how.threads, memory=how.max_memory,
            progress=crew.watching(awaiting(how.progress, have, sink.catalogue)),
            check_later=crew.size > 1, journal=log,
        )  # fmt: skip


def awaiting(progress: Progress | None, have: Given, laid: Catalogue) -> Progress | None:
    """`progress`, which also counts what has to be fetched of the files that `laid` is made from."""
    locations = {file.location for file in have.catalogue.files}
    if progress is None or not any(map(mirrors.is_digested, locations)):
        return progress
    used: set[int] = set()
    for tensor in laid.tensors:
        while tensor.origin is not None:
            tensor = tensor.origin
        used.update(tensor.chunks.file)
    return mirrors.awaiting(progress, (have.catalogue.files[number].location for number in used))


def check_place(manifest: str | None, dst: str, names: Iterable[str]) -> None:
    """Raises OverwriteError for a manifest where one of these files of DST will be."""
    if manifest is not None:
        there = os.path.realpath(manifest)
        taken = any(os.path.realpath(os.path.join(dst, name)) == there for name in names)
        if taken or (os.path.dirname(there) == os.path.realpath(dst) and _is_index(there)):
            raise OverwriteError(
                f"`{manifest}` is a file of the checkpoint", hint="call the manifest `integrity.json`", file=manifest
            )


def check_space(dst: str, wanted: int, free: int) -> None:
    """Raises StorageError when more is needed than there is."""
    if wanted > free:
        raise StorageError(
            f"`{dst}`: needs {wanted} bytes, but {free} are free",
            hint="free some space, or write somewhere else",
            file=dst, found=free, expected=wanted,
        )  # fmt: skip


# Before anything is written -------------------------------------------------------------------------------------------


def check_free(dst: str, target: Format, overwrite: bool, dry_run: bool) -> list[str]:
    """A plan may be made for a destination that exists, but it says what would then stop it."""
    try:
        files.check_free(dst, overwrite=overwrite, is_file=target.is_file(dst))
    except OverwriteError as error:
        if overwrite or not dry_run:
            raise
        return [f"{error.message}: {error.hint}"]
    if overwrite and FilePath(dst).is_dir() and any(FilePath(dst).iterdir()):
        _check_is_checkpoint(dst)
    return []


def _check_is_checkpoint(dst: str) -> None:
    """Raises OverwriteError for a directory of something else: `--overwrite` removes all that is in it."""
    try:
        if producers.recognise(Directory(dst)) is None:
            detect(dst)
    except CkptError:
        raise OverwriteError(
            f"`{dst}` is a directory that holds no checkpoint, and `--overwrite` would remove all that is in it",
            hint="name another destination, or remove it yourself",
            file=dst,
        ) from None


def check_not_empty(laid: Catalogue) -> None:
    """Raises UsageError where all has been left out."""
    if not laid.entries:
        raise UsageError("nothing is left to write", hint="look at what is there with `ckpttool inspect`")


def check_apart(dst: str, *sources: str | None) -> None:
    """Raises UsageError when `dst` would touch a source: `--overwrite` replaces a directory with all that it holds."""
    for path in filter(None, sources):
        there, here = os.path.realpath(dst), os.path.realpath(path)
        hint = "write somewhere else; SRC is never touched"
        if there == here or there.startswith(here.rstrip("/") + "/"):
            raise UsageError(f"`{dst}` is the source, or lies inside it", hint=hint)
        if here.startswith(there.rstrip("/") + "/"):
            raise UsageError(f"the source `{path}` lies inside `{dst}`", hint=hint)


def _open_all(stack: ExitStack, src: str, shapes: str | None, model_from: str | None, optim_from: str | None) -> Source:
    if model_from is None and optim_from is None:
        return stack.enter_context(opening.opened(src, shapes))
    source = opening.open_source(src, shapes)
    mounted = CombinedSource.over(source)
    stack.callback(mounted.close)
    for kind, path in (("model", model_from), ("optimizer", optim_from)):
        if path is not None:
            mounted.replace_part(kind, opening.open_source(path), path)
    return mounted


_INDEXES = (".metadata", "__*.metadata", "*.index.json", "ckpttool.json")


def _before(*sources: str | None) -> files.Fingerprint:
    """The files of the sources as they are before they are opened: reading a large index takes seconds, in which a
    file can be replaced."""
    found: list[str] = []
    for path in filter(None, sources):
        if os.path.isdir(path):
            found += [str(p) for pattern in ("*", "*/*") for p in FilePath(path).glob(pattern)]
        else:
            found += [path, *(str(p) for pattern in _INDEXES for p in FilePath(path).parent.glob(pattern))]
    return files.fingerprint(path for path in found if os.path.isfile(path))


def _watched(catalogue: Catalogue, before: files.Fingerprint) -> files.Fingerprint:
    """Those of them that must not change while we read: the ones with tensors, and the indexes."""
    data = {f.location for f in catalogue.files if not f.scratch and not f.missing}
    marks = {path: mark for path, mark in before.items() if path in data or _is_index(path)}
    return marks | files.fingerprint(data - marks.keys())


def _is_index(path: str) -> bool:
    return any(FilePath(path).match(pattern) for pattern in _INDEXES)


def _check_harmless(laid: Catalogue, src: str) -> None:
    """Let nothing through that runs commands elsewhere. Attributes of a dict go without a word here, as there is no
    flag to leave them out: opening the source has said so."""
    for name, called in opening.harmful(laid.objects):
        raise CorruptError(
            f"`{src}`: `{name}` names `{called}`, which runs code where it is loaded, and is not passed on",
            hint=f"look where this file came from; `--exclude '{name}'` leaves the entry out",
            file=src, found=called,
        )  # fmt: skip
    for path in {path for path, _ in opening.harmful_attributes(laid)}:
        laid.containers[path] = laid.containers[path]._replace(attrs=None)


def _check_losses(laid: Catalogue, target: Format, src: str, dst: str) -> None:
    lost = target.losses(laid, dst) if target.losses is not None else []
    if not lost:
        return
    names = ", ".join(f"`{loss.name}`" for loss in lost[:5]) + (", ..." if len(lost) > 5 else "")
    whys = sorted({loss.why for loss in lost})
    keep = "`--to dcp` or `--to torch` keeps them"
    if target.is_file(dst) and target.splits:
        keep = "a directory as DST keeps them"
    raise LossError(
        f"`{src}` cannot be written as {target.target} at `{dst}`: {len(lost)} would be lost ({names}): "
        f"{'; '.join(whys)}",
        hint=f"{keep}; `--only model` writes the model alone, `--drop` and `--exclude` leave something out",
        lost=[loss.name for loss in lost],
    )


# What is said about it ------------------------------------------------------------------------------------------------


def _summarise(made: Conversion, source: Source, to_write: Laid, target: Format) -> None:
    laid, dst = to_write.catalogue, made.destination
    made.source_format, made.format = source.catalogue.format, target.name
    kept = set(to_write.folded) | {o.origin for o in laid.objects}
    made.renamed = [(dotted(o.origin), o.name) for o in laid.objects if o.origin != o.path]
    for tensor in laid.tensors:
        made.tensors += 1
        origin = tensor.origin
        assert origin is not None
        kept.add(origin.path)
        if origin.name != tensor.name:
            made.renamed.append((origin.name, tensor.name))
        if origin.dtype != tensor.dtype:
            made.cast.append((tensor.name, origin.dtype.name, tensor.dtype.name))
        if tensor.alias is not None:
            made.ties.append((tensor.name, dotted(tensor.alias)))
        else:
            made.bytes += tensor.nbytes
    made.objects = sum(1 for _ in laid.objects)
    # What gave way to a part from elsewhere is left out too.
    there = dict.fromkeys(source.replaced) if isinstance(source, CombinedSource) else {}
    there |= dict.fromkeys(
        e.origin if isinstance(e, Object) else (e.origin or e).path for e in source.catalogue.entries.values()
    )
    made.dropped = [dotted(path) for path in there if path not in kept]
    made.notes[:0] = map(str, source.catalogue.warnings + laid.warnings)
    # `format` says which library wrote the file, and is said anew.
    remarks = {str(name) for name in source.catalogue.facts.get("metadata", ())} - {"format"}
    if remarks and target.name != source.catalogue.format:
        names = ", ".join(f"`{name}`" for name in sorted(remarks)[:5])
        made.notes.append(f"`__metadata__` of the source is left out, {target.name} has no place for it: {names}")
    made.notes[:0] = taken_of_run(source.catalogue)
    if assets := source.catalogue.facts.get("assets"):
        made.notes.append(f"no part of the state, copy them yourself: {some(assets, 5)}")
    other = formats.by_suffix(dst)
    if other is not None and other != target:
        made.notes.append(f"`{dst}` is called like {other.title}, but is written as {target.target}")
    made.free = files.free_space(dst)


def taken_of_run(source: Catalogue) -> list[str]:
    """Which checkpoint of a run directory this is, in a sentence; nothing for any other."""
    run = source.facts.get("run", ())
    which = f"the newest complete one of {len(run)}" if len(run) > 1 else "the only one"
    return [f"`{found['name']}` is taken, {which} in the run" for found in run if found["taken"]]


def _create(target: Format, path: str, laid: Laid) -> Sink:
    assert target.create is not None
    return target.create(path, laid.catalogue, laid.options)


def _unsaid(laid: Catalogue, written: Catalogue) -> list[str]:
    """About attributes of dicts (`_metadata` of a state dict) that the destination has no place for."""
    lost = {
        f"{dotted(path)}.{name}".lstrip(".")
        for path, container in laid.containers.items()
        for name, value in (container.attrs or {}).items()
        if name not in ((written.containers.get(path) or Container("dict")).attrs or {})
        and not (name == "_metadata" and _says_nothing(value))
    }
    return [f"Python attributes of dicts are left out: {some(sorted(lost))}"] if lost else []


def _says_nothing(metadata: Any) -> bool:
    """Whether every module of a state dict's `_metadata` is of version 1, as it is without it."""
    return isinstance(metadata, dict) and all(module == {"version": 1} for module in metadata.values())


def _note_files(made: Conversion, sink: Sink, partial: str, dst: str) -> None:
    # The staging path stands for the destination in everything that a person sees.
    made.files = [(FilePath(dst).name if f.location == partial else f.name, f.size) for f in sink.catalogue.files]
    made.disk = sum(size for _, size in made.files)


def _plan_only(made: Conversion, target: Format, laid: Laid, how: How) -> None:
    """Lay the sink down for real, but sparse and in a scratch directory: the sizes are then exact."""
    with tempfile.TemporaryDirectory(prefix="ckpttool-plan-") as scratch:
        name = FilePath(made.destination.rstrip("/")).name
        partial = str(FilePath(scratch, name or "out"))
        sink = _create(target, partial, laid)
        made.bytes += sum(tensor.nbytes for tensor in sink.catalogue.replicas)
        made.notes += map(str, sink.catalogue.warnings)
        _note_files(made, sink, partial, made.destination)
    check_place(how.manifest, made.destination, (name for name, _ in made.files))
    if made.disk > made.free:
        made.notes.insert(0, f"needs {made.disk} bytes, but {made.free} are free")
    made.memory = expected_memory(laid.catalogue, made.cast, how.threads, how.max_memory)


def expected_memory(laid: Catalogue, cast: object, threads: int | None, memory: int | None) -> int:
    """Bytes that the process is expected to hold at most while it fills `laid`; `cast` is whether values change."""
    count, tile = budget(threads, memory)
    held = arguments.BASE_MEMORY + count * BUFFER
    if cast:
        held += _TORCH_MEMORY + 4 * count * tile
    elif any(_may_be_gathered(tensor) for tensor in laid.tensors):
        held += _NUMPY_MEMORY + 2 * count * tile
    return held


def _may_be_gathered(tensor: Tensor) -> bool:
    """Whether elements of this tensor may lie in another order than they are written in; an unopened item may."""
    chunks = (tensor.origin or tensor).chunks
    return bool(chunks.item or chunks.strides or chunks.codecs) or len({len(o) and o[1:] for o in chunks.offsets}) > 1
