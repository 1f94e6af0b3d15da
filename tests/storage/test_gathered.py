"""A file that is read without being there."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpttool.errors import CorruptError, ReadError
from ckpttool.storage import gathered
from ckpttool.storage.gathered import GatheredFile, Range


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Range], bytes]:
    """Ranges of three files, and the bytes in them, in blocks of 64."""
    monkeypatch.setattr(gathered, "_BLOCK", 64)
    chance = random.Random(5)
    ranges, data = [], b""
    for i in range(3):
        (tmp_path / f"{i}").write_bytes(chance.randbytes(300))
    for i, offset, nbytes in ((0, 10, 200), (1, 0, 1), (0, 0, 0), (2, 299, 1), (1, 7, 57), (2, 1, 64)):
        ranges.append(Range(str(tmp_path / f"{i}"), offset, nbytes))
        data += (tmp_path / f"{i}").read_bytes()[offset : offset + nbytes]
    return ranges, data


def test_it_is_its_ranges(parts: tuple[list[Range], bytes]) -> None:
    ranges, data = parts
    found: list[Sequence[int]] = []
    progress: list[int] = []
    with GatheredFile(b"head", ranges, found.append, progress.append) as file:
        data = b"head" + data
        assert file.size == len(data) and b"".join(file.blocks()) == data
        # Each range has its checksum, as the system's zlib computes it.
        expected = [zlib.crc32(Path(path).read_bytes()[at : at + nbytes]) for path, at, nbytes in ranges]
        assert found == [expected] and progress == [*range(64, len(data), 64), len(data)]
        assert file.read() == data and file.read(1) == b"" and file.tell() == len(data)
        chance = random.Random(6)
        for _ in range(200):
            at, nbytes = chance.randint(0, len(data)), chance.randint(0, 200)
            assert file.seek(at) == at and file.read(nbytes) == data[at : at + nbytes]
        assert file.seek(-5, os.SEEK_END) == len(data) - 5 and file.read(99) == data[-5:]


def test_what_changes_after_it_was_read_is_an_error(parts: tuple[list[Range], bytes]) -> None:
    """Whatever the times of the file say."""
    ranges, data = parts
    file = GatheredFile(b"", ranges, lambda _: None, lambda _: None)
    assert b"".join(file.blocks()) == data
    path, before = Path(ranges[0].path), os.stat(ranges[0].path)
    changed = bytearray(path.read_bytes())
    changed[10 + 130] ^= 1
    path.write_bytes(changed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.read(128) == data[:128], "not here"
    with pytest.raises(ReadError, match=f"`{path}` changed while it was being read"):
        file.read(1)
    with pytest.raises(ReadError, match="changed"):
        list(file.blocks())
    os.truncate(path, 100)
    with pytest.raises(CorruptError, match="ends at byte 100"):
        list(file.blocks())
