"""The table of formats. Adding one is a file in this folder and a row here."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from ckpttool.contract import Format, Source
from ckpttool.errors import ReadError, UsageError
from ckpttool.files import failed
from ckpttool.formats import dcp, safetensors, torchsave

FORMATS: tuple[Format, ...] = (dcp.FORMAT, safetensors.FORMAT, torchsave.FORMAT)


def named(name: str) -> Format:
    """The format called `name`. Raises UsageError with the nearest one."""
    for row in FORMATS:
        if row.name == name:
            return row
    names = [row.name for row in FORMATS]
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean `{near[0]}`?" if near else f"the formats are {', '.join(f'`{n}`' for n in names)}"
    raise UsageError(f"there is no format `{name}`", hint=hint)


def writable(name: str | None, dst: str) -> Format:
    """The format to write: the one named, or the one that the suffix of `dst` says unmistakably."""
    if name is not None:
        row = named(name)
    else:
        found = [r for r in FORMATS if dst.endswith(r.suffixes) and r.suffixes]
        if len(found) != 1:
            names = ", ".join(f"`--to {r.name}`" for r in FORMATS if r.create)
            raise UsageError(f"`{dst}` does not say which format it is to have", hint=f"pass {names}")
        row = found[0]
    if row.create is None:
        raise UsageError(f"{row.name} can be read but not written")
    return row


def detect(path: str) -> Format:
    """The format of what lies at `path`, by content. Raises ReadError."""
    try:
        os.stat(path)
    except OSError as error:
        raise failed(error, path, "read") from None
    for row in FORMATS:
        if row.recognise(path):
            return row
    if Path(path).is_dir():
        names = sorted(os.listdir(path))
        what = "is empty" if not names else f"holds no checkpoint that we know ({', '.join(names[:4])}, ...)"
        hint = "a DCP directory has `.metadata`, a safetensors one `*.safetensors`; for one file, name the file itself"
        raise ReadError(f"`{path}`: {what}", hint=hint, file=path)
    raise ReadError(
        f"`{path}`: not a checkpoint that we know",
        hint=f"it would begin as a file of {', '.join(row.title for row in FORMATS)}",
        file=path,
    )


def open_source(path: str) -> Source:
    """Open the checkpoint at `path`, whatever its format. Raises ReadError or CorruptError."""
    return detect(path).open(path)
