"""What the safetensors library, the reader that everybody else has, says about a file."""

from __future__ import annotations

from ckpttool.storage.stores import Location


def version() -> str:
    """Return the version of the library."""
    from safetensors import __version__

    return __version__


def refusal(location: Location) -> str | None:
    """Return why the library cannot open a file of this machine: its header, its offsets or its size; None if it can.
    It maps the file, and reads no tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(location.absolute(), framework="numpy"):
            return None
    except (SafetensorError, OSError) as error:
        return str(error)
