"""Is the output right? `python check.py REFERENCE OUTPUT PART [DTYPE]` compares it, tensor by tensor and bit for bit.

Runs once per contender, outside the timed region, so that nobody is fast by writing the wrong thing. The output is read
by its format's own library, never by ours. PART is `all` or `model`, whose names may have lost their `model.`. After a
cast, DTYPE is what torch is to cast the floating-point tensors of the reference to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import dcp_loader
from safetensors import safe_open
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore


def tensors_of(output: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a checkpoint of any of the three formats, by dotted name."""
    if (output / ".metadata").exists():
        yield from flat(dcp_loader(str(output))())
    elif (output / "rank0.pt").exists():
        yield from of_ranks(output)
    elif (output / "ckpttool.json").exists():
        yield from whole_state(output)
    elif output.is_dir() or output.suffix == ".safetensors":
        for file in sorted(output.glob("*.safetensors")) if output.is_dir() else [output]:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict: it cannot be iterated
                    yield name, opened.get_tensor(name)
    else:
        yield from flat(torch.load(output, mmap=True, weights_only=True))


def whole_state(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a training-state directory, whose index says which file has which; see its page in docs/."""
    files: dict[str, Any] = {}
    for entry in json.loads((folder / "ckpttool.json").read_text())["entries"]:
        if "file" in entry:
            if entry["file"] not in files:
                files[entry["file"]] = safe_open(folder / entry["file"], "pt")
            yield ".".join(map(str, entry["path"])), files[entry["file"]].get_tensor(entry["name"])


def of_ranks(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a torch.save file of DTensors for each rank, joined by their placements. Each is loaded as its own
    rank, in a process group that talks to nobody."""
    world = len(list(folder.iterdir()))
    ranks = []
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        ranks.append(dict(flat(torch.load(folder / f"rank{rank}.pt", weights_only=False))))
        dist.destroy_process_group()
    for name, tensor in ranks[0].items():
        parts = [rank[name] for rank in ranks]
        if isinstance(tensor, DTensor):
            yield name, torch.cat([part.to_local() for part in parts], dim=tensor.placements[0].dim)
        else:
            yield name, tensor


def flat(state: dict[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nested state dict."""
    for name, value in flatten_state_dict(state)[0].items():
        if isinstance(value, torch.Tensor):
            yield name, value


def main(reference: str, output: str, part: str, dtype: str = "") -> str | None:
    """None if equal, else what is wrong."""
    with safe_open(reference, "pt") as opened:
        names: list[str] = opened.keys()
        missing = {name for name in names if part == "all" or name.startswith("model.")}
        for name, tensor in tensors_of(Path(output)):
            expected = name if name in missing else f"model.{name}"
            if expected not in missing:
                return f"a tensor that should not be there, or twice: {name}"
            missing.remove(expected)
            truth = opened.get_tensor(expected)
            if dtype and truth.is_floating_point():
                truth = truth.to(getattr(torch, dtype))
            if tensor.dtype != truth.dtype or not torch.equal(tensor, truth):
                return f"wrong value: {name}"
    return f"{len(missing)} tensors missing, such as {min(missing)}" if missing else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
