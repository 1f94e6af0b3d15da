"""The devices of this node as torch knows them, and the connections of a process group.

    kind        "cuda" (AMD's too), "xpu", "npu", ...; "cpu" where there is none
    backend     what sends tensors between them: "nccl", "xccl", "hccl", ...

Accelerators are GPUs of any maker, or what an extension of torch adds. Each process has the one with its own number on
the node, or the CPU.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def kind() -> str:
    """Return the device type that processes compute on together. An accelerator without a backend of its own (Apple's
    uses gloo on the CPU) does not count."""
    if not torch.accelerator.is_available():
        return "cpu"
    kind = str(torch.accelerator.current_accelerator().type)
    backend = dist.Backend.default_device_backend_map.get(kind, "gloo")
    return kind if backend != "gloo" and dist.is_backend_available(backend) else "cpu"


def count(kind: str) -> int:
    """Return the number of accelerators of a kind that this process sees."""
    return int(torch.get_device_module(kind).device_count())


def backends(kind: str) -> str:
    """Return the backends for `init_process_group`: `cpu:gloo,cuda:nccl`. The CPU's is for Python objects, and reports
    a process that has died."""
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def take(kind: str) -> torch.device:
    """Make this process's own device the current one, and return it."""
    if kind == "cpu":
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", "0"))
    torch.get_device_module(kind).set_device(number)
    return torch.device(kind, number)


def current(kind: str) -> torch.device:
    """Return the current device of a kind."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def abort() -> None:
    """Leave the process group without waiting: destroying one of nccl waits until its collectives have ended."""
    distributed_c10d._abort_process_group()


def free_memory(kind: str) -> int:
    """Return the free bytes of the accelerator of this process; 0 if it shares one, or the number is not known."""
    number, processes = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ask = getattr(torch.get_device_module(kind), "mem_get_info", None) if kind != "cpu" else None
    return int(ask(number)[0]) if ask is not None and count(kind) >= processes else 0


# Connections ----------------------------------------------------------------------------------------------------------


@contextmanager
def close_on_failure() -> Iterator[None]:
    """Context manager in which a process group is made and used. An error closes every connection that was opened in
    it, so that waiting ranks fail at once; older ones, such as that to the store, stay open.

    gloo keeps connections open for as long as anything refers to a group, as the frames of an error do, and cannot
    abort: the others would wait in a collective until the failed process has ended.
    """
    before = _sockets()
    try:
        yield
    except BaseException:
        for number in _sockets() - before:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # a listening socket has no peer, and gloo expects it to stay
                connection.shutdown(socket.SHUT_RDWR)
        raise


def _sockets() -> set[int]:
    """Return the descriptors of this process that are sockets."""
    sockets: set[int] = set()
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):  # that of the listing itself is closed by now
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    sockets.add(int(name))
    return sockets
