"""The files of the layers of a pipeline, and of experts: what they have beside the weights of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.errors import ReadError
from ckpttool.flat import pipeline_stages
from ckpttool.flat.pieces import Rebuilt
from ckpttool.formats.deepspeed import members
from ckpttool.formats.deepspeed.members import StateFile
from ckpttool.formats.deepspeed.open_directory import OpenDirectory
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.text import some

Values = dict[str, tuple[Any, StateFile]]
"""What files have by the names that it has in the model, with the file."""
_COPY = "copy what is missing from where the checkpoint was saved"


def of_pipeline(opened: OpenDirectory, by_name: Mapping[str, Rebuilt]) -> Values:
    """Return what the files of a pipeline's layers have, under the names that the model has there: `3.weight`, or
    `tied_modules.embed.weight` of a layer that is there several times."""
    values: Values = {}
    tied: dict[str, set[str]] = {}
    present = opened.members.layers
    for name in by_name:
        kind, _, rest = name.partition(".")
        layer, _, parameter = rest.partition(".")
        if kind == "tied_modules":
            tied.setdefault(f"{kind}.{layer}.", set()).add(parameter)
        elif kind.isdecimal() and int(kind) not in present:
            text = f"the file of layer {int(kind)} is missing, but the optimizer has its `{name}`"
            opened.fault(text, _COPY, tensor=name)
    for number, file_name in sorted(present.items()):
        file, root = opened.load(0, file_name), f"{number}."
        if not any(f"{root}{key}" in by_name for key in file.tree):
            alike = [one for one, names in tied.items() if names and names <= file.tree.keys()]
            if len(alike) > 1 and any(f"{one}{key}" not in by_name for key in file.tree for one in alike):
                text = f"`{file_name}` belongs to one of {some(alike)}, and nothing says to which"
                raise ReadError(text, hint=members.CONVERT, file=file_name, found=alike)
            root = alike[0] if alike else root
        own = {f"{root}{key}": (value, file) for key, value in file.tree.items()}
        opened.compare_rounded(own, by_name)
        values |= {key: value for key, value in own.items() if key not in values}
    named = [name for one in opened.weights for name in one.tree.get("buffer_names") or () if name[:1].isdecimal()]
    if absent := [name for name in named if name not in values]:
        text = f"no file of a layer has the buffer {some(absent)}, which `{opened.first.name}` and others name"
        opened.fault(text, _COPY)
    if not opened.states:
        _check_stages(opened, values, {*named})
    last = max(present)
    if gaps := [f"layer {n}" for n in range(last) if n not in present]:
        text = f"no file of {some(gaps)}: that is so of a function; of a module, the file would be missing"
        opened.warn("missing-part", text)
    text = f"no file names the layers after layer {last}: one that trains nothing would not be missed"
    opened.warn("missing-part", text)
    return values


def _check_stages(opened: OpenDirectory, values: Values, buffers: set[str]) -> None:
    """Add a fault if the optimizers of the stages train what no file of a layer has. Without ZeRO they give no names,
    but have state of the shape of each parameter."""
    present, layers = opened.members.layers, dict[int, list[Ints]]()
    for name, (value, _) in values.items():
        if isinstance(value, TensorRef) and name not in buffers:
            layers.setdefault(int(name.partition(".")[0]), []).append(value.shape)
    stages = []
    for file in opened.weights:
        own = {name.partition(".")[0] for name in file.tree.get("buffer_names") or ()}
        numbers = {int(layer) for layer in own if layer.isdecimal()} & present.keys()
        key_of = partial(opened.content, file=file) if file.loaded.root else None  # a stream has no checksums
        stages.append(pipeline_stages.stage_of(file.tree.get("optimizer"), numbers, key_of))
    if (lack := pipeline_stages.lacking(layers, stages)) is not None:
        last = max(present)
        absent = [n for n in range(last + 2) if n not in present]
        names = some([present[last].replace(f"{last:02d}", f"{n:02d}", 1) for n in absent])
        what = f"parameters of {', '.join(map(str, map(list, lack.shapes)))}" if lack.shapes else "more parameters"
        text = f"`{opened.weights[lack.stage].name}` trains {what} that no file of its layers has"
        text = f"{text}: {'one of ' * (len(absent) > 1)}{names} is missing"
        opened.fault(text, _COPY, concerns=["model"])


def of_experts(opened: OpenDirectory, by_name: Mapping[str, Rebuilt]) -> Values:
    """Return what the files of experts have beside the weights that the optimizer has."""
    values: Values = {}
    names: set[Any] = set()
    for name in opened.members.experts:
        file = opened.load(0, name)
        names |= file.tree.keys()
        own = {key: (value, file) for key, value in file.tree.items()}
        opened.compare_rounded(own, by_name)
        values |= {key: value for key, value in own.items() if key not in by_name}
    if absent := [name for name in by_name if ".deepspeed_experts." in name and name not in names]:
        text = f"no file of an expert has {some(absent)}"
        opened.fault(text, _COPY, concerns=[f"model.{n}" for n in absent])
    return values
