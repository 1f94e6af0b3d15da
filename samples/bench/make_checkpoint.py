"""Makes the benchmark's checkpoint: `python make_checkpoint.py DIR BYTES WORLD`.

A transformer is built on the meta device and sharded with FSDP2 by WORLD gloo ranks on this machine; DCP then writes
the state. The shapes, the placements, the file layout and the item format are therefore what training writes. The
values are not trained but drawn: each local shard is a window, at a place that depends on the tensor's name, of one
pool of random numbers per rank. DCP copies a window just before it writes it, so a rank needs memory for the pool and a
shard or two, not for its part of the checkpoint. (Making the .pt and the HF form does take as much as torch's own
converters take: once SIZE, and two thirds of SIZE.)
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from checkpoint import MARK, Checkpoint
from measure import sync_tree
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class Block(nn.Module):  # type: ignore[misc]
    """The parameters of one pre-norm decoder layer; it is never called."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = dim * 8 // 3 // 64 * 64
        self.attn_norm = nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.ffn_norm = nn.RMSNorm(dim)
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)


class Transformer(nn.Module):  # type: ignore[misc]
    """Embedding, layers, norm, head: about `parameters` in all."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        vocab = 32_000 if parameters > 20_000_000 else 1_000
        step = 256 if parameters > 20_000_000 else 64
        dim = step
        while 2 * vocab * (dim + step) + 144 * (dim + step) ** 2 <= parameters:  # 144 d^2: twelve layers
            dim += step
        layers = max(1, round((parameters - 2 * vocab * dim) / (12 * dim**2)))
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)


class Windows:
    """Random shards at the cost of one pool."""

    def __init__(self, rank: int, largest: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.pool = torch.randn(largest + largest // 4 + 64, generator=generator)

    def fill(self, meta: DTensor, name: str) -> DTensor:
        """`meta`, sharded as it is, with values on the CPU."""
        local = meta.to_local()
        start = zlib.crc32(name.encode()) % (len(self.pool) - local.numel())
        window = self.pool[start : start + local.numel()].view(local.shape)
        return DTensor.from_local(
            window, meta.device_mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
        )


def write_rank(rank: int, world: int, root: str, size: int, rendezvous: str) -> None:
    """What one rank does: shard the model, then save the three directories together with the others."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))
    with torch.device("meta"):
        model = Transformer(size // (3 * 4))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters: dict[str, DTensor] = dict(model.state_dict())
    windows = Windows(rank, max(tensor.to_local().numel() for tensor in parameters.values()))

    weights = {name: windows.fill(tensor, name) for name, tensor in parameters.items()}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in parameters.items():
        state[name] = {"step": torch.tensor(1000.0)}
        state[name] |= {moment: windows.fill(tensor, f"{name}.{moment}") for moment in MOMENTS}
    group: dict[str, Any] = dict(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0])
    group["params"] = list(parameters)

    checkpoint = Checkpoint(Path(root))
    optim = {"state": state, "param_groups": [group]}
    dcp.save({"model": weights, "optim": optim}, checkpoint_id=checkpoint.train)
    dcp.save({"model": weights}, checkpoint_id=checkpoint.accelerate)
    dcp.save(weights, storage_writer=HuggingFaceStorageWriter(str(checkpoint.hf), save_distributed=True))
    checkpoint.ranks.mkdir(exist_ok=True)
    for part, tree in (("model", weights), ("optim", optim)):
        torch.save(own(tree), checkpoint.ranks / f"{part}_world_size_{world}_rank_{rank}.pt")
    dist.destroy_process_group()


def own(tree: Any) -> Any:
    """The same tree with shards that have a storage of their own: torch.save writes storages, not windows."""
    if isinstance(tree, DTensor):
        return DTensor.from_local(
            tree.to_local().clone(), tree.device_mesh, tree.placements, run_check=False,
            shape=tree.shape, stride=tree.stride(),
        )  # fmt: skip
    return {key: own(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def link_tensors(checkpoint: Checkpoint) -> Metadata:
    """The same data files under a .metadata without the objects."""
    metadata = FileSystemReader(checkpoint.train).read_metadata()
    names = {name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    metadata.state_dict_metadata = {name: metadata.state_dict_metadata[name] for name in sorted(names)}
    metadata.planner_data = {name: path for name, path in metadata.planner_data.items() if name in names}
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn in names}
    link_data(checkpoint.train, checkpoint.tensors, metadata)
    return metadata


def link_weights(checkpoint: Checkpoint) -> None:
    """The same once more, with every tensor as one of the model, under the key `model` and otherwise its own name."""
    metadata = FileSystemReader(checkpoint.tensors).read_metadata()
    metadata.planner_data = {f"model.{name}": ("model", name) for name in metadata.state_dict_metadata}
    metadata.state_dict_metadata = {f"model.{name}": entry for name, entry in metadata.state_dict_metadata.items()}
    metadata.storage_data = {
        replace(index, fqn=f"model.{index.fqn}"): info for index, info in metadata.storage_data.items()
    }
    link_data(checkpoint.train, checkpoint.weights, metadata)


def link_data(source: Path, target: Path, metadata: Metadata) -> None:
    """A directory with the data files of another one (hard links) and an index of its own."""
    target.mkdir()
    for file in source.glob("*.distcp"):
        os.link(file, target / file.name)
    with open(target / ".metadata", "wb") as stream:
        pickle.dump(metadata, stream)


def write_safetensors(source: Path, target: Path) -> None:
    """A torch.save file of float32 tensors as one safetensors file, tensor by tensor from the mapped source."""
    tensors, _ = flatten_state_dict(torch.load(source, mmap=True, weights_only=True))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            stream.write(tensor.contiguous().numpy().data)


def main(root: str, size: str, world: str) -> None:
    """Write everything; the mark with the facts comes last."""
    checkpoint = Checkpoint(Path(root))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(write_rank, args=(int(world), root, int(size), os.path.join(folder, "rendezvous")), nprocs=int(world))
    metadata = link_tensors(checkpoint)
    link_weights(checkpoint)
    dcp_to_torch_save(checkpoint.train, checkpoint.train_pt)
    dcp_to_torch_save(checkpoint.tensors, checkpoint.tensors_pt)
    write_safetensors(checkpoint.tensors_pt, checkpoint.tensors_safetensors)
    tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    nbytes = {name: entry.size.numel() * entry.properties.dtype.itemsize for name, entry in tensors.items()}
    model = [count for name, count in nbytes.items() if name.startswith("model.")]
    facts = {
        "ranks": int(world),
        "tensors": len(nbytes),
        "bytes": sum(nbytes.values()),
        "model_tensors": len(model),
        "model_bytes": sum(model),
    }
    sync_tree(checkpoint.root)
    (checkpoint.root / MARK).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
