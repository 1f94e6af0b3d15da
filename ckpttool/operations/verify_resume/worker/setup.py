"""A rank before anything is trained: process group, mesh, determinism, seeds, and its random number generators.

An RNG state is nested values that every format keeps: `{"python": {"version": 3, "state": tensor}, "torch": tensor}`.
States that other programs saved, as tuples and arrays, are understood as well.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ckpttool.operations.verify_resume.trial.job import ENVIRONMENT, Job
from ckpttool.training import devices


def deterministic(job: Job) -> list[str]:
    """Switch on what makes the same run give the same bits; what that is, for the report."""
    said = [f"{name}={value}" for name, value in ENVIRONMENT.items() if os.environ.get(name) == value]
    torch.set_num_threads(1)
    said.append("torch.set_num_threads(1)")
    if not job.deterministic:
        return said
    torch.use_deterministic_algorithms(True)
    said.append("torch.use_deterministic_algorithms(True)")
    if job.device == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        said += ["torch.backends.cudnn.deterministic = True", "torch.backends.cudnn.benchmark = False"]
    return said


def join(job: Job) -> DeviceMesh:
    """The process group, if there is none yet, and the mesh over it."""
    join_group(job.device)
    return init_device_mesh(job.device, tuple(job.dims.values()), mesh_dim_names=tuple(job.dims))


def join_group(device: str) -> None:
    """The process group, if there is none yet."""
    devices.take(device)
    if not dist.is_initialized():
        dist.init_process_group(devices.backends(device))


def seed(job: Job, mesh: DeviceMesh, *, own: bool) -> None:
    """Seed every generator: all ranks alike, or each on its `own` but for those that share a batch."""
    value = job.seed
    if own:
        value += 1 + replica(job, mesh)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)  # those of all devices


def settle(model: nn.Module) -> list[str]:
    """Have DDP lay out its buckets now, and not after the first step: where a gradient lies in its bucket decides the
    order in which more than two ranks add it up, and a run that resumes would be one step behind."""
    said: set[str] = set()
    for module in model.modules():
        reducer: Any = module.reducer if isinstance(module, DistributedDataParallel) else None
        if hasattr(reducer, "_push_all_rebuilt_params"):
            reducer._push_all_rebuilt_params()
            reducer._rebuild_buckets()
            said.add("the buckets of DistributedDataParallel laid out before the first step")
    return sorted(said)


def replica(job: Job, mesh: DeviceMesh) -> int:
    """Which of the data-parallel replicas this rank is part of: its coordinate without `tp`."""
    at = 0
    for name, size, coordinate in zip(job.dims, mesh.mesh.shape, mesh.get_coordinate(), strict=True):
        if name != "tp":
            at = at * size + coordinate
    return at


# Random number generators ---------------------------------------------------------------------------------------------


def captured(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """The states of this rank; `generators` are those that the recipe made itself."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = legacy
    made: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": str(kind), "keys": torch.from_numpy(keys.astype(np.int64)), "position": int(position),
            "has_gauss": int(has_gauss), "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }  # fmt: skip
    kind = devices.kind()
    if kind != "cpu" and torch.get_device_module(kind).is_initialized():
        made[kind] = torch.get_device_module(kind).get_rng_state()
    return made | {f"generator_{name}": one.get_state() for name, one in generators.items()}


def restore(state: Any, generators: Mapping[str, torch.Generator]) -> list[str]:
    """Put states back. Returns which of this rank's generators were not in `state`."""
    if not isinstance(state, Mapping):
        return [*captured(generators)]
    without: list[str] = []
    for name in captured(generators):
        told = next((state[key] for key in (name, *_OTHER_NAMES.get(name, ())) if state.get(key) is not None), None)
        if told is None:
            without.append(name)
        elif name == "python":
            random.setstate(_python(told))
        elif name == "numpy":
            np.random.set_state(_numpy(told))
        elif name == "torch":
            torch.set_rng_state(_bytes(told))
        elif name == devices.kind():
            mine = told[devices.current(name).index] if isinstance(told, list) else told
            torch.get_device_module(name).set_rng_state(_bytes(mine))
        else:
            generators[name.removeprefix("generator_")].set_state(_bytes(told))
    return without


_OTHER_NAMES = {
    "python": ("random", "random_state", "python_rng_state"),
    "numpy": ("np", "numpy_random_seed", "numpy_rng_state"),
    "torch": ("cpu", "torch_manual_seed", "torch_rng_state"),
    "cuda": ("cuda_rng_state", "torch_cuda_manual_seed", "cuda_all"),
}


def digests(generators: Mapping[str, torch.Generator]) -> dict[str, str]:
    """One for each generator of this rank: `{"torch": "9f2c..."}`."""
    return {name: hashlib.sha256(_flat(value)).hexdigest() for name, value in captured(generators).items()}


def _flat(value: Any) -> bytes:
    if isinstance(value, Mapping):
        return b"".join(_flat(one) for one in value.values())
    if isinstance(value, torch.Tensor):
        return bytes(value.contiguous().view(torch.uint8).numpy().tobytes())
    return repr(value).encode()


def _python(told: Any) -> Any:
    if isinstance(told, Mapping):
        return told["version"], tuple(int(word) for word in told["state"]), told["gauss"]
    version, words, gauss = told
    return version, tuple(words), gauss


def _numpy(told: Any) -> Any:
    if isinstance(told, Mapping):
        keys = np.asarray(told["keys"]).astype(np.uint32)
        return told["kind"], keys, told["position"], told["has_gauss"], told["cached"]
    return tuple(told)


def _bytes(told: Any) -> torch.Tensor:
    return torch.as_tensor(told, dtype=torch.uint8, device="cpu")
