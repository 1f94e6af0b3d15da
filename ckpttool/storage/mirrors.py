"""Checkpoints that lie elsewhere: a table of stores, and the folders in which what they hold seems to lie.

`hf://org/name` is opened as a folder of empty files of the right names and sizes, its *mirror*. Whoever reads a file
asks first where its bytes are (`here`), and the store brings those that are not there yet. So every format and every
producer reads a repository as it reads a directory, and of a weight nothing is fetched that nobody looks at.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Protocol, runtime_checkable

from ckpttool.errors import CkptError, CorruptError

# A scheme, and the module whose `mount(address)` makes a mirror; imported on use.
STORES = {"hf": "ckpttool.storage.hub"}

_SCHEME = re.compile(r"([a-z][a-z0-9]*)://")


class Mirror(Protocol):
    """What a store has, as a folder: `root` is the whole of it, `path` the checkpoint in it, `address` its root as
    people type it. `digests` says whether a file that is read whole is compared with a digest."""

    root: str
    path: str
    address: str
    digests: bool

    def arrive(self, path: str, offset: int, nbytes: int | None) -> str:
        """A path where these bytes of a file of the mirror can be read; when `nbytes` is None all of it, checked
        against what the store says of it. Thread-safe."""

    def close(self) -> None:
        """Remove the folder."""


@runtime_checkable
class Fetching(Mirror, Protocol):
    """A mirror whose files come from afar, and take their time."""

    def missing(self, path: str) -> int:
        """Bytes of a file that are not on this machine."""

    def arrived(self, path: str) -> int:
        """Bytes of a file that have been fetched by now to have all of it. Thread-safe."""


Progress = Callable[[int, int], None]
_mounted: dict[str, Mirror] = {}


def store(path: str) -> ModuleType | None:
    """The module that knows about a path; None for one of this machine."""
    found = _SCHEME.match(path)
    return importlib.import_module(STORES[found[1]]) if found is not None and found[1] in STORES else None


def is_elsewhere(path: str) -> bool:
    """Whether a path has the scheme of a store."""
    found = _SCHEME.match(path)
    return found is not None and found[1] in STORES


def mount(path: str) -> Mirror | None:
    """The mirror of what lies at an address; None for a path of this machine. Raises RemoteError."""
    module = store(path)
    if module is None:
        return None
    made: Mirror = module.mount(path)
    lay(made)
    return made


def lay(mirror: Mirror) -> None:
    """Have the folder of a mirror read as one, until `unmount`."""
    _mounted[mirror.root] = mirror


def unmount(mirror: Mirror) -> None:
    """Forget a mirror and remove its folder."""
    _mounted.pop(mirror.root, None)
    mirror.close()


def of(path: str) -> Mirror | None:
    """The mirror that a path lies in."""
    for root, mirror in _mounted.items():
        if path == root or path.startswith(root + os.sep):
            return mirror
    return None


def here(path: str, offset: int = 0, nbytes: int | None = None) -> str:
    """Where these bytes of a file can be read: the path itself, unless it lies in a mirror."""
    mirror = of(path) if _mounted else None
    if mirror is None:
        return path
    try:
        return mirror.arrive(path, offset, nbytes)
    except CkptError as error:
        # A disk that is full here, say, is not the fault of the file.
        if not isinstance(error, CorruptError):
            error.facts["fetching"] = True
        raise


def is_digested(path: str) -> bool:
    """Whether a file that is read whole is compared with a digest that its store has of it."""
    mirror = of(path) if _mounted else None
    return mirror is not None and mirror.digests


def awaiting(progress: Progress | None, paths: Iterable[str]) -> Progress | None:
    """A progress that counts, beside what it is told of, the bytes of those files that have to be fetched first."""
    found = {
        path: (mirror, n) for path in paths if isinstance(mirror := of(path), Fetching) and (n := mirror.missing(path))
    }
    if progress is None or not found:
        return progress
    fetched = sum(n for _, n in found.values())

    def tell(done: int, total: int) -> None:
        progress(done + sum(min(n, mirror.arrived(path)) for path, (mirror, n) in found.items()), total + fetched)

    return tell


def as_typed(text: str) -> str:
    """A message with addresses in place of the folders that nobody has heard of."""
    for root, mirror in _mounted.items():
        text = text.replace(root, mirror.address)
    return text


def in_their_words(error: CkptError) -> CkptError:
    """An error that names addresses in place of mirrors."""
    if not _mounted:
        return error
    facts = {name: as_typed(value) if isinstance(value, str) else value for name, value in error.facts.items()}
    hint = None if error.hint is None else as_typed(error.hint)
    return type(error)(as_typed(error.message), hint=hint, **facts)
