"""`ckpttool verify`: is this checkpoint whole?"""

from __future__ import annotations

from functools import partial
from typing import Any

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.options import Option


@options.command(
    "verify",
    arguments=(options.CHECKPOINT,),
    sections={
        "Selection": (options.SHAPES,),
        "Comparison": (
            Option("--against OTHER", "Compare with a checkpoint that should be equal."),
            Option("--manifest FILE", "Compare with a manifest: SHA-256 of each file and tensor."),
            Option("--write-manifest FILE", "Write a manifest, if nothing is damaged."),
            Option("--values", "Check every element: NaN, infinite, all zero, denormal.", name="check_values"),
        ),
        "Execution": (options.THREADS,),
        "Output": (options.reworded(options.HTML, "Also write what was found as an HTML page."), *options.PRINTING),
    },
    examples=("step-1000", "step-1000 --values", "copy --against step-1000"),
)
def verify(as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
    """Read a whole checkpoint and report all damage.

    Every stored checksum is compared, and the index with the files. The exit code is 4 for damage, 1 for NaN or a
    difference, else 0.
    """
    import ckpttool
    from ckpttool.operations.verify.report import blocks

    call = partial(ckpttool.verify, **arguments)
    respond(call, blocks, as_json=as_json, quiet=quiet, verbose=verbose, html=arguments["html"])
