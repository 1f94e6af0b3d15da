"""`reshard`: the same checkpoint for another number of ranks or another mesh."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ckpttool import formats
from ckpttool.catalogue import parts
from ckpttool.catalogue.chosen import taken
from ckpttool.catalogue.entries import Catalogue, Part, Path
from ckpttool.catalogue.patterns import rule, several
from ckpttool.catalogue.protocols import Format, SinkOptions, Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import UsageError
from ckpttool.layout import rechunk, select
from ckpttool.layout.mesh import Mesh, parse_mesh, parse_placements, world_mesh
from ckpttool.layout.optimizer import respell
from ckpttool.layout.rank_policies import apply_policy, check_policy
from ckpttool.layout.rechunk import Rules
from ckpttool.layout.rename import rooted, without_root
from ckpttool.layout.selection import Selection, check_not_empty
from ckpttool.operations import arguments, publish, write, written
from ckpttool.operations.reshard import engines
from ckpttool.operations.reshard.twins import find_twins
from ckpttool.operations.write import Conversion, OpenSource, Planned, WriteOptions
from ckpttool.producers.open import naming
from ckpttool.reports import page_file
from ckpttool.reports.report import Facts
from ckpttool.serialization import sharded_pickle
from ckpttool.serialization.unpickler import no_garbage_collection
from ckpttool.storage.stores import is_remote, path_text
from ckpttool.text import meant, plural
from ckpttool.transfer import agreement, processes
from ckpttool.transfer.threads import Progress


@dataclass(slots=True, repr=False)
class Resharding(Conversion):
    """The result of a reshard, or its plan."""

    command = "reshard"

    world_size: int = 1  #: world size of DST
    mesh: str = ""  #: mesh of DST, such as `shard=4,tp=2`; with `--like`, the path of the other checkpoint
    engine: str = "bytes"  #: `bytes` or `mesh`
    why: str = ""  #: `asked for` with `--engine`, and the accelerator of the shards; else `the default`
    policies: list[str] = field(default_factory=list)  #: what became of the values of single ranks, for people

    @property
    def facts(self) -> Iterator[tuple[str, str]]:
        """The layout, the engine, and what became of the values of single ranks."""
        yield "layout", f"{plural(self.world_size, 'rank')}, {self.mesh}"
        shared = f", {self.processes} processes" if self.processes > 1 else ""
        yield "engine", f"{self.engine}{shared}"
        yield from (("per rank", policy) for policy in self.policies)


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """The options of a reshard, parsed: the mesh, or the path of the checkpoint whose layout is copied."""

    mesh: Mesh | None
    typed: str  # the mesh, as it was typed
    like: str | None
    rules: Rules
    rng: str
    dataloader: str
    selection: Selection


def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to_world: int | None = None,
    to_mesh: str | None = None,
    like: str | os.PathLike[str] | None = None,
    to: str | None = None,
    engine: str | None = None,
    placements: str | Sequence[str] = (),
    shard: str | Sequence[str] = (),
    replicate: str | Sequence[str] = (),
    rng: str = "keep",
    dataloader: str = "keep",
    only: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    shapes: str | None = None,
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
    html: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Resharding:
    """Write the checkpoint at `src` to `dst` sharded for another number of ranks or mesh.

    Under torchrun, all processes call this with the same arguments and share the work; the result is complete in the
    process of rank 0. Nothing appears at `dst` unless all of it does; with `resume`, one process goes on from what an
    interrupted one has copied.

    Args:
        src: the checkpoint to read, which is never changed: a file, a directory, a run directory or
            `hf://org/name[/path]`.
        dst: the file or directory to write, with missing parents, or `hf://org/name[@branch][/path]`, in one commit, or
            `hf://buckets/org/name/path`.
        to_world: number of ranks to shard for, as FSDP2 does.
        to_mesh: mesh to shard for, such as `shard=4,tp=2` or `replicate=2,shard=4`, in place of `to_world`.
        like: a checkpoint whose sharding and ranks to use, in place of both.
        to: the format, `dcp` or `fsdp1`; None keeps that of `src`, and makes `dcp` of a single file.
        engine: `bytes` copies between files; `mesh`, under torchrun with one process per rank, loads into torch and
            saves with DCP. None is `bytes`.
        placements: rules `GLOB=DIM:N` that shard parameters over the mesh dimension DIM along tensor dimension N;
            `@FILE` reads rules.
        shard: globs of tensors to shard although they are not parameters.
        replicate: globs of tensors to replicate although they are parameters.
        rng: what becomes of the random states of the ranks: `keep`, `rank0` or `drop`.
        dataloader: what becomes of the data loaders' states of the ranks: `keep` or `drop`.
        only: parts to include, by kind (`model`, `optimizer`, ...) or by key; a string, or several. All without any.
        drop: parts to exclude, likewise.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.
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
        html: an HTML file to write: how each tensor lies before and after, also with `dry_run`.
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
    with processes.coordinated() as coordinator:
        agreement.check_call(coordinator, passed)
        arguments.check_source(src, dst)
        memory, other = arguments.memory(max_memory), arguments.path(like) or None
        rules = Rules(_placements(placements), tuple(several(shard)), tuple(several(replicate)))
        mesh = _mesh(to_world, to_mesh, other, rules)
        options = ReshardOptions(mesh, to_mesh or "", other, rules, rng, dataloader, arguments.selection(only, drop))
        if engine is not None and engine not in engines.ENGINES:
            raise UsageError(f"there is no engine `{engine}`", hint=meant(engine, engines.ENGINES, "`bytes` or `mesh`"))
        check_policy("rng", rng)
        check_policy("dataloader", dataloader)
        row = _target(to) if to is not None else None
        listed = arguments.manifest(manifest, dst)
        copies = publish.check_in_store(in_store)
        how = WriteOptions(overwrite, dry_run, threads, memory, check, progress, resume, *listed, in_store=copies)
        hub = publish.options(private, public, tag, commit_message, arguments.path(stage), not_secret)
        if is_remote(dst) and engine == "mesh":
            message = f"`{dst}`: `--engine mesh` writes to this machine only"
            raise UsageError(message, hint="leave it out, or run `ckpttool reshard --engine bytes`")
        target, is_first = row or formats.FORMATS[0], coordinator.is_first
        page, began = page_file.checked(html), time.monotonic()
        with ExitStack() as stack:
            place = stack.enter_context(publish.place(dst, hub, token, how, coordinator, src, other))
            result = Resharding(src, "", place.path, "", dry_run=dry_run, processes=coordinator.size)
            how = place.options
            stack.enter_context(write.destination(result, target, how, is_first=is_first))
            opened = stack.enter_context(write.open_sources(src, shapes))
            agreement.share_source(coordinator, src, opened.source.catalogue)
            target = row or _same_format(opened.source.catalogue)
            planned = _plan(opened, options, target, result)
            if row is None:
                tensor_class, lost = sharded_pickle.class_of(opened.source.catalogue)
                planned.catalogue.warnings += lost
                planned = replace(planned, options=replace(planned.options, tensor_class=tensor_class))
            job = write.Write(opened, planned, target, result, how, coordinator)
            chosen = engines.choose(engine, job, mesh)
            if resume and (coordinator.size > 1 or chosen.name != "bytes"):
                raise UsageError(
                    "`--resume` cannot be used with several processes or `--engine mesh`",
                    hint="leave it out, or run `ckpttool reshard --engine bytes --resume` without torchrun",
                )
            result.engine, result.why = chosen.name, chosen.why
            if is_first or not dry_run:
                engines.write(chosen, job)
            place.send(result)
            if page is not None and is_first:
                result.seconds = time.monotonic() - began
                page_file.write(_page(result, opened.source), page)
    return result


def _page(result: Resharding, source: Source) -> str:
    """Return the page of a reshard, done or planned, with the layouts of both checkpoints if they are known."""
    from ckpttool.reports import description
    from ckpttool.reports.page import Book, render, sections

    before = source.catalogue
    ranks = [plural(max(one, 1), "rank") for one in (before.world_size, result.world_size)]
    path = shlex.join([result.source, result.destination])
    book = Book.of_catalogue("reshard", path, before, f"{ranks[0]} to {ranks[1]}")
    book.verdict, book.after = result.message, result._layout
    listed = [] if result.dry_run else [written.files(result)]
    notes = Facts([("note", note) for note in result.notes], "Notes")
    after = sections([*written.blocks(result, verbose=True), *listed, notes])
    book.sections = [*after, *sections(description.on_page(before, source, title="Before"))]
    return render(book)


# The options ----------------------------------------------------------------------------------------------------------


def _placements(value: str | Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(rule(text, "--placements") for text in arguments.rules(value, "--placements"))


def _mesh(to_world: int | None, to_mesh: str | None, like: str | None, rules: Rules) -> Mesh | None:
    """Return the mesh to shard for; None with `--like`. Raises UsageError unless there is one of the three."""
    if to_world is not None:
        world_mesh(to_world)
    given = [name for name, value in (("--to-world", to_world), ("--to-mesh", to_mesh), ("--like", like)) if value]
    if len(given) != 1:
        names = " and ".join(f"`{name}`" for name in given)
        message = f"{names} exclude each other" if given else "no target layout is given"
        raise UsageError(message, hint="pass one of `--to-world N`, `--to-mesh shard=4,tp=2` and `--like OTHER`")
    if like and rules != rechunk.NO_RULES:
        hint = "leave one out"
        raise UsageError("`--like` copies the layout of every tensor and cannot be combined with rules", hint=hint)
    return world_mesh(to_world) if to_world else parse_mesh(to_mesh) if to_mesh else None


def _mesh_notes(mesh: Mesh, rules: Rules, typed: str) -> Iterator[str]:
    """Yield what is not obvious of a mesh: what `dp` is, and that no tensor is sharded over `tp` by itself."""
    if re.search(r"(^|,)\s*dp=", typed):
        yield "`dp` is `shard`, over which FSDP cuts parameters; over `replicate` they are copied, as DDP does"
    if mesh.size.get("tp", 1) > 1 and not any("tp" in parse_placements(text, mesh) for _, text in rules.placements):
        yield "no tensor is sharded over `tp`: `--placements 'layers.*.wq.weight=tp:0'` shards those that match"


def _target(to: str) -> Format:
    known = [row for row in formats.FORMATS if row.chunked]
    target = next((row for row in known if to == row.target), None)
    if target is None:
        names = ", ".join(f"`{row.target}`" for row in known)
        raise UsageError(
            f"`--to {to}`: chunks for ranks are written as one of {names}",
            hint=meant(to, [row.target for row in known], "`ckpttool convert` writes whole tensors"),
        )
    return target


def _same_format(source: Catalogue) -> Format:
    """Return the format of the source if it has chunks, else DCP."""
    same = (row for row in formats.FORMATS if row.name == source.format and row.chunked)
    return next(same, formats.named("dcp"))


# The layout -----------------------------------------------------------------------------------------------------------


@no_garbage_collection()
def _plan(opened: OpenSource, options: ReshardOptions, target: Format, result: Resharding) -> Planned:
    source, selection = opened.source.catalogue, options.selection
    is_wanted = selection.wanted_parts(source)
    with naming(opened.path):
        if selection.only or selection.drop:
            parts.stop_at_absent(source, selection.only)
            validate(source, {path for path, entry in source.entries.items() if is_wanted(entry.part)})
        else:
            validate(source)
    # An optimizer needs the model to know its parameters, also where the model is dropped.
    planned = _select(select.start(source), lambda part: is_wanted(part) or part.kind in ("model", "optimizer"))
    folded = frozenset[Path]()
    if target.even and any(part.kind == "optimizer" and is_wanted(part) for part in parts.parts(planned)):
        before = respell.origins(planned)
        planned = respell.respell(planned, "fqn", source)
        folded = frozenset(before - respell.origins(planned))
    with ExitStack() as stack:
        if options.mesh is not None:
            mesh, result.mesh = options.mesh, str(options.mesh)
            result.notes += _mesh_notes(options.mesh, options.rules, options.typed)
            _check_even(mesh, options.rules, target)
        else:
            other = _opened_like(stack, options.like or "", target)
            mesh, result.mesh = world_mesh(other.world_size), options.like or ""
        result.world_size = mesh.world
        for kind, policy in (("rng", options.rng), ("dataloader", options.dataloader)):
            planned, notes = apply_policy(planned, kind, policy, mesh, files=target.even)
            result.policies += notes
        if options.mesh is not None:
            twins = find_twins(opened.source, planned, everywhere=target.even)
            chunked = rechunk.over_mesh(planned, mesh, options.rules, everywhere=target.even, twins=twins)
            planned = _without_root(_select(chunked, is_wanted), selection.only)
            planned.files = chunked.files
        else:
            planned = _select(planned, is_wanted)
            bare, names = _without_root(planned, selection.only), {tensor.name for tensor in other.tensors}
            has_root = not any(tensor.name in names for tensor in bare.tensors)
            planned = rechunk.like(planned if has_root else bare, other, result.mesh)
            planned = _without_root(planned, selection.only) if has_root else planned
    check_not_empty(planned, source)
    if options.mesh is not None and not selection.only:
        planned = rooted(planned)
    return Planned(planned, SinkOptions(world=mesh.world), folded)


def _select(planned: Catalogue, is_wanted: Callable[[Part], bool]) -> Catalogue:
    if all(map(is_wanted, parts.parts(planned))):
        return planned
    return select.select(planned, lambda entry: is_wanted(entry.part))


def _without_root(planned: Catalogue, only: Sequence[str]) -> Catalogue:
    """Return the catalogue with the part's root removed from the names, if there is one part alone."""
    left = parts.parts(planned)
    return without_root(planned, left[0]) if only and len(left) == 1 else planned


def _opened_like(stack: ExitStack, path: str, target: Format) -> Catalogue:
    if target.even:
        raise UsageError(
            f"`--like` cannot be used with `--to {target.target}`, whose chunks are always those of FSDP1",
            hint="use it with `--to dcp`",
        )
    other = stack.enter_context(write.open_sources(path)).source.catalogue
    with naming(taken(path, other)):
        validate(other)
    return other


def _check_even(mesh: Mesh, rules: Rules, target: Format) -> None:
    """Raise UsageError for a mesh that FSDP1's files cannot express: it shards rows over all ranks, and its hybrid
    sharding saves the same within each group."""
    if target.even and (mesh.names != ("shard",) or rules.placements):
        raise UsageError(
            f"`--to {target.target}` takes a world of one dimension, sharded by rows: FSDP1 loads no other",
            hint=f"`--to-world {mesh.world}`, or `--to dcp` for a mesh",
        )
