"""The parameters that the optimizers of a checkpoint are about. Pure."""

from __future__ import annotations

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue
from ckpttool.layout.optimizer.names_of_ids import name_ids, parameter_shape
from ckpttool.layout.optimizer.parse import optimizers


def parameters(source: Catalogue) -> dict[str, Ints | None] | None:
    """Return the names and shapes of all parameters that have state or are in a parameter group, without the root of
    the model; None where there is no optimizer. A shape is None where the state does not tell it.

    Raises UsageError or CorruptError when the names of ids are not clear.
    """
    found = optimizers(source)
    if not found:
        return None
    numbered = [optimizer for optimizer in found if optimizer.spelling == "id"]
    names = iter(name_ids(numbered, source))
    shapes: dict[str, Ints | None] = {}
    for optimizer in found:
        name_of = next(names) if optimizer.spelling == "id" else {}
        for key in (*optimizer.params, *optimizer.state, *optimizer.loose):
            name = str(name_of.get(key, key))
            items = optimizer.state.get(key) or optimizer.loose.get(key, [])
            shapes[name] = shapes.get(name) or parameter_shape(items)
    return shapes
