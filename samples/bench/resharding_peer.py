"""What people run today to reshard: `torchrun --nproc-per-node N resharding_peer.py SRC DST`, dcp.load and dcp.save.

Every tensor becomes a DTensor over all ranks, cut along dimension 0, as FSDP2 has its parameters; no model is needed.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import Shard, init_device_mesh, zeros


def main(source: str, target: str) -> None:
    """Load what the index names onto this world, and save it again."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    entries = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    state = {
        name: zeros(entry.size, dtype=entry.properties.dtype, device_mesh=mesh, placements=[Shard(0)])
        if entry.size
        else torch.zeros((), dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=source)
    dcp.save(state, checkpoint_id=target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
