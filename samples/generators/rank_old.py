"""Samples of rank files as other versions of torch leave them.

The data are real. The pickles are those of torch 2.13, with the class names, the device mesh and the specification
that the other version has.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from dcp import shard
from rank_fsdp2 import fsdp2
from ranks import fsdp1, fsdp1_sharded, fsdp1_whole, trained, whole
from sample import sample
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.passes import shape_prop
from training import STEPS, detached

State = Callable[[Any], dict[str, Any]]
EMULATION = "emulation: data of torch 2.13 `torch.save`, pickle respelled"
OLD_HOME = "torch.distributed._tensor.placement_types"
TO_2_4 = {
    DTensor: ("torch.distributed._tensor.api", "DTensor"),
    DTensorSpec: (OLD_HOME, "DTensorSpec"),
    TensorMeta: (OLD_HOME, "TensorMeta"),
    Shard: (OLD_HOME, "Shard"),
    Replicate: (OLD_HOME, "Replicate"),
}
TO_2_1 = {
    **TO_2_4,
    DeviceMesh: ("torch.distributed._tensor.device_mesh", "DeviceMesh"),
    TensorMeta: ("torch.fx.passes.shape_prop", "TensorMetadata"),
}


def mesh_state(*, group_fields: int, thread: bool) -> State:
    """The state of a mesh up to torch 2.9: a tensor of as many dimensions as the mesh, and the groups of this rank.

    Each group is its name, or a tuple of `group_fields` of its tag, its ranks and its name.
    """

    def state(mesh: DeviceMesh) -> dict[str, Any]:
        ranks = [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)]
        names = [mesh.get_group(dim).group_name for dim in range(mesh.ndim)]
        infos = [("", of, name)[:group_fields] for of, name in zip(ranks, names, strict=True)]
        groups = {"_dim_group_infos": infos} if group_fields else {"_dim_group_names": names}
        flat = tuple(mesh.mesh.flatten().tolist())
        return {
            "device_type": mesh.device_type,
            "mesh": mesh.mesh.clone(),
            "mesh_dim_names": mesh.mesh_dim_names,
            "_flatten_mesh_list": flat,
            **({"_thread_id": None} if thread else {}),
            "_coordinate_on_dim": list(mesh.get_coordinate()),
            **groups,
            "_hash": hash((flat, tuple(mesh.mesh.shape))),
        }

    return state


def spec_state(*fields: str) -> State:
    """The state of a specification with the given fields only."""
    return lambda spec: {key: vars(spec)[key] for key in ("mesh", "placements", "tensor_meta", *fields, "_hash")}


def load_pieces(folder: Path) -> Any:
    """Put the pieces together by hand, as the torch that is here does not know the old meshes."""
    modules = {home: types.SimpleNamespace() for home, _ in TO_2_1.values()} | {
        home.rsplit(".", 1)[0]: types.SimpleNamespace() for home, _ in TO_2_1.values() if "_tensor" in home
    }
    for kind, (home, name) in (TO_2_4 | TO_2_1).items():
        setattr(modules[home], name, kind)
    modules[OLD_HOME].TensorMeta = TensorMeta
    modules["torch.fx.passes.shape_prop"] = shape_prop
    with mock.patch.dict(sys.modules, modules):
        states = [torch.load(path, weights_only=False) for path in sorted((folder / "ckpt").iterdir())]
    model = {}
    for name, value in states[0]["model"].items():
        if not isinstance(value, DTensor):
            model[name] = value
            continue
        pieces = {}
        for state in states:
            piece = state["model"][name]
            pieces[vars(piece._spec.mesh)["_coordinate_on_dim"][-1]] = piece._local_tensor
        model[name] = torch.cat([pieces[place] for place in sorted(pieces)])
    return {**states[0], "model": model}


class Old:
    """What a version of torch spells otherwise: names of classes, and the state of meshes and specifications."""

    def __init__(self, names: dict[type, tuple[str, str]], states: dict[type, State], *, fx: bool = False) -> None:
        self.names = names
        self.states = states
        self.fx = fx

    def save(self, state: Any, folder: Path) -> None:
        """Save to the file of this rank. It is read back later: no torch that is here knows the classes."""
        path = folder / "ckpt" / f"rank{dist.get_rank()}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save(state, path, pickle_module=self.pickle_module())

    def pickle_module(self) -> Any:
        """A module with a `Pickler`, for `torch.save` to derive its own from."""
        old = self

        class Pickler(pickle._Pickler):
            def save_global(self, obj: Any, name: str | None = None) -> None:
                if obj not in old.names:
                    super().save_global(obj, name)
                    return
                self.write(pickle.GLOBAL + "{}\n{}\n".format(*old.names[obj]).encode())
                self.memoize(obj)

            def reducer_override(self, obj: Any) -> Any:
                if type(obj) in old.states:
                    return copyreg.__newobj__, (type(obj),), old.states[type(obj)](obj)
                if type(obj) is TensorMeta and old.fx:
                    rest = (False, obj.stride, None, False, {})
                    return copyreg.__newobj__, (TensorMeta, obj.shape, obj.dtype, *rest)
                return NotImplemented

        return types.SimpleNamespace(Pickler=Pickler, __name__="pickle")


@sample(
    "rank/dtensor_torch21_w2",
    what="model of 2 FSDP1 ranks with `DTensor`s, spelled as torch 2.1 does",
    trap="everything below `torch.distributed._tensor`; the shape is in a `TensorMetadata` of `torch.fx`; groups are "
    "tags and ranks",
    writer=EMULATION,
    load=load_pieces,
    world=2,
)
@sample(
    "rank/dtensor_torch24_w2",
    what="model of 2 FSDP1 ranks with `DTensor`s, spelled as torch 2.2 to 2.4 do",
    trap="`torch.distributed._tensor.api.DTensor`, its specification in `placement_types`; the mesh is a tensor "
    "in `mesh`",
    writer=EMULATION,
    load=load_pieces,
    world=2,
)
def rank_dtensor_old(folder: Path) -> Any:
    """FSDP1 with a mesh: the only training of those versions that gave `DTensor`s by itself."""
    old = {
        "rank/dtensor_torch21_w2": Old(
            TO_2_1, {DeviceMesh: mesh_state(group_fields=2, thread=False), DTensorSpec: spec_state()}, fx=True
        ),
        "rank/dtensor_torch24_w2": Old(
            TO_2_4, {DeviceMesh: mesh_state(group_fields=3, thread=True), DTensorSpec: spec_state()}
        ),
    }[folder.name]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    run = trained(fsdp1(device_mesh=mesh))
    old.save({"model": fsdp1_sharded(run)["model"], "step": STEPS}, folder)
    return {"model": detached(dict(fsdp1_whole(run)["model"])), "step": STEPS}


@sample(
    "rank/dtensor_torch25_w4",
    what="model of 4 ranks, 2 replicas of 2 FSDP2 shards, spelled as torch 2.5 to 2.7 do",
    trap="a `mesh` tensor of 2 by 2; groups are tuples of tag, ranks and name",
    writer=EMULATION,
    load=load_pieces,
    world=4,
)
def rank_dtensor_25(folder: Path) -> Any:
    """Only the model and the step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = trained(lambda model: shard(model, mesh))
    model = run.model.state_dict()
    states = {DeviceMesh: mesh_state(group_fields=3, thread=True), DTensorSpec: spec_state()}
    Old({}, states).save({"model": model, "step": STEPS}, folder)
    return detached({"model": whole(model), "step": STEPS})


@sample(
    "rank/dtensor_torch29_w2",
    what="model of 2 FSDP2 ranks, spelled as torch 2.8 and 2.9 do",
    trap="today's class names; the mesh is a tensor in `mesh`, without layout and rank map; groups are names",
    writer=EMULATION,
    load=load_pieces,
    world=2,
)
@sample(
    "rank/dtensor_torch212_w2",
    what="model of 2 FSDP2 ranks, spelled as torch 2.10 to 2.12 do",
    trap="`_MeshLayout` has `shape` and `stride` themselves, and no `axes`",
    writer=EMULATION,
    load=load_pieces,
    world=2,
)
@sample(
    "rank/dtensor_torch215_w2",
    what="model of 2 FSDP2 ranks, spelled as torch 2.15 does",
    trap="a mesh with `_preserve_rank_order`",
    writer=EMULATION,
    load=load_pieces,
    world=2,
)
def rank_dtensor_fsdp2(folder: Path) -> Any:
    """FSDP2's own time."""

    def flat_layout(layout: _MeshLayout) -> dict[str, Any]:
        return {"shape": torch.Size(layout.top_level_sizes), "stride": tuple(axis.stride[0] for axis in layout)}

    def unordered(mesh: DeviceMesh) -> dict[str, Any]:
        return {**mesh.__getstate__(), "_preserve_rank_order": False}

    run = trained(fsdp2())
    model = run.model.state_dict()
    old = {
        "rank/dtensor_torch29_w2": {
            DeviceMesh: mesh_state(group_fields=0, thread=True),
            DTensorSpec: spec_state(),
        },
        "rank/dtensor_torch212_w2": {_MeshLayout: flat_layout, DTensorSpec: spec_state("shard_order")},
        "rank/dtensor_torch215_w2": {DeviceMesh: unordered},
    }[folder.name]
    Old({}, old).save({"model": model, "step": STEPS}, folder)
    return detached({"model": whole(model), "step": STEPS})
