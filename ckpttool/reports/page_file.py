"""The files that `--html` names: each is written once its page is there, in place of an earlier page alone."""

from __future__ import annotations

import os

from ckpttool.errors import OverwriteError, UsageError
from ckpttool.storage.stores import local_path

_GENERATOR = b'<meta name="generator" content="ckpttool '
_HEAD = 1 << 12  # bytes of a page that have it
_OTHERS = (".pdf", ".png", ".svg", ".json", ".md", ".csv", ".txt", ".pt", ".safetensors")  # suffixes of no page


def check_suffix(path: str) -> None:
    """Raise UsageError for the suffix of another kind of file."""
    suffix = local_path(path).suffix
    if suffix.lower() in _OTHERS:
        hint = f"name it `{path.removesuffix(suffix)}.html`" + (
            "; a browser prints it to PDF" if suffix == ".pdf" else ""
        )
        raise UsageError(f"`{path}`: what is written is an HTML page", hint=hint)


def checked(path: str | os.PathLike[str] | None) -> str | None:
    """Return the path, None without one. Raises UsageError for the suffix of another kind of file, and OverwriteError
    if there is a file that is not a page of ckpttool's."""
    path = None if path is None else os.fspath(path)
    if path is not None:
        check_suffix(path)
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
