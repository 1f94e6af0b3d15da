"""Other state than a model and an optimizer, on several ranks: what `save` gathers and `load_into` fills in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import practices
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from training_scripts import HOME, difference

import ckpttool


def whole(number: int = 0) -> torch.Tensor:
    """A tensor that every rank knows."""
    return torch.arange(15.0).reshape(5, 3) + 100 * number


def sharded(number: int = 0, dim: int | None = 0) -> DTensor:
    """The same on all ranks, which do not divide it evenly."""
    mesh = init_device_mesh(HOME[0].type, (dist.get_world_size(),))
    placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(whole(number).to(HOME[0]), mesh, [placement])


def blank(value: Any) -> Any:
    """The same with zeros."""
    return torch.zeros_like(value)


def everywhere() -> dict[str, Any]:
    """Sharded tensors wherever a state can have them."""
    return {
        "weights": sharded(1),
        "columns": {3: sharded(2, 1)},
        "replicated": sharded(3, None),
        "list": [sharded(4), torch.ones(2), 5],
        "tuple": (sharded(5), [sharded(6)], "x"),
    }


def expected(value: Any) -> Any:
    """What is to be in it, whole."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: expected(below) for key, below in value.items()}
    return type(value)(map(expected, value)) if isinstance(value, (list, tuple)) else value


class Average:
    """An object of the script with sharded tensors in its state."""

    def state_dict(self) -> dict[str, Any]:
        """As an exponential moving average has it."""
        return {"decay": 0.9, "shadow": everywhere()}


def gathered(kind: str, format: str) -> str:
    """Every DTensor of an average and of an object is whole in what torch reads."""
    run, place = practices.fresh(kind), practices.folder() / "saved"
    ckpttool.save(place, run.model, format=format, average=everywhere(), meter=Average())
    wanted = expected(everywhere())
    if format == "torch":
        found = torch.load(place, weights_only=False)
        with ckpttool.open(place) as opened:
            if opened.catalogue.faults or opened.catalogue.warnings:
                return f"{opened.catalogue.faults} {opened.catalogue.warnings}"
        said = difference(found["meter"]["shadow"], wanted)
        return said if said != "equal" else difference(found["average"], wanted)
    columns = {"3": blank(sharded(2, 1))}
    state = {"average": everywhere() | {"columns": columns, "weights": blank(sharded())}}
    torch_dcp.load(state, checkpoint_id=place)
    found = expected(state["average"])
    return difference({**found, "columns": {3: found["columns"]["3"]}}, wanted)


class Holder:
    """An object without a state dict."""

    def __init__(self, value: Any) -> None:
        self.value = value


def held(kind: str, format: str) -> str:
    """An object that pickles one rank's shards is refused on all, and nothing is written."""
    run, place = practices.fresh(kind), practices.folder() / "saved"
    try:
        ckpttool.save(place, run.model, format=format, holder={"a": Holder(sharded())})
    except ckpttool.CkptError as error:
        said = error.message
    else:
        return "it was saved"
    return "equal" if "`holder.a`: a Holder holds a DTensor" in said and not place.exists() else said


STATES: dict[str, Callable[..., str]] = {f.__name__: f for f in (gathered, held)}
