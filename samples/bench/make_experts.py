"""Makes two checkpoints of experts: `python make_experts.py DIR BYTES WORLD`.

Each is DCP as WORLD gloo ranks write it, sharded along the first axis: in `experts` the experts of a layer are one
tensor, as transformers 5 and torchtitan have them in memory; in `expert_list` each has tensors of its own, as in files.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from make_checkpoint import Windows
from measure import sync_tree
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

EXPERTS, HIDDEN, INNER = 64, 1024, 256
OF_A_LAYER = 3 * 4 * EXPERTS * HIDDEN * INNER


def shapes(layers: int, *, stacked: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of all layers: gate and up are one where the experts are."""
    if stacked:
        of_a_layer = {"w13": (EXPERTS, 2 * INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER)}
    else:
        each = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
        of_a_layer = {f"{e}.{name}.weight": shape for e in range(EXPERTS) for name, shape in each.items()}
    return {f"layers.{n}.experts.{name}": shape for n in range(layers) for name, shape in of_a_layer.items()}


def write_rank(rank: int, world: int, root: str, layers: int, rendezvous: str) -> None:
    """What one rank does."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))
    windows = Windows(rank, EXPERTS * 2 * INNER * HIDDEN // world)
    for folder in ("experts", "expert_list"):
        model: dict[str, DTensor] = {}
        for name, shape in shapes(layers, stacked=folder == "experts").items():
            meta = distribute_tensor(torch.empty(shape, device="meta"), mesh, [Shard(0)])
            model[name] = windows.fill(meta, name)
        dcp.save({"model": model}, checkpoint_id=Path(root) / folder)
    dist.destroy_process_group()


def main(root: str, size: str, world: str) -> None:
    """Write both."""
    layers = max(1, int(size) // OF_A_LAYER)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(write_rank, args=(int(world), root, layers, os.path.join(folder, "rendezvous")), nprocs=int(world))
    sync_tree(Path(root))


if __name__ == "__main__":
    main(*sys.argv[1:])
