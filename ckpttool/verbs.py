"""What ckpttool does, as functions: each command of the CLI is one call of one of these.

Where they live is looked up when they are first used: to look at a checkpoint nothing is imported that writes one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpttool.operations.convert import convert
    from ckpttool.operations.diff import Diff, diff
    from ckpttool.operations.export import export
    from ckpttool.operations.export.plan import Exported
    from ckpttool.operations.inspect import inspect, show
    from ckpttool.operations.repair import Repaired, repair
    from ckpttool.operations.reshard import Resharding, reshard
    from ckpttool.operations.show import Shown
    from ckpttool.operations.verify import Finding, Report, verify
    from ckpttool.operations.write import Conversion

HOMES = {
    "Conversion": "operations.write",
    "Diff": "operations.diff",
    "Exported": "operations.export.plan",
    "Finding": "operations.verify",
    "Repaired": "operations.repair",
    "Report": "operations.verify",
    "Resharding": "operations.reshard",
    "Shown": "operations.show",
    "convert": "operations.convert",
    "diff": "operations.diff",
    "export": "operations.export",
    "inspect": "operations.inspect",
    "repair": "operations.repair",
    "reshard": "operations.reshard",
    "show": "operations.inspect",
    "verify": "operations.verify",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module `ckpttool.verbs` has no attribute `{name}`")
    return getattr(import_module(f"ckpttool.{HOMES[name]}"), name)


__all__ = [
    "Conversion", "Diff", "Exported", "Finding", "Repaired", "Report", "Resharding", "Shown", "convert", "diff",
    "export", "inspect", "repair", "reshard", "show", "verify",
]  # fmt: skip
