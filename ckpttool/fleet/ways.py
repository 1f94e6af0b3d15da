"""How a command resumes and where it writes, where no option says so: by what its script has.

... --resume {checkpoint}     an option that is named so, and takes a value; it may be of a file in the checkpoint,
... --resume auto             the word for the newest that the script compares it with, or the output directory
... --resume                  a flag
env RESUME_FROM={checkpoint}  a variable, first where the output directory is one
...                           the command as it is: it finds its newest checkpoint by itself, or has the option
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckpttool.analysis.script import Script, ScriptOption
from ckpttool.errors import UsageError


@dataclass(frozen=True, slots=True)
class Way:
    """How a command resumes: with an option that was found in its script, or as it is."""

    command: Sequence[str]
    script: Script
    option: ScriptOption | None
    is_sure: bool  # by the name of the option, or since the script looks for what it loads

    def words(self, value: str = "") -> list[str]:
        """Return the words of the command that resumes."""
        return self.option.words(self.command, value) if self.option else [*self.command]

    def shown(self, value: str = "") -> str:
        """Return the command that resumes, as `--resume-with` has it."""
        return " ".join(self.option.words(["..."], value)) if self.option else "..."


def find(script: Script, command: Sequence[str], out: str) -> Way:
    """Return how a command resumes. Raises UsageError where two options fit alike."""
    for kind in ("resume", "load"):
        options = script.of(kind)
        if any(_value(one, command) is not None for one in options):
            return Way(command, script, None, is_sure=True)
        by_variable = any(word.endswith((f"={out}", "={out}")) and word[0] != "-" for word in command)
        groups: list[list[ScriptOption]] = [[], [], [], []]
        for one in options:
            groups[(0 if by_variable else 3) if one.word[0] == "$" else 2 if one.kind == "flag" else 1].append(one)
        for group in groups:
            if len(group) > 1:
                typed = [" ".join(one.words(["..."])) for one in group]
                both = " and ".join(f"`{text}` ({one.where})" for text, one in zip(typed, group, strict=True))
                given = " or ".join(f"`--resume-with '{one}'`" for one in typed)
                raise UsageError(f"the command may resume with {both}", hint=given, found=[one.word for one in group])
            if group:
                return Way(command, script, group[0], is_sure=kind == "resume")
    return Way(command, script, None, is_sure=script.finds_checkpoint)


def _value(option: ScriptOption, command: Sequence[str]) -> str | None:
    """Return the value that a command gives an option: empty for a flag; None without one."""
    name = option.word.strip("$=")
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name and word.startswith("-"):
            return after if option.kind == "path" else ""
    return os.environ.get(name) if option.word.startswith("$") else None


# Output directory -----------------------------------------------------------------------------------------------------


def output(script: Script, command: Sequence[str], out: str) -> str:
    """Return the word that stands for the output directory: the one asked for, or the value of the option for it.

    Raises UsageError, with what the script has.
    """
    options = script.of("out")
    values = {value: one for one in reversed(options) if (value := _value(one, command))}
    if len(values) == 1:
        return next(iter(values))
    line = shlex.join(command)
    seen = [f"`{' '.join(one.words(['...'], 'OUT'))}` ({one.where})" for one in options] or [
        f"`{one}`" for one in dict.fromkeys(script.folders)
    ]
    hints = [f"`{' '.join(one.words([line], 'OUT'))}`" for one in options[:2]]
    hints += [f"`--out {one}` before the `--`" for one in [*dict.fromkeys(script.folders)][:2] if not options]
    hint = " or ".join(hints) or (
        "each run writes to a directory of its own: `python train.py --out OUT`, `env DIR=OUT python train.py`, or "
        "`--out FOLDER` before the `--` for a command that always writes to FOLDER"
    )
    raise UsageError(
        f"the command does not name its output directory: it has neither `{{out}}` nor `{out or 'OUT'}`"
        + (f"; its script has {', '.join(seen[:4])}" if seen else ""),
        hint=hint,
    )


@contextmanager
def linked(path: str, out: str) -> Iterator[None]:
    """Let a folder that a command always writes to be the output directory of its runs. Raises UsageError if there is
    one: what is in it is the user's."""
    if os.path.lexists(path):
        hint = "move it away: it becomes a link to the output directory of each run"
        raise UsageError(f"`--out {path}` is there already", hint=hint)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    os.symlink(out, path)
    try:
        yield
    finally:
        if os.path.islink(path):
            os.unlink(path)
