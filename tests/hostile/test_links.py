"""Links in a checkpoint that lead out of it: a stranger's archive may have one to any file of whoever opens it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import CkptError, CorruptError

READERS: list[Callable[[Path, Path], Any]] = [
    lambda path, out: ckpttool.inspect(path),
    lambda path, out: ckpttool.convert(path, out, to="dcp"),
    lambda path, out: ckpttool.open(path),
]
# A file that is found by its name or by an index, in each kind of directory.
LINKED = {
    "rank/fsdp1_w4/ckpt": ["rank1.pt"],
    "dcp/fsdp2_w4/ckpt": [".metadata", "__1_0.distcp"],
    "run/trainer/ckpt/checkpoint-4": ["optimizer.pt", "scheduler.pt"],
    "hf/llama/ckpt": ["model.safetensors"],
}


@pytest.mark.parametrize("sample", LINKED)
def test_a_link_that_leaves_is_refused_however_its_file_is_found(sample: str, tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "ckpt", tmp_path / "elsewhere"
    shutil.copytree(CHECKPOINTS / sample, path)
    elsewhere.mkdir()
    names = LINKED[sample]
    for name in names:
        found = next(path.rglob(name), None)
        assert found is not None, name
        shutil.move(found, elsewhere / name)
        found.symlink_to(elsewhere / name)
        for read in READERS:
            with pytest.raises(CorruptError, match="a link that leaves the checkpoint"):
                read(path, tmp_path / "out")
        # In place of a link, its file; and a link to it under another name in the checkpoint is followed.
        found.unlink()
        shutil.move(elsewhere / name, found.with_name(f"{found.name}.kept"))
        found.symlink_to(found.with_name(f"{found.name}.kept"))
        ckpttool.inspect(path)
        found.unlink()
        shutil.move(found.with_name(f"{found.name}.kept"), found)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_a_link_is_one_too(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "ckpt", tmp_path / "elsewhere"
    shutil.copytree(CHECKPOINTS / "run" / "accelerate_fsdp2_sharded_w2" / "ckpt", path)
    folder = next(path.rglob(".metadata")).parent
    shutil.move(folder, elsewhere)
    folder.symlink_to(elsewhere)
    with pytest.raises(CorruptError, match="a link that leaves the checkpoint"):
        ckpttool.inspect(folder.parent)


def test_a_manifest_has_no_hash_of_a_file_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    shutil.copytree(CHECKPOINTS / "dcp" / "fsdp2_w4" / "ckpt", path)
    (tmp_path / "secret").write_text("a key")
    (path / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptError, match="a link that leaves the checkpoint"):
        ckpttool.verify(path, write_manifest=tmp_path / "manifest.json")
    assert not (tmp_path / "manifest.json").exists()


def test_a_path_that_was_typed_may_be_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = {
        "folder": CHECKPOINTS / "rank" / "fsdp1_w4" / "ckpt",
        "file.pt": CHECKPOINTS / "torch" / "full" / "ckpt.pt",
    }
    for name, target in links.items():
        os.symlink(target, tmp_path / name)
        ckpttool.inspect(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    ckpttool.inspect("folder")
    ckpttool.inspect("file.pt")
    ckpttool.verify("file.pt", write_manifest="manifest.json")
    ckpttool.inspect(tmp_path / "folder" / ".." / "ckpt")


def test_small_files_of_a_framework_are_refused_too(tmp_path: Path) -> None:
    """What stands in them would be converted, as what is in a file of tensors."""
    samples = {"trainer/ckpt/checkpoint-4": "trainer_state.json", "verl_fsdp1_w2/ckpt": "fsdp_config.json"}
    for sample, pattern in samples.items():
        path, elsewhere = tmp_path / sample, tmp_path / f"{pattern}.elsewhere"
        shutil.copytree(CHECKPOINTS / "run" / sample, path)
        found = next(path.rglob(pattern))
        shutil.move(found, elsewhere)
        found.symlink_to(elsewhere)
        with pytest.raises(CkptError, match="a link that leaves the checkpoint"):
            ckpttool.convert(path, tmp_path / "out", to="dcp")
        assert not (tmp_path / "out").exists()
        found.unlink()
        shutil.copy(elsewhere, found)
        ckpttool.convert(path, tmp_path / "out", to="dcp")
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_what_lies_beside_the_state_is_not_read_and_named(name: str, tmp_path: Path) -> None:
    sample = {"config.json": "hf/llama/ckpt", "adapter_config.json": "other/peft_dora"}[name]
    path, elsewhere = tmp_path / "ckpt", tmp_path / "elsewhere.json"
    shutil.copytree(CHECKPOINTS / sample, path)
    elsewhere.write_text('{"model_type": "secret", "architectures": ["secret"], "peft_type": "secret"}')
    (path / name).unlink()
    (path / name).symlink_to(elsewhere)
    summary = ckpttool.inspect(path)
    written = ckpttool.convert(path, tmp_path / "out.pt", to="torch")
    assert "secret" not in str(summary.facts) + json.dumps(written.as_dict())
    assert any(f"`{name}`: a link that leaves the checkpoint" in str(warning) for warning in summary.warnings)
    # A link to another file of the checkpoint is followed.
    (path / name).unlink()
    shutil.copy(elsewhere, path / "other.json")
    (path / name).symlink_to("other.json")
    assert not any("link that leaves" in str(warning) for warning in ckpttool.inspect(path).warnings)
