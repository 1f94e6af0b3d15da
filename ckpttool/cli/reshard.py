"""`ckpttool reshard`: the same checkpoint for another number of ranks, or another mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.cli import options
from ckpttool.cli.conversion_result import print_result
from ckpttool.cli.options import Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.text import plural

if TYPE_CHECKING:
    from ckpttool import Resharding


@options.command(
    "reshard",
    arguments=(options.SOURCE, options.reworded(options.DESTINATION, "The directory to write, like `cp`.")),
    sections={
        "Layout": (
            Option("--to-world", metavar="N", type=int, help="Shard for N ranks, as FSDP does."),
            Option("--to-mesh", metavar="MESH", help="Shard for a mesh: shard=4,tp=2 or replicate=2,shard=4."),
            Option("--like", metavar="OTHER", help="Use the sharding and ranks of another checkpoint."),
            Option(
                "--placements",
                metavar="GLOB=DIM:N",
                multiple=True,
                help="Shard matching parameters over mesh dimension DIM along tensor dimension N: "
                "'layers.*.wq.weight=tp:0' is Shard(0) over tp; @FILE reads rules. Repeatable.",
            ),
            Option(
                "--shard",
                metavar="GLOB",
                multiple=True,
                help="Treat matching tensors as parameters: shard them. Repeatable.",
            ),
            Option(
                "--replicate",
                metavar="GLOB",
                multiple=True,
                help="Treat matching tensors as buffers: replicate them. Repeatable.",
            ),
            Option("--rng", metavar="POLICY", default="keep", help="RNG states of the ranks: keep, rank0 or drop."),
            Option(
                "--dataloader", metavar="POLICY", default="keep", help="Data loader states of the ranks: keep or drop."
            ),
        ),
        "Format": (options.reworded(options.TO, "dcp or fsdp1. Default: the format of SRC; dcp for a single file."),),
        "Selection": (options.ONLY, options.DROP, options.SHAPES),
        "Execution": (
            Option(
                "--engine",
                metavar="ENGINE",
                help="bytes copies files; mesh loads into torch with one process per rank, and is the default there.",
            ),
            *options.WRITING,
            options.RESUME,
        ),
        "Output": options.PRINTING,
    },
    examples=("step-1000 step-1000-w16 --to-world 16", "step-1000 step-1000-tp --to-mesh shard=4,tp=2 --dry-run"),
)
def reshard(as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
    """Reshard a checkpoint for another number of ranks or another mesh.

    No process group is needed; under torchrun the processes divide the work. DST is written completely or not at all.
    """
    import ckpttool

    with progress_on_stderr(not (quiet or as_json)) as progress:
        result = ckpttool.reshard(**arguments, progress=progress)
    print_result(
        result,
        "ckpttool/reshard/1",
        as_json=as_json,
        quiet=quiet,
        verbose=verbose,
        checked=arguments["check"],
        more=[*_rows(result)],
    )


def _rows(result: Resharding) -> Iterator[tuple[str, str]]:
    yield "layout", f"{plural(result.world, 'rank')}, {result.mesh}"
    shared = f", {result.processes} processes" if result.processes > 1 else ""
    yield "engine", f"{result.engine}{shared} ({result.why})"
    for policy in result.policies:
        yield "per rank", policy
