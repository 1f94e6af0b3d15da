"""Samples of `.metadata` files as other versions of torch and other writers leave them.

The data are real. The metadata are those of torch 2.13, pickled again with the class names and the state that the
other version has.
"""

from __future__ import annotations

import copyreg
import pathlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from dcp import brief_state, load, save
from sample import sample
from torch.distributed.checkpoint import _version, filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex, TensorProperties

OLD_HOME = "torch.distributed._shard.sharded_tensor.metadata"
OLD_PROPERTIES = {
    TensorProperties: (OLD_HOME, "TensorProperties"),
    _MEM_FORMAT_ENCODING: (OLD_HOME, "MEM_FORMAT_ENCODING"),
}
MODEL = "model of 2 FSDP2 ranks"


def load_shimmed(folder: Path) -> Any:
    """Read with torch after all, helped over the spellings that it does not know."""
    home = "olmo_core.distributed.checkpoint.filesystem"
    modules = dict.fromkeys((home, *(home.rsplit(".", cut)[0] for cut in (1, 2, 3))), filesystem)
    set_state = TensorProperties.__setstate__
    with (
        mock.patch.dict(sys.modules, {"pathlib._local": pathlib, **modules}),
        mock.patch.object(TensorProperties, "__setstate__", lambda self, state: set_state(self, state[:5])),
    ):
        return load(folder)


class Spelling(pickle._Pickler):
    """A pickler that gives some classes another name, and `TensorProperties` another state."""

    def __init__(
        self,
        file: Any,
        protocol: int,
        names: dict[type, tuple[str, str]],
        properties: Callable[[TensorProperties], tuple[Any, ...]] | None,
    ) -> None:
        super().__init__(file, protocol)
        self.names = names
        self.properties = properties

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write the module and the name that stand for a class."""
        if obj not in self.names:
            super().save_global(obj, name)
            return
        for part in self.names[obj]:
            self.save(part)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    def reducer_override(self, obj: Any) -> Any:
        """Give `TensorProperties` its state of that time."""
        if isinstance(obj, TensorProperties) and self.properties is not None:
            return copyreg.__newobj__, (TensorProperties,), self.properties(obj)
        return NotImplemented


def respell(
    folder: Path,
    change: Callable[[Metadata], None],
    *,
    names: dict[type, tuple[str, str]] | None = None,
    properties: Callable[[TensorProperties], tuple[Any, ...]] | None = None,
    protocol: int = 4,
) -> None:
    """Write `.metadata` again after `change` and under other `names`; rank 0 does, when all have saved."""
    dist.barrier()
    if dist.get_rank() == 0:
        path = folder / "ckpt" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        with path.open("wb") as file:
            Spelling(file, protocol, names or {}, properties).dump(metadata)
    dist.barrier()


def without(*fields: str) -> Callable[[Metadata], None]:
    """A change that takes fields out of the state of `Metadata`."""

    def change(metadata: Metadata) -> None:
        for field in fields:
            del vars(metadata)[field]

    return change


def save_2_3(folder: Path) -> Any:
    """Save as torch up to 2.3 planned: dicts without tensors stay whole, what is replicated is rank 0's."""
    state, whole = brief_state()
    state["config"] = whole["config"] = {"lr": 0.5, "nested": {"names": ["a"], "empty": {}}}
    _version._derived_version = "2_3"
    try:
        # Looking for sharded tensors in sharded tensors walks as torch 2.4 does; there are none here.
        planner = torch_dcp.DefaultSavePlanner(flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        save(state, folder, planner=planner)
    finally:
        _version._derived_version = None
    return whole


@sample(
    "dcp/meta_torch20_w2",
    what=f"{MODEL}, metadata of torch 2.0 to 2.2",
    trap="`TensorProperties` of the sharded tensor module; three fields; a dict without tensors is one object",
    writer="emulation: data of torch 2.13 planned as 2.3 did, metadata respelled",
    load=load,
    world=2,
)
def dcp_meta_torch20(folder: Path) -> Any:
    """The oldest public DCP."""
    whole = save_2_3(folder)
    respell(folder, without("storage_meta", "version"), names=OLD_PROPERTIES)
    return whole


@sample(
    "dcp/meta_torch23_w2",
    what=f"{MODEL}, metadata of torch 2.3",
    trap="`TensorProperties` of DCP's own, still three fields; a dict without tensors is one object",
    writer="emulation: data of torch 2.13 planned as 2.3 did, metadata respelled",
    load=load,
    world=2,
)
def dcp_meta_torch23(folder: Path) -> Any:
    """Between the class's move and `StorageMeta`."""
    whole = save_2_3(folder)
    respell(folder, without("storage_meta", "version"))
    return whole


@sample(
    "dcp/meta_torch24_w2",
    what=f"{MODEL}, metadata of torch 2.4 to 2.6",
    trap="`StorageMeta` with an absolute path and without `modules`; no `version`",
    writer="emulation: data of torch 2.13, metadata respelled",
    load=load,
    world=2,
)
def dcp_meta_torch24(folder: Path) -> Any:
    """The path is a `pathlib.PosixPath`, which Windows cannot build."""
    state, whole = brief_state()
    save(state, folder)

    def change(metadata: Metadata) -> None:
        without("version")(metadata)
        metadata.storage_meta.checkpoint_id = pathlib.PosixPath("/scratch/run-7/step-3")
        del vars(metadata.storage_meta)["modules"]

    respell(folder, change)
    return whole


@sample(
    "dcp/meta_torch27_w2",
    what=f"{MODEL}, metadata of torch 2.7 and 2.8",
    trap="`StorageMeta.modules`; no `version` yet (torch 2.9 to 2.14 write what the other samples hold)",
    writer="emulation: data of torch 2.13, metadata respelled",
    load=load,
    world=2,
)
def dcp_meta_torch27(folder: Path) -> Any:
    """The last step before today's form."""
    state, whole = brief_state()
    save(state, folder)
    respell(folder, without("version"))
    return whole


@sample(
    "dcp/meta_torch215_w2",
    what=f"{MODEL}, metadata of torch 2.15",
    trap="`TensorProperties` has a sixth element, strides or `None`: torch up to 2.14 fails on it",
    writer="emulation: data of torch 2.13, metadata respelled",
    load=load_shimmed,
    world=2,
)
def dcp_meta_torch215(folder: Path) -> Any:
    """Strides of a plain tensor, `None` for one that does not tell."""
    state, whole = brief_state()
    save(state, folder)
    strides: dict[int, Any] = {}

    def change(metadata: Metadata) -> None:
        for entry in metadata.state_dict_metadata.values():
            if hasattr(entry, "properties"):
                meta = torch.empty(entry.size, device="meta")
                strides[id(entry.properties)] = meta.stride() if entry.size else None

    respell(folder, change, properties=lambda value: (*value.__getstate__(), strides[id(value)]))
    return whole


@sample(
    "dcp/meta_py313_w2",
    what=f"{MODEL}, metadata of Python 3.13",
    trap="the path is a `pathlib._local.PosixPath`: other Pythons have no such module",
    writer="emulation: data of torch 2.13, metadata respelled",
    load=load_shimmed,
    world=2,
)
def dcp_meta_py313(folder: Path) -> Any:
    """Only Python 3.13 spells it so."""
    state, whole = brief_state()
    save(state, folder)
    respell(folder, without(), names={pathlib.PosixPath: ("pathlib._local", "PosixPath")})
    return whole


@sample(
    "dcp/meta_py314_w2",
    what=f"{MODEL}, metadata of Python 3.14",
    trap="pickle protocol 5 (Python 3.8 to 3.13 dump protocol 4)",
    writer="emulation: data of torch 2.13, metadata pickled again",
    load=load,
    world=2,
)
def dcp_meta_py314(folder: Path) -> Any:
    """`pickle.dump` without a protocol."""
    state, whole = brief_state()
    save(state, folder)
    respell(folder, without(), protocol=5)
    return whole


@sample(
    "dcp/foreign_storage_info_w2",
    what=f"{MODEL}, metadata of a framework's own writer",
    trap="`olmo_core...filesystem._StorageInfo`; no planner data, no index in `MetadataIndex`: names stay flat",
    writer="emulation of OLMo-core: data of torch 2.13, metadata respelled",
    load=load_shimmed,
    world=2,
)
def dcp_foreign_storage_info(folder: Path) -> Any:
    """Flat names as the reference too."""
    state, whole = brief_state()
    flat = {f"model.{key}": value for key, value in whole["model"].items()} | {"step": whole["step"]}
    save({**{f"model.{key}": value for key, value in state["model"].items()}, "step": state["step"]}, folder)

    def change(metadata: Metadata) -> None:
        metadata.planner_data = None
        metadata.storage_data = {
            MetadataIndex(index.fqn, index.offset): info for index, info in metadata.storage_data.items()
        }

    respell(folder, change, names={_StorageInfo: ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo")})
    return flat
