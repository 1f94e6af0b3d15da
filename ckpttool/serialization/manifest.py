"""The file format of manifests: what the files and tensors of a checkpoint are known by.

    {"algorithm": "sha256",                                         as Megatron Core's `integrity.json`, and read by it
     "files": {"__0_0.distcp": "9f86d0...", ".metadata": "..."},
     "schema": "ckpttool/manifest/1", "by": "ckpttool 0.1.0",       ours, from here on
     "sizes": {"__0_0.distcp": 4096, ...},
     "crc32": {"__0_0.distcp": "cbf43926", ...},                     null if not known
     "tensors": [{"name": "model.w", "dtype": "float32", "shape": [8, 4], "sha256": "..."}, ...]}

One that was asked for has SHA-256 and CRC-32 of everything. The one that a DCP directory carries
(`formats.dcp.manifest`) has the SHA-256 of the index, and of the data files what was known without reading them again.
Whoever reads all of a file of DCP compares its CRC-32.

Upstream: `megatron/core/dist_checkpointing/validation.py`, which hashes the files that lie in the directory itself. A
tensor's hash is of its elements in row-major order, little endian: the same in every format, for any number of ranks.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CorruptError, ReadError
from ckpttool.serialization import strict_json
from ckpttool.storage.stores import Location
from ckpttool.version import __version__

NAME = "integrity.json"
SCHEMA = "ckpttool/manifest/1"
_ALGORITHM = "sha256"
_MAX_SIZE = 1 << 30
_TENSORS = ',\n "tensors": ['
_BLOCK = 1 << 20


class Hashed(NamedTuple):
    """A tensor in a manifest: `Hashed("model.w", "float32", (8, 4), "9f86d0...")`."""

    name: str
    dtype: str
    shape: Ints
    sha256: str


@dataclass(slots=True)
class Manifest:
    """A manifest: `Manifest({".metadata": "9f86d0..."}, {".metadata": 4096}, {"__0_0.distcp": 0xcbf43926})`. One of
    Megatron has `files` alone."""

    files: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    crcs: dict[str, int | None] = field(default_factory=dict)
    tensors: list[Hashed] = field(default_factory=list)

    @property
    def is_carried(self) -> bool:
        """Whether a directory carries it: it was not asked for, and has not SHA-256 of all files."""
        return not self.crcs.keys() <= self.files.keys()

    @property
    def names(self) -> list[str]:
        """The files that are listed."""
        return [*dict.fromkeys((*self.files, *self.crcs))]


def content(manifest: Manifest) -> bytes:
    """Return the text of a manifest. Pure."""
    head: dict[str, Any] = {"algorithm": _ALGORITHM, "files": manifest.files, "schema": SCHEMA}
    head |= {"by": f"ckpttool {__version__}", "sizes": manifest.sizes}
    if manifest.crcs:
        head["crc32"] = {name: None if crc is None else f"{crc:08x}" for name, crc in manifest.crcs.items()}
    rows = ",".join(f"\n  {json.dumps(tensor._asdict())}" for tensor in manifest.tensors)
    return f"{json.dumps(head, indent=1)[:-2]}{_TENSORS}{rows}\n ]\n}}\n".encode()


def read(location: Location, *, tensors: bool = True) -> Manifest:
    """Read a manifest of ckpttool or Megatron; without `tensors`, as far as the files. Raises ReadError, or
    CorruptError if it is not one."""
    size = location.size()
    if size > _MAX_SIZE:
        message = f"`{location}`: {size} bytes of JSON are more than the {_MAX_SIZE} that are read"
        raise CorruptError(message, file=location)
    hint, written = "`--write-manifest` writes one", location.read() if tensors else _head(location, size)
    if not written.lstrip().startswith(b"{"):
        raise CorruptError(f"`{location}` is not a manifest, which is JSON", hint=hint, file=location)
    document = strict_json.parse(written, f"`{location}`")
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise CorruptError(f"`{location}` is not a manifest: it has no `files`", hint=hint, file=location)
    if document.get("algorithm", _ALGORITHM) != _ALGORITHM:
        text = f"`{location}` has hashes of `{document['algorithm']}`, and only sha256 is supported"
        raise ReadError(text, file=location)
    sizes = document.get("sizes", {})
    if not all(_is_hash(value) for value in document["files"].values()) or not isinstance(sizes, dict):
        raise CorruptError(f"`{location}`: a value in `files` is not a SHA-256 in hexadecimal", file=location)
    crcs, rows = document.get("crc32", {}), document.get("tensors", [])
    if not isinstance(crcs, dict) or not all(value is None or _is_hash(value, 8) for value in crcs.values()):
        raise CorruptError(f"`{location}`: a value in `crc32` is not a CRC-32 in hexadecimal", file=location)
    if not isinstance(rows, list):
        raise CorruptError(f"`{location}`: `tensors` is not a list", file=location)
    known = {name: n for name, n in sizes.items() if type(n) is int}
    return Manifest(
        document["files"],
        known,
        {n: v and int(v, 16) for n, v in crcs.items()},
        [_hashed(row, location) for row in rows],
    )


def _head(location: Location, size: int) -> bytes:
    """Return the text of a manifest without its tensors, of which there may be a million."""
    text, mark = b"", _TENSORS.encode()
    while len(text) < size and mark not in text:
        text += location.read(len(text), min(max(_BLOCK, len(text)), size - len(text)))
    head, found, _ = text.partition(mark)
    return head + b"\n}" if found else text


def _is_hash(value: Any, digits: int = 64) -> bool:
    return isinstance(value, str) and re.fullmatch(rf"[0-9a-fA-F]{{{digits}}}", value) is not None


def _hashed(row: Any, path: str) -> Hashed:
    match row:
        case {"name": str() as name, "dtype": str() as dtype, "shape": [*shape], "sha256": digest}:
            if _is_hash(digest) and all(type(n) is int for n in shape):
                return Hashed(name, dtype, tuple(shape), digest.lower())
    raise CorruptError(f"`{path}`: {shown(row)} is not a tensor of a manifest", file=path)
