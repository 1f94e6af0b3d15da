"""Records the state of a run in a folder, whole tensors gathered one at a time by torch, for `trial.state` to read.

ckpttool's own savers and readers are not used: they are under test.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import types
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpttool.catalogue import parts
from ckpttool.operations.verify_resume.trial.state import INDEX, TENSORS
from ckpttool.operations.verify_resume.worker.build import Built
from ckpttool.operations.verify_resume.worker.setup import digests
from ckpttool.training import fsdp1

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
_SMALL = 64
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def record(built: Built, folder: str, *, optimizer: bool = True) -> dict[str, str]:
    """Record everything. Every rank calls it. Returns this rank's digest of each value of which one rank's is saved.
    `optimizer=False` leaves out an optimizer that took no step: reading its state would create one."""
    rank = dist.get_rank()
    os.makedirs(folder, exist_ok=True)
    kinds = dict.fromkeys(built.models, "model") | {"optimizer": "optimizer", "rng": "rng"}
    kinds |= {key: built.kinds[key] for key in built.others}
    objects: dict[str, Any] = {}
    boxes: dict[str, Any] = {}
    pieces: dict[str, Any] = {}
    writer = Writer(folder if rank == 0 else None)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name, value in tensors(built, objects, optimizer=optimizer):
            boxes[name] = box_of(value)
            pieces |= {name: piece} if (piece := _piece(value, boxes[name])) is not None else {}
            writer.add(name, gathered(value))
    shared = _others(built, objects, rank)
    for name, value in digests(built.generators).items():
        objects[f"rng.{parts.rank_key(rank)}.{name}"] = value
    with open(os.path.join(folder, f"rank{rank}.json"), "w", encoding="utf-8") as stream:
        json.dump({"objects": objects, "boxes": boxes, "pieces": pieces}, stream)
    ties = [names for key, model in built.models.items() for names in tied_names(model, key)]
    buffers = [f"{key}.{bare(name)}" for key, model in built.models.items() for name, _ in model.named_buffers()]
    writer.close({"kinds": kinds, "ties": ties, "buffers": buffers})
    dist.barrier()
    return shared


class Writer:
    """Writes tensors one after the other into a folder; with None, on ranks other than 0, nothing."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._index: dict[str, Any] = {}
        self._at = 0
        self._stream: BinaryIO | None = None
        if folder is not None:
            self._stream = open(os.path.join(folder, TENSORS), "wb")  # noqa: SIM115

    def add(self, name: str, value: torch.Tensor | None) -> None:
        if self._stream is None or value is None:
            return
        value = value.detach().cpu().contiguous()
        data = memoryview(value.reshape(-1).view(torch.uint8).numpy())
        # Aligned to the largest element, so that each tensor can be mapped.
        gap = -self._at % 16
        self._stream.write(bytes(gap))
        self._index[name] = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "offset": self._at + gap,
            "nbytes": data.nbytes,
        }
        self._stream.write(data)
        self._at += gap + data.nbytes

    def close(self, more: Mapping[str, Any]) -> None:
        if self._stream is None or self._folder is None:
            return
        self._stream.close()
        with open(os.path.join(self._folder, INDEX), "w", encoding="utf-8") as stream:
            json.dump({"tensors": self._index, **more}, stream)


def tensors(built: Built, objects: dict[str, Any], *, optimizer: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield every tensor of models and optimizer by name in torch's state dicts. Other values go into `objects`."""
    for root, model in built.models.items():
        for name, value in _of_model(model).items():
            if isinstance(value, torch.Tensor):
                yield f"{root}.{name}", value
            else:
                objects[f"{root}.{name}"] = plain(value)
    if not optimizer:
        return
    state = _of_optimizer(built)
    for parameter, values in state["state"].items():
        for key, value in values.items():
            name = f"optimizer.state.{parameter}.{key}"
            if isinstance(value, torch.Tensor):
                yield name, value
            else:
                objects[name] = plain(value)
    for number, group in enumerate(state["param_groups"]):
        objects |= {f"optimizer.param_groups.{number}.{key}": plain(value) for key, value in group.items()}


def _of_model(model: nn.Module) -> dict[str, Any]:
    if fsdp1.is_fsdp1(model):
        with fsdp1.sharded(model):
            return dict(model.state_dict())
    return dict(get_model_state_dict(model))


def _of_optimizer(built: Built) -> dict[str, Any]:
    if fsdp1.is_fsdp1(built.model):
        with fsdp1.sharded(built.model):
            return dict(FullyShardedDataParallel.optim_state_dict(built.model, built.optimizer))
    return dict(get_optimizer_state_dict(built.model, built.optimizer))


def gathered(value: Any) -> torch.Tensor | None:
    """Return the whole tensor on rank 0. Every rank calls it."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value if isinstance(value, torch.Tensor) else None
    # From all ranks, also replicas: its own `gather` is limited to its process group.
    own = [(one.metadata.shard_offsets, one.tensor.detach().cpu()) for one in value.local_shards()]
    shards: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, shards)
    if shards is None:
        return None
    whole = torch.empty(value.size(), dtype=value.dtype)
    for offsets, shard in itertools.chain.from_iterable(shards):
        whole[tuple(slice(low, low + size) for low, size in zip(offsets, shard.shape, strict=True))] = shard
    return whole


def box_of(value: Any) -> Any:
    """Return the box of this rank's shard, `[[4, 0], [4, 13]]`; None if it is empty or the tensor is not sharded."""
    if isinstance(value, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        return None if 0 in sizes else [list(offsets), list(sizes)]
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return [list(shards[0].metadata.shard_offsets), list(shards[0].metadata.shard_sizes)] if shards else None
    return None


def _piece(value: Any, box: Any) -> list[Any] | None:
    """Return the box and a digest of this rank's shard, to be compared with those of ranks with the same box."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        value = shards[0].tensor if shards else None
    elif isinstance(value, DTensor):
        value = value.to_local() if box is not None or 0 in value.shape else None
    if value is None:
        return None
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return [box, hashlib.sha256(data.tobytes()).hexdigest()]


def tied_names(model: nn.Module, root: str) -> list[list[str]]:
    """Return the names that are one parameter: `[["model.embed.weight", "model.head.weight"]]`."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(f"{root}.{bare(name)}")
    return [sorted(set(names)) for names in by_id.values() if len(set(names)) > 1]


def bare(name: str) -> str:
    """Return a parameter's name without wrappers."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def _others(built: Built, objects: dict[str, Any], rank: int) -> dict[str, str]:
    shared: dict[str, str] = {}
    for key, value in built.others.items():
        values = dict(leaves(value.state_dict(), ()))
        if built.kinds[key] in parts.PER_RANK:
            objects |= {".".join((key, parts.rank_key(rank), *path)): one for path, one in values.items()}
            continue
        shared[key] = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()
        if rank == 0:
            objects |= {".".join((key, *path)): one for path, one in values.items()}
    return shared


def leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of nested dicts, by their keys."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, _key(key)))
    else:
        yield path, plain(tree)


def _key(key: Any) -> str:
    """Return a key as part of a name. 5 is not "5": `MultiStepLR` looks its milestones up by number."""
    return key if isinstance(key, str) else f"[{key!r}]"


def plain(value: Any) -> Any:
    """Return a value as JSON, a large tensor by its digest, an object by its attributes. The same in every process:
    without addresses, and with sets sorted."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, (type, *_FUNCTIONS)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (list, tuple, deque)):
        return [plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((plain(one) for one in value), key=repr)}
    if isinstance(value, Mapping):
        return {_key(key): plain(one) for key, one in value.items()}
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        return _plain_array(value)
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.numel() <= _SMALL and not value.is_complex():
            return f"{kind} {value.tolist()}"
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{kind} {hashlib.sha256(data).hexdigest()}"
    if hasattr(value, "__dict__"):
        return {"class": type(value).__qualname__, **{key: plain(one) for key, one in vars(value).items()}}
    return _ADDRESS.sub("", repr(value))


def _plain_array(value: Any) -> Any:
    """Return an array by its digest if it is long, as its `repr` leaves out the middle."""
    kind = f"numpy {value.dtype}{list(value.shape)}"
    if value.dtype.hasobject:
        return f"{kind} {[plain(one) for one in value.reshape(-1).tolist()]}"
    if value.size <= _SMALL:
        return f"{kind} {value.tolist()}"
    return f"{kind} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
