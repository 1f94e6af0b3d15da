"""What is wrong with a command line, in ckpttool's words, and what may be meant."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.errors import UsageError
from ckpttool.text import near_names

# What other tools call the commands, with `-` in place of `_`.
_SYNONYMS = {
    **dict.fromkeys(("info", "ls", "list", "tree", "summary"), "`inspect`"),
    **dict.fromkeys(("cat", "print", "head"), "`show`"),
    **dict.fromkeys(("statistics", "describe", "health"), "`stats`"),
    **dict.fromkeys(("compare", "cmp"), "`diff`"),
    **dict.fromkeys(("validate", "fsck"), "`verify`"),
    "fix": "`repair`",
    "consolidate": "`convert SRC out.pt`, which writes one file",
    "merge": "`convert SRC out.pt`, which writes one file, or `repair --merge`, for the directories of several nodes",
    **dict.fromkeys(("unshard", "gather", "dcp-to-torch", "dcp-to-torch-save"), "`convert SRC out.pt`"),
    **dict.fromkeys(("torch-to-dcp", "torch-save-to-dcp"), "`convert SRC DST --to dcp`"),
    **dict.fromkeys(("merge-weights", "zero-to-fp32"), "`convert SRC DST --to safetensors --only model`"),
    "ds-to-universal": "`convert SRC DST --producer deepspeed:universal`",
    **dict.fromkeys(("split", "shard"), "`convert --max-shard-size` or `reshard --to-world`"),
    **dict.fromkeys(("extract", "select", "strip"), "`convert SRC DST --only PART`"),
    "cast": "`convert SRC DST --dtype DTYPE`",
    "rename": "`convert SRC DST --rename OLD=NEW`",
    **dict.fromkeys(("copy", "cp", "save"), "`convert SRC DST`"),
    **dict.fromkeys(("load", "open"), "`inspect`, or `ckpttool.load` in Python"),
    **dict.fromkeys(("view", "tui"), "`browse`"),
    **dict.fromkeys(("plot", "html"), "`report`"),
    **dict.fromkeys(("hash", "checksum", "sha256"), "`verify PATH --write-manifest FILE`"),
    **dict.fromkeys(("delete", "rm"), "`clean`"),
    **dict.fromkeys(("upload", "push", "publish"), "`export SRC hf://org/name`"),
    "download": "`convert hf://org/name DST`",
    **dict.fromkeys(("audit", "trial", "resume"), "`verify-resume`"),
    "version": "`ckpttool --version`",
    "completion": "`ckpttool --install-completion`",
}

# Commands of other tools that have no counterpart, and what to do instead.
_ELSEWHERE = {
    "quantize": "quantize what `ckpttool export` writes, with a library for that; `convert --dtype` casts",
}

# What other tools call the options, with those of ours that may be meant. `-` stands for `_`, too.
_OPTIONS = {
    **dict.fromkeys(("force", "replace", "f", "y"), ("--overwrite", "--yes")),
    **dict.fromkeys(("format", "output-format", "t"), ("--to",)),
    **dict.fromkeys(("safe-serialization", "safetensors"), ("--to",)),
    **dict.fromkeys(("unsafe-serialization", "torch"), ("--to",)),
    **dict.fromkeys(("world-size", "world", "ranks", "num-ranks", "nproc", "n"), ("--to-world",)),
    **dict.fromkeys(
        ("bf16", "fp16", "half", "precision", "cast", "outtype", "torch-dtype", "type", "weights"), ("--dtype",)
    ),
    **dict.fromkeys(("step", "checkpoint-step", "iteration"), ("--steps",)),
    "pdf": ("--html",),
    **dict.fromkeys(("keep", "last", "max-to-keep", "save-total-limit", "older-than", "newest"), ("--keep-last",)),
    **dict.fromkeys(("filter", "pattern", "include", "keys", "name", "names"), ("--tensors",)),
    "only": ("--tensors",),
    **dict.fromkeys(("ignore", "skip"), ("--exclude", "--drop")),
    **dict.fromkeys(("jobs", "workers", "num-threads", "num-workers"), ("--threads",)),
    **dict.fromkeys(("tol", "tolerance", "eps"), ("--rtol", "--atol")),
    **dict.fromkeys(("model-only", "weights-only", "no-optimizer", "no-optim"), ("--only",)),
    **dict.fromkeys(("limit", "head"), ("--top",)),
    **dict.fromkeys(("simulate", "plan"), ("--dry-run",)),
    **dict.fromkeys(("ref", "reference", "base"), ("--like", "--against")),
}
_VALUES = {"bf16": " bfloat16", "weights": " bfloat16", "fp16": " float16", "half": " float16"}
_VALUES |= dict.fromkeys(("model-only", "weights-only", "no-optimizer", "no-optim"), " model")
_VALUES |= {"safe-serialization": " safetensors", "safetensors": " safetensors"}
_VALUES |= {"unsafe-serialization": " torch", "torch": " torch"}

_READ = (
    "input",
    "in",
    "i",
    "src",
    "source",
    "path",
    "ckpt",
    "checkpoint",
    "checkpoint-dir",
    "checkpoint-path",
    "model",
)
_WRITTEN = (
    "output",
    "out",
    "o",
    "dst",
    "dest",
    "to-dir",
    "outfile",
    "output-dir",
    "output-path",
    "out-dir",
    "save-path",
)
_HUB = ("push-to-hub", "repo-id", "hub-model-id", "upload-repo", "push")
_WITHOUT_OPTION = {
    **dict.fromkeys(
        ("step", "steps", "checkpoint-step", "iteration"), "name the directory of the step, such as `run7/step-500`"
    ),
    **dict.fromkeys(("html", "page"), "`ckpttool report` writes the statistics of a checkpoint as one HTML file"),
    **dict.fromkeys(("revision", "branch"), "the revision is part of the address: `hf://org/name@REVISION`"),
}
_NOT_NEEDED = {
    **dict.fromkeys(("map-location", "device", "gpu", "cuda", "cpu"), "no device is used"),
    **dict.fromkeys(
        ("trust-remote-code", "weights-only", "no-weights-only", "unsafe"), "no code in a checkpoint is run"
    ),
    **dict.fromkeys(("recursive", "r"), "a directory is read with all that is in it"),
}
_DASHES = ("\u2013", "\u2014", "\u2212")  # which text processors make of `--`
_ONE_DASH = re.compile(r"-[a-z][a-z-]+")  # in front of an option that takes two
_NEAR = 0.75  # how much two names of options must be alike

_EXTRA = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)")


def reworded(error: Any, context: Any, words: list[str]) -> UsageError:
    """Return an error of typer's parser with our wording: lower case, backticks, and a hint. `words` were parsed."""
    command = context.command_path
    message = re.sub(r"'([^']*)'", r"`\1`", error.format_message()).strip()
    hint = f"`{command} --help` shows what it takes"
    if hasattr(error, "possibilities"):
        message = f"`{command}` has no option `{error.option_name}`"
        named = next((word for word in words if word.startswith("-") and os.path.lexists(word)), None)
        hint = f"write `./{named}`" if named else _option_meant(error.option_name, context, words) or hint
    elif extra := _EXTRA.fullmatch(message.rstrip(".")):
        message = f"too many arguments: `{extra[1]}`"
        hint = _extra_meant(extra[1].split(" ")[0], context.command, words) or (
            f"`{' '.join([command, *_arguments(context.command)])}` is all; {hint}{_pattern_meant(words)}"
        )
    elif flag := re.fullmatch(r"[Oo]ption `(-[^`]+)` (requires an argument|does not take a value)\.?", message):
        metavar = next((p.metavar for p in context.command.params if flag[1] in p.opts and p.metavar), None)
        hint = f"write `{flag[1]}{f' {metavar}' if metavar else ''}`{'' if metavar else ' alone'}; {hint}"
    return UsageError(f"{message[:1].lower()}{message[1:]}".rstrip("."), hint=hint)


def _option_meant(flag: str, context: Any, words: list[str]) -> str | None:
    """Return the hint for an option that a command does not have."""
    command, word = context.command, flag.lstrip("-").replace("_", "-").lower()
    usage = " ".join([context.command_path, *(takes := _arguments(command))])
    commands = command.list_commands(context) if hasattr(command, "list_commands") else []
    if re.fullmatch(r"--(no-)?colou?r(=.*)?", flag):
        return "`NO_COLOR=1` before the command turns colours off, `FORCE_COLOR=1` on"
    if given := next((one for one in words if one in commands), None):
        return f"options come after the command: `{context.command_path} {given} ... {flag}`"
    if having := [one for one in commands if flag in _flags(command.get_command(context, one))]:
        return f"did you mean {' or '.join(f'`{context.command_path} {one} ... {flag}`' for one in having[:2])}?"
    if long := next((one for one in words if _ONE_DASH.fullmatch(one) and f"-{one}" in _flags(command)), None):
        return f"did you mean `-{long}`?"
    if ours := _ours(word, command):
        return f"did you mean {ours}?"
    if word in _WRITTEN and "DST" in takes:
        return f"what is written is the last argument: `{usage}`"
    if word in _READ and takes:
        return f"what is read is the first argument: `{usage}`"
    if word in _HUB and "DST" in takes:
        return "`hf://org/name` as DST writes to the Hub"
    if word in ("head", "limit", "rows", "slice") and "[ELEMENTS]" in takes:
        return f"a slice is the last argument: `{context.command_path} PATH TENSOR '[0:4]'`"
    if hint := _WITHOUT_OPTION.get(word):
        return hint
    if why := _NOT_NEEDED.get(word):
        return f"leave it out: {why}"
    import difflib

    near = difflib.get_close_matches(word, [one.lstrip("-") for one in sorted(_flags(command))], 1, _NEAR)
    if near:
        return f"did you mean `--{near[0]}`?"
    return _others_have(flag, _flags(command), context.parent)


def _others_have(flag: str, own: set[str], above: Any) -> str | None:
    """Return the hint for an option that other commands have, such as `--to` of `export`; None if none has. `own` are
    the options of the command."""
    name = flag.lstrip("-")
    if name in ("fix", "repair", "recover"):
        return "`ckpttool repair SRC DST` writes a repaired copy"
    if "--yes" in own and name in ("dry-run", "n", "simulate", "plan"):
        return "leave it out: without `--yes`, only the plan is shown"
    if "--sort" in own and name in ("top", "limit", "head"):
        return "`--sort STAT` lists each tensor, the largest first: `--sort absmax`"
    if above is None:
        return None
    having = [
        one for one in above.command.list_commands(above) if flag in _flags(above.command.get_command(above, one))
    ]
    *first, last = [f"`{above.command_path} {one}`" for one in having[:3]] or [""]
    names = f"{', '.join(first)} and {last}" if first else last
    return f"{names} {'has' if len(having) == 1 else 'have'} that option" if having else None


def _extra_meant(extra: str, command: Any, words: list[str]) -> str | None:
    """Return the hint for a word too many that is or follows an option in another spelling."""
    options = {flag: param for param in command.params for flag in param.opts}
    if dashed := next((word for word in words if word.startswith(_DASHES)), None):
        flag = "--" + dashed.lstrip("".join(_DASHES) + "-")
        return f"`{dashed}` begins with a dash that is not a hyphen: write `{flag}`"
    if extra.isdecimal() and "--to-world" in options:
        return f"did you mean `--to-world {extra}`?"
    if "--to" in options and "--to" not in words and (name := next((one for one in words if one in _formats()), None)):
        return f"did you mean `--to {name}`?"
    at = words.index(extra) if extra in words else 0
    if (meant := _value_meant(extra, options)) is not None:
        return f"did you mean `{meant}`?"
    if at and os.path.lexists(joined := os.path.join(words[at - 1], extra)) and not os.path.lexists(extra):
        return f"did you mean `{joined}`?"
    others = [word for word in words if word != extra and os.path.lexists(word)]
    # Names that differ in numbers alone are of one pattern.
    if (
        "--against" in options
        and os.path.lexists(extra)
        and len({re.sub(r"[0-9]+", "", w) for w in (*others, extra)}) == 2
    ):
        return f"did you mean `--against {shlex.quote(extra)}`?"
    is_sliced = "elements" in {param.name for param in command.params} and at > 0
    if is_sliced and ":" in extra and ":" in words[at - 1] and "[" not in words[at - 1]:
        return f"a slice is one word: in quotes, `'[{words[at - 1].rstrip(',')}, {extra}]'`"
    if is_sliced and words[at - 1].count("[") > extra.count("["):
        return f"a slice is one word: in quotes, `{shlex.quote(f'{words[at - 1]} {extra}')}`"
    flag, value = words[at - 2 : at] if at >= 2 else ("", "")
    if (param := options.get(flag)) is None or not param.metavar:
        return None
    if os.path.lexists(extra) or os.path.lexists(value):
        return (
            f"`{flag}` takes one word; in quotes, `{flag} '*{os.path.splitext(extra)[1]}'`, no shell expands a pattern"
        )
    joint = "=" if "=" in param.metavar else "," if "=" in value else " "
    return f"`{flag}` takes one word: did you mean `{flag} {shlex.quote(f'{value}{joint}{extra}')}`?"


def _value_meant(word: str, options: Mapping[str, Any]) -> str | None:
    """Return the option, with `word` as its value, of a word that stands without one; None if that is not known."""
    from ckpttool.catalogue.dtypes import ALIASES, DTYPES
    from ckpttool.catalogue.entries import KINDS

    known = (("--steps", word.isdecimal()), ("--only", word in KINDS), ("--dtype", word in DTYPES or word in ALIASES))
    return next((f"{flag} {word}" for flag, is_one in known if is_one and flag in options), None)


def _pattern_meant(words: list[str]) -> str:
    """Return what to say of words that a shell seems to have made of a pattern."""
    there = [word for word in words if os.path.lexists(word)]
    if len(there) < 2:
        return ""
    from ckpttool.catalogue.step_names import step_in

    folder, steps = os.path.dirname(there[0]), {step_in(os.path.basename(word.rstrip("/"))) for word in there}
    if len(steps) > 1 or all(map(os.path.isdir, there)):
        is_run = folder and None not in steps and all(os.path.dirname(word) == folder for word in there)
        return f"; was it a pattern? Name one of them{f', or `{folder}` for the newest in it' if is_run else ''}"
    folders, suffixes = {os.path.dirname(word) for word in there}, {os.path.splitext(word)[1] for word in there}
    pattern = os.path.join(*folders, f"*{suffixes.pop()}") if len(folders) == len(suffixes) == 1 else "*.pt"
    folder = next(iter(folders)) if len(folders) == 1 and folders != {""} else ""
    directory = f"name the directory, `{folder}`" if folder else "name the directory"
    return f"; was it a pattern? In quotes, `'{pattern}'`, it is the files of one step; or {directory}"


def _formats() -> Sequence[str]:
    from ckpttool.formats import CHECKPOINTS

    return [row.target for row in CHECKPOINTS]


def _arguments(command: Any) -> list[str]:
    return [param.metavar or param.name for param in command.params if param.param_type_name == "argument"]


def _flags(command: Any) -> set[str]:
    return {flag for param in command.params for flag in param.opts}


def _ours(word: str, command: Any) -> str:
    """Return the options of a command that another tool's option may mean: "`--rtol` or `--atol`"; empty for none."""
    flags = _flags(command)
    if f"--{word}" in flags:
        return f"`--{word}`"
    if "--to" in flags and word.removeprefix("to-") in _formats():
        return f"`--to {word.removeprefix('to-')}`"
    known = [one for one in _OPTIONS.get(word, ()) if one in flags]
    return " or ".join(f"`{one}{_VALUES.get(word, '')}`" for one in known)


def missing(shown: str, param: Any, context: Any) -> UsageError:
    """Return the error for an argument or option that is required."""
    words = [*context.meta["words"]]
    required = [one for one in context.command.params if one.required]
    if param.param_type_name == "argument":
        absent = [one.metavar for one in required[required.index(param) :] if one.param_type_name == "argument"]
    else:
        absent = [param.opts[0], param.metavar]
    positional = [one for one in context.command.params if one.param_type_name == "argument"]
    if absent[0] in ("--like", "--against") and len(words) == len(positional) + 1 and not words[-1].startswith("-"):
        absent[1] = shlex.quote(words.pop())
    pieces = [one for word in words if not os.path.lexists(word) for one in word.split() if one != word]
    if pieces and os.path.lexists(pieces[0]):
        words, absent = pieces, []
    hint = f"`{' '.join([context.command_path, *map(shlex.quote, words), *absent])}`"
    hint += f"; `{context.command_path} --help` shows what it takes"
    if param.name == "recipe":
        hint = _recipe_meant(context.command_path, words)
    if param.name == "tensor":
        path = next((word for word in words if not word.startswith("-")), "PATH")
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

    word = name.replace("_", "-").lower()
    if word in _ELSEWHERE:
        return _ELSEWHERE[word]
    if "audit" in names and word in ("check", "inspect", "verify"):
        return f"did you mean `{command} audit`?"
    near = near_names(word, names)
    if meant := _SYNONYMS.get(word) or (f"`{near[0]}`" if near else None):
        return f"did you mean {meant}?"
    if "run" in names and name.endswith(".py"):
        return f"the command to run goes after `run --`: `{command} run -- python {shlex.quote(name)} --out OUT`"
    if "run" in names and shutil.which(name):
        return f"the command to run goes after `run --`: `{command} run -- {name} ...`"
    if os.path.lexists(name) or is_remote(name):
        return f"the command comes first: `{command} {names[0]} {name}`"
    return f"`{command} --help` lists the commands"
