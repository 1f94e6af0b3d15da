"""Several processes of one machine, with one cache: each file comes once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from support.hub_server import Handler, Hub
from test_hub_processes import environment, finish, slowly, start

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import ckpttool

dist.init_process_group("gloo")
given = torch.load(sys.argv[1])
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
with ckpttool.exit_on_error():
    loaded = ckpttool.load(sys.argv[3], model, strategy=sys.argv[2])
for name, value in model.state_dict().items():
    assert torch.equal(value.full_tensor(), given[name]), name
# In one piece: two ranks write to one pipe.
os.write(1, f"equal {loaded.strategy}\\n".encode())
dist.destroy_process_group()
"""


def in_two_files() -> tuple[dict[str, torch.Tensor], dict[str, bytes]]:
    """A model, and its files, none of which fits into what is read of a header."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).state_dict()
    halves = [{k: v for k, v in model.items() if (int(k[0]) < 2) == first} for first in (True, False)]
    return model, {f"model-0000{i}-of-00002.safetensors": save(half) for i, half in enumerate(halves, 1)}


def whole(hub: Hub) -> list[str]:
    """The files that left the store whole, as often as they did."""
    return sorted(one.path for one in hub.asked("GET", "/cdn/") if one.sent > 300_000)


def test_two_commands_at_once(hub: Hub, tmp_path: Path) -> None:
    _, files = in_two_files()
    hub.make("org/name", files)
    (tmp_path / "tmp").mkdir(exist_ok=True)
    asking: list[str] = []

    def long(handler: Handler) -> bool:
        asking.append(str(handler.headers.get("Range")))
        return slowly(handler)

    hub.fail("GET", "/cdn/", act=long)
    running = [start(hub, tmp_path, "convert", "hf://org/name", str(tmp_path / f"{i}.pt")) for i in range(2)]
    for process in running:
        finish(process)
    assert (tmp_path / "0.pt").read_bytes() == (tmp_path / "1.pt").read_bytes()
    assert len(whole(hub)) == len(set(whole(hub))) == 2, asking


def load_on_two_ranks(hub: Hub, folder: Path, model: dict[str, torch.Tensor], strategy: str, address: str) -> None:
    (folder / "tmp").mkdir(exist_ok=True)
    torch.save(model, folder / "given.pt")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(folder / "script.py"), str(folder / "given.pt"), strategy, address],
        env={**environment(hub, folder), "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.count(f"equal {strategy}") == 2, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parallel", "broadcast"])
def test_two_ranks_load(hub: Hub, tmp_path: Path, strategy: str) -> None:
    model, files = in_two_files()
    hub.make("org/name", files)
    load_on_two_ranks(hub, tmp_path, model, strategy, "hf://org/name")
    assert len(whole(hub)) == len(set(whole(hub))) == 2


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parallel", "broadcast"])
def test_two_ranks_load_from_a_bucket(hub: Hub, tmp_path: Path, strategy: str) -> None:
    """There is no cache: each rank fetches its own bytes, in blocks, or one fetches all."""
    model, files = in_two_files()
    hub.make_bucket("org/name", files)
    load_on_two_ranks(hub, tmp_path, model, strategy, "hf://buckets/org/name")
    fetched = sum(one.sent for one in hub.asked("GET", "/cdn/"))
    assert fetched < 1.7 * sum(map(len, files.values()))
