"""A process group for an accelerator that came without one, as emulated ones do: tensors go by the host, by gloo.

It refuses what nccl refuses (`getNcclDataType` and `check_gpu_single_tensor` of torch 2.13), so that what runs on it
runs on GPUs: dtypes that nccl does not know, tensors with gaps, tensors of another device, two ranks on one device, and
tensors of the CPU, unless the group has a backend for them as well (`cpu:gloo,openreg:host`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.futures import Future
from torch.utils import _pytree

NAME = "host"

_DTYPES = (
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
# What adds up, and so is sent as what it is, by the name that gloo has for it. The rest is moved as bytes: gloo knows
# fewer dtypes than nccl. Names with `single` are those of torch 2.13.
_SUMS = {
    "allreduce": "allreduce", "allreduce_coalesced": "allreduce_coalesced", "reduce": "reduce",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}  # fmt: skip
_MOVES = {
    "broadcast": "broadcast", "allgather": "allgather", "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base", "gather": "gather", "scatter": "scatter", "alltoall": "alltoall",
    "alltoall_base": "alltoall_base", "all_to_all_single": "alltoall_base", "send": "send", "recv": "recv",
}  # fmt: skip


def register_if_needed() -> None:
    """Make it the backend of this machine's accelerator, if that has none."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        if kind not in dist.Backend.default_device_backend_map:
            dist.Backend.register_backend(NAME, _made, devices=[kind])


def _made(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return ThroughHost(rank, size, dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout))


class ThroughHost(dist.ProcessGroup):  # type: ignore[misc]
    """Takes the place of the whole process group, as torch has it of groups that are written in Python."""

    def __init__(self, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        self._met = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(pair.split(":")[0]) for pair in _world.pg_backend_config[self].split(",")]

    @property
    def group_name(self) -> str:
        return str(_world.pg_names[self])

    def getGroupName(self) -> str:
        return self.group_name

    def getBackendName(self) -> str:
        return NAME

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier() if opts is None else self._gloo.barrier(opts)

    def abort(self) -> None:
        self._gloo.abort()

    def shutdown(self) -> None:
        self._gloo.shutdown()

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return [self._allgather_base(one, other) for one, other in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        made = dist.ReduceScatterOptions()
        made.reduceOp = opts.reduceOp
        return [self._reduce_scatter_base(one, other, made) for one, other in zip(outputs, inputs, strict=True)][-1]

    def carry(self, name: str, args: Any, kwargs: Any) -> Any:
        """A collective, by gloo on copies on the host."""
        called = _SUMS.get(name) or _MOVES[name]
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors}
        own = {device.type for device in self._device_types}
        if not kinds <= own:
            raise RuntimeError(f"No backend type associated with device type {(kinds - own).pop()}")
        if kinds <= {"cpu"}:
            return getattr(self._gloo, called)(*args, **kwargs)
        self._check(tensors)
        self._meet(tensors[0].device)
        copies = {id(tensor): tensor.cpu().contiguous() for tensor in tensors}
        raw = name in _MOVES

        def copy(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return copies[id(value)].reshape(-1).view(torch.uint8) if raw else copies[id(value)]

        getattr(self._gloo, called)(*_pytree.tree_map(copy, args), **_pytree.tree_map(copy, kwargs)).wait()
        for tensor in tensors:
            tensor.copy_(copies[id(tensor)])
        done: Any = Future()
        done.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(done)

    def _check(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if _COMPLEX.get(tensor.dtype, tensor.dtype) not in _DTYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
            if tensor.is_sparse:
                raise ValueError("Tensors must be dense")
        if len({tensor.device for tensor in tensors}) != 1:
            raise ValueError("Tensor list must be on the same device")

    def _meet(self, device: torch.device) -> None:
        """As nccl's communicator is made, by the first collective."""
        if self._met:
            return
        self._met = True
        told = f"{socket.gethostname()} {device}".encode().ljust(256)
        mine = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        every = [torch.empty(256, dtype=torch.uint8) for _ in range(self.size())]
        self._gloo.allgather([every], [mine]).wait()
        there = [bytes(one.tolist()) for one in every]
        twice = [rank for rank, one in enumerate(there) if there.count(one) > 1]
        if twice:
            raise dist.DistBackendError(f"Duplicate GPU detected: ranks {twice} on {device}")


def _carried(name: str) -> Callable[..., Any]:
    def collective(self: ThroughHost, *args: Any, **kwargs: Any) -> Any:
        return self.carry(name, args, kwargs)

    return collective


for _name in (*_SUMS, *_MOVES):
    setattr(ThroughHost, _name, _carried(_name))
