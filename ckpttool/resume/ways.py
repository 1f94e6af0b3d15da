"""Resumes a command by one way after the other, until one is seen to resume by what the run does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace

from ckpttool import formats
from ckpttool.analysis.script import ScriptOption
from ckpttool.errors import UsageError
from ckpttool.fleet.ways import Way
from ckpttool.resume.results import FailedCommand, ScriptRun
from ckpttool.resume.starts import COPY, RunEnded, Starts
from ckpttool.text import some


def resume(
    way: Way, starts: Starts, run: ScriptRun, checkpoint: str, world: int | None, again: Callable[[], str] | None
) -> None:
    """Resume a run, by one value of the option after the other until one resumes. `again` makes the checkpoint anew;
    None if it cannot. Raises RunEnded if none resumes, UsageError if nothing says that it should."""
    report, tried = starts.report, list[tuple[str, str, FailedCommand]]()
    values = list(_values(way.option, checkpoint, run.resumed_at))
    values = values if again is not None and report.stop == COPY else values[:1]
    for value in values:
        if tried and again is not None:
            shutil.rmtree(starts.out, ignore_errors=True)
            shutil.rmtree(os.path.join(starts.folder, run.name), ignore_errors=True)
            checkpoint = again()
        starts.commands = replace(starts.commands, resume=way.words(value))
        findings, causes, notes = [*report.findings], report.causes, [*report.notes]
        try:
            starts.resume(run, checkpoint, world)
        except RunEnded as ended:
            failure = ended.failure
        else:
            new = [one for one in report.findings[len(findings) :] if one.kind == "not resumed"]
            if not new or (way.is_sure and len(values) == 1):
                if way.option is not None:
                    without = f"; {some([what for what, _, _ in tried])} did not resume" if tried else ""
                    report.resumed_with = f"{way.shown(value)}: {way.option.where}{without}"
                return
            failure = FailedCommand(run.name, new[0].message)
        tried.append((way.shown(value), failure.message, failure))
        report.findings, report.causes, report.notes = findings, causes, notes
    said = "; ".join(f"with `{what}`: {message}" for what, message, _ in tried)
    if way.is_sure:
        first = tried[0][2]
        if way.option is not None:
            first.message = f"{said} (found in {way.option.where}; `--resume-with` gives another way)"
        raise RunEnded(first)
    files = some([os.path.basename(one) for one in way.script.files]) if way.script.files else "no script of Python"
    near = [one.word for one in way.script.options if one.kind == "path"]
    raise UsageError(
        f"it was not found how the command resumes: {said}",
        hint="`--resume-with '... --resume {checkpoint}'` says how; `--resume-with ...` that the command finds its "
        "newest checkpoint by itself",
        found=f"read: {files}" + (f"; its options: {some(near, 8)}" if near else ""),
    )


def _values(option: ScriptOption | None, checkpoint: str, step: int | None) -> Iterator[str]:
    """Yield the values that an option may want."""
    if option is not None and option.kind == "number":
        yield str(step)
        return
    yield "{checkpoint}"
    if option is None or option.kind == "flag":
        return
    if os.path.isdir(checkpoint):
        files = [name for name in os.listdir(checkpoint) if formats.DATA_FILE.fullmatch(name)]
        yield from [f"{{checkpoint}}/{name}" for name in files if len(files) == 1]
    yield from filter(None, [option.newest])
    yield "{out}"
