"""Models of transformers whose files have other names than their parameters in memory, against `from_pretrained`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import cli, generate_key_maps, tiny_models
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

import ckpttool
from ckpttool.errors import CorruptError, UsageError
from ckpttool.training import released_names

# Renamed; with experts that are stacked in memory; with the layers of the text elsewhere, and of a class of its own.
FAMILIES = ("vit", "mixtral", "llava", "swin")


def made(model_type: str, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return tiny_models.made(model_type)


def in_files(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with the names of a model in memory as transformers writes them."""
    written = revert_weight_conversion(model, state)
    return {name: tensor.detach().clone().contiguous() for name, tensor in written.items()}


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [n for n, v in one.items() if v.dtype != other[n].dtype or not torch.equal(v, other[n])]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_save_pretrained_wrote_is_loaded(model_type: str, tmp_path: Path) -> None:
    saved = made(model_type)
    saved.save_pretrained(tmp_path)
    expected, model, another = type(saved).from_pretrained(tmp_path), made(model_type, 8), made(model_type, 9)
    loaded = ckpttool.load(tmp_path, model)
    assert not (loaded.missing or loaded.unexpected)
    assert difference(model.state_dict(), expected.state_dict()) == []
    ckpttool.load_into(tmp_path / "model.safetensors", {"model": another})
    assert difference(another.state_dict(), expected.state_dict()) == []


@pytest.mark.long
@pytest.mark.parametrize("model_type", tiny_models.FAMILIES)
def test_what_each_family_wrote_is_loaded(model_type: str, tmp_path: Path) -> None:
    saved = made(model_type)
    saved.save_pretrained(tmp_path)
    expected, model = type(saved).from_pretrained(tmp_path), made(model_type, 8)
    ckpttool.load(tmp_path, model)
    assert difference(model.state_dict(), expected.state_dict()) == []


def in_numbers(model: Any) -> dict[str, torch.Tensor]:
    """The state of a model, with values that no other element has in its place."""
    state, end = {}, 0
    for name, tensor in tiny_models.written(model).items():
        state[name] = torch.arange(end, end + tensor.numel(), dtype=torch.int32).view(tensor.shape)
        end += tensor.numel() + 1
    return state


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.stem for path in generate_key_maps.FOLDER.glob("*.json")))
def test_each_class_with_a_key_map_is_loaded(name: str, tmp_path: Path) -> None:
    own = {path.stem for path in generate_key_maps.FOLDER.glob("*.json")}
    changed = 0
    for model_type, kind in tiny_models.classes():
        if name != kind.__name__ and (name != model_type or kind.__name__ in own):
            continue
        for model in generate_key_maps.models(model_type, kind):
            state = in_numbers(model)
            written = in_files(model, state)
            torch.save(written, tmp_path / "a.pt")
            for module in model.modules():
                for key, value in [*module._parameters.items()]:
                    if value is not None:
                        empty = torch.empty(value.shape, dtype=torch.int32)
                        module._parameters[key] = nn.Parameter(empty, requires_grad=False)
                for key, value in [*module._buffers.items()]:
                    if value is not None:
                        module._buffers[key] = torch.empty(value.shape, dtype=torch.int32)
            model.tie_weights()
            loaded = ckpttool.load(tmp_path / "a.pt", model, strict=False)
            tied = {*(getattr(model, "all_tied_weights_keys", None) or ()), *(model._keys_to_ignore_on_save or ())}
            assert loaded.unexpected == [] and {*loaded.missing} <= tied
            mine = model.state_dict()
            assert difference({n: mine[n] for n in state}, state) == []
            changed += written.keys() != state.keys()
    assert changed


def test_the_optimizer_follows_its_parameters(tmp_path: Path) -> None:
    """Under the names of files, under those in memory, as FSDP2 gathers them, and by numbers."""
    saved = made("vit")
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.25)
    for parameter in saved.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    names, state = [name for name, _ in saved.named_parameters()], optimizer.state_dict()
    in_memory = {name: state["state"][i] for i, name in enumerate(names)}
    released = {name: next(iter(in_files(saved, {name: saved.state_dict()[name]}))) for name in names}
    assert {*released} != {*released.values()}
    optimizers = {
        "files": {released[name]: of for name, of in in_memory.items()},
        "memory": in_memory,
        "numbers": state["state"],
    }
    for what, of in optimizers.items():
        groups = [{**state["param_groups"][0], "params": [*of]}]
        whole = {"model": in_files(saved, saved.state_dict()), "optimizer": {"state": of, "param_groups": groups}}
        torch.save(whole, tmp_path / f"{what}.pt")
        model = made("vit", 8)
        fresh = torch.optim.AdamW(model.parameters())
        ckpttool.load(tmp_path / f"{what}.pt", model, fresh)
        assert difference(model.state_dict(), saved.state_dict()) == []
        found = fresh.state_dict()
        assert found["param_groups"][0]["lr"] == 0.25
        for number, expected in state["state"].items():
            assert all(torch.equal(value, found["state"][number][key]) for key, value in expected.items())


def test_moments_of_stacked_experts_are_stacked(tmp_path: Path) -> None:
    saved = made("mixtral")
    values = in_files(saved, saved.state_dict())
    moments = {name: torch.randn_like(value) for name, value in values.items()}
    groups = [{"lr": 0.5, "params": [*values]}]
    state = {name: {"step": torch.tensor(3.0), "exp_avg": moments[name]} for name in values}
    dcp.save({"model": values, "optim": {"state": state, "param_groups": groups}}, checkpoint_id=tmp_path, no_dist=True)
    other, model = made("mixtral"), made("mixtral", 8)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpttool.load(tmp_path, model, optimizer)
    assert difference(model.state_dict(), saved.state_dict()) == []
    # transformers stacks the moments, as if they were the values.
    (tmp_path / "moments").mkdir()
    other.load_state_dict(saved.state_dict())
    saved.config.save_pretrained(tmp_path / "moments")
    torch.save(moments, tmp_path / "moments" / "pytorch_model.bin")
    expected = dict(type(saved).from_pretrained(tmp_path / "moments").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], expected[name])
        assert optimizer.state[parameter]["step"] == 3


def test_names_in_memory_stay(tmp_path: Path) -> None:
    saved, model = made("mixtral"), made("mixtral", 8)
    torch.save(saved.state_dict(), tmp_path / "a.pt")
    ckpttool.load(tmp_path / "a.pt", model)
    assert difference(model.state_dict(), saved.state_dict()) == []


def test_an_expert_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    saved, model = made("mixtral"), made("mixtral", 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    values = in_files(saved, saved.state_dict())
    gone = next(name for name in values if ".experts.1." in name)
    del values[gone]
    torch.save(values, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=re.escape(gone)):
        ckpttool.load(tmp_path / "a.pt", model)
    assert difference(model.state_dict(), before) == []


def test_a_flipped_bit_of_one_expert_is_an_error(tmp_path: Path) -> None:
    saved = made("mixtral")
    values = in_files(saved, saved.state_dict())
    torch.save(values, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for name in [name for name in values if ".experts." in name][:4]:
        at = whole.find(values[name].numpy().tobytes())
        assert at > 0
        (tmp_path / "a.pt").write_bytes(whole[: at + 5] + bytes([whole[at + 5] ^ 1]) + whole[at + 6 :])
        with pytest.raises(CorruptError, match="CRC"):
            ckpttool.load(tmp_path / "a.pt", made("mixtral", 8))


class Other(nn.Module):
    """A model of another library, with the names that transformers 5 has in memory."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vit, self.classifier = model.vit, model.classifier


def test_the_command_that_helps_another_library_is_named(tmp_path: Path) -> None:
    saved = made("vit")
    saved.save_pretrained(tmp_path / "theirs")
    model = Other(made("vit", 8))
    assert released_names.key_map(model) is None
    with pytest.raises(UsageError, match="does not fit") as caught:
        ckpttool.load(tmp_path / "theirs", model)
    command = next(one for one in re.findall("`([^`]*)`", str(caught.value.hint)) if one.startswith("ckpttool "))
    words = [str(tmp_path / "out.safetensors") if word == "DST" else word for word in shlex.split(command)[1:]]
    assert cli.run(*words).exit_code == 0
    ckpttool.load(tmp_path / "out.safetensors", model)
    assert difference(model.state_dict(), saved.state_dict()) == []
