"""ckpttool: inspect and convert PyTorch training checkpoints.

A checkpoint is a catalogue of named tensors, each a tiling of boxes, each box a run of bytes in a file. Opening one
reads its index and runs nothing; converting one lays out an empty checkpoint of the other format and moves each byte
once. `open` reads lazily, `inspect`, `show` and `convert` are the commands of the same names.
"""

from __future__ import annotations

from ckpttool.checkpoint import Checkpoint, LazyTensor
from ckpttool.errors import CkptError
from ckpttool.verbs import Conversion, convert, inspect, show
from ckpttool.version import __version__


def open(path: str) -> Checkpoint:  # the library is used as `ckpttool.open`
    """Open the checkpoint at `path`, a file or directory of any format; see `Checkpoint`.

    Raises `CkptError` with what is wrong and what to do.
    """
    return Checkpoint(path)


__all__ = ["Checkpoint", "CkptError", "Conversion", "LazyTensor", "__version__", "convert", "inspect", "open", "show"]
