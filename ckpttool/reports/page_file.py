"""The files that `--html` names: each is written once its page is there, in place of an earlier page alone."""

from __future__ import annotations

import os

from ckpttool.errors import OverwriteError
from ckpttool.storage.stores import local_path

_GENERATOR = b'<meta name="generator" content="ckpttool '
_HEAD = 1 << 12  # bytes of a page that have it


def checked(path: str | os.PathLike[str] | None) -> str | None:
    """Return the path, None without one. Raises OverwriteError if there is a file that is not a page of ckpttool's."""
    path = None if path is None else os.fspath(path)
    if path is not None:
        location = local_path(path)
        if location.exists() and (not location.is_file() or _GENERATOR not in location.head(_HEAD)):
            raise OverwriteError(
                f"`{path}` exists and is not a page of ckpttool's",
                hint="write to another file, or remove it",
                file=path,
            )
    return path


def write(text: str, path: str) -> None:
    """Write a page to a file. Raises StorageError, or OverwriteError for a file that is not one of ckpttool's pages."""
    checked(path)
    with local_path(path).stage(overwrite=True, is_file=True) as stage:
        stage.path.put(text.encode())
