"""What torch, Python's `zipfile` and `unzip` make of the archives that ckpttool refuses because readers disagree: the
table in `docs/explanation/safety.md`."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import lying_archives  # noqa: F401
import pytest
import torch
from support.lying_files import LIES, WEIGHTS

# A part of the name: what torch, `zipfile` and `unzip -t` do.
READERS = {
    "a record that the directory does not list, behind the others": ("reads", "reads", "reads"),
    "a pickle that the directory does not list, before another record": ("reads", "reads", "reads"),
    "25 bytes between two records": ("reads", "reads", "reads"),
    "two zip64 fields": ("reads", "reads", "reads"),
    "two zip64 fields that nobody needs": ("reads", "reads", "reads"),
    "a storage encrypted in its local header only": ("reads", "reads", "reads"),
    "a pickle encrypted in its local header only": ("reads", "reads", "reads"),
    "an encrypted record": ("refuses", "refuses", "refuses"),
    "a second pickle behind the first": ("reads", "reads", "reads"),
    "a byte behind the pickle": ("reads", "reads", "reads"),
}


def by_torch(path: Path) -> str:
    try:
        (tensor,) = torch.load(path, weights_only=True).values()
    except RuntimeError:
        return "refuses"
    return "reads" if torch.equal(tensor.flatten(), torch.arange(6.0)) else "reads something else"


def by_zipfile(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        try:
            assert archive.testzip() is None
            data = archive.read("ckpt/data/0")
        except RuntimeError:
            return "refuses"
    return "reads" if data == WEIGHTS and len(archive.namelist()) == 4 else "reads something else"


def by_unzip(path: Path) -> str:
    done = subprocess.run(["unzip", "-tqq", "-P", "x", path], capture_output=True, check=False, timeout=300)
    return "refuses" if done.returncode else "reads"


@pytest.mark.parametrize("name", READERS)
def test_who_reads_what(name: str, tmp_path: Path) -> None:
    path = LIES[f"zip: {name}"].make(tmp_path)
    torch_does, zipfile_does, unzip_does = READERS[name]
    assert by_torch(path) == torch_does
    assert by_zipfile(path) == zipfile_does
    if shutil.which("unzip"):
        assert by_unzip(path) == unzip_does


def test_the_directory_and_the_front_of_a_file_list_other_records(tmp_path: Path) -> None:
    """What reads local headers finds a record that `zipfile` does not; all that is honest lists the same."""
    for name in READERS:
        path = LIES[f"zip: {name}"].make(tmp_path)
        with zipfile.ZipFile(path) as archive:
            listed = len(archive.namelist())
        assert (path.read_bytes().count(b"PK\3\4") > listed) == ("does not list" in name), name
