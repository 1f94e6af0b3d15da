"""What an export makes: files, each of which can be made alone, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outgoing:
    """One file of the repository: `Outgoing("model-00001-of-00004.safetensors", 4998203144, write)`.

    `name` is its path in the repository, with `/`; `size` its exact bytes. `write(path)` makes it at a local path that
    does not exist yet; called again, it makes the same bytes. It raises the errors of `ckpttool.errors`.
    """

    name: str
    size: int
    write: Callable[[str], None]
