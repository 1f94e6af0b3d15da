"""A conversion, step by step: open, lay out, refuse what would be lost, create, fill, check, commit."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from ckpttool import chunking, files, formats, layout, opening, optimkeys, parts, plan, producers
from ckpttool.catalogue import Catalogue, Chunks, Container, Object, Path, Tensor, dotted, find_aliases, validate
from ckpttool.containers import typedjson
from ckpttool.contract import TENSOR_CLASS, Format, Sink, SinkOptions, Source
from ckpttool.errors import CkptError, CorruptError, LossError, OverwriteError, StorageError, UsageError, some
from ckpttool.mounting import Mounted
from ckpttool.patterns import any_of, renamer, rule
from ckpttool.producers import writing
from ckpttool.producers.arranging import Wanted
from ckpttool.producers.listing import Listing
from ckpttool.transfer import BUFFER, Progress, Transferred, budget, transfer
from ckpttool.wording import parse_size

# What Python, the catalogue and the buffers of the standard library need on top of our own.
_BASE_MEMORY = 48 << 20
_TORCH_MEMORY = 230 << 20
_NUMPY_MEMORY = 24 << 20


@dataclass(slots=True)
class Conversion:
    """What a conversion does (`dry_run`) or did. Sizes are bytes, `memory` is the expected peak of the process."""

    source: str
    source_format: str
    destination: str
    format: str
    files: list[tuple[str, int]] = field(default_factory=list)
    tensors: int = 0
    objects: int = 0
    bytes: int = 0
    disk: int = 0
    free: int = 0
    memory: int = 0
    renamed: list[tuple[str, str]] = field(default_factory=list)
    cast: list[tuple[str, str, str]] = field(default_factory=list)
    ties: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: int = 0
    unchecked: int = 0
    seconds: float = 0.0
    dry_run: bool = False


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    producer: str | None = None,
    only: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    tensors: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: str | Sequence[str] = (),
    strip_wrappers: bool = False,
    strip_prefix: str | None = None,
    dtype: str | Sequence[str] = (),
    max_shard_size: int | str | None = None,
    to_world: int | None = None,
    tensor_class: str | None = None,
    optim_keys: str | None = None,
    optim_root: str | None = None,
    shapes: str | None = None,
    model_from: str | None = None,
    optim_from: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    max_memory: int | str | None = None,
    check: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the checkpoint at `src` to the format `to` at `dst`, bit for bit. See `docs/reference/cli.md`.

    With `producer` in place of `to`, in the layout that a framework resumes from (`ckpttool.producers.writing`).
    Sizes are bytes, or text such as `5GB`. `progress(done, total)` is called with bytes from this thread. Nothing
    appears at `dst` unless all of it does.
    Raises the errors of `ckpttool.errors`, each with its exit code.
    """
    began = time.monotonic()
    src, dst = os.fspath(src), os.fspath(dst)
    only, drop, tensors, exclude, rename, dtype = map(_listed, (only, drop, tensors, exclude, rename, dtype))
    max_shard_size = _in_bytes(max_shard_size, "--max-shard-size")
    max_memory = _in_bytes(max_memory, "--max-memory")
    target = _target(to, producer, dst)
    _check_arguments(dst, target, to_world, max_shard_size, max_memory, tensor_class)
    _check_apart(dst, src, model_from, optim_from)
    in_the_way = _check_free(dst, target, overwrite, dry_run)
    seen = _before(src, model_from, optim_from)
    with ExitStack() as stack:
        source = _open_all(stack, src, shapes, model_from, optim_from)
        _check_apart(dst, *(file.location for file in source.catalogue.own_files))
        before = _watched(source.catalogue, seen)
        # Of several sources, the one at fault is known by its file only.
        known = src if model_from is None and optim_from is None else None
        with opening.naming(known):
            validate(source.catalogue)
            row = writing.chosen(producer, source.catalogue, to_world) if producer is not None else None
            spelling = row.keys if row is not None else "fqn" if target.even else None
            laid, folded = _start(source.catalogue, only, drop, optim_keys, optim_root, spelling)
            laid = _lay_out(laid, tensors, exclude, rename, strip_wrappers, strip_prefix)
            _check_matches("--dtype", [rule(text, "--dtype")[0] for text in dtype if "=" in text], laid)
            laid = layout.cast(laid, layout.caster(dtype))
            world = to_world or source.catalogue.world_size
            if row is not None:
                laid, target, tensor_class = _arranged(row, laid, source, dst, world, folded, tensor_class)
            laid = _rechunked(laid, source.catalogue, target, to_world)
            _check_harmless(laid, src)
            _check_losses(laid, target, src, dst)
        made = _summary(source, laid, folded, src, dst, target, dry_run)
        options = SinkOptions(max_shard_size, target.is_file(dst), world, tensor_class or "sharded_tensor")
        if dry_run:
            made.notes += in_the_way
            _plan_only(made, target, laid, options, threads, max_memory)
            return made
        with files.staged(dst, overwrite=overwrite, is_file=target.is_file(dst)) as partial:
            sink = _create(target, partial, laid, options)
            made.bytes += sum(tensor.nbytes for tensor in sink.catalogue.replicas)
            made.notes += sink.catalogue.warnings
            made.notes += _unsaid(laid, sink.catalogue)
            _note_files(made, sink, partial, dst)
            if made.disk > made.free:
                raise StorageError(
                    f"`{dst}`: needs {made.disk} bytes, but {made.free} are free",
                    hint="free some space, or write somewhere else",
                    file=dst, found=made.free, expected=made.disk,
                )  # fmt: skip
            with opening.naming(known):
                moved = transfer(
                    plan.plan(sink.catalogue), source, sink.catalogue,
                    total=made.bytes, threads=threads, memory=max_memory, progress=progress,
                )  # fmt: skip
            files.check_unchanged(before)
            sink.finish(moved.crcs)
            if check:
                _check_written(target, partial, sink.catalogue, source, made, threads, max_memory)
        made.checked, made.unchecked = moved.checked, moved.unchecked
        if moved.overflowed:
            made.notes.append(
                f"{sum(moved.overflowed.values())} values of {len(moved.overflowed)} tensors are too large for their "
                f"new dtype and are no numbers now: {some(sorted(moved.overflowed))}"
            )
    made.seconds = time.monotonic() - began
    return made


def _target(to: str | None, producer: str | None, dst: str) -> Format:
    if producer is None:
        return formats.writable(to, dst)
    if to is not None:
        raise UsageError(
            f"`--producer {producer}` and `--to {to}` both say what is to be written",
            hint="a producer's layout is of several formats; leave `--to` out",
        )
    return writing.named(producer).format()


def _arranged(
    row: writing.Writable, laid: Catalogue, source: Source, dst: str, world: int, folded: set[Path],
    tensor_class: str | None,
) -> tuple[Catalogue, Format, str | None]:  # fmt: skip
    """The state as a framework keeps it, and the layout as a format that is written like any other."""

    def read(tensor: Tensor) -> int | None:
        return _small_integer(source, tensor.origin or tensor)

    wanted = Wanted(world, FilePath(dst.rstrip("/")).name, read)
    arranging, arranged = writing.arrange(row, laid, wanted)
    folded |= arranging.folded
    arranged.laid.warnings = [*laid.warnings, *arranging.notes]
    return arranged.laid, row.format(arranged), tensor_class or row.tensor_class


def _small_integer(source: Source, tensor: Tensor) -> int | None:
    """The value of a counter, which some frameworks keep as a tensor."""
    if tensor.shape not in ((), (1,)) or tensor.dtype.kind != "int" or len(tensor.chunks) != 1:
        return None
    extent = source.resolve(tensor, tensor.chunks[0])
    if not extent.plain:
        return None
    pool = files.Pool()
    try:
        data = pool.read(source.catalogue.files[extent.file].location, extent.offset, extent.nbytes)
    finally:
        pool.close()
    return int.from_bytes(data, "little", signed=tensor.dtype.name.startswith("int"))


def _listed(value: str | Sequence[str]) -> Sequence[str]:
    # To Python, a string is a sequence of strings too.
    return (value,) if isinstance(value, str) else value


def _in_bytes(value: int | str | None, flag: str) -> int | None:
    return parse_size(value, flag) if isinstance(value, str) else value


def _check_free(dst: str, target: Format, overwrite: bool, dry_run: bool) -> list[str]:
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
        if producers.recognise(Listing(dst)) is None:
            formats.detect(dst)
    except CkptError:
        raise OverwriteError(
            f"`{dst}` is a directory that holds no checkpoint, and `--overwrite` would remove all that is in it",
            hint="name another destination, or remove it yourself",
            file=dst,
        ) from None


def _check_arguments(
    dst: str,
    target: Format,
    to_world: int | None,
    max_shard_size: int | None,
    max_memory: int | None,
    tensor_class: str | None,
) -> None:
    if tensor_class is not None:
        if not target.even:
            raise UsageError(f"`--tensor-class` makes no sense for {target.target}", hint="use it with `--to fsdp1`")
        if not TENSOR_CLASS.fullmatch(tensor_class):
            raise UsageError(
                f"there is no tensor class `{tensor_class}`",
                hint="one of `sharded_tensor`, `dtensor`, `dtensor:DEVICE`, `dtensor:DEVICE:NAME`",
            )
    if to_world is not None:
        if to_world < 1:
            raise UsageError(f"`--to-world {to_world}`: a world has at least one rank")
        if not target.chunked:
            raise UsageError(
                f"`--to-world` makes no sense for {target.name}, which has whole tensors",
                hint="use it with `--to dcp` or `--to fsdp1`",
            )
    if max_shard_size is not None:
        if not target.splits:
            raise UsageError(
                f"`--max-shard-size` makes no sense for {target.name}", hint="use it with `--to safetensors`"
            )
        if target.is_file(dst):
            raise UsageError(
                f"`{dst}` is one file, which `--max-shard-size` cannot split", hint="name a directory instead"
            )
    if max_memory is not None and max_memory < _BASE_MEMORY:
        raise UsageError(f"`--max-memory`: at least {_BASE_MEMORY >> 20} MiB are needed")


def _check_apart(dst: str, *sources: str | None) -> None:
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
    mounted = Mounted.over(source)
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


def _start(
    source: Catalogue,
    only: Sequence[str],
    drop: Sequence[str],
    optim_keys: str | None,
    optim_root: str | None,
    spelling: str | None,
) -> tuple[Catalogue, set[Path]]:
    """The parts that are wanted, the optimizer spelt as it is to be, by `spelling` unless told; and what stands in
    other values for that."""
    laid = layout.start(source)
    if only or drop:
        # In one step: selecting can move a part, and both speak of the parts of the source.
        wanted = parts.matcher(only, source) if only else lambda part: True
        unwanted = parts.matcher(drop, source)
        laid = layout.select(laid, lambda e: wanted(e.part) and not unwanted(e.part))
    folded: set[Path] = set()
    if optim_keys is not None and not any(part.kind == "optimizer" for part in parts.parts(laid)):
        raise UsageError(f"`--optim-keys {optim_keys}`: there is no optimizer here")
    if optim_keys is not None or spelling is not None:
        # The model that says what ids mean is the source's, whether it is wanted or not, by its own names.
        before = optimkeys.origins(laid)
        laid = optimkeys.respell(laid, optim_keys or spelling or "fqn", source)
        folded = before - optimkeys.origins(laid)
    left = parts.parts(laid)
    if only and len(left) == 1:
        # First of all, so that every pattern below sees the names that will be written.
        laid = layout.without_root(laid, left[0])
    return (optimkeys.respell_root(laid, optim_root) if optim_root is not None else laid), folded


def _lay_out(
    laid: Catalogue,
    tensors: Sequence[str],
    exclude: Sequence[str],
    rename: Sequence[str],
    strip_wrappers: bool,
    strip_prefix: str | None,
) -> Catalogue:
    _check_not_empty(laid)
    _check_matches("--tensors", tensors, laid)
    _check_matches("--exclude", exclude, laid)
    if tensors or exclude:
        laid = layout.select(laid, layout.matching(tensors, exclude))
        _check_not_empty(laid)
    if strip_wrappers:
        laid = layout.rename(laid, layout.strip_wrappers, within_parts=True)
    if strip_prefix:
        prefix = strip_prefix.rstrip(".") + "."
        if not any(dotted(t.path[len(t.part.root) :]).startswith(prefix) for t in laid.tensors):
            raise UsageError(f"`--strip-prefix {strip_prefix}`: no tensor of the model has this prefix")
        laid = layout.rename(laid, lambda name: name.removeprefix(prefix), within_parts=True)
    for text in rename:
        step = renamer([text])
        if all(step(entry.name) == entry.name for entry in laid.entries.values()):
            raise UsageError(f"`--rename {text}` changes no name", hint=_names_hint(laid))
    if rename:
        laid = layout.rename(laid, renamer(rename))
    return laid


def _check_not_empty(laid: Catalogue) -> None:
    if not laid.entries:
        raise UsageError("nothing is left to write", hint="look at what is there with `ckpttool inspect`")


def _check_matches(flag: str, patterns: Sequence[str], laid: Catalogue) -> None:
    """Raises UsageError for a pattern that matches nothing: a misspelt one would leave something in, or out, unseen."""
    for pattern in patterns:
        matches = any_of([pattern])
        if not any(matches(entry.name) for entry in laid.entries.values()):
            raise UsageError(f"`{flag} {pattern}` matches nothing", hint=_names_hint(laid))


def _names_hint(laid: Catalogue) -> str:
    names = [entry.name for entry in laid.entries.values()]
    return f"names here are like `{names[len(names) // 2]}`; `ckpttool inspect SRC --tensors '*'` lists them"


def _rechunked(laid: Catalogue, source: Catalogue, target: Format, to_world: int | None) -> Catalogue:
    if not target.chunked:
        return chunking.whole(laid)
    if to_world is not None or target.even:
        return chunking.over_world(laid, to_world or source.world_size, everywhere=target.even)
    return chunking.as_stored(laid, [f.rank for f in source.files])


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


def _summary(
    source: Source, laid: Catalogue, folded: set[Path], src: str, dst: str, target: Format, dry_run: bool
) -> Conversion:
    made = Conversion(src, source.catalogue.format, dst, target.name, dry_run=dry_run)
    kept = folded | {o.origin for o in laid.objects}
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
    there = dict.fromkeys(source.given_way) if isinstance(source, Mounted) else {}
    there |= dict.fromkeys(
        e.origin if isinstance(e, Object) else (e.origin or e).path for e in source.catalogue.entries.values()
    )
    made.dropped = [dotted(path) for path in there if path not in kept]
    made.notes = [*source.catalogue.warnings, *laid.warnings]
    # `format` says which library wrote the file, and is said anew.
    remarks = {str(name) for name in source.catalogue.facts.get("metadata", ())} - {"format"}
    if remarks and target.name != source.catalogue.format:
        names = ", ".join(f"`{name}`" for name in sorted(remarks)[:5])
        made.notes.append(f"`__metadata__` of the source is left out, {target.name} has no place for it: {names}")
    run = source.catalogue.facts.get("run", ())
    for taken in (found for found in run if found["taken"]):
        made.notes.insert(0, f"`{taken['name']}` is taken, the newest complete one of {len(run)} in the run")
    if assets := source.catalogue.facts.get("assets"):
        made.notes.append(f"no part of the state, copy them yourself: {some(assets, 5)}")
    other = formats.by_suffix(dst)
    if other is not None and other != target:
        made.notes.append(f"`{dst}` is called like {other.title}, but is written as {target.target}")
    made.free = files.free_space(dst)
    return made


def _create(target: Format, path: str, laid: Catalogue, options: SinkOptions) -> Sink:
    assert target.create is not None
    return target.create(path, laid, options)


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


def _plan_only(
    made: Conversion, target: Format, laid: Catalogue, options: SinkOptions, threads: int | None, memory: int | None
) -> None:
    """Lay the sink down for real, but sparse and in a scratch directory: the sizes are then exact."""
    with tempfile.TemporaryDirectory(prefix="ckpttool-plan-") as scratch:
        name = FilePath(made.destination.rstrip("/")).name
        partial = str(FilePath(scratch, name or "out"))
        sink = _create(target, partial, laid, options)
        made.notes += sink.catalogue.warnings
        _note_files(made, sink, partial, made.destination)
    if made.disk > made.free:
        made.notes.insert(0, f"needs {made.disk} bytes, but {made.free} are free")
    count, tile = budget(threads, memory)
    made.memory = _BASE_MEMORY + count * BUFFER
    if made.cast:
        made.memory += _TORCH_MEMORY + 4 * count * tile
    elif any(_may_be_gathered(tensor) for tensor in laid.tensors):
        made.memory += _NUMPY_MEMORY + 2 * count * tile


def _may_be_gathered(tensor: Tensor) -> bool:
    """Whether elements of this tensor may lie in another order than they are written in; an unopened item may."""
    chunks = (tensor.origin or tensor).chunks
    return bool(chunks.item or chunks.strides or chunks.codecs) or len({len(o) and o[1:] for o in chunks.offsets}) > 1


def _check_written(
    target: Format, partial: str, laid: Catalogue, source: Source, made: Conversion,
    threads: int | None, memory: int | None,
) -> Transferred:  # fmt: skip
    """Read the destination back through its own reader and compare everything with the source."""
    written = target.open(partial)
    try:
        validate(written.catalogue)
        again = Catalogue(laid.format, written.catalogue.files)
        for tensor in laid.tensors:
            there = written.catalogue.entries.get(tensor.path)
            if not isinstance(there, Tensor) or (there.dtype, there.shape) != (tensor.dtype, tensor.shape):
                raise CorruptError(f"tensor `{tensor.name}` was not written as it was read", tensor=tensor.name)
            again.entries[tensor.path] = _resolved(there, tensor, written)
        ties = _same_tensors(written.catalogue, find_aliases(written.catalogue.tensors))
        same = _same_tensors(laid, {t.path: t.alias for t in laid.tensors if t.alias is not None})
        for entry in laid.objects:
            found = written.catalogue.entries.get(entry.path)
            if not isinstance(found, Object) or _spelt(found, ties) != _spelt(entry, same):
                raise CorruptError(f"object `{entry.name}` was not written as it was read", found=entry.name)
        _check_containers(laid, written.catalogue)
        return transfer(plan.plan(again), source, again, total=made.bytes, threads=threads, memory=memory, compare=True)
    finally:
        written.close()


def _check_containers(laid: Catalogue, written: Catalogue) -> None:
    """Lists and ordered dicts must come back as what they were, where the format tells them apart."""
    for path, container in laid.containers.items():
        found = written.containers.get(path)
        if found is not None and found.kind != container.kind:
            raise CorruptError(f"the {container.kind} `{dotted(path)}` was written as a {found.kind}")


def _same_tensors(catalogue: Catalogue, ties: dict[Path, Path]) -> dict[Path, Path]:
    """One path for what cannot be told apart inside an object: a tensor that it refers to twice may come back as two,
    tied, or without elements."""
    empty: dict[Path, Path] = {
        t.path: (t.dtype.name, *t.shape) for t in catalogue.tensors if t.embedded and not t.numel
    }
    return ties | empty


def _spelt(entry: Object, ties: Mapping[Path, Path]) -> str:
    return json.dumps(typedjson.encode(layout.relinked(entry.value, ties), name=entry.name))


def _resolved(there: Tensor, tensor: Tensor, source: Source) -> Tensor:
    chunks = Chunks.of(chunk._replace(extent=source.resolve(there, chunk)) for chunk in there.chunks)
    return replace(there, chunks=chunks, origin=tensor.origin, alias=tensor.alias)
