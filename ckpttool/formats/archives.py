"""Archives of files that were not compressed, tar and zip: what lies in one is opened as if it lay in a directory.

ppo.zip      policy.pth, policy.optimizer.pth, data       of Stable-Baselines3
asr.nemo     model_weights.ckpt, model_config.yaml        a tar archive of NeMo
"""

from __future__ import annotations

from contextlib import suppress

from ckpttool.catalogue.protocols import Format, deferred
from ckpttool.errors import CkptError
from ckpttool.serialization import other_files
from ckpttool.storage.archives import ArchiveStore
from ckpttool.storage.stores import Location


def recognise(location: Location) -> bool:
    """Return whether a file is a tar or a zip archive of other files, and lies in no archive itself."""
    with suppress(CkptError):
        is_outer = location.is_file() and not isinstance(location.store, ArchiveStore)
        return is_outer and other_files.is_archive_of_files(location)
    return False


def inside(archive: Location) -> Location:
    """Return the root of the files in an archive, whose store is to be closed. Raises CorruptError for an archive that
    is damaged, and ReadError for what is not a file stored as it is, and once."""
    return Location(str(archive), ArchiveStore(archive))


# Any checkpoint may lie in an archive: it is opened by the one module that knows all of them, which is above this one.
FORMAT = Format(
    "archive",
    "tar or zip archive of files",
    recognise,
    open=deferred("ckpttool.producers.open", "open_archive"),
    component_only=True,
)
"""An archive of files, as a catalogue."""
