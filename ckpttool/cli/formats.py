"""`ckpttool formats`: the table of formats."""

from __future__ import annotations

from ckpttool.catalogue.protocols import Format as Row
from ckpttool.cli import options
from ckpttool.cli.documents import Format, Formats
from ckpttool.cli.terminal import out
from ckpttool.errors import DONE
from ckpttool.reports.report import bold
from ckpttool.text import plural
from ckpttool.version import schema


def formats(*, as_json: options.AsJson = False, quiet: options.Quiet = False) -> None:
    """List the formats that can be read and written.

    Examples:
        ckpttool formats --json
    """
    from ckpttool.formats import FORMATS

    terminal = out()
    if as_json:
        rows: list[Format] = [
            {
                "name": f.name,
                "title": f.title,
                "reads": True,
                "writes": f.create is not None and not f.component_only,
                "to": f.target,
                "suffixes": list(f.suffixes),
            }
            for f in FORMATS
        ]
        document: Formats = {
            "schema": schema("formats"),
            "exit_code": DONE,
            "verdict": "listed",
            "message": plural(len(rows), "format"),
            "formats": rows,
        }
        terminal.json(document)
    elif quiet:
        for row in FORMATS:
            terminal.line(row.name)
    else:
        terminal.table(
            [(bold(row.name), _uses(row), row.title) for row in FORMATS],
            ("format", "can", "what it is"),
            wrap=(2,),
            indent=0,
        )


def _uses(row: Row) -> str:
    return "read" if row.component_only or not row.create else f"read, write (--to {row.target})"
