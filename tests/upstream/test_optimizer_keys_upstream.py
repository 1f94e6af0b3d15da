"""Training goes on from an optimizer that we spelt anew as it would have gone on without us, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.optimizers import OPTIMIZERS, Net, Tree, spelt, step, trained
from support.torchrun import Once, forked
from support.upstream_readers import difference
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

from ckpttool import convert
from ckpttool.layout.optimizer.respell import SPELLINGS

WAYS = [(before, after) for before in SPELLINGS for after in SPELLINGS if before != after]
# That the state is torch's own is tested for all of them beside the code.
THOROUGH = ("AdamW in two groups", "AdamW, named", "Adafactor")
RESUMED = [
    (name, before, after) for name in OPTIMIZERS for before, after in WAYS
    if name in THOROUGH or {before, after} == {"id", "flat"}
]  # fmt: skip


def load(net: Net, optimizer: torch.optim.Optimizer, state: Tree, spelling: str) -> None:
    """As a training script does."""
    if spelling == "id":
        optimizer.load_state_dict(state)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=spelling == "flat")
        set_optimizer_state_dict(net, optimizer, state, options=options)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "before", "after"), RESUMED)
def test_the_next_steps_are_the_same(name: str, before: str, after: str, tmp_path: Path) -> None:
    net, optimizer = trained(OPTIMIZERS[name])
    torch.save({"model": net.state_dict(), "optim": spelt(net, optimizer, before)}, tmp_path / "before.pt")
    convert(tmp_path / "before.pt", tmp_path / "after.pt", optim_keys=after, optim_root="optimizer", check=True)
    state = torch.load(tmp_path / "after.pt", weights_only=True)
    assert difference(state["optimizer"], spelt(net, optimizer, after)) == "equal"

    again, fresh = trained(OPTIMIZERS[name])
    step(again, fresh)  # not where the other one is
    again.load_state_dict(state["model"])
    load(again, fresh, state["optimizer"], after)
    for _ in range(2):
        step(net, optimizer)
        step(again, fresh)
    assert difference(again.state_dict(), net.state_dict()) == "equal"


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_through_dcp(before: str, after: str, tmp_path: Path) -> None:
    """Where ids are strings, ties are gone, and a group's list of parameters is a value of its own."""
    net, optimizer = trained(OPTIMIZERS["AdamW in two groups"])
    # The head is stored a second time, and cannot be told from another parameter of its shape but by the order.
    torch_dcp.save({"model": net.state_dict(), "optim": spelt(net, optimizer, before)}, checkpoint_id=tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to="dcp", optim_keys=after, to_world=2)
    again, fresh = trained(OPTIMIZERS["AdamW in two groups"])
    state = {"model": again.state_dict(), "optim": spelt(again, fresh, after)}
    for tensor in (v for entry in fresh.state.values() for v in entry.values()):
        tensor.fill_(float("nan"))
    torch_dcp.load(state, checkpoint_id=tmp_path / "b")
    again.load_state_dict(state["model"])
    load(again, fresh, state["optim"], after)
    step(net, optimizer)
    step(again, fresh)
    assert difference(again.state_dict(), net.state_dict()) == "equal"


# FSDP2 on two ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_fsdp2_goes_on(before: str, after: str, once: Once) -> None:
    folder = once("optimkeys", on_ranks)
    assert json.loads((folder / "verdicts.json").read_text())[f"{before} to {after}"] == "equal"


def on_ranks(folder: Path) -> None:
    said = forked(2, Path(__file__).with_name("optimizer_keys_on_ranks.py"), folder)
    assert (folder / "verdicts.json").exists(), said
