# ruff: noqa: E501  (a table of lies, one to a line)
"""zip archives that lie: about where their records are, how long they are, how many, and which of two is meant."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from lies import READ, WEIGHTS, Entry, Saved, archive, bent, file, lie, pickled, saved, tree, with_more

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
    ("zip: cut in the middle", saved()[:150], r"not a whole torch\.save archive|no end record"),
    ("zip: without an end record", _cut(saved(), b"PK\5\6"), "no end record"),
    ("zip: without a directory", _cut(saved(), b"PK\1\2") + saved()[saved().rindex(b"PK\5\6") :], "directory"),
    ("zip: bytes after the end", saved() + b"more", "after the end record"),
    ("zip: two end records", saved() + saved()[saved().rindex(b"PK\5\6") :], "directory|end record"),
    ("zip: a comment", saved(comment=b"hello"), "after the end record|comment"),
    ("zip: an archive in the comment of another", _inner_file(), "comment|after the end|outside|begins|directory"),
    ("zip: an archive after another", saved() + saved(tree(w=b"K\x02")), "begins|outside|local header|directory|first"),
    ("zip: something before the first record", saved(prefix=b"PK\3\4" + bytes(60)), "first record|before|begins"),
    ("zip: several disks", saved(disk=1), "end record|disk"),
    # The directory
    ("zip: a directory outside the file", saved(at=10**6), "outside"),
    ("zip: a directory of 4 GiB", saved(size=0xFFFFFFFE), "outside"),
    ("zip: more records than the directory has", saved(count=5), "outside|cut|directory"),
    ("zip: fewer records than the directory has", saved(count=3), "directory"),
    ("zip: bytes between the directory and its end", saved(directory_tail=b"x" * 64), "directory"),
    ("zip: bytes between the records and the directory", saved(before_directory=b"x" * 70_000), "gap|hole|bytes|between"),
    ("zip: zip64 end that says otherwise", saved(zip64=(4, 100, 0)), "outside|zip64|directory|differ"),
    ("zip: zip64 end of 2**64 records", saved(zip64=(2**64 - 1, 200, 10)), "outside|zip64|directory|records"),
    ("zip: zip64 directory at 2**64", saved(zip64=(4, 200, 2**64 - 1)), "outside|zip64|directory|differ"),
    ("zip: zip64 directory of 2**63 bytes", saved(zip64=(4, 2**63, 0)), "outside|zip64|directory|differ"),
    ("zip: no directory entry for the pickle", Saved(records={b"data.pkl": Entry(b"ckpt/data.pkl", Saved().pickle, listed=False)}).bytes(), "gap|between|without|not one of torch.save|before"),
    # One record
    ("zip: a record outside the file", bent(b"data/0", offset=10**6), "outside"),
    ("zip: a record longer than the file", bent(b"data/0", nbytes=10**6, packed=10**6), "outside|overlap"),
    ("zip: a record of 4 GiB", bent(b"data/0", nbytes=0xFFFFFFFE, packed=0xFFFFFFFE), "outside|overlap"),
    ("zip: a record of 2**60 bytes", bent(b"data/0", nbytes=0xFFFFFFFF, packed=0xFFFFFFFF, extra=_zip64_field(2**60, 2**60)), "outside|overlap"),
    ("zip: a record of -1 bytes", bent(b"data/0", nbytes=0xFFFFFFFF, packed=0xFFFFFFFF, extra=_zip64_field(2**64 - 1, 2**64 - 1)), "outside|overlap|zip64"),
    ("zip: a zip64 record without its field", bent(b"data/0", nbytes=0xFFFFFFFF, packed=0xFFFFFFFF), "zip64"),
    ("zip: a zip64 field cut short", bent(b"data/0", nbytes=0xFFFFFFFF, packed=0xFFFFFFFF, extra=b"\1\0\x10\0abc"), "zip64"),
    ("zip: two lengths for one stored record", bent(b"data/0", nbytes=20), "24 bytes, but says 20|20"),
    ("zip: a record shorter than its tensor", bent(b"data/0", nbytes=20, packed=20), "20 bytes.*24|gap|between"),
    ("zip: a record of no bytes", bent(b"data/0", data=b""), "0 bytes.*24"),
    ("zip: a wrong checksum of the pickle", bent(b"data.pkl", crc=1), "CRC"),
    ("zip: another name in the local header", bent(b"data/0", local_name=b"ckpt/data/1"), "local header"),
    ("zip: a longer name in the local header", bent(b"data/0", local_name=b"ckpt/data/01"), "local header|gap|overlap"),
    ("zip: no local header", bent(b"data/0", offset=3), "local header|overlap|gap"),
    ("zip: another length in the local header", bent(b"data/0", local_nbytes=8), "local header"),
    ("zip: another checksum in the local header", bent(b"data/0", local_crc=5), "local header"),
    ("zip: another method in the local header", bent(b"data/0", local_method=8), "local header"),
    ("zip: an encrypted record", bent(b"data/0", flags=1), "encrypted"),
    ("zip: a compressed storage", bent(b"data/0", data=_deflated(WEIGHTS), method=8, nbytes=24), "compressed"),
    ("zip: a compressed pickle", bent(b"data.pkl", data=_deflated(OTHER), method=8, nbytes=len(OTHER)), "compressed"),
    ("zip: a bomb for a storage", bent(b"data/0", data=BOMB, method=8, nbytes=64 << 20), "compressed"),
    ("zip: a bomb for a pickle", bent(b"data.pkl", data=BOMB, method=8, nbytes=64 << 20), "compressed"),
    ("zip: an unknown method", bent(b"data/0", method=99), "compressed"),
    ("zip: a method of Windows", bent(b"data/0", method=14), "compressed"),
    ("zip: an unknown byte order", bent(b"byteorder", data=b"middle"), "byte order"),
    ("zip: a byte order of a megabyte", bent(b"byteorder", data=b"little" * 200_000), "byte order"),
    ("zip: a missing storage", Saved(records={b"data/0": Entry(b"ckpt/other", WEIGHTS)}).bytes(), "data/0"),
    # Which of two
    ("zip: two pickles", with_more(Entry(b"ckpt/data.pkl", OTHER)), "two records.*data.pkl"),
    ("zip: a second pickle under another root", with_more(Entry(b"evil/data.pkl", OTHER)), "data.pkl"),
    ("zip: a second pickle without a root", with_more(Entry(b"data.pkl", OTHER)), "data.pkl"),
    ("zip: a second pickle before the root", archive([Entry(b"evil/data.pkl", OTHER), *Saved().entries()]), "data.pkl"),
    ("zip: a pickle in capitals", with_more(Entry(b"ckpt/DATA.PKL", OTHER)), "(?i)data.pkl"),
    ("zip: two storages of one name", with_more(Entry(b"ckpt/data/0", WEIGHTS)), "two records.*data/0"),
    ("zip: two byte orders", with_more(Entry(b"ckpt/byteorder", b"big")), "two records.*byteorder"),
    ("zip: two records over one payload", _overlapping(), "overlap"),
    ("zip: a record within a record", bent(b"version", offset=40), "overlap|local header|gap|between"),
    # Names
    ("zip: a name that climbs", with_more(Entry(b"ckpt/../../evil", b"x")), "name"),
    ("zip: a name that climbs as on Windows", with_more(Entry(b"ckpt/..\\..\\evil", b"x")), "name"),
    ("zip: an absolute name", with_more(Entry(b"ckpt//etc/passwd", b"x")), "name"),
    ("zip: a name with a zero", with_more(Entry(b"ckpt/data.pkl\0.txt", OTHER)), "name"),
    ("zip: a name that talks to the terminal", with_more(Entry(b"ckpt/\x1b]0;owned\x07", b"x")), "name"),
    ("zip: a name that turns the text around", with_more(Entry("ckpt/\u202etxt.lkp".encode(), b"x")), "name"),
    ("zip: a name of 60,000 bytes", with_more(Entry(b"ckpt/" + b"a" * 60_000, b"x")), "name"),
    ("zip: a name that is no UTF-8", with_more(Entry(b"ckpt/\xff\xfe", b"x")), "name"),
):  # fmt: skip
    lie(name, _pt(data), pattern)  # type: ignore[arg-type]

lie("zip: 60,000 records in the place of one", _quine, "overlap")
lie("zip: a hole of a tebibyte", file("ckpt.pt", saved(), size=1 << 40), "no end record")
lie("zip: a directory of a gibibyte of nothing", _hollow, "directory")
lie("zip: nothing at all", file("ckpt.pt", b""), "empty", code=READ)
lie("zip: nothing but an end record", file("ckpt.pt", b"PK\5\6" + bytes(18)), "zip|checkpoint", code=(READ, 4))
lie("zip: only the first four bytes", file("ckpt.pt", b"PK\3\4"), "zip", code=(READ, 4))
