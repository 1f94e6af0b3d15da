"""Run directories: every producer's layout is found, converted and read back by upstream; runs list their checkpoints."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from originals import HERE, path_of, reference
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckpttool import convert, inspect, opening, producers
from ckpttool.catalogue import Catalogue, Object
from ckpttool.contract import NO_HINTS
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.producers import PRODUCERS, recognise, runs
from ckpttool.producers.listing import Listing

SAMPLES = sorted(folder.name for folder in HERE.glob("run_*"))
TARGETS = ("torch", "dcp", "safetensors")


# What upstream makes of what we wrote ---------------------------------------------------------------------------------


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves by dotted name, tensors as they are."""
    if isinstance(value, dict) and value:
        children: Any = value.items()
    elif isinstance(value, list) and any(isinstance(v, (dict, list, torch.Tensor)) for v in value):
        children = enumerate(value)
    else:
        return {name: value}
    made: dict[str, Any] = {}
    for key, child in children:
        made |= flat(child, f"{name}.{key}" if name else str(key))
    return made


def converted(path: str, to: str, folder: Path) -> dict[str, Any]:
    """`path` in another format, by dotted name, as upstream reads it; the tensors only for safetensors."""
    out = folder / ("out.pt" if to == "torch" else "out")
    convert(path, out, to=to, check=True)
    if to == "torch":
        return flat(torch.load(out, weights_only=False))
    if to == "dcp":
        state: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load_state_dict(state, dcp.FileSystemReader(out), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return flat(state)
    return {f"{file.stem}.{name}": t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_alike(found: Any, expected: Any, at: str) -> None:
    """Bit for bit, NaN and all."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), at
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (found, expected))
        assert torch.equal(a, b), at
    else:
        assert type(found) is type(expected), at
        assert repr(found) == repr(expected), at


# Samples --------------------------------------------------------------------------------------------------------------


def below(found: dict[str, Any], tail: str, wanted: str = "", unwanted: str = "\0") -> str | None:
    """What stands before `tail` in the shortest name that ends with it."""
    before = [n.removesuffix(tail) for n in found if n == tail or n.endswith(f".{tail}")]
    return min((p for p in before if wanted in p and unwanted not in p), key=len, default=None)


def expected(ref: dict[str, Any], found: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in what was converted, and the tensor of the reference. Wrappers and ids are as the framework saved them."""
    for suffix in ("", *(f"_{i}" for i in range(1, 9) if f"model_{i}" in ref)):
        model = ref[f"model{suffix}"]
        root = below(found, next(iter(model)), f"model{suffix}" if suffix else "", "optim")
        assert root is not None
        yield from ((f"{root}{name}", tensor) for name, tensor in model.items())
        if f"optim{suffix}" in ref:
            yield from _moments(ref[f"optim{suffix}"], found, suffix)


def _moments(optim: dict[str, Any], found: dict[str, Any], suffix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """State by name, or by the place of the parameter in the parameter groups."""
    names = [name for group in optim["param_groups"] for name in group["params"]]
    moment = next(iter(optim["state"][names[0]]))
    by_name = below(found, f"state.{names[0]}.{moment}", suffix)
    root = by_name if by_name is not None else below(found, f"state.0.{moment}", suffix)
    assert root is not None
    for i, name in enumerate(names):
        for moment, value in optim["state"][name].items():
            if isinstance(value, torch.Tensor):
                yield f"{root}state.{name if by_name is not None else i}.{moment}", value


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_converts_to_what_torch_gathered(name: str, to: str, tmp_path: Path) -> None:
    ref = reference(name)
    _skip_unread(name)
    found = converted(path_of(name), to, tmp_path)
    count = 0
    for key, tensor in expected(ref, found):
        if key not in found and key.endswith("lm_head.weight"):
            embed = next(t for n, t in ref["model"].items() if "embed" in n)
            assert_alike(embed, tensor, "the tied one was left out")
            continue
        assert key in found
        assert_alike(found[key], tensor, key)
        count += 1
    assert count >= 10
    if to != "safetensors":
        _check_objects(ref, found)


def _check_objects(ref: dict[str, Any], found: dict[str, Any]) -> None:
    for part, tail in (("scheduler", "last_epoch"), ("scheduler_1", "last_epoch"), ("scaler", "growth_factor")):
        if part in ref:
            root = below(found, tail, "_1" if part.endswith("_1") else "sc")
            assert root is not None
            for key, value in flat(ref[part]).items():
                assert_alike(found[root + key], value, key)
    held = [v for k, v in found.items() if "rng" in k and isinstance(v, torch.Tensor)]
    for rank, states in enumerate(ref.get("rng_by_rank", ())):
        for state in (v for v in flat(states).values() if isinstance(v, torch.Tensor)):
            assert any(v.dtype == state.dtype and torch.equal(v, state) for v in held), rank


def _skip_unread(name: str) -> None:
    faults = inspect(path_of(name)).warnings
    if any("rank" in w and "no such file" in w for w in faults):
        pytest.skip("rank files are not read yet")
