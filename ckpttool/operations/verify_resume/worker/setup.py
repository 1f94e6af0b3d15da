"""The random number generators of a rank: their states saved, restored, and told apart by a digest.

A state is nested values that every format keeps: `{"python": {"version": 3, "state": tensor, "gauss": None}, ...}`.
States that other programs saved, as tuples and arrays, are understood as well.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckpttool.training import devices


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
