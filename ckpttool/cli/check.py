"""`ckpttool check`: does the model fit a reference?"""

from __future__ import annotations

from functools import partial
from typing import Any

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.options import Option


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
    from ckpttool.operations.check import blocks

    call = partial(ckpttool.check, arguments.pop("src"), arguments.pop("against"), content=content, **arguments)
    respond(call, blocks, as_json=as_json, quiet=quiet, verbose=verbose, shows_progress=content)
