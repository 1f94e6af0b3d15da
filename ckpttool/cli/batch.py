"""`ckpttool batch`: a command for every checkpoint of a run."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from functools import partial
from typing import Any

from ckpttool.cli import options
from ckpttool.cli.answer import respond, written_arguments
from ckpttool.cli.parsing import library_arguments, parsed
from ckpttool.errors import UsageError
from ckpttool.fleet.item import WRITERS, function_of


def batch(
    words: options.BatchCommand, *, steps: options.StepsOfBatch = "all",
    jobs: options.Jobs = 1, new: options.New = False, watch: options.Watch = None, shard: options.ShardOfBatch = None,
    as_json: options.AsJson = False, quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Convert, export, verify or measure every checkpoint of a run.

    Options after the name of the command are its own; those of batch come before it. Each checkpoint is written
    completely or not at all, and the same command line continues an interrupted batch. The exit code is 0 if all
    succeeded, 10 if some failed, 11 if all did.

    Examples:
        ckpttool batch convert run7 'hf/{step}' --to safetensors --only model
        ckpttool batch --steps 1000..4000 convert run7 '{step}.pt'
        ckpttool batch -j 4 export 'run7/step-*' 'models/{step}' --like hf://org/base
        ckpttool batch --watch 3600 verify run7 'checked/{name}.json'
    """
    import ckpttool
    from ckpttool.cli.convert import convert
    from ckpttool.cli.export import export
    from ckpttool.cli.stats import stats
    from ckpttool.cli.verify import verify
    from ckpttool.fleet.batch_result import blocks

    if not words:
        hint = "`ckpttool batch convert RUN 'out/{step}' --to dcp`; `ckpttool batch --help` shows what it takes"
        raise UsageError("missing argument `COMMAND`", hint=hint)
    name, *rest = words
    commands: dict[str, Callable[..., None]]
    commands = {"convert": convert, "export": export, "verify": verify, "stats": stats}
    if name not in commands and rest and rest[0] in commands:
        hint = f"the command comes first: `ckpttool batch {rest[0]} {shlex.join([name, *rest[1:]])}`"
        raise UsageError(f"`batch` has no command `{name}`", hint=hint)
    function_of(name)
    command = commands[name]
    try:
        arguments = parsed(name, command, rest)
    except UsageError as error:
        if flag := next(
            (flag for flag in ("--steps", "--watch", "--shard", "--jobs", "--new") if flag in error.message), None
        ):
            hint = f"options of batch come first: `ckpttool batch {flag} ... {name} ...`"
            raise UsageError(error.message, hint=hint) from None
        raise
    as_json |= arguments.pop("as_json")
    quiet |= arguments.pop("quiet")
    verbose |= arguments.pop("verbose")
    *sources, dst = _paths(arguments, name)
    given = _given(command, arguments, name)
    steps = given.pop("steps", steps)  # of `stats`, it is the same behind the name
    call = partial(
        ckpttool.batch, name, sources, dst, steps=steps, jobs=jobs, new=new, watch=watch, shard=shard, **given
    )
    respond(call, blocks, as_json=as_json, quiet=quiet, verbose=verbose)


def _paths(arguments: dict[str, Any], name: str) -> list[str]:
    """Take the paths from the arguments. Raises UsageError unless there are several."""
    paths = [*arguments.pop("src" if "src" in arguments else "path")]
    if len(paths) < 2:
        ending = "" if name in WRITERS else ".json"
        hint = f"`ckpttool batch {name} {shlex.join(paths) or 'RUN'} 'out/{{step}}{ending}'`"
        raise UsageError(f"missing argument `{'DST' if paths else 'RUN'}`", hint=hint)
    return paths


def _given(command: Any, arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments of the library that are on the command line. Raises UsageError for one on what is
    printed."""
    parameters = inspect.signature(command).parameters
    every = written_arguments(arguments) if name in WRITERS else library_arguments(arguments)
    given = {key: value for key, value in every.items() if value not in (parameters[key].default, ())}
    for key in given:
        if key not in inspect.signature(function_of(name)).parameters:
            flag = f"--{key.removeprefix('as_')}"
            raise UsageError(
                f"`{flag}` changes what `{name}` prints, but a batch writes documents", hint="leave it out"
            )
    return given
