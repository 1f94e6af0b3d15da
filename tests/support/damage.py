"""Checkpoints that the upstream libraries save, and ways to damage them; where their payloads lie, as upstream says."""

from __future__ import annotations

import json
import logging
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file


def state(seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "embed.weight": torch.randn(61, 33, generator=made),
            "layers.0.weight": torch.randn(33, 17, generator=made),
            "layers.0.bias": torch.randn(33, generator=made).bfloat16(),
            "steps": torch.arange(6),
        },
        "optim": {"state": {"layers.0.weight": {"exp_avg": torch.randn(33, 17, generator=made)}}, "lr": 0.125},
        "step": 1000,
    }


def save_dcp(path: Path, saved: dict[str, Any] | None = None, **options: Any) -> Path:
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(path, **options)
        dcp.save(saved or state(), storage_writer=writer, no_dist=True)
    return path


def save_torch(path: Path, saved: dict[str, Any] | None = None) -> Path:
    torch.save(saved or state(), path)
    return path


def save_safetensors(path: Path, saved: dict[str, torch.Tensor] | None = None) -> Path:
    save_file(saved or state()["model"], path)
    return path


# Where payloads lie ---------------------------------------------------------------------------------------------------


def payload_of_torch(path: Path) -> list[range]:
    """Storages and the pickle, as Python's zipfile finds them."""
    found = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        for info in archive.infolist():
            if "/data" in info.filename:
                stream.seek(info.header_offset)
                header = stream.read(30)
                start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
                found.append(range(start, start + info.file_size))
    return found


def payload_of_dcp(file: Path) -> list[range]:
    """The same for the archives of a data file, one behind the other: by torch's index, each read by zipfile."""
    found = []
    metadata = pickle.loads((file.parent / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        if info.relative_path == file.name:
            item = file.parent / "item.tmp"
            item.write_bytes(file.read_bytes()[info.offset : info.offset + info.length])
            found += [range(r.start + info.offset, r.stop + info.offset) for r in payload_of_torch(item)]
            item.unlink()
    return found


def payload_of_safetensors(path: Path) -> list[range]:
    (size,) = struct.unpack("<Q", path.read_bytes()[:8])
    header = json.loads(path.read_bytes()[8 : 8 + size])
    return [
        range(8 + size + begin, 8 + size + end)
        for info in header.values()
        for begin, end in [info["data_offsets"]]
    ]  # fmt: skip


def positions(payload: list[range], n: int, seed: int = 0) -> list[int]:
    """`n` random bytes, each run of bytes as likely as it is long."""
    every = [at for run in payload for at in run]
    return random.Random(seed).sample(every, n) if n <= len(every) else every


# Damage ---------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ (1 << bit)]))


def change_index(folder: Path, change: Callable[[Any], None]) -> None:
    """Let `change` at torch's own `Metadata` object, and write it back."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def place_of(metadata: Any, name: str) -> Any:
    """What torch's index says of where the only item of an entry is."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def flipped_copy(src: Path, name: str, folder: Path) -> Path:
    """A copy of a torch.save file, or of a DCP directory, in which one bit of a tensor's payload is flipped."""
    copy = folder / src.name
    shutil.copytree(src, copy) if src.is_dir() else shutil.copyfile(src, copy)
    if src.is_dir():
        info = place_of(pickle.loads((copy / ".metadata").read_bytes()), name)
        payloads = payload_of_dcp(copy / info.relative_path)
        inside = max((run for run in payloads if info.offset <= run.start < info.offset + info.length), key=len)
        flip(copy / info.relative_path, inside.start + 5)
    else:
        part, _, key = name.partition(".")
        values = torch.load(copy, weights_only=False)[part][key].numpy().tobytes()
        start = next(run.start for run in payload_of_torch(copy) if copy.read_bytes()[run.start : run.stop] == values)
        flip(copy, start + 5)
    return copy
