"""One bit that is not as it was written is found, wherever in a payload it is: by verify, and by convert."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from support import damage

from ckpttool import convert
from ckpttool.errors import CorruptError
from ckpttool.operations.verify import verify
from ckpttool.serialization import manifest as manifests
from ckpttool.storage.stores import local_path

SHORT, LONG = 40, 500
COUNTS = [SHORT, pytest.param(LONG, marks=pytest.mark.long)]


def made(kind: str, folder: Path) -> tuple[Path, Path, list[range]]:
    """A checkpoint, the file of it that is to be damaged, and where that has payloads."""
    if kind == "dcp":
        path = damage.save_dcp(folder / "ckpt")
        file = path / "__0_0.distcp"
        return path, file, damage.payload_of_dcp(file)
    if kind == "torch":
        path = damage.save_torch(folder / "ckpt.pt")
        return path, path, damage.payload_of_torch(path)
    path = damage.save_safetensors(folder / "ckpt.safetensors")
    return path, path, damage.payload_of_safetensors(path)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_by_the_checksums_of_the_writer(kind: str, n: int, tmp_path: Path) -> None:
    path, file, payload = made(kind, tmp_path)
    assert verify(path).findings == [] and sum(map(len, payload)) > 10_000
    bits = random.Random(1)
    found = {"verify": 0, "convert": 0}
    for at in damage.positions(payload, n):
        bit = bits.randrange(8)
        damage.flip(file, at, bit)
        report = verify(path)
        grave = report.findings[0] if report.findings else None
        found["verify"] += grave is not None and grave.gravity == "damage" and report.exit_code == 4
        if grave is not None and grave.offset is not None and grave.nbytes is not None:
            assert grave.file == file.name and grave.offset <= at < grave.offset + grave.nbytes
        try:
            convert(path, tmp_path / "out", to="torch" if kind == "dcp" else "dcp")
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        except CorruptError:
            found["convert"] += 1
        assert not (tmp_path / "out").exists()
        damage.flip(file, at, bit)
    assert found == {"verify": n, "convert": n}
    assert verify(path).findings == []


@pytest.mark.parametrize("n", COUNTS)
def test_by_a_manifest(n: int, tmp_path: Path) -> None:
    """safetensors has no checksums. The tensor is named, and where it lies."""
    path, file, payload = made("safetensors", tmp_path)
    listed = tmp_path / "manifest.json"
    assert verify(path, write_manifest=listed).wrote == str(listed)
    assert [t.name for t in manifests.read(local_path(str(listed))).tensors]
    found = 0
    for at in damage.positions(payload, n):
        damage.flip(file, at)
        assert verify(path).whole, "nothing tells without the manifest"
        report = verify(path, manifest=listed)
        named = [f for f in report.findings if f.tensor is not None]
        found += report.exit_code == 4 and len(named) == 1
        assert named[0].offset <= at < named[0].offset + named[0].nbytes
        damage.flip(file, at)
    assert found == n


def test_anywhere_in_an_archive(tmp_path: Path) -> None:
    """What is around the payloads is not a value, but most of it is checked too. Nothing of it is a traceback."""
    path, file, _ = made("torch", tmp_path)
    data = file.read_bytes()
    found = 0
    chosen = random.Random(2).sample(range(len(data)), 60)
    for at in chosen:
        damage.flip(file, at, 3)
        report = verify(path)
        found += bool(report.findings)
        damage.flip(file, at, 3)
    assert found >= 50
