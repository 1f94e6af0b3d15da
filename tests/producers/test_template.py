"""Files of whole objects are written as copies of themselves with other elements; torch and pickle read them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import ckpttool
from ckpttool.errors import CorruptError, LossError

Save = Callable[[Any, Path], Any]


class Net(nn.Module):
    """Two tied weights, one in another order, a view of a larger storage, and what no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight = self.inner.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.part = nn.Parameter(torch.randn(6, 4)[:, 1:3])
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.note = "attribute"


class Runs:
    """What runs a command where it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def legacy(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def pickled(protocol: int) -> Save:
    return lambda value, path: path.write_bytes(pickle.dumps(value, protocol))


def loaded(path: Path) -> Any:
    data = path.read_bytes()
    is_pickle = data[:1] == b"\x80" and data[2:3] != b"\x8a"
    return pickle.loads(data) if is_pickle else torch.load(path, weights_only=False)


SAVES = {"zip": torch.save, "legacy": legacy, "pickle 4": pickled(4), "pickle 2": pickled(2)}


@pytest.fixture
def original(tmp_path: Path) -> Path:
    torch.save({"net": Net(), "step": 3}, tmp_path / "original.pt")
    return tmp_path / "original.pt"


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_nothing_changes_on_the_way_to_dcp_and_back(save: Save, tmp_path: Path) -> None:
    save({"net": Net(), "step": 3}, tmp_path / "original.pt")
    ckpttool.convert(tmp_path / "original.pt", tmp_path / "dcp", to="dcp")
    ckpttool.convert(tmp_path / "dcp", tmp_path / "back.pt", producer=str(tmp_path / "original.pt"), check=True)
    ckpttool.convert(tmp_path / "original.pt", tmp_path / "same.pt", producer="same", check=True)
    for name in ("back.pt", "same.pt"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "original.pt").read_bytes()


def test_a_program_goes_back_to_its_file(tmp_path: Path) -> None:
    torch.jit.script(nn.Sequential(nn.Linear(3, 2))).save(str(tmp_path / "original.pt"))
    ckpttool.convert(tmp_path / "original.pt", tmp_path / "state.pt", to="torch")
    ckpttool.convert(tmp_path / "state.pt", tmp_path / "back.pt", producer=str(tmp_path / "original.pt"), check=True)
    assert (tmp_path / "back.pt").read_bytes() == (tmp_path / "original.pt").read_bytes()


@pytest.mark.parametrize("save", [SAVES["zip"], SAVES["legacy"], SAVES["pickle 4"]], ids=["zip", "legacy", "pickle 4"])
def test_what_was_trained_elsewhere_is_a_module_again(save: Save, tmp_path: Path) -> None:
    save(Net(), tmp_path / "original.pt")
    ckpttool.convert(tmp_path / "original.pt", tmp_path / "state.pt", to="torch")
    state = torch.load(tmp_path / "state.pt")
    for name in ("inner.weight", "head.bias", "conv.bias"):
        state[name] = state[name] + 1
    state["head.weight"] = state["inner.weight"].clone()  # not tied, but the same
    torch.save(state, tmp_path / "trained.pt")
    ckpttool.convert(tmp_path / "trained.pt", tmp_path / "back.pt", producer=str(tmp_path / "original.pt"), check=True)
    module, before = loaded(tmp_path / "back.pt"), loaded(tmp_path / "original.pt")
    assert type(module) is Net and module.note == "attribute" and module.head.weight is module.inner.weight
    assert torch.equal(module.scratch, before.scratch)
    assert module.state_dict().keys() == state.keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    if save is torch.save:
        assert zipfile.ZipFile(tmp_path / "back.pt").testzip() is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": ["bfloat16"]}, "another dtype or shape there"),
        ({"exclude": ["net.head.bias"]}, "cannot be excluded"),
        ({"rename": ["net.conv=net.convolution"]}, "is not there"),
    ],
)
def test_what_only_the_classes_can_change_is_an_error(options: dict[str, Any], why: str, original: Path) -> None:
    with pytest.raises(LossError, match=why):
        ckpttool.convert(original, original.parent / "back.pt", producer="same", **options)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("step", 4, "another value there"),
        ("head.weight", torch.ones(5, 4), "`net.head.weight` shares its bytes"),
        ("conv.weight", torch.ones(4, 3, 3, 3), "`net.conv.weight` .* in another order"),
    ],
)
def test_what_has_no_bytes_of_its_own_stays_as_it_is(key: str, value: Any, why: str, original: Path) -> None:
    folder = original.parent
    ckpttool.convert(original, folder / "state.pt", to="torch")
    state = torch.load(folder / "state.pt")
    (state if key in state else state["net"])[key] = value
    torch.save(state, folder / "state.pt")
    with pytest.raises(LossError, match=why):
        ckpttool.convert(folder / "state.pt", folder / "back.pt", producer=str(original))
    assert not (folder / "back.pt").exists()


def test_what_runs_commands_is_not_copied(tmp_path: Path) -> None:
    net = Net()
    net.hidden = Runs()
    torch.save(net, tmp_path / "original.pt")
    with pytest.raises(CorruptError, match=r"system`, which runs code when loaded, and is not copied"):
        ckpttool.convert(tmp_path / "original.pt", tmp_path / "same.pt", producer="same")


def test_a_file_of_which_nothing_is_left_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    net = Net()
    torch.save(net, tmp_path / "step_1/model.pt")
    torch.save(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9).state_dict(), tmp_path / "step_1/optimizer.pt")
    ckpttool.convert(tmp_path / "step_1", tmp_path / "one", producer="same", drop=["model"], check=True)
    ckpttool.convert(tmp_path / "step_1", tmp_path / "other", producer="same", drop=["optimizer"], check=True)
    assert os.listdir(tmp_path / "one") == ["optimizer.pt"]
    assert (tmp_path / "other/model.pt").read_bytes() == (tmp_path / "step_1/model.pt").read_bytes()
    assert os.listdir(tmp_path / "other") == ["model.pt"]


def test_a_directory_of_one_file_keeps_its_name_and_its_assets(tmp_path: Path) -> None:
    src = tmp_path / "adapter"
    src.mkdir()
    weights = {"base_model.q_proj.vera_lambda_b": torch.ones(3), "base_model.q_proj.vera_lambda_d": torch.zeros(2)}
    safetensors.torch.save_file(weights, src / "adapter_model.safetensors", {"format": "pt", "note": "x"})
    (src / "adapter_config.json").write_text('{"peft_type": "VERA"}')
    ckpttool.convert(str(src), str(tmp_path / "dcp"), to="dcp")
    for start, producer in ((src, "same"), (tmp_path / "dcp", str(src))):
        out = tmp_path / f"from_{start.name}"
        ckpttool.convert(str(start), str(out), producer=producer)
        assert sorted(os.listdir(out)) == ["adapter_config.json", "adapter_model.safetensors"]
        assert (out / "adapter_config.json").read_bytes() == (src / "adapter_config.json").read_bytes()
        with safetensors.safe_open(out / "adapter_model.safetensors", "pt") as file:
            assert file.metadata().get("note") == ("x" if start is src else None)
        back = safetensors.torch.load_file(out / "adapter_model.safetensors")
        assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)


def test_an_index_of_any_name_keeps_its_files(tmp_path: Path) -> None:
    src, stem = tmp_path / "unet", "diffusion_pytorch_model"
    src.mkdir()
    shards = {f"{stem}-0000{n}-of-00002.safetensors": {f"w{n}": torch.full((2,), float(n))} for n in (1, 2)}
    for name, weights in shards.items():
        safetensors.torch.save_file(weights, src / name, {"format": "pt"})
    index = {"metadata": {"total_size": 16}, "weight_map": {w: name for name, held in shards.items() for w in held}}
    (src / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    ckpttool.convert(str(src), str(tmp_path / "out"), producer="same")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(src))
    shutil.copytree(src, tmp_path / "pipe" / "unet")
    (tmp_path / "pipe" / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DModel"]}')
    ckpttool.convert(str(tmp_path / "pipe"), str(tmp_path / "copy"), producer="same")
    assert sorted(os.listdir(tmp_path / "copy" / "unet")) == sorted(os.listdir(src))
    for name, weights in shards.items():
        back = safetensors.torch.load_file(tmp_path / "out" / name)
        assert back.keys() == weights.keys() and all(torch.equal(back[w], weights[w]) for w in weights)
