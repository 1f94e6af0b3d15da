"""`ckpttool verify-resume run`: whether a training command resumes exactly, as it is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.cli import options
from ckpttool.cli.pages import check_folder, write_page, write_text
from ckpttool.cli.parsing import library_arguments
from ckpttool.cli.terminal import answer, err
from ckpttool.reports.report import Styled, TextLike, bold, dim
from ckpttool.reports.terminal import Terminal
from ckpttool.text import duration, plural, size

if TYPE_CHECKING:
    from ckpttool.resume.results import Run
    from ckpttool.resume.run_results import Report, ScriptRun

_VERDICTS = {
    "same": ("PASS", "green"),
    "differs": ("FAIL", "red"),
    "failed": ("FAIL", "red"),
    "nondeterministic": ("NONDETERMINISTIC", "yellow"),
    "planned": ("PLAN", "dim"),
}
_CELLS = {True: ("same", "green"), False: ("differs", "red"), None: ("not judged", "dim")}
_SHOWN = 10


def run(
    command: options.TrainingCommand = [], *,
    preset: options.Preset = None, at: options.At = None, until: options.Until = None, stop: options.Stop = None,
    resume_with: options.ResumeWith = None, world: options.RunWorld = None, to_world: options.RunToWorld = None,
    via: options.RunVia = "",
    checkpoints: options.RunCheckpoints = None, out: options.Out = "OUT", loss: options.Loss = None,
    inject: options.Inject = True, observe: options.Observe = False, seed_env: options.SeedEnv = [],
    timeout: options.Timeout = 1800, max_disk: options.MaxDisk = None, dry_run: options.DryRunOfRuns = False,
    html: options.ResumeHtml = None, junit: options.Junit = None, keep: options.KeepRuns = None,
    as_json: options.AsJson = False, quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Compare a training command with and without a stop.

    A runs to step N, A2 repeats it, and B is stopped at step K and resumed. Each has an output directory of its own.
    The exit code is 0 if B is the same as A, 1 if it differs, 3 if A2 differs already.

    Examples:
        ckpttool verify-resume run --checkpoints 'OUT/step-{step}' --at 4 --until 8 --resume-with '... --resume {checkpoint}' -- python train.py --out OUT
        ckpttool verify-resume run --preset trainer -- python run_clm.py --output_dir OUT ...
        ckpttool verify-resume run --at 4 --until 8 -- torchrun --nproc-per-node 2 train.py --out OUT
    """  # noqa: E501
    arguments = library_arguments(locals(), "command", "preset", "html", "junit", "inject")
    from ckpttool.reports import page_file
    from ckpttool.resume.presets import fill
    from ckpttool.resume.runs import run as operation

    page_file.checked(html)
    check_folder(junit)
    command, arguments = fill(preset, command, arguments)
    tell = None if quiet or as_json else lambda message: err().line(dim(message))
    result = operation(command, inject_switches=inject, **arguments, tell=tell)
    if html is not None:
        from ckpttool.reports.resumed import run_page

        write_page(html, run_page, result.as_dict())
    if junit is not None:
        from ckpttool.cli.junit import junit_xml

        write_text(junit, junit_xml(result))
    with answer(result.exit_code, verbose) as terminal:
        if as_json:
            terminal.json(result.as_dict())
        elif quiet:
            terminal.line(result.verdict)
        else:
            _print(terminal, result)
            for path in (html, junit):
                err().wrote(path)


def _print(terminal: Terminal, result: Report) -> None:
    word, colour = _VERDICTS[result.verdict]
    terminal.line(Styled(word, colour), "  ", result.message)
    terminal.write("\n")
    about = _about(result)
    indent = max(len(title) for title, _ in about) + 4
    for title, text in about:
        terminal.paragraph(text, mark=dim(f"  {title}".ljust(indent)), indent=indent)
    _print_table(terminal, result)
    if result.findings:
        terminal.heading("found", plural(len(result.findings), "difference"))
        shown = result.findings if terminal.verbose else result.findings[:_SHOWN]
        for finding in shown:
            at = f"in step {finding.step}, " if finding.step is not None else ""
            terminal.paragraph(f"{finding.kind}: {at}{finding.message}", mark=Styled("- ", "red"))
            if finding.hint:
                terminal.paragraph(finding.hint, mark=dim("  hint: "), indent=8)
        terminal.more(len(result.findings) - len(shown))
    if result.failure is not None:
        terminal.heading("output", f"the last lines of run {result.failure.run}")
        for line in result.failure.output:
            terminal.line(dim(f"  {line}"))
    if terminal.verbose:
        print_losses(terminal, [run for run in result.runs if run.steps])
    for note in result.notes:
        terminal.paragraph(note, mark=Styled("note: ", "yellow"))


def _about(result: Report) -> list[tuple[str, str]]:
    rows = [("criterion", result.rule_message)]
    for one in result.runs:
        stopped = f"; stopped at step {result.at} {one.stopped}" if one.stopped else ""
        resumed = f", resumed at step {one.resumed_at}" if one.resumed_at is not None else ""
        facts = "" if result.verdict == "planned" else f" ({duration(one.seconds)}{stopped}{resumed})"
        rows.append((f"run {one.name}", f"{shlex.join(one.command)}{facts}"))
        if result.verdict == "planned" and one.stopped:
            rows.append(("before stop", one.stopped))
    rows += [("route", f"{leg.message}  {duration(leg.seconds)}") for leg in result.route]
    rows += [("loss drift", f"{drift.loss_relative:.2%} vs A (informational)") for drift in result.drifts]
    if result.nondeterministic:
        rows.append(("nondeterministic", ", ".join(result.nondeterministic)))
    if result.unjudged:
        rows.append(("not judged", ", ".join(result.unjudged)))
    if result.settings:
        rows.append(("settings", ", ".join(result.settings)))
    cost = result.cost
    disk = f", {size(cost.checkpoint_bytes)} a checkpoint" if cost.checkpoint_bytes is not None else ""
    rows.append(("cost", f"{plural(cost.runs, 'start')}, {plural(cost.steps, 'step')}{disk}"))
    if result.seconds:
        rows.append(("time", duration(result.seconds)))
    if result.folder is not None:
        rows.append(("kept in", result.folder))
    return rows


def _print_table(terminal: Terminal, result: Report) -> None:
    """Print a row for each step and a column for each part."""
    cells: dict[str, dict[str, TextLike]] = {}
    for row in result.compared:
        step, _, kind = row.what.rpartition(": ")
        differing = f" {row.differing:,} of {row.count:,}" if row.equal is False else ""
        text, colour = _CELLS[row.equal]
        cells.setdefault(step or "losses", {})[kind] = Styled(text + differing, colour)
    steps = [step for step in cells if step != "losses"]
    kinds = [*dict.fromkeys(kind for step in steps for kind in cells[step])]
    if steps:
        terminal.heading("compared", "B with A")
        rows = [(bold(step), *(cells[step].get(kind, "") for kind in kinds)) for step in steps]
        terminal.table(rows, headers=("", *kinds))
    for row in result.compared:
        if row.what == "loss":
            equal = f"{row.count - row.differing:,} of {row.count:,} equal" if row.count else row.message
            terminal.line("  losses  ", equal)


def print_losses(terminal: Terminal, runs: Sequence[Run] | Sequence[ScriptRun]) -> None:
    """Print a row for each step, and a column for each run."""
    numbers = sorted({step.number for run in runs for step in run.steps})
    if not numbers:
        return
    terminal.heading("losses")
    rows = []
    for number in numbers:
        losses = [next((f"{s.loss:.9g}" for s in run.steps if s.number == number), "") for run in runs]
        rows.append((f"step {number}", *losses))
    terminal.table(rows, headers=("", *(run.name for run in runs)), right=range(1, len(runs) + 1))
