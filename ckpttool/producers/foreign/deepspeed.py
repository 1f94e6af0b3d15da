"""Says of one file of DeepSpeed's ZeRO what it is. The format `deepspeed` opens directories."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.values import TorchSize
from ckpttool.errors import CorruptError
from ckpttool.producers.foreign.recognition import Recognition, ranks
from ckpttool.text import is_or_are, plural, some

_SHAPES_OF = ("param_shapes.", "frozen_param_shapes.")
_NAMED = ("ds_version", "dp_world_size", "mp_world_size", "global_steps", "buffer_names")
_BELOW = (*_SHAPES_OF, "shared_params.", "ds_config.zero_optimization.")
_LOOKING = "inspect, show and diff each file by its own name"
_MERGE = "put the partitions of the ranks together: name the directory, which is read as one checkpoint"


def describe(catalogue: Catalogue) -> Recognition | None:
    """Return what one file of DeepSpeed is whose catalogue is open; None for any other file."""
    names = {path[0] for path in catalogue.entries if path}
    if not {"ds_version", "ds_config"} <= names:
        return None
    values = {e.name: e.value for e in catalogue.objects if e.name in _NAMED or e.name.startswith(_BELOW)}
    if "module" not in names:
        name = "file of DeepSpeed ZeRO, the optimizer state of one rank"
        return Recognition(name, str(values.get("ds_version", "")), can=(_LOOKING,), cannot=(_MERGE,))
    stage = values.get("ds_config.zero_optimization.stage")
    shapes = _shapes(values, {t.name: t.shape for t in catalogue.tensors})
    absent = [e for e in catalogue.tensors if e.path[0] == "module" and shapes.get(e.fqn, e.shape) != e.shape]
    faults: tuple[CorruptError, ...] = ()
    if absent:
        weights = [tensor.name for tensor in absent]
        text = f"{plural(len(absent), 'weight')} of ZeRO-3 {is_or_are(absent)} in partitions, which "
        text += f"the `*_optim_states.pt` of all ranks have: {some(weights)}"
        hint = "name the directory, which is read as one checkpoint"
        faults = (CorruptError(text, hint=hint, tensor=weights[0], concerns=weights, needs="other ranks"),)
    return Recognition(
        f"file of DeepSpeed ZeRO-{stage if isinstance(stage, int) else 0}",
        str(values.get("ds_version", "")),
        _parallelism(values),
        sum(map(prod, shapes.values())) or None,
        can=(_LOOKING,) if absent else (_LOOKING, "convert the weights, as they were in training: `--only model`"),
        cannot=(_MERGE,),
        faults=faults,
    )


def _shapes(values: Mapping[str, Any], tensors: Mapping[str, Ints]) -> dict[str, Ints]:
    """Return the shapes of whole parameters; of those that the optimizer does not have, by `tensors` of the file."""
    shapes: dict[str, Ints] = {
        re.sub(r"^(frozen_)?param_shapes\.(\d+\.)?", "", name): tuple(value)
        for name, value in values.items()
        if name.startswith(_SHAPES_OF) and isinstance(value, TorchSize)
    }
    buffers = values.get("buffer_names")
    others = {name for name in buffers if isinstance(name, str)} if isinstance(buffers, list) else set[str]()
    others |= {name.removeprefix("shared_params.") for name in values if name.startswith("shared_params.")}
    own = {name.removeprefix("module."): shape for name, shape in tensors.items() if name.startswith("module.")}
    return {name: shape for name, shape in own.items() if name not in others} | shapes


def _parallelism(values: Mapping[str, Any]) -> str:
    dp, mp = values.get("dp_world_size"), values.get("mp_world_size")
    if not isinstance(dp, int) or not isinstance(mp, int):
        return ""
    return ranks(dp, "data-parallel") + (f" x {ranks(mp, 'model-parallel')}" if mp > 1 else "")
