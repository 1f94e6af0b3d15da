"""The last part of the demo: read every checkpoint with the library it is for, and compare with the reference.

    torchrun --nproc-per-node 2 demo_readback.py      -> readings.json in the working directory

Nothing of ckpttool is imported here. The reference, `reference.pt`, is the training state that torch gathered in the
training processes.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from demo_train import build, restore_rng, sharded_state, whole_state
from safetensors import safe_open
from same import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_state_dict

Leaves = dict[tuple[Any, ...], Any]

# What a pickled NumPy array is made of; torch's list of safe classes leaves it out.
NUMPY = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.empty(0).__reduce__()[0]]
BY_NAME = {(known.__module__, known.__name__): known for known in NUMPY}


def load(path: str | Path, **options: Any) -> Any:
    """`torch.load`, which may build tensors, plain values and NumPy arrays, and nothing else."""
    with torch.serialization.safe_globals(NUMPY):
        return torch.load(path, weights_only=True, **options)


def leaves_of(tree: Any) -> Leaves:
    """Every tensor and every object of a nested state by its key path; a list counts as DCP counts it."""
    return dict(_leaves(tree, ()))


def _leaves(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, list) and any(isinstance(value, (Mapping, torch.Tensor)) for value in tree):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, index))
    else:
        yield path, tree


def compare(found: Leaves, expected: Leaves) -> str:
    """`equal`, or what is missing, what is too much and what differs."""
    missing = [path for path in expected if path not in found]
    extra = [path for path in found if path not in expected]
    other = [path for path, value in expected.items() if path in found and not same(found[path], value)]
    kinds = {"missing": missing, "not in the reference": extra, "differ": other}
    return "; ".join(f"{len(paths)} {what}: {shown(paths)}" for what, paths in kinds.items() if paths) or "equal"


def same(found: Any, expected: Any) -> bool:
    """Whether two leaves hold the same: kind, shape and bytes of a tensor, types and values of an object."""
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
        return alike and torch.equal(raw(found), raw(expected))
    try:
        assert_same(found, expected)
    except AssertionError:
        return False
    return True


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the values, in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def shown(paths: list[tuple[Any, ...]]) -> str:
    """The first few names."""
    names = [".".join(map(str, path)) for path in paths]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class Readings:
    """What has been read so far, on rank 0; elsewhere it compares nothing."""

    def __init__(self) -> None:
        self.reference: Leaves = leaves_of(load("reference.pt"))
        self.tensors = {path: value for path, value in self.reference.items() if isinstance(value, torch.Tensor)}
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, reader: str, read: Callable[[], Leaves], expected: Leaves | None = None) -> None:
        """Read a state and compare it with `expected`, which is the whole reference unless given."""
        expected = self.reference if expected is None else expected
        found: Leaves = {}
        try:
            found = read()
            verdict = compare(found, expected)
        except (Exception, CheckpointException) as error:
            # DCP's message is the tracebacks of all ranks; the last line of it says what happened.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            verdict = f"cannot be read: {lines[-1]}"
        tensors = sum(isinstance(value, torch.Tensor) for value in found.values())
        asked = not all(isinstance(value, torch.Tensor) for value in expected.values())
        objects = str(len(found) - tensors) if asked else "-"
        row = {"what": what, "reader": reader, "tensors": str(tensors), "objects": objects, "verdict": verdict}
        self.rows.append(row)

    def write(self) -> None:
        """`readings.json`, at once or not at all."""
        result = {
            "tensors": len(self.tensors),
            "objects": len(self.reference) - len(self.tensors),
            "readings": self.rows,
        }
        Path("readings.json.partial").write_text(json.dumps(result, indent=2))
        os.replace("readings.json.partial", "readings.json")


def load_into_training(path: str) -> dict[str, Any]:
    """`dcp.load` into a model, optimizer and scheduler that were just built; the state that torch gathers of them."""
    run = build(first_seed=99)
    state = sharded_state(run, step=0)
    torch_dcp.load(state, checkpoint_id=path)
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    run.scheduler.load_state_dict(state["scheduler"])
    restore_rng(state["rng"][f"rank_{dist.get_rank()}"])
    return whole_state(run, state["step"])


def through_torch_save(path: str) -> Any:
    """What torch's own converter makes of a DCP directory."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole.pt"
        dcp_to_torch_save(path, whole)
        return load(whole)


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file."""
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping


def state_of(folder: Path) -> Leaves:
    """A training state kept as safetensors files and JSON, which says where each tensor lies and what the rest is."""
    state = json.loads((folder / "ckpttool.json").read_text(), object_hook=untagged)
    tensors = {
        (file.name, name): value for file in folder.glob("*.safetensors") for name, value in tensors_of(file).items()
    }
    found: Leaves = {}
    used = set()
    for entry in state["entries"]:
        place = (entry.get("file"), entry.get("name"))
        if place in tensors:
            found[tuple(entry["path"])] = tensors[place]
            used.add(place)
        elif "value" in entry:
            found[tuple(entry["path"])] = entry["value"]
    return found | {place: value for place, value in tensors.items() if place not in used}


def untagged(made: dict[str, Any]) -> Any:
    """What the JSON objects stand for that JSON itself has no words for, as far as this training state has any."""
    match made:
        case {"$tuple": values}:
            return tuple(values)
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$name": [module, name]}:
            return BY_NAME[module, name]
        case {"$call": [module, name], "args": args, "state": states}:
            value = BY_NAME[module, name](*args)
            for state in states:
                value.__setstate__(state)
            return value
    return made


def read_alone(readings: Readings) -> None:
    """The readings that take one process."""
    # A model's file has names and no key paths.
    model = {(".".join(path[1:]),): value for path, value in readings.reference.items() if path[0] == "model"}
    alone = Path("run/model.safetensors")
    readings.add("run/safetensors/", "safe_open, json", lambda: state_of(Path("run/safetensors")))
    readings.add("run/model.safetensors", "safe_open", lambda: leaves_of(tensors_of(alone)), model)
    readings.add("run/full.pt", "torch.load", lambda: leaves_of(load("run/full.pt")))
    readings.add("run/full.pt", "torch.load, mmap=True", lambda: leaves_of(load("run/full.pt", mmap=True)))
    readings.add("run/full-again.pt", "torch.load", lambda: leaves_of(load("run/full-again.pt")))
    readings.add("run/dcp-again/", "dcp_to_torch_save", lambda: leaves_of(through_torch_save("run/dcp-again")))


def main() -> None:
    """Each rank takes part in the reading that training does; rank 0 does the others."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        readings = Readings()
        ranks = f"dcp.load, {dist.get_world_size()} ranks"
        readings.add("run/dcp-again/", ranks, lambda: leaves_of(load_into_training("run/dcp-again")))
        if dist.get_rank() == 0:
            read_alone(readings)
            readings.write()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
