"""DeepSpeed: a directory for each step, below the file `latest` that names the newest.

    latest                  text: global_step20
    global_step20/          what the format `deepspeed` reads
    latest_universal        text: global_step20_universal

The Trainer of transformers and accelerate have such directories in their own.
"""

from __future__ import annotations

from ckpttool.formats.deepspeed.members import FILES, UNIVERSAL
from ckpttool.producers.components import Pattern, Producer

DEEPSPEED = Producer(
    "DeepSpeed",
    (FILES,),
    (Pattern(FILES, kind="ignored"), Pattern(rf"{UNIVERSAL}/", kind="ignored")),
    whole=True,
)
