"""Reads a safetensors file, an index, a directory or a training state into a catalogue."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, PlacedSource, Source
from ckpttool.errors import CorruptError, ReadError
from ckpttool.formats.safetensors import checksums, index, state_json
from ckpttool.formats.safetensors.model_files import (
    SHARDED,
    check_sums,
    mount,
    open_directory,
    open_file,
    open_indexed,
    rank_files,
    read_json,
)
from ckpttool.formats.safetensors.sharding import SUFFIX
from ckpttool.serialization import safetensors_header
from ckpttool.serialization.safetensors_header import Header, HeaderEntry
from ckpttool.storage.stores import Location
from ckpttool.text import some


def recognise(location: Location) -> bool:
    """Return whether `location` is a safetensors file, complete or not, or a directory with such files."""
    try:
        if not location.is_dir():
            head = location.head(9)
            # A file that ends before its header, or whose header is too long, is recognised by its name only.
            named = location.endswith(SUFFIX) and head[8:9] in (b"", b"{")
            return (
                safetensors_header.looks_like(head) or named or (location.endswith(index.SUFFIX) and head[:1] == b"{")
            )
        names = location.names()
        return (
            _is_state(location, names)
            or any(name.endswith((SUFFIX, index.SUFFIX)) for name in names)
            or (SHARDED in names and bool(rank_files(location / SHARDED)))
        )
    except (CorruptError, ReadError):
        return False


def _is_state(root: Location, names: Sequence[str]) -> bool:
    return state_json.NAME in names and state_json.looks_like((root / state_json.NAME).head(4096))


def open(location: Location, options: OpenOptions = NO_HINTS) -> Source:
    """Return the source of a file, an index or a directory.

    Raises CorruptError if the files are inconsistent.
    """
    if not location.is_dir():
        root, name = location.parent, location.name
        is_index = location.endswith(index.SUFFIX)
        return PlacedSource(open_indexed(root, name, options.only) if is_index else open_file(root, name))
    names = location.names()
    if _is_state(location, names):
        return PlacedSource(_open_state(location))
    return PlacedSource(open_directory(location, names, options.only))


# A whole training state -----------------------------------------------------------------------------------------------


def _open_state(root: Location) -> Catalogue:
    catalogue = Catalogue("safetensors", facts={"layout": "training state"})
    headers: dict[str, tuple[int, Header]] = {}
    used: set[tuple[str, str]] = set()
    where = f"`{root / state_json.NAME}`"

    def find(file: str, name: str) -> tuple[int, HeaderEntry]:
        if file not in headers:
            headers[file] = mount(catalogue, root.inside(file), file)
        number, header = headers[file]
        entry = header.tensors.get(name)
        if entry is None:
            text = f"{where}: says that tensor `{name}` is in `{file}`, which does not have it"
            raise CorruptError(text, hint="the files are not of the same save", tensor=name, file=file)
        used.add((file, name))
        return number, entry

    sums = state_json.parse(read_json(root / state_json.NAME), catalogue, find, where)
    if sums is not None:
        actual = {file: header.metadata.get(checksums.KEY) for file, (_, header) in headers.items()}
        of_files = {file: checksums.of_value(value) for file, value in actual.items() if value is not None}
        check_sums(catalogue, sums, of_files, where)
    unlisted = [n for file, (_, header) in headers.items() for n in header.tensors if (file, n) not in used]
    if unlisted:
        text = f"{where}: does not name all tensors of its files: {some(unlisted)}"
        raise CorruptError(text, hint="the files are not of the same save", tensor=unlisted[0])
    if unused := [name for name in root.names() if name.endswith(SUFFIX) and name not in headers]:
        catalogue.facts["unused"] = unused
    return catalogue
