"""What a file is that is no checkpoint: the things that people find under a checkpoint's name."""

from __future__ import annotations

from typing import NamedTuple


class Stranger(NamedTuple):
    """How a file begins, what it is, what to do: `Stranger(b"\\x1f\\x8b", "compressed with gzip", "unpack it")`."""

    begins: bytes
    what: str
    hint: str


_UNPACK = "unpack it, then name what comes out"
_PAGE = "the download was refused or went astray: look at it in a text editor"
_OTHER = "neither we nor torch can read it"

_STRANGERS = (
    Stranger(b"version https://git-lfs", "a pointer of git LFS, not the file itself", "fetch the file: `git lfs pull`"),
    Stranger(b"<!doctype html", "a web page", _PAGE),
    Stranger(b"<html", "a web page", _PAGE),
    Stranger(b"<?xml", "an XML document", _PAGE),
    Stranger(b"{", "a JSON document", "name the checkpoint beside it, or the directory that it is in"),
    Stranger(b"\x1f\x8b", "compressed with gzip", _UNPACK),
    Stranger(b"\x28\xb5\x2f\xfd", "compressed with zstd", _UNPACK),
    Stranger(b"\xfd7zxz\0", "compressed with xz", _UNPACK),
    Stranger(b"bzh", "compressed with bzip2", _UNPACK),
    Stranger(b"7z\xbc\xaf", "a 7z archive", _UNPACK),
    Stranger(b"pk\3\4", "a zip archive, but not one of torch.save", _UNPACK),
    Stranger(b"gguf", "a GGUF model of llama.cpp", _OTHER),
    Stranger(b"\x89hdf\r\n", "an HDF5 file, as Keras writes", _OTHER),
    Stranger(b"\x93numpy", "a NumPy array", "load it with `numpy.load`"),
    Stranger(b"\x89png", "a picture", _OTHER),
    Stranger(b"%pdf", "a PDF", _OTHER),
    Stranger(b"\x7felf", "a program", _OTHER),
    Stranger(b"\x80", "a bare pickle, which torch.save does not write", "ask who wrote it how it is to be loaded"),
)


def recognise(head: bytes) -> Stranger | None:
    """The stranger that begins like this; 32 bytes are enough. None for what nobody knows. Pure."""
    low = head.lstrip(b" \t\r\n\xef\xbb\xbf").lower()
    if head and not head.strip(b"\0"):
        return Stranger(b"\0", "nothing but zeros at its beginning", "the copy did not end; take another one")
    return next((stranger for stranger in _STRANGERS if low.startswith(stranger.begins)), None)
