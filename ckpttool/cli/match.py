"""`ckpttool match`: how is each tensor of a reference made of those of a checkpoint?"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.parsing import Reworded, library_arguments


def match(
    src: options.Source, *,
    like: options.LikeReference, head_dim: options.ReferenceHeadDim = None,
    content: options.MatchContent = False, threads: Annotated[options.Threads, Reworded(section=options.VALUES)] = None,
    only: options.Only = [], exclude: options.Exclude = [],
    strip_wrappers: Annotated[options.StripWrappers, Reworded(section=options.SELECTION)] = False,
    shapes: options.Shapes = None,
    output: options.KeyMapFile = None, overwrite: options.Replace = False, as_json: options.AsJson = False,
    quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Derive a key map from a checkpoint to a reference model; ambiguous matches are listed, never guessed.

    Tensors are matched by names and shapes: renamed, stacked, split, joined or transposed. The exit code is 1 if
    anything is unresolved, or left over from an adapter or quantisation.

    Examples:
        ckpttool match step-1000 --like hf://Qwen/Qwen3-30B-A3B -o map.json
        ckpttool match model.pt --like base/config.json
    """
    arguments = library_arguments(locals())
    import ckpttool
    from ckpttool.operations.match import blocks

    call = partial(ckpttool.match, **arguments)
    respond(call, blocks, as_json=as_json, quiet=quiet, verbose=verbose, shows_progress=content)
