"""What we write as safetensors is read by the safetensors library, and is what that library itself writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
from support import large_state
from support.upstream_readers import (
    detached,
    difference,
    expected_of,
    header,
    named,
    path_of,
    safetensors_by_path,
    safetensors_in,
)
from training import Sizes, Transformer

from ckpttool import convert

MODELS = ["dcp/fsdp2_w2", "dcp/fsdp2_w4", "dcp/fsdp1_w2", "dcp/hsdp_w4", "torch/full", "torch/model", "torch/legacy"]


def written(source: str, out: Path, **options: Any) -> Path:
    """`source` as safetensors."""
    convert(source, str(out), to="safetensors", **options)
    return out


CHECKSUMS = "ckpttool.crc32"
INDEX = "ckpttool.index"


def without_checksums(path: Path) -> bytes:
    """The bytes of a file without the keys that ckpttool adds to those of the library."""
    data, contents = path.read_bytes(), header(path)
    start = 8 + int.from_bytes(data[:8], "little")
    text = data[8:start].rstrip()
    for key in (CHECKSUMS, INDEX):
        text = text.replace(f',"{key}":"{contents["__metadata__"].get(key)}"'.encode(), b"")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[start:]


def same_values(found: dict[str, torch.Tensor], state: Any) -> None:
    """The same names, and bit for bit the same tensors."""
    wanted = {name: detached(tensor) for name, tensor in named(state).items()}
    assert set(found) == set(wanted)
    assert difference(found, wanted) == "equal"


def model_of(sample: str) -> Any:
    """The state dict of the model in a sample."""
    state = expected_of(sample)
    return state.get("model", state)


@pytest.mark.parametrize("sample", MODELS)
def test_one_file_loads_into_a_model(sample: str, tmp_path: Path) -> None:
    # DCP holds a tied weight twice and nothing of its being one; `load_model` wants one of the names.
    twice = sample.startswith("dcp/")
    exclude = ["lm_head.weight"] if twice else []
    out = written(path_of(sample), tmp_path / "model.safetensors", only=["model"], exclude=exclude)
    wanted = dict(detached(model_of(sample)))
    model = Transformer(Sizes())
    assert safetensors.torch.load_model(model, out, strict=True) == (set(), [])
    assert difference(dict(detached(model.state_dict())), wanted) == "equal"
    assert model.lm_head.weight is model.embed.weight
    del wanted["lm_head.weight"]
    assert difference(safetensors.torch.load_file(out), wanted) == "equal"
    if not twice:
        metadata = header(out)["__metadata__"]
        assert metadata.pop(CHECKSUMS)
        assert metadata == {"format": "pt", "lm_head.weight": "embed.weight"}


@pytest.mark.parametrize("sample", ["dcp/fsdp2_w4", "dcp/hsdp_w4", "hf/sharded_w2", "hf/gpt2", "dcp/shard1_w2"])
def test_same_bytes_as_save_file(sample: str, tmp_path: Path) -> None:
    only = ["model"] if "model" in expected_of(sample) else []
    out = written(path_of(sample), tmp_path / "ours.safetensors", only=only)
    safetensors.torch.save_file(model_of(sample), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert without_checksums(out) == (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("sample", MODELS)
@pytest.mark.parametrize("most", [900, 1500, 4000, 100_000])
def test_same_files_as_huggingface_hub(sample: str, most: int, tmp_path: Path) -> None:
    out = written(path_of(sample), tmp_path / "ours", only=["model"], max_shard_size=most)
    (tmp_path / "theirs").mkdir()
    huggingface_hub.save_torch_state_dict(
        model_of(sample), tmp_path / "theirs", max_shard_size=most, shared_tensors_to_discard=["lm_head.weight"]
    )
    theirs = sorted((tmp_path / "theirs").iterdir())
    assert sorted(file.name for file in out.iterdir()) == [file.name for file in theirs]
    for file in theirs:
        if file.suffix == ".json":
            index = json.loads((out / file.name).read_text())
            assert index["metadata"].pop(CHECKSUMS)
            assert index == json.loads(file.read_text())
        elif header(file)["__metadata__"] == {"format": "pt"}:  # else the library writes it in random order
            assert without_checksums(out / file.name) == file.read_bytes()
        else:
            ours = header(out / file.name)
            assert ours["__metadata__"].pop(CHECKSUMS)
            assert ours == header(file)
            assert difference(safetensors_in(out / file.name), safetensors_in(file)) == "equal"


@pytest.mark.parametrize("source", ["large.pt", "dcp"])
@pytest.mark.parametrize("most", [None, 10_000_000])
def test_large_state(source: str, most: int | None, large_folder: Path, tmp_path: Path) -> None:
    out = written(str(large_folder / source), tmp_path / "out", max_shard_size=most, threads=3)
    same_values(safetensors_by_path(out), large_state.state())
    assert (len(list(out.glob("*.safetensors"))) > 3) is (most is not None)
    held = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    names = named(large_state.state()["model"])
    del names["head"]
    tied = source == "large.pt"
    assert held < 1.01 * (sum(tensor.nbytes for tensor in names.values()) + (0 if tied else names["embed"].nbytes))


def test_a_state_may_have_other_dtypes(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "step": 3, "wave": torch.tensor([1 + 2j, -0.0], dtype=torch.complex128)}
    torch.save(state, tmp_path / "state.pt")
    out = written(str(tmp_path / "state.pt"), tmp_path / "out")
    same_values(safetensors_by_path(out), state)
