"""Checkpoints at destinations in stores: what makes one of files, and which files are replaced."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

from ckpttool.errors import CkptError, OverwriteError, RemoteError
from ckpttool.producers.open import open_source
from ckpttool.serialization.manifest import NAME
from ckpttool.storage.stores import Location, Outgoing
from ckpttool.transfer.origins import is_index

_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".distcp")


def is_commit(name: str) -> bool:
    """Return whether a file makes a checkpoint of others, by its name. Pure."""
    return is_index(name) or name.rpartition("/")[2] == NAME


def order(name: str) -> tuple[bool, bool, bool, str]:
    """Return the sort key by which what makes files a checkpoint comes last."""
    return is_commit(name), name.endswith(".metadata"), name.endswith(_WEIGHTS), name


def in_order(outgoing: Iterable[Outgoing]) -> list[Outgoing]:
    """Return files in the order in which they are sent: what makes them a checkpoint comes last."""
    return sorted(outgoing, key=lambda file: order(file.name))


def below(written: Location) -> list[Outgoing]:
    """Return a file of this machine, or those of a directory, in the order in which they are sent."""
    root, names = (written.parent, [written.name]) if written.is_file() else (written, written.below())
    return in_order(Outgoing(name, (root / name).size(), path=root / name) for name in names)


def replaced(location: Location) -> list[str]:
    """Return the files of the checkpoint that is at a destination whose store keeps no earlier versions: their names
    below it, in the order of `order`. None, if there is no checkpoint that can be opened, only what a killed run left
    or somebody else. Raises OverwriteError if there are several in it, RemoteError if the store cannot be asked."""
    if location.store.is_versioned or not location.exists():
        return []
    if location.is_file():
        return [location.name]
    try:
        with closing(open_source(location)) as source:
            catalogue = source.catalogue
    except RemoteError:
        raise
    except CkptError:
        return []
    finally:
        location.store.close()
    if catalogue.location != location:
        message = f"`{location}` has other checkpoints in it, such as `{catalogue.location}`"
        raise OverwriteError(message, hint=f"name a new folder: `{location}/NAME`", file=location)
    own = {file.location.relative_to(location) for file in catalogue.own_files if file.location.is_below(location)}
    folders = {name.rpartition("/")[0] for name in own}
    indexes = {name for name in location.below() if is_commit(name) and name.rpartition("/")[0] in folders}
    return sorted(own | indexes, key=order)
