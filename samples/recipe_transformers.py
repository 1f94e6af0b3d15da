"""A recipe for `ckpttool verify-resume trial`: a model of transformers under FSDP2.

ckpttool verify-resume trial --recipe samples/recipe_transformers.py --world 2 --via safetensors
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from recipe_model import ACCUMULATE, Batches, make_optimizer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=257, hidden_size=24, intermediate_size=42, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.1, tie_word_embeddings=True,
)  # fmt: skip


def build(mesh: DeviceMesh) -> dict[str, Any]:
    """Everything that has a state, as it is before the first step."""
    torch.manual_seed(0)  # the same weights on every rank, which keeps its own piece of them
    model = LlamaForCausalLM(CONFIG).to(mesh.device_type).train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, scheduler = make_optimizer(model)
    torch.manual_seed(1 + dist.get_rank())  # dropout is each rank's own
    dataloader = Batches(dist.get_rank(), dist.get_world_size())
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": dataloader}


def step(state: dict[str, Any], i: int) -> torch.Tensor:
    """One step of training; the loss."""
    device = next(state["model"].parameters()).device
    total = torch.zeros((), device=device)
    for _ in range(ACCUMULATE):
        tokens = next(state["dataloader"]).to(device)
        loss = state["model"](input_ids=tokens, labels=tokens).loss / ACCUMULATE
        loss.backward()
        total += loss.detach()
    state["optimizer"].step()
    state["scheduler"].step()
    state["optimizer"].zero_grad()
    dist.all_reduce(total)
    return total / dist.get_world_size()
