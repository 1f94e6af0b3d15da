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
    from ckpttool.operations.convert import convert
    from ckpttool.operations.diff import Diff, diff
    from ckpttool.operations.export import export
    from ckpttool.operations.export.plan import Exported
    from ckpttool.operations.inspect import inspect
    from ckpttool.operations.open import Checkpoint, LazyTensor
    from ckpttool.operations.repair import Repaired, repair
    from ckpttool.operations.reshard import Resharding, reshard
    from ckpttool.operations.show import Shown, show
    from ckpttool.operations.verify import Finding, Report, verify
    from ckpttool.operations.write import Conversion
    from ckpttool.training.exit_on_error import exit_on_error
    from ckpttool.training.load import Loaded, load
    from ckpttool.training.load_into import load_into
    from ckpttool.training.save import save

# The module of each public name, imported when the name is first used: `ckpttool --help` imports what it needs.
_MODULES = {
    "Checkpoint": "operations.open",
    "CkptError": "errors",
    "Conversion": "operations.write",
    "Diff": "operations.diff",
    "Exported": "operations.export.plan",
    "Finding": "operations.verify",
    "LazyTensor": "operations.open",
    "Loaded": "training.load",
    "Repaired": "operations.repair",
    "Report": "operations.verify",
    "Resharding": "operations.reshard",
    "Shown": "operations.show",
    "convert": "operations.convert",
    "diff": "operations.diff",
    "exit_on_error": "training.exit_on_error",
    "export": "operations.export",
    "inspect": "operations.inspect",
    "load": "training.load",
    "load_into": "training.load_into",
    "repair": "operations.repair",
    "reshard": "operations.reshard",
    "save": "training.save",
    "show": "operations.show",
    "verify": "operations.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module `ckpttool` has no attribute `{name}`")
    return getattr(import_module(f"ckpttool.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


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
