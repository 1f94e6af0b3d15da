"""`ckpttool verify-resume run`: whether a training command resumes exactly, as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.pages import check_folder, write_page, write_text
from ckpttool.cli.parsing import library_arguments
from ckpttool.cli.terminal import err
from ckpttool.reports.report import Block, dim

if TYPE_CHECKING:
    from ckpttool.resume.results import Outcome, RunReport, TrialReport


def run(
    command: options.TrainingCommand = [], *,
    preset: options.Preset = None, at: options.At = None, until: options.Until = None, stop: options.Stop = None,
    resume_with: options.ResumeWith = None, world: options.RunWorld = None, to_world: options.RunToWorld = None,
    via: options.RunVia = "",
    checkpoints: options.RunCheckpoints = None, out: options.Out = "OUT", loss: options.Loss = None,
    cross: options.Cross = [],
    inject: options.Inject = True, observe: options.Observe = None, control: options.WithControls = None,
    seed_env: options.SeedEnv = [],
    timeout: options.Timeout = 1800, max_disk: options.MaxDisk = None, dry_run: options.DryRunOfRuns = False,
    html: options.ResumeHtml = None, junit: options.Junit = None, keep: options.KeepRuns = None,
    as_json: options.AsJson = False, quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Compare a training command with and without an interruption.

    A runs to step N; B resumes from a copy of A's output at step K. If B differs, A2 repeats A. The exit code
    is 0 if B is the same as A, 1 if it differs, 3 if A2 differs too, 9 if nothing is proven.

    Examples:
        ckpttool verify-resume run -- python train.py --out OUT
        ckpttool verify-resume run --at 4 --until 8 -- torchrun train.py --out OUT
        ckpttool verify-resume run --preset trainer -- python clm.py --output_dir OUT
    """
    arguments = library_arguments(locals(), "command", "preset", "html", "junit", "inject", "control")
    from ckpttool.cli.presets import fill
    from ckpttool.reports import page_file
    from ckpttool.reports.resumed import page
    from ckpttool.resume.runs import run as operation

    page_file.checked(html)
    check_folder(junit)
    command, arguments = fill(preset, command, arguments)

    def call() -> RunReport:
        has_controls = control if control is not None else junit is not None
        told = progress_lines(quiet or as_json)
        result = operation(command, inject_switches=inject, control=has_controls, **arguments, tell=told)
        if html is not None:
            write_page(html, page, result.as_dict())
        write_junit(junit, result, is_silent=as_json or quiet)
        return result

    respond(call, document_blocks, as_json=as_json, quiet=quiet, verbose=verbose, shows_progress=False, html=html)


def write_junit(path: str | None, result: RunReport | TrialReport, *, is_silent: bool) -> None:
    """Write the report of a run or a trial as JUnit XML, if that was asked for."""
    if path is not None:
        from ckpttool.cli.junit import junit_xml

        write_text(path, junit_xml(result))
        if not is_silent:
            err().wrote(path)


def progress_lines(is_silent: bool) -> Callable[[str], None] | None:
    """Return what is called with a line for each thing that is done, for stderr; None without any."""
    return None if is_silent else lambda message: err().line(dim(message))


def document_blocks(result: Outcome, verbose: bool) -> Iterable[Block]:
    """Yield the blocks of a trial or a run."""
    from ckpttool.reports.resumed import blocks

    return blocks(result.as_dict(), verbose)
