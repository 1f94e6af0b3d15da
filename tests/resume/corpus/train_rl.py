"""An actor and a critic that learn from a replay buffer, with target networks and an environment that draws numbers.

python train_rl.py --out OUT [--resume PATH]
"""

import copy
import os

import numpy as np
import torch
from tiny import arguments, fault, read, seed_all, write
from torch import nn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
actor = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
target = copy.deepcopy(critic).requires_grad_(False)
optimizers = {
    "actor": torch.optim.Adam(actor.parameters(), lr=1e-3),
    "critic": torch.optim.Adam(critic.parameters(), lr=2e-3),
}
environment = np.random.default_rng(5)
observation = torch.zeros(3)
buffer, at, size = torch.zeros(32, 8), 0, 0
epsilon, step, returns = 1.0, 0, []

if args.resume:
    state = read(args.resume)
    actor.load_state_dict(state["actor"])
    critic.load_state_dict(state["critic"])
    target.load_state_dict(state["critic"] if fault("target network") else state["critic_target"])
    for name, optimizer in optimizers.items():
        if not fault(f"optimizer of the {name}"):
            optimizer.load_state_dict(state["optimizers"][name])
    if not fault("replay buffer"):
        buffer, at, size = state["replay"], state["replay_at"], state["replay_size"]
    if fault("replay position"):
        at = 0
    epsilon = 1.0 if fault("epsilon") else state["epsilon"]
    if not fault("environment"):
        environment.bit_generator.state = state["environment"]
    observation = observation if fault("observation") else state["observation"]
    returns = [] if fault("returns") else state["returns"]
    step = state["step"]
    if not fault("torch rng"):
        torch.set_rng_state(state["rng"])

while step < args.steps:
    for _ in range(3):
        with torch.no_grad():
            action = actor(observation) + epsilon * torch.randn(1)
        after = 0.9 * observation + 0.1 * action + torch.from_numpy(environment.normal(size=3)).float()
        reward = -after.square().sum().reshape(1)
        buffer = buffer.clone()
        buffer[at] = torch.cat([observation, action, reward, after])
        at, size = (at + 1) % len(buffer), min(size + 1, len(buffer))
        observation = after
        returns = [*returns[-9:], reward.item()]
    rows = buffer[torch.randint(size, (6,))]
    before, action, reward, after = rows[:, :3], rows[:, 3:4], rows[:, 4:5], rows[:, 5:]
    with torch.no_grad():
        wanted = reward + 0.9 * target(torch.cat([after, actor(after)], 1))
    loss = nn.functional.mse_loss(critic(torch.cat([before, action], 1)), wanted)
    optimizers["critic"].zero_grad()
    loss.backward()
    optimizers["critic"].step()
    optimizers["actor"].zero_grad()
    (-critic(torch.cat([before, actor(before)], 1)).mean()).backward()
    optimizers["actor"].step()
    with torch.no_grad():
        for one, other in zip(target.parameters(), critic.parameters(), strict=True):
            one.mul_(0.9).add_(0.1 * other)
    epsilon, step = 0.95 * epsilon, step + 1
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        state = {"actor": actor.state_dict(), "critic": critic.state_dict(), "critic_target": target.state_dict()}
        state |= {"optimizers": {name: one.state_dict() for name, one in optimizers.items()}, "step": step}
        state |= {"replay": buffer, "replay_at": at, "replay_size": size, "epsilon": epsilon, "returns": returns}
        state |= {"environment": environment.bit_generator.state, "observation": observation}
        write(state | {"rng": torch.get_rng_state()}, f"{args.out}/agent_{step}.pt")
