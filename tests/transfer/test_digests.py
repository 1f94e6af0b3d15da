"""SHA-256 of files and of the tensors in them, against hashlib and torch, and what is read for both."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from support.paths import CHECKPOINTS
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Extent, File, Tensor
from ckpttool.catalogue.protocols import PlacedSource
from ckpttool.errors import CkptError
from ckpttool.operations.verify import verify
from ckpttool.storage.stores import local_path
from ckpttool.transfer import digests
from ckpttool.transfer.threads import Work

Runs = list[tuple[str, int, int]]
LARGE = 5 << 19  # bytes: more than two blocks


class Folder:
    """Files of random bytes, and tensors of bytes in them, each as the runs that it consists of."""

    def __init__(self, path: Path, sizes: dict[str, int]) -> None:
        self.path, self.data = path, {name: random.Random(name).randbytes(size) for name, size in sizes.items()}
        for name, data in self.data.items():
            (path / name).write_bytes(data)
        self.files = [File(local_path(str(path / name)), name, len(data)) for name, data in self.data.items()]
        self.catalogue = Catalogue("safetensors", self.files)
        self.expected: dict[tuple[str, ...], str] = {}

    def add(self, name: str, runs: Runs) -> None:
        at, chunks, numbers = 0, [], list(self.data)
        for file, begin, end in runs:
            chunks.append(Chunk((at,), (end - begin,), Extent(numbers.index(file), begin, end - begin)))
            at += end - begin
        values = b"".join(self.data[file][begin:end] for file, begin, end in runs)
        random.Random(name).shuffle(chunks)  # an index lists them in any order
        self.catalogue.add(Tensor((name,), dtype("uint8"), (at,), Chunks.of(chunks)))
        self.expected[name,] = hashlib.sha256(values).hexdigest()

    def values(self) -> digests.ValuesInFiles:
        source, tensors = PlacedSource(self.catalogue), list(self.catalogue.tensors)
        return digests.values_in_files(local_path(str(self.path)), list(self.data), source, tensors)

    def check(self, threads: int, joint: set[str]) -> None:
        values, work = self.values(), Work()
        hashes, _ = digests.of_files(local_path(str(self.path)), list(self.data), threads, work, values)
        assert hashes == {name: hashlib.sha256(data).hexdigest() for name, data in self.data.items()}
        assert {name for (name,) in values.hashes} == joint
        assert values.hashes == {path: self.expected[path] for path in values.hashes}


@pytest.mark.parametrize("threads", [1, 2, 4, 16])
def test_tensors_in_pieces_are_read_with_their_files(threads: int, tmp_path: Path) -> None:
    """Also where files have to be read in another order than that of their names, and runs end anywhere in a block."""
    folder = Folder(tmp_path, {"a": 3 * LARGE, "b": 3 * LARGE, "c": LARGE, "index": 10})
    folder.add("large", [("c", 7, LARGE), ("a", 0, LARGE), ("b", 1, LARGE)])
    folder.add("one", [("b", LARGE, LARGE + 3)])
    folder.add("twice", [("a", LARGE, LARGE + 5000), ("a", LARGE + 5000, LARGE + 9000), ("b", LARGE + 3, 2 * LARGE)])
    for number in range(200):
        begin = 2 * LARGE + 4000 * number
        folder.add(f"small{number}", [("a", begin, begin + 4000), ("b", begin, begin + 4000)])
    folder.check(threads, {name for (name,) in folder.expected})


@pytest.mark.parametrize("threads", [1, 2, 4, 16])
def test_what_cannot_be_read_with_its_files(threads: int, tmp_path: Path) -> None:
    """Tensors that run from file to file in opposite directions, backwards in one, or over each other's bytes."""
    folder = Folder(tmp_path, {"a": 3 * LARGE, "b": 3 * LARGE})
    folder.add("forth", [("a", 0, LARGE), ("b", 0, LARGE)])
    folder.add("back", [("b", LARGE, 2 * LARGE), ("a", LARGE, 2 * LARGE)])
    folder.add("over", [("a", LARGE - 100, LARGE)])
    folder.add("backwards", [("b", 2 * LARGE + 50, 2 * LARGE + 90), ("b", 2 * LARGE, 2 * LARGE + 50)])
    folder.add("single", [("a", 2 * LARGE, 3 * LARGE)])
    folder.check(threads, {"forth", "single"})


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_file_that_cannot_be_read_ends_all(threads: int, tmp_path: Path) -> None:
    """Threads that wait for its part of a tensor, too."""
    folder = Folder(tmp_path, {"a": LARGE, "b": LARGE})
    folder.add("w", [("a", 0, LARGE), ("b", 0, LARGE)])
    values = folder.values()
    (tmp_path / "a").unlink()
    with pytest.raises(CkptError):
        digests.of_files(local_path(str(tmp_path)), list(folder.data), threads, Work(), values)


@pytest.mark.parametrize(("sample", "is_joint"), [("fsdp2_w4", True), ("hsdp_w4", True), ("fsdp2_tp_w4", False)])
def test_of_ranks(sample: str, is_joint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of rows are read once, with their files; the hashes are those of torch's tensors."""
    again: list[str] = []
    of_tensors = digests.of_tensors

    def counted(source: PlacedSource, tensors: list[Tensor], threads: int, work: Work) -> dict[tuple[str, ...], str]:
        again.extend(tensor.name for tensor in tensors if tensor.numel)
        return of_tensors(source, tensors, threads, work)

    monkeypatch.setattr(digests, "of_tensors", counted)
    path = CHECKPOINTS / "dcp" / sample / "ckpt"
    verify(path, write_manifest=tmp_path / "m.json")
    assert (again == []) == is_joint
    dcp_to_torch_save(path, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=False)["model"]
    hashes = {row["name"]: row["sha256"] for row in json.loads((tmp_path / "m.json").read_text())["tensors"]}
    for name, tensor in state.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert hashes[f"model.{name}"] == hashlib.sha256(data).hexdigest(), name
