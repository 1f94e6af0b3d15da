"""Detects the format of a checkpoint, and says what a file is that is not one (gzip, HTML, a Git LFS pointer)."""

from __future__ import annotations

import re
from contextlib import closing

from ckpttool.catalogue.entries import Path
from ckpttool.catalogue.protocols import NO_HINTS, Format
from ckpttool.errors import CkptError, ReadError
from ckpttool.formats import CHECKPOINTS, DATA_FILE, FORMATS
from ckpttool.serialization import other_files
from ckpttool.serialization.other_files import HEAD, INCOMPLETE, NOT_READ
from ckpttool.storage import archives
from ckpttool.storage.stores import Location
from ckpttool.text import cut, size, some

_SHOWN = 4
_DOWNLOADS = ".cache/huggingface/download"  # where `hf download DIR` keeps what it has begun
_OF_MODELS = {"config.json", "tokenizer.json", "tokenizer_config.json"}  # which lie beside weights


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
            raise ReadError(f"`{location}` is empty", hint=INCOMPLETE, file=location)
    elif not is_pattern:
        raise ReadError(f"`{location}`: a pipe or a device, neither a file nor a directory", file=location)
    for row in FORMATS:
        if row.recognise(location):
            return row
    if is_pattern:
        raise _unknown_pattern(location, location)
    raise _unknown_directory(location) if location.is_dir() else _unknown_file(location)


def paths_in(location: Location) -> set[Path]:
    """Return the key paths of the entries of a file of any format. Raises CkptError if it cannot be opened."""
    with closing(detect(location).open(location, NO_HINTS)) as source:
        return {*source.catalogue.entries}


def _unknown_pattern(path: str, location: Location) -> ReadError:
    names = [str(name) for name in location.matches()]
    text = f"`{path}` matches no files of ranks"
    if not names:
        return ReadError(text, hint="name a file or a directory", file=path)
    return ReadError(f"{text}, but {some(names)}", hint=f"name one: `{names[0]}`", file=path, found=names)


def _unknown_file(location: Location) -> CkptError:
    if (error := other_files.recognised(location)) is not None:
        return error
    head = location.head(HEAD)
    line = _as_text(head)
    named = location.parent / line if re.fullmatch(r"[^/.][^/]*", line) and len(head) < HEAD else None
    if named is not None and (named.is_dir() or (DATA_FILE.fullmatch(line) and named.exists())):
        return ReadError(f"`{location}`: a text that names `{line}`", hint=f"name that: `{named}`", file=location)
    if line and location.suffix == ".py":
        return ReadError(f"`{location}`: a Python script", hint=other_files.WRITTEN, file=location)
    shown = f"a text that begins `{cut(line, 40)}`"
    shown = shown if line else f"{size(location.size())} that begin with {head[:8].hex(' ')}"
    return ReadError(f"`{location}`: unrecognised format: {shown}", hint=_marks(), file=location)


def _as_text(head: bytes) -> str:
    """Return the first line of a text; nothing if the bytes are not of one."""
    try:
        # The last character may have been cut.
        text = head.decode("utf-8") if len(head) < HEAD else head[:-3].decode("utf-8", "ignore")
    except UnicodeDecodeError:
        return ""
    line = text.strip().partition("\n")[0].strip()
    return line if text.replace("\n", "").replace("\t", "").replace("\r", "").isprintable() else ""


def _unknown_directory(location: Location) -> CkptError:
    names = location.names()
    if not names:
        return ReadError(f"`{location}`: an empty directory", hint=INCOMPLETE, file=location)
    inside = [name for name in names[:1000] if any(row.recognise(location / name) for row in CHECKPOINTS)]
    if inside:
        return found_inside(location, inside[::-1])
    files_in = [location / name for name in names[:1000] if (location / name).is_file()]
    for file in files_in:
        file.check_readable()
    if len(files_in) == len(names) == 1 and other_files.is_archive(files_in[0].head(archives.HEAD)):
        return _unknown_file(files_in[0])
    if "saved_model.pb" in names or any(re.fullmatch(r".+\.data-\d{5}-of-\d{5}", name) for name in names):
        return ReadError(
            f"`{location}`: a TensorFlow checkpoint, judging by its file names", hint=NOT_READ, file=location
        )
    if any(name.endswith(".weights.h5") for name in names):
        return ReadError(f"`{location}`: a Keras model, judging by its file names", hint=NOT_READ, file=location)
    more = ", ..." if len(names) > _SHOWN else ""
    text = f"`{location}`: contains no checkpoint of a known format ({', '.join(names[:_SHOWN])}{more})"
    downloads = location / _DOWNLOADS
    if downloads.is_dir() and any(name.endswith(".incomplete") for name in downloads.names()):
        return ReadError(text, hint="a download has not ended: run it again", file=location)
    if not _OF_MODELS.isdisjoint(names):
        return ReadError(text, hint="its weights are somewhere else, or missing", file=location)
    known = [other_files.recognised(file) for file in files_in[:_SHOWN]] if len(files_in) == len(names) else []
    whats = {(error.facts.get("found"), error.hint) for error in known if error is not None}
    # A directory of logs, of pages that were downloaded, of pointers: what all of its files are.
    if None not in known and len(whats) == 1 and (only := whats.pop())[0] and only[1] != NOT_READ:
        return ReadError(f"{text}, but {only[0]}", hint=only[1], file=location, found=only[0])
    return ReadError(text, hint=_marks(), file=location)


def found_inside(location: Location, names: list[str]) -> ReadError:
    """Return the error for a directory that is not a checkpoint, but contains these. The first one is the hint."""
    text = f"`{location}`: not a checkpoint; found {len(names)} inside: {some(names)}"
    return ReadError(text, hint=f"name one: `{location / names[0]}`", file=location, found=names)


def _marks() -> str:
    return f"detected by their first bytes and names: {', '.join(row.marks for row in CHECKPOINTS if row.marks)}"
