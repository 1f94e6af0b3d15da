"""The shapes of a model's parameters as JSON, by hand: `[["embed.weight", [29, 7]], ...]`, or an object."""

from __future__ import annotations

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CorruptError, UsageError
from ckpttool.serialization import strict_json
from ckpttool.storage.stores import local_path

_MAX_SIZE = 64 << 20


def read(path: str) -> dict[str, Ints]:
    """Return the shapes by the names, in the order of the file. Raises CorruptError, or UsageError for a config."""
    value = strict_json.parse(local_path(path).head(_MAX_SIZE), f"`{path}`")
    pairs = list(value.items()) if isinstance(value, dict) else value
    shapes: dict[str, Ints] = {}
    for pair in pairs if isinstance(pairs, list) else [None]:
        match pair:
            case (str() as name, [*sizes]) if all(type(n) is int and n >= 0 for n in sizes) and name not in shapes:
                shapes[name] = tuple(sizes)
            case _ if isinstance(value, dict) and not {"architectures", "model_type"}.isdisjoint(value):
                raise UsageError(
                    f"`{path}`: a config, which does not list the shapes of the parameters",
                    hint="name a checkpoint of the model, such as its `model.safetensors`",
                )
            case _:
                raise CorruptError(
                    f"`{path}`: {shown(pair)} is not a name and a shape, or the second of that name",
                    hint='write `[["embed.weight", [29, 7]], ...]` in the order of the model',
                    file=path,
                )
    return shapes
