"""`ckpttool check`: does the model fit a reference?"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.parsing import Reworded, library_arguments


def check(
    src: options.Source, *,
    against: options.AgainstModel, content: options.CompareContent = False,
    only: Annotated[options.Only, Reworded(section=options.NAMES)] = [],
    exclude: Annotated[options.Exclude, Reworded(section=options.NAMES)] = [], rename: options.Rename = [],
    strip_wrappers: options.StripWrappers = False, strip_prefix: options.StripPrefix = None,
    key_map: options.KeyMap = None, shapes: Annotated[options.Shapes, Reworded(section=options.NAMES)] = None,
    threads: options.Threads = None,
    as_json: options.AsJson = False, quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Check that the model of a checkpoint fits a reference: names, shapes, dtypes, ties, leftovers.

    Only headers are read: a few kilobytes from the Hub. The exit code is 1 if something is missing, left over or has
    another shape; a dtype difference alone is only reported.

    Examples:
        ckpttool check step-1000 --against hf://Qwen/Qwen3-0.6B
        ckpttool check step-1000 --against base/ --content
        ckpttool check model.safetensors --against base/config.json
    """
    arguments = library_arguments(locals())
    import ckpttool
    from ckpttool.operations.check import blocks

    call = partial(ckpttool.check, **arguments)
    respond(call, blocks, as_json=as_json, quiet=quiet, verbose=verbose, shows_progress=content)
