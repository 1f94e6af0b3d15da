"""ckpttool: inspect and convert PyTorch training checkpoints.

A checkpoint is a catalogue of named tensors, each a tiling of boxes, each box a run of bytes in a file. Opening one
reads its index and runs nothing; converting one lays out an empty checkpoint of the other format and moves each byte
once. `open` reads lazily; `inspect`, `show`, `diff`, `verify`, `repair`, `convert`, `reshard` and `export` are the
commands of the same names.
"""

from __future__ import annotations

from importlib import import_module
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool.errors import CkptError
    from ckpttool.operations.open import Checkpoint, LazyTensor
    from ckpttool.training.exit_on_error import exit_on_error
    from ckpttool.training.load import Loaded, load
    from ckpttool.training.load_into import load_into
    from ckpttool.training.save import save
    from ckpttool.verbs import (
        Conversion,
        Diff,
        Exported,
        Finding,
        Repaired,
        Report,
        Resharding,
        Shown,
        convert,
        diff,
        export,
        inspect,
        repair,
        reshard,
        show,
        verify,
    )

# Looked up when first used, so that `ckpttool --help` does not import what it does not need.
_HOMES = {
    "Checkpoint": "operations.open",
    "LazyTensor": "operations.open",
    "CkptError": "errors",
    "exit_on_error": "training.exit_on_error",
    "Loaded": "training.load",
    "load": "training.load",
    "load_into": "training.load_into",
    "save": "training.save",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name, "verbs")
    if home == "verbs" and name not in __all__:
        raise AttributeError(f"module `ckpttool` has no attribute `{name}`")
    return getattr(import_module(f"ckpttool.{home}"), name)


def open(
    path: str | PathLike[str], *, shapes: str | None = None
) -> Checkpoint:  # the library is used as `ckpttool.open`
    """Open the checkpoint at `path`, a file or directory of any format; see `Checkpoint`. `shapes` is `--shapes`.

    Raises `CkptError` with what is wrong and what to do.
    """
    from ckpttool.operations.open import Checkpoint

    return Checkpoint(fspath(path), shapes)


__all__ = [
    "Checkpoint", "CkptError", "Conversion", "Diff", "Exported", "Finding", "LazyTensor", "Loaded", "Repaired",
    "Report", "Resharding", "Shown", "__version__", "convert", "diff", "exit_on_error", "export", "inspect", "load",
    "load_into", "open", "repair", "reshard", "save", "show", "verify",
]  # fmt: skip
