"""The files that a catalogue was read from: of which version each is, and that no link leads out of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from ckpttool.catalogue.entries import Catalogue
from ckpttool.storage import files
from ckpttool.storage.stores import Location, locate
from ckpttool.storage.versions import Version

_INDEXES = (".metadata", "__*.metadata", "*.index.json", "ckpttool.json")


def is_index(path: str) -> bool:
    """Return whether a file says where the values of others are, by its name. Pure."""
    name = path.rpartition("/")[2]
    return any(fnmatchcase(name, pattern) for pattern in _INDEXES)


def check_links(root: Location, catalogue: Catalogue) -> None:
    """Raise CorruptError for a file that is reached through a link out of the checkpoint, also one that no index names:
    in a directory of a stranger it may lead to any file of this user. A path that was typed may be a link itself."""
    if not root.store.is_local or root.is_pattern():
        return
    folder = root if root.is_dir() else root.parent
    top, is_linked = folder.real(), dict[str, bool]()
    indexes = (locate(path) for path in catalogue.versions if is_index(path))
    for location in (*(file.location for file in catalogue.own_files if not file.missing), *indexes):
        if location == root or not location.store.is_local or not location.is_below(folder):
            continue
        above = location.parent
        if above not in is_linked:
            is_linked[above] = above != folder and above.real() != top / above.relative_to(folder)
        if is_linked[above] or location.is_link():
            folder.inside(location.relative_to(folder))


def keep_versions(catalogue: Catalogue, seen: Mapping[str, Version]) -> None:
    """Note of which version the files of a catalogue are, indexes too: that which each had before anything of it was
    read. Payloads are read of that version only. Raises ReadError if one has changed since."""
    folders = {""}
    for file in catalogue.own_files:
        location = file.location
        if not file.missing and location.store.is_local:
            key = location.key
            catalogue.versions |= {str(location): seen[key]} if key in seen else files.fingerprint([location])
            folders.add(location.rpartition("/")[0])
            file.location = Location(location, location.store, catalogue.versions.get(location))
    catalogue.versions |= {
        path: version for path, version in seen.items() if is_index(path) and path.rpartition("/")[0] in folders
    }
    files.check_unchanged(catalogue.versions)
