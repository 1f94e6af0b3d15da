"""Where a tensor stands: in which part, layer and expert, and which of its kind it is. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ckpttool.catalogue.entries import Catalogue, Part, Tensor
from ckpttool.errors import CkptError
from ckpttool.layout.optimizer.names_of_ids import parameters_of_ids

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_EXPERTS = re.compile(r"(local_|routed_)?experts?", re.IGNORECASE)


Names = Mapping[tuple[Part, str], str]
"""The names of the parameters that an optimizer has numbers for, by part and number."""
NO_NAMES: Names = MappingProxyType({})


def parameter_names(catalogue: Catalogue) -> Names:
    """Return the names of the parameters that optimizers number; none where the model does not say which is which."""
    try:
        return parameters_of_ids(catalogue)
    except CkptError:
        return NO_NAMES


class ModelPlace(NamedTuple):
    """Where a tensor stands: `ModelPlace("optimizer", "exp_avg", "layers.3", "layers.*.experts.*.up.weight", "7")`."""

    part: str  #: part, with its key if that has another name: `optimizer (optim)`
    moment: str  #: of optimizer state, which; else empty
    layer: str  #: layer; empty outside of the layers
    kind: str  #: name with `*` in place of the numbers of layers and experts
    expert: str  #: number of the expert; empty outside of experts


def parameter_of(tensor: Tensor) -> tuple[list[str], str]:
    """Return the keys of a tensor's name in its part; of optimizer state those of its parameter, and which it is."""
    keys = tensor.fqn.split(".")
    if tensor.part.kind != "optimizer" or len(keys) < 2:
        return keys, ""
    *keys, moment = keys
    return keys[1:] if keys[0] == "state" and len(keys) > 1 else keys, moment


def place_of(tensor: Tensor, names: Names = NO_NAMES) -> ModelPlace:
    """Return where a tensor stands, by its name; state of a parameter that has a number, by that one's in `names`."""
    keys, moment = parameter_of(tensor)
    if moment and len(keys) == 1 and _NUMBER.fullmatch(keys[0]):
        name = names.get((tensor.part, keys[0]))
        if name is None:
            return ModelPlace(str(tensor.part), moment, "", "*", "")  # a number says nothing of a layer
        keys = name.split(".")
    layer, expert, kind = "", "", []
    for i, key in enumerate(keys):
        if not _NUMBER.fullmatch(key):
            kind.append(key)
            continue
        kind.append("*")
        if i and _EXPERTS.fullmatch(keys[i - 1]):
            expert = expert or key
        elif not layer:
            layer = ".".join(keys[: i + 1])
    return ModelPlace(str(tensor.part), moment, layer, ".".join(kind), expert)


def module_of(tensor: Tensor, names: Names = NO_NAMES) -> tuple[str, str, str] | None:
    """Return the layer of a tensor, outside of the layers its module, with its part and moment; None of what is neither
    of a model nor state of a parameter. State of a parameter that has a number is that of its name in `names`."""
    if tensor.part.kind not in ("model", "optimizer") or (tensor.part.kind == "optimizer" and not tensor.shape):
        return None
    place = place_of(tensor, names)
    keys, _ = parameter_of(tensor)
    if place.moment and len(keys) == 1 and _NUMBER.fullmatch(keys[0]):
        name = names.get((tensor.part, keys[0]))
        keys = [f"parameter {keys[0]}"] if name is None else name.split(".")
    return place.layer or ".".join(keys[:-1] or keys), place.part, place.moment
