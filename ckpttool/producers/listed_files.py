"""The CRC-32 that a manifest beside a checkpoint has of its files, so that whoever reads all of one compares it.

A DCP directory has its own (`formats.dcp.manifest`), which its index shows to be of this save, or stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ckpttool.catalogue.entries import Catalogue, File
from ckpttool.errors import CkptError, CorruptError
from ckpttool.formats.dcp import manifest
from ckpttool.serialization.manifest import NAME, Manifest
from ckpttool.storage.crc import crc_of
from ckpttool.storage.stores import Location

_OF_DCP = ".distcp"


def annotate(root: Location, catalogue: Catalogue) -> None:
    """Give each file the CRC-32 in the manifest of the directory. Those without tensors were read to open them: another
    CRC-32 of one is a fault."""
    if root.is_pattern() or all(file.name.endswith(_OF_DCP) for file in catalogue.own_files):
        return
    folder = root if root.is_dir() else root.parent
    listed, notes = manifest.carried(folder, {NAME: 0} if (folder / NAME).is_file() else {})
    catalogue.warnings += notes
    if listed.crcs:
        catalogue.faults += _compared(folder, listed, catalogue)


def _compared(folder: Location, listed: Manifest, catalogue: Catalogue) -> Iterator[CkptError]:
    with_tensors = {number for tensor in catalogue.tensors for number in tensor.chunks.file}
    for number, file in enumerate(catalogue.files):
        location = file.location
        if file.missing or file.scratch or file.name.endswith(_OF_DCP) or not location.is_below(folder):
            continue
        expected = listed.crcs.get(location.relative_to(folder))
        if expected is None or file.crc is not None:
            continue
        if number in with_tensors:
            file.crc, file.crcs_at = expected, file.crcs_at or f"`{NAME}`"
        elif (found := crc_of(partial(_read_into, location), 0, file.size)) != expected:
            yield _fault(file, found, expected)


def _read_into(location: Location, offset: int, buffer: memoryview) -> None:
    buffer[:] = location.read(offset, len(buffer))


def _fault(file: File, found: int, expected: int) -> CorruptError:
    return CorruptError(
        f"`{file.name}` has CRC-32 {found:08x}, but {expected:08x} in `{NAME}` beside it: it is of another save, or "
        "was changed",
        hint=f"take it from where the checkpoint was saved, or remove `{NAME}` if it was saved again",
        file=file.name,
        found=f"{found:08x}",
        expected=f"{expected:08x}",
    )
