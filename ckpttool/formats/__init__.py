"""The table of formats. Adding one is a file in this folder and a row here."""

from __future__ import annotations

import os
import stat

from ckpttool.catalogue.protocols import Format
from ckpttool.errors import CkptError, ReadError, UsageError
from ckpttool.formats import dcp, rankfiles, safetensors, torchsave
from ckpttool.formats import detect as strangers
from ckpttool.storage import stores as mirrors
from ckpttool.storage.files import failed, is_pattern
from ckpttool.text import meant

# Rank files are torch.save files too, and recognised by more than that: they come first.
FORMATS: tuple[Format, ...] = (dcp.FORMAT, safetensors.FORMAT, rankfiles.FORMAT, torchsave.FORMAT)
_SOME = 4


def named(name: str) -> Format:
    """The format called `name`. Raises UsageError with the nearest one."""
    for row in FORMATS:
        if name in (row.name, row.target):
            return row
    names = [row.target for row in FORMATS]
    told = next((row.target for row in FORMATS if f".{name.lstrip('.')}" in row.suffixes), name)
    hint = meant(told, names, f"the formats are {', '.join(f'`{n}`' for n in names)}")
    raise UsageError(f"there is no format `{name}`", hint=hint)


def by_suffix(path: str) -> Format | None:
    """The format that a name says unmistakably."""
    found = [row for row in FORMATS if row.suffixes and path.endswith(row.suffixes)]
    return found[0] if len(found) == 1 else None


def writable(name: str | None, dst: str) -> Format:
    """The format to write: the one named, or the one that the suffix of `dst` says unmistakably."""
    if name is not None:
        row = named(name)
    else:
        found = by_suffix(dst)
        if found is None:
            names = ", ".join(f"`--to {r.target}`" for r in FORMATS if r.create)
            raise UsageError(f"`{dst}` does not say which format it is to have", hint=f"pass {names}")
        row = found
    if row.create is None:
        raise UsageError(f"{row.name} can be read but not written")
    return row


def detect(path: str) -> Format:
    """The format of what lies at `path`, by content. Raises ReadError."""
    if not is_pattern(path):
        _check_readable(path)
    for row in FORMATS:
        if row.recognise(path):
            return row
    if is_pattern(path):
        raise ReadError(f"`{path}`: matches no files of ranks", hint="name a file or a directory", file=path)
    if os.path.isdir(path):
        raise _unknown_directory(path)
    raise _unknown_file(path)


_INCOMPLETE = "the save or the copy did not end; take another copy, or an older step"


def _check_readable(path: str) -> None:
    """Say at once what stands in the way; `recognise` only answers no."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            os.scandir(path).close()
        elif stat.S_ISREG(mode):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        else:
            # Opening a pipe would wait, reading a device never end.
            raise ReadError(f"`{path}`: a pipe or a device, neither a file nor a directory", file=path)
    except OSError as error:
        raise failed(error, path, "read") from None
    except ValueError:
        raise ReadError(f"{path!r}: no path has a zero byte in it", file=path) from None


def _unknown_file(path: str) -> CkptError:
    try:
        with open(mirrors.here(path, 0, 64), "rb") as stream:
            head = stream.read(64)
    except OSError as error:
        return failed(error, path, "read")
    if not head:
        return ReadError(f"`{path}`: is empty", hint=_INCOMPLETE, file=path)
    stranger = strangers.recognise(head)
    if stranger is not None:
        return ReadError(f"`{path}`: {stranger.what}", hint=stranger.hint, file=path, found=stranger.what)
    return ReadError(
        f"`{path}`: not a checkpoint that we know",
        hint="we know files of torch.save and safetensors by how they begin, and DCP directories by their `.metadata`",
        file=path,
    )


def _unknown_directory(path: str) -> ReadError:
    names = sorted(os.listdir(path))
    if not names:
        return ReadError(f"`{path}`: an empty directory", hint=_INCOMPLETE, file=path)
    inside = [name for name in names[:1000] if any(row.recognise(os.path.join(path, name)) for row in FORMATS)]
    if inside:
        return ReadError(
            f"`{path}`: is no checkpoint, but has {'one' if len(inside) == 1 else len(inside)} in it",
            hint=f"name one: `{os.path.join(path, inside[-1])}`",
            file=path, found=inside,
        )  # fmt: skip
    more = ", ..." if len(names) > _SOME else ""
    return ReadError(
        f"`{path}`: holds no checkpoint that we know ({', '.join(names[:_SOME])}{more})",
        hint="a DCP directory has `.metadata`, a safetensors one `*.safetensors`; for one file, name the file itself",
        file=path,
    )
