"""`convert --like RUN`: a training checkpoint of released weights, which torch and `ckpttool.load` load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file
from support import tiny_models
from support.cli import run
from torch import nn

import ckpttool
from ckpttool.errors import CorruptError, LossError, UsageError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 32, bias=False)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    state = {name: value.to(torch.bfloat16) for name, value in Model().state_dict().items()}
    save_file(state, tmp_path / "released.safetensors")
    return tmp_path / "released.safetensors"


def save_run(folder: Path, wrapper: str, form: str) -> Path:
    """A run at its first step, with averaged weights, an optimizer and a step."""
    model = Model()
    weights = {f"{wrapper}{name}": value for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters()).state_dict()
    state = {"model": weights, "ema": {n: v * 2 for n, v in weights.items()}, "optim": optimizer, "step": 1}
    if form == "torch":
        torch.save(state, folder / "run.pt")
        return folder / "run.pt"
    if form == "dcp":
        torch_dcp.save(state, checkpoint_id=folder / "run", no_dist=True)
        return folder / "run"
    torch.save(state, folder / "run.pt")
    ckpttool.convert(folder / "run.pt", folder / "ranks", to="fsdp1", to_world=2, optim_keys="fqn")
    return folder / "ranks"


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("form", ["dcp", "torch", "fsdp1"])
def test_torch_loads_it_under_the_names_of_the_run(wrapper: str, form: str, released: Path, tmp_path: Path) -> None:
    made = ckpttool.convert(released, tmp_path / "start", to="dcp", like=save_run(tmp_path, wrapper, form), check=True)
    state = {"model": {f"{wrapper}{name}": torch.zeros_like(value) for name, value in Model().state_dict().items()}}
    torch_dcp.load(state, checkpoint_id=tmp_path / "start", no_dist=True)
    expected = ckpttool.open(released).state_dict()
    assert all(torch.equal(value, expected[n.removeprefix(wrapper)].float()) for n, value in state["model"].items())
    assert made.dropped == [] and len(made.cast) == 8
    assert [note for note in made.notes if "optimizer" in note] == [
        "the model alone: there is no optimizer state yet, and the optimizer of the run starts afresh"
    ]
    model = Model()
    ckpttool.load(tmp_path / "start", model)
    assert all(torch.equal(value, expected[name].float()) for name, value in model.state_dict().items())


def test_dtypes_and_ranks_can_be_others(released: Path, tmp_path: Path) -> None:
    of_run = save_run(tmp_path, "", "torch")
    made = ckpttool.convert(released, tmp_path / "start", to="dcp", like=of_run, to_world=4, dtype="bfloat16")
    assert made.cast == []
    assert ckpttool.inspect(tmp_path / "start").world_size == 4


def test_what_does_not_fit_is_an_error(released: Path, tmp_path: Path) -> None:
    of_run = save_run(tmp_path, "", "torch")
    state = ckpttool.open(released).state_dict()
    cases: list[tuple[type[Exception], str, dict[str, torch.Tensor]]] = [
        (LossError, r"1 tensor is not in the reference: `extra`", {"extra": torch.ones(2)}),
        (CorruptError, r"`embed\.weight` of another shape: found \[30, 8\], exp", {"embed.weight": torch.ones(30, 8)}),
    ]
    for error, message, change in cases:
        save_file(state | change, tmp_path / "other.safetensors")
        with pytest.raises(error, match=message):
            ckpttool.convert(tmp_path / "other.safetensors", tmp_path / "start", to="dcp", like=of_run)
    with pytest.raises(CorruptError, match=r"1 tensor of the reference is missing: `head\.weight`"):
        ckpttool.convert(released, tmp_path / "start", to="dcp", like=of_run, exclude="head.weight")
    assert not (tmp_path / "start").exists()
    with pytest.raises(UsageError, match="`like` and `producer`"):
        ckpttool.convert(released, tmp_path / "start", producer="torchtitan", like=of_run)


def test_the_command(released: Path, tmp_path: Path) -> None:
    of_run = str(save_run(tmp_path, "", "dcp"))
    done = run("convert", str(released), str(tmp_path / "start"), "--to", "dcp", "--like", of_run, "--dry-run")
    assert done.exit_code == 0 and "no optimizer state" in done.stderr
    done = run("convert", str(released), str(tmp_path / "x"), "--to", "dcp", "--like", of_run, "--map", "none")
    assert done.exit_code == 0
    done = run("convert", str(released), str(tmp_path / "start"), "--to", "dcp", "--like", of_run, "--drop", "optim")
    assert done.exit_code == 2


def test_a_reverse_map_is_that_of_the_class_whose_names_are_wanted(tmp_path: Path) -> None:
    # In the files of llava, the names of the whole model are those that its base model has, too.
    model = tiny_models.made("llava")
    model.save_pretrained(tmp_path / "released")
    torch.save({"model": model.state_dict()}, tmp_path / "run.pt")
    ckpttool.convert(tmp_path / "released", tmp_path / "start.pt", like=tmp_path / "run.pt")
    start, state = torch.load(tmp_path / "start.pt")["model"], model.state_dict()
    assert start.keys() == state.keys() and all(torch.equal(start[name], value) for name, value in state.items())


def test_names_that_no_map_knows_are_matched(tmp_path: Path) -> None:
    """The run has stacked experts under names of its own, and starts from a release with one tensor for each."""
    generator = torch.Generator().manual_seed(2)
    released = {}
    for layer in range(2):
        begin = f"model.layers.{layer}.mlp"
        released[f"{begin}.router.weight"] = torch.randn(4, 8, generator=generator)
        for expert in range(4):
            released[f"{begin}.experts.{expert}.up_proj.weight"] = torch.randn(6, 8, generator=generator)
    save_file(released, tmp_path / "released.safetensors")
    experts = {
        f"blocks.{layer}.moe.experts.up_proj": torch.stack(
            [released[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"] for expert in range(4)]
        )
        for layer in range(2)
    }
    gates = {
        f"blocks.{layer}.moe.router.weight": released[f"model.layers.{layer}.mlp.router.weight"] for layer in range(2)
    }
    state = {"model": {name: torch.zeros_like(value) for name, value in (experts | gates).items()}}
    torch.save(state, tmp_path / "run.pt")
    result = ckpttool.convert(tmp_path / "released.safetensors", tmp_path / "start.pt", like=tmp_path / "run.pt")
    made = torch.load(tmp_path / "start.pt", weights_only=True)["model"]
    assert made.keys() == state["model"].keys()
    assert all(torch.equal(made[name], value) for name, value in (experts | gates).items())
    assert any("`ckpttool match` finds" in note for note in result.notes)
