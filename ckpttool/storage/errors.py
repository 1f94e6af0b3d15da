"""Turns an `OSError` into an error of `ckpttool.errors`: a full disk, a missing file, no permission."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ckpttool.errors import CkptError, ReadError, StorageError

FREE_SPACE = "free some space, or write somewhere else"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # org/name


def from_os_error(error: OSError, path: str, doing: str) -> CkptError:
    """Return the error of `ckpttool.errors` for an OSError. `doing` is `read` or `write`."""
    reason = (error.strerror or str(error)).lower()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"`{path}`: {reason}", hint=FREE_SPACE, file=path)
    if doing == "write" or error.errno == errno.EIO:
        return StorageError(f"`{path}`: cannot {doing}: {reason}", file=path)
    hint = None
    if error.errno == errno.ENOENT and _REPOSITORY.fullmatch(path) and not os.path.exists(path.partition("/")[0]):
        hint = f"if it is a repository of the Hub, write `hf://{path}`"
    return ReadError(f"`{path}`: cannot read: {reason}", hint=hint, file=path)


@contextmanager
def os_errors(path: str, doing: str) -> Iterator[None]:
    """Raise an OSError of the block as the error of `ckpttool.errors`. `doing` is `read` or `write`."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, path, doing) from None
