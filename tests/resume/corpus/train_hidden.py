"""What a model keeps beside its parameters: a hidden state, a bank of its first forward pass, vectors of spectral norm.

python train_hidden.py --out OUT [--resume PATH]

A forward pass before the restore creates the parameters of a lazy layer.
"""

import os

import torch
from tiny import Shuffled, arguments, fault, read, samples, seed_all, write
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mid = spectral_norm(nn.Linear(6, 8)), weight_norm(nn.Linear(8, 8))
        self.cell, self.down = nn.GRUCell(8, 8), nn.LazyLinear(1)
        self.hidden = self.bank = None

    def forward(self, x):
        hidden = torch.zeros(len(x), 8) if self.hidden is None else self.hidden
        hidden = self.cell(torch.relu(self.mid(self.up(x))), hidden)
        self.hidden = hidden.detach()
        mean = hidden.detach().mean(0)
        self.bank = mean if self.bank is None else self.bank
        out = self.down(torch.cat([hidden, hidden - self.bank], 1)).squeeze(-1)
        self.bank = 0.9 * self.bank + 0.1 * mean
        return out


model, data, step = Recurrent(), Shuffled(), 0
model(samples(4)[0])
model.hidden = model.bank = None
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
if args.resume:
    state = read(args.resume)
    left_out = ("_u", "_v") if fault("spectral vectors") else ("original0",) if fault("gain") else ()
    kept = {name: value for name, value in state["model"].items() if not name.endswith(left_out)}
    model.load_state_dict(kept, strict=False)
    for own in state["optimizer"]["state"].values():
        if fault("product of momentum"):
            own["mu_product"].fill_(1)
    optimizer.load_state_dict(state["optimizer"])
    model.hidden = None if fault("hidden state") else state["hidden"]
    model.bank = None if fault("bank") else state["bank"]
    data.load_state_dict(state["data"])
    step = state["step"]
while step < args.steps:
    x, y = data.next()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
        write(saved | {"hidden": model.hidden, "bank": model.bank, "step": step}, f"{args.out}/hidden-{step}.pt")
