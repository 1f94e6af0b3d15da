"""What is wrong with a command line, in ckpttool's words, and what may be meant."""

from __future__ import annotations

import os
import re
from typing import Any

from ckpttool.errors import UsageError
from ckpttool.text import near_names

# What other tools call the commands.
_SYNONYMS = {
    **dict.fromkeys(("info", "ls", "list", "tree", "summary"), "`inspect`"),
    **dict.fromkeys(("cat", "print", "head"), "`show`"),
    **dict.fromkeys(("statistics", "describe", "health"), "`stats`"),
    **dict.fromkeys(("compare", "cmp"), "`diff`"),
    **dict.fromkeys(("validate", "fsck"), "`verify`"),
    "fix": "`repair`",
    "consolidate": "`convert SRC out.pt`, which writes one file",
    "merge": "`convert SRC out.pt`, which writes one file, or `repair --merge`, for the directories of several nodes",
    "split": "`convert --max-shard-size` or `reshard --to-world`",
    **dict.fromkeys(("upload", "push", "publish"), "`export SRC hf://org/name`"),
    "download": "`convert hf://org/name DST`",
    **dict.fromkeys(("audit", "trial", "resume"), "`verify-resume`"),
    "version": "`ckpttool --version`",
    "completion": "`ckpttool --install-completion`",
}

# What other tools call the options, with those of ours that may be meant.
_OPTIONS = {
    **dict.fromkeys(("force", "replace", "f"), ("--overwrite",)),
    **dict.fromkeys(("format", "output-format", "t"), ("--to",)),
    **dict.fromkeys(("world-size", "world", "ranks", "num-ranks", "nproc", "n"), ("--to-world",)),
    **dict.fromkeys(("bf16", "fp16", "half", "precision", "cast"), ("--dtype",)),
    **dict.fromkeys(("filter", "pattern", "include", "keys", "name", "names"), ("--tensors",)),
    **dict.fromkeys(("ignore", "skip"), ("--exclude", "--drop")),
    **dict.fromkeys(("jobs", "workers", "num-threads", "num-workers"), ("--threads",)),
    **dict.fromkeys(("tol", "tolerance", "eps"), ("--rtol", "--atol")),
    **dict.fromkeys(("model-only", "weights-only", "no-optimizer", "no-optim"), ("--only",)),
    **dict.fromkeys(("limit", "head"), ("--top",)),
    **dict.fromkeys(("simulate", "plan"), ("--dry-run",)),
    **dict.fromkeys(("ref", "reference", "base"), ("--like", "--against")),
}
_VALUES = {"bf16": " bfloat16", "fp16": " float16", "half": " float16"}
_VALUES |= dict.fromkeys(("model-only", "weights-only", "no-optimizer", "no-optim"), " model")

_EXTRA = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)")


def reworded(error: Any, context: Any, words: list[str]) -> UsageError:
    """Return an error of typer's parser with our wording: lower case, backticks, and a hint. `words` were parsed."""
    command = context.command_path
    message = re.sub(r"'([^']*)'", r"`\1`", error.format_message()).strip()
    hint = f"`{command} --help` shows what it takes"
    if hasattr(error, "possibilities"):
        message = f"`{command}` has no option `{error.option_name}`"
        commands = context.command.list_commands(context) if hasattr(context.command, "list_commands") else []
        if re.fullmatch(r"--(no-)?colou?r(=.*)?", error.option_name):
            hint = "`NO_COLOR=1` before the command turns colours off, `FORCE_COLOR=1` on"
        elif given := next((word for word in words if word in commands), None):
            hint = f"options come after the command: `{command} {given} ... {error.option_name}`"
        elif ours := _ours(error.option_name, context.command):
            hint = f"did you mean {ours}?"
        elif error.option_name.lstrip("-") in ("output", "out", "o", "dst", "to-dir"):
            takes = _arguments(context.command)
            hint = f"what is written is the last argument: `{' '.join([command, *takes])}`" if "DST" in takes else hint
        elif error.possibilities:
            hint = f"did you mean `{error.possibilities[0]}`?"
    elif extra := _EXTRA.fullmatch(message.rstrip(".")):
        message = f"too many arguments: `{extra[1]}`"
        hint = f"`{' '.join([command, *_arguments(context.command)])}` is all; {hint}"
        if extra[1].isdecimal() and "--to-world" in _flags(context.command):
            hint = f"did you mean `--to-world {extra[1]}`?"
        elif os.path.lexists(extra[1].partition(" ")[0]):
            hint += "; was it a pattern? In quotes, `'*.pt'`, it is the files of one step; or name the directory"
    return UsageError(f"{message[:1].lower()}{message[1:]}".rstrip("."), hint=hint)


def _arguments(command: Any) -> list[str]:
    return [param.metavar or param.name for param in command.params if param.param_type_name == "argument"]


def _flags(command: Any) -> set[str]:
    return {flag for param in command.params for flag in param.opts}


def _ours(flag: str, command: Any) -> str:
    """Return the options of a command that another tool's option may mean: "`--rtol` or `--atol`"; empty for none."""
    word = flag.lstrip("-")
    known = [one for one in _OPTIONS.get(word, ()) if one in _flags(command)]
    return " or ".join(f"`{one}{_VALUES.get(word, '')}`" for one in known)


def missing(shown: str, param: Any, context: Any) -> UsageError:
    """Return the error for an argument or option that is required."""
    hint = f"`{context.command_path} --help` shows what it takes"
    if param.name == "recipe":
        hint = _recipe_meant(context.command_path, context.meta["words"])
    if param.name == "tensor":
        path = next((word for word in context.meta["words"] if not word.startswith("-")), "PATH")
        hint = f"`ckpttool inspect {path} --tensors '*'` lists the tensors"
    return UsageError(f"missing {param.param_type_name} {shown}", hint=hint)


def _recipe_meant(command: str, words: list[str]) -> str:
    """Return the hint for a recipe that is not given, or given as if it were a checkpoint."""
    recipe = next((word for word in words if word.endswith(".py")), None)
    if recipe is None:
        return "`ckpttool verify-resume init` writes a recipe, a Python file; name it with `--recipe FILE`"
    rest = [word for word in words if word != recipe]
    return f"`{' '.join([command, *rest, '--recipe', recipe])}`"


def command_meant(name: str, names: list[str], command: str) -> str:
    """Return the hint for a word that is none of the `names` of the commands of a `command`."""
    from ckpttool.storage.stores import is_remote

    near = near_names(name, names)
    if meant := _SYNONYMS.get(name) or (f"`{near[0]}`" if near else None):
        return f"did you mean {meant}?"
    if os.path.lexists(name) or is_remote(name):
        return f"the command comes first: `{command} {names[0]} {name}`"
    return f"`{command} --help` lists the commands"
