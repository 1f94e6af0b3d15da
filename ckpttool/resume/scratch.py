"""The folder of all that the runs of a verification leave behind."""

from __future__ import annotations

import os
from contextlib import ExitStack

from ckpttool.errors import OverwriteError
from ckpttool.storage.workspace import scratch_directory


def kept_folder(stack: ExitStack, keep: str | os.PathLike[str] | None, prefix: str) -> str:
    """Return the folder `keep`, which must be new or empty, or without one a temporary folder that goes with `stack`.

    Raises OverwriteError if there is something in it.
    """
    if keep is None:
        return stack.enter_context(scratch_directory(prefix))
    path = checked_folder(keep)
    os.makedirs(path, exist_ok=True)
    return path


def checked_folder(keep: str | os.PathLike[str]) -> str:
    """Return the path of a folder that is new or empty. Raises OverwriteError for another one."""
    path = os.path.abspath(keep)
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        hint = "pass an empty or a new folder to `--keep`"
        raise OverwriteError(f"`{os.fspath(keep)}` exists and is not empty", hint=hint)
    return path
