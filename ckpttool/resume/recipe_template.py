"""The recipe template that `ckpttool verify-resume init` writes. It runs as it is. Pure."""

from __future__ import annotations

TEXT = '''"""What `ckpttool verify-resume` trains, to check that training resumes exactly.

    ckpttool verify-resume trial --recipe {name}                      save and resume on as many ranks
    ckpttool verify-resume trial --recipe {name} --via safetensors --to-world 4
    ckpttool verify-resume audit CHECKPOINT --recipe {name}           without training

It runs as it is. Replace the model, the optimizer and the data with yours.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

# Optional: the dimensions of the mesh of `world` ranks, outermost first: `replicate`, `shard` and `tp`. Without this
# function all ranks are in `shard`.
#
# def mesh(world):
#     return {{"replicate": 2, "shard": world // 2}}


def build(mesh):
    """Create everything that has a state, as it is before the first step. `mesh` is a torch DeviceMesh over all ranks;
    the process group is initialized, and `mesh.device_type` is "cpu", "cuda", "xpu" ...

    Returns a dict with "model" and "optimizer", and everything else that is saved and restored: anything that has
    `state_dict` and `load_state_dict` (a scheduler, a data loader, a grad scaler, a second model), and
    `torch.Generator`s. The RNG states of Python, NumPy, torch and the GPU are saved in any case.
    """
    # The same initial weights on every rank; with FSDP2, each rank then keeps its shard of them.
    torch.manual_seed(0)
    model = Model().to(mesh.device_type)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # Create the optimizer after the model is sharded, from its parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

    # From here on each rank draws its own random numbers, for dropout.
    torch.manual_seed(1 + dist.get_rank())
    return {{"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": Batches()}}


def step(state, i):
    """Take one whole step of the optimizer, with all micro-batches; `i` counts steps from 0. Returns the loss, as a
    tensor or a number."""
    model, optimizer = state["model"], state["optimizer"]
    inputs, targets = next(state["dataloader"])
    device = next(model.parameters()).device
    loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
    loss.backward()
    optimizer.step()
    state["scheduler"].step()
    optimizer.zero_grad()
    return loss.detach()


class Model(nn.Module):
    """Replace it with yours."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
            for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Batches:
    """Replace it with your data loader, which has to save its position, as torchdata's StatefulDataLoader does.

    A batch is drawn for all ranks together and each takes its share, so that the state has the same meaning on another
    number of ranks.
    """

    def __init__(self):
        self.drawn = 0

    def __next__(self):
        generator = torch.Generator().manual_seed(self.drawn)
        self.drawn += 1
        inputs = torch.randn(16, 16, generator=generator)
        targets = inputs[:, :4].cumsum(1)
        rank, world = dist.get_rank(), dist.get_world_size()
        return inputs.chunk(world)[rank], targets.chunk(world)[rank]

    def state_dict(self):
        return {{"drawn": self.drawn}}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]
'''
