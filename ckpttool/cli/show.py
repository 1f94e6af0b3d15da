"""`ckpttool show`: one tensor, reading only its bytes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ckpttool.cli import options
from ckpttool.cli.conversion_result import checks
from ckpttool.cli.documents import Judged
from ckpttool.cli.terminal import Terminal, bold, box, err, out
from ckpttool.errors import DONE
from ckpttool.text import size
from ckpttool.version import schema

if TYPE_CHECKING:
    from ckpttool.operations.show import Shown


@options.command(
    "show",
    arguments=(options.CHECKPOINT, options.TENSOR),
    sections={"Selection": (options.SHAPES,), "Output": (options.AS_JSON, options.QUIET)},
    examples=("step-1000 model.embed.weight",),
)
def show(path: str, tensor: str, shapes: str | None, as_json: bool, quiet: bool) -> None:
    """Show one tensor: the location of its shards, the first values, and statistics."""
    import ckpttool

    shown = ckpttool.show(path, tensor, shapes=shapes)
    terminal = out()
    if as_json:
        from ckpttool.analysis.result import as_json as fields

        head: Judged = {"schema": schema("show"), "exit_code": DONE, "verdict": "shown", "message": shown.message}
        terminal.json({**head, **fields(shown)})
    elif quiet:
        for value in shown.values:
            terminal.line(_number(value))
    else:
        _print(terminal, shown)
        err().warnings(shown.notes)


def _print(terminal: Terminal, shown: Shown) -> None:
    terminal.line(bold(shown.name))
    terminal.write("\n")
    facts = {"part": shown.part, "dtype": shown.dtype, "shape": str(list(shown.shape)), "bytes": size(shown.nbytes)}
    figures = {"min": shown.min, "max": shown.max, "mean": shown.mean, "norm": shown.norm}
    facts |= {name: _number(value) for name, value in figures.items() if value is not None}
    facts |= {title: f"{n:,}" for title, n in (("NaN", shown.nans), ("inf", shown.infs)) if n}
    facts["checked"] = "; ".join(checks(shown))
    terminal.facts(facts.items())
    total, first = prod(shown.shape), len(shown.values)
    terminal.heading("values", "" if first == total else f"the first {first} of {total:,}")
    terminal.paragraph("  ".join(map(_number, shown.values)) or "none")
    terminal.heading("chunks")
    rows = [
        [*([] if rank is None else [f"rank {rank}"]), box(offsets, sizes, shown.shape), file]
        for rank, file, offsets, sizes in shown.chunks
    ]
    terminal.table(rows, wrap=(1, 2))


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
