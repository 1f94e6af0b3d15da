"""Whether the layers of a pipeline are all there, by what the optimizers of its stages train. Pure.

    stage 0  trains (13, 5) (5, 5) (5,)              layer 0  (13, 5)                 layer 1  (5, 5) (5,) frozen (5,)
    stage 1  trains (13, 5) (5, 5) (5,) (5,) (5,)    layer 3  (5, 5) (5,) frozen (5,)                 layer 4 is missing

Each stage has layers that follow each other, and its optimizer counts its own parameters, without names. One that two
stages have, tied, has the same state in both, and may be in a layer of either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.flat.zero_states import as_dict
from ckpttool.serialization.torch_pickle import TensorRef

_OF_ELEMENTS = ("exp_avg", "momentum_buffer", "exp_avg_sq", "square_avg", "sum")
"""Kinds of state that have the shape of the parameter."""


class PipelineStage(NamedTuple):
    """What a stage trains: the shapes of its parameters with a key of each one's state, how many more there are without
    state, and which layers are known to be its own: `PipelineStage([((5, 5), "..."), ...], 0, {3})`."""

    trained: Sequence[tuple[Ints, Hashable]]
    stateless: int
    layers: set[int]


class Lack(NamedTuple):
    """What layers do not have of what a stage trains: `Lack(1, [(5,)])`."""

    stage: int
    shapes: list[Ints]


def stage_of(optimizer: Any, layers: set[int], key_of: Callable[[Any], Hashable] | None) -> PipelineStage:
    """Return what an optimizer trains, and which of `layers` are known to be of its stage. `key_of` is what is the same
    of equal state; without it, as of flat groups, nothing is known of shapes."""
    inner = as_dict(as_dict(optimizer).get("optimizer_state_dict", optimizer))
    groups = inner.get("param_groups")
    if key_of is None or not isinstance(groups, list) or "fp32_groups_flat" in optimizer:
        return PipelineStage([], 0, layers)
    state, keyed = as_dict(inner.get("state")), []
    for own in state.values():
        kinds = (as_dict(own).get(kind) for kind in _OF_ELEMENTS)
        if (ref := next((one for one in kinds if isinstance(one, TensorRef)), None)) is not None:
            keyed.append((ref.shape, key_of(own)))
    counted = [as_dict(group).get("params") for group in groups]
    return PipelineStage(keyed, sum(len(own) for own in counted if isinstance(own, list)) - len(keyed), layers)


def lacking(layers: Mapping[int, Sequence[Ints]], stages: Sequence[PipelineStage]) -> Lack | None:
    """Return what the layers do not have, whichever follow each other are those of a stage; None if it may be all."""
    having = Counter(key for stage in stages for key in {key for _, key in stage.trained})
    every = Counter(shape for shapes in layers.values() for shape in shapes)
    once = {key: shape for stage in stages for shape, key in stage.trained if having[key] > 1}
    own = [Counter(shape for shape, key in stage.trained if key not in once) for stage in stages]
    left = sorted(layers)
    for number, (stage, needed) in enumerate(zip(stages, own, strict=True)):
        others = {layer for later in stages[number + 1 :] for layer in later.layers}
        end = min(others, default=left[-1] + 1 if left else 0)
        held, last = Counter[Ints](), max(stage.layers, default=-1)
        while left and left[0] < end and (needed - held or left[0] <= last):
            held.update(layers[left.pop(0)])
        if needed - held:
            return Lack(number, sorted((needed - held).elements()))
        if len(stage.trained) + stage.stateless > every.total():
            return Lack(number, [])
    absent = sum(own, Counter(once.values())) - every
    return Lack(len(stages) - 1, sorted(absent.elements())) if absent else None
