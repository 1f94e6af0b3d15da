"""Small tensors are copied together, and what is done for each of them is little."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.work import Calls

import ckpttool
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import Chunks, Extent, Tensor
from ckpttool.errors import CorruptError
from ckpttool.transfer.small_runs import SmallRun, joined, near

MANY = 2000


def test_runs_that_are_near_are_read_together() -> None:
    places = [(0, 0, 4), (0, 4, 4), (0, 100, 4), (0, 90_000, 4), (0, 90_002, 4), (1, 90_006, 4), (1, 90_000, 4)]
    runs = [_run(Extent(*place)) for place in places]
    # What overlaps, goes back, is far away or in another file is read by itself.
    assert [len(group) for group in near(runs, 1 << 20)] == [3, 1, 1, 1, 1]
    assert [len(group) for group in near(runs[:3], 8)] == [2, 1]
    assert list(near([], 8)) == []


def _run(extent: Extent) -> SmallRun:
    return SmallRun(Tensor(("w",), dtype("uint8"), (4,), Chunks()), extent, 0, 0, None)


def test_neighbours_are_written_together() -> None:
    data = memoryview(b"abcdefgh")
    pieces = [(0, data[:2]), (2, data[2:3]), (8, data[3:]), (4, data[:1])]
    assert [(at, bytes(piece)) for at, piece in joined(pieces)] == [(0, b"abc"), (8, b"defgh"), (4, b"a")]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of many tensors, of 0 to 3 elements and some of more, in several dtypes."""
    path = tmp_path_factory.mktemp("small") / "model.safetensors"
    kinds = [torch.float32, torch.bfloat16, torch.int8]
    save_file({f"layers.{i}.w": torch.full((i % 4,), i % 97).to(kinds[i % 3]) for i in range(MANY)}, path)
    return path


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_many_small_tensors_come_back(small: Path, tmp_path: Path, to: str) -> None:
    ckpttool.convert(small, tmp_path / "out", to=to, check=True)
    ckpttool.convert(tmp_path / "out", tmp_path / "back.safetensors", check=True)
    expected, actual = load_file(small), load_file(tmp_path / "back.safetensors")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_many_small_tensors_are_few_reads(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: (reads.append(1), preadv(*args))[1])
    ckpttool.convert(small, tmp_path / "out.pt")
    assert len(reads) < MANY / 10


def test_a_flipped_bit_of_a_small_tensor_is_named(small: Path, tmp_path: Path) -> None:
    ckpttool.convert(small, tmp_path / "ours.safetensors")
    data = bytearray((tmp_path / "ours.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "ours.safetensors").write_bytes(data)
    with pytest.raises(CorruptError, match=r"tensor `layers\.\d+\.w`: .* but the writer recorded"):
        ckpttool.convert(tmp_path / "ours.safetensors", tmp_path / "out", to="dcp")


# Of functions of Python and C, for each tensor. They once were 540, 540 and 450, when each was copied by itself.
@pytest.mark.parametrize(("to", "most"), [("dcp", 420), ("torch", 420), ("safetensors", 330)])
def test_a_small_tensor_takes_few_calls(small: Path, tmp_path: Path, to: str, most: int) -> None:
    def calls(names: Any) -> int:
        path = tmp_path / f"{len(names)}.safetensors"
        save_file({name: value for name, value in load_file(small).items() if name in names}, path)
        counted = Calls()
        with counted:
            ckpttool.convert(path, tmp_path / f"{len(names)}-{to}", to=to)
        return counted.count

    names = [f"layers.{i}.w" for i in range(MANY)]
    calls(names[:10])  # imports
    assert (calls(names) - calls(names[: MANY // 2])) / (MANY // 2) < most
