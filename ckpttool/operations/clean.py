"""`clean`: what failed runs left in a directory, and its removal.

ended      of a run of this user that has ended: it is removed
running    a run is working in it
foreign    nothing proves that a run of this user made it, or it may be needed: it is left alone, and why is said
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast

from ckpttool.analysis.result import Result
from ckpttool.errors import DONE, OverwriteError, ReadError, StorageError, UsageError
from ckpttool.reports.report import Block, Line
from ckpttool.storage import remnants
from ckpttool.storage.errors import os_errors
from ckpttool.storage.remnants import Kind, Remnant
from ckpttool.storage.stores import destination, is_remote, local_path, locate, path_text
from ckpttool.text import duration, plural, size

State = Literal["ended", "running", "foreign"]


@dataclass(slots=True)
class Left:
    """What one run left."""

    names: list[str]  #: names in the directory
    kind: Kind  #: `partial output`, `old destination` or `temporary files`
    state: State  #: `ended`: it can be removed; `running`: a run works in it; `foreign`: it is left alone
    nbytes: int  #: bytes that its files take on the disk
    age: float  #: seconds since it was changed last
    why: str | None = None  #: why it is left alone
    removed: bool = False  #: whether it was removed


@dataclass(slots=True, repr=False)
class Cleaned(Result):
    """The result of `clean`. Sizes are bytes."""

    command: ClassVar[str] = "clean"

    path: str  #: path, as it was typed
    left: list[Left] = field(default_factory=list)  #: what runs left in it
    removed_bytes: int = 0  #: bytes that were freed
    notes: list[str] = field(default_factory=list)  #: remarks on what was done, for people
    exit_code: int = DONE  #: 7 if something could not be removed

    @property
    def verdict(self) -> str:
        """`clean` if nothing is there that can be removed, `left` if something is, `removed` if it was."""
        if any(one.removed for one in self.left):
            return "removed"
        return "left" if any(one.state == "ended" for one in self.left) else "clean"

    @property
    def message(self) -> str:
        """What is there, or what was removed."""
        if self.verdict == "removed":
            count = sum(one.removed for one in self.left)
            return f"removed what {plural(count, 'run')} left in {self.path}: {size(self.removed_bytes)}"
        ended = [one for one in self.left if one.state == "ended"]
        if not ended:
            return f"nothing to remove in {self.path}"
        return f"{plural(len(ended), 'run')} left {size(sum(one.nbytes for one in ended))} in {self.path}"

    @property
    def lines(self) -> Iterable[str]:
        """What `--quiet` prints: the names of what can be removed, or was."""
        return (one.names[0] for one in self.left if one.state == "ended")


def blocks(result: Cleaned, verbose: bool = False) -> Iterator[Block]:
    """Yield what runs left, and what becomes of it."""
    for one in result.left:
        words = [one.kind, size(one.nbytes), f"{duration(one.age)} old", "removed" if one.removed else one.state]
        yield Line([one.names[0]])
        yield Line([f"  {', '.join(words)}", f": {one.why}" if one.why else ""])
    yield Line([result.message])
    if result.verdict == "left":
        yield Line([f"`ckpttool clean {result.path} --yes` removes it"])


def clean(directory: str | os.PathLike[str], *, yes: bool = False) -> Cleaned:
    """List what failed runs left in a directory: partial outputs, old destinations, temporary files. What lies in the
    directories below it is not looked at.

    Args:
        directory: the directory, such as that of a destination or `TMPDIR`, or a folder of a bucket.
        yes: whether to remove what runs of this user left that have ended. An old destination whose place is empty is
            moved back instead.

    Raises:
        ReadError: if there is no such directory, or it cannot be read.
        RemoteError: if the bucket cannot be read or written.
    """
    folder = path_text(directory)
    if is_remote(folder):
        return _clean_store(folder, yes=yes)
    if local_path(folder).kind() != "dir":
        raise ReadError(f"`{folder}`: a file, not a directory", hint="name the directory that it is in", file=folder)
    result = Cleaned(folder)
    with os_errors(folder, "read"):
        found = remnants.within(folder)
    try:
        for one in found:
            result.left.append(_described(folder, one))
        if yes:
            for one, left in zip(found, result.left, strict=True):
                if left.state == "ended":
                    _remove(one, left, result)
    finally:
        for one in found:
            if (place := one.workspace) is not None:
                place.close()
    return result


def _clean_store(folder: str, *, yes: bool) -> Cleaned:
    """List what runs left in a folder of a store, whose names are those of their claims, or remove it."""
    result = Cleaned(folder)
    try:
        location = destination(folder)  # of which nothing needs to be whole
    except UsageError:
        location = locate(folder)  # a whole bucket is nothing to write at
    try:
        for one in location.store.left(location.key):
            why = "nothing proves that a run of ckpttool made it" if one.state == "foreign" else None
            left = Left([one.name], "partial output", cast(State, one.state), one.nbytes, round(one.age, 1), why)
            result.left.append(left)
            if yes and one.state == "ended":
                try:
                    one.remove()
                except OverwriteError as error:  # it goes on, since it was listed
                    left.state, left.why = "running", error.message
                    continue
                left.removed = True
                result.removed_bytes += one.nbytes
    finally:
        location.store.close()
    return result


def _described(folder: str, one: Remnant) -> Left:
    place = one.workspace
    why: str | None = one.why or None
    if place is not None and place.host is not None:
        why = f"a run on {place.host} may be working in it"
    state: State = "running" if one.running else "foreign" if why else "ended"
    nbytes, changed = remnants.measure(folder, one)
    return Left(one.names, one.kind, state, nbytes, round(max(0.0, time.time() - changed), 1), why)


def _remove(one: Remnant, left: Left, result: Cleaned) -> None:
    try:
        if one.stage is not None:
            if one.stage.put_back():
                result.notes.append(f"restored `{one.stage.dst}`: a run that was to replace it was killed")
            one.stage.remove()
        elif one.place is not None:
            one.place.remove()
    except OSError as error:
        result.exit_code = StorageError.exit_code
        left.why = f"cannot be removed: {(error.strerror or str(error)).lower()}"
        result.notes.append(f"`{left.names[0]}` {left.why}")
        return
    left.removed = True
    result.removed_bytes += left.nbytes
