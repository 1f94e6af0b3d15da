"""`ckpttool verify-resume`: whether training resumes exactly from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpttool.cli import options, resume_run
from ckpttool.cli.pages import write_page
from ckpttool.cli.parsing import group, library_arguments
from ckpttool.cli.resume_run import print_losses
from ckpttool.cli.terminal import answer, err, out
from ckpttool.reports.report import Styled, TextLike, bold, dim
from ckpttool.reports.terminal import Terminal
from ckpttool.text import duration, plural, size

if TYPE_CHECKING:
    from ckpttool.resume.audit import Audit
    from ckpttool.resume.results import Report

_VERDICTS = {"same": "green", "differs": "red", "failed": "red"}
_STATES = {"ok": "green", "note": "dim", "differs": "yellow", "fails": "red"}
_RESUMABLE = {"exactly": "green", "with differences": "yellow", "no": "red"}
_MARKS = {True: ("same", "green"), False: ("differs", "red"), None: ("no verdict", "dim")}
_SHOWN = 10
_NAMES = 20  # names below a check, under -v

# audit ----------------------------------------------------------------------------------------------------------------


def audit(
    path: options.Checkpoint, *,
    recipe: options.Recipe = None, values: options.Values = None,
    shapes: options.Shapes = None,
    as_json: options.AsJson = False, quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Check that all state needed to resume is there.

    Nothing is trained. The exit code is 1 if training cannot resume.

    Examples:
        ckpttool verify-resume audit step-1000
        ckpttool verify-resume audit step-1000 --recipe recipe.py
    """
    arguments = library_arguments(locals())
    from ckpttool.resume import audit as operation

    result = operation.audit(**arguments)
    with answer(result.exit_code, verbose) as terminal:
        if as_json:
            terminal.json(result.as_dict())
        elif quiet:
            terminal.line(result.verdict)
        else:
            _print_audit(terminal, result)
            err().warnings(result.notes)


def _print_audit(terminal: Terminal, result: Audit) -> None:
    from ckpttool.reports.description import hyperparameters

    terminal.line(bold(result.path))
    terminal.write("\n")
    world_size = str(result.world_size) if result.world_size > 1 else None
    step = f"{result.step:,g}" if result.step is not None else None
    facts = (("format", result.format), ("world size", world_size), ("step", step))
    terminal.facts((title, text) for title, text in facts if text is not None)
    terminal.write("\n")
    rows: list[tuple[TextLike, ...]] = []
    can_resume = {check.what for check in result.checks if check.state in ("ok", "note")}
    for part in result.parts:
        numbers = (f"{part.tensors:,}", f"{part.objects:,}", size(part.payload_bytes) if part.tensors else "")
        absent = dim("none") if part.part in can_resume else Styled("missing", "yellow")
        rows.append((bold(part.part), *(("present", *numbers) if part.present else (absent,))))
    terminal.table(rows, ("part", "", "tensors", "objects", "bytes"), right=(2, 3, 4))
    for optimizer in result.optimizers:
        terminal.blocks(hyperparameters(optimizer, terminal.verbose))
    terminal.heading("checks")
    shown: list[tuple[TextLike, ...]] = []
    for check in result.checks:
        shown.append((Styled(check.state, _STATES[check.state]), check.what, check.message))
        if check.hint and check.state != "ok":
            shown.append(("", "", dim(f"hint: {check.hint}")))
        if terminal.verbose and len(check.names) > 1:
            shown += [("", "", dim(name)) for name in check.names[:_NAMES]]
    terminal.table(shown, wrap=(2,))
    terminal.write("\n")
    terminal.line(Styled(result.message, _RESUMABLE[result.verdict]))


# trial ----------------------------------------------------------------------------------------------------------------


def trial(
    checkpoints: options.TrialCheckpoints = [], *,
    recipe: options.TrialRecipe, world: options.World = None, mesh: options.Mesh = None, steps: options.StepsBefore = 4,
    more: options.StepsAfter = 4, device: options.Device = None, deterministic: options.Deterministic = True,
    via: options.TrialVia = None, to_world: options.TrialToWorld = None, to_mesh: options.TrialToMesh = None,
    first_step: options.FirstStep = None,
    gradients: options.Gradients = True, limit: options.TimeLimit = 300,
    html: options.ResumeHtml = None, keep: options.KeepFiles = None, as_json: options.AsJson = False,
    quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Train, save, convert, resume, and compare every step.

    The runs that resume are new processes; state and steps are compared bit for bit. The exit code is 0 if training
    resumes exactly, 1 if it does not.

    Examples:
        ckpttool verify-resume trial --recipe recipe.py
        ckpttool verify-resume trial --recipe recipe.py --via safetensors --to-world 4
    """
    arguments = library_arguments(locals(), "via", "html")
    from ckpttool.reports import page_file
    from ckpttool.resume.trial import trial as run

    page_file.checked(html)
    tell = None if quiet or as_json else lambda message: err().line(dim(message))
    result = run(**arguments, via=via or (), tell=tell)
    document = result.as_dict()
    if html is not None:
        from ckpttool.reports.resumed import trial_page

        write_page(html, trial_page, document)
    with answer(result.exit_code, verbose) as terminal:
        if as_json:
            terminal.json(document)
        elif quiet:
            terminal.line(result.verdict)
        else:
            _print_trial(terminal, result)
            err().wrote(html)


def _print_trial(terminal: Terminal, result: Report) -> None:
    terminal.line(
        Styled("PASS" if result.verdict == "same" else "FAIL", _VERDICTS[result.verdict]), "  ", result.message
    )
    terminal.write("\n")
    about = list(_about(result))
    indent = max(len(title) for title, _ in about) + 4
    for title, text in about:
        terminal.paragraph(text, mark=dim(f"  {title}".ljust(indent)), indent=indent)
    if result.compared:
        terminal.heading("compared")
        rows = []
        for row in result.compared:
            equal = f"{row.count - row.differing:,} of {row.count:,} equal"
            rows.append((row.what, f"{row.run} with {row.against}", equal, Styled(*_MARKS[row.equal]), row.message))
        terminal.table(rows, wrap=(4,))
    if result.checks:
        terminal.heading("sharding")
        checks = [(one.what, one.run, Styled(*_MARKS[one.passed]), one.message) for one in result.checks]
        terminal.table(checks, wrap=(3,))
    if terminal.verbose and result.runs:
        print_losses(terminal, result.runs)
    if result.findings:
        terminal.heading("found", plural(len(result.findings), "difference"))
        shown = result.findings if terminal.verbose else result.findings[:_SHOWN]
        for finding in shown:
            terminal.paragraph(f"{finding.kind}: {finding.message}", mark=Styled("- ", "red"))
            if finding.hint:
                terminal.paragraph(finding.hint, mark=dim("  hint: "), indent=8)
        terminal.more(len(result.findings) - len(shown))
    if result.failure is not None:
        terminal.heading("ranks")
        for stuck in result.failure.ranks:
            where = stuck.where or "not in the recipe"
            terminal.line(f"  rank {stuck.rank}: {stuck.phase}, {where}", f": {stuck.error}" if stuck.error else "")
            for frame in stuck.stack if terminal.verbose else ():
                terminal.line(dim(f"    {frame}"))
    for note in result.notes:
        terminal.paragraph(note, mark=Styled("note: ", "yellow"))


def _about(result: Report) -> Iterator[tuple[str, str]]:
    yield "criterion", result.rule_message
    for leg in result.route:
        yield "route", f"{leg.message}  {duration(leg.seconds)}"
    for run in result.runs:
        rate = f", {run.steps_per_second:.3g} steps/s" if run.steps_per_second else ""
        since = f", resumed at step {run.resumed_at}" if run.resumed_at is not None else ""
        ranks, steps = plural(run.world_size, "rank"), plural(len(run.steps), "step")
        yield f"run {run.name}", f"{ranks}, {run.mesh}{since}, {steps}{rate}"
    for drift in result.drifts:
        yield "loss drift", f"{drift.loss_relative:.2%} vs A (informational)"
    yield "determinism", ", ".join(result.deterministic)
    yield "time", duration(result.seconds)


# init -----------------------------------------------------------------------------------------------------------------


def init(path: options.RecipeToWrite = "recipe.py", *, quiet: options.Quiet = False) -> None:
    """Write a commented, runnable recipe template.

    Examples:
        ckpttool verify-resume init my-recipe.py
    """
    from ckpttool.resume.recipe import write_template

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
    epilog="More: docs/how-to/check-resume.md",
)
