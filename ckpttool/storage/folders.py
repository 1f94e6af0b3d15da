"""The directory of a checkpoint: every file in it, without what a save left that stopped."""

from __future__ import annotations

import os
import re

from ckpttool.storage.files import failed

# The index of DCP before it gets its name and the one before it, our staging directories, downloads of the Hub.
REMAINS = re.compile(r".*\.metadata\.(tmp|bck)|\..*\.(partial|old)-\d+|.*\.(tmp|incomplete|part)")


def all_below(root: str) -> list[str]:
    """Names relative to `root`, sorted; links to directories are not followed. Raises ReadError."""
    found: list[str] = []

    def stop(error: OSError) -> None:
        raise failed(error, root, "read")

    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = sorted(name for name in folders if not REMAINS.fullmatch(name))
        found += [
            os.path.relpath(os.path.join(folder, name), root)
            for name in sorted(names)
            if not REMAINS.fullmatch(name) and os.path.isfile(os.path.join(folder, name))
        ]
    return found
