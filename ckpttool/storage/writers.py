"""Processes that write one destination in a store together, each its own files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Writers:
    """The processes that write a destination: this one alone. Several define all three."""

    @property
    def is_first(self) -> bool:
        """Whether this process makes the files of all a checkpoint."""
        return True

    def gather(self, call: Callable[[], T]) -> list[T]:
        """Return what `call` returns in each process, in the order of their ranks: JSON. An error of one is raised in
        all."""
        return [call()]

    def ended(self, error: BaseException) -> bool:
        """Wait a while, after an error, until no other process writes any more. Return whether that is so."""
        return True


ALONE = Writers()
