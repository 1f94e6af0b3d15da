"""ckpttool: inspect and convert PyTorch training checkpoints.

A checkpoint is a catalogue of named tensors, each a tiling of boxes, each box a run of bytes in a file. Opening one
reads its index and runs nothing; converting one lays out an empty checkpoint of the other format and moves each byte
once. `open` reads lazily; `inspect`, `show`, `stats`, `report`, `check`, `match`, `diff`, `verify`, `repair`,
`convert`, `reshard`, `export`, `batch`, `prune` and `clean` are the commands of the same names.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from typing import TYPE_CHECKING, Any

from ckpttool.errors import require
from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool.analysis.differences.results import Diff
    from ckpttool.analysis.statistics.results import Stats
    from ckpttool.catalogue.entries import Catalogue
    from ckpttool.catalogue.findings import Finding
    from ckpttool.errors import (
        CkptError,
        CorruptError,
        LossError,
        OverwriteError,
        ReadError,
        RemoteError,
        StorageError,
        UsageError,
    )
    from ckpttool.fleet.batch import batch
    from ckpttool.fleet.batch_result import Batch
    from ckpttool.fleet.prune import Pruned, prune
    from ckpttool.operations.check import Checked, check
    from ckpttool.operations.clean import Cleaned, clean
    from ckpttool.operations.convert import convert
    from ckpttool.operations.diff import diff
    from ckpttool.operations.export import export
    from ckpttool.operations.export.plan import Exported
    from ckpttool.operations.inspect import inspect
    from ckpttool.operations.match import Matched, match
    from ckpttool.operations.open import Checkpoint, LazyTensor, Subtree
    from ckpttool.operations.repair import Repaired, repair
    from ckpttool.operations.report import HtmlReport, report
    from ckpttool.operations.reshard import Resharding, reshard
    from ckpttool.operations.show import Shown, show
    from ckpttool.operations.stats import stats
    from ckpttool.operations.verify import verify
    from ckpttool.operations.verify.report import Report
    from ckpttool.operations.write import Conversion
    from ckpttool.training.exit_on_error import exit_on_error
    from ckpttool.training.load import Loaded, load
    from ckpttool.training.load_into import load_into
    from ckpttool.training.save import save

# The module of each public name, which is imported when the name is first used: `--help` imports what it needs.
_MODULES = {
    "Batch": "fleet.batch_result",
    "Catalogue": "catalogue.entries",
    "Checked": "operations.check",
    "Checkpoint": "operations.open",
    "CkptError": "errors",
    "Cleaned": "operations.clean",
    "Conversion": "operations.write",
    "CorruptError": "errors",
    "Diff": "analysis.differences.results",
    "Exported": "operations.export.plan",
    "Finding": "catalogue.findings",
    "HtmlReport": "operations.report",
    "LazyTensor": "operations.open",
    "Loaded": "training.load",
    "LossError": "errors",
    "Matched": "operations.match",
    "OverwriteError": "errors",
    "Pruned": "fleet.prune",
    "ReadError": "errors",
    "RemoteError": "errors",
    "Repaired": "operations.repair",
    "Report": "operations.verify.report",
    "Resharding": "operations.reshard",
    "Shown": "operations.show",
    "Stats": "analysis.statistics.results",
    "StorageError": "errors",
    "Subtree": "operations.open",
    "UsageError": "errors",
    "batch": "fleet.batch",
    "check": "operations.check",
    "clean": "operations.clean",
    "convert": "operations.convert",
    "diff": "operations.diff",
    "exit_on_error": "training.exit_on_error",
    "export": "operations.export",
    "inspect": "operations.inspect",
    "load": "training.load",
    "load_into": "training.load_into",
    "match": "operations.match",
    "prune": "fleet.prune",
    "repair": "operations.repair",
    "report": "operations.report",
    "reshard": "operations.reshard",
    "save": "training.save",
    "show": "operations.show",
    "stats": "operations.stats",
    "verify": "operations.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        from ckpttool.text import near_names

        near = [] if name.startswith("_") else near_names(name, [*_MODULES, "open"])
        meant = f": did you mean {' or '.join(f'`{one}`' for one in near)}?" if near else ""
        raise AttributeError(f"module `ckpttool` has no attribute `{name}`{meant}", name=name)
    if _needs_torch(name):
        require("torch", f"`ckpttool.{name}`")
    return getattr(import_module(f"ckpttool.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    # `help` and completion get every name that is listed, and one that needs torch cannot be had without it.
    has_torch = find_spec("torch") is not None
    return sorted({"__version__", "open", *(name for name in _MODULES if has_torch or not _needs_torch(name))})


def _needs_torch(name: str) -> bool:
    return _MODULES[name].startswith("training.")


def open(path: str | PathLike[str], *, shapes: str | None = None) -> Checkpoint:
    """Open a checkpoint of any format, and return it as a mapping of its names: see `Checkpoint`.

    Only its index is read.

    Args:
        path: a file, a directory or `hf://org/name[/path]`.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.

    Raises:
        ReadError: if there is no checkpoint at `path`, or it cannot be read.
        CorruptError: if its index is damaged.
    """
    from ckpttool.operations.open import Checkpoint
    from ckpttool.storage.stores import path_text

    return Checkpoint(path_text(path), shapes)


# Without `open`: `from ckpttool import *` must not replace the built-in function.
__all__ = [
    "Batch",
    "Catalogue",
    "Checked",
    "Checkpoint",
    "CkptError",
    "Cleaned",
    "Conversion",
    "CorruptError",
    "Diff",
    "Exported",
    "Finding",
    "HtmlReport",
    "LazyTensor",
    "Loaded",
    "LossError",
    "Matched",
    "OverwriteError",
    "Pruned",
    "ReadError",
    "RemoteError",
    "Repaired",
    "Report",
    "Resharding",
    "Shown",
    "Stats",
    "StorageError",
    "Subtree",
    "UsageError",
    "__version__",
    "batch",
    "check",
    "clean",
    "convert",
    "diff",
    "exit_on_error",
    "export",
    "inspect",
    "load",
    "load_into",
    "match",
    "prune",
    "repair",
    "report",
    "reshard",
    "save",
    "show",
    "stats",
    "verify",
]
if find_spec("torch") is None:
    # `from ckpttool import *` gets every name that is listed.
    __all__ = [name for name in __all__ if name == "__version__" or not _needs_torch(name)]
