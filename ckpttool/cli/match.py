"""`ckpttool match`: how is each tensor of a reference made of those of a checkpoint?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli import options
from ckpttool.cli.options import Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import Styled, Terminal, answer, bold, err
from ckpttool.text import duration, plural, some

if TYPE_CHECKING:
    from ckpttool.models.matching.solve import Open
    from ckpttool.operations.match import Matched

_SHOWN = 20  # of a list
_CANDIDATES = 4
_BY = {
    "name": "by their names",
    "renaming": "by names of which an end is the same",
    "words": "by what their names say",
    "shape": "as nothing else of their shapes is left",
    "map": "by a key map that comes with ckpttool",
    "content": "by samples of the values",
}


@options.command(
    "match",
    arguments=(options.SOURCE,),
    sections={
        "Reference": (
            Option(
                "--like REF",
                "A released model (a directory, a file, hf://org/name), or its config.json.",
                required=True,
            ),
            Option(
                "--head-dim N", "Rows of an attention head. Default: by the config of REF.", type=click.IntRange(min=1)
            ),
        ),
        "Values": (
            Option("--content", "Choose by samples of the values where names do not tell: a fine-tune lies near REF."),
            options.THREADS,
        ),
        "Selection": (options.ONLY, options.EXCLUDE, options.STRIP_WRAPPERS, options.SHAPES),
        "Output": (Option("--output -o FILE", "Write the key map to this file."), options.REPLACE, *options.PRINTING),
    },
    examples=("step-1000 --like hf://Qwen/Qwen3-30B-A3B -o map.json", "model.pt --like base/config.json"),
)
def match(as_json: bool, quiet: bool, verbose: bool, content: bool, **arguments: Any) -> None:
    """Find how each tensor of a reference is made of those of a checkpoint, by names and shapes: a key map.

    Tensors are renamed, stacked, split, joined, transposed; what may be made in several ways is listed, and never
    guessed. The exit code is 1 if something is left open.
    """
    import ckpttool
    from ckpttool.operations.match import text

    with progress_on_stderr(content and not (quiet or as_json)) as progress:
        result = ckpttool.match(arguments.pop("src"), content=content, **arguments, progress=progress)
    with answer(result.exit_code, verbose) as terminal:
        if as_json:
            terminal.json(result.as_dict())
        elif quiet:
            terminal.write(f"{text(result.map)}\n")
        else:
            _print(terminal, result)
            err().warnings(result.notes)


def _print(terminal: Terminal, result: Matched) -> None:
    from ckpttool.operations.match import text

    is_open = result.verdict == "open"
    verdict = Styled("is matched in part" if is_open else "is matched", "red" if is_open else "bold")
    terminal.line(bold(result.like), " ", verdict, " by ", bold(result.source))
    terminal.facts(_facts(result))
    for title, all_ in (("ambiguous", result.ambiguous), ("unmatched", result.unmatched)):
        if all_:
            terminal.heading(title, str(len(all_)) if len(all_) > 1 else "")
            _print_open(terminal, all_)
    if result.unused:
        terminal.heading("not used", str(len(result.unused)) if len(result.unused) > 1 else "")
        terminal.paragraph(some(result.unused, len(result.unused) if terminal.verbose else _SHOWN), mark="  ")
    if result.destination is None:
        terminal.heading("key map")
        terminal.write(f"{text(result.map)}\n")
    terminal.wrote(result.destination)


def _print_open(terminal: Terminal, all_: Sequence[Open]) -> None:
    for one in all_ if terminal.verbose else all_[:_SHOWN]:
        count = f" ({plural(len(one.names), 'tensor')})" if len(one.names) > 1 else ""
        terminal.paragraph(f"`{one.name}`{count} {list(one.shape)}: {one.why}", mark=Styled("! ", "red"))
        shown = one.candidates if terminal.verbose else one.candidates[:_CANDIDATES]
        for candidate in shown:
            terminal.paragraph(candidate.text, mark="- ", indent=6)
        more = len(one.candidates) - len(shown)
        if more:
            terminal.paragraph(f"and {more} more", mark="  ", indent=6)
    terminal.more(0 if terminal.verbose else len(all_) - _SHOWN)


def _facts(result: Matched) -> Iterator[tuple[str, str]]:
    yield (
        "tensors",
        f"{result.tensors:,}, and {result.reference_tensors:,} in the reference; {result.found:,} are found",
    )
    for by, count in result.by.items():
        yield "", f"{count:,} {_BY[by]}"
    if result.assumed:
        yield "assumed", f"not to be transposed, which shapes do not tell: {some([one.name for one in result.assumed])}"
    yield "time", duration(result.seconds)
