"""The samples, opened by us and as the upstream library gave them back when they were made."""

from __future__ import annotations

import warnings
from contextlib import closing
from functools import lru_cache
from typing import Any

import lost
import pytest
import torch

from ckpttool.catalogue.protocols import Source
from ckpttool.errors import ReadError
from ckpttool.formats.detect import detect
from ckpttool.storage.stores import locate
from support.paths import CHECKPOINTS, all_samples

# Run directories and rank files have references of their own making: see test_producers, test_rankfiles.
NAMES = [name for name in all_samples() if not name.startswith(("run/", "rank/"))]


def path_of(name: str) -> str:
    """The file or directory of a sample."""
    return str(next((CHECKPOINTS / name).glob("ckpt*")))


@lru_cache(maxsize=8)
def original(name: str) -> Any:
    """What was saved. Some samples hold objects of a module beside the samples' scripts."""
    # What was saved as `torch/ddp` has wrappers in its names, and its reference has none.
    return loaded(path_of(name)) if name == "torch/ddp" else reference(name)


def reference(name: str) -> Any:
    """What a reader should make of a sample: the oracle beside it, or the sample itself."""
    path = CHECKPOINTS / name / "reference.pt"
    return loaded(str(path) if path.is_file() else path_of(name))


def loaded(path: str) -> Any:
    """What torch reads, classes of the samples and all."""
    lost.package()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=False)


def opened(name: str) -> closing[Source]:
    """A sample as a source; the test is skipped where no format reads it yet."""
    path = path_of(name)
    try:
        row = detect(locate(path))
    except ReadError:
        pytest.skip(f"no format reads {name} yet")
    return closing(row.open(locate(path)))
