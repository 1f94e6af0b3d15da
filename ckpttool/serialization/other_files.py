"""What a file is that is no checkpoint: an archive, a web page, a model of another library, by its first bytes."""

from __future__ import annotations

import re
from contextlib import closing, suppress
from functools import partial

from ckpttool.errors import CkptError, ReadError
from ckpttool.serialization import torch_zip
from ckpttool.storage import archives, files
from ckpttool.storage.stores import Location
from ckpttool.text import safe

HEAD = 64  # bytes of a file that say what it is, but for a tar archive
INCOMPLETE = "the save or the copy did not end; take another copy, or an older step"
_UNPACK = "unpack it, then name what comes out"
_DECRYPT = "decrypt it, then name what comes out"
_ENCRYPTED = (".gpg", ".pgp", ".age", ".enc")
_UNPACK_ALL = "unpack it, `tar xf FILE`, and name what comes out"
_UNZIP = "unpack it, `unzip FILE -d DIR`, and name the directory: each file of PyTorch in it is read"
_PAGE = "the download was refused or went astray: look at it in a text editor"
WRITTEN = "name the checkpoint that it writes"
_JSON = "a JSON document"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".distcp")
_ABOUT_A_MODEL = re.compile(r".*(config|tokenizer|vocab|map|index|trainer_state|params).*\.json")
_JOBLIB = "load it with `joblib.load`, and save what it holds with `torch.save`"
NOT_READ = "it is not a PyTorch checkpoint, and is not read"

_WHERE_JOBLIB = 1 << 16  # bytes in which the first array of a file of joblib begins, mostly
_TABLE = bytes.fromhex("57fb808b247547db")  # the end of a table of LevelDB, which TensorFlow's indexes are
_PACKAGE, _SAVED = (".data/extern_modules",), ("version", "data/0")  # records of torch.package, and of torch.save
_MSGPACK = re.compile(rb"([\x81-\x8f]|\xde..)([\xa1-\xbf]|\xd9.)[ -~]", re.DOTALL)  # a map, whose first key is a text
_CONTROL = re.compile("[\0-\x07\x0e-\x1a\x1c-\x1f]")  # not of texts, which may move the cursor back or have colours
_MEMORY_MAP = ".memmap"  # the elements of a tensor, whose dtype and shape the `meta.json` beside it has
_EVENTS = re.compile(rb".{12,40}brain\.Event:", re.DOTALL)  # the version of TensorBoard's files
_ONNX = re.compile(rb"\x08[\x03-\x1f][\x12\x1a\x3a\x42]")  # the version of its format, and another field
# Programs, pictures, sounds, PDFs, fonts, and what macOS keeps of a folder.
_NO_STATE = re.compile(
    rb"\x7fELF|\x89PNG|\xff\xd8\xff|GIF8|RIFF....(?:WEBP|WAVE|AVI )|%PDF|OTTO|\0\0\0\x01Bud1", re.DOTALL
)
# The first bytes, in lower case and without white space; what such a file is, and a hint.
_OTHER_FILES = (
    (bytes(HEAD), "nothing but zeros at its beginning", "the copy did not end; take another one"),
    (b"version https://git-lfs", "a pointer of git LFS, not the file itself", "fetch the file: `git lfs pull`"),
    (b"<!doctype html", "a web page", _PAGE),
    (b"<html", "a web page", _PAGE),
    (b"<?xml", "an XML document", _PAGE),
    (b"{", _JSON, _PAGE),
    (b"\x1f\x8b", "compressed with gzip", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", _UNPACK),
    (b"\xfd7zxz\0", "compressed with xz", _UNPACK),
    (b"bzh", "compressed with bzip2", _UNPACK),
    (b"7z\xbc\xaf", "a 7z archive", _UNPACK),
    (b"-----begin pgp", "encrypted by PGP", _DECRYPT),
    (b"age-encryption.org", "encrypted by age", _DECRYPT),
    (b"salted__", "encrypted by openssl", _DECRYPT),
    (b"pk\3\4", "a zip archive, but not one of torch.save", _UNZIP),
    (b"gguf", "a GGUF model of llama.cpp", NOT_READ),
    (b"\x89hdf\r\n", "an HDF5 file, as Keras writes", NOT_READ),
    (b"\x93numpy", "a NumPy array", "load it with `numpy.load`"),
    (b"\x89png", "a picture", NOT_READ),
    (b"\xff\xd8\xff", "a picture", NOT_READ),
    (b"par1", "a Parquet file, as data sets are", NOT_READ),
    (b"sqlite format 3", "an SQLite database", NOT_READ),
    (b"%pdf", "a PDF", NOT_READ),
    (b"\x7felf", "a program", NOT_READ),
    (b"#!", "a script", WRITTEN),
    ((b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"), "a pickle that does not end where the file does", INCOMPLETE),
)


def is_of_no_state(head: bytes) -> bool:
    """Return whether a file cannot hold training state, by its first bytes: a program, a picture or the like."""
    return _NO_STATE.match(head) is not None


def is_text(name: str, head: bytes) -> bool:
    """Return whether a file begins as a text does, or is a vocabulary of sentencepiece, which begins with its first
    piece."""
    if name.endswith(_MEMORY_MAP):
        return False  # elements of one byte may be those of a text
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        # The end of the head may be the middle of a character.
        text = head[: error.start].decode() if error.start > len(head) - 4 else "\0"
    if (count := len(_CONTROL.findall(text))) == 0:
        return True
    # A bell, or what a killed process left, in lines of text.
    is_lines = count * 100 <= len(text) <= text.count("\n") * 200
    return is_lines or (name.endswith((".model", ".spm")) and head[:1] == b"\n")


def is_archive(head: bytes) -> bool:
    """Return whether a file is an archive or compressed, and may hold a checkpoint, judging by its first bytes."""
    low = head.lower()
    is_packed = any(hint in (_UNPACK, _UNZIP) and low.startswith(begins) for begins, _, hint in _OTHER_FILES)
    return is_packed or archives.is_tar(head)


def is_archive_of_files(location: Location) -> bool:
    """Return whether a file is a tar archive, or a zip archive that is neither a package of torch nor a file of
    torch.save without its pickle."""
    head = location.head(archives.HEAD)
    if not head.startswith(b"PK\3\4"):
        return archives.is_tar(head)
    listed = [_lists(location, *records) for records in (_PACKAGE, _SAVED)]
    if listed != [None, None]:
        return listed == [False, False]
    with suppress(CkptError):  # with a comment at its end, which torch never writes
        names = {member.name.partition("/")[2] for member in archives.members(location)}
        return bool(names) and names.isdisjoint((*_PACKAGE, *_SAVED, "data.pkl"))
    return False


def recognised(location: Location) -> CkptError | None:
    """Return the error for a file that is something else than a checkpoint; None if that is not known."""
    if location.endswith(_MEMORY_MAP):
        text = f"`{location}`: a memory map, of which no `meta.json` beside it says the dtype and the shape"
        return ReadError(text, hint="copy the `meta.json` that tensordict wrote beside it", file=location)
    head = location.head(HEAD)
    if archives.is_tar(location.head(archives.HEAD)):
        return ReadError(f"`{location}`: a tar archive", hint=_UNPACK_ALL, file=location, found="a tar archive")
    for pattern, what in ((_ONNX, "an ONNX model"), (_MSGPACK, "a msgpack file, as Flax writes")):
        if pattern.match(head):
            return ReadError(f"`{location}`: {what}, judging by its first bytes", hint=NOT_READ, file=location)
    if _EVENTS.match(head):
        hint = "they have losses, not weights: name the checkpoint that the run saved"
        return ReadError(f"`{location}`: TensorBoard's events", hint=hint, file=location, found="TensorBoard's events")
    nbytes = location.size()
    if nbytes > len(_TABLE) and location.read(nbytes - len(_TABLE), len(_TABLE)) == _TABLE:
        return ReadError(f"`{location}`: an index of a TensorFlow checkpoint", hint=NOT_READ, file=location)
    if head.startswith(b"PK\3\4") and _lists(location, *_PACKAGE):
        hint = "load it with `torch.package.PackageImporter`, and save the state dict with `torch.save`"
        return ReadError(f"`{location}`: a package of torch.package", hint=hint, file=location)
    if head[:1] == b"x" and int.from_bytes(head[:2], "big") % 31 == 0 and not is_text(location.name, head):
        return ReadError(f"`{location}`: compressed with zlib, as joblib does", hint=_JOBLIB, file=location)
    if (known := begins_as(head)) is not None:
        what, hint = known
        if hint == INCOMPLETE and b"joblib.numpy_pickle" in location.head(_WHERE_JOBLIB):
            what, hint = "a pickle of joblib, with arrays among its opcodes", _JOBLIB
        if hint == _UNZIP:  # the name of its first file says what it is
            name = head[30 : 30 + int.from_bytes(head[26:28], "little")].decode(errors="replace")
            what += f" (`{safe(name)}`, ...)"
        if what == _JSON and (named := _is_of(location)):
            hint = named
        return ReadError(f"`{location}`: {what}", hint=hint, file=location, found=what)
    if location.suffix in _ENCRYPTED:
        return ReadError(f"`{location}`: encrypted, judging by its name", hint=_DECRYPT, file=location)
    return None


def begins_as(head: bytes) -> tuple[str, str] | None:
    """Return what a file is that begins with these bytes, and a hint; None if that is not known. Pure."""
    low = head.lstrip(b" \t\r\n\xef\xbb\xbf").lower() if head.strip(b"\0") else bytes(HEAD)
    return next(((what, hint) for begins, what, hint in _OTHER_FILES if low.startswith(begins)), None)


def _is_of(location: Location) -> str | None:
    """Return the hint for a JSON file beside the weights that it is about; None for any other."""
    if location.suffix != ".json":
        return None
    folder = location.parent
    with suppress(CkptError):
        if any(name.endswith(_WEIGHTS) for name in folder.names()):
            return f"it is next to the weights: name the directory, `{folder or '.'}`"
    if _ABOUT_A_MODEL.fullmatch(location.name):
        return "it has no weights: name the checkpoint, a file or a directory"
    return None


def _lists(location: Location, *records: str) -> bool | None:
    """Return whether a zip archive lists all of these records below its first folder; None if it has no directory."""
    with suppress(CkptError), closing(files.Pool()) as pool:
        read, nbytes, name = partial(pool.read, location), location.size(), f"`{location}`"
        return {torch_zip.listed(read, nbytes, record, name=name) for record in records} == {True}
    return None
