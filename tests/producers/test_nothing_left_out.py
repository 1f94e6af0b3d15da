"""Whatever lies in a checkpoint of any framework is read, or named: a file more in each of its folders."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CkptError

STATE = {"zz_tensor": torch.full((3,), 7.0)}
FILES: dict[str, Callable[[Path], object]] = {
    "zz_file.pt": lambda path: torch.save(STATE, path),
    "zz_file.safetensors": lambda path: save_file(STATE, path),
    "zz_file.npz": lambda path: np.savez(path, zz_tensor=np.ones(3)),
    "zz_file.pkl": lambda path: path.write_bytes(pickle.dumps({"zz_tensor": 1.5})),
    "zz_file.dat": lambda path: path.write_bytes(bytes(range(128, 256))),
    "zz_file_rank_0.pt": lambda path: torch.save(STATE, path),
    "zz_file": lambda path: torch.save(STATE, path),
}
SAMPLES = sorted(path for name in ("ckpt", "saved") for path in CHECKPOINTS.glob(f"*/*/{name}") if path.is_dir())


def steps_left_out(run: Path) -> list[Path]:
    """The folders of the steps of a run that are not opened."""
    with ckpttool.open(run) as checkpoint:
        rows = checkpoint.catalogue.facts.get("run", ())
    return [Path(row["path"]) for row in rows if not row["taken"]]


def is_named(catalogue: Catalogue, name: str) -> bool:
    entries = any("zz_tensor" in path or any("zz_file" in str(key) for key in path) for path in catalogue.entries)
    # Of a run, the newest step is opened: what is of no step is in a warning.
    of_run = any(name in str(warning) for warning in catalogue.warnings if "run" in catalogue.facts)
    return entries or of_run or any(name in str(fault) for fault in catalogue.faults)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.parent.relative_to(CHECKPOINTS).as_posix())
def test_a_file_more_is_read_or_named(sample: Path, tmp_path: Path) -> None:
    """A safetensors file in a directory of DeepSpeed was taken for all of it, and others were left out in silence."""
    top = Path(shutil.copytree(sample, tmp_path / sample.name, symlinks=True))
    try:
        before = ckpttool.inspect(top)
    except CkptError:
        pytest.skip("no checkpoint, but several")
    own = {(str(path[-1]), getattr(entry, "shape", None)) for path, entry in before.entries.items()}
    others = steps_left_out(top)
    folders = [one for one in (top, *sorted(top.rglob("*"))) if one.is_dir() and not one.is_symlink()]
    for i, folder in enumerate(folders):
        if any(folder.is_relative_to(other) for other in others):
            continue
        for name in [*FILES][i % 5 :: 5]:
            FILES[name](folder / name)
            try:
                catalogue = ckpttool.inspect(top)
            except CkptError as error:
                assert "zz_file" in str(error) or "pieces of tensors" in str(error)
            else:
                assert is_named(catalogue, name), f"{folder.relative_to(top)}: {name}"
                after = {(str(path[-1]), getattr(entry, "shape", None)) for path, entry in catalogue.entries.items()}
                assert not own - after, f"{folder.relative_to(top)}: {name}"
            (folder / name).unlink()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.parent.relative_to(CHECKPOINTS).as_posix())
def test_the_same_layout_has_all_of_it(sample: Path, tmp_path: Path) -> None:
    """With a file more; what cannot be written so is refused, and says what writes it: it was a bug's message for
    DeepSpeed, verl and flat parameters, and files of ranks were read twice without `metadata.pkl`."""
    top = Path(shutil.copytree(sample, tmp_path / sample.name, symlinks=True))
    try:
        rows = ckpttool.inspect(top).facts.get("run", ())
    except CkptError:
        pytest.skip("no checkpoint, but several")
    folder = next((Path(row["path"]) for row in rows if row["taken"]), top)
    if not folder.is_dir():
        pytest.skip("a run of files")
    FILES["zz_file.pt"](folder / "zz_file.pt")
    try:
        ckpttool.convert(folder, tmp_path / "out", producer="same")
    except CkptError as error:
        assert error.hint is not None
        return
    assert torch.equal(torch.load(tmp_path / "out" / "zz_file.pt")["zz_tensor"], STATE["zz_tensor"])
    if sample.parent.name != "sharded_w2":  # pieces are joined to a file, which gets a key beside another one
        found = ckpttool.diff(folder, tmp_path / "out")
        assert found.same, str(found)
