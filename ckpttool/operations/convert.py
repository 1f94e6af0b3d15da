"""A conversion: which parts and tensors, under which names, in which dtype and chunks. `making` does the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path as FilePath

from ckpttool import formats
from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Path, Tensor, dotted
from ckpttool.catalogue.patterns import any_of, renamer, rule, several
from ckpttool.catalogue.protocols import TENSOR_CLASS, Format, SinkOptions, Source
from ckpttool.catalogue.validation import stop_at_fault, validate
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import UsageError
from ckpttool.layout import rechunk as chunking
from ckpttool.layout import select as layout
from ckpttool.layout.optimizer import respell as optimkeys
from ckpttool.operations import arguments
from ckpttool.operations import manifest as manifests
from ckpttool.operations import write as making
from ckpttool.operations.write import Conversion, How, Laid
from ckpttool.producers import open as opening
from ckpttool.producers import writable
from ckpttool.producers.arrange import Destination, LayoutBuilder
from ckpttool.producers.components import WritableLayout
from ckpttool.storage import files
from ckpttool.transfer.threads import Progress


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
    resume: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    max_memory: int | str | None = None,
    check: bool = False,
    manifest: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the checkpoint at `src` to the format `to` at `dst`, bit for bit. See `docs/reference/cli.md`.

    With `producer` in place of `to`, in the layout that a framework resumes from (`ckpttool.producers.writable`).
    Sizes are bytes, or text such as `5GB`. `progress(done, total)` is called with bytes from this thread. Nothing
    appears at `dst` unless all of it does; with `resume`, a run goes on from what an interrupted one has copied. A
    `manifest` of it is then written to that path.
    Raises the errors of `ckpttool.errors`, each with its exit code.
    """
    began = time.monotonic()
    src, dst = os.fspath(src), os.fspath(dst)
    only, drop, tensors, exclude, dtype = map(several, (only, drop, tensors, exclude, dtype))
    rename = arguments.rules(rename, "--rename")
    max_shard_size = arguments.size(max_shard_size, "--max-shard-size")
    max_memory = arguments.memory(max_memory)
    target = _target(to, producer, dst)
    _check_arguments(dst, target, to_world, max_shard_size, tensor_class)
    making.check_apart(dst, src, model_from, optim_from)
    listed = None if manifest is None else os.fspath(manifest)
    manifests.check_wanted(listed, dst, is_file=target.is_file(dst), dry_run=dry_run)
    made = Conversion(src, "", dst, target.name, dry_run=dry_run)
    made.notes += making.check_free(dst, target, overwrite, dry_run)
    how = How(overwrite, dry_run, threads, max_memory, check, progress, resume, listed)
    with making.given(src, shapes, model_from, optim_from) as have:
        source = have.source
        with opening.naming(have.known):
            row = writable.choose(producer, source.catalogue, to_world) if producer is not None else None
            spell = _speller(row, target, optim_keys)
            laid, folded = _start(source.catalogue, only, drop, optim_keys, optim_root, spell)
            laid = _lay_out(laid, tensors, exclude, rename, strip_wrappers, strip_prefix)
            validate(source.catalogue, optimkeys.origins(laid) | folded)
            _check_matches("--dtype", [rule(text, "--dtype")[0] for text in dtype if "=" in text], laid)
            laid = layout.cast(laid, layout.caster(dtype))
            world = to_world or source.catalogue.world_size
            if row is not None:
                laid, target, tensor_class = _arranged(row, laid, source, dst, world, folded, tensor_class)
            laid = _rechunked(laid, source.catalogue, target, to_world)
        options = SinkOptions(max_shard_size, target.is_file(dst), world, tensor_class or "sharded_tensor")
        making.make(have, Laid(laid, options, frozenset(folded)), dst, target, made, how)
    if listed is not None and not dry_run:
        manifests.write_for(dst, listed, threads)
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
    return writable.as_format(writable.named(producer))


def _speller(
    row: WritableLayout | None, target: Format, optim_keys: str | None
) -> Callable[[Catalogue, Catalogue], Catalogue] | None:
    """What spells the optimizers as they are to be; None when they stay as they are."""
    if row is not None:
        if optim_keys not in (None, row.keys):
            raise UsageError(f"`--optim-keys {optim_keys}`: {row.name} has `{row.keys}`", hint="leave it out")
        return lambda laid, source: writable.spell_optimizers(row, laid, source)
    keys = optim_keys or ("fqn" if target.even else None)
    return None if keys is None else lambda laid, source: optimkeys.respell(laid, keys, source)


def _arranged(
    row: WritableLayout, laid: Catalogue, source: Source, dst: str, world: int, folded: set[Path],
    tensor_class: str | None,
) -> tuple[Catalogue, Format, str | None]:  # fmt: skip
    """The state as a framework keeps it, and the layout as a format that is written like any other."""
    if tensor_class is not None and not tensor_class.startswith("dtensor"):
        raise UsageError(
            f"`--tensor-class {tensor_class}`: {row.name} loads DTensors and nothing else",
            hint="name the device and the dimension of its mesh: `--tensor-class dtensor:cuda:fsdp`",
        )

    def read(tensor: Tensor) -> int | None:
        return _small_integer(source, tensor.origin or tensor)

    builder = LayoutBuilder(laid, Destination(world, FilePath(dst.rstrip("/")).name, read))
    output = row.build(builder)
    folded |= builder.folded
    output.catalogue.warnings = [*laid.warnings, *(Warning("framework", note) for note in builder.notes)]
    return output.catalogue, writable.as_format(row, output), tensor_class or row.tensor_class


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


def _check_arguments(
    dst: str,
    target: Format,
    to_world: int | None,
    max_shard_size: int | None,
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


def _start(
    source: Catalogue,
    only: Sequence[str],
    drop: Sequence[str],
    optim_keys: str | None,
    optim_root: str | None,
    spell: Callable[[Catalogue, Catalogue], Catalogue] | None,
) -> tuple[Catalogue, set[Path]]:
    """The parts that are wanted, the optimizer spelt as it is to be; and what stands in other values for that."""
    parts.stop_at_absent(source, only)
    laid = layout.start(source)
    if only or drop:
        # In one step: selecting can move a part, and both speak of the parts of the source.
        wanted = parts.matcher(only, source) if only else lambda part: True
        unwanted = parts.matcher(drop, source)
        laid = layout.select(laid, lambda e: wanted(e.part) and not unwanted(e.part))
    folded: set[Path] = set()
    if optim_keys is not None and not any(part.kind == "optimizer" for part in parts.parts(laid)):
        raise UsageError(f"`--optim-keys {optim_keys}`: there is no optimizer here")
    if spell is not None:
        _stop_at_faulty_part(source, laid)
        # The model that says what ids mean is the source's, whether it is wanted or not, by its own names.
        before = optimkeys.origins(laid)
        laid = spell(laid, source)
        folded = before - optimkeys.origins(laid)
    left = parts.parts(laid)
    if only and len(left) == 1:
        # First of all, so that every pattern below sees the names that will be written.
        laid = layout.without_root(laid, left[0])
    return (optimkeys.respell_root(laid, optim_root) if optim_root is not None else laid), folded


def _stop_at_faulty_part(source: Catalogue, laid: Catalogue) -> None:
    """What is wrong with an optimizer is said before it is looked at; a tensor may still be left out."""
    single = {entry.name for entry in source.entries.values()} if source.faults else set()
    whole = [fault for fault in source.faults if not single.issuperset(fault.facts.get("concerns", ()))]
    stop_at_fault(replace(source, faults=whole), map(dotted, optimkeys.origins(laid)))


def _lay_out(
    laid: Catalogue,
    tensors: Sequence[str],
    exclude: Sequence[str],
    rename: Sequence[str],
    strip_wrappers: bool,
    strip_prefix: str | None,
) -> Catalogue:
    making.check_not_empty(laid)
    _check_matches("--tensors", tensors, laid)
    _check_matches("--exclude", exclude, laid)
    if tensors or exclude:
        laid = layout.select(laid, layout.matching(tensors, exclude))
        making.check_not_empty(laid)
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
