"""DeepSpeed: a directory for each step, below the file `latest` that names the newest.

    latest                  text: global_step20
    global_step20/          what the format `deepspeed` reads

The Trainer of transformers and accelerate have such directories in their own.
"""

from __future__ import annotations

from ckpttool.formats.deepspeed.members import FILES
from ckpttool.producers.components import Pattern, Producer

DEEPSPEED = Producer(
    "DeepSpeed",
    (FILES,),
    (Pattern(FILES, kind="ignored"),),
    whole=True,
    applies=lambda directory: "zero/" not in directory,
)
