"""`ckpttool match`: how is each tensor of a reference made of those of a checkpoint?"""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.options import Option


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
    from ckpttool.operations.match import blocks

    call = partial(ckpttool.match, arguments.pop("src"), content=content, **arguments)
    respond(call, blocks, as_json=as_json, quiet=quiet, verbose=verbose, shows_progress=content)
