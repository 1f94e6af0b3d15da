"""A torch.save archive at (file, offset): its records as extents. `torch_zip_writer` writes one.

    [local header, name, padding][payload][descriptor]   for each record:
        <root>/  data.pkl  .format_version  .storage_alignment  byteorder  data/0 ...  version  .data/serialization_id
    [central directory][zip64 end][zip64 locator][end]

Upstream: `caffe2/serialize/inline_container.cc` (PyTorchStreamWriter) over miniz. Seen: torch 1.6 to 2.15. A `.distcp`
item of DCP is a whole such archive with the root `archive`, so everything here works at an offset inside a file.
CRCs and sizes in local headers are zero; the central directory has them.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Extent, Record
from ckpttool.catalogue.shown import shown
from ckpttool.catalogue.values import Stub
from ckpttool.errors import CorruptError, ReadError
from ckpttool.serialization import pickle_opcodes, torch_pickle
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.storage.crc import crc32
from ckpttool.text import literal

Read = Callable[[int, int], bytes]
"""`read(offset, nbytes)` of the file that the archive lies in, absolute offsets."""

END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR64 = struct.Struct("<4sLQL")
CENTRAL = struct.Struct("<4s6H3L5H2L")
_LENGTHS, _LENGTHS_AT = struct.Struct("<3H"), 28  # in it: of the name, of its further fields and of its comment
LOCAL = struct.Struct("<4s5H3L2H")
_TAIL = 4096  # the end records and the central directory of a small archive, in one read
ALIGNMENT = 64
MAX_DIRECTORY = 1 << 28  # bytes: three million records
MAX_NAME = 4096  # bytes of a record's name
_WINDOW = 1 << 20
_SMALL_RECORD = 4 << 10  # bytes with its header; to read as many takes less time than to ask for those of the header
_AHEAD = 64 << 10
_VERSION = re.compile(rb"\s*\+?(\d+)")
_MAX_VERSION = 10  # kMaxSupportedFileFormatVersion of `caffe2/serialize/versions.h`, torch 1.10 to 2.13
_MAX_WORD = 16  # bytes of `byteorder`
_ENCRYPTED = 0x2041  # bits of the flags: the record, strongly, or its header
_CLIMBING = re.compile(r"/|(.*/)?\.\.(/|$)", re.DOTALL).match
_MAX_DESCRIPTOR = 24  # bytes
_BY_HAND = "the file was put together by hand; other readers see something else in it"
_GAP = 1 << 16  # bytes between two records: a descriptor, and a field that `zip` adds to local headers only


_ahead: tuple[object, int, bytes] = (None, 0, b"")  # of the archive that was read last: where bytes begin, and they


@dataclass(slots=True)
class Archive:
    """An archive that was opened: `records["data/0"]` is its place, absolute in the file, with its CRC."""

    name: str  # for errors
    file: int
    base: int
    root: str
    records: dict[str, Record]
    read: Read
    starts: array[int]  # of the records and, last, of the directory, in order and absolute
    swapped: bool = False
    located: dict[str, Record] = field(default_factory=dict)  # the payloads that somebody has asked for
    _key: object = field(default_factory=object)  # what of all archives only this one has

    def payload(self, record: str) -> Record:
        """Return where the bytes of a record lie, once its local header has been read."""
        located = self.located.get(record)
        if located is None:
            if record not in self.records:
                raise CorruptError(f"{self.name} has no record `{record}`", hint="the file is incomplete")
            located = self.located[record] = _locate(self, record, self.records[record])
        return located

    @property
    def end(self) -> int:
        """Where the payloads end."""
        return self.starts[-1]

    def head(self, offset: int, nbytes: int, following: int) -> bytes:
        """Return the first bytes of a record, which another one is `following`. Of small ones, several are read if the
        archive is read one record after the other: of 256 ranks that are read in turn, they would be 16 MB."""
        global _ahead
        if following - offset > _SMALL_RECORD:
            return self.read(offset, nbytes)
        key, start, data = _ahead
        at = offset - start
        if key is not self._key or at < 0 or at + nbytes > len(data):
            start, at = offset, 0
            data = self.read(offset, min(_AHEAD if key is self._key else nbytes, self.end - offset))
            _ahead = self._key, start, data
        return data[at : at + nbytes]

    def check_remarks(self) -> None:
        """Locate the records that are not storages, a few that nobody may ask for; check the version of the archive.
        Raises CorruptError as `payload`, and ReadError for a version that torch does not read."""
        for name, record in self.records.items():
            if not name.startswith("data/") and record.nbytes >= 0:
                self.payload(name)
        if "version" in self.records and self.records["version"].nbytes >= 0:
            text = self.read(self.payload("version").offset, min(self.payload("version").nbytes, _MAX_WORD))
            number = _VERSION.match(text)
            if number is None or not 1 <= int(number[1]) <= _MAX_VERSION:
                message = f"{self.name}: an archive of version {literal(text.decode('ascii', 'replace').strip())}"
                hint = f"torch reads 1 to {_MAX_VERSION}: the file was changed, or is of a later torch"
                raise ReadError(f"{message}, which torch does not read", hint=hint)

    @property
    def torch_versions(self) -> str:
        """The versions of torch that write such archives."""
        if ".format_version" in self.records:
            return "2.7 or later"
        return "2.1 to 2.6" if "byteorder" in self.records else "1.6 to 2.0"

    @property
    def has_crcs(self) -> bool:
        return any(record.crc for record in self.records.values())

    def content(self, record: str) -> bytes:
        """Return the bytes of a small record. Raises CorruptError unless they have its CRC."""
        at = self.payload(record)
        data = self.read(at.offset, at.nbytes)
        if at.crc and (actual := crc32(data)) != at.crc:
            message = f"{self.name}: record `{record}` has CRC {actual:08x}, but the writer recorded {at.crc:08x}"
            hint = "its bytes changed after they were written; take another copy of the checkpoint"
            raise CorruptError(message, hint=hint, found=f"{actual:08x}", expected=f"{at.crc:08x}")
        return data

    def extent(self, ref: TensorRef, folder: str = "data") -> Extent:
        """Return where the elements of a tensor lie. Raises CorruptError when the storage is short. The storages of a
        TorchScript file's constants are in a `folder` of their own."""
        if 0 in ref.shape:
            return Extent(self.file, self.base, 0)
        storage = ref.storage
        record = self.payload(f"{folder}/{storage.key}")
        have, need = record.nbytes, storage.nbytes
        if have < need:
            message = f"{self.name}: record `data/{storage.key}` has {have} bytes, but its storage needs {need}"
            hint = "the file is truncated or was changed after it was written"
            raise CorruptError(message, hint=hint, found=have, expected=need)
        swap = ("swap",) if self.swapped and ref.dtype.word > 1 else ()
        begin, nbytes, strides = ref.span()
        return Extent(self.file, record.offset + begin, nbytes, strides, (*swap, *ref.codec), record)


def _not_an_archive(name: str, why: str) -> CorruptError:
    return CorruptError(f"{name}: not a complete torch.save archive: {why}", hint="the file is truncated or damaged")


def listed(read: Read, length: int, record: str, *, name: str) -> bool:
    """Return whether an archive of `length` bytes lists a record, to ask what a file is. Its directory is not checked,
    and read no further than to that record. Raises CorruptError when there is none."""
    return _row(_directory(read, 0, length, name)[0], record) is not None


def _row(directory: bytes, record: str) -> int | None:
    """Return where the first row of a record is in the directory."""
    at, wanted = 0, b""
    while at + CENTRAL.size <= len(directory):
        name_len, extra_len, comment_len = _LENGTHS.unpack_from(directory, at + _LENGTHS_AT)
        begin, at = at, at + CENTRAL.size
        wanted = wanted or directory[at : at + name_len].partition(b"/")[0] + b"/" + record.encode()
        if name_len == len(wanted) and directory.startswith(wanted, at):
            return begin
        at += name_len + extra_len + comment_len
    return None


def beginning(read: Read, length: int, *, name: str) -> bytes:
    """Return `data.pkl` of an archive of `length` bytes, to ask what a file is; nothing of an archive that has none, or
    of a TorchScript file. The directory is not checked. Raises CorruptError when there is none."""
    directory = _directory(read, 0, length, name)[0]
    at = _row(directory, "data.pkl")
    if at is None or (b"/constants.pkl" in directory and _row(directory, "constants.pkl") is not None):
        return b""
    row = CENTRAL.unpack_from(directory, at)
    method, packed, nbytes, name_len, extra_len, offset = row[4], *row[8:12], row[-1]
    if 0xFFFFFFFF in (packed, nbytes, offset):
        extra = directory[at + CENTRAL.size + name_len :][:extra_len]
        packed, nbytes, offset = _zip64(extra, packed, nbytes, offset, name)
    head = read(offset, LOCAL.size) if offset + LOCAL.size <= length else b""
    start = offset + LOCAL.size + sum(LOCAL.unpack(head)[-2:]) if head else length
    return read(start, nbytes) if method == 0 and start + nbytes <= length else b""


def open_archive(read: Read, base: int, length: int, *, name: str, file: int = 0) -> Archive:
    """Return the archive in `length` bytes at `base`. Raises CorruptError when it is not one, or not whole."""
    directory, count, at = _directory(read, base, length, name)
    records, root, starts = _read_directory(directory, count, name, base, file, at)
    return Archive(name, file, base, root, records, read, array("q", [base + start for start in (*starts, at)]))


def _directory(read: Read, base: int, length: int, name: str) -> tuple[bytes, int, int]:
    """Return the central directory, how many records it is to have, and where it is in the archive."""
    if length < END.size:
        raise _not_an_archive(name, f"it has {length} bytes")
    tail_at = max(0, length - _TAIL)
    tail = read(base + tail_at, length - tail_at)
    end = len(tail) - END.size
    if tail[end : end + 4] != b"PK\5\6":
        end = tail.rfind(b"PK\5\6")
        if end < 0 or end + END.size > len(tail):
            raise _not_an_archive(name, "no end record")
    _, disk, _, _, count, size, at, comment = END.unpack_from(tail, end)
    if disk or comment or end + END.size != len(tail):
        raise _not_an_archive(name, "bytes after the end record")
    expected, behind = (count, size, at), tail_at + end
    if end >= LOCATOR64.size and tail[end - LOCATOR64.size : end - LOCATOR64.size + 4] == b"PK\6\7":
        at64 = LOCATOR64.unpack_from(tail, end - LOCATOR64.size)[2]
        if at64 + END64.size != tail_at + end - LOCATOR64.size:
            # Of two archives in one file, the second's locator leads to the first's record.
            text = "the zip64 end record is not where its locator says"
            raise CorruptError(
                f"{name}: {text}", hint="does the file contain several saves, one after the other? save them as one"
            )
        data = tail[at64 - tail_at :] if at64 >= tail_at else read(base + at64, END64.size)
        if len(data) < END64.size or data[:4] != b"PK\6\6":
            raise _not_an_archive(name, "no zip64 end record")
        count, size, at = END64.unpack_from(data)[7:]
        full = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        if any(short not in (wide, most) for short, wide, most in zip(expected, (count, size, at), full, strict=True)):
            raise _not_an_archive(name, "its two end records differ")
        behind = at64
    if at + size > length or count * CENTRAL.size > size:
        raise _not_an_archive(name, "its directory is outside")
    if at + size != behind:
        # Other readers could take what is between for the directory, or for another archive.
        raise _not_an_archive(name, f"its directory ends at {at + size}, but the end record is at {behind}")
    if size > MAX_DIRECTORY:
        raise _not_an_archive(name, f"its directory has {size} bytes, more than {MAX_DIRECTORY}")
    directory = tail[at - tail_at : at - tail_at + size] if at >= tail_at else read(base + at, size)
    return directory, count, at


def _read_directory(
    directory: bytes, count: int, name: str, base: int, file: int, limit: int
) -> tuple[dict[str, Record], str, list[int]]:
    records: dict[str, Record] = {}
    root: str | None = None
    taken: list[tuple[int, int]] = []
    strays: list[str] = []
    at = 0
    for _ in range(count):
        if at + CENTRAL.size > len(directory):
            raise _not_an_archive(name, "its directory is cut")
        row = CENTRAL.unpack_from(directory, at)
        signature, _, _, flags, method, _, _, crc, packed, nbytes, name_len, extra_len, comment_len, *_, offset = row
        if signature != b"PK\1\2":
            raise _not_an_archive(name, "its directory is damaged")
        at += CENTRAL.size
        name_bytes = directory[at : at + name_len]
        record = name_bytes.decode("utf-8", "replace")
        extra = directory[at + name_len : at + name_len + extra_len]
        at += name_len + extra_len + comment_len
        if extra and _kinds(extra).count(1) > 1:
            raise CorruptError(f"{name}: record `{record:.80}` has two zip64 fields", hint=_BY_HAND)
        if 0xFFFFFFFF in (packed, nbytes, offset):
            packed, nbytes, offset = _zip64(extra, packed, nbytes, offset, name)
        top, _, short = record.partition("/")
        root = top if root is None else root
        taken.append((offset, offset + LOCAL.size + name_len + packed))
        if top != root or not short:
            strays.append(record)  # no part of the checkpoint
            continue
        if not short.isprintable() or "\\" in short or name_len > MAX_NAME or _CLIMBING(short) or "\ufffd" in short:
            raise CorruptError(f"{name}: a record has the name `{short:.80}`, which no record of torch has")
        if flags & _ENCRYPTED:
            raise CorruptError(f"{name}: record `{short}` is encrypted", hint="torch cannot read it either")
        if short in records:
            raise CorruptError(f"{name}: two records are called `{short}`")
        if offset + LOCAL.size + (name_len + packed if method == 0 else 0) > limit:
            raise _not_an_archive(name, f"record `{short}` is outside")
        if method == 0 and packed != nbytes:
            raise CorruptError(f"{name}: record `{short}` has {packed} bytes, but says {nbytes}")
        # Deflated code of a TorchScript file is listed and never read.
        records[short] = Record(file, base + offset, nbytes if method == 0 else -1, crc)
    if at != len(directory):
        raise _not_an_archive(name, f"its directory has more than the {count} records that it says")
    taken.sort()
    _check_apart(taken, limit, name)
    _check_one(records, strays, name)
    return records, root or "", [start for start, _ in taken]


def _check_apart(taken: list[tuple[int, int]], limit: int, name: str) -> None:
    """Check that records lie one behind the other from the first byte: what reads from there finds the same."""
    before = 0
    for start, end in taken:
        if start < before:
            raise CorruptError(f"{name}: two of its records overlap at byte {start}", found=start, expected=before)
        if start - before > (_GAP if before else 0):
            raise _not_an_archive(name, f"{start - before} bytes before {start} are in no record")
        before = end
    if limit - before > _GAP:
        raise _not_an_archive(name, f"{limit - before} bytes before its directory are in no record")


def _check_one(records: dict[str, Record], strays: list[str], name: str) -> None:
    """Check that there is one pickle: other readers ignore case, or take the first root that has one."""
    if second := next((s for s in strays if s.lower().rpartition("/")[2] == "data.pkl"), None):
        raise CorruptError(f"{name} has a second pickle, `{second}`: which one is meant is unknown", found=second)
    lowered: dict[str, str] = {}
    for short in records:
        if lowered.setdefault(short.lower(), short) != short:
            raise CorruptError(f"{name}: two records are called `{short}`, but for capitals", found=short)


def _kinds(extra: bytes) -> list[int]:
    """Return the kinds of the fields of a header."""
    kinds: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        kinds.append(kind)
        at += 4 + size
    return kinds


def _zip64(extra: bytes, packed: int, nbytes: int, offset: int, name: str) -> tuple[int, int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            data = extra[at + 4 : at + 4 + size]
            # A field that is cut says less than it promises.
            words = len(data) // 8
            wide = iter(struct.unpack(f"<{words}Q", data[: words * 8]))
            nbytes, packed, offset = (next(wide, -1) if v == 0xFFFFFFFF else v for v in (nbytes, packed, offset))
            if min(nbytes, packed, offset) < 0:
                break
            return packed, nbytes, offset
        at += 4 + size
    raise _not_an_archive(name, "a zip64 field is missing")


def _locate(archive: Archive, record: str, listed: Record) -> Record:
    if listed.nbytes < 0:
        message = f"{archive.name}: record `{record}` is compressed, which torch never does"
        raise CorruptError(message, hint="somebody packed it again: unpack it, and pack it with `zip -0`")
    full = f"{archive.root}/{record}".encode()
    following = archive.starts[bisect_right(archive.starts, listed.offset)]
    head = archive.head(listed.offset, min(LOCAL.size + len(full), archive.end - listed.offset), following)
    if len(head) < LOCAL.size:
        raise CorruptError(f"{archive.name}: record `{record}` has no local header at {listed.offset}")
    signature, _, flags, method, _, _, crc, packed, nbytes, name_len, extra_len = LOCAL.unpack_from(head)
    # Writers that do not know yet leave zeros, and those of large records a mark.
    if crc not in (0, listed.crc) or not {packed, nbytes} <= {0, 0xFFFFFFFF, listed.nbytes}:
        message = f"{archive.name}: the local header of record `{record}` gives another size or CRC than the directory"
        raise CorruptError(message, hint=_BY_HAND)
    if signature != b"PK\3\4" or method != 0 or name_len != len(full) or head[LOCAL.size :] != full:
        raise CorruptError(f"{archive.name}: record `{record}` has no local header at {listed.offset}")
    if flags & _ENCRYPTED:
        # Those who read the directory alone do not see it.
        raise CorruptError(f"{archive.name}: record `{record}` is encrypted by its local header", hint=_BY_HAND)
    offset = listed.offset + LOCAL.size + name_len + extra_len
    end = offset + listed.nbytes
    if end > archive.end:
        raise _not_an_archive(archive.name, f"record `{record}` is outside")
    if following - end > _MAX_DESCRIPTOR:
        # Room for a record that only those find who read from the front.
        message = f"{archive.name}: {following - end} bytes after record `{record}`, at {end}, are in no record"
        raise CorruptError(message, hint=_BY_HAND, offset=end, nbytes=following - end)
    # Writers leave 0 when they were told not to compute CRCs, or not to write data (`skip_data`). A record whose CRC
    # is really 0 goes unchecked.
    return Record(listed.file, offset, listed.nbytes, listed.crc if listed.crc or not listed.nbytes else None)


def load_tree(archive: Archive) -> Any:
    """Return the tree of the archive's `data.pkl`, with a `TensorRef` for each tensor; see `torch_pickle`."""
    if "data.pkl" not in archive.records:
        raise CorruptError(f"{archive.name}: a zip file without `data.pkl`", hint="not made by torch.save")
    if "byteorder" in archive.records:
        if (nbytes := archive.payload("byteorder").nbytes) > _MAX_WORD:
            raise CorruptError(f"{archive.name}: byte order of {nbytes} bytes is neither `little` nor `big`")
        order = archive.content("byteorder")
        if order not in (b"little", b"big"):
            raise CorruptError(f"{archive.name}: byte order {shown(order)} is neither `little` nor `big`")
        archive.swapped = order == b"big"
    at = archive.payload("data.pkl")
    if at.nbytes > _WINDOW:
        try:
            pickle_opcodes.check_beginning(archive.read(at.offset, _WINDOW), at.nbytes)
        except CorruptError as error:
            raise error.prefixed(f"{archive.name}: data.pkl") from None
    return torch_pickle.load(archive.content("data.pkl"), f"{archive.name}: data.pkl")


# One tensor: an item of DCP -------------------------------------------------------------------------------------------


def resolve_item(read: Read, base: int, length: int, *, name: str, file: int, dtype: Dtype, sizes: Ints) -> Extent:
    """Return the extent of the one tensor in a DCP item. Raises CorruptError when it is not what the metadata says."""
    archive = open_archive(read, base, length, name=name, file=file)
    ref = load_tree(archive)
    if isinstance(ref, Stub) and (kind := torch_pickle.wrapper_class(ref)) is not None:
        text = f"{name} is a piece of a tensor of class `{kind}`, and pieces of such tensors cannot be merged"
        raise ReadError(text, hint="leave it out with `--drop` or `--exclude`")
    if not isinstance(ref, TensorRef):
        raise CorruptError(f"{name} holds a value where the metadata says a tensor")
    if ref.shape != sizes or ref.dtype != dtype:
        found, expected = f"{ref.dtype} {list(ref.shape)}", f"{dtype} {list(sizes)}"
        message = f"{name} holds {found}, but the metadata says {expected}"
        hint = "the data file and `.metadata` are not of the same save"
        raise CorruptError(message, hint=hint, found=found, expected=expected)
    return archive.extent(ref)
