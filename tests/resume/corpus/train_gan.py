"""A GAN: two models, two optimizers, and a fixed noise that pictures are drawn from.

python train_gan.py --out OUT [--resume PATH]
"""

import os

import torch
from tiny import BATCH, arguments, fault, read, samples, seed_all, write
from torch import nn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
real = samples()[0]
fixed_noise = torch.randn(3, 4)
step, drift = 0, 0.0

if args.resume:
    state = read(args.resume)
    if not fault("generator"):
        generator.load_state_dict(state["generator"])
    if not fault("critic"):
        critic.load_state_dict(state["critic"])
    if fault("rate of the other"):
        state["optimizer_g"]["param_groups"][0]["lr"] = state["optimizer_d"]["param_groups"][0]["lr"]
    if not fault("optimizer of the generator"):
        optimizer_g.load_state_dict(state["optimizer_g"])
    if not fault("optimizer of the critic"):
        optimizer_d.load_state_dict(state["optimizer_d"])
    if fault("moments of the critic"):
        for one in optimizer_d.state.values():
            one["exp_avg"].zero_()
    fixed_noise = torch.randn(3, 4) if fault("fixed noise") else state["fixed_noise"]
    if not fault("penalty"):
        drift = state["drift"]
    step = state["step"]
    if not fault("torch rng"):
        torch.set_rng_state(state["rng"])

loss = nn.functional.binary_cross_entropy_with_logits
while step < args.steps:
    rows = torch.randint(len(real), (BATCH,))
    fake = generator(torch.randn(BATCH, 4))
    loss_d = loss(critic(real[rows]), torch.ones(BATCH, 1)) + loss(critic(fake.detach()), torch.zeros(BATCH, 1))
    drift = 0.9 * drift + 0.1 * loss_d.item()
    optimizer_d.zero_grad()
    (loss_d * (1 + 0.1 * drift)).backward()
    optimizer_d.step()
    loss_g = loss(critic(fake), torch.ones(BATCH, 1))
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
    step += 1
    print(f"step {step}: loss {loss_g.item():.6f}, critic {loss_d.item():.6f}")
    if step % 2 == 0:
        state = {"generator": generator.state_dict(), "critic": critic.state_dict(), "step": step, "drift": drift}
        state |= {"optimizer_g": optimizer_g.state_dict(), "optimizer_d": optimizer_d.state_dict()}
        state |= {"fixed_noise": fixed_noise, "pictures": generator(fixed_noise).detach(), "rng": torch.get_rng_state()}
        write(state, f"{args.out}/gan_{step}.pt")
