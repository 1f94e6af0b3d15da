"""Every sample of one checkpoint in every format: what upstream reads of it, and what comes back.

A sample is converted once to each format, and all that looks at the result looks at that. What torch itself wrote or
gathered is the oracle. Rank files: tests/formats/test_rankfiles.py; run directories: tests/producers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lost
import numpy as np
import pytest
import safetensors.torch
import same
import torch
from same import raw_bytes
from support.folders import contents
from support.upstream_readers import (
    dcp_into,
    dcp_whole,
    detached,
    hollow,
    load,
    plain,
    safetensors_by_path,
    spelled,
    unzipped,
)
from support.upstream_samples import NAMES, loaded, original, path_of

from ckpttool import convert
from ckpttool.errors import LossError

pytestmark = pytest.mark.filterwarnings("ignore")

# What upstream leaves out when it reads these, and we do not.
MORE = {
    "safetensors/indexed": {"lm_head.weight"},
    "torch/pt2": {"constants", "constants.scratch"},
    "torch/wrappers": {"uninitialized"},
}
# Modules saved whole: our state dict is one that torch's `state_dict()` would give.
MODULES = {"torch/fsdp1_full_w2", "torch/legacy_module", "torch/module", "torch/script"}
REFUSED = {
    ("dcp/dtypes", "safetensors"): {"complex32", "complex128"},
    ("torch/dtypes", "safetensors"): {
        "complex32", "complex128", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    },
}  # fmt: skip
# Of these, only one rank's shards are stored.
LOST = {"dcp/unflattened_w2": ["optim"]}
# Files of torch that hold more than tensors, containers and what `load` allows, or what DCP or safetensors spells
# otherwise; and objects with tensors inside, of classes that `weights_only=True` does not build.
OBJECTS = {
    "torch/ddp", "torch/legacy_module", "torch/legacy_views", "torch/meta", "torch/module", "torch/nested",
    "torch/nocrc", "torch/pt2", "torch/quantized", "torch/skip_data", "torch/sparse", "torch/storages",
    "torch/unknown_classes", "torch/wrappers", "dcp/tuples",
}  # fmt: skip


def assert_same(name: str, found: Any, *, ordered: bool = True) -> None:
    """What was read of a result is what torch saved or gathered."""
    expected = original(name)
    if name == "torch/unknown_classes":
        found = lost.shown(found)
    if name == "torch/wrappers":
        # An `nn.ParameterList`: a module, so its state dict is a dict; the reference has a list.
        found["list"] = list(found["list"].values())
    if isinstance(expected, dict):
        assert set(found) - set(expected) <= MORE.get(name, set())
        found = type(found)((key, value) for key, value in found.items() if key in expected)
    ordered = ordered and name not in MODULES
    same.assert_same(plain(found, ordered=ordered), plain(expected, ordered=ordered))


def converted(name: str, to: str, folder: Path, **options: Any) -> Path | None:
    """The sample in another format; None if that has been refused, of dtypes that the format does not have."""
    lost.package()
    before = contents(path_of(name))
    try:
        convert(path_of(name), folder / "out", to=to, check=True, drop=LOST.get(name, ()), **options)
    except LossError as error:
        assert set(error.facts["lost"]) == REFUSED[name, to]
        assert os.listdir(folder) == []
        return None
    finally:
        assert contents(path_of(name)) == before
    assert (name, to) not in REFUSED
    return folder / "out"


def back(out: Path) -> Any:
    """What torch reads of a result that was converted to torch's format again."""
    convert(out, out.with_name("back.pt"), to="torch", check=True)
    return loaded(str(out.with_name("back.pt")))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_torch_reads_it_as_a_torch_file(name: str, tmp_path: Path) -> None:
    out = converted(name, "torch", tmp_path)
    assert out is not None
    assert_same(name, loaded(str(out)))
    assert unzipped(out) == "sound"
    for mmap in (False, True) if name not in OBJECTS else ():
        found = load(out, mmap=mmap)  # nothing but tensors and plain values
        if name.startswith(("safetensors/", "hf/")):
            # A tied weight that safetensors holds once, and mentions in its metadata, comes back under both names.
            storages = {key: tensor.untyped_storage().data_ptr() for key, tensor in found.items()}
            tied = set(found) - set(original(name))
            assert {storages[key] for key in tied} <= {storages[key] for key in set(found) - tied}
        assert_same(name, found)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("world", [None, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", NAMES)
def test_torch_reads_it_as_dcp(name: str, world: int | None, tmp_path: Path) -> None:
    out = converted(name, "dcp", tmp_path, to_world=world)
    assert out is not None
    assert_same(name, back(out))
    if name in OBJECTS - {"dcp/tuples"}:
        return
    wanted, found = spelled(detached(original(name))), dcp_whole(out)
    for key in set(found) - set(wanted):
        # A tied weight that safetensors holds once, and mentions in its metadata.
        assert key in MORE.get(name, set()) or name.startswith(("safetensors/", "hf/"))
        assert any(found[key].equal(value) for value in wanted.values() if value.shape == found[key].shape)
        del found[key]
    same.assert_same(found, wanted)
    same.assert_same(dcp_into(str(out), hollow(wanted)), wanted)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_safetensors_reads_it(name: str, tmp_path: Path) -> None:
    out = converted(name, "safetensors", tmp_path)
    if out is None:
        return
    # The keys of one safetensors file have no order and no container.
    assert_same(name, back(out), ordered=(out / "ckpttool.json").exists())
    if name in OBJECTS:
        return
    found, wanted = safetensors_by_path(out), tensors_of(original(name))
    same.assert_same({key: found[key] for key in found if key not in MORE.get(name, ())}, wanted)
    for file in out.glob("*.safetensors"):
        by_torch = safetensors.torch.load_file(file)
        with safetensors.safe_open(file, framework="numpy") as opened:
            assert set(opened.keys()) == set(by_torch)
            for key, tensor in by_torch.items():
                if has_numpy(tensor):
                    array = opened.get_tensor(key)
                    assert array.shape == tuple(tensor.shape)
                    assert np.ascontiguousarray(array).tobytes() == raw_bytes(tensor), key


def tensors_of(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nested state by their dotted names, plain and contiguous."""
    if isinstance(tree, torch.Tensor):
        return {prefix: detached(tree)}
    items: Any = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if type(tree) in (list, tuple) else ()
    return {k: v for key, child in items for k, v in tensors_of(child, f"{prefix}.{key}".lstrip(".")).items()}


def has_numpy(tensor: torch.Tensor) -> bool:
    """Whether NumPy has the dtype."""
    try:
        tensor.flatten()[:0].numpy()
    except TypeError:
        return False
    return True
