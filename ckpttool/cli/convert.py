"""`ckpttool convert`: one format into another."""

from __future__ import annotations

from typing import Any

from ckpttool.cli import options
from ckpttool.cli.conversion_result import print_result
from ckpttool.cli.options import Option
from ckpttool.cli.progress import progress_on_stderr


@options.command(
    "convert",
    arguments=(options.SOURCE, options.DESTINATION),
    sections={
        "Selection": (
            options.ONLY,
            options.DROP,
            options.TENSORS,
            options.EXCLUDE,
            options.SHAPES,
            Option("--model-from", metavar="PATH", help="Read the model from another checkpoint."),
            Option("--optim-from", metavar="PATH", help="Read the optimizer from another checkpoint."),
        ),
        "Names": (options.RENAME, options.STRIP_WRAPPERS, options.STRIP_PREFIX),
        "Format": (
            options.TO,
            options.PRODUCER,
            options.DTYPE,
            options.MAX_SHARD_SIZE,
            Option("--to-world", metavar="N", type=int, help="Shard the tensors for N ranks (dcp and fsdp1 only)."),
            Option(
                "--tensor-class",
                metavar="CLASS",
                help="Class of sharded tensors: sharded_tensor or dtensor (fsdp1 only).",
            ),
            Option(
                "--optim-keys",
                metavar="KEYS",
                help="Optimizer key style: fqn (parameter names), id (integers) or flat (dotted keys).",
            ),
            Option("--optim-root", metavar="KEY", help="Store the optimizer under this key."),
        ),
        "Execution": (*options.WRITING, options.RESUME),
        "Output": options.PRINTING,
    },
    examples=(
        "step-1000 model.safetensors --only model",
        "checkpoint.pt step-1000 --to dcp --to-world 8",
        "step-1000 hf-resume --producer accelerate --dry-run",
    ),
)
def convert(as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
    """Convert a checkpoint to another format, bit for bit.

    The tensors, objects and names stay the same unless options change them. DST is written completely or not at all.
    Data that the format cannot store is an error, unless --only, --drop or --exclude leaves it out.
    """
    import ckpttool

    with progress_on_stderr(not (quiet or as_json)) as progress:
        result = ckpttool.convert(**arguments, progress=progress)
    print_result(
        result, "ckpttool/convert/1", as_json=as_json, quiet=quiet, verbose=verbose, checked=arguments["check"]
    )
