"""A manifest beside files of any format: whoever reads all of a file that it lists compares its CRC-32."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.errors import CorruptError
from ckpttool.operations.verify import verify
from ckpttool.serialization.manifest import NAME


def _torch(folder: Path, value: float) -> str:
    state = {"w": torch.full((40, 50), value), "b": torch.full((40,), value)}
    torch.save({"model": state, "step": 3}, folder / "model.pt")
    return "model.pt"


def _safetensors(folder: Path, value: float) -> str:
    save_file({"w": torch.full((40, 50), value), "b": torch.full((40,), value)}, folder / "model.safetensors")
    return "model.safetensors"


def _ranks(folder: Path, value: float) -> str:
    _torch(folder, value)
    ckpttool.convert(folder / "model.pt", folder / "ranks", to="fsdp1", to_world=2)
    (folder / "model.pt").unlink()
    for path in (folder / "ranks").iterdir():
        path.rename(folder / path.name)
    (folder / "ranks").rmdir()
    return "rank1.pt"


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = torch.nn.Parameter(torch.ones(40, 50)), torch.nn.Parameter(torch.ones(40))


WRITERS: dict[str, Callable[[Path, float], str]] = {"torch": _torch, "safetensors": _safetensors, "ranks": _ranks}
READERS: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda path, out: ckpttool.convert(path, out, to="dcp"),
    "reshard": lambda path, out: ckpttool.reshard(path, out, to_world=2),
    "state_dict": lambda path, out: ckpttool.open(path).state_dict(),
    "stats": lambda path, out: ckpttool.stats(path, cache=False),
    "diff": lambda path, out: ckpttool.diff(path, path),
    "load": lambda path, out: ckpttool.load(path, _Model()),
    "export": lambda path, out: ckpttool.export(path, out),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_of_another_step(writer: str, reader: str, tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder, value in ((ours, 0.0), (other, 1.0)):
        folder.mkdir()
        name = WRITERS[writer](folder, value)
    assert verify(ours, write_manifest=ours / NAME).whole
    READERS[reader](ours, tmp_path / "whole")
    shutil.copy(other / name, ours)
    with pytest.raises(CorruptError, match=NAME.replace(".", r"\.") + "|manifest"):
        READERS[reader](ours, tmp_path / "out")
    (ours / NAME).unlink()
    READERS[reader](ours, tmp_path / "out")


def test_a_file_without_tensors(tmp_path: Path) -> None:
    """It is read when the checkpoint is opened."""
    _torch(tmp_path, 0.0)
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.pt")
    assert verify(tmp_path, write_manifest=tmp_path / NAME).whole
    ckpttool.convert(tmp_path, tmp_path.with_name("whole"), to="dcp")
    torch.save({"last_epoch": 7}, tmp_path / "scheduler.pt")
    with pytest.raises(CorruptError, match=r"`scheduler\.pt` has CRC-32 .* in `integrity\.json`"):
        ckpttool.convert(tmp_path, tmp_path.with_name("out"), to="dcp")


@pytest.mark.parametrize("reader", ["stats", "diff"])
def test_a_dcp_file_of_another_save(reader: str, tmp_path: Path) -> None:
    for n in (0.0, 1.0):
        torch.save({"model": {"w": torch.full((50, 40), n)}}, tmp_path / f"{n}.pt")
        ckpttool.convert(tmp_path / f"{n}.pt", tmp_path / f"{n}", to="dcp", to_world=2)
    READERS[reader](tmp_path / "0.0", tmp_path)
    shutil.copy(tmp_path / "1.0/__1_0.distcp", tmp_path / "0.0")
    with pytest.raises(CorruptError, match="in the manifest beside it"):
        READERS[reader](tmp_path / "0.0", tmp_path)


@pytest.mark.parametrize("reader", ["stats", "diff"])
def test_a_flipped_bit(reader: str, tmp_path: Path) -> None:
    path = tmp_path / _torch(tmp_path, 1.0)
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(8).numpy().tobytes()) + 99] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="the writer recorded"):
        READERS[reader](path, tmp_path)
