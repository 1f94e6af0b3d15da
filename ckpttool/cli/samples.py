"""`ckpttool samples`: small checkpoints and scripts to try the commands on."""

from __future__ import annotations

from ckpttool.cli import options
from ckpttool.cli.documents import Sample, Samples
from ckpttool.cli.terminal import out
from ckpttool.errors import DONE
from ckpttool.reports.report import bold
from ckpttool.text import plural, size
from ckpttool.version import schema


def samples(
    dst: options.SamplesDestination, *,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Write the small real checkpoints and the training scripts of the documentation's examples.

    Examples:
        ckpttool samples try
    """
    from ckpttool.operations.samples import samples as write

    sizes = write(dst, overwrite=overwrite)
    contents = f"{plural(len(sizes), 'sample')}, {size(sum(sizes.values()))}"
    terminal = out()
    if as_json:
        rows: list[Sample] = [{"path": name, "bytes": nbytes} for name, nbytes in sizes.items()]
        document: Samples = {
            "schema": schema("samples"),
            "exit_code": DONE,
            "verdict": "written",
            "message": f"wrote {dst}: {contents}",
            "destination": dst,
            "samples": rows,
        }
        terminal.json(document)
    elif not quiet:
        terminal.line("wrote ", bold(dst), f": {contents}")
        terminal.facts([(name, size(nbytes)) for name, nbytes in sizes.items()])
