"""`convert`: selects parts and tensors, renames and casts them, and cuts them into chunks. `write` does the rest."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from ckpttool import formats
from ckpttool.catalogue import boxes, parts, quantization
from ckpttool.catalogue.entries import Catalogue, Path, Tensor, dotted
from ckpttool.catalogue.protocols import TENSOR_CLASS, Format, SinkOptions, Source
from ckpttool.catalogue.validation import stop_at_fault, validate
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import UsageError
from ckpttool.layout import rechunk, select
from ckpttool.layout.dtype_rules import cast, caster, general, left_scales
from ckpttool.layout.mesh import world_mesh
from ckpttool.layout.optimizer import respell
from ckpttool.layout.rename import rename_entries, rooted, without_root
from ckpttool.layout.selection import Selection, check_dtypes, check_not_empty, filtered, renamed_by, stripper
from ckpttool.layout.views import Viewed
from ckpttool.models import float32_names, mapped_state, start
from ckpttool.models import reference as references
from ckpttool.operations import arguments, publish, write
from ckpttool.operations.arguments import DtypeOfTorch
from ckpttool.operations.write import Conversion, Planned, WriteOptions
from ckpttool.producers import writable
from ckpttool.producers.arrange import LayoutBuilder
from ckpttool.producers.components import WritableLayout
from ckpttool.producers.open import naming
from ckpttool.serialization import sharded_pickle
from ckpttool.serialization.unpickler import no_garbage_collection
from ckpttool.storage import files
from ckpttool.storage.stores import local_path, path_text
from ckpttool.text import is_or_are, plural, some
from ckpttool.transfer import agreement, processes
from ckpttool.transfer.processes import Coordinator
from ckpttool.transfer.read import ChunkReader
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
    dtype: str | DtypeOfTorch | Sequence[str | DtypeOfTorch] = (),
    max_shard_size: int | str | None = None,
    to_world: int | None = None,
    tensor_class: str | None = None,
    optim_keys: str | None = None,
    optim_root: str | None = None,
    shapes: str | None = None,
    model_from: str | None = None,
    optim_from: str | None = None,
    like: str | os.PathLike[str] | None = None,
    key_map: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    max_memory: int | str | None = None,
    check: bool = False,
    manifest: str | os.PathLike[str] | bool | None = None,
    private: bool = False,
    public: bool = False,
    tag: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
    stage: str | os.PathLike[str] | None = None,
    in_store: str = "auto",
    not_secret: str | Sequence[str] = (),
    shared: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the checkpoint at `src` to the format `to` at `dst`, bit for bit.

    Nothing appears at `dst` unless all of it does. Sizes of the result are in bytes.

    Args:
        src: the checkpoint to read, which is never changed: a file, a directory, a run directory or
            `hf://org/name[/path]`.
        dst: the file or directory to write, with missing parents, or `hf://org/name[@branch][/path]`, in one commit, or
            `hf://buckets/org/name/path`.
        to: the format, `torch`, `dcp`, `safetensors` or `fsdp1`; None goes by the suffix of `dst`.
        producer: a framework whose directory layout to write in place of `to`: `accelerate`, `torchtitan`, `verl`,
            `trainer` or `deepspeed`.
        only: parts to include, by kind (`model`, `optimizer`, ...) or by key; a string, or several. All without any.
        drop: parts to exclude, likewise.
        tensors: globs of dotted names of the tensors to include, where `*` also matches dots, or `re:` and a regular
            expression; all without any.
        exclude: globs of names to exclude, likewise.
        rename: rules `OLD=NEW`, in which `*` captures; `@FILE` reads rules.
        strip_wrappers: whether to remove the wrappers of DDP, FSDP and `torch.compile`, such as `module.`, from names.
        strip_prefix: a prefix to remove from the names of the model.
        dtype: dtypes to cast floating-point tensors to: `bfloat16` (also as `torch.bfloat16`), or `norm*=float32` for
            some; the first match applies.
        max_shard_size: most bytes of a file, a number or text such as `5GB`; None does not split.
        to_world: number of ranks to shard for (`dcp` and `fsdp1`); None keeps the shards.
        tensor_class: class of sharded tensors, `sharded_tensor`, `dtensor`, `dtensor:DEVICE` or `dtensor:DEVICE:NAME`
            (`fsdp1`).
        optim_keys: style of optimizer keys: `fqn`, `id` or `flat`; None keeps that of `src`, except for `fsdp1`.
        optim_root: key to store the optimizer under.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.
        model_from: a checkpoint to read the model from in place of `src`.
        optim_from: a checkpoint to read the optimizer from in place of `src`.
        like: a checkpoint of a run, whose names, dtypes and number of ranks the model of `src` gets, as a start from
            released weights.
        key_map: the name of a key map, a `.json` file, or `none`: the parameters become those that it makes of them,
            and the state of the optimizers follows. With `like`, how the names of `src` become those of the run, or
            the other way round; None takes the one that fits best.
        overwrite: whether to replace `dst`; the old one is kept until the new one is complete.
        resume: whether to go on from what an interrupted run has copied.
        dry_run: whether to return the plan and write nothing.
        threads: number of threads that read and write; None chooses it.
        max_memory: most bytes of the process, a number or text such as `2GB`; None limits the buffers alone.
        check: whether to compare `dst` with `src` before it is put in its place.
        manifest: path of a manifest of `dst` to write: SHA-256 of each file and tensor. A DCP directory carries one
            of its own, unless this is False.
        private: whether to refuse a repository that is public.
        public: whether a repository that is created is public.
        tag: a tag for the commit, which must not exist in the repository.
        commit_message: message of the commit.
        token: the value of `HF_TOKEN` while this runs.
        stage: directory for files of DST that are on their way to a store; None uses `TMPDIR`.
        in_store: `auto`, or `never` to have no bytes copied by the object store that `src` and `dst` lie in.
        not_secret: names of values to send although they seem to have a key or a token in them.
        shared: whether all processes that torchrun started call this, with the same arguments, and divide the work; the
            result is complete in the process of rank 0.
        progress: called with the bytes done and the bytes in all, several times a second, from this thread.

    Raises:
        UsageError: if the arguments do not fit each other or the checkpoint.
        ReadError: if there is no checkpoint at `src`, or it cannot be read.
        CorruptError: if it is damaged; then nothing is written.
        LossError: if something of it cannot be kept and was not excluded.
        OverwriteError: if `dst` exists, without `overwrite`.
        StorageError: if `dst` cannot be written, or does not fit on the disk.
        RemoteError: if the Hub cannot be reached, or refuses.
    """
    passed = locals()
    src, dst = path_text(src), path_text(dst)
    # In the block, so that a mistake is reported by one process.
    with processes.coordinated() if shared else nullcontext(Coordinator()) as coordinator:
        agreement.check_call(coordinator, passed)
        if coordinator.size > 1 and resume:
            raise UsageError("`--resume` is for one process", hint="run `ckpttool convert` without torchrun")
        arguments.check_source(src, dst)
        selection = arguments.selection(only, drop, tensors, exclude, rename, strip_wrappers, strip_prefix)
        most, memory = arguments.max_shard_size(max_shard_size), arguments.memory(max_memory)
        run = arguments.path(like)
        options = ConvertOptions(
            selection,
            arguments.dtypes(dtype),
            most,
            to_world,
            tensor_class,
            optim_keys,
            optim_root,
            producer,
            run,
            key_map,
        )
        how = WriteOptions(
            overwrite,
            dry_run,
            threads,
            memory,
            check,
            progress,
            resume,
            *arguments.manifest(manifest, dst),
            in_store=publish.check_in_store(in_store),
        )
        hub = publish.options(private, public, tag, commit_message, arguments.path(stage), not_secret)
        sources = (src, model_from, optim_from)
        with publish.place(dst, hub, token, how, coordinator, *sources) as place:
            target = _target(to, producer, place.path)
            _check_arguments(place.path, target, options)
            _check_like(options, model_from, optim_from)
            result = Conversion(src, "", place.path, target.name, processes=coordinator.size, dry_run=dry_run)
            with (
                write.destination(result, target, place.options, run, is_first=coordinator.is_first),
                write.open_sources(src, shapes, model_from, optim_from) as opened,
                ExitStack() as stack,
            ):
                agreement.share_source(coordinator, src, opened.source.catalogue)
                reference = references.read(stack, run, is_run=True) if run is not None else None
                with naming(opened.path):
                    if reference is not None:
                        viewed = Viewed(opened.source)
                        opened = replace(opened, source=viewed)
                        result.notes += reference.notes
                        planned = _plan_like(viewed, src, reference, place.path, target, options, result.notes)
                        result.notes.append(start.NO_OPTIMIZER)
                    else:
                        if options.maps:
                            opened = replace(opened, source=Viewed(opened.source))
                        planned, target = _plan(opened.source, place.path, target, options)
                job = write.Write(opened, planned, target, result, place.options, coordinator)
                if coordinator.is_first or not dry_run:
                    job.run()
                place.send(result)
    return result


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What to convert, and into what: the options of `convert` that say so."""

    selection: Selection
    dtype: Sequence[str]
    max_shard_size: int | None
    to_world: int | None
    tensor_class: str | None
    optim_keys: str | None
    optim_root: str | None
    producer: str | None
    like: str | None
    key_map: str | None

    @property
    def maps(self) -> bool:
        """Whether a key map is applied to the whole state, and not to a model alone."""
        return self.like is None and self.key_map not in (None, "none")


def _check_like(options: ConvertOptions, *others: str | None) -> None:
    """Raise UsageError for options that `--like`, which makes a model and nothing else, or `--map` cannot be used
    with."""
    if options.maps:
        given = {"--producer": options.producer, "--model-from": others[0], "--optim-from": others[1]}
        for flag in given:
            if given[flag] is not None:
                raise UsageError(f"`--map` and `{flag}` cannot be used together", hint="convert twice, each with one")
        if options.optim_keys == "id":
            raise UsageError(
                "`--map` and `--optim-keys id` cannot be used together: ids depend on the order of the parameters, "
                "which a map does not define",
                hint="leave it out: torch's `set_optimizer_state_dict` and `ckpttool.load` take names",
            )
    if options.like is None:
        return
    selection = options.selection
    for flag, value in (
        ("--producer", options.producer),
        ("--drop", selection.drop),
        ("--tensors", selection.tensors),
        ("--optim-keys", options.optim_keys),
        ("--optim-root", options.optim_root),
        ("--model-from", others[0]),
        ("--optim-from", others[1]),
    ):
        if value:
            raise UsageError(f"`--like` and `{flag}` cannot be used together", hint="convert the result once more")


def _plan_like(
    viewed: Viewed,
    src: str,
    run: references.Reference,
    dst: str,
    target: Format,
    options: ConvertOptions,
    notes: list[str],
) -> Planned:
    """Return the model of the source as the run has it."""
    planned = start.model(viewed, src, run, options.selection, options.key_map, notes, dtypes=not options.dtype)
    check_dtypes(options.dtype, planned)
    planned = _cast(planned, viewed.catalogue, options.dtype) if options.dtype else planned
    assert run.source is not None
    world = options.to_world or run.source.catalogue.world_size
    planned = _rechunked(planned, viewed.catalogue, target, world)
    sink = SinkOptions(options.max_shard_size, target.is_file(dst), world, options.tensor_class or "sharded_tensor")
    return Planned(planned, sink, start.read(viewed, planned))


@no_garbage_collection()
def _plan(source: Source, dst: str, target: Format, options: ConvertOptions) -> tuple[Planned, Format]:
    """Return what to write, and its format: a framework's layout is a format of its own."""
    catalogue = source.catalogue
    row = writable.choose(options.producer, catalogue, options.to_world) if options.producer is not None else None
    if isinstance(row, Format):
        # One file, or a directory that one format writes.
        target, row = row, None
    # A map is about names.
    spell = _speller(None, target, "fqn") if options.maps else _speller(row, target, options.optim_keys)
    planned, folded = _start(catalogue, options, spell)
    selection = options.selection
    check_not_empty(planned, catalogue)
    (planned,) = filtered(selection, planned)
    check_not_empty(planned, catalogue)
    if selection.strip_wrappers or selection.strip_prefix:
        planned = rename_entries(planned, stripper(selection, planned), within_parts=True)
    planned = renamed_by(planned, selection.rename)
    validate(catalogue, respell.origins(planned) | folded)
    uses_operations = False
    if isinstance(source, Viewed):
        assert options.key_map is not None
        keys = options.optim_keys or ("fqn" if target.even else None)
        planned, merged, uses_operations = mapped_state.mapped(planned, source, options.key_map, keys)
        folded |= merged
    check_dtypes(options.dtype, planned)
    planned = _cast(planned, catalogue, options.dtype)
    world, tensor_class = options.to_world or catalogue.world_size, options.tensor_class
    if selection.only:
        planned.facts = {name: fact for name, fact in planned.facts.items() if name != "root"}
    elif row is None and target.name != catalogue.format:
        planned = rooted(planned)
    if row is not None:
        planned, target = _arranged(row, planned, source, dst, options, folded)
        tensor_class = tensor_class or row.tensor_class
    elif options.producer is not None and tensor_class is None and target.name == catalogue.format:
        tensor_class, lost = sharded_pickle.class_of(catalogue)
        planned.warnings = [*planned.warnings, *lost]
    # The boxes of what operations make are small: they are put together.
    planned = _rechunked(planned, catalogue, target, world if uses_operations else options.to_world)
    sink = SinkOptions(options.max_shard_size, target.is_file(dst), world, tensor_class or "sharded_tensor")
    return Planned(planned, sink, frozenset(folded)), target


def _cast(planned: Catalogue, catalogue: Catalogue, rules: Sequence[str]) -> Catalogue:
    """Return the tensors with their new dtypes. What the library of the model keeps in float32 is cast, too, which is
    noted: a training state is loaded by its framework, in the dtype that it has. So are scales that are not."""
    if not rules:
        return planned
    wanted = general(rules)
    if wanted is None:
        return cast(planned, caster(rules))
    classes = catalogue.facts.get("architectures") or [None]
    scales = quantization.analyse(planned, {}).companions
    asked = cast(planned, caster(rules, scales=scales))
    kept = cast(planned, caster(rules, float32_names.kept(classes[0], wanted), scales))
    if left := left_scales(planned, rules, scales):
        text = (
            f"{plural(len(left), 'scale')} of quantised weights {is_or_are(left)} not cast: {some(left)}; "
            f"`--dtype '*{left[0].rpartition('.')[2]}={wanted}'` casts such"
        )
        asked.warnings = [*asked.warnings, Warning("framework", text)]
    rounded = [one.name for one, other in zip(asked.tensors, kept.tensors, strict=True) if one.dtype != other.dtype]
    if rounded:
        text = (
            f"{plural(len(rounded), 'tensor')} that transformers or diffusers keeps in float32 will be {wanted}: "
            f"{some(rounded)}; `--dtype '*{rounded[0].rpartition('.')[2]}=float32'` keeps such"
        )
        asked.warnings = [*asked.warnings, Warning("framework", text)]
    return asked


def _target(to: str | None, producer: str | None, dst: str) -> Format:
    if producer is None:
        return formats.writable(to, dst)
    if to is not None:
        raise UsageError(
            f"`--producer {producer}` and `--to {to}` cannot be used together",
            hint="a producer's layout has formats of its own; leave `--to` out",
        )
    return writable.as_format(writable.named(producer))


def _speller(
    row: WritableLayout | None, target: Format, optim_keys: str | None
) -> Callable[[Catalogue, Catalogue], Catalogue] | None:
    """Return the function that respells the optimizers' keys; None when they stay as they are."""
    if row is not None:
        if optim_keys not in (None, row.keys):
            raise UsageError(f"`--optim-keys {optim_keys}`: {row.name} has `{row.keys}`", hint="leave it out")
        return lambda planned, source: writable.spell_optimizers(row, planned, source)
    keys = optim_keys or ("fqn" if target.even else None)
    return None if keys is None else lambda planned, source: respell.respell(planned, keys, source)


def _arranged(
    row: WritableLayout, planned: Catalogue, source: Source, dst: str, options: ConvertOptions, folded: set[Path]
) -> tuple[Catalogue, Format]:
    """Return the state as a framework stores it, and that framework's layout as a format. What is folded into other
    entries is added to `folded`."""
    if options.tensor_class is not None and not options.tensor_class.startswith("dtensor"):
        hint = "name the device and the dimension of its mesh: `--tensor-class dtensor:cuda:fsdp`"
        raise UsageError(f"`--tensor-class {options.tensor_class}`: {row.name} loads only DTensors", hint=hint)

    world = options.to_world or source.catalogue.world_size
    builder = LayoutBuilder(planned, world, local_path(dst).name, partial(_small_integer, source))
    output = row.build(builder)
    folded |= builder.folded
    output.catalogue.warnings = [*planned.warnings, *(Warning("framework", note) for note in builder.notes)]
    return output.catalogue, writable.as_format(row, output)


def _small_integer(source: Source, tensor: Tensor) -> int | None:
    """Return the value of a counter, which some frameworks save as a tensor."""
    tensor = tensor.origin or tensor
    is_float = tensor.dtype.name == "float32"  # as optimizers have their steps
    if tensor.shape not in ((), (1,)) or not (is_float or tensor.dtype.kind == "int") or not tensor.chunks:
        return None
    with closing(files.Pool()) as pool:
        bits = ChunkReader(source, pool, tensor, tensor.chunks.at(0)).read(boxes.whole(tensor.shape))
    if is_float:
        (number,) = struct.unpack("<f", bits)
        return int(number) if number.is_integer() else None
    return int.from_bytes(bits, "little", signed=tensor.dtype.name.startswith("int"))


def _check_arguments(dst: str, target: Format, options: ConvertOptions) -> None:
    if options.to_world is not None:
        world_mesh(options.to_world)
    for flag, value, field, reason in (
        ("--tensor-class", options.tensor_class, "even", ""),
        ("--to-world", options.to_world, "chunked", " (whole tensors)"),
        ("--max-shard-size", options.max_shard_size, "splits", ""),
    ):
        if value is not None and not getattr(target, field):
            known = formats.options(row for row in formats.FORMATS if getattr(row, field))
            text = f"`{flag}` cannot be used with `--to {target.target}`{reason}"
            raise UsageError(text, hint=f"use it with {known}")
    if options.tensor_class is not None and not TENSOR_CLASS.fullmatch(options.tensor_class):
        raise UsageError(
            f"there is no tensor class `{options.tensor_class}`",
            hint="one of `sharded_tensor`, `dtensor`, `dtensor:DEVICE`, `dtensor:DEVICE:NAME`",
        )
    if options.max_shard_size is not None and target.is_file(dst):
        raise UsageError(f"`{dst}` is one file, which `--max-shard-size` cannot split", hint="name a directory instead")


def _start(
    source: Catalogue, options: ConvertOptions, spell: Callable[[Catalogue, Catalogue], Catalogue] | None
) -> tuple[Catalogue, set[Path]]:
    """Return the selected parts with the optimizers' keys respelled, and the entries that this folded into others."""
    selection = options.selection
    parts.stop_at_absent(source, selection.only)
    named = select.spread(source) if selection.only else source
    planned = select.start(named)
    if selection.only or selection.drop:
        # In one step: selecting can move a part, and both options name the parts of the source.
        is_wanted = selection.wanted_parts(named)
        planned = select.select(planned, lambda entry: is_wanted(entry.part))
    folded: set[Path] = set()
    if options.optim_keys is not None and not any(part.kind == "optimizer" for part in parts.parts(planned)):
        raise UsageError(f"`--optim-keys {options.optim_keys}`: there is no optimizer here")
    if spell is not None:
        _stop_at_faulty_part(source, planned)
        # The ids refer to the model of the source, selected or not, by its own names.
        before = respell.origins(planned)
        planned = spell(planned, source)
        folded = before - respell.origins(planned)
    left = parts.parts(planned)
    if selection.only and len(left) == 1:
        # Before anything else, so that every rule below sees the names that will be written.
        planned = without_root(planned, left[0])
    if options.optim_root is not None:
        planned = respell.respell_root(planned, options.optim_root)
    return planned, folded


def _stop_at_faulty_part(source: Catalogue, planned: Catalogue) -> None:
    """Raise the fault of an optimizer before its keys are parsed; a damaged tensor may still be excluded."""
    single = {entry.name for entry in source.entries.values()} if source.faults else set()
    whole = [fault for fault in source.faults if not single.issuperset(fault.facts.get("concerns", ()))]
    stop_at_fault(replace(source, faults=whole), map(dotted, respell.origins(planned)))


def _rechunked(planned: Catalogue, source: Catalogue, target: Format, to_world: int | None) -> Catalogue:
    if not target.chunked:
        return rechunk.whole(planned)
    if to_world is not None or target.even:
        return rechunk.over_world(planned, to_world or source.world_size, everywhere=target.even)
    return rechunk.as_stored(planned, [f.rank for f in source.files])
