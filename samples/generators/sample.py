"""What a sample is, and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Build = Callable[[Path], Any]
Load = Callable[[Path], Any]


@dataclass(frozen=True)
class Sample:
    """One checkpoint that `make.py` can make.

    `build(folder)` writes `folder/ckpt*` and returns what a reader must give back. The process that runs it is rank 0
    of a world of `world` processes; `build` runs on all of them and only rank 0's answer counts. `load(folder)` reads
    the checkpoint with the upstream library, to check the sample against that answer; `None` says that upstream has no
    reader for it. `needs` is a package without which `make.py` leaves the sample out unless it is asked for by name.
    """

    name: str
    build: Build
    load: Load | None
    what: str
    trap: str
    writer: str
    world: int
    reference: bool
    strides: bool
    needs: str


SAMPLES: dict[str, Sample] = {}


def sample(
    name: str,
    *,
    what: str,
    trap: str,
    writer: str,
    load: Load | None,
    world: int = 1,
    reference: bool = True,
    strides: bool = False,
    needs: str = "",
) -> Callable[[Build], Build]:
    """Register a builder under `name`; may be stacked to give one builder several names.

    `reference=False` keeps no `reference.pt`: the sample is a file that `torch.load` itself reads.
    `strides=True` checks the strides of the tensors read back as well as their values.
    """

    def register(build: Build) -> Build:
        if name in SAMPLES:
            raise ValueError(f"two samples are called {name}")
        SAMPLES[name] = Sample(name, build, load, what, trap, writer, world, reference, strides, needs)
        return build

    return register
