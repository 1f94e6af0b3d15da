"""The step of a checkpoint: of the counters in it, of its name, and of the updates that an optimizer counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.analysis.describe.summary import head


def trained(updates: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network and its Adam after some updates."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(updates):
        optimizer.zero_grad()
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return net, optimizer


def shown(path: Path) -> tuple[float | None, int | None]:
    """Return the step and the epoch that `inspect` shows."""
    headline, _ = head(ckpttool.inspect(path), None)
    return headline.step, headline.epoch


def saved(path: Path, steps: int = 0, /, **values: Any) -> Path:
    net, optimizer = trained(steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": net.state_dict(), **({"optimizer": optimizer.state_dict()} if steps else {}), **values}, path)
    return path


@pytest.mark.parametrize(
    "values",
    [
        {"iter_num": 70},
        {"iterations": 70},
        {"training_step": 70},
        {"trained_steps": 70, "trained_tokens": 9000},
        {"num_updates": 70},
        {"update": 70},
        {"updates": 70},
        {"ite": 70},
        {"itr": 70},
        {"it": 70},
        {"meta": {"iter": 70, "epoch": 2}},
        {"meta": {"step": 70}, "train_config": {"steps": 1000}},
        {"progress": {"step": torch.tensor(70)}},
        {"step": torch.tensor([70])},
        {"global_step": torch.tensor(70.0), "epoch": 2},
        {"optimizer_history": [{"num_updates": 35}, {"num_updates": 70}]},
    ],
)
def test_a_counter_under_any_of_its_names(values: dict[str, Any], tmp_path: Path) -> None:
    assert shown(saved(tmp_path / "model.pt", 3, **values))[0] == 70


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("model_0000200.pth", 200),
        ("0000200.pt", 200),
        ("prior.step_200.pt", 200),
        ("iter-000200-ckpt.pth", 200),
        ("200.pt", 200),
        ("step_2/model.pt", 2),
        ("checkpoint-200/model.pt", 200),
        # These may count epochs, or nothing.
        ("model_2.pt", None),
        ("checkpoint2.pth", None),
        ("resnet_101.pth", None),
        ("epoch_000200.pt", None),
        ("vit-224.pt", None),
        ("ckpt_2024-01-02_11-00-00.pt", None),
        ("20240102.pt", None),
        ("net-012345ab.pth", None),
    ],
)
def test_the_name_where_no_value_says_it(name: str, step: int | None, tmp_path: Path) -> None:
    path = saved(tmp_path / name)
    assert shown(path if "/" not in name else path.parent)[0] == step


def test_an_epoch_is_no_step(tmp_path: Path) -> None:
    net, _ = trained(0)
    torch.save(net.state_dict(), tmp_path / "net_epoch_7.pth")
    assert shown(tmp_path / "net_epoch_7.pth") == (None, 7)
    assert str(head(ckpttool.inspect(tmp_path / "net_epoch_7.pth"), None)[0]).endswith("epoch 7")
    assert shown(saved(tmp_path / "checkpoint0300.pth", epoch=300)) == (None, 300)
    assert shown(saved(tmp_path / "checkpoint-300.pth", epoch=299)) == (None, 299)
    assert shown(saved(tmp_path / "last.pth", epoch=12, args={"epochs": 90, "steps": 1000})) == (None, 12)
    # The run has the epoch of its newest, too.
    for epoch in (1, 2):
        for name in ("netG", "netD"):
            saved(tmp_path / "run" / f"{name}_epoch_{epoch}.pth")
    assert shown(tmp_path / "run") == (None, 2)


def test_the_updates_of_the_optimizer_are_the_last_resort(tmp_path: Path) -> None:
    assert shown(saved(tmp_path / "last.pth", 3)) == (3, None)
    assert shown(saved(tmp_path / "last.pth", 3, epoch=1)) == (3, 1)
    assert shown(saved(tmp_path / "last.pth", 3, iter_num=12)) == (12, None)
    assert shown(saved(tmp_path / "step_12.pth", 3)) == (12, None)
    # Two that do not agree say nothing.
    states = {f"{name}_optim": trained(updates)[1].state_dict() for name, updates in (("g", 3), ("d", 6))}
    torch.save(states, tmp_path / "optims.pt")
    assert shown(tmp_path / "optims.pt") == (None, None)


def test_of_several_counters_the_one_that_the_name_says(tmp_path: Path) -> None:
    assert shown(saved(tmp_path / "iter-000100.pt", iter_num=100, step_count=25)) == (100, None)
    assert shown(saved(tmp_path / "step-000025.pt", iter_num=100, step_count=25)) == (25, None)
    # VITS has the epoch in `iteration`, and the step in the name.
    for name in ("G", "D"):
        saved(tmp_path / "run" / f"{name}_4.pth", 4, iteration=2)
    assert shown(tmp_path / "run") == (4, None)


def test_the_one_step_of_a_flat_directory(tmp_path: Path) -> None:
    for name in ("model000100.pt", "ema_0.9999_000100.pt"):
        torch.save(trained(0)[0].state_dict(), tmp_path / name)
    assert shown(tmp_path) == (100, None)


def test_the_batch_of_composer_comes_before_its_iteration(tmp_path: Path) -> None:
    """`Timestamp.state_dict` of composer counts iterations too, of data, and `ep0` in the name has the same number."""
    timestamp = {"iteration": 0, "epoch": 0, "batch": 2, "sample": 4, "token": 0}
    state = {"timestamp": {"Timestamp": timestamp}}
    assert shown(saved(tmp_path / "ep0-ba2-rank0.pt", 2, state=state))[0] == 2
