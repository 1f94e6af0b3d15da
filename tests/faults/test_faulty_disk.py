"""Each call that writes fails, one after the other: DST is absent or whole, nothing lies beside it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.faults import FORMATS, STORAGE, failing_read, faulty_disk, mark, save_dcp, untouched

import ckpttool
from ckpttool.errors import CkptError


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(("code", "stays"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_every_call(code: int, stays: bool, to: str, tmp_path: Path) -> None:
    src, out = save_dcp(tmp_path / "ckpt"), tmp_path / "out"
    out.mkdir()
    with faulty_disk(code, -1, stays=False) as calls:
        ckpttool.convert(str(src), str(out / "dst"), to=to, threads=1)
    count, whole = len(calls), {name: said.split()[-1] for name, said in mark(out / "dst").items()}
    assert count > 8, calls
    failed = 0
    with untouched(src):
        for nth in range(count):
            remove(out / "dst")
            with faulty_disk(code, nth, stays=stays) as calls:
                try:
                    ckpttool.convert(str(src), str(out / "dst"), to=to, threads=1)
                except CkptError as error:
                    failed += 1
                    assert error.exit_code == STORAGE, (nth, calls, error)
                    assert ".partial-" not in error.message, error.message
            left = os.listdir(out)
            assert left in ([], ["dst"]), (nth, calls[-3:], left)
            there = {name: said.split()[-1] for name, said in mark(out / "dst").items()}
            assert there in ({}, whole), (nth, calls[-3:])
    assert failed >= count - 2


@pytest.mark.parametrize("job", ["convert", "repair"])
def test_every_call_that_reads(job: str, tmp_path: Path) -> None:
    """What cannot be looked at is an error, and not left out."""
    src, out = save_dcp(tmp_path / "ckpt"), tmp_path / "out"
    (src / "__7_0.distcp").write_bytes(b"of an older save")
    out.mkdir()

    def work() -> None:
        if job == "repair":
            ckpttool.repair(str(src), str(out / "dst"))
        else:
            ckpttool.convert(str(src), str(out / "dst"), to="dcp", threads=1)

    with failing_read(tmp_path, -1) as calls:
        work()
    count, whole = len(calls), {name: said.split()[-1] for name, said in mark(out / "dst").items()}
    failed = 0
    with untouched(src):
        for nth in range(count):
            for left in out.iterdir():
                remove(left)
            error = None
            with failing_read(tmp_path, nth):
                try:
                    work()
                except CkptError as caught:
                    error = caught
            there = {name: said.split()[-1] for name, said in mark(out / "dst").items()}
            assert there == whole or (error is not None and there == {}), (nth, error)
            failed += error is not None
    assert failed > count / 5


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
