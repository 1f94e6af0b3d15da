"""Records the state of a run by digests, as the hook does in a command, for `resume.states` to read: of whole tensors,
which torch gathers one at a time, and of what each rank has of them. No saver or reader of ckpttool is used: they are
under test.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from ckpttool.analysis.saved_state import leaves
from ckpttool.catalogue import parts
from ckpttool.layout.rename import strip_wrappers
from ckpttool.resume.job import write
from ckpttool.resume.observe.site.state import box_of, digest, tied
from ckpttool.resume.worker.setup import Built, captured, sha256, sha256_of
from ckpttool.training import collectives

_SMALL = 64
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@collectives.quiet()
def record(
    built: Built, folder: str, step: int, *, optimizer: bool = True, rounded: bool | None = None
) -> dict[str, str]:
    """Record everything where a step begins. Every rank calls it. Returns this rank's digest of each value of which one
    rank's is saved. `optimizer=False` leaves out an optimizer that took no step: reading its state would create one.
    `rounded` adds digests of the values in smaller dtypes."""
    rank, shared = dist.get_rank(), dict[str, str]()
    os.makedirs(folder, exist_ok=True)
    values, whole, kinds, shards = (dict[str, Any]() for _ in range(4))
    with torch.no_grad():
        for name, value, kind in _entries(built, optimizer=optimizer):
            if kind is None or not isinstance(value, torch.Tensor):
                values |= {name: plain(value)} if rank == 0 else {}
                continue
            box, shard = _shard(value)
            shards |= {name: {**digest(torch, shard), "box": box}} if shard is not None else {}
            tensor = gathered(value)
            if rank == 0 and tensor is not None:
                whole[name], kinds[name] = digest(torch, tensor, rounded=rounded), kind
    for key, one in built.others.items():
        own, is_of_rank = dict(leaves(plain(one.state_dict()), key)), built.kinds[key] in parts.PER_RANK
        values |= own if rank == 0 or is_of_rank else {}
        shared |= {} if is_of_rank else {key: sha256_of(sorted(own.items()))}
    document = {
        "rank": rank,
        "step": step,
        "tensors": whole,
        "kinds": kinds,
        "values": values,
        "shards": shards,
        "ties": tied(
            (f"{key}.{strip_wrappers(name)}", parameter)
            for key, model in built.models.items()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        ),
        "parts": {key: built.kinds[key] for key in built.others},
        "batches": [],
        "forward": None,
        "rng": {name: sha256_of(plain(state)) for name, state in captured(built.generators).items()},
    }
    write(document, os.path.join(folder, f"state.{step}.{rank}.json"))
    dist.barrier()
    return shared


def _entries(built: Built, *, optimizer: bool = True) -> Iterator[tuple[str, Any, str | None]]:
    """Yield what models and optimizer have by the names of torch's state dicts, with the kinds of tensors, as
    `resume.states` has them; None for a hyperparameter."""
    for root, model in built.models.items():
        buffers = {strip_wrappers(name) for name, _ in model.named_buffers()}
        for name, value in get_model_state_dict(model).items():
            kind = "buffer" if name in buffers else "weight"
            yield f"{root}.{name}", value, "apart" if root in built.averaged else kind
    state: Any = get_optimizer_state_dict(built.model, built.optimizer) if optimizer else {}
    groups: dict[str, str] = {}
    for number, group in enumerate(state.get("param_groups", ())):
        groups |= dict.fromkeys(group["params"], f"group {number}")
        for key, value in group.items():
            yield f"optimizer.param_groups.{number}.{key}", value, None
    for parameter, own in state.get("state", {}).items():
        for key, value in own.items():
            yield f"optimizer.state.{parameter}.{key}", value, groups.get(parameter, "group 0")


def gathered(value: Any) -> torch.Tensor | None:
    """Return the whole tensor on rank 0. Every rank calls it."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value if isinstance(value, torch.Tensor) else None
    # From all ranks, also replicas: its own `gather` is limited to its process group.
    own = [(one.metadata.shard_offsets, one.tensor.detach().cpu()) for one in value.local_shards()]
    shards = collectives.to_first(own)
    if shards is None:
        return None
    whole = torch.empty(value.size(), dtype=value.dtype)
    for offsets, shard in itertools.chain.from_iterable(shards):
        whole[tuple(slice(low, low + size) for low, size in zip(offsets, shard.shape, strict=True))] = shard
    return whole


def _shard(value: Any) -> tuple[Any, torch.Tensor | None]:
    """Return this rank's shard and before it its box, `[[4, 0], [4, 13]]`; None for a box that is empty, or where the
    tensor is not sharded."""
    if isinstance(value, DTensor):
        box = box_of(value)
        is_empty = 0 in box[1]
        return None if is_empty else box, value.to_local() if not is_empty or 0 in value.shape else None
    if not isinstance(value, ShardedTensor):
        return None, value
    for shard in value.local_shards():
        return [list(shard.metadata.shard_offsets), list(shard.metadata.shard_sizes)], shard.tensor
    return None, None


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
        # 5 is not "5": `MultiStepLR` looks its milestones up by number.
        return {key if isinstance(key, str) else f"[{key!r}]": plain(one) for key, one in value.items()}
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        is_short = value.dtype.hasobject or value.size <= _SMALL  # the `repr` of others leaves out the middle
        kept = value.tolist() if is_short else hashlib.sha256(value.tobytes()).hexdigest()
        return f"numpy {value.dtype}{list(value.shape)} {plain(kept)}"
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.numel() <= _SMALL and not value.is_complex():
            return f"{kind} {value.tolist()}"
        return f"{kind} {sha256(value)}"
    if hasattr(value, "__dict__"):
        return {"class": type(value).__qualname__, **{key: plain(one) for key, one in vars(value).items()}}
    return _ADDRESS.sub("", repr(value))
