"""`ckpttool export` of models of diffusers and sentence-transformers: names and folders are those that these write.

The lists of files were written by diffusers 0.42.1 and sentence-transformers 6.2.0 from models of the same shape.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import UsageError


def saved(path: Path, model: dict[str, torch.Tensor]) -> Path:
    """A training state."""
    torch.save({"model": model, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3}, path)
    return path


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the files of safetensors in a folder."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def files(folder: Path) -> set[str]:
    """The names of all files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], value) and one[name].dtype == value.dtype for name, value in other.items()
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("x.gguf", "convert_hf_to_gguf.py"),
        ("x.pt", "x.pt --only model"),
        ("x.BIN", "x.BIN --only model"),
        ("x.onnx", "optimum-cli export onnx"),
        ("x.safetensors", "x.safetensors --only model"),
    ],
)
def test_a_name_of_a_file_is_no_directory(name: str, hint: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pt", {"w": torch.ones(2)})
    with pytest.raises(UsageError, match="an export is a directory") as caught:
        ckpttool.export(source, tmp_path / name)
    assert hint in str(caught.value.hint)
    assert files(tmp_path) == {"a.pt"}
    ckpttool.export(source, f"{tmp_path / name}/")
    assert f"{name}/model.safetensors" in files(tmp_path)


# diffusers ------------------------------------------------------------------------------------------------------------

UNET = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.42.1", "sample_size": 8}


def unet() -> dict[str, torch.Tensor]:
    """A part of a UNet."""
    torch.manual_seed(8)
    return {"conv_in.weight": torch.randn(8, 4, 3, 3), "conv_in.bias": torch.randn(8), "conv_out.bias": torch.randn(4)}


def test_the_files_of_a_model_of_diffusers(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(UNET))
    source = saved(tmp_path / "a.pt", unet())
    ckpttool.export(source, tmp_path / "one", assets=tmp_path / "base", check=True)
    assert files(tmp_path / "one") == {"config.json", "diffusion_pytorch_model.safetensors", "README.md"}
    assert "library_name: diffusers" in (tmp_path / "one" / "README.md").read_text()
    ckpttool.export(source, tmp_path / "two", assets=tmp_path / "base", max_shard_size=1160, card=False, check=True)
    assert files(tmp_path / "two") == {
        "config.json",
        "diffusion_pytorch_model-00001-of-00002.safetensors",
        "diffusion_pytorch_model-00002-of-00002.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
    }
    assert same(tensors(tmp_path / "one"), unet()) and same(tensors(tmp_path / "two"), unet())
