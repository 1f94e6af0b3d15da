"""`ckpttool verify-resume trial`: trains, resumes, and compares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool.cli.options import AsJson, Quiet, Verbose
from ckpttool.cli.terminal import Painted, Terminal, answer, dim, err
from ckpttool.errors import DIFFERS, DONE, UsageError
from ckpttool.text import duration, plural

if TYPE_CHECKING:
    from ckpttool.operations.verify_resume.trial.results import Report

_COLOURS = {"same": "green", "differs": "red", "failed": "red"}
_SHOWN = 10


def trial(
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="FILE", help="The Python file that builds what is trained and steps.")
    ],
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CKPT]...", help="Checkpoints to resume from, each compared with the first."),
    ] = None,
    world: Annotated[
        int | None, typer.Option("--world", metavar="N", min=1, help="Train on N ranks; 2 without this.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="MESH", help="Train on a mesh: shard=2,tp=2 or replicate=2,shard=2.")
    ] = None,
    via: Annotated[
        str | None,
        typer.Option(
            "--via", metavar="ROUTE",
            help="Send the save through safetensors, dcp, torch, fsdp1, reshard:N: any chain, with commas.",
        ),
    ] = None,
    to_world: Annotated[int | None, typer.Option("--to-world", metavar="N", help="Resume on N ranks.")] = None,
    to_mesh: Annotated[str | None, typer.Option("--to-mesh", metavar="MESH", help="Resume on a mesh.")] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps to train before the save.")] = 4,
    more: Annotated[int, typer.Option("--more", metavar="N", min=1, help="Steps to train after it.")] = 4,
    first_step: Annotated[
        int | None,
        typer.Option("--first-step", metavar="I", min=0, help="The step to go on with, of a CKPT that says none."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cpu, or cuda, xpu, ... where there is one.")
    ] = None,
    no_deterministic: Annotated[
        bool, typer.Option("--no-deterministic", help="Do not have torch refuse what is not deterministic.")
    ] = False,
    no_gradients: Annotated[
        bool, typer.Option("--no-gradients", help="Do not check the gradients against those of one rank.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--time-limit", metavar="SECONDS", min=1, help="For each phase and step of a rank.")
    ] = 300,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write the report as a page.")] = None,
    keep: Annotated[
        str | None, typer.Option("--keep", metavar="FOLDER", help="Keep there what the runs leave behind.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:  # fmt: skip
    """Train, save, resume in fresh processes, train on, and compare everything bit for bit.

    Exit 0 when training goes on as if nothing had happened, 1 when it does not.
    """
    from ckpttool.operations.verify_resume.trial import trial as try_it

    tell = None if quiet or as_json else lambda said: err().line(dim(said))
    made = try_it(
        recipe, checkpoints or (), world=world, mesh=mesh, via=via or (), to_world=to_world, to_mesh=to_mesh,
        steps=steps, more=more, first_step=first_step, device=device, deterministic=not no_deterministic,
        gradients=not no_gradients, limit=limit, keep=keep, tell=tell,
    )  # fmt: skip
    said = _json(made)
    if html is not None:
        _write_page(html, said)
    exit_code = DONE if made.verdict == "same" else DIFFERS
    with answer(exit_code) as terminal:
        if as_json:
            terminal.write(json.dumps(said) + "\n")
        elif quiet:
            terminal.line(made.verdict)
        else:
            _tell(terminal, made, verbose)
            if html is not None:
                err().line(dim("wrote "), html)
    raise typer.Exit(exit_code)


def _json(made: Report) -> Any:
    from ckpttool.operations.inspect.format_value import jsonable

    return jsonable(made.as_dict())


def _write_page(path: str, said: Any) -> None:
    from ckpttool.operations.verify_resume.trial.html import trial_page

    page = trial_page(said)
    try:
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(page)
    except OSError as error:
        raise UsageError(f"`{path}` cannot be written: {(error.strerror or str(error)).lower()}") from None


def _tell(terminal: Terminal, made: Report, verbose: bool) -> None:
    terminal.line(Painted(made.verdict, _COLOURS[made.verdict]), "  ", made.says)
    terminal.write("\n")
    about = list(_about(made))
    indent = max(len(title) for title, _ in about) + 4
    for title, text in about:
        terminal.paragraph(text, mark=dim(f"  {title}".ljust(indent)), indent=indent)
    if made.compared:
        terminal.heading("compared")
        terminal.table(
            [(row.what, f"{row.run} with {row.against}", f"{row.count - row.differing:,} of {row.count:,} equal",
              _mark(row.equal), row.says) for row in made.compared],
            cut=(4,), prose=(4,),
        )  # fmt: skip
    if made.checks:
        terminal.heading("sharding")
        terminal.table([(one.what, one.run, _mark(one.passed), one.says) for one in made.checks], cut=(3,), prose=(3,))
    _tell_steps(terminal, made, verbose)
    if made.findings:
        terminal.heading("found", plural(len(made.findings), "difference"))
        shown = made.findings if verbose else made.findings[:_SHOWN]
        for one in shown:
            terminal.paragraph(f"{one.kind}: {one.says}", mark=Painted("- ", "red"))
            if one.hint:
                terminal.paragraph(one.hint, mark=dim("  hint: "))
        if len(shown) < len(made.findings):
            terminal.line(dim(f"  {len(made.findings) - len(shown):,} more, shown by -v"))
    if made.failure is not None:
        terminal.heading("ranks")
        for stuck in made.failure.ranks:
            where = stuck.where or "not in the recipe"
            terminal.line(f"  rank {stuck.rank}: {stuck.phase}, {where}", f": {stuck.error}" if stuck.error else "")
            for frame in stuck.stack if verbose else ():
                terminal.line(dim(f"    {frame}"))
    for note in made.notes:
        terminal.paragraph(note, mark=Painted("note: ", "yellow"))


def _about(made: Report) -> Iterator[tuple[str, str]]:
    yield "rule", made.rule_says
    for leg in made.route:
        yield "route", f"{leg.says}  {duration(leg.seconds)}"
    for run in made.runs:
        rate = f", {run.steps_per_second:.3g} steps/s" if run.steps_per_second else ""
        since = f", resumed at step {run.resumed_at}" if run.resumed_at is not None else ""
        yield (
            f"run {run.name}",
            f"{plural(run.world, 'rank')}, {run.mesh}{since}, {plural(len(run.steps), 'step')}{rate}",
        )
    for drift in made.drifts:
        yield "drift", f"losses by {drift.loss_relative:.2g} of themselves from A's; reported, not judged"
    yield "switched on", ", ".join(made.deterministic)
    yield "time", duration(made.seconds)


def _mark(equal: bool | None) -> Painted:
    if equal is None:
        return Painted("not judged", "dim")
    return Painted("same", "green") if equal else Painted("differs", "red")


def _tell_steps(terminal: Terminal, made: Report, verbose: bool) -> None:
    if not verbose or not made.runs:
        return
    terminal.heading("losses")
    numbers = sorted({step.number for run in made.runs for step in run.steps})
    rows = []
    for number in numbers:
        told = [next((f"{s.loss:.9g}" for s in run.steps if s.number == number), "") for run in made.runs]
        rows.append((f"step {number}", *told))
    terminal.table(rows, headers=("", *(run.name for run in made.runs)), right=range(1, len(made.runs) + 1))
