# ruff: noqa: E501  (a table of lies, one to a line)
"""zip archives that lie: about where their records are, how long they are, how many, and which of two is meant."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from support.lying_files import READ, WEIGHTS, Entry, Saved, archive, bent, file, lie, pickled, saved, tree, with_more

MANY = 3_000_000


def _pt(data: bytes, **how: int) -> object:
    return file("ckpt.pt", data, **how)


def _cut(data: bytes, at: bytes) -> bytes:
    return data[: data.rindex(at)]


def _zip64_field(*values: int) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def _deflated(data: bytes) -> bytes:
    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    return machine.compress(data) + machine.flush()


BOMB = _deflated(bytes(64 << 20))
OTHER = pickled(tree(w=b"K\x01"))


def _overlapping() -> bytes:
    """A second record that claims the payload of the first, header and all."""
    honest = Saved().entries()
    at = 30 + len(honest[0].name) + len(honest[0].data) + 30 + len(honest[1].name) + len(honest[1].data)
    return with_more(Entry(b"ckpt/data/1", b"", offset=at, packed=len(WEIGHTS), nbytes=len(WEIGHTS)))


def _inner_file() -> bytes:
    """A whole other archive hidden in the payload of a record, its end record where a backward search finds it."""
    return saved(comment=saved(tree(w=b"K\x02")))


def _quine(folder: Path) -> Path:
    """A directory that lists one record many times."""
    data = saved()
    start = data.index(b"PK\1\2")
    first = data[start : data.index(b"PK\1\2", start + 4)]
    entries = b"".join(first.replace(b"data.pkl", b"%08d" % n) for n in range(60_000))
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 60_000, 60_000, len(entries), start, 0)
    path = folder / "ckpt.pt"
    path.write_bytes(data[:start] + entries + end)
    return path


def _hollow(folder: Path) -> Path:
    """A directory that is a hole in the file: read whole, it would take a gibibyte."""
    path = folder / "ckpt.pt"
    start, size = 200, 1 << 30
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0, 45, 0, 0, 10**7, 10**7, size, start)
    end += struct.pack("<4sLQL", b"PK\6\7", 0, start + size, 1)
    end += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    with path.open("wb") as stream:
        stream.write(saved()[:start])
        stream.seek(start + size)
        stream.write(end)
    return path


for name, data, pattern in (
    # Where it ends
    ("zip: cut in the middle", saved()[:150], r"not a complete torch\.save archive: no end record"),
    ("zip: without an end record", _cut(saved(), b"PK\5\6"), "no end record"),
    ("zip: without a directory", _cut(saved(), b"PK\1\2") + saved()[saved().rindex(b"PK\5\6") :], r"not a complete torch\.save archive: its directory is outside"),
    ("zip: bytes after the end", saved() + b"more", "after the end record"),
    ("zip: two end records", saved() + saved()[saved().rindex(b"PK\5\6") :], r"not a complete torch\.save archive: its directory ends at \d+, but the end record is at \d+"),
    ("zip: a comment", saved(comment=b"hello"), "after the end record|comment"),
    ("zip: an archive in the comment of another", _inner_file(), r"not a complete torch\.save archive: its directory ends at \d+, but the end record is at \d+"),
    ("zip: an archive after another", saved() + saved(tree(w=b"K\x02")), r"not a complete torch\.save archive: its directory ends at \d+, but the end record is at \d+"),
    ("zip: something before the first record", saved(prefix=b"PK\3\4" + bytes(60)), r"not a complete torch\.save archive: 64 bytes before 64 are in no record"),
    ("zip: several disks", saved(disk=1), r"not a complete torch\.save archive: bytes after the end record"),
    # The directory
    ("zip: a directory outside the file", saved(at=10**6), r"not a complete torch\.save archive: its directory is outside"),
    ("zip: a directory of 4 GiB", saved(size=0xFFFFFFFE), r"not a complete torch\.save archive: its directory is outside"),
    ("zip: more records than the directory has", saved(count=5), r"not a complete torch\.save archive: its directory is cut"),
    ("zip: fewer records than the directory has", saved(count=3), r"not a complete torch\.save archive: its directory has more than the 3 records that it says"),
    ("zip: bytes between the directory and its end", saved(directory_tail=b"x" * 64), r"not a complete torch\.save archive: its directory ends at \d+, but the end record is at \d+"),
    ("zip: bytes between the records and the directory", saved(before_directory=b"x" * 70_000), r"not a complete torch\.save archive: \d+ bytes before its directory are in no record"),
    ("zip: zip64 end that says otherwise", saved(zip64=(4, 100, 0)), r"not a complete torch\.save archive: its two end records differ"),
    ("zip: zip64 end of 2**64 records", saved(zip64=(2**64 - 1, 200, 10)), r"not a complete torch\.save archive: its two end records differ"),
    ("zip: zip64 directory at 2**64", saved(zip64=(4, 200, 2**64 - 1)), r"not a complete torch\.save archive: its two end records differ"),
    ("zip: zip64 directory of 2**63 bytes", saved(zip64=(4, 2**63, 0)), r"not a complete torch\.save archive: its two end records differ"),
    ("zip: no directory entry for the pickle", Saved(records={b"data.pkl": Entry(b"ckpt/data.pkl", Saved().pickle, listed=False)}).bytes(), r"not a complete torch\.save archive: \d+ bytes before \d+ are in no record"),
    # One record
    ("zip: a record outside the file", bent(b"data/0", offset=10**6), r"not a complete torch\.save archive: record `data/0` is outside"),
    ("zip: a record longer than the file", bent(b"data/0", nbytes=10**6, packed=10**6), r"not a complete torch\.save archive: record `data/0` is outside"),
    ("zip: a record of 4 GiB", bent(b"data/0", nbytes=0xFFFFFFFE, packed=0xFFFFFFFE), r"not a complete torch\.save archive: record `data/0` is outside"),
    ("zip: a record of 2**60 bytes", bent(b"data/0", nbytes=0xFFFFFFFF, packed=0xFFFFFFFF, extra=_zip64_field(2**60, 2**60)), r"not a complete torch\.save archive: record `data/0` is outside"),
    ("zip: a record of -1 bytes", bent(b"data/0", nbytes=0xFFFFFFFF, packed=0xFFFFFFFF, extra=_zip64_field(2**64 - 1, 2**64 - 1)), r"not a complete torch\.save archive: record `data/0` is outside"),
    ("zip: a zip64 record without its field", bent(b"data/0", nbytes=0xFFFFFFFF, packed=0xFFFFFFFF), "zip64"),
    ("zip: a zip64 field cut short", bent(b"data/0", nbytes=0xFFFFFFFF, packed=0xFFFFFFFF, extra=b"\1\0\x10\0abc"), "zip64"),
    ("zip: two lengths for one stored record", bent(b"data/0", nbytes=20), "record `data/0` has 24 bytes, but says 20"),
    ("zip: a record shorter than its tensor", bent(b"data/0", nbytes=20, packed=20), "20 bytes.*24|gap|between"),
    ("zip: a record of no bytes", bent(b"data/0", data=b""), "0 bytes.*24"),
    ("zip: a wrong checksum of the pickle", bent(b"data.pkl", crc=1), r"record `data\.pkl` has CRC 5eb41a5d, but the writer recorded \d+"),
    ("zip: another name in the local header", bent(b"data/0", local_name=b"ckpt/data/1"), r"record `data/0` has no local header at \d+"),
    ("zip: a longer name in the local header", bent(b"data/0", local_name=b"ckpt/data/01"), r"record `data/0` has no local header at \d+"),
    ("zip: no local header", bent(b"data/0", offset=3), "two of its records overlap at byte 3"),
    ("zip: another length in the local header", bent(b"data/0", local_nbytes=8), "the local header of record `data/0` gives another size or CRC than the directory"),
    ("zip: another checksum in the local header", bent(b"data/0", local_crc=5), "the local header of record `data/0` gives another size or CRC than the directory"),
    ("zip: another method in the local header", bent(b"data/0", local_method=8), r"record `data/0` has no local header at \d+"),
    ("zip: an encrypted record", bent(b"data/0", flags=1), "encrypted"),
    ("zip: a compressed storage", bent(b"data/0", data=_deflated(WEIGHTS), method=8, nbytes=24), "record `data/0` is compressed, which torch never does"),
    ("zip: a compressed pickle", bent(b"data.pkl", data=_deflated(OTHER), method=8, nbytes=len(OTHER)), r"record `data\.pkl` is compressed, which torch never does"),
    ("zip: a bomb for a storage", bent(b"data/0", data=BOMB, method=8, nbytes=64 << 20), "record `data/0` is compressed, which torch never does"),
    ("zip: a bomb for a pickle", bent(b"data.pkl", data=BOMB, method=8, nbytes=64 << 20), r"record `data\.pkl` is compressed, which torch never does"),
    ("zip: an unknown method", bent(b"data/0", method=99), "record `data/0` is compressed, which torch never does"),
    ("zip: a method of Windows", bent(b"data/0", method=14), "record `data/0` is compressed, which torch never does"),
    ("zip: an unknown byte order", bent(b"byteorder", data=b"middle"), "byte order b'middle' is neither `little` nor `big`"),
    ("zip: a byte order of a megabyte", bent(b"byteorder", data=b"little" * 200_000), r"byte order of \d+ bytes is neither `little` nor `big`"),
    ("zip: a missing storage", Saved(records={b"data/0": Entry(b"ckpt/other", WEIGHTS)}).bytes(), "has no record `data/0`"),
    # Which of two
    ("zip: two pickles", with_more(Entry(b"ckpt/data.pkl", OTHER)), "two records.*data.pkl"),
    ("zip: a second pickle under another root", with_more(Entry(b"evil/data.pkl", OTHER)), r"has a second pickle, `evil/data\.pkl`: which one is meant is unknown"),
    ("zip: a second pickle without a root", with_more(Entry(b"data.pkl", OTHER)), r"has a second pickle, `data\.pkl`: which one is meant is unknown"),
    ("zip: a second pickle before the root", archive([Entry(b"evil/data.pkl", OTHER), *Saved().entries()]), r"has a second pickle, `ckpt/data\.pkl`: which one is meant is unknown"),
    ("zip: a pickle in capitals", with_more(Entry(b"ckpt/DATA.PKL", OTHER)), r"two records are called `DATA\.PKL`, but for capitals"),
    ("zip: two storages of one name", with_more(Entry(b"ckpt/data/0", WEIGHTS)), "two records.*data/0"),
    ("zip: two byte orders", with_more(Entry(b"ckpt/byteorder", b"big")), "two records.*byteorder"),
    ("zip: two records over one payload", _overlapping(), r"two of its records overlap at byte \d+"),
    ("zip: a record within a record", bent(b"version", offset=40), "two of its records overlap at byte 40"),
    # What only some readers see
    ("zip: a record that the directory does not list, behind the others", with_more(Entry(b"ckpt/data/9", OTHER, listed=False)), r"\d+ bytes after record `[a-z]+`, at \d+, are in no record"),
    ("zip: a pickle that the directory does not list, before another record", bent(b"data/0", gap=archive([Entry(b"ckpt/data.pkl", OTHER)])), r"\d+ bytes after record `.*`, at \d+, are in no record"),
    ("zip: 25 bytes between two records", bent(b"version", gap=bytes(25)), r"25 bytes after record `.*`, at \d+, are in no record"),
    ("zip: two zip64 fields", bent(b"data/0", nbytes=0xFFFFFFFF, packed=0xFFFFFFFF, extra=_zip64_field(24, 24) + _zip64_field(4, 4)), r"record `ckpt/data/0` has two zip64 fields"),
    ("zip: two zip64 fields that nobody needs", bent(b"version", extra=_zip64_field(2, 2) + _zip64_field(4, 4)), r"record `ckpt/version` has two zip64 fields"),
    ("zip: a storage encrypted in its local header only", bent(b"data/0", local_flags=1), r"record `data/0` is encrypted by its local header"),
    ("zip: a pickle encrypted in its local header only", bent(b"data.pkl", local_flags=1), r"record `data\.pkl` is encrypted by its local header"),
    ("zip: a second pickle behind the first", bent(b"data.pkl", data=Saved().pickle + OTHER), r"\d+ bytes after the end of its pickle, at \d+"),
    ("zip: a byte behind the pickle", bent(b"data.pkl", data=Saved().pickle + b"\0"), r"1 bytes after the end of its pickle, at \d+"),
    # Names
    ("zip: a name that climbs", with_more(Entry(b"ckpt/../../evil", b"x")), r"a record has the name `\.\./\.\./evil`, which no record of torch has"),
    ("zip: a name that climbs as on Windows", with_more(Entry(b"ckpt/..\\..\\evil", b"x")), r"a record has the name `\.\.\\\.\.\\evil`, which no record of torch has"),
    ("zip: an absolute name", with_more(Entry(b"ckpt//etc/passwd", b"x")), "a record has the name `/etc/passwd`, which no record of torch has"),
    ("zip: a name with a zero", with_more(Entry(b"ckpt/data.pkl\0.txt", OTHER)), r"a record has the name `data\.pkl\\x00\.txt`, which no record of torch has"),
    ("zip: a name that talks to the terminal", with_more(Entry(b"ckpt/\x1b]0;owned\x07", b"x")), r"a record has the name `\\x1b\]0;owned\\x07`, which no record of torch has"),
    ("zip: a name that turns the text around", with_more(Entry("ckpt/\u202etxt.lkp".encode(), b"x")), r"a record has the name `\\u202etxt\.lkp`, which no record of torch has"),
    ("zip: a name of 60,000 bytes", with_more(Entry(b"ckpt/" + b"a" * 60_000, b"x")), "a record has the name"),
    ("zip: a name that is not UTF-8", with_more(Entry(b"ckpt/\xff\xfe", b"x")), "a record has the name `.*`, which no record of torch has"),
):  # fmt: skip
    lie(name, _pt(data), pattern)  # type: ignore[arg-type]

lie("zip: 60,000 records in the place of one", _quine, "two of its records overlap at byte 0")
lie("zip: a hole of a tebibyte", file("ckpt.pt", saved(), size=1 << 40), "no end record")
lie(
    "zip: a directory of a gibibyte of nothing",
    _hollow,
    r"not a complete torch\.save archive: its directory has \d+ bytes, more than \d+",
)
lie(
    "zip: a missing pickle",
    file("ckpt.pt", Saved(records={b"data.pkl": Entry(b"ckpt/other", Saved().pickle)}).bytes()),
    r"a zip archive, but not one of torch\.save",
    code=READ,
)
lie("zip: nothing at all", file("ckpt.pt", b""), "empty", code=READ)
lie("zip: nothing but an end record", file("ckpt.pt", b"PK\5\6" + bytes(18)), "unrecognised format", code=(READ, 4))
lie(
    "zip: only the first four bytes",
    file("ckpt.pt", b"PK\3\4"),
    r"a zip archive, but not one of torch\.save",
    code=(READ, 4),
)
