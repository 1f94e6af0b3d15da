"""`ckpttool verify-resume audit`: is everything there that training needs to go on?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool.cli.options import AsJson, Checkpoint, Quiet, Shapes, Verbose
from ckpttool.cli.terminal import Painted, Piece, Terminal, answer, bold, dim
from ckpttool.errors import DIFFERS, DONE
from ckpttool.text import size

if TYPE_CHECKING:
    from ckpttool.operations.inspect.hyperparameters import Table
    from ckpttool.operations.verify_resume.audit import Audit

_STYLES = {"ok": "green", "note": "dim", "differs": "yellow", "fails": "red"}
_VERDICTS = {"exactly": "green", "with differences": "yellow", "no": "red"}
_NAMES = 20  # of those that a line is about, under -v


def audit(
    path: Checkpoint,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", metavar="FILE", help="Build its model, and compare names and shapes with it."),
    ] = None,
    values: Annotated[
        bool | None,
        typer.Option(
            "--values/--no-values",
            help="Read the weights and moments, for NaN and the like. Up to 1 GiB of them are read unless told not to.",
        ),
    ] = None,
    shapes: Shapes = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Say whether everything is there that training needs to go on, without training.

    The exit code is 1 when it cannot go on.
    """
    from ckpttool.operations.verify_resume.audit import audit as look

    made = look(path, recipe=recipe, values=values, shapes=shapes)
    exit_code = DIFFERS if made.verdict == "no" else DONE
    with answer(exit_code) as terminal:
        if as_json:
            terminal.write(json.dumps(_document(made)) + "\n")
        elif quiet:
            terminal.line(made.verdict)
        else:
            _print(terminal, made, verbose)
    raise typer.Exit(exit_code)


def _tables(made: Audit) -> list[Table]:
    from ckpttool.operations.inspect import hyperparameters

    assert made.catalogue is not None
    entries = made.catalogue.entries
    return hyperparameters.tables((e for e in entries.values() if e.part.kind == "optimizer"), entries)


def _document(made: Audit) -> dict[str, Any]:
    tables = [
        {"optimizer": ".".join(map(str, table.root)), "groups": [
            {"groups": column.groups, "parameters": column.params, "values": column.values} for column in table.columns
        ]}
        for table in _tables(made)
    ]  # fmt: skip
    return {**made.as_dict(), "hyperparameters": tables}


def _print(terminal: Terminal, made: Audit, verbose: bool) -> None:
    from ckpttool.cli.inspect import hyperparameters

    terminal.line(bold(made.path))
    terminal.write("\n")
    rows = [("format", made.format)]
    if made.world_size > 1:
        rows.append(("world size", str(made.world_size)))
    if made.step is not None:
        rows.append(("step", f"{made.step:,g}"))
    terminal.table([(dim(title), text) for title, text in rows], cut=(1,))
    terminal.write("\n")
    terminal.table([_part(part) for part in made.parts], ("part", "", "tensors", "objects", "bytes"), right=(2, 3, 4))
    for table in _tables(made):
        hyperparameters(terminal, table, verbose)
    terminal.heading("checks")
    shown: list[tuple[Piece, ...]] = []
    for check in made.checks:
        mark = Painted(check.state, _STYLES[check.state])
        shown.append((mark, check.what, check.says))
        if check.hint and check.state != "ok":
            shown.append(("", "", dim(f"hint: {check.hint}")))
        if verbose and len(check.names) > 1:
            shown += [("", "", dim(name)) for name in check.names[:_NAMES]]
    terminal.table(shown, prose=(2,))
    terminal.write("\n")
    terminal.line(Painted(made.says, _VERDICTS[made.verdict]))


def _part(part: Any) -> tuple[Piece, ...]:
    if not part.present:
        return (bold(part.kind), Painted("missing", "yellow"), "", "", "")
    numbers = (f"{part.tensors:,}", f"{part.objects:,}", size(part.bytes) if part.tensors else "")
    return (bold(part.kind), "there", *numbers)
