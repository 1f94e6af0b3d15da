"""The files of one step: each is written by its own library, and what went in is counted as it goes in."""

from __future__ import annotations

import dataclasses
import json
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from support.layouts.roles import Labelled, Role, bare, labels


@dataclass(frozen=True, slots=True)
class Expected:
    """A root of values in a file: what a person expects to see there."""

    file: str
    """Its path below the directory of the run; of a checkpoint by DCP that of its directory."""
    keys: tuple[str | int, ...]
    """The keys that lead to it in the file; the name of the member first if the file is an archive."""
    role: Role
    owner: str | None
    """The model that it is of or belongs to, where there are several."""
    tensors: int
    """The number of its tensors, or arrays; one that two roots of a file share is counted in the first."""
    nbytes: int
    """Bytes of their elements."""


class Step:
    """The files of one step, below `root`, in the directory of a run."""

    def __init__(self, run: Path, root: Path, number: int) -> None:
        self.run, self.root, self.number = run, root, number
        self.epoch = number // 100
        self.expected: list[Expected] = []
        self.parameters: dict[str, int] = {}
        self.known_step: int | None = number
        self.known_epoch: int | None = None

    def has(self, *, step: int | None, epoch: int | None = None) -> None:
        """Say which step and epoch the files and their names tell, where that is not the step alone."""
        self.known_step, self.known_epoch = step, epoch

    def count(self, name: str, *models: nn.Module) -> None:
        """Count the parameters of a model."""
        ours = {id(one): one.numel() for model in models for one in model.parameters()}
        self.parameters[name] = sum(ours.values())

    def path(self, name: str) -> Path:
        """The path of a file of this step; its directory is there."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def expect(self, path: Path, value: Any, keys: tuple[str | int, ...] = ()) -> None:
        """Take down every labelled value of a file."""
        file = path.relative_to(self.run).as_posix()
        seen: dict[int, Any] = {}
        for below, label in labels(value, keys):
            tensors = list(tensors_of(bare(label), seen))
            nbytes = sum(one.numel() * one.element_size() for one in tensors)
            self.expected.append(Expected(file, below, label.role, label.owner, len(tensors), nbytes))

    def torch(
        self, name: str, value: Any = None, /, *, saved_with: Mapping[str, Any] | None = None, **keys: Any
    ) -> None:
        """Write a file with torch.save: a value, or a dict of `keys`. `saved_with` are arguments of `torch.save`."""
        value, path = keys or value, self.path(name)
        torch.save(bare(value), path, **(saved_with or {}))
        self.expect(path, value)

    def safetensors(self, name: str, label: Labelled, metadata: dict[str, str] | None = None) -> None:
        """Write tensors as safetensors; of names that share their elements the last are left out, as scripts do."""
        tensors: dict[str, torch.Tensor] = {}
        pointers = set()
        for key, tensor in label.value.items():
            if tensor.numel() == 0 or tensor.data_ptr() not in pointers:
                tensors[key] = tensor.detach().contiguous()
                pointers.add(tensor.data_ptr())
        path = self.path(name)
        safetensors.torch.save_file(tensors, path, metadata)
        self.expect(path, Labelled(label.role, tensors, label.owner))

    def dcp(self, name: str, value: Any) -> None:
        """Write a directory with torch.distributed.checkpoint."""
        path = self.path(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(bare(value), checkpoint_id=path, no_dist=True)
        self.expect(path, value)

    def dcp_with_prefix(self, name: str, value: Any, prefix: str) -> None:
        """Write the same with the ranks' files in folders, as writers for object stores do."""
        path = self.path(name)
        self.dcp(name, value)
        metadata = FileSystemReader(path).read_metadata()
        for index, storage in metadata.storage_data.items():
            new = path / prefix / storage.relative_path
            new.parent.mkdir(parents=True, exist_ok=True)
            if (path / storage.relative_path).exists():
                (path / storage.relative_path).rename(new)
            metadata.storage_data[index] = dataclasses.replace(storage, relative_path=prefix + storage.relative_path)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    def json(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        path = self.path(name)
        path.write_text(json.dumps(bare(value), indent=2))
        self.expect(path, value)

    def yaml(self, name: str, value: Any) -> None:
        """Write a YAML file of nested dicts and scalars."""
        path = self.path(name)
        path.write_text("".join(_yaml(bare(value), 0)))
        self.expect(path, value)

    def text(self, name: str, label: Labelled) -> None:
        """Write a text."""
        path = self.path(name)
        path.write_text(label.value)
        self.expect(path, label)

    def pickle(self, name: str, value: Any) -> None:
        """Write a pickle of the standard library."""
        path = self.path(name)
        path.write_bytes(pickle.dumps(bare(value)))
        self.expect(path, value)

    def npz(self, name: str, label: Labelled) -> None:
        """Write arrays with numpy.savez."""
        path = self.path(name)
        np.savez(path, **label.value)
        file = path.relative_to(self.run).as_posix()
        nbytes = sum(array.nbytes for array in label.value.values())
        self.expected.append(Expected(file, (), label.role, label.owner, len(label.value), nbytes))

    def zip(self, name: str, members: Mapping[str, Any]) -> None:
        """Write an archive of texts and of files by torch.save, as stable-baselines3 does."""
        path = self.path(name)
        with zipfile.ZipFile(path, "w") as archive:
            for member, value in members.items():
                if isinstance(bare(value), str):
                    archive.writestr(member, bare(value))
                else:
                    data = BytesIO()
                    torch.save(bare(value), data)
                    archive.writestr(member, data.getvalue())
                self.expect(path, value, (member,))


def _yaml(value: Any, depth: int) -> Iterator[str]:
    for key, below in value.items():
        if isinstance(below, dict) and below:
            yield f"{'  ' * depth}{key}:\n"
            yield from _yaml(below, depth + 1)
        else:
            yield f"{'  ' * depth}{key}: {json.dumps(below)}\n"


def tensors_of(value: Any, seen: dict[int, Any] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor object in a value, once, however it is held: by containers, modules and other objects."""
    seen = {} if seen is None else seen
    if isinstance(value, (str, bytes, int, float, np.ndarray, type, torch.dtype)) or value is None or id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        below: list[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        below = list(value)
    else:
        below = list(getattr(value, "__dict__", {}).values())
    for one in below:
        yield from tensors_of(one, seen)
