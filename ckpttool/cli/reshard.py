"""`ckpttool reshard`: the same checkpoint for another number of ranks, or another mesh."""

from __future__ import annotations

from typing import Any

from ckpttool.cli import options
from ckpttool.cli.answer import respond_written
from ckpttool.cli.options import Option


@options.command(
    "reshard",
    arguments=(
        options.SOURCE,
        options.reworded(options.DESTINATION, "The directory to write, with missing parents, or hf://org/name/path."),
    ),
    sections={
        "Layout": (
            Option("--to-world N", "Shard for N ranks, as FSDP does.", type=int),
            Option("--to-mesh MESH", "Shard for a mesh: shard=4,tp=2 or replicate=2,shard=4."),
            Option("--like OTHER", "Use the sharding and ranks of another checkpoint."),
            Option(
                "--placements GLOB=DIM:N...",
                "Shard matching parameters over mesh dimension DIM along tensor dimension N: "
                "'layers.*.wq.weight=tp:0' is Shard(0) over tp; @FILE reads rules. Repeatable.",
            ),
            Option("--shard GLOB...", "Treat matching tensors as parameters: shard them. Repeatable."),
            Option("--replicate GLOB...", "Treat matching tensors as buffers: replicate them. Repeatable."),
            Option("--rng POLICY", "RNG states of the ranks: keep, rank0 or drop.", default="keep"),
            Option("--dataloader POLICY", "Data loader states of the ranks: keep or drop.", default="keep"),
        ),
        "Format": (options.reworded(options.TO, "dcp or fsdp1. Default: the format of SRC; dcp for a single file."),),
        "Selection": (options.ONLY, options.DROP, options.SHAPES),
        "Hugging Face Hub": options.HUB,
        "Execution": (
            Option(
                "--engine ENGINE",
                "bytes copies files; mesh loads into torch with one process per rank, and is the default there.",
            ),
            *options.WRITING,
            options.NO_MANIFEST,
            options.RESUME,
        ),
        "Output": (
            options.reworded(options.HTML, "Also write how tensors lie before and after as an HTML page."),
            *options.PRINTING,
        ),
    },
    examples=("step-1000 step-1000-w16 --to-world 16", "step-1000 step-1000-tp --to-mesh shard=4,tp=2 --dry-run"),
)
def reshard(**arguments: Any) -> None:
    """Reshard a checkpoint for another number of ranks or another mesh.

    No process group is needed; under torchrun the processes divide the work. DST is written completely or not at all.
    """
    respond_written("reshard", **arguments)
