"""Reshard on two ranks, of which one has a disk that fails at some call: both end with its error, and DST is absent or
whole."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.faults import READ, STORAGE, save_dcp, untouched
from support.torchrun import forked

import ckpttool

ENGINES, RANKS = ("bytes", "mesh"), (0, 1)
SAID = {errno.ENOSPC: "no space left on device", errno.EIO: "input/output error"}
TORCHS = "cannot save: [enforce fail"  # torch's writer in C++ drops the error of the stream


def cases(reads: int, writes: int) -> list[tuple[Any, ...]]:
    """So many calls that read and that write of each engine on each rank, the last one among them; and the plan."""
    return [
        (engine, rank, stage, code, (i + 1) / most)
        for engine in ENGINES
        for rank in RANKS
        for stage, code, most in (("plan", errno.EIO, 1), ("read", errno.EIO, reads), ("write", errno.ENOSPC, writes))
        for i in range(most)
    ]


@pytest.mark.parametrize(("reads", "writes"), [(1, 2), pytest.param(30, 40, marks=pytest.mark.long)])
def test_a_rank_whose_disk_fails(reads: int, writes: int, tmp_path: Path) -> None:
    src, folder, listed = save_dcp(tmp_path / "ckpt"), tmp_path / "out", cases(reads, writes)
    folder.mkdir()
    (tmp_path / "cases.json").write_text(json.dumps(listed))
    script = Path(__file__).with_name("reshard_on_failing_ranks.py")
    with untouched(src):
        printed = forked(2, script, src, folder, tmp_path / "cases.json")
    ranks = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in RANKS]
    assert len(ranks[0][0]) == len(listed), printed
    wrong, failed = [], 0
    for number, (case, *said) in enumerate(zip(listed, ranks[0][0], ranks[1][0], strict=True)):
        there = set(os.listdir(folder / str(number)))
        names = {name for one in ckpttool.clean(folder / str(number)).left for name in one.names}
        is_whole = "dst" not in there or ckpttool.verify(folder / str(number) / "dst").whole
        failed += said[0] is not None
        if said == [None, None]:
            right = "dst" in there
        else:
            right = None not in said and all(
                code in (READ, STORAGE) and (SAID[case[3]] in text or TORCHS in text) for code, text in said
            )
        if not (right and is_whole and there - {"dst"} <= names):
            wrong.append((case, said, there))
    print(f"{failed} of {len(listed)} failed; calls of each stage: {[rank[1] for rank in ranks]}")
    assert not wrong
    assert failed > len(listed) / 2
