"""Saves to a bucket and loads from it on the ranks of a world, and writes what became of each case to a file.

save_on_ranks.py ADDRESS FOLDER CASE...
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.end_rank import end_rank
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpttool
from ckpttool.errors import CkptError
from ckpttool.remote.cloud.client import Client


def made(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model with its optimizer, after a step that depends on `step`."""
    torch.manual_seed(step)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(4, 96)).sum().backward()
    optimizer.step()
    return model, optimizer


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}  # type: ignore[operator]


def save_and_load(path: str, folder: Path, step: int, **options: Any) -> None:
    model, optimizer = made(step)
    ckpttool.save(path, model, optimizer, step=step, **options)
    expected = whole(model)
    if dist.get_rank() == 0:
        torch.save(expected, folder / f"{path.rpartition('/')[2]}.{step}.expected")
    other, its = made(step + 100)
    loaded = ckpttool.load(path, other, its)
    assert loaded.rest["step"] == step and loaded.strategy == "parallel"
    assert all(torch.equal(value, expected[name]) for name, value in whole(other).items())


def case(name: str, top: str, folder: Path) -> None:
    path = f"{top}/{name}"
    if name == "dcp":
        save_and_load(path, folder, 1)
        save_and_load(path, folder, 2, overwrite=True)
        save_and_load(path, folder, 2, overwrite=True, manifest=False)
    elif name == "one.pt":
        save_and_load(path, folder, 3, format="torch")
    elif name == "killed":
        rank, count = map(int, os.environ["KILLED"].split(":"))
        puts, put = itertools.count(1), Client.put

        def killing(*arguments: Any, **options: Any) -> Any:
            if dist.get_rank() == rank and next(puts) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return put(*arguments, **options)

        Client.put = killing  # type: ignore[method-assign]
        ckpttool.save(path, *made(4))
    elif name.startswith("load"):
        ckpttool.load(path, *made(5))
    else:
        ckpttool.save(path, *made(6))


def main(top: str, folder: str, *names: str) -> None:
    dist.init_process_group("gloo")
    said: dict[str, str] = {}
    for name in names:
        try:
            case(name, top, Path(folder))
            said[name] = "done"
        except CkptError as error:
            said[name] = f"{type(error).__name__}: {error.message}"
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(said))
    end_rank()


if __name__ == "__main__":
    main(*sys.argv[1:])
