"""`ckpttool report`: statistics, shards and findings as one HTML file."""

from __future__ import annotations

from typing import Any

from ckpttool.cli import options
from ckpttool.cli.options import Argument, Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import Styled, answer, bold, err
from ckpttool.errors import UsageError
from ckpttool.text import plural, size

_SHOWN = 10  # findings


@options.command(
    "report",
    arguments=(
        options.CHECKPOINT,
        Argument(
            "step", metavar="[STEP]...", nargs=-1, help="Of a run, the steps to draw side by side, as with --steps."
        ),
    ),
    sections={
        "Selection": (*options.SELECTION, options.STEPS, options.SHAPES),
        "Output": (
            Option("--output -o FILE", "The HTML file to write.", default="report.html"),
            options.REPLACE,
            *options.PRINTING,
        ),
        "Execution": (options.NO_CACHE, options.THREADS),
    },
    examples=("step-1000", "step-1000 --only model -o model.html", "run7 500 1000 -o run7.html"),
)
def report(
    step: tuple[str, ...], steps: str | None, as_json: bool, quiet: bool, verbose: bool, **arguments: Any
) -> None:
    """Write one HTML file about a checkpoint: what stands out, statistics, histograms, shards, bytes.

    It opens offline, needs nothing beside it, and holds statistics and thumbnails, not the weights. All values are
    read once, as `stats` does.
    """
    import ckpttool

    if step and steps is not None:
        raise UsageError(
            f"the steps are given twice: `{' '.join(step)}` and `--steps {steps}`", hint="give one of the two"
        )
    with progress_on_stderr(not (quiet or as_json)) as progress:
        result = ckpttool.report(**arguments, steps=step or steps, progress=progress)
    with answer(result.exit_code, verbose) as terminal:
        if as_json:
            terminal.json(result.as_dict())
        elif quiet:
            terminal.line(result.destination)
        else:
            terminal.line(bold(result.path))
            if result.headline:
                terminal.paragraph(result.headline)
            terminal.write("\n")
            pages = f"{size(result.file_bytes)}, {plural(len(result.pages), 'page')}"
            terminal.facts([("wrote", f"{result.destination}: {pages}")])
            if result.findings:
                terminal.heading("findings", str(len(result.findings)))
                shown = result.findings if verbose else result.findings[:_SHOWN]
                for finding in shown:
                    terminal.paragraph(finding.message, mark=Styled("! ", "yellow"))
                terminal.more(len(result.findings) - len(shown))
            err().warnings(result.notes)
