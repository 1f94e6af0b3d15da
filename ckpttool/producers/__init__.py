"""The table of producers: the frameworks whose directories are read and written. Adding one is a module and a row.

A run directory mixes formats: accelerate leaves two DCP directories, a torch.save file and a pickle for each rank. A
producer recognises what it leaves, lists the components with the part that each is, and reports what is missing.
"""

from __future__ import annotations

from ckpttool.producers import accelerate, deepspeed, read_only, torchtitan, transformers, verl
from ckpttool.producers.components import Producer
from ckpttool.serialization.directory import Directory

# The first row that fits is taken: the Trainer has files of accelerate too, and a `config.json` beside weights is in
# the directories of several others.
PRODUCERS: tuple[Producer, ...] = (
    transformers.TRAINER,
    accelerate.ACCELERATE,
    verl.VERL,
    deepspeed.DEEPSPEED,
    read_only.MEGATRON,
    read_only.LIGHTNING,
    read_only.COMPOSER,
    torchtitan.TORCHTITAN,
    *read_only.OLMO,
    read_only.TORCH_CHECKPOINTING,
    read_only.PYTORCH_EXAMPLE,
    read_only.TORCHTUNE,
    transformers.PRETRAINED,
)


def recognise(directory: Directory) -> Producer | None:
    """Return the producer of a directory; None for a directory of no framework."""
    return next((row for row in PRODUCERS if directory.probe(row.name, row.recognise)), None)
