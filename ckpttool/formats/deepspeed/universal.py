"""The folder of a universal checkpoint that has one of each parameter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckpttool.catalogue.boxes import Ints, row_major
from ckpttool.catalogue.entries import Chunks
from ckpttool.errors import CorruptError, ReadError
from ckpttool.flat.pieces import Rebuilt, is_line
from ckpttool.flat.zero_states import NOT_READ, ONE_SAVE, as_dict, is_cut, is_of_elements, merged, shapes_of
from ckpttool.formats.deepspeed.members import UNIVERSAL, StateFile
from ckpttool.formats.deepspeed.open_directory import OpenDirectory
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.storage.stores import Location
from ckpttool.text import some

_COMMON = "optimizer_state.pt"
_COPY = "copy it from where the checkpoint was converted"


@dataclass(slots=True)
class Folders:
    """The parameters, by name: shapes in groups, weights, and the state with the files of what is no tensor in it.
    `copies` are of what is not trained, and not read. `common` is what the optimizer has beside."""

    shapes: list[dict[str, Ints]]
    weights: dict[str, Rebuilt] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[tuple[str, str], StateFile] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)
    common: StateFile | None = None


def read(opened: OpenDirectory) -> Folders:
    """Return what is in the folder that is called like each parameter."""
    if opened.members.copy:
        copy, first = opened.load(0, opened.members.copy), opened.first
        if opened.content(copy.tree, copy) != opened.content(first.tree, first):
            opened.fault(f"`{copy.name}` is not the same as `{first.name}`", file=copy.name)
    of_ranks = [shapes_of(file.tree, file.name) for file in opened.weights if "param_shapes" in file.tree]
    folders, folder = Folders(merged(item for one in of_ranks for item in enumerate(one))), opened.location / UNIVERSAL
    shape_of: dict[str, list[Ints]] = {}  # of each model-parallel rank that has some of it
    for name, shape in (item for one in of_ranks for group in one for item in group.items()):
        shape_of.setdefault(name, []).append(shape)
        folders.states[name] = {}
    module = as_dict(opened.first.tree.get("module"))
    for entry in folder.entries():
        name = entry.name
        if not entry.is_dir:
            if name != _COMMON:
                opened.catalogue.faults.append(ReadError(f"`{folder / name}` is of no parameter", hint=NOT_READ))
        elif name not in shape_of and isinstance(module.get(name), TensorRef):
            folders.copies.append(name)
        else:
            _read_files(opened, folder / name, shape_of.get(name, []), folders)
    _check(opened, folders)
    if _COMMON in folder.names():
        folders.common = opened.load(0, f"{UNIVERSAL}/{_COMMON}")
    elif any(folders.states.values()):
        text = f"`{folder / _COMMON}` is missing, of which the learning rates and the like are"
        raise CorruptError(text, hint=_COPY, file=folder / _COMMON)
    if folders.copies:
        text = f"copies in float32 of buffers, frozen and tied parameters are not read: {some(folders.copies)}"
        opened.warn("superseded-file", text)
    return folders


def _read_files(opened: OpenDirectory, folder: Location, shapes: list[Ints], folders: Folders) -> None:
    """Add what is in the files of one parameter, which have it whole; `shapes` are those that it has on model-parallel
    ranks."""
    parameter = folder.name
    state = folders.states.setdefault(parameter, {})
    for name in folder.names():
        stem, dot, suffix = name.rpartition(".")
        if (dot, suffix) != (".", "pt"):
            raise ReadError(f"`{folder / name}` is no file of a universal checkpoint", hint=NOT_READ)
        file = opened.load(0, f"{UNIVERSAL}/{parameter}/{name}", plain=True)
        value = file.loaded.tree
        experts = value.get("ep_num_experts") if isinstance(value, dict) else None  # a rank has fewer
        value = value.get("param") if isinstance(value, dict) else value
        if not is_of_elements(value) and stem != "fp32":
            state[stem], folders.files[parameter, stem] = value, file
            continue
        if not isinstance(value, TensorRef):
            raise CorruptError(f"`{folder / name}` has no tensor", hint=NOT_READ)
        own = [shape if experts is None else (experts, *shape[1:]) for shape in shapes]
        if not is_cut(value.shape, own):
            if not is_line(value) or prod(value.shape) != prod(own[0]):
                text = f"`{folder / name}` has {list(value.shape)}, but `param_shapes` {list(own[0])}"
                raise CorruptError(text, hint=ONE_SAVE, found=list(value.shape), expected=list(own[0]))
            value = replace(value, shape=own[0], strides=row_major(own[0]))
        rebuilt = Rebuilt(value.dtype, value.shape, Chunks.single(value.shape, file.place(value)))
        if stem == "fp32":
            folders.weights[parameter] = rebuilt
        else:
            state[stem] = rebuilt


def _check(opened: OpenDirectory, folders: Folders) -> None:
    """Add a fault for each parameter without weights, or with a part of the state that others have."""
    kinds = {frozenset(state) - {"step"} for state in folders.states.values()}
    for name, state in folders.states.items():
        own = frozenset(state) - {"step"}
        lacking = {kind for others in kinds if own and own < others for kind in others - own}
        if name not in folders.weights:
            lacking.add("fp32")
        if lacking:
            text = f"`zero/{name}` has no {some(sorted(f'{kind}.pt' for kind in lacking))}"
            of = f"model.{name}" if "fp32" in lacking else f"optimizer.state.{name}"
            opened.fault(text, _COPY, tensor=name, concerns=[of])
