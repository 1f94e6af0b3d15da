"""The `.metadata` that we write opens in torch 2.6 to 2.15, of which one is installed: its pickle against a table.

The table is what `torch/distributed/checkpoint/metadata.py` and `filesystem.py` say at the tags v2.6.0, v2.7.0, v2.8.0,
v2.9.0, v2.10.0, v2.11.0, v2.12.0, v2.13.0, v2.14.0 and v2.15.0. A field that a version does not know does no harm in
itself (a pickle sets attributes, whatever they are called), but a class that it lacks, an element too many in the state
of `TensorProperties`, or a field that is missing where it is read, make `pickle.load` or the reader fail.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.upstream_readers import path_of
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

from ckpttool import convert

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
OLDEST, NEWEST = (2, 6), (2, 15)

# (module, class) -> field -> the first torch that has it; (2, 6) for 2.6 or before.
FIELDS: dict[tuple[str, str], dict[str, tuple[int, int]]] = {
    (METADATA, "Metadata"): {
        "state_dict_metadata": (2, 6),
        "planner_data": (2, 6),
        "storage_data": (2, 6),
        "storage_meta": (2, 6),
        "version": (2, 9),  # v2.9.0 metadata.py
    },
    (METADATA, "StorageMeta"): {
        "checkpoint_id": (2, 6),
        "save_id": (2, 6),
        "load_id": (2, 6),
        "modules": (2, 7),  # v2.7.0 metadata.py
    },
    (METADATA, "TensorStorageMetadata"): {"properties": (2, 6), "size": (2, 6), "chunks": (2, 6)},
    (METADATA, "BytesStorageMetadata"): {},
    (METADATA, "ChunkStorageMetadata"): {"offsets": (2, 6), "sizes": (2, 6)},
    (METADATA, "MetadataIndex"): {"fqn": (2, 6), "offset": (2, 6), "index": (2, 6)},
    (FILESYSTEM, "_StorageInfo"): {
        "relative_path": (2, 6),
        "offset": (2, 6),
        "length": (2, 6),
        "transform_descriptors": (2, 7),  # v2.7.0 filesystem.py; `item_md.transform_descriptors or ()`
    },
    # Not a dict: __getstate__ and __setstate__ pass a tuple, which v2.14.0 and before unpack into exactly five names.
    (METADATA, "TensorProperties"): {
        "dtype": (2, 6),
        "layout": (2, 6),
        "requires_grad": (2, 6),
        "memory_format": (2, 6),
        "pin_memory": (2, 6),
        "strides": (2, 15),  # v2.15.0 metadata.py, which takes five elements too
    },
}
# Functions and enums that the pickle calls; all of them in v2.6.0: torch/serialization.py `_get_layout`, metadata.py
# `_MEM_FORMAT_ENCODING` (with three members), torch/__init__.py.
CALLED = {("torch", "Size"), ("torch.serialization", "_get_layout"), (METADATA, "_MEM_FORMAT_ENCODING")}
# What may be there and 2.6 does not know. `ckpttool` is ours, and torch carries it along. `modules` has a default from
# a factory, so the class has none: without it, torch 2.7 and later could not so much as print what they read. `version`
# is None where it is missing, and who is to refuse an old one some day may refuse None.
BEYOND = {(METADATA, "Metadata"): {"ckpttool", "version"}, (METADATA, "StorageMeta"): {"modules"}}
# Fields without a default in the class of some version: who asks for one that is not in the pickle fails.
NEEDED = {
    (METADATA, "StorageMeta"): {"modules"},
    (METADATA, "Metadata"): {"state_dict_metadata"},
    (METADATA, "TensorStorageMetadata"): {"properties", "size", "chunks"},
    (METADATA, "ChunkStorageMetadata"): {"offsets", "sizes"},
    (METADATA, "MetadataIndex"): {"fqn"},
    (FILESYSTEM, "_StorageInfo"): {"relative_path", "offset", "length"},
}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("dcp/fsdp2_w2", {}),
    ("dcp/fsdp2_w4", {"to_world": 3}),
    ("dcp/meta_torch215_w2", {}),
    ("dcp/meta_py313_w2", {}),
    ("dcp/meta_py314_w2", {"to_world": 8}),
    ("dcp/foreign_storage_info_w2", {}),
    ("dcp/zstd_w2", {}),
    ("torch/full", {}),
    ("torch/full", {"to_world": 4}),
    ("torch/dtypes", {}),
    ("safetensors/single", {"to_world": 2}),
    ("hf/sharded_w2", {}),
]


class Recorder(pickle.Unpickler):
    """Unpickles into stand-ins that keep what they are given, importing nothing."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.states: list[tuple[tuple[str, str], Any]] = []

    def find_class(self, module: str, name: str) -> Any:
        states = self.states
        key = (module, name)
        if key not in FIELDS:
            return tuple if key == ("torch", "Size") else lambda *arguments: (key, arguments)

        class StandIn:
            def __setstate__(self, state: Any) -> None:
                states.append((key, state))

        return StandIn


def written(sample: str, options: dict[str, Any], folder: Path) -> bytes:
    """The index of `sample` as DCP."""
    convert(path_of(sample), str(folder / "out"), to="dcp", **options)
    return (folder / "out" / ".metadata").read_bytes()


def names(data: bytes) -> set[tuple[str, str]]:
    """Every (module, name) that a pickle asks for, by `pickletools` alone."""
    found: set[tuple[str, str]] = set()
    memo: list[Any] = []
    stack: list[Any] = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "GLOBAL":
            found.add(tuple(argument.split(" ", 1)))
        elif opcode.name == "STACK_GLOBAL":
            found.add((stack[-2], stack[-1]))
        elif opcode.name == "MEMOIZE":
            memo.append(stack[-1] if stack else None)
        elif opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo.extend([None] * (argument + 1 - len(memo)))
            memo[argument] = stack[-1] if stack else None
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            # The two strings before STACK_GLOBAL are all that has to be right.
            stack.append(argument if isinstance(argument, str) else None)
    return found


@pytest.mark.parametrize(("sample", "options"), ROUTES, ids=[f"{s}-{o}" for s, o in ROUTES])
def test_nothing_that_torch_2_6_does_not_know(sample: str, options: dict[str, Any], tmp_path: Path) -> None:
    data = written(sample, options, tmp_path)
    asked = names(data)
    dtypes = {name for module, name in asked - CALLED - set(FIELDS) if module == "torch"}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in dtypes)
    assert asked - CALLED - set(FIELDS) == {("torch", name) for name in dtypes}
    # Python 3.8 and later read 4; torch 2.6 runs on 3.9.
    assert max(opcode.proto for opcode, _, _ in pickletools.genops(data)) <= 4
    recorder = Recorder(io.BytesIO(data))
    recorder.load()
    assert {key for key, _ in recorder.states} >= {(METADATA, "Metadata"), (FILESYSTEM, "_StorageInfo")}
    for key, state in recorder.states:
        if key == (METADATA, "Metadata"):
            assert state["version"] == CURRENT_DCP_VERSION
        known = [name for name, since in FIELDS[key].items() if since <= OLDEST]
        if key == (METADATA, "TensorProperties"):
            assert type(state) is tuple
            assert len(state) == len(known)
            assert state[3] == ((METADATA, "_MEM_FORMAT_ENCODING"), (0,))
        else:
            assert type(state) is dict
            assert set(state) - BEYOND.get(key, set()) <= set(known), key
            assert NEEDED.get(key, set()) <= set(state), key


def test_the_table_is_that_of_the_installed_torch() -> None:
    here = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert OLDEST <= here <= NEWEST
    for (module, name), fields in FIELDS.items():
        kind = getattr(importlib.import_module(module), name)
        assert [field.name for field in dataclasses.fields(kind)] == [n for n, since in fields.items() if since <= here]
        if name != "TensorProperties":
            bare = {field.name for field in dataclasses.fields(kind) if not hasattr(kind, field.name)}
            assert bare == NEEDED.get((module, name), set())
    for module, name in CALLED:
        assert hasattr(importlib.import_module(module), name)


def test_pickle_tools_and_pickle_agree(tmp_path: Path) -> None:
    """The small reading of opcodes above misses no name that `pickle` would import."""

    class Asked(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            seen.add((module, name))
            return super().find_class(module, name)

    for file in (Path(path_of("dcp/fsdp2_w2"), ".metadata"), None):
        data = file.read_bytes() if file else written("dcp/fsdp2_w2", {}, tmp_path)
        seen: set[tuple[str, str]] = set()
        Asked(io.BytesIO(data)).load()
        assert seen == names(data)
