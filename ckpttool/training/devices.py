"""The accelerators of this node as torch knows them: GPUs of any maker, or what an extension of torch brings.

    kind        "cuda" (AMD's too), "xpu", "npu", ...; "cpu" where there is none
    backend     what sends tensors between them: "nccl", "xccl", "hccl", ...

Each process has the one with its own number on the node, or the CPU.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def kind() -> str:
    """What processes here can compute on together. An accelerator without a backend of its own (Apple's has gloo, which
    goes by the CPU) is none."""
    if not torch.accelerator.is_available():
        return "cpu"
    found = str(torch.accelerator.current_accelerator().type)
    backend = dist.Backend.default_device_backend_map.get(found, "gloo")
    return found if backend != "gloo" and dist.is_backend_available(backend) else "cpu"


def count(kind: str) -> int:
    """How many accelerators of a kind this process sees."""
    return int(torch.get_device_module(kind).device_count())


def backends(kind: str) -> str:
    """For `init_process_group`, with one for the CPU: what is no tensor travels by it, and whoever waits for a process
    that has died hears of it there: `cpu:gloo,cuda:nccl`."""
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def take(kind: str) -> torch.device:
    """This process's own device, which is the current one from now on."""
    if kind == "cpu":
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", "0"))
    torch.get_device_module(kind).set_device(number)
    return torch.device(kind, number)


def current(kind: str) -> torch.device:
    """The device of a kind that this process works on."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def abort() -> None:
    """Leave the process group without waiting for what other ranks may never do: to destroy one of nccl's is to wait
    until its collectives have ended."""
    distributed_c10d._abort_process_group()


def free_memory(kind: str) -> int:
    """Bytes that this process's own accelerator has free; 0 where it has none for itself, or does not say."""
    number, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ask = getattr(torch.get_device_module(kind), "mem_get_info", None) if kind != "cpu" else None
    return int(ask(number)[0]) if ask is not None and count(kind) >= here else 0
