"""The keys around a model, which its safetensors do not have in their names, come back on the way to another format."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpttool


def model() -> dict[str, Any]:
    return {"embed.weight": torch.randn(6, 2), "norm.weight": torch.randn(3)}


STATES: dict[str, Any] = {
    "model": {"model": model()},
    "module": {"module": model()},
    "both": {"model": model(), "optimizer": {"state": {"embed.weight": {"exp_avg": torch.ones(6, 2)}}}},
    "flat": model(),
    "deep": {"app": {"model": model()}},
    "nested": {"model": {"layers": {0: {"w": torch.randn(2)}, 10: {"w": torch.randn(2)}}}},
    "lists": {"model": {"blocks": [torch.randn(2), torch.randn(3)]}},
}


def leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for value in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(value)]


def zeros(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: zeros(value) for key, value in tree.items()}
    return [zeros(value) for value in tree]


def test_dcp_loads_what_came_back_from_safetensors(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    for name, state in STATES.items():
        saved, back = tmp_path / name, tmp_path / f"{name}-back"
        dcp.save(state, checkpoint_id=saved, no_dist=True)
        result = ckpttool.convert(saved, tmp_path / f"{name}-st", to="safetensors")
        root = {"model": "model", "module": "module", "deep": "app.model", "nested": "model", "lists": "model"}.get(
            name
        )
        told = [note for note in result.notes if "left off the names" in note]
        assert [note.split("`")[1] for note in told] == ([root] if root else []), name
        again = tmp_path / f"{name}-again"
        ckpttool.convert(tmp_path / f"{name}-st", again, to="safetensors")
        for way, source in ((ckpttool.convert, tmp_path / f"{name}-st"), (ckpttool.reshard, again)):
            target = Path(f"{back}-{way.__name__}")
            way(source, target, **({"to": "dcp"} if way is ckpttool.convert else {"to_world": 2}))
            found = zeros(state)
            dcp.load(found, checkpoint_id=target, no_dist=True)
            assert all(map(torch.equal, leaves(found), leaves(state))), name


@pytest.mark.parametrize("only", [[], ["model"]])
def test_torch_save_gets_the_root_back(tmp_path: Path, only: list[str]) -> None:
    """Unless the model alone is asked for, which is without it in every format."""
    state = STATES["module"]
    torch.save(state, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    ckpttool.convert(tmp_path / "a.safetensors", tmp_path / "b.pt", only=only)
    found = torch.load(tmp_path / "b.pt")
    found = found if only else found.pop("module")
    assert found.keys() == state["module"].keys()
    assert all(torch.equal(found[name], state["module"][name]) for name in found)
