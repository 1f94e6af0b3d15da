"""The folder of a universal checkpoint that has one of each parameter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckpttool.catalogue.boxes import Ints, row_major
from ckpttool.catalogue.entries import Chunks
from ckpttool.errors import CorruptError, ReadError
from ckpttool.flat.pieces import PieceColumns, Rebuilt, is_line, is_of_elements
from ckpttool.flat.universal_parameters import odd_ones, unlike
from ckpttool.flat.zero_states import (
    NOT_READ,
    ONE_SAVE,
    ZeroState,
    as_dict,
    check_counts,
    divided,
    is_cut,
    merged,
    shapes_of,
)
from ckpttool.formats.deepspeed.members import UNIVERSAL, StateFile
from ckpttool.formats.deepspeed.open_directory import OpenDirectory
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.storage.stores import Location
from ckpttool.text import some

_COMMON = "optimizer_state.pt"
_NAMES = ("module", "frozen_param_shapes", "shared_params")
_COPY = "copy it from where the checkpoint was converted"


@dataclass(slots=True)
class Folders:
    """The parameters, by name: shapes in groups, weights, and the state with the files of what is no tensor in it.
    `copies` are of what is not trained, and not read. `common` is what the optimizer has beside. A model of ckpttool's
    `own` has no values."""

    shapes: list[dict[str, Ints]]
    weights: dict[str, Rebuilt] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[tuple[str, str], StateFile] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)
    common: StateFile | None = None
    own: bool = False


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
    folders.own = bool(module) and all(value is None for value in module.values())
    for entry in folder.entries():
        name = entry.name
        if not entry.is_dir:
            if name != _COMMON:
                opened.catalogue.faults.append(ReadError(f"`{folder / name}` belongs to no parameter", hint=NOT_READ))
        elif name not in shape_of and isinstance(module.get(name), TensorRef):
            folders.copies.append(name)
        else:
            _read_files(opened, folder / name, shape_of.get(name, []), folders)
    _check(opened, folders)
    if _COMMON in folder.names():
        folders.common = opened.load(0, f"{UNIVERSAL}/{_COMMON}")
        _check_first_rank(opened, folders, folders.common)
    elif any(folders.states.values()):
        text = f"`{folder / _COMMON}` is missing, which has the learning rates and other hyper-parameters"
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
    for name in (names := folder.names()):
        stem, dot, suffix = name.rpartition(".")
        if (dot, suffix) != (".", "pt"):
            raise ReadError(f"`{folder / name}` is not a file of a universal checkpoint", hint=NOT_READ)
        file = opened.load(0, f"{UNIVERSAL}/{parameter}/{name}", plain=True)
        value, saved = file.loaded.tree, f"{file.loaded.root}.pt"
        if saved != name and saved in names:
            opened.fault(f"`{file.name}` was saved as `{saved}`", file=file.name, tensor=parameter)
        experts = as_dict(value).get("ep_num_experts")  # a rank has fewer
        padded = as_dict(value).get("vocab_tensor") is True
        value = value.get("param") if isinstance(value, dict) else value
        if not is_of_elements(value) and stem != "fp32":
            state[stem], folders.files[parameter, stem] = value, file
            continue
        if not isinstance(value, TensorRef):
            raise CorruptError(f"`{folder / name}` has no tensor", hint=NOT_READ)
        own = [shape if experts is None else (experts, *shape[1:]) for shape in shapes]
        if not is_cut(value.shape, own, padded=padded):
            if not is_line(value) or not own or prod(value.shape) != prod(own[0]):
                text = f"`{folder / name}` has {list(value.shape)}, but `param_shapes` {list(own[0])}"
                raise CorruptError(text, hint=ONE_SAVE, found=list(value.shape), expected=list(own[0]))
            value = replace(value, shape=own[0], strides=row_major(own[0]))
        rebuilt = Rebuilt(value.dtype, value.shape, Chunks.single(value.shape, file.place(value)))
        if stem == "fp32":
            folders.weights[parameter] = rebuilt
        else:
            state[stem] = rebuilt


def _check(opened: OpenDirectory, folders: Folders) -> None:
    """Add a fault for each parameter without weights, with other state than those of its group, or that no model states
    name. `ds_to_universal` gives all of a group one step; ckpttool gives each parameter what it had."""
    trained = {name for group in folders.shapes for name in group}
    named = trained.union(*(as_dict(file.tree.get(key)) for file in opened.weights for key in _NAMES))
    for name in folders.states.keys() - named if trained else ():
        opened.fault(f"`{UNIVERSAL}/{name}` belongs to no parameter that `{opened.first.name}` names", tensor=name)
    for name in folders.states.keys() - folders.weights.keys():
        opened.fault(f"`{UNIVERSAL}/{name}` has no `fp32.pt`", _COPY, tensor=name, concerns=["model"])
    for group in folders.shapes or [dict.fromkeys(folders.states, ())]:
        held = {name: {**folders.states[name], "fp32": folders.weights.get(name)} for name in group}
        for name, text in odd_ones(held, alike=not folders.own):
            opened.fault(f"`{UNIVERSAL}/{name}` {text}", tensor=name, concerns=["optimizer"])
        files = {name: file for name in group if (file := folders.files.get((name, "step"))) is not None}
        steps = {name: opened.content(file.loaded.tree, file) for name, file in files.items()}
        for name in () if folders.own else unlike(steps):
            opened.fault(f"`{files[name].name}` has another step than others of its group", concerns=["optimizer"])


def _check_first_rank(opened: OpenDirectory, folders: Folders, common: StateFile) -> None:
    """Compare what `ds_to_universal` leaves of the first rank, of ZeRO 3 all, with the files of the parameters."""
    states = {0: ZeroState(common.name, common.tree)}
    of_groups = common.tree.get("param_alignment_paddings")
    if isinstance(of_groups, list) and [*map(len, of_groups)] != [*map(len, folders.shapes)]:
        opened.fault(f"`{common.name}` has groups of other parameters than `{opened.first.name}`", file=common.name)
    if type(opened.first.tree.get("dp_world_size")) is int:
        check_counts(states[0], opened.first.tree["dp_world_size"])
    world, lines = common.tree.get("partition_count"), common.tree.get("fp32_flat_groups")
    is_whole = isinstance(lines, list) and all(is_line(line) and line.shape[0] for line in lines)
    if type(world) is not int or world < 1 or not is_whole or any(stage for stage, _ in opened.members.weights):
        return
    for one in divided(folders.shapes, states, world):
        for kind, name, piece in one.parameters(lambda _, ref: common.place(ref), PieceColumns(), whole=False):
            whole = folders.states[name].get(kind) if kind else folders.weights.get(name)
            if isinstance(whole, Rebuilt) and whole.chunks and piece.chunks:
                opened.compare_same(name, whole, piece)
