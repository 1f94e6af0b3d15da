"""`ckpttool verify-resume`: whether training resumes exactly from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.cli import options, resume_run
from ckpttool.cli.answer import respond
from ckpttool.cli.pages import check_folder, write_page
from ckpttool.cli.parsing import group, library_arguments
from ckpttool.cli.resume_run import document_blocks, progress_lines, write_junit
from ckpttool.cli.terminal import out
from ckpttool.reports.report import Block, Column, Facts, Line, Rows, Styled, Table, bold, dim, known
from ckpttool.text import size

if TYPE_CHECKING:
    from ckpttool.analysis.audit import Audit
    from ckpttool.resume.results import TrialReport

_STATES = {"ok": "green", "note": "dim", "differs": "yellow", "fails": "red"}
_RESUMABLE = {"exactly": "green", "with differences": "yellow", "no": "red"}
_NAMES = 20  # names below a check, under -v

# audit ----------------------------------------------------------------------------------------------------------------


def audit(
    path: options.Checkpoint, *,
    recipe: options.Recipe = None, values: options.Values = None,
    shapes: options.Shapes = None,
    as_json: options.AsJson = False, quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Check that a checkpoint has all state needed to resume.

    Nothing is trained. The exit code is 1 if training cannot resume.

    Examples:
        ckpttool verify-resume audit step-1000
        ckpttool verify-resume audit step-1000 --recipe recipe.py
    """
    arguments = library_arguments(locals())
    from ckpttool.analysis import audit as operation

    call = partial(operation.audit, **arguments)
    respond(call, audit_blocks, as_json=as_json, quiet=quiet, verbose=verbose, shows_progress=False)


def audit_blocks(result: Audit, verbose: bool) -> Iterator[Block]:
    """Yield the verdict, the parts that are there, the hyper-parameters, and each check."""
    from ckpttool.reports.description import hyperparameters

    yield Line([bold(result.path), ": ", Styled(result.message, _RESUMABLE[result.verdict])])
    world_size = str(result.world_size) if result.world_size > 1 else None
    step = f"{result.step:,g}" if result.step is not None else None
    yield Facts(known((("format", result.format), ("world size", world_size), ("step", step))), is_apart=True)
    rows: Rows = []
    can_resume = {check.what for check in result.checks if check.state in ("ok", "note")}
    for part in result.parts:
        numbers = (
            f"{part.tensor_count:,}",
            f"{part.object_count:,}",
            size(part.payload_bytes) if part.tensor_count else "",
        )
        absent = dim("none") if part.part in can_resume else Styled("missing", "yellow")
        rows.append([bold(part.part), *(("present", *numbers) if part.present else (absent,))])
    figures = [Column(title, is_number=True) for title in ("tensors", "objects", "bytes")]
    yield Table("", [Column("part"), Column(), *figures], rows, limit=None)
    for optimizer in result.optimizers:
        yield from hyperparameters(optimizer, verbose)
    checks: Rows = []
    for check in result.checks:
        checks.append([Styled(check.state, _STATES[check.state]), check.what, check.message])
        if check.hint and check.state != "ok":
            checks.append(["", "", dim(f"hint: {check.hint}")])
        if verbose and len(check.names) > 1:
            checks += [["", "", dim(name)] for name in check.names[:_NAMES]]
    yield Table("checks", [Column(), Column(), Column(fit="wrap")], checks, limit=None)


# trial ----------------------------------------------------------------------------------------------------------------


def trial(
    checkpoints: options.TrialCheckpoints = [], *,
    recipe: options.TrialRecipe, world: options.World = None, mesh: options.Mesh = None, steps: options.StepsBefore = 4,
    more: options.StepsAfter = 4, device: options.Device = None, deterministic: options.Deterministic = True,
    via: options.TrialVia = None, to_world: options.TrialToWorld = None, to_mesh: options.TrialToMesh = None,
    first_step: options.FirstStep = None,
    gradients: options.Gradients = True, limit: options.TimeLimit = 300,
    html: options.ResumeHtml = None, junit: options.Junit = None, keep: options.KeepFiles = None,
    as_json: options.AsJson = False, quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Train, save, convert, resume, and compare every step.

    Resumed runs are new processes; state and steps are compared bit for bit. The exit code is 0 if training
    resumes exactly, 1 if it does not, 3 if training does not repeat itself, 9 if nothing is proven.

    Examples:
        ckpttool verify-resume trial --recipe recipe.py
        ckpttool verify-resume trial --recipe recipe.py --via safetensors --to-world 4
    """
    arguments = library_arguments(locals(), "via", "html", "junit")
    from ckpttool.reports import page_file
    from ckpttool.reports.resumed import page
    from ckpttool.resume.trial import trial as run

    page_file.checked(html)
    check_folder(junit)

    def call() -> TrialReport:
        result = run(**arguments, via=via or (), tell=progress_lines(quiet or as_json))
        if html is not None:
            write_page(html, page, result.as_dict())
        write_junit(junit, result, is_silent=as_json or quiet)
        return result

    respond(call, document_blocks, as_json=as_json, quiet=quiet, verbose=verbose, shows_progress=False, html=html)


# init -----------------------------------------------------------------------------------------------------------------


def init(path: options.RecipeToWrite = "recipe.py", *, quiet: options.Quiet = False) -> None:
    """Write a commented, runnable recipe template.

    Examples:
        ckpttool verify-resume init my-recipe.py
    """
    from ckpttool.analysis.audit.recipe import write_template

    write_template(path)
    terminal = out()
    if quiet:
        terminal.line(path)
        return
    terminal.line("wrote ", bold(path))
    terminal.line(dim("  try it   "), f"ckpttool verify-resume trial --recipe {path}")
    terminal.line(dim("  then     "), "replace its model, optimizer and data with yours")


verify_resume = group(
    "verify-resume",
    (audit, trial, resume_run.run, init),
    help="Check that training resumes exactly from a checkpoint.",
    page="how-to/check-resume.md",
)
