"""Layouts that can be written, by the names that `--producer` takes: those of frameworks, `accelerate:full`, `trainer`,
..., and the one that another checkpoint has: `same`, that of the source, or a path.

A layout is right when the reader of the framework's directories gives back what was written. In that of a checkpoint,
each component is written in the format and under the name that it has there, and the assets are copied: what was
converted to DCP, and trained or changed, becomes again what a script reads. A file of pickled modules, which take their
classes, is a copy of the one that is there, with the elements of the state (`template`). An archive is the directory of
its files, which is packed in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from posixpath import normpath

from ckpttool import formats
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import (
    NO_HINTS,
    Crcs,
    CreatedSink,
    Format,
    FormatLoss,
    OpenOptions,
    Sink,
    SinkOptions,
    Source,
)
from ckpttool.errors import UsageError
from ckpttool.formats import archives, deepspeed, rankfiles
from ckpttool.layout.optimizer import model_order, respell
from ckpttool.producers import PRODUCERS, reader
from ckpttool.producers.arrange import LayoutBuilder
from ckpttool.producers.components import Component, Layout, Mounted, Producer, WritableLayout, deepest, rank_sets
from ckpttool.producers.contents import rank_in, without_remains
from ckpttool.producers.open import open_archive, open_source
from ckpttool.producers.template import FileTemplate, is_copied
from ckpttool.producers.writer import OutputLayout
from ckpttool.serialization.directory import Directory
from ckpttool.storage import files
from ckpttool.storage.archives import ArchiveStore, members, pack
from ckpttool.storage.stores import Location, local_path
from ckpttool.text import meant, some

LAYOUTS = tuple(sorted((layout for row in PRODUCERS for layout in row.writes), key=lambda layout: layout.framework))
SAME = "same"
_OF_SAME = WritableLayout(SAME, "", lambda builder: builder.finish(""), chunked=True, splits=True)
"""What is known of it before the other checkpoint is open."""
_NOT_READ = ("left-out", "stale-file", "stale-index")  # kinds of warnings of files that another save has left


def named(name: str) -> WritableLayout:
    """Return the layout called `name`; of a framework with several, the first, whose flags are the most that one of
    them has. Raises UsageError."""
    for layout in LAYOUTS:
        if name in (layout.name, layout.framework):
            return layout
    if name == SAME or local_path(name).exists():
        return _OF_SAME
    text = f"no layout of a producer is called `{name}`"
    if name.lower() in formats.OF_TRANSFORMERS:
        raise UsageError(text, hint="`ckpttool export` writes a model for transformers and vLLM")
    if any(name == row.target for row in formats.CHECKPOINTS if row.create):
        raise UsageError(text, hint=f"it is a format: `--to {name}`")
    if read := [row.name for row in PRODUCERS if name.lower() in row.name.lower().split() and not row.writes]:
        hint = "`--producer PATH` writes the layout of the checkpoint at PATH"
        raise UsageError(f"the layout of {read[0]} is read, and not written by its name", hint=hint)
    if "/" in name:
        raise UsageError(f"`--producer {name}`: no such checkpoint", hint="name an existing one, whose layout is used")
    names = [*dict.fromkeys(layout.framework for layout in LAYOUTS), *(x.name for x in LAYOUTS if ":" in x.name)]
    raise UsageError(text, hint=meant(name, names, f"one of {', '.join(f'`{n}`' for n in names)}"))


def choose(name: str, source: Catalogue, to_world: int | None) -> WritableLayout | Format:
    """Return the layout called `name`, or the one that suits the source when `name` is a framework with several; the
    format of a checkpoint that is of one."""
    layout = named(name)
    if name == SAME:
        return _layout_of(source, name)
    if layout.name == SAME:
        with closing(open_source(name)) as like:
            return _layout_of(like.catalogue, name)
    producer = _producer_of(layout)
    if name == layout.framework and producer.choose is not None:
        return producer.choose(source, to_world)
    return layout


def _producer_of(layout: WritableLayout) -> Producer:
    return next(row for row in PRODUCERS if layout in row.writes)


def spell_optimizers(layout: WritableLayout, catalogue: Catalogue, source: Catalogue) -> Catalogue:
    """Return the catalogue with optimizer state keyed as the framework keys it. Pure."""
    if not layout.keys:
        return catalogue
    if layout.ordered:
        return model_order.numbered(catalogue, source)
    return respell.respell(catalogue, layout.keys, source)


def as_format(layout: WritableLayout, output: OutputLayout | None = None) -> Format:
    """Return the layout as a format that a conversion writes; without `output`, for its flags only."""

    def open_written(location: Location, options: OpenOptions = NO_HINTS) -> Source:
        if layout.open is not None:
            return layout.open(Directory(location), options)
        return reader.open_directory(Directory(location), options, _producer_of(layout))

    return Format(
        name=layout.name,
        title=f"what {layout.framework} leaves",
        recognise=lambda path: False,
        open=open_written,
        create=output.create if output is not None else None,
        losses=output.losses if output is not None else lambda planned, path: [],
        # Of whole tensors, `--to-world` says how many processes have a file of their own.
        chunked=layout.chunked or output is None,
        even=layout.even,
        splits=layout.splits,
    )


# The layout of a checkpoint -------------------------------------------------------------------------------------------


def _layout_of(like: Catalogue, name: str) -> WritableLayout | Format:
    """Return the layout of a checkpoint, called `name` in messages, or the format of one that is a single file or of a
    single format. Raises UsageError for another one than the source that `--to` writes."""
    if like.format == archives.FORMAT.name and like.location and isinstance(like.location.store, ArchiveStore):
        return _like_archive(like.location.store.archive, name)
    mounted: list[Mounted] = like.facts.get("components", [])
    read = [one for one in mounted if one.format != "asset"]
    if not read and like.format == "safetensors" and like.location is not None and like.location.is_dir():
        read = _of_safetensors(like, like.location)
        mounted = [*read, *mounted]
    if not read and like.format == rankfiles.FORMAT.name:
        mounted = read = _of_copies(like)
    for one in read or [Mounted(Component(""), "", like.format)]:
        _check_written(one, like, name)
    if not read:
        row = next(row for row in formats.FORMATS if row.name == like.format)
        if is_copied(like):
            return _like_file(row, like, like.files[0].name)
        if name == SAME:
            return row
        text = f"`--producer {name}`: it has one format, and is not a directory of several files"
        raise UsageError(text, hint=f"`--to {row.target}` writes it")

    def build(builder: LayoutBuilder) -> OutputLayout:
        return _build(builder, mounted, like)

    def opened(directory: Directory, options: OpenOptions) -> Source:
        components = (one.component for one in read)
        written = [one for one in components if directory.at((one.files or (one.name,))[0]).exists()]
        return reader.open_layout(Layout(written), directory, options)

    return replace(_OF_SAME, build=build, open=opened)


def _check_written(one: Mounted, like: Catalogue, name: str) -> None:
    """Raise UsageError for files that no format writes as they are: those of DeepSpeed, sets of several parts, and flat
    parameters."""
    row = next((row for row in formats.FORMATS if row.name == one.format), None)
    text = f"`--producer {name}`: it does not write `{one.component.name or one.format}`"
    if row is deepspeed.FORMAT:
        hint = "`--producer deepspeed:zero2`, or another stage, writes what DeepSpeed loads, on `--to-world` ranks"
        raise UsageError(f"{text}, a directory of DeepSpeed", hint=hint)
    producer = like.facts.get("producer")
    if one.component.glob:
        raise UsageError(
            f"{text}, files of {producer}", hint=f"`--producer {producer}`, or `--to dcp`, keeps everything"
        )
    if row is rankfiles.FORMAT and one.files and any(map(_is_flat, _below(like, one.root))):
        hint = "`--producer accelerate:sharded`, or `--to dcp`, keeps everything"
        raise UsageError(f"{text}, flat parameters of FSDP1 (LOCAL_STATE_DICT)", hint=hint)


def _below(catalogue: Catalogue, root: Path) -> Iterator[Tensor]:
    return (tensor for tensor in catalogue.tensors if tensor.path[: len(root)] == root)


def _is_flat(tensor: Tensor) -> bool:
    """Return whether a rank has a tensor in several boxes, or one that is no block of rows."""
    ranks = [*tensor.chunks.file]
    return len({*ranks}) < len(ranks) or (
        len(tensor.shape) > 1 and any(s[1:] != tensor.shape[1:] for s in tensor.chunks.sizes)
    )


def _of_safetensors(like: Catalogue, folder: Location) -> list[Mounted]:
    """Return the component that is all of a directory of safetensors, whose files may be called
    `adapter_model.safetensors`; none for several files without an index."""
    files = tuple(file.name for file in like.files)
    index = [name for name in folder.names() if name.endswith(".safetensors.index.json")]
    if len(index) == 1:
        return [Mounted(Component(index[0], files=(index[0], *files)), index[0], like.format, files=(index[0], *files))]
    return [Mounted(Component(name, files=files), name, like.format) for name in files] if len(files) == 1 else []


def _of_copies(like: Catalogue) -> list[Mounted]:
    """Return the component that is all of a set of files of ranks with the same whole tensors; none for others."""
    named = filter(None, (rank_in(file.name) for file in like.files)) if _are_whole(like, ()) else ()
    sets = [(name, tuple(match.string for match in of_rank)) for name, of_rank in rank_sets(named).items()]
    is_all = len(sets) == 1 and 1 < len(sets[0][1]) == len(like.files)
    one = [Component(name, files=files, kind="rank files") for name, files in sets if is_all]
    return [Mounted(component, component.name, like.format, files=component.files) for component in one]


def _are_whole(like: Catalogue, root: Path) -> bool:
    return all(tensor.chunks.sizes[0] == tensor.shape for tensor in _below(like, root) if tensor.chunks)


def _like_file(row: Format, like: Catalogue, name: str) -> Format:
    """Return the format of copies of a file, with other elements."""
    location = next(file.location for file in like.files if file.name == name)
    return FileTemplate(location.absolute(), row).as_format


def _as_there(row: Format, like: Catalogue, one: Mounted) -> Format:
    """Return the format of a component, or that of files which are written like the one that is there."""
    if one.is_copied:
        return _like_file(row, like, one.name)
    if row is rankfiles.FORMAT and _are_whole(like, one.root):
        return replace(row, chunked=False)  # the same plain tensors in each
    if row is not archives.FORMAT:
        return row
    stores = (file.location.store for file in like.files)
    every = (store.archive for store in stores if isinstance(store, ArchiveStore))
    return _like_archive(next(one_of for one_of in every if f"/{one_of}".endswith(f"/{one.name}")), SAME)


def _like_archive(archive: Location, name: str) -> Format:
    """Return the format of archives like one: the directory of its files, which is packed in the end; if the
    destination ends with a slash it stays a directory. Raises UsageError."""
    with closing(archives.FORMAT.open(archive)) as source:
        like = source.catalogue
    if "run" in like.facts:
        hint = "unpack it, and name the checkpoint"
        raise UsageError(f"`--producer {name}`: it does not write `{archive}`, an archive of a run", hint=hint)
    like.format = like.facts["layout"]
    layout = _layout_of(like, SAME)
    names = {normpath(member.name) for member in members(archive)}
    left = [name for warning in like.warnings if warning.kind in _NOT_READ for name in warning.names]

    def inner(catalogue: Catalogue) -> tuple[Format, Catalogue]:
        if isinstance(layout, Format):
            return layout, catalogue
        output = layout.build(LayoutBuilder(catalogue, 1, "", lambda tensor: None))
        return as_format(layout, output), output.catalogue

    def losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
        row, planned = inner(catalogue)
        return row.losses(planned, path)

    def create(location: Location, catalogue: Catalogue, options: SinkOptions) -> Sink:
        row, planned = inner(catalogue)
        assert row.create is not None
        sink = row.create(location, planned, replace(options, one_file=False))
        if not options.one_file:
            return sink
        more = sum(file.size for file in sink.catalogue.files) + 2 * sink.catalogue.facts.get("more_bytes", 0)
        sink.catalogue.facts["more_bytes"] = more  # while it is packed
        return CreatedSink(sink.catalogue, partial(finish, location, sink))

    def finish(location: Location, sink: Sink, crcs: Crcs) -> None:
        sink.finish(crcs)
        packed = location.parent / f".{location.name}.packed"
        pack(archive, location, packed, names.difference(without_remains(names, left)))
        location.remove()
        files.rename(packed, location)

    def is_file(path: str) -> bool:
        return not path.endswith("/")

    def open_written(location: Location, options: OpenOptions = NO_HINTS) -> Source:
        opened = layout.open if isinstance(layout, Format) else as_format(layout).open
        return opened(location, options) if location.is_dir() else open_archive(location, options, opened)

    return replace(archives.FORMAT, open=open_written, create=create, losses=losses, is_file=is_file, chunked=True)


def _build(builder: LayoutBuilder, mounted: list[Mounted], like: Catalogue) -> OutputLayout:
    """Return each entry in the component whose root is the deepest above it; of a model of several files, in the file
    that it has there."""
    number_of: dict[Path, int] = {}
    of_file: dict[tuple[Path, str], int] = {}
    roots = {one.root for one in mounted if one.format != "asset"}
    had, has = ({deepest(path, roots) for path in paths} for paths in (like.entries, builder.catalogue.entries))
    for one in mounted:
        if one.format != "asset" and one.root in had - has:
            continue  # nothing of it is left
        if one.format == "asset" and one.name.endswith(".bin.index.json"):
            shards = [m for m in mounted if m.name.startswith(f"{one.name.partition('.bin')[0]}-")]
            if all(shard.root in had - has for shard in shards):
                continue
            _check_names(one.name, {shard.name for shard in shards}, like, builder.catalogue)
        key = (one.component.key,) if one.component.key else ()
        for copy in one.copies:
            builder.copy(copy, one.name) if one.format == "asset" else builder.copy(one.name, copy)
        if one.format == "asset":
            continue
        row = next(row for row in formats.FORMATS if row.name == one.format)
        if one.name.endswith(".index.json"):
            for name in one.files[1:]:
                of_file[one.root, name] = builder.component(name, row, one.root, key=key)
            # Its tensors are those of the files that it names, also after a conversion.
            shard = next(file for file in like.files if file.name == one.files[1])
            builder.copy(shard.location.absolute().parent / one.name.rpartition("/")[2], one.name)
            number_of.setdefault(one.root, of_file[one.root, one.files[1]])
            continue
        row = _as_there(row, like, one)
        name, world = one.name.rstrip("/").replace("*", "{rank}"), len(one.files) or None
        number = builder.component(name, row, one.root, key=key, digits=one.digits, world=world)
        number_of.setdefault(one.root, number)
        of_file[one.root, one.name] = number
    for entry in list(builder.remaining()):
        if entry.embedded:
            continue
        stored, root = like.entries.get(entry.path), deepest(entry.path, number_of)
        if root is not None:
            file = like.files[stored.chunks.file[0]].name if isinstance(stored, Tensor) and stored.chunks else ""
            forms = {(one.dtype.name, one.shape) for one in (stored, entry) if isinstance(one, Tensor)}
            if file.endswith(".memmap") and len(forms) > 1:
                builder.lose(entry, "the `meta.json` beside its file has another dtype or shape")
                continue
            builder.add(entry, of_file.get((root, file), number_of[root]), entry.path)
    return builder.finish("the layout has no file for it")


def _check_names(index: str, shards: Collection[str], like: Catalogue, planned: Catalogue) -> None:
    """Raise UsageError for an index that would name tensors which its files do not have any more."""
    stored = (t for t in like.tensors if t.chunks and like.files[t.chunks.file[0]].name in shards)
    gone = [tensor.name for tensor in stored if tensor.path not in planned.entries]
    if gone:
        text = f"`--producer {SAME}`: `{index}` is copied as it is, and names {some(gone)}"
        raise UsageError(text, hint="`--to safetensors` writes an index of what it writes")
