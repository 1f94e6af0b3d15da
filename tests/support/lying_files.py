"""What the generator of hostile files is made of: a lie and the one error that it must meet, and honest files to bend.

Everything here is put together byte by byte, so that every field of every structure can be made to lie.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from support.pickle_payloads import call, named, text

READ, CORRUPT, LOSS, STORAGE = 3, 4, 5, 7

CANARY = "canary"
TOUCH = f"touch {CANARY}"
"""A file that every payload tries to make in the working directory; nobody may find it there."""


@dataclass(frozen=True)
class Lie:
    """One hostile file (or directory): who makes it, and how it must be refused.

    `make(folder)` returns the path that is then named on the command line. `pattern` must be found in the error.
    With `late`, the index does not tell yet: `inspect` may show it, and only what reads the data must refuse. With
    `harmless_at_rest`, `diff` may compare it too, but has to say what it is. `code` is the exit code.
    """

    name: str
    make: Callable[[Path], Path]
    pattern: str
    code: int | tuple[int, ...] = CORRUPT
    late: bool = False
    harmless_at_rest: bool = False

    def codes(self) -> tuple[int, ...]:
        return self.code if isinstance(self.code, tuple) else (self.code,)

    def told(self, said: str) -> bool:
        return re.search(self.pattern, said) is not None


LIES: dict[str, Lie] = {}
"""Every lie, by name."""


def lie(name: str, make: Callable[[Path], Path], pattern: str, **how: Any) -> None:
    """Register one. A name is given once."""
    assert name not in LIES, name
    LIES[name] = Lie(name, make, pattern, **how)


# Files ----------------------------------------------------------------------------------------------------------------


def file(name: str, data: bytes | Callable[[], bytes], *, size: int | None = None) -> Callable[[Path], Path]:
    """A file of these bytes, lengthened by a hole to `size`."""

    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data() if callable(data) else data)
        if size is not None:
            with path.open("r+b") as stream:
                stream.truncate(size)
        return path

    return make


# zip ------------------------------------------------------------------------------------------------------------------

CENTRAL = "<4s6H3L5H2L"
LOCAL = "<4s5H3L2H"


@dataclass
class Entry:
    """A record of an archive and what is said of it in both headers. What is None is said truly."""

    name: bytes
    data: bytes
    local_name: bytes | None = None
    method: int = 0
    local_method: int | None = None
    flags: int = 0
    local_flags: int | None = None
    crc: int | None = None
    packed: int | None = None
    nbytes: int | None = None
    offset: int | None = None
    extra: bytes = b""
    local_crc: int | None = 0  # torch leaves zeros there
    local_nbytes: int | None = 0
    local_extra: bytes = b""
    listed: bool = True
    gap: bytes = b""  # before its local header


def archive(
    entries: Iterable[Entry],
    *,
    prefix: bytes = b"",
    before_directory: bytes = b"",
    comment: bytes = b"",
    count: int | None = None,
    size: int | None = None,
    at: int | None = None,
    disk: int = 0,
    zip64: tuple[int, int, int] | None = None,
    directory_tail: bytes = b"",
) -> bytes:
    """A zip archive of these records. The rest are lies about the directory: how many, how long, where."""
    out = bytearray(prefix)
    listed = bytearray()
    n = 0
    for e in entries:
        out += e.gap
        start = len(out)
        crc = crc32(e.data) if e.crc is None else e.crc
        packed = len(e.data) if e.packed is None else e.packed
        nbytes = len(e.data) if e.nbytes is None else e.nbytes
        local = e.name if e.local_name is None else e.local_name
        method = e.method if e.local_method is None else e.local_method
        said = len(e.data) if e.local_nbytes is None else e.local_nbytes
        out += struct.pack(
            LOCAL, b"PK\3\4", 0, e.flags if e.local_flags is None else e.local_flags, method, 0, 0,
            crc if e.local_crc is None else e.local_crc, said, said, len(local), len(e.local_extra),
        )  # fmt: skip
        out += local + e.local_extra + e.data
        if e.listed:
            n += 1
            listed += struct.pack(
                CENTRAL, b"PK\1\2", 0, 0, e.flags, e.method, 0, 0, crc, packed, nbytes, len(e.name), len(e.extra),
                0, 0, 0, 0, start if e.offset is None else e.offset,
            )  # fmt: skip
            listed += e.name + e.extra
    out += before_directory
    where = len(out)
    out += listed + directory_tail
    if zip64 is not None:
        count64, size64, at64 = zip64
        end64 = len(out)
        out += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0, 45, 0, 0, count64, count64, size64, at64)
        out += struct.pack("<4sLQL", b"PK\6\7", 0, end64, 1)
    said = len(listed) if size is None else size
    out += struct.pack(
        "<4s4H2LH", b"PK\5\6", disk, disk, n if count is None else count, n if count is None else count,
        said, where if at is None else at, len(comment),
    )  # fmt: skip
    return bytes(out + comment)


# Pickles --------------------------------------------------------------------------------------------------------------


def integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data if len(data) < 256 else b"\x8b" + struct.pack("<I", len(data)) + data


HALF = 2**61 - 1  # Python's hash of an integer is the integer modulo this


def pairs_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Tuples of two integers: the second is what the first lacks for the hash (`Objects/tupleobject.c`)."""
    whole, one, two, five = 2**64, 11400714785074694791, 14029467366897019727, 2870177450012600261
    found: list[tuple[int, int]] = []
    first = 0
    while len(found) < count:
        begun = (five + hash(first) * two) % whole
        begun = (begun << 31 | begun >> 33) % whole * one % whole
        wanted = pow(one, -1, whole) * 12345 % whole
        second = ((wanted >> 31 | wanted << 33) % whole - begun) * pow(two, -1, whole) % whole
        second -= whole * (second >> 63)
        if abs(second) < HALF and second != -1:
            found.append((first, second))
        first += 1
    assert len(set(map(hash, found))) == 1
    return found


def many(*items: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(items) + b"t"


def storage(key: str = "0", numel: int = 6, kind: str = "FloatStorage") -> bytes:
    pid = many(text("storage"), named("torch", kind), text(key), text("cpu"), integer(numel))
    return pid + b"Q"


def ints(values: Iterable[int]) -> bytes:
    return many(*map(integer, values))


def tensor(
    shape: Iterable[int] = (2, 3), strides: Iterable[int] = (3, 1), offset: int = 0, at: bytes | None = None
) -> bytes:
    hooks = call(named("collections", "OrderedDict"))
    return call(
        named("torch._utils", "_rebuild_tensor_v2"),
        storage() if at is None else at, integer(offset), ints(shape), ints(strides), b"\x89", hooks,
    )  # fmt: skip


def tree(**values: bytes) -> bytes:
    """A dict."""
    return b"}(" + b"".join(text(k) + v for k, v in values.items()) + b"u"


def pickled(value: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes((protocol,)) + value + b"."


WEIGHTS = struct.pack("<6f", *range(6))


@dataclass
class Saved:
    """A torch.save file of one tensor `w`, float32 [2, 3], to be bent."""

    pickle: bytes = field(default_factory=lambda: pickled(tree(w=tensor())))
    records: dict[bytes, Entry] = field(default_factory=dict)
    extra: list[Entry] = field(default_factory=list)
    root: bytes = b"ckpt"

    def entries(self) -> list[Entry]:
        made = [
            Entry(self.root + b"/data.pkl", self.pickle),
            Entry(self.root + b"/byteorder", b"little"),
            Entry(self.root + b"/data/0", WEIGHTS),
            Entry(self.root + b"/version", b"3\n"),
        ]
        return [self.records.get(e.name.partition(b"/")[2], e) for e in made] + self.extra

    def bytes(self, **lies: Any) -> bytes:
        return archive(self.entries(), **lies)


def saved(value: bytes | None = None, protocol: int = 2, **lies: Any) -> bytes:
    """A torch.save file whose pickle makes this value."""
    made = Saved() if value is None else Saved(pickled(value, protocol))
    return made.bytes(**lies)


def bent(name: bytes, **lies: Any) -> bytes:
    """A torch.save file of which one record lies."""
    made = Saved()
    honest = next(e for e in made.entries() if e.name == b"ckpt/" + name)
    return replace(made, records={name: replace(honest, **lies)}).bytes()


def with_more(*entries: Entry, **lies: Any) -> bytes:
    return replace(Saved(), extra=list(entries)).bytes(**lies)
