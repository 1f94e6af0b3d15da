"""What is loaded on the ranks, and what it is compared with: torch's own gathering, at saving and after loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import scripts
from reading import expected_of, path_of
from scripts import KINDS, detached, difference
from training import Run

import ckpttool


def groups_of(reference: dict[str, Any]) -> list[list[str]]:
    """The parameters of each group by name; where the optimizer has numbers, as `training.train` groups them."""
    groups = [list(group["params"]) for group in reference["optim"]["param_groups"]]
    if any(isinstance(name, str) for group in groups for name in group):
        return groups
    model = scripts.bare(scripts.sizes_of(reference["model"]))
    named = list(model.named_parameters())
    return [[n for n, p in named if p.ndim >= 2], [n for n, p in named if p.ndim < 2]]


def by_name(optim: dict[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """An optimizer's state by names, if it is by numbers."""
    names = [name for group in groups for name in group]
    state = {names[int(key)] if str(key).isdecimal() else key: value for key, value in optim["state"].items()}
    found = [{**group, "params": listed} for group, listed in zip(optim["param_groups"], groups, strict=True)]
    return {"state": state, "param_groups": found}


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """The order of parameters and of groups is the script's, not the checkpoint's."""
    optim = state["optim"]
    groups = [{**g, "params": sorted(g["params"])} for g in optim["param_groups"] if g["params"]]
    groups.sort(key=lambda group: group["params"])
    for group in groups:
        group.pop("param_names", None)
    return {
        "model": dict(sorted(state["model"].items())),
        "state": {name: dict(sorted(optim["state"][name].items())) for name in sorted(optim["state"])},
        "groups": [dict(sorted(group.items())) for group in groups],
    }


def sample(name: str, kind: str, strategy: str, device: str = "cpu") -> str:
    """A sample into a fresh model and an optimizer that has not stepped."""
    reference = expected_of(name)
    groups = groups_of(reference)
    expected = {"model": reference["model"], "optim": by_name(reference["optim"], groups)}
    model = KINDS[kind](scripts.bare(scripts.sizes_of(reference["model"]), device))
    run = Run(model, scripts.optimizer_for(model, groups), None)
    loaded = ckpttool.load(path_of(name), run.model, run.optimizer, strategy=strategy)
    if loaded.missing or loaded.unexpected:
        return f"missing {loaded.missing}, unexpected {loaded.unexpected}"
    said = difference(comparable(scripts.whole(run)), comparable(detached(expected)))
    if said != "equal":
        return said
    if run.model.get_submodule("").training is not True:
        return "not training"
    return said


CASES: dict[str, Callable[..., str]] = {"sample": sample}
