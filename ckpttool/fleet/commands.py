"""Commands with placeholders, which each run fills with its own directory, checkpoint and world size.

{out}           the output directory of the run; so is OUT, or another word that `--out` names
{checkpoint}    the checkpoint to resume from
{weights}       its files of weights, with commas between them; a word with it is left out if there are none. Beside an
                adapter they are merged weights, from which nothing resumes
{world}         the number of ranks
...             in `--resume-with`, the command itself
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.errors import UsageError

_UNKNOWN = re.compile(r"\{(?!(step|step-1)(:[^}]*)?\}|out\})\w+\}")  # in a pattern of checkpoints
_PLACEHOLDER = re.compile(r"\{(out|checkpoint|weights|world)\}")
_WEIGHTS = re.compile(r"((ft-|pytorch_)?model-\d+-of-\d+|model|pytorch_model)\.(safetensors|bin)")


@dataclass(frozen=True, slots=True)
class Commands:
    """The words of the command and of the one that resumes, and the word that stands for the output directory."""

    start: Sequence[str]
    resume: Sequence[str]
    out: str

    def filled(self, words: Sequence[str], **values: str) -> list[str]:
        """Return words with their placeholders filled. Raises UsageError for one without a value."""
        if "checkpoint" in values:
            values = {"weights": _weights(values["checkpoint"]), **values}
        absent = [f"{{{name}}}" for name, value in values.items() if name == "weights" and not value]
        return [self.fill(word, **values) for word in words if not any(one in word for one in absent)]

    def fill(self, text: str, **values: str) -> str:
        """Return a text with its placeholders filled. Raises UsageError for one without a value."""

        def value(match: re.Match[str]) -> str:
            if match[1] not in values:
                raise UsageError(f"`{text}`: there is no value for `{match[0]}` here", hint=_HINTS[match[1]])
            return values[match[1]]

        if self.out:
            # The whole first component of a path: not `OUTPUT`, `data/OUT` or `my-OUT`.
            text = re.sub(rf"(?<![\w./-]){re.escape(self.out)}(?![\w.-])", lambda _: "{out}", text)
        return _PLACEHOLDER.sub(value, text)

    def check_world(self, world: int | None, to_world: int | None) -> None:
        """Raise UsageError for a number of ranks that neither command takes, or not the one that resumes on others."""
        for flag, given, kinds in (("--world", world, (False, True)), ("--to-world", to_world, (True,))):
            if given is not None and not any(self.uses("world", resuming=one) for one in kinds):
                hint = "`torchrun --nproc-per-node {world} train.py`"
                raise UsageError(f"`{flag}` needs `{{world}}` in the command, for the number of ranks", hint=hint)

    def uses(self, name: str, *, resuming: bool = False) -> bool:
        """Return whether the command has a placeholder; the weights are those of the checkpoint."""
        words = self.resume if resuming else self.start
        marks = {one: f"{{{one}}}" for one in ("out", "checkpoint", "world")} | {"weights": "{checkpoint}"}
        marked = [self.fill(word, **marks) for word in words]
        return any(f"{{{name}}}" in word for word in marked)


_HINTS = {
    "out": "name the directory itself",
    "checkpoint": "use it in `--resume-with`, which has a checkpoint to resume from",
    "weights": "use it in `--resume-with`, which has a checkpoint to resume from",
    "world": "pass `--world N`",
}


def _weights(checkpoint: str) -> str:
    """Return the value of `{weights}` for a checkpoint, which may be a single file; empty if there is an adapter."""
    if not os.path.isdir(checkpoint):
        return checkpoint
    names = sorted(os.listdir(checkpoint))
    if any(name.startswith("adapter_model.") for name in names):
        return ""
    return ",".join(os.path.join(checkpoint, name) for name in names if _WEIGHTS.fullmatch(name))


def parse(command: Sequence[str], resume_with: str | None, out: str) -> Commands:
    """Return the commands. Raises UsageError for one that cannot be started, or writes to one place in all runs."""
    if not command:
        hint = "`ckpttool verify-resume run -- python train.py --out OUT`"
        raise UsageError("there is no command to run", hint=hint)
    try:
        words = shlex.split(resume_with) if resume_with is not None else ["..."]
    except ValueError as error:
        raise UsageError(f"`--resume-with {resume_with}`: {str(error).lower()}") from None
    if quoted := next((word for word in words if word.startswith("... ")), None):
        hint = "quote the whole command again, with what resumes, in place of `...`"
        raise UsageError(
            f"`--resume-with`: `...` stands for the command only as a word of its own, not in `{quoted}`", hint=hint
        )
    resume = [word for each in words for word in (command if each == "..." else [each])]
    commands = Commands(list(command), resume, out)
    if resume_with is not None and not any(commands.uses(one, resuming=True) for one in ("out", "checkpoint")):
        raise UsageError(
            f"`--resume-with {resume_with}` has neither `{{out}}` nor `{{checkpoint}}`",
            hint="`--resume-with '... --resume {checkpoint}'`, where `...` is the command itself",
        )
    return commands


def checked_pattern(checkpoints: str) -> str:
    """Return the pattern of `--checkpoints`. Raises UsageError for a placeholder that it cannot have."""
    if (unknown := _UNKNOWN.search(checkpoints)) is not None:
        hint = "`{step}` stands for the step, `{out}` for the output directory, `*` for anything else in a name"
        raise UsageError(f"`--checkpoints {checkpoints}`: `{unknown[0]}` is unknown", hint=hint)
    return checkpoints


def with_steps(words: Sequence[str], flag: str, steps: int) -> list[str]:
    """Return words in which the value of a flag is a number of steps: `FLAG 8` or `FLAG=8`, in the words or first in a
    line for a shell.

    Raises UsageError if no word is the flag.
    """
    bare = flag.rstrip("=")
    in_line = re.compile(rf"(?<!\S)({re.escape(bare)}[=\s]\s*)[0-9]+(?!\S)")
    for at, word in enumerate(words):
        if word.startswith(f"{bare}="):
            return [*words[:at], f"{bare}={steps}", *words[at + 1 :]]
        if word == bare and at + 1 < len(words):
            return [*words[: at + 1], str(steps), *words[at + 2 :]]
        if in_line.search(word):
            return [*words[:at], in_line.sub(rf"\g<1>{steps}", word, count=1), *words[at + 1 :]]
    raise UsageError(
        f"`--stop max-steps={flag}`: the command has no such option to change",
        hint=f"give the command its number of steps: `... {bare} N`, or stop it by `--stop sigkill`",
        found=list(words),
    )
