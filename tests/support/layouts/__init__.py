"""What public training scripts leave on disk, written by the libraries that they write with.

`LAYOUTS` are the layouts, one for each project; `run` writes the directory of a run with two steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from support.layouts.layout import Expected, Kind, Layout, Written

MODULES = (
    "own_directories",
    "library_directories",
    "flat_directories",
    "language_files",
    "vision_files",
    "generative_files",
    "reinforcement_files",
)
LAYOUTS: tuple[Layout, ...] = tuple(
    one
    for name in MODULES
    for one in vars(importlib.import_module(f"support.layouts.{name}")).values()
    if isinstance(one, Layout)
)
BY_NAME = {one.name: one for one in LAYOUTS}
__all__ = ["BY_NAME", "LAYOUTS", "Expected", "Kind", "Layout", "Written", "run"]


def run(directory: Path, layout: Layout, steps: Sequence[int] = (100, 200)) -> list[Written]:
    """Write a run of several steps, with the pointers and copies that its project writes beside them."""
    written = [layout.write(directory, step) for step in steps]
    for pointer in layout.pointers:
        pointer(directory, written)
    return written
