"""Directories whose files contradict each other, as an index of another save: never garbage for weights.

Single files and indexes that lie are in tests/hostile.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from support.faults import CORRUPT, READ, model, out_folder, refused, run, save_dcp
from support.paths import CHECKPOINTS

# DCP ------------------------------------------------------------------------------------------------------------------


def test_a_link_to_the_directory_is_fine(tmp_path: Path) -> None:
    """As `latest` often is one."""
    save_dcp(tmp_path / "step-100")
    (tmp_path / "latest").symlink_to("step-100")
    assert run("convert", tmp_path / "latest", tmp_path / "dst.pt").code == 0


def test_an_index_of_another_save(tmp_path: Path) -> None:
    one, other = save_dcp(tmp_path / "one"), save_dcp(tmp_path / "two", {"w": torch.ones(5), "v": torch.zeros(400)})
    shutil.copy(other / ".metadata", one / ".metadata")
    refused(one, CORRUPT, "__0_0.distcp", look=False)


def test_a_missing_index_of_one_rank(tmp_path: Path) -> None:
    path = shutil.copytree(CHECKPOINTS / "dcp/nocollectives_w2" / "ckpt", tmp_path / "ckpt")
    for gone in ("__0.metadata", "__1.metadata"):
        kept = (path / gone).read_bytes()
        (path / gone).unlink()
        refused(path, CORRUPT, look=False)
        (path / gone).write_bytes(kept)


# safetensors ----------------------------------------------------------------------------------------------------------


def test_the_cache_of_the_hub_is_made_of_links(tmp_path: Path) -> None:
    """Those lead from `snapshots/` to `blobs/`, inside one repository's folder."""
    made = shutil.copytree(CHECKPOINTS / "safetensors/indexed" / "ckpt", tmp_path / "ckpt")
    root = tmp_path / "models--org--name"
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for file in made.iterdir():
        file.rename(root / "blobs" / f"sha-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/sha-{file.name}")
    with out_folder() as folder:
        done = run("convert", snapshot, folder / "dst.pt")
        assert done.code == 0, done.err


# A whole state as safetensors and JSON --------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    torch.save({"model": model(), "step": 3, "lr": [0.1]}, tmp_path / "src.pt")
    assert run("convert", tmp_path / "src.pt", tmp_path / "whole", "--to", "safetensors").code == 0
    return tmp_path / "whole"


def test_a_state_without_a_file(whole: Path) -> None:
    for file in sorted(whole.iterdir()):
        kept = file.read_bytes()
        file.unlink()
        if file.suffix == ".safetensors":
            refused(whole, CORRUPT, file.name, look=False)
        file.write_bytes(kept)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', "\xff", "[" * 100_000])
def test_a_state_whose_json_is_damaged(text: str, whole: Path) -> None:
    (file,) = whole.glob("*.json")
    file.write_bytes(text.encode("latin1"))
    said = refused(whole, [READ, CORRUPT], look=False) if run("convert", whole, whole.parent / "x.pt").code else ""
    assert not said or "ckpttool.json" in said or "not a checkpoint" in said
    shutil.rmtree(whole.parent / "x.pt", ignore_errors=True)


def test_a_state_whose_json_is_cut(whole: Path) -> None:
    (file,) = whole.glob("*.json")
    data = file.read_bytes()
    for at in range(200, len(data) - 1, max(1, len(data) // 40)):
        file.write_bytes(data[:at])
        refused(whole, CORRUPT, file.name, to=["torch"])
    assert os.listdir(whole)
