"""A layout: what one public training script leaves on disk for a step, and what a person expects to see in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from support.layouts.roles import Role
from support.layouts.step import Expected, Step

Kind = Literal["file", "flat", "directory"]
__all__ = ["Expected", "Kind", "Layout", "Pointer", "Role", "Written", "layout"]


@dataclass(frozen=True, slots=True)
class Written:
    """What was written for one step, as counted from the objects that were saved."""

    path: Path
    """What a person names for this step."""
    expected: tuple[Expected, ...]
    """Every root of values in every file; files are below the run's directory."""
    parameters: dict[str, int]
    """The number of parameters of each model, by its name."""
    step: int | None
    """The step, where a file or a name says it."""
    epoch: int | None
    """The epoch, where a file or a name says it."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files, and the directories that are one checkpoint of DCP, without repetition."""
        return tuple(dict.fromkeys(one.file for one in self.expected))


Pointer = Callable[[Path, Sequence[Written]], None]


@dataclass(frozen=True, slots=True)
class Layout:
    """What one public project writes.

    `kind` is `file` where a step is one file, `flat` where it is several files in the directory of the run, and
    `directory` where it is a directory of its own.
    """

    name: str
    kind: Kind
    template: str
    contents: Callable[[Step], None]
    pointers: tuple[Pointer, ...] = ()

    def path(self, run: Path, step: int) -> Path:
        """What a person names for `step`: its file, its directory, or that of the run for files beside each other."""
        return run / self.template.format(step=step, epoch=step // 100)

    def write(self, run: Path, step: int) -> Written:
        """Write one step in the directory of a run."""
        path = self.path(run, step)
        root = path if self.kind == "directory" else run
        root.mkdir(parents=True, exist_ok=True)
        files = Step(run, root, step)
        python, array = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step)
            random.seed(step)
            np.random.seed(step)
            self.contents(files)
        random.setstate(python)
        np.random.set_state(array)
        return Written(path, tuple(files.expected), files.parameters, files.known_step, files.known_epoch)


def layout(name: str, kind: Kind, template: str = "", *pointers: Pointer) -> Callable[[Callable[[Step], None]], Layout]:
    """A decorator: the function that writes the files of a step is a layout."""

    def of(contents: Callable[[Step], None]) -> Layout:
        return Layout(name, kind, template, contents, pointers)

    return of
