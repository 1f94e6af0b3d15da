"""The SHA-256 of a file that is written in any order equals hashlib's of its bytes."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from ckpttool.errors import ReadError
from ckpttool.transfer import file_digest
from ckpttool.transfer.file_digest import FileDigest


@pytest.mark.parametrize("seed", range(8))
def test_ranges_come_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(file_digest, "_BLOCK", 100)
    chance = random.Random(seed)
    data, path = chance.randbytes(5000), tmp_path / "file"
    cuts = sorted({0, 5000, *(chance.randrange(5000) for _ in range(20))})
    ranges = [*pairwise(cuts), (0, 0), (cuts[3], cuts[3])]
    chance.shuffle(ranges)
    path.write_bytes(bytes(5000))
    with FileDigest(str(path), 5000) as digest:
        for start, end in ranges:
            with path.open("r+b") as stream:
                stream.seek(start)
                stream.write(data[start:end])
            digest.note(start, end - start)
        assert digest.result() == hashlib.sha256(data).hexdigest()


def test_it_reads_while_the_rest_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"ab??ef")
    with FileDigest(str(path), 6) as digest:
        digest.note(4, 2)
        digest.note(0, 2)
        read = threading.Event()
        for _ in range(500):
            if digest._done == 2 or read.wait(0.02):
                break
        assert digest._done == 2, "as far as there is no gap"
        path.write_bytes(b"abcdef")
        digest.note(2, 2)
        assert digest.result() == hashlib.sha256(b"abcdef").hexdigest()


def test_its_thread_ends_with_the_block(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    with pytest.raises(KeyError), FileDigest(str(tmp_path / "file"), 3) as digest:
        raise KeyError
    assert not digest.is_alive()


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with FileDigest(os.fspath(tmp_path / "none"), 3) as digest, pytest.raises(ReadError, match="none"):
        digest.result()
