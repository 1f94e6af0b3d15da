"""Detects the format of a checkpoint, and says what a file is that is not one (gzip, HTML, a Git LFS pointer)."""

from __future__ import annotations

import re
from contextlib import closing, suppress
from functools import partial

from ckpttool.catalogue.protocols import Format
from ckpttool.errors import CkptError, ReadError
from ckpttool.formats import CHECKPOINTS, FORMATS
from ckpttool.serialization import torch_zip
from ckpttool.storage import files
from ckpttool.storage.stores import Location
from ckpttool.text import cut, safe, size, some

_SHOWN = 4
_TAR = 257  # where a tar archive says that it is one
_HEAD = 64  # bytes of a file that say what it is
_INCOMPLETE = "the save or the copy did not end; take another copy, or an older step"


def detect(location: Location) -> Format:
    """Return the format of the checkpoint at `location`, by its content. Raises ReadError."""
    is_pattern = location.is_pattern()
    kind = None if is_pattern else location.kind()
    # `recognise` only answers no to what cannot be opened; opening a pipe would wait, and reading a device never end.
    if kind == "dir":
        location.entries()
    elif kind == "file":
        location.check_readable()
        if not location.size():
            raise ReadError(f"`{location}` is empty", hint=_INCOMPLETE, file=location)
    elif not is_pattern:
        raise ReadError(f"`{location}`: a pipe or a device, neither a file nor a directory", file=location)
    for row in FORMATS:
        if row.recognise(location):
            return row
    if is_pattern:
        raise _unknown_pattern(location, location)
    raise _unknown_directory(location) if location.is_dir() else _unknown_file(location)


def is_of_no_state(head: bytes) -> bool:
    """Return whether a file cannot hold training state, by its first bytes: a program, a picture or the like."""
    return _NO_STATE.match(head) is not None


def is_archive(error: CkptError) -> bool:
    """Return whether a file is no checkpoint, but an archive that may hold some, by the error for it."""
    return error.hint in (_UNPACK, _UNPACK_ALL, _UNZIP)


def _unknown_pattern(path: str, location: Location) -> ReadError:
    names = [str(name) for name in location.matches()]
    text = f"`{path}` matches no files of ranks"
    if not names:
        return ReadError(text, hint="name a file or a directory", file=path)
    return ReadError(f"{text}, but {some(names)}", hint=f"name one: `{names[0]}`", file=path, found=names)


def _unknown_file(location: Location) -> CkptError:
    head = location.head(_HEAD)
    if location.head(_TAR + 5)[_TAR:] == b"ustar":
        return ReadError(f"`{location}`: a tar archive", hint=_UNPACK_ALL, file=location, found="a tar archive")
    for pattern, what in ((_ONNX, "an ONNX model"), (_MSGPACK, "a msgpack file, as Flax writes")):
        if pattern.match(head):
            return ReadError(f"`{location}`: {what}, by its first bytes", hint=_OTHER, file=location)
    nbytes = location.size()
    if nbytes > len(_TABLE) and location.read(nbytes - len(_TABLE), len(_TABLE)) == _TABLE:
        return ReadError(f"`{location}`: an index of a TensorFlow checkpoint", hint=_OTHER, file=location)
    if head.startswith(b"PK\3\4") and _is_package(location, nbytes):
        hint = "load it with `torch.package.PackageImporter`, and save the state dict with `torch.save`"
        return ReadError(f"`{location}`: a package of torch.package", hint=hint, file=location)
    low = head.lstrip(b" \t\r\n\xef\xbb\xbf").lower() if head.strip(b"\0") else bytes(_HEAD)
    for begins, what, hint in _OTHER_FILES:
        if low.startswith(begins):
            if hint == _UNZIP:  # the name of its first file says what it is
                name = head[30 : 30 + int.from_bytes(head[26:28], "little")].decode(errors="replace")
                what += f" (`{safe(name)}`, ...)"
            return ReadError(f"`{location}`: {what}", hint=hint, file=location, found=what)
    line = _as_text(head)
    shown = f"a text that begins `{cut(line, 40)}`" if line else f"{size(nbytes)} that begin with {head[:8].hex(' ')}"
    return ReadError(f"`{location}`: unrecognised format: {shown}", hint=_marks(), file=location)


def _is_package(location: Location, nbytes: int) -> bool:
    """Return whether a zip archive is one of torch.package, which holds modules with their code."""
    with suppress(CkptError), closing(files.Pool()) as pool:
        return torch_zip.listed(partial(pool.read, location), nbytes, ".data/extern_modules", name=f"`{location}`")
    return False


def _as_text(head: bytes) -> str:
    """Return the first line of a text; nothing if the bytes are not of one."""
    try:
        # The last character may have been cut.
        text = head.decode("utf-8") if len(head) < _HEAD else head[:-3].decode("utf-8", "ignore")
    except UnicodeDecodeError:
        return ""
    line = text.strip().partition("\n")[0].strip()
    return line if text.replace("\n", "").replace("\t", "").replace("\r", "").isprintable() else ""


def _unknown_directory(location: Location) -> CkptError:
    names = location.names()
    if not names:
        return ReadError(f"`{location}`: an empty directory", hint=_INCOMPLETE, file=location)
    inside = [name for name in names[:1000] if any(row.recognise(location / name) for row in CHECKPOINTS)]
    if inside:
        return found_inside(location, inside[::-1])
    files_in = [location / name for name in names[:1000] if (location / name).is_file()]
    for file in files_in:
        file.check_readable()
    if len(files_in) == len(names) == 1 and is_archive(error := _unknown_file(files_in[0])):
        return error
    if "saved_model.pb" in names or any(re.fullmatch(r".+\.data-\d{5}-of-\d{5}", name) for name in names):
        return ReadError(f"`{location}`: a checkpoint of TensorFlow, by its names", hint=_OTHER, file=location)
    more = ", ..." if len(names) > _SHOWN else ""
    text = f"`{location}`: contains no checkpoint of a known format ({', '.join(names[:_SHOWN])}{more})"
    downloads = location / _DOWNLOADS
    if downloads.is_dir() and any(name.endswith(".incomplete") for name in downloads.names()):
        return ReadError(text, hint="a download has not ended: run it again", file=location)
    is_model = not _OF_MODELS.isdisjoint(names)
    return ReadError(text, hint="its weights are somewhere else, or missing" if is_model else _marks(), file=location)


def found_inside(location: Location, names: list[str]) -> ReadError:
    """Return the error for a directory that is not a checkpoint, but contains these. The first one is the hint."""
    text = f"`{location}`: not a checkpoint; found {len(names)} inside: {some(names)}"
    return ReadError(text, hint=f"name one: `{location / names[0]}`", file=location, found=names)


def _marks() -> str:
    return f"detected by their first bytes and names: {', '.join(row.marks for row in CHECKPOINTS if row.marks)}"


# Files that are not checkpoints ---------------------------------------------------------------------------------------


_UNPACK = "unpack it, then name what comes out"
_UNPACK_ALL = "unpack it, `tar xf FILE`, and name what comes out"
_UNZIP = "unpack it, `unzip FILE -d DIR`, and name the directory: each file of PyTorch in it is read"
_PAGE = "the download was refused or went astray: look at it in a text editor"
_OTHER = "it is no PyTorch checkpoint, and is not read"

_TABLE = bytes.fromhex("57fb808b247547db")  # the end of a table of LevelDB, which TensorFlow's indexes are
_MSGPACK = re.compile(rb"([\x81-\x8f]|\xde..)([\xa1-\xbf]|\xd9.)[ -~]", re.DOTALL)  # a map, whose first key is a text
_DOWNLOADS = ".cache/huggingface/download"  # where `hf download DIR` keeps what it has begun
_OF_MODELS = {"config.json", "tokenizer.json", "tokenizer_config.json"}  # which lie beside weights
_ONNX = re.compile(rb"\x08[\x03-\x1f][\x12\x1a\x3a\x42]")  # the version of its format, and another field
# Programs, pictures, sounds, PDFs, fonts, and what macOS keeps of a folder.
_NO_STATE = re.compile(
    rb"\x7fELF|\x89PNG|\xff\xd8\xff|GIF8|RIFF....(?:WEBP|WAVE|AVI )|%PDF|OTTO|\0\0\0\x01Bud1", re.DOTALL
)
# The first bytes, in lower case and without white space; what such a file is, and a hint.
_OTHER_FILES = (
    (bytes(_HEAD), "nothing but zeros at its beginning", "the copy did not end; take another one"),
    (b"version https://git-lfs", "a pointer of git LFS, not the file itself", "fetch the file: `git lfs pull`"),
    (b"<!doctype html", "a web page", _PAGE),
    (b"<html", "a web page", _PAGE),
    (b"<?xml", "an XML document", _PAGE),
    (b"{", "a JSON document", _PAGE),
    (b"\x1f\x8b", "compressed with gzip", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", _UNPACK),
    (b"\xfd7zxz\0", "compressed with xz", _UNPACK),
    (b"bzh", "compressed with bzip2", _UNPACK),
    (b"7z\xbc\xaf", "a 7z archive", _UNPACK),
    (b"pk\3\4", "a zip archive, but not one of torch.save", _UNZIP),
    (b"gguf", "a GGUF model of llama.cpp", _OTHER),
    (b"\x89hdf\r\n", "an HDF5 file, as Keras writes", _OTHER),
    (b"\x93numpy", "a NumPy array", "load it with `numpy.load`"),
    (b"\x89png", "a picture", _OTHER),
    (b"\xff\xd8\xff", "a picture", _OTHER),
    (b"par1", "a Parquet file, as data sets are", _OTHER),
    (b"sqlite format 3", "an SQLite database", _OTHER),
    (b"%pdf", "a PDF", _OTHER),
    (b"\x7felf", "a program", _OTHER),
    (b"#!", "a script", "name the checkpoint that it writes"),
    ((b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"), "a pickle that does not end where the file does", _INCOMPLETE),
)
