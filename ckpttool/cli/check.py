"""`ckpttool check`: does the model fit a reference?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.cli import options
from ckpttool.cli.options import Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import Styled, Terminal, answer, bold, err
from ckpttool.text import duration, plural

if TYPE_CHECKING:
    from ckpttool.operations.check import Checked

_SHOWN = 40
_TITLES = {
    "prefix": "prefix",
    "missing": "missing",
    "left over": "left over",
    "extra": "not in the reference",
    "shape": "shapes",
    "tie": "ties",
    "content": "values",
    "dtype": "dtypes",
    "unknown": "values",
}


@options.command(
    "check",
    arguments=(options.SOURCE,),
    sections={
        "Reference": (
            Option(
                "--against OTHER",
                "A released model (a directory, a file, hf://org/name), or its config.json.",
                required=True,
            ),
            Option("--content", "Compare samples of the values too: a fine-tune lies near its base."),
        ),
        "Names": (
            options.ONLY,
            options.EXCLUDE,
            options.RENAME,
            options.STRIP_WRAPPERS,
            options.STRIP_PREFIX,
            options.MAP,
            options.SHAPES,
        ),
        "Execution": (options.THREADS,),
        "Output": options.PRINTING,
    },
    examples=(
        "step-1000 --against hf://Qwen/Qwen3-0.6B",
        "step-1000 --against base/ --content",
        "model.safetensors --against base/config.json",
    ),
)
def check(as_json: bool, quiet: bool, verbose: bool, content: bool, **arguments: Any) -> None:
    """Check that the model of a checkpoint fits a reference: names, shapes, dtypes, ties, leftovers.

    Only headers are read, of the Hub a few kilobytes. The exit code is 1 if something is missing, left over or has
    another shape; another dtype alone is told.
    """
    import ckpttool

    against = arguments.pop("against")
    with progress_on_stderr(content and not (quiet or as_json)) as progress:
        result = ckpttool.check(arguments.pop("src"), against, content=content, **arguments, progress=progress)
    with answer(result.exit_code, verbose) as terminal:
        if as_json:
            terminal.json(result.as_dict())
        elif quiet:
            for mismatch in result.mismatches:
                if mismatch.fails:
                    terminal.line(f"{mismatch.kind}: {mismatch.message}")
        else:
            _print(terminal, result)
            err().warnings(result.notes)


def _print(terminal: Terminal, result: Checked) -> None:
    fits = result.verdict == "fits"
    verdict = Styled("fits" if fits else "does not fit", "bold" if fits else "red")
    terminal.line(bold(result.source), " ", verdict, " ", bold(result.against))
    terminal.facts(_facts(result))
    for kind in dict.fromkeys(mismatch.kind for mismatch in result.mismatches):
        mismatches = [mismatch for mismatch in result.mismatches if mismatch.kind == kind]
        terminal.heading(_TITLES[kind], str(len(mismatches)) if len(mismatches) > 1 else "")
        for mismatch in mismatches if terminal.verbose else mismatches[:_SHOWN]:
            terminal.paragraph(mismatch.message, mark=Styled("! ", "red" if mismatch.fails else "yellow"))
        terminal.more(0 if terminal.verbose else len(mismatches) - _SHOWN)
    if {"missing", "extra"} <= {mismatch.kind for mismatch in result.mismatches}:
        command = f"ckpttool match {result.source} --like {result.against}"
        terminal.paragraph(f"`{command}` finds out whether what is missing is there under other names.")


def _facts(result: Checked) -> Iterator[tuple[str, str]]:
    yield "tensors", f"{result.tensors:,}, and {result.reference_tensors:,} in the reference; {result.matched:,} match"
    if result.key_map:
        yield "names", f"those of key map `{result.key_map}`"
    if result.similarity is not None:
        yield "values", f"samples of {plural(result.compared, 'tensor')}; the lowest cosine is {result.similarity:.4f}"
    yield "time", duration(result.seconds)
