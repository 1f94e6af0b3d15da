"""`ckpttool formats`: the table of formats."""

from __future__ import annotations

import json

from ckpttool.cli import options
from ckpttool.cli.terminal import bold, out


@options.command("formats", sections={"Output": (options.AS_JSON, options.QUIET)})
def formats(as_json: bool, quiet: bool) -> None:
    """List the formats that can be read and written."""
    from ckpttool.formats import FORMATS

    terminal = out()
    if as_json:
        keys = ("name", "title", "reads", "writes", "to", "suffixes")
        values = ((f.name, f.title, True, f.create is not None, f.target, f.suffixes) for f in FORMATS)
        rows = [dict(zip(keys, row, strict=True)) for row in values]
        terminal.write(json.dumps({"schema": "ckpttool/formats/1", "formats": rows}) + "\n")
    elif quiet:
        for row in FORMATS:
            terminal.line(row.name)
    else:
        terminal.table(
            [(bold(f.name), f"read, write (--to {f.target})" if f.create else "read", f.title) for f in FORMATS],
            ("format", "can", "what it is"),
            wrap=(2,),
            indent=0,
        )
