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

from ckpttool.errors import require
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

# Each public name behind its module, which is imported when one is first used: `--help` imports what it needs.
_NAMES = """
    errors.CkptError operations.convert.convert operations.diff.Diff operations.diff.diff operations.export.export
    operations.export.plan.Exported operations.inspect.inspect operations.open.Checkpoint operations.open.LazyTensor
    operations.repair.Repaired operations.repair.repair operations.reshard.Resharding operations.reshard.reshard
    operations.show.Shown operations.show.show operations.verify.Finding operations.verify.Report
    operations.verify.verify operations.write.Conversion training.exit_on_error.exit_on_error training.load.Loaded
    training.load.load training.load_into.load_into training.save.save
"""
_MODULES = {name: module for module, _, name in (public.rpartition(".") for public in _NAMES.split())}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        if _MODULES[name].startswith("training."):
            require("torch", f"`ckpttool.{name}`")
        return getattr(import_module(f"ckpttool.{_MODULES[name]}"), name)
    raise AttributeError(f"module `ckpttool` has no attribute `{name}`")


def __dir__() -> list[str]:
    return __all__


def open(path: str | PathLike[str], *, shapes: str | None = None) -> Checkpoint:
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
