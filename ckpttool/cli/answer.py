"""The frame in which a command answers: it calls, shows progress, and writes the result as JSON, lines or blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ckpttool.cli.parsing import library_arguments
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import answer, err
from ckpttool.reports.report import Block, Column, dim


def respond(
    call: Callable[..., Any],
    blocks: Callable[[Any, bool], Iterable[Block]],
    *,
    as_json: bool,
    quiet: bool,
    verbose: bool = False,
    shows_progress: bool = True,
    html: str | None = None,
    rows: Callable[[Any], tuple[Sequence[Column], Iterable[Sequence[object]]]] | None = None,
    as_md: bool = False,
) -> None:
    """Call `call(progress=...)` and end with the exit code of its result. Of that, stdout gets its JSON, its `lines`
    with `--quiet`, or its `blocks`, and with these stderr gets its notes, its hint, and where its page is. With
    `rows`, columns and rows of it, stdout gets these as comma-separated values or as Markdown."""
    with progress_on_stderr(shows_progress and not (quiet or as_json)) as progress:
        result = call() if progress is None else call(progress=progress)
    with answer(result.exit_code, verbose) as terminal:
        if as_json:
            for piece in result.json():
                terminal.write(piece)
        elif rows is not None:
            terminal.rows(*rows(result), as_md=as_md)
        elif quiet:
            for line in result.lines:
                terminal.line(line)
        else:
            terminal.blocks(blocks(result, verbose))
            err().warnings(getattr(result, "notes", ()))
            if hint := getattr(result, "hint", None):
                err().paragraph(hint, mark=dim("hint: "), indent=6)
            err().wrote(html)


def respond_written(name: str, arguments: dict[str, Any]) -> None:
    """Call `convert`, `reshard` or `export` with the arguments of the command, and answer with what was written, or
    would be."""
    import ckpttool
    from ckpttool.operations.written import blocks

    as_json, quiet, verbose = (arguments[flag] for flag in ("as_json", "quiet", "verbose"))
    given = written_arguments(arguments)
    call, drawn = partial(getattr(ckpttool, name), **given), partial(blocks, check=arguments["check"])
    respond(call, drawn, as_json=as_json, quiet=quiet, verbose=verbose, html=arguments.get("html"))


def written_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the library for those of `convert`, `reshard` or `export`."""
    given = library_arguments(arguments, "no_manifest")
    if arguments.get("no_manifest") and given["manifest"] is None:
        given["manifest"] = False
    return given
