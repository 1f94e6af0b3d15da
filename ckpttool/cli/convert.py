"""`ckpttool convert`: one format into another."""

from __future__ import annotations

from typing import Any

from ckpttool.cli import options
from ckpttool.cli.answer import respond_written
from ckpttool.cli.options import Option


@options.command(
    "convert",
    arguments=(options.SOURCE, options.DESTINATION),
    sections={
        "Selection": (
            *options.SELECTION,
            options.SHAPES,
            Option("--model-from PATH", "Read the model from another checkpoint."),
            Option("--optim-from PATH", "Read the optimizer from another checkpoint."),
        ),
        "Names": (
            options.RENAME,
            options.STRIP_WRAPPERS,
            options.STRIP_PREFIX,
            Option("--like FROM", "Give the model the names, dtypes and ranks that this checkpoint of a run has."),
            options.reworded(
                options.MAP,
                "Apply a key map to the model and its optimizer: a name, a .json file, or none. With --like, to the "
                "model; default: the one that fits.",
            ),
        ),
        "Format": (
            options.TO,
            options.PRODUCER,
            options.DTYPE,
            options.MAX_SHARD_SIZE,
            Option("--to-world N", "Shard the tensors for N ranks (dcp and fsdp1 only).", type=int),
            Option("--tensor-class CLASS", "Class of sharded tensors: sharded_tensor or dtensor (fsdp1 only)."),
            Option(
                "--optim-keys KEYS", "Optimizer key style: fqn (parameter names), id (integers) or flat (dotted keys)."
            ),
            Option("--optim-root KEY", "Store the optimizer under this key."),
        ),
        "Hugging Face Hub": options.HUB,
        "Execution": (*options.WRITING, options.RESUME, options.NO_MANIFEST),
        "Output": options.PRINTING,
    },
    examples=(
        "step-1000 model.safetensors --only model",
        "checkpoint.pt step-1000 --to dcp --to-world 8",
        "step-1000 hf-resume --producer accelerate --dry-run",
        "hf://Qwen/Qwen3-0.6B start --to dcp --like run7/step-10",
        "step-1000 fused --to dcp --map fused.json",
    ),
)
def convert(**arguments: Any) -> None:
    """Convert a checkpoint to another format, bit for bit.

    The tensors, objects and names stay the same unless options change them. DST is written completely or not at all.
    Data that the format cannot store is an error, unless --only, --drop or --exclude leaves it out.
    """
    respond_written("convert", **arguments)
