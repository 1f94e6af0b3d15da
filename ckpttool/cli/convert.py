"""`ckpttool convert`: one format into another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli.options import (
    AsJson,
    Quiet,
    Shapes,
    Tensors,
    Verbose,
    complete_format,
    complete_part,
    complete_producer,
)
from ckpttool.cli.progress import Progress
from ckpttool.cli.terminal import Painted, Piece, Terminal, bold, dim, err, out
from ckpttool.wording import duration, plural, size

if TYPE_CHECKING:
    from ckpttool.verbs import Conversion

_SHOWN = 20


def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to read. It is never touched.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The file or directory to write, like `cp`.")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            autocompletion=complete_format,
            help="torch, dcp, safetensors or fsdp1; by default what the suffix of DST says.",
        ),
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option(
            "--producer",
            metavar="NAME",
            autocompletion=complete_producer,
            help="As a framework resumes from it: accelerate, torchtitan, verl or trainer. In place of --to.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PART",
            autocompletion=complete_part,
            help="Only this part (model, optimizer, ...; or its key). Repeatable.",
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="PART", autocompletion=complete_part, help="Not this part. Repeatable."),
    ] = None,
    tensors: Tensors = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not what matches. Repeatable.")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="OLD=NEW", help="Rename; `*` on both sides stands for the same. Repeatable."),
    ] = None,
    strip_wrappers: Annotated[
        bool,
        typer.Option(
            "--strip-wrappers",
            help="Take `module.`, `_orig_mod.`, `_fsdp_wrapped_module.` and `_checkpoint_wrapped_module.` off.",
        ),
    ] = False,
    strip_prefix: Annotated[
        str | None, typer.Option("--strip-prefix", metavar="P", help="Take one prefix off the model's names.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            metavar="[PATTERN=]DTYPE",
            help="Cast floating point tensors: bfloat16, or 'norm*=float32' for some. Repeatable; first match wins.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Split into files of at most 5GB, 512MiB, ..."),
    ] = None,
    to_world: Annotated[
        int | None, typer.Option("--to-world", metavar="N", help="Chunk the tensors for N ranks (dcp, fsdp1).")
    ] = None,
    tensor_class: Annotated[
        str | None,
        typer.Option("--tensor-class", metavar="CLASS", help="Sharded tensors as sharded_tensor or dtensor (fsdp1)."),
    ] = None,
    optim_keys: Annotated[
        str | None,
        typer.Option("--optim-keys", metavar="KEYS", help="Spell the optimizer's parameters as fqn, id or flat."),
    ] = None,
    optim_root: Annotated[
        str | None, typer.Option("--optim-root", metavar="KEY", help="Keep the optimizer under this key.")
    ] = None,
    shapes: Shapes = None,
    model_from: Annotated[
        str | None, typer.Option("--model-from", metavar="PATH", help="Take the model from another checkpoint.")
    ] = None,
    optim_from: Annotated[
        str | None, typer.Option("--optim-from", metavar="PATH", help="Take the optimizer from another checkpoint.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST. The old one stays until the new one is complete.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Show the plan and write nothing.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", "-j", metavar="N", min=1, help="How many threads move bytes.")
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", metavar="SIZE", help="Bound the buffers: 2GB, 512MiB, ...")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read DST back and compare it with SRC before it gets its name.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Convert a checkpoint, bit for bit: the same tensors, objects and names in another format.

    DST appears complete or not at all. What the format cannot hold is refused, unless it is left out by --only, --drop
    or --exclude.
    """
    from ckpttool import verbs

    with ExitStack() as stack:
        progress = None if quiet or as_json else stack.enter_context(Progress(err()))
        made = verbs.convert(
            src, dst, to=to, producer=producer, only=only or (), drop=drop or (), tensors=tensors or (),
            exclude=exclude or (), rename=rename or (), strip_wrappers=strip_wrappers, strip_prefix=strip_prefix,
            dtype=dtype or (), max_shard_size=max_shard_size, to_world=to_world, tensor_class=tensor_class,
            optim_keys=optim_keys, optim_root=optim_root, shapes=shapes, model_from=model_from, optim_from=optim_from,
            overwrite=overwrite, dry_run=dry_run, threads=threads, max_memory=max_memory, check=check,
            progress=progress,
        )  # fmt: skip
    terminal = out()
    if as_json:
        terminal.write(json.dumps({"schema": "ckpttool/convert/1", **asdict(made)}) + "\n")
    elif quiet:
        for name, _ in made.files if dry_run else ():
            terminal.line(name)
    else:
        _header(terminal, made)
        if dry_run:
            _plan(terminal, made)
            _files(terminal, made, verbose)
        else:
            _result(terminal, made, check)
        if dry_run or verbose:
            for title, rows in _changes(made) if verbose else _summed(made):
                terminal.heading(title)
                _some(terminal, rows, verbose)
        for note in made.notes:
            err().line(Painted("warning: ", "yellow"), note)


def _header(terminal: Terminal, made: Conversion) -> None:
    terminal.line("would write " if made.dry_run else "wrote ", bold(made.destination))
    if made.dry_run:
        terminal.write("\n")


def _source(made: Conversion) -> str:
    return f"{made.source}, {made.source_format} -> {made.format}"


def _contents(made: Conversion) -> str:
    return f"{plural(made.tensors, 'tensor')}, {plural(made.objects, 'object')}, {size(made.bytes)} of values"


def _result(terminal: Terminal, made: Conversion, check: bool) -> None:
    rate = f", {size(made.bytes / made.seconds)}/s" if made.seconds >= 0.1 else ""
    rows = [
        ("from", _source(made)),
        ("contents", _contents(made)),
        ("files", f"{plural(len(made.files), 'file')}, {size(made.disk)}"),
        ("time", f"{duration(made.seconds)}{rate}"),
        ("checked", _checked(made, check)),
        *((title, f"{len(changes):,}") for title, changes in _changes(made)),
    ]
    terminal.table([(dim(title), text) for title, text in rows], cut=(1,), prose=(1,))


def _checked(made: Conversion, check: bool) -> str:
    said = []
    if made.checked:
        said.append(f"checksums of {size(made.checked)} of the source")
    if made.unchecked:
        said.append(f"{size(made.unchecked)} of the source came without a checksum")
    if check:
        said.append("everything written was read back and compared")
    return "; ".join(said) or "nothing to check"


def _plan(terminal: Terminal, made: Conversion) -> None:
    short = made.disk > made.free
    rows: list[tuple[Piece, Piece]] = [
        (dim("from"), _source(made)),
        (dim("contents"), _contents(made)),
        (dim("disk"), Painted(f"{size(made.disk)} needed, {size(made.free)} free", "red" if short else "")),
        (dim("memory"), f"about {size(made.memory)} at most"),
    ]
    terminal.table(rows, cut=(1,))


def _files(terminal: Terminal, made: Conversion, verbose: bool) -> None:
    terminal.heading("files", plural(len(made.files), "file"))
    _some(terminal, [(name, size(nbytes)) for name, nbytes in made.files], verbose, right=(1,))


Rows = list[tuple[str, ...]]


def _changes(made: Conversion) -> list[tuple[str, Rows]]:
    found: list[tuple[str, Rows]] = [
        ("renamed", [(old, f"-> {new}") for old, new in made.renamed]),
        ("cast", [(name, f"{old} -> {new}") for name, old, new in made.cast]),
        ("tied", [(name, f"is {kept}") for name, kept in made.ties]),
        ("left out", [(name,) for name in made.dropped]),
    ]
    return [(title, rows) for title, rows in found if rows]


def _summed(made: Conversion) -> list[tuple[str, Rows]]:
    """The same, with one line for what is changed in the same way."""
    found: list[tuple[str, Rows]] = [
        ("renamed", _counted(_rule(old, new) for old, new in made.renamed)),
        ("cast", _counted((f"{old} -> {new}",) for _, old, new in made.cast)),
        ("tied", [(name, f"is {kept}") for name, kept in made.ties]),
        ("left out", _counted((name.partition(".")[0],) for name in made.dropped)),
    ]
    return [(title, rows) for title, rows in found if rows]


def _counted(rows: Iterable[tuple[str, ...]]) -> Rows:
    return [(*row, f"{n:,}") for row, n in Counter(rows).items()]


def _rule(old: str, new: str) -> tuple[str, str]:
    """`("model.*", "-> *")` for `model.norm.weight` that becomes `norm.weight`: what the two names do not share."""
    before, after = old.split("."), new.split(".")
    shared = 0
    while shared < min(len(before), len(after)) and before[-1 - shared] == after[-1 - shared]:
        shared += 1
    rest = ["*"] if shared else []
    return ".".join(before[: len(before) - shared] + rest), "-> " + ".".join(after[: len(after) - shared] + rest)


def _some(terminal: Terminal, rows: Rows, verbose: bool, right: tuple[int, ...] = ()) -> None:
    shown = rows if verbose else rows[:_SHOWN]
    terminal.table(shown, right=right, cut=(0, 1))
    if len(shown) < len(rows):
        terminal.line(dim(f"  {len(rows) - len(shown):,} more, shown by -v"))
