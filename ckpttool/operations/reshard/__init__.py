"""The same checkpoint for another number of ranks or another mesh: other chunks, and what belongs to a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ckpttool import formats
from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Part, Path
from ckpttool.catalogue.patterns import rule, several
from ckpttool.catalogue.protocols import Format, SinkOptions
from ckpttool.catalogue.validation import validate
from ckpttool.errors import UsageError
from ckpttool.layout import rank_policies as policies
from ckpttool.layout import rechunk as chunking
from ckpttool.layout import select as layout
from ckpttool.layout.mesh import Mesh, parse_mesh, world_mesh
from ckpttool.layout.optimizer import respell as optimkeys
from ckpttool.layout.rechunk import Rules
from ckpttool.operations import arguments
from ckpttool.operations import manifest as manifests
from ckpttool.operations import write as making
from ckpttool.operations.reshard import engines
from ckpttool.operations.write import Conversion, Given, How, Laid
from ckpttool.producers import open as opening
from ckpttool.text import meant
from ckpttool.transfer import processes as sharing
from ckpttool.transfer.threads import Progress


@dataclass(slots=True)
class Resharding(Conversion):
    """The result of a reshard, or its plan."""

    world: int = 1  #: world size of DST
    mesh: str = ""  #: mesh of DST, such as `shard=4,tp=2`; with `--like`, the path of the other checkpoint
    engine: str = "bytes"  #: `bytes` or `mesh`
    why: str = ""  #: reason for the engine, for people; `asked for` with `--engine`
    processes: int = 1  #: number of processes that divided the work
    policies: list[str] = field(default_factory=list)  #: what became of the values of single ranks, for people


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the flags say, once they make sense: onto which mesh, or like which checkpoint."""

    mesh: Mesh | None
    like: str | None
    rules: Rules
    rng: str
    dataloader: str
    to: Format | None
    only: Sequence[str] = ()
    drop: Sequence[str] = ()


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
    manifest: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Resharding:
    """Write the checkpoint at `src` to `dst` with the chunks that another world or mesh has. See
    `docs/reference/cli.md`.

    Under torchrun, all processes call this with the same arguments and share the work; the result is complete in the
    process of rank 0. Nothing appears at `dst` unless all of it does; with `resume`, one process goes on from what an
    interrupted one has copied.
    Raises the errors of `ckpttool.errors`, each with its exit code.
    """
    began = time.monotonic()
    src, dst = os.fspath(src), os.fspath(dst)
    crew = sharing.meet()
    with crew.together():
        # Within, so that a mistake is told once.
        placed = [rule(text, "--placements") for text in arguments.rules(placements, "--placements")]
        rules = Rules(tuple(placed), tuple(several(shard)), tuple(several(replicate)))
        wanted = _understood(to_world, to_mesh, like, to, engine, rules, rng, dataloader)
        wanted = replace(wanted, only=several(only), drop=several(drop))
        memory = arguments.memory(max_memory)
        made = Resharding(src, "", dst, "", dry_run=dry_run, processes=crew.size)
        making.check_apart(dst, src, wanted.like)
        listed = None if manifest is None else os.fspath(manifest)
        how = How(overwrite, dry_run, threads, memory, check, progress, resume, listed)
        if crew.is_first:
            manifests.check_wanted(listed, dst, is_file=False, dry_run=dry_run)
            made.notes += making.check_free(dst, wanted.to or formats.FORMATS[0], overwrite, dry_run)
        with making.given(src, shapes) as have:
            target = wanted.to or _same(have.catalogue)
            laid = _laid(have, wanted, target, made)
            chosen = engines.choose(engine, laid, wanted.mesh, target, how, crew)
            if resume and (crew.size > 1 or chosen.name != "bytes"):
                raise UsageError(
                    "`--resume` goes on from copies of one process",
                    hint="leave it out, or run `ckpttool reshard --engine bytes --resume` without torchrun",
                )
            made.engine, made.why = chosen.name, chosen.why
            if crew.is_first or not dry_run:
                engines.write(chosen, have, laid, dst, target, made, how, crew)
        if listed is not None and crew.is_first and not dry_run:
            manifests.write_for(dst, listed, threads)
    made.seconds = time.monotonic() - began
    return made


# What is wanted -------------------------------------------------------------------------------------------------------


def _understood(
    to_world: int | None, to_mesh: str | None, like: str | os.PathLike[str] | None, to: str | None, engine: str | None,
    rules: Rules, rng: str, dataloader: str,
) -> _Wanted:  # fmt: skip
    given = [name for name, value in (("--to-world", to_world), ("--to-mesh", to_mesh), ("--like", like)) if value]
    if to_world is not None and to_world < 1:
        world_mesh(to_world)
    if len(given) != 1:
        said = " and ".join(f"`{name}`" for name in given) + " exclude each other" if given else "onto what?"
        raise UsageError(said, hint="pass one of `--to-world N`, `--to-mesh shard=4,tp=2` and `--like OTHER`")
    engines.check(engine)
    policies.check("rng", rng)
    policies.check("dataloader", dataloader)
    mesh = world_mesh(to_world) if to_world else parse_mesh(to_mesh) if to_mesh else None
    if mesh is None and rules != chunking.NO_RULES:
        raise UsageError("`--like` says where each tensor lies, and leaves nothing to a rule", hint="leave one out")
    target = _target(to) if to is not None else None
    return _Wanted(mesh, os.fspath(like) if like else None, rules, rng, dataloader, target)


def _target(to: str) -> Format:
    known = [row for row in formats.FORMATS if row.chunked]
    found = next((row for row in known if to == row.target), None)
    if found is None:
        names = ", ".join(f"`{row.target}`" for row in known)
        raise UsageError(
            f"`--to {to}`: chunks for ranks are written as one of {names}",
            hint=meant(to, [row.target for row in known], "`ckpttool convert` writes whole tensors"),
        )
    return found


def _same(source: Catalogue) -> Format:
    """The format of the source if it has chunks, else DCP: what one file becomes."""
    rows = {row.name: row for row in formats.FORMATS}
    found = rows.get(source.format)
    return found if found is not None and found.chunked else rows["dcp"]


# What comes of it -----------------------------------------------------------------------------------------------------


def _laid(have: Given, wanted: _Wanted, target: Format, made: Resharding) -> Laid:
    source = have.catalogue
    is_wanted = _parts(source, wanted)
    with opening.naming(have.known):
        if wanted.only or wanted.drop:
            parts.stop_at_absent(source, wanted.only)
            validate(source, {path for path, entry in source.entries.items() if is_wanted(entry.part)})
        else:
            validate(source)
    # What is left out may still say what is a parameter.
    laid = _select(layout.start(source), lambda part: is_wanted(part) or part.kind in ("model", "optimizer"))
    folded = frozenset[Path]()
    if target.even and any(part.kind == "optimizer" and is_wanted(part) for part in parts.parts(laid)):
        before = optimkeys.origins(laid)
        laid = optimkeys.respell(laid, "fqn", source)
        folded = frozenset(before - optimkeys.origins(laid))
    with ExitStack() as stack:
        if wanted.mesh is not None:
            mesh, made.mesh = wanted.mesh, str(wanted.mesh)
            _check_even(mesh, wanted.rules, target)
        else:
            other = _opened_like(stack, wanted.like or "", target)
            mesh, made.mesh = world_mesh(other.world_size), wanted.like or ""
        made.world = mesh.world
        for kind, policy in (("rng", wanted.rng), ("dataloader", wanted.dataloader)):
            laid, said = policies.applied(laid, kind, policy, mesh, files=target.even)
            made.policies += said
        if wanted.mesh is not None:
            laid = chunking.over_mesh(laid, mesh, wanted.rules, everywhere=target.even)
            laid = _rootless(_select(laid, is_wanted), wanted.only)
        else:
            laid = _select(laid, is_wanted)
            bare, there = _rootless(laid, wanted.only), {tensor.name for tensor in other.tensors}
            has_root = not any(tensor.name in there for tensor in bare.tensors)
            laid = chunking.like(laid if has_root else bare, other, made.mesh)
            laid = _rootless(laid, wanted.only) if has_root else laid
    making.check_not_empty(laid)
    return Laid(laid, SinkOptions(world=mesh.world), folded)


def _parts(source: Catalogue, wanted: _Wanted) -> Callable[[Part], bool]:
    chosen = parts.matcher(wanted.only, source) if wanted.only else lambda part: True
    unwanted = parts.matcher(wanted.drop, source)
    return lambda part: chosen(part) and not unwanted(part)


def _select(laid: Catalogue, is_wanted: Callable[[Part], bool]) -> Catalogue:
    if all(map(is_wanted, parts.parts(laid))):
        return laid
    made = layout.select(laid, lambda entry: is_wanted(entry.part))
    made.files, made.warnings = laid.files, laid.warnings
    return made


def _rootless(laid: Catalogue, only: Sequence[str]) -> Catalogue:
    """Of one part alone, the root is taken off the names."""
    left = parts.parts(laid)
    if not only or len(left) != 1:
        return laid
    made = layout.without_root(laid, left[0])
    made.files, made.warnings = laid.files, laid.warnings
    return made


def _opened_like(stack: ExitStack, path: str, target: Format) -> Catalogue:
    if target.even:
        raise UsageError(
            f"`--like` makes no sense for {target.target}, whose chunks are always those that FSDP1 makes",
            hint="use it with `--to dcp`",
        )
    other = stack.enter_context(making.given(path)).catalogue
    with opening.naming(path):
        validate(other)
    return other


def _check_even(mesh: Mesh, rules: Rules, target: Format) -> None:
    """FSDP1 cuts rows, over all ranks that load the file of their own; its hybrid sharding saves the same within each
    group, so that a world of one dimension is all that its files can say."""
    if target.even and (mesh.names != ("shard",) or rules.placements):
        raise UsageError(
            f"`--to {target.target}` takes a world of one dimension, cut by rows: FSDP1 loads no other",
            hint=f"`--to-world {mesh.world}`, or `--to dcp` for a mesh",
        )
