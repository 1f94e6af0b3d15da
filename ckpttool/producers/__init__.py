"""Who wrote this directory, and what lies where in it: a table of producers. Adding one is a file here and a row below.

A run directory mixes formats: accelerate leaves two DCP directories, a torch.save file and a pickle for each rank. A
producer knows the fingerprint of what it leaves, mounts every piece under the part that it is, and says whether the
checkpoint is complete. A directory of several checkpoints (`checkpoint-100`, `checkpoint-200`) is a run.
"""

from __future__ import annotations

from ckpttool import formats
from ckpttool.contract import OpenOptions, Source


def open_source(path: str, options: OpenOptions) -> Source:
    """What a framework left at `path`, or the one checkpoint there. Raises ReadError or CorruptError."""
    return formats.open_source(path, options)
