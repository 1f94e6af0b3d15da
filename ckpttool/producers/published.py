"""Checkpoints at destinations in stores: what makes one of files, and what is replaced by another."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import closing

from ckpttool.errors import CkptError, OverwriteError, RemoteError
from ckpttool.producers.open import is_index, open_source
from ckpttool.serialization.manifest import NAME
from ckpttool.storage.stores import Location, Outgoing

_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".distcp")
# Weights of an earlier export, in another number of shards, another format or another dtype. Loaders would take them in
# place of the new ones or mix both; with an `adapter_config.json`, PEFT would put the adapter on the new model.
_STALE_MODEL = re.compile(
    r"model(\.\w+)?(-\d{5}-of-\d{5})?(\.\w+)?\.safetensors|model\.safetensors\.index(\.\w+)?\.json"
    r"|pytorch_model(\.\w+)?(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index(\.\w+)?\.json"
    r"|consolidated([.-][\w-]+)?\.(safetensors|pth)|consolidated\.safetensors\.index\.json"
    r"|tf_model(-\d{5}-of-\d{5})?\.h5(\.index\.json)?|flax_model(-\d{5}-of-\d{5})?\.msgpack(\.index\.json)?"
    r"|rust_model\.ot|adapter_config\.json|adapter_model\.(safetensors|bin)"
)
_STALE_ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")
_STALE_DIFFUSION = re.compile(
    r"diffusion_(pytorch|flax)_model(\.\w+)?(-\d{5}-of-\d{5})?\.(safetensors|bin|msgpack)"
    r"|diffusion_pytorch_model\.(safetensors|bin)\.index(\.\w+)?\.json"
)
_STALE = {
    re.compile(r"diffusion_pytorch_model(-\d{5}-of-\d{5})?\.safetensors"): _STALE_DIFFUSION,
    re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors"): _STALE_MODEL,
    re.compile(r"adapter_model\.safetensors"): _STALE_ADAPTER,
}


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


def outdated(names: Collection[str], there: Collection[str]) -> set[str]:
    """Return which files of a repository are weights that those of these names replace. Pure."""
    # The components of a pipeline have weights in folders of their own.
    written = {name.rpartition("/")[::2] for name in names}
    patterns = {(place, old) for place, name in written for new, old in _STALE.items() if new.fullmatch(name)}
    return {
        path
        for path in {*there} - {*names}
        if any(place == path.rpartition("/")[0] and old.fullmatch(path.rpartition("/")[2]) for place, old in patterns)
    }
