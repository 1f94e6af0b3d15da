"""What the safetensors library, the reader that everybody else has, says about a file."""

from __future__ import annotations

from contextlib import suppress

from ckpttool.errors import CkptError
from ckpttool.storage.stores import Location

_LARGE_HEADER = 1 << 20  # bytes, for which the library takes ten times as many


def version() -> str:
    """Return the version of the library."""
    from safetensors import __version__

    return __version__


def refusal(location: Location) -> str | None:
    """Return why the library cannot open a file of this machine: its header, its offsets or its size; None if it can.
    It maps the file, and reads no tensor."""
    from safetensors import SafetensorError, safe_open

    with suppress(CkptError):  # which the library has to say
        if int.from_bytes(location.read(0, 8), "little") > _LARGE_HEADER:
            _return_free_memory()
    try:
        with safe_open(location.absolute(), framework="numpy"):
            return None
    except (SafetensorError, OSError) as error:
        return str(error)


def _return_free_memory() -> None:
    """Return to the system what malloc has free between blocks, as far as it can: of 100,000 tensors 54 MiB, which the
    library cannot use for its larger ones."""
    import ctypes

    with suppress(OSError, AttributeError):  # not of glibc
        ctypes.CDLL(None).malloc_trim(0)
