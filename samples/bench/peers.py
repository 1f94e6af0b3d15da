"""What people run today: `python peers.py NAME SRC DST` does one job with one library and nothing else.

Each function imports what it needs before its clock starts and returns the seconds of the job itself, which are
printed; the harness times the whole process from outside as it does for every other tool.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = Callable[[], object]


def dcp_to_torch_save(source: str, target: str) -> Job:
    """torch's converter from a DCP directory to one file."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as convert

    return lambda: convert(source, target)


def dcp_to_torch_save_hashed(source: str, target: str) -> Job:
    """The same, and SHA-256 of the file and of each tensor in it: what a manifest has."""
    import hashlib

    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as convert

    def hashed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        elif isinstance(value, (dict, list)):
            for one in value.values() if isinstance(value, dict) else value:
                hashed(one)

    def job() -> None:
        convert(source, target)
        of_file = hashlib.sha256()
        with open(target, "rb") as stream:
            while block := stream.read(1 << 20):
                of_file.update(block)
        hashed(torch.load(target, mmap=True, weights_only=True))

    return job


def torch_save_to_dcp(source: str, target: str) -> Job:
    """torch's converter from one file to a DCP directory (of one rank)."""
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp as convert

    return lambda: convert(source, target)


def accelerate_merge(source: str, target: str) -> Job:
    """accelerate's `merge-weights`: a DCP directory of the model to one safetensors file."""
    import torch.distributed.checkpoint.format_utils  # noqa: F401 - or it would be imported inside the clock
    from accelerate.utils import merge_fsdp_weights  # type: ignore[import-untyped]

    return lambda: merge_fsdp_weights(source, target)


def dcp_load_save_file(source: str, target: str) -> Job:
    """Load everything with DCP, save everything with safetensors."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    load = dcp_loader(source)
    return lambda: save_file(flatten_state_dict(load())[0], target)


def dcp_load_save_model(source: str, target: str) -> Job:
    """Load everything with DCP, save the model part with safetensors."""
    from safetensors.torch import save_file

    load = dcp_loader(source)
    return lambda: save_file(load()["model"], target)


def dcp_load_cast_save_model(source: str, target: str) -> Job:
    """Load everything with DCP, save the model part in bfloat16 with safetensors."""
    from safetensors.torch import save_file

    load = dcp_loader(source)
    return lambda: save_file({name: tensor.bfloat16() for name, tensor in load()["model"].items()}, target)


def dcp_load_save_pretrained(source: str, target: str) -> Job:
    """Load everything with DCP, save it as `save_pretrained` does: split, tied tensors once, with an index."""
    from huggingface_hub import save_torch_state_dict

    load = dcp_loader(source)

    def job() -> None:
        Path(target).mkdir(exist_ok=True)
        save_torch_state_dict(load()["model"], target)

    return job


def dcp_loader(source: str) -> Callable[[], dict[str, Any]]:
    """A function that loads a DCP directory whole, in one process and without a model, as torch's converters do."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    def load() -> dict[str, Any]:
        state: dict[str, Any] = {}
        _load_state_dict(
            state, storage_reader=FileSystemReader(source), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
        return state

    return load


def torch_load_save_file(source: str, target: str) -> Job:
    """torch.load with mmap, then save everything with safetensors."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return lambda: save_file(flatten_state_dict(torch.load(source, mmap=True, weights_only=True))[0], target)


def safetensors_to_dcp(source: str, target: str) -> Job:
    """Load everything with safetensors, save it with DCP in one process."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    return lambda: dcp.save(load_file(source), checkpoint_id=target, no_dist=True)


def hf_consolidate(source: str, target: str) -> Job:
    """torch's consolidation of HuggingFaceStorageWriter's files into one."""
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names: set[str] = set()
    for file in Path(source).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names.update(opened.keys())
    Path(target).mkdir()
    return lambda: consolidate_safetensors_files(source, target, dict.fromkeys(sorted(names), 1))


def merge_ranks(source: str, target: str) -> Job:
    """verl's way (`verl/model_merger/fsdp_model_merger.py`): load every rank, concatenate, save. Its cast to bfloat16
    is left out, as nobody else casts here."""
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor

    def load(path: Path) -> Any:
        return torch.load(path, map_location="cpu", weights_only=False)

    def merge() -> None:
        paths = sorted(Path(source).glob("model_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
        with ThreadPoolExecutor() as pool:
            ranks = list(pool.map(load, paths))
        merged: dict[str, Any] = {}
        for name in list(ranks[0]):
            parts = [state.pop(name) for state in ranks]
            first = parts[0]
            if isinstance(first, DTensor):
                merged[name] = torch.cat([part.to_local() for part in parts], dim=first.placements[0].dim).contiguous()
            else:
                merged[name] = first
        save_file(merged, target)

    return merge


def numpy_statistics(source: str, target: str) -> Job:
    """A loop over a mapped safetensors file: limits, mean, deviation, NaN, zeros and a histogram of 100 bins."""
    import json

    import numpy as np

    def look() -> None:
        with open(source, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            begin = file.tell()
        data = np.memmap(source, np.uint8, "r", begin)
        for entry in (entry for name, entry in header.items() if name != "__metadata__"):
            raw = data[slice(*entry["data_offsets"])]
            if entry["dtype"] == "BF16":
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = raw.view(np.float32)
            np.histogram(np.abs(values), 100)
            _ = values.min(), values.max(), values.mean(), values.std(), np.isnan(values).sum(), (values == 0).sum()

    return look


def torch_statistics(source: str, target: str) -> Job:
    """The same loop with torch."""
    import torch
    from safetensors import safe_open

    def look() -> None:
        with safe_open(source, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                values = file.get_tensor(name).float()
                torch.histc(values.abs(), 100)
                _ = values.min(), values.max(), values.mean(), values.std(), values.isnan().sum(), (values == 0).sum()

    return look


PEERS: dict[str, Callable[[str, str], Job]] = {
    function.__name__: function
    for function in (
        dcp_to_torch_save,
        dcp_to_torch_save_hashed,
        torch_save_to_dcp,
        accelerate_merge,
        dcp_load_save_file,
        dcp_load_save_model,
        dcp_load_cast_save_model,
        dcp_load_save_pretrained,
        torch_load_save_file,
        safetensors_to_dcp,
        hf_consolidate,
        merge_ranks,
        numpy_statistics,
        torch_statistics,
    )
}

if __name__ == "__main__":
    name, source, target = sys.argv[1:]
    job = PEERS[name](source, target)
    start = time.perf_counter()
    job()
    print(time.perf_counter() - start)
