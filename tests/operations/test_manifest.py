"""A manifest: what it says, against hashlib and torch; what it finds; and what Megatron Core makes of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import damage
from support.paths import CHECKPOINTS
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpttool import convert
from ckpttool.errors import CorruptError, OverwriteError, ReadError, UsageError
from ckpttool.operations.reshard import reshard
from ckpttool.operations.verify import verify


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def megatron_verifies(folder: Path) -> list[str]:
    """What `_verify_integrity_manifest_impl` of Megatron Core does with `integrity.json`: names that do not fit."""
    said = json.loads((folder / "integrity.json").read_text())
    assert said.get("algorithm", "sha256") == "sha256"
    return [name for name, expected in said["files"].items() if digest((folder / name).read_bytes()) != expected]


def written(path: Path) -> Any:
    return json.loads(path.read_text())


def test_what_it_says(tmp_path: Path) -> None:
    """Hashes as hashlib makes them: of the files, and of the tensors as torch has them."""
    state = damage.state()
    path = damage.save_dcp(tmp_path / "ckpt", state)
    report = verify(path, write_manifest=tmp_path / "m.json")
    said = written(tmp_path / "m.json")
    assert report.wrote == str(tmp_path / "m.json") and report.hashed_bytes
    assert said["files"] == {f.name: digest(f.read_bytes()) for f in path.iterdir()}
    assert said["sizes"] == {f.name: f.stat().st_size for f in path.iterdir()}
    tensors = {row["name"]: row for row in said["tensors"]}
    for name, tensor in state["model"].items():
        row = tensors[f"model.{name}"]
        assert row["sha256"] == digest(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        assert (row["dtype"], row["shape"]) == (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def test_tensors_of_a_compressed_component_beside_others(tmp_path: Path) -> None:
    """What is decompressed into files of its own is not looked for in those of the next component."""
    folder = tmp_path / "step"
    shutil.copytree(CHECKPOINTS / "dcp/zstd_w2/ckpt", folder / "a")
    other = {f"w{i}": torch.randn(64, 64) for i in range(4)}
    save_file(other, folder / "b.safetensors")
    verify(folder, write_manifest=tmp_path / "m.json")
    hashes = {row["name"]: row["sha256"] for row in written(tmp_path / "m.json")["tensors"]}
    dcp_to_torch_save(folder / "a", tmp_path / "a.pt")
    model = torch.load(tmp_path / "a.pt", weights_only=True)["model"]
    expected = {f"a.model.{name}": tensor for name, tensor in model.items()}
    expected |= {f"b.{name}": tensor for name, tensor in other.items()}
    for name, tensor in expected.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert hashes[name] == digest(data), name


def test_megatron_reads_it_and_we_read_megatrons(tmp_path: Path) -> None:
    path = damage.save_dcp(tmp_path / "ckpt")
    verify(path, write_manifest=path / "integrity.json")
    assert megatron_verifies(path) == []
    assert verify(path).manifest == str(path / "integrity.json")
    theirs = {"algorithm": "sha256", "files": written(path / "integrity.json")["files"]}
    (path / "integrity.json").write_text(json.dumps(theirs, indent=2))
    report = verify(path)
    assert (
        report.findings == []
        and report.hashed_bytes
        == sum(f.stat().st_size for f in path.iterdir()) - (path / "integrity.json").stat().st_size
    )
    damage.flip(path / "__0_0.distcp", 40)  # in a header, where no checksum is
    assert megatron_verifies(path) == ["__0_0.distcp"]
    assert [f.kind for f in verify(path).findings if f.gravity == "damage"][-1] == "hash"


@pytest.mark.parametrize("to", ["torch", "safetensors", "fsdp1", "dcp"])
def test_the_values_are_the_same_in_every_format(to: str, tmp_path: Path) -> None:
    """A manifest of four ranks' DCP directory, held against what was made of it, for another number of ranks too."""
    path = CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"
    verify(path, write_manifest=tmp_path / "m.json")
    out = tmp_path / "out"
    if to == "dcp":
        reshard(path, out, to_world=3)
        (out / "__0_0.distcp").rename(out / "renamed")  # other files altogether
        (out / "renamed").rename(out / "__0_0.distcp")
    else:
        convert(path, out, to=to)
    said = written(tmp_path / "m.json")
    if to == "dcp":
        (tmp_path / "m.json").write_text(json.dumps({**said, "files": {"elsewhere.distcp": "0" * 64}, "crc32": {}}))
    report = verify(out, manifest=tmp_path / "m.json")
    assert report.findings == [] and report.hashed_bytes
    said["tensors"][3]["sha256"] = "0" * 64
    (tmp_path / "m.json").write_text(json.dumps({**said, "files": {"elsewhere.distcp": "0" * 64}, "crc32": {}}))
    report = verify(out, manifest=tmp_path / "m.json")
    assert [(f.kind, f.tensor) for f in report.findings] == [("hash", said["tensors"][3]["name"])]


def test_files_that_are_gone_cut_or_new(tmp_path: Path) -> None:
    path = tmp_path / "hf"
    shutil.copytree(CHECKPOINTS / "hf/llama" / "ckpt", path)
    listed = tmp_path / "m.json"
    verify(path, write_manifest=listed)
    names = sorted(name for name in os.listdir(path) if not name.endswith(".safetensors"))
    assert names, "a model's directory has its configuration"
    (path / names[0]).unlink()
    (path / "new.txt").write_text("x")
    with (path / "model.safetensors").open("ab") as stream:
        stream.write(b"x")
    report = verify(path, manifest=listed)
    assert {(f.gravity, f.kind, f.file) for f in report.findings} >= {
        ("damage", "missing", names[0]), ("suspect", "unlisted", "new.txt"), ("damage", "size", "model.safetensors"),
    }  # fmt: skip


@pytest.mark.parametrize("inside", [True, False])
def test_of_what_is_written(inside: bool, tmp_path: Path) -> None:
    out, src = tmp_path / "out", CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"
    listed = out / "integrity.json" if inside else tmp_path / "m.json"
    convert(src, out, to="safetensors", only="model", manifest=listed)
    assert verify(out, manifest=listed).findings == []
    said = written(listed)["files"]
    assert said == {f.name: digest(f.read_bytes()) for f in out.iterdir() if f != listed}
    if inside:
        convert(src, out, to="dcp", manifest=listed, overwrite=True)
        assert verify(out).manifest == str(listed) and megatron_verifies(out) == []
    else:
        with pytest.raises(OverwriteError):
            convert(src, tmp_path / "again", to="dcp", manifest=listed)
        assert not (tmp_path / "again").exists()


NO_FOLDER = "there is no directory"


@pytest.mark.parametrize(
    ("dst", "listed", "said"),
    [
        ("out", "out", "cannot be"), ("out", "./out/", "cannot be"), ("out", "no/m.json", NO_FOLDER),
        ("out", "out/sub/m.json", NO_FOLDER), ("b.pt", "b.pt/m.json", NO_FOLDER), ("out", "m/", "cannot be"),
        ("out", "out/.metadata", "is a file of the checkpoint"), ("out", "out/__0_0.distcp", "is a file of"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_manifest_that_cannot_be_written_is_told_first(
    dst: str, listed: str, said: str, dry_run: bool, tmp_path: Path
) -> None:
    src, to = CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt", "torch" if dst == "b.pt" else "dcp"
    with pytest.raises((UsageError, OverwriteError), match=said):
        convert(src, tmp_path / dst, to=to, manifest=f"{tmp_path}/{listed}", dry_run=dry_run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{}", CorruptError), ("[]", CorruptError), ("nothing", CorruptError), ('{"files": {"a": "x"}}', CorruptError),
        ('{"files": {}, "algorithm": "md5"}', ReadError), ('{"files": {}, "tensors": [1]}', CorruptError),
        ('{"files": {}, "tensors": {}}', CorruptError), ('{"files": {}, "sizes": 3}', CorruptError),
    ],
)  # fmt: skip
def test_what_is_no_manifest(text: str, error: type[Exception], tmp_path: Path) -> None:
    path = damage.save_torch(tmp_path / "a.pt")
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(error, match=r"m\.json"):
        verify(path, manifest=tmp_path / "m.json")


def test_it_names_nothing_outside_of_the_checkpoint(tmp_path: Path) -> None:
    """What a manifest lists is looked for among the files of the checkpoint, and nowhere else."""
    path = damage.save_dcp(tmp_path / "ckpt")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "m.json").write_text(json.dumps({"files": {"../secret": digest(b"x"), "/etc/passwd": "0" * 64}}))
    report = verify(path, manifest=tmp_path / "m.json")
    assert {f.file for f in report.findings if f.kind == "missing"} == {"../secret", "/etc/passwd"}
