"""What ckpttool does, as functions: each command of the CLI is one call of one of these.

Where they live is looked up when they are first used: to look at a checkpoint nothing is imported that writes one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpttool.conversion import convert
    from ckpttool.diffing import Diff, diff
    from ckpttool.exporting.local import export
    from ckpttool.exporting.planning import Exported
    from ckpttool.figures import Shown
    from ckpttool.looking import inspect, show
    from ckpttool.making import Conversion
    from ckpttool.repairing import Repaired, repair
    from ckpttool.resharding import Resharding, reshard
    from ckpttool.verifying import Finding, Report, verify

HOMES = {
    "Conversion": "making",
    "Diff": "diffing",
    "Exported": "exporting.planning",
    "Finding": "verifying",
    "Repaired": "repairing",
    "Report": "verifying",
    "Resharding": "resharding",
    "Shown": "figures",
    "convert": "conversion",
    "diff": "diffing",
    "export": "exporting.local",
    "inspect": "looking",
    "repair": "repairing",
    "reshard": "resharding",
    "show": "looking",
    "verify": "verifying",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module `ckpttool.verbs` has no attribute `{name}`")
    return getattr(import_module(f"ckpttool.{HOMES[name]}"), name)


__all__ = [
    "Conversion", "Diff", "Exported", "Finding", "Repaired", "Report", "Resharding", "Shown", "convert", "diff",
    "export", "inspect", "repair", "reshard", "show", "verify",
]  # fmt: skip
