"""`ckpttool samples`: small checkpoints to try the commands on."""

from __future__ import annotations

import json

from ckpttool.cli import options
from ckpttool.cli.terminal import bold, out
from ckpttool.text import plural, size


@options.command(
    "samples",
    arguments=(options.reworded(options.DESTINATION, "The directory to write."),),
    sections={"Execution": (options.OVERWRITE,), "Output": (options.AS_JSON, options.QUIET)},
    examples=("try",),
)
def samples(dst: str, overwrite: bool, as_json: bool, quiet: bool) -> None:
    """Write small real checkpoints, on which the examples of the documentation run."""
    from ckpttool.operations.samples import samples as write

    sizes = write(dst, overwrite=overwrite)
    terminal = out()
    if as_json:
        rows = [{"name": name, "bytes": nbytes} for name, nbytes in sizes.items()]
        terminal.write(json.dumps({"schema": "ckpttool/samples/1", "destination": dst, "samples": rows}) + "\n")
    elif not quiet:
        terminal.line("wrote ", bold(dst), f": {plural(len(sizes), 'checkpoint')}, {size(sum(sizes.values()))}")
        terminal.facts([(name, size(nbytes)) for name, nbytes in sizes.items()])
