"""Models of which ranks have different parts, as the stages of a pipeline: saved and loaded as one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import reduce
from operator import getitem
from typing import Any

from torch import nn

from ckpttool.catalogue.entries import Path
from ckpttool.errors import UsageError
from ckpttool.layout.rename import strip_wrappers
from ckpttool.text import some
from ckpttool.training import collectives


def names_elsewhere(model: nn.Module) -> set[str]:
    """Return the names of what the models of the ranks have, without those of wrappers; nothing if that is the same on
    all. A collective."""
    of_ranks = collectives.all_gather_different(
        lambda: [*map(strip_wrappers, type(model).state_dict(model, keep_vars=True))]
    )
    return {name for names in of_ranks for name in names}


def join(state: dict[str, Any]) -> list[Path]:
    """Make the parameter groups in a state dict those of the optimizers of all ranks, and return the paths of the
    tensors of which rank 0 has none. Raises UsageError for groups with different hyper-parameters. A collective."""
    keys = [("model",), ("optim", "state")] if "optim" in state else [("model",)]
    of_ranks = collectives.all_gather_different(
        lambda: [(*key, name) for key in keys for name in reduce(getitem, key, state)]
    )
    if of_ranks and "optim" in state:
        groups = collectives.all_gather(state["optim"]["param_groups"])
        with collectives.together():
            state["optim"] = {**state["optim"], "param_groups": _joined(groups)}
    first = set(of_ranks[0]) if of_ranks else set()
    return [path for path in dict.fromkeys(path for paths in of_ranks for path in paths) if path not in first]


def _joined(of_ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return groups with the parameters of all ranks."""
    most = max(of_ranks, key=len)
    result = []
    for number, group in enumerate(most):
        alike = [groups[number] for groups in of_ranks if number < len(groups)]
        values = [{key: value for key, value in one.items() if key != "params"} for one in alike]
        if other := next((one for one in values if one != values[0]), None):
            different = sorted(key for key in {*other, *values[0]} if other.get(key) != values[0].get(key))
            raise UsageError(
                f"ranks have parameter group {number} of the optimizer with different {some(different)}",
                hint="group the parameters of all stages alike, with empty groups where a stage has none",
            )
        names: Iterable[Hashable] = (name for one in alike for name in one["params"])
        result.append({**group, "params": list(dict.fromkeys(names))})
    return result
