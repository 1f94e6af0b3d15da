"""One flipped bit in `.metadata`, which torch writes without a checksum: it is told, or changes nothing."""

from __future__ import annotations

import io
import pickle
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from support.faults import save_dcp
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError, CorruptError
from ckpttool.operations.verify import verify
from ckpttool.producers.open import open_source

TORCHS = CHECKPOINTS / "dcp/fsdp2_w4/ckpt"


def contents(path: Path) -> Any:
    """All that a conversion would use: names, dtypes, shapes, places, and objects."""
    source = open_source(str(path))
    try:
        validate(source.catalogue)
        found: list[Any] = [sorted((at, repr(kind)) for at, kind in source.catalogue.containers.items())]
        for entry in source.catalogue.entries.values():
            if not isinstance(entry, Tensor):
                found.append((entry.path, repr(entry.value)))
                continue
            places = [source.resolve(entry, entry.chunks.at(i)) for i in range(len(entry.chunks))]
            found.append((entry.path, entry.dtype, entry.shape, [*entry.chunks.offsets], [*entry.chunks.sizes], places))
        return found
    finally:
        source.close()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours") / "ckpt"
    ckpttool.convert(TORCHS, path, to="dcp", manifest=False)
    return path


@pytest.mark.parametrize("flips", [80, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("writer", ["torch", "ckpttool"])
def test_flips(writer: str, flips: int, ours: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(TORCHS if writer == "torch" else ours, tmp_path / "ckpt"))
    index = path / ".metadata"
    data, honest, some = index.read_bytes(), contents(path), random.Random(7)
    silent, refused, by_checksum = [], 0, 0
    for _ in range(flips):
        bit = some.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        index.write_bytes(flipped)
        try:
            if contents(path) != honest:
                silent.append(bit)
        except CkptError as error:
            refused += 1
            by_checksum += "has checksum" in error.message
    print(f"{writer}: of {flips} flips {refused} are told, {by_checksum} by the checksum; {len(silent)} are silent")
    assert not silent
    assert refused > 0.9 * flips
    assert by_checksum > 0.95 * flips or writer == "torch"


def test_the_checksum(ours: Path, tmp_path: Path) -> None:
    """Python's own unpickler reads past it, and so does torch; `verify` and `convert` name what is wrong."""
    index = (path := Path(shutil.copytree(ours, tmp_path / "ckpt"))) / ".metadata"
    data = index.read_bytes()
    metadata, by_torch = pickle.load(io.BytesIO(data)), dcp.FileSystemReader(path).read_metadata()
    assert metadata.storage_data == by_torch.storage_data
    assert metadata.state_dict_metadata.keys() == by_torch.state_dict_metadata.keys()
    assert verify(path).whole
    # A letter of a name, everywhere: nothing else tells.
    index.write_bytes(data.replace(b"norm.weight", b"morm.weight"))
    assert "model.layers.0.morm.weight" in pickle.load(io.BytesIO(index.read_bytes())).state_dict_metadata
    assert [finding.gravity for finding in verify(path).findings][:1] == ["damage"]
    with pytest.raises(
        CorruptError, match=r"`\.metadata` has checksum [0-9a-f]{8}, but the writer recorded [0-9a-f]{8}"
    ):
        ckpttool.convert(path, tmp_path / "out", to="torch")


def test_names_and_key_paths(tmp_path: Path) -> None:
    """What torch writes twice."""
    import torch

    path = save_dcp(tmp_path / "ckpt", {"model": {"weight": torch.ones(3), "bias": torch.ones(2)}})
    index = path / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    honest = dict(metadata.planner_data)
    metadata.planner_data = honest | {"model.bias": ("model", "bios")}
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match=r"calls an entry `model\.bias`, but its key path spells `model\.bios`"):
        ckpttool.inspect(path)
    metadata.planner_data = {"model.weight": honest["model.weight"], "model.bios": ("model", "bios")}
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match=r"no key path of `model\.bias`, but one of `model\.bios`"):
        ckpttool.inspect(path)


@pytest.mark.parametrize("part", ["optimizer.state.", "optimizer.state.layers.0.weight.exp_avg_sq", "model."])
def test_names_that_the_optimizer_and_the_model_spell_apart(part: str, tmp_path: Path) -> None:
    """A flipped bit in a name, wherever the index of torch refers to it."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    path = save_dcp(tmp_path / "ckpt", state)
    assert not verify(path).findings
    metadata = pickle.loads((path / ".metadata").read_bytes())

    def spelt(name: str) -> str:
        return name.replace("layers.0.weight", "layers.0.weighu") if name.startswith(part) else name

    described = metadata.state_dict_metadata
    assert [*described] != [*map(spelt, described)]
    metadata.state_dict_metadata = {spelt(name): value for name, value in described.items()}
    metadata.planner_data = {
        spelt(name): tuple(
            key.replace("weight", "weighu") if spelt(name) != name and "layers.0" in str(key) else key for key in keys
        )
        for name, keys in metadata.planner_data.items()
    }
    metadata.storage_data = {replace(at, fqn=spelt(at.fqn)): where for at, where in metadata.storage_data.items()}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    dcp.FileSystemReader(path).read_metadata()  # torch says nothing
    here, there = ("weight", "weighu") if part == "model." else ("weighu", "weight")
    text = f"the optimizer has state of `layers.0.{here}`, but the model has `layers.0.{there}`"
    (finding,) = verify(path).findings
    assert (finding.gravity, finding.message) == ("suspect", text)
    assert any(text in note for note in ckpttool.convert(path, tmp_path / "out", to="torch").notes)


def test_a_manifest_beside_it_is_read(tmp_path: Path) -> None:
    """By whatever opens the directory, also one that torch wrote."""
    path = Path(shutil.copytree(TORCHS, tmp_path / "ckpt"))
    verify(path, write_manifest=path / "integrity.json")
    ckpttool.inspect(path)
    index = path / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"norm.weight", b"morm.weight"))
    for use in (ckpttool.inspect, lambda path: ckpttool.convert(path, tmp_path / "out", to="torch")):
        with pytest.raises(
            CorruptError, match=r"`\.metadata` has SHA-256 \w{16}\.\.\., but \w{16}\.\.\. in `integrity\.json`"
        ):
            use(path)
    assert verify(path).findings[0].gravity == "damage"
    (path / "integrity.json").unlink()
    assert any("morm" in tensor.name for tensor in ckpttool.inspect(path).tensors)
