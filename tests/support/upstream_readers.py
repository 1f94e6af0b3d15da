"""What the upstream libraries read, and what it is compared with. Nothing of ckpttool is imported here."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from support.paths import CHECKPOINTS, GENERATORS, SAMPLES

sys.path += [str(SAMPLES), str(GENERATORS)]  # for the programs that ranks run

from same import assert_same, raw_bytes

# What `weights_only=True` leaves out of the pickles of a training state: parsed arguments, frozen sets, generators and
# scalars of NumPy (of NumPy 1 under the names that their functions had then).
RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
SCALAR: Any = np.float32(0).__reduce__()[0]
PLAIN = [
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in (np.uint32, np.int64, np.float32, np.float64)),
    RECONSTRUCT,
    SCALAR,
    (RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (SCALAR, "numpy.core.multiarray.scalar"),
    frozenset,
    bytearray,
]


def load(path: str | Path, **options: Any) -> Any:
    """`torch.load`, which may build tensors, plain values and the classes above, and nothing else."""
    with torch.serialization.safe_globals(PLAIN):
        return torch.load(path, weights_only=True, **options)


def path_of(sample: str) -> str:
    """The file or directory of a sample."""
    return str(next((CHECKPOINTS / sample).glob("ckpt*")))


def reference_of(sample: str) -> Path:
    """The file with what a reader must give back."""
    reference = CHECKPOINTS / sample / "reference.pt"
    return reference if reference.is_file() else Path(path_of(sample))


def expected_of(sample: str) -> Any:
    """What was saved. Some samples hold objects of a module beside their scripts; all of them are our own files."""
    return trusted(reference_of(sample))


def trusted(path: str | Path) -> Any:
    """All that `torch.load` can build, of a file that came with the tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=False)


def difference(found: Any, expected: Any) -> str:
    """`equal`, or the place of the first difference: bytes of tensors, types of containers, values of objects."""
    try:
        assert_same(found, expected)
    except AssertionError as error:
        return str(error)
    return "equal"


def spelled(tree: Any) -> Any:
    """What DCP can spell of a state: keys become strings, mappings plain dicts, and lists of mappings stay lists.

    An empty dict stays too. torch saves nothing for it; we save an item whose value is `{}`, which torch reads.
    """
    if isinstance(tree, Mapping):
        return {str(key): spelled(value) for key, value in tree.items()}
    if type(tree) is list:
        return [spelled(value) for value in tree]
    return tree


def detached(tree: Any) -> Any:
    """The same tree with every tensor a plain, contiguous one of its own, on the CPU."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if isinstance(tree, Mapping):
        return type(tree)((key, detached(value)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(detached(value) for value in tree)
    return tree


def hollow(tree: Any) -> Any:
    """A state to be loaded into: the same names and shapes, none of the values."""
    if isinstance(tree, torch.Tensor):
        return spoiled(tree)
    if isinstance(tree, Mapping):
        return {key: hollow(value) for key, value in tree.items()}
    if type(tree) is list and any(isinstance(value, (Mapping, torch.Tensor)) for value in tree):
        return [hollow(value) for value in tree]
    return "not loaded"


def spoiled(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of this shape and dtype with every bit flipped; of a bool, the last."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    if made.numel():
        bits = torch.frombuffer(bytearray(raw_bytes(tensor)), dtype=torch.uint8)
        made.untyped_storage().copy_((bits ^ (1 if tensor.dtype == torch.bool else 255)).untyped_storage())
    return made


def dcp_whole(path: str | Path) -> Any:
    """All of a DCP directory in one process, without knowing what is in it, as `dcp_to_torch_save` reads it."""
    state: dict[str, Any] = {}
    _load_state_dict(state, torch_dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def dcp_into(path: str, state: dict[str, Any]) -> dict[str, Any]:
    """`dcp.load` in one process, with the default planner, into a state that is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def safetensors_in(path: str | Path, framework: str = "pt") -> dict[str, Any]:
    """Every tensor of a safetensors file, or of all those in a directory, by `safe_open`."""
    files = [Path(path)] if Path(path).is_file() else sorted(Path(path).glob("*.safetensors"))
    found: dict[str, Any] = {}
    for file in files:
        with safe_open(file, framework=framework) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                assert name not in found, f"{name} is in two files"
                found[name] = opened.get_tensor(name)
    return found


def safetensors_by_path(out: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory by its name in the state: the files as `safe_open` reads them, put in place by
    `ckpttool.json` where there is one, and by the metadata that tell the other names of a tied tensor."""
    files = {file.name: safetensors_in(file) for file in out.glob("*.safetensors")}
    if not (out / "ckpttool.json").exists():
        found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
        index = out / "model.safetensors.index.json"
        tied = (
            json.loads(index.read_text())["metadata"] if index.exists() else header(next(out.iterdir()))["__metadata__"]
        )
        return {**found, **{name: found[other] for name, other in tied.items() if other in found}}
    found = {}
    for entry in json.loads((out / "ckpttool.json").read_text())["entries"]:
        if "file" in entry:
            tensor = files[entry["file"]][entry["name"]]
            if "dtype" in entry:
                tensor = tensor.view(getattr(torch, entry["dtype"])).reshape(entry["shape"])
            found[".".join(map(str, entry["path"]))] = tensor
    return found


def header(file: Path) -> dict[str, Any]:
    """The JSON at the head of a safetensors file."""
    data = file.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def named(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nested state by their dotted names."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    if isinstance(tree, Mapping):
        pairs: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        pairs = enumerate(tree)
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, value in pairs:
        found.update(named(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


def plain(value: Any, *, ordered: bool = True) -> Any:
    """Without what is not content: the Parameter class, `requires_grad`, and (if not `ordered`) OrderedDict."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return value
        return value.detach() if type(value) is torch.Tensor else value.detach().as_subclass(torch.Tensor)
    if type(value) in (dict, OrderedDict):
        items = [(key, plain(child, ordered=ordered)) for key, child in value.items()]
        return OrderedDict(items) if ordered and type(value) is OrderedDict else dict(items)
    if type(value) in (list, tuple):
        return type(value)(plain(child, ordered=ordered) for child in value)
    return value


def unzipped(file: Path) -> str:
    """`sound`, or what a reader of zip files finds: CRCs of all records, sizes, the directory."""
    with zipfile.ZipFile(file) as archive:
        wrong = archive.testzip()
    if wrong is not None:
        return f"zipfile: {wrong} has another CRC"
    if shutil.which("unzip"):
        ran = subprocess.run(["unzip", "-tqq", file], capture_output=True, text=True, check=False)
        if ran.returncode:
            return f"unzip: {ran.stdout}{ran.stderr}"
    return "sound"
