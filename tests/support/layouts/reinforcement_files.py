"""Trainers of agents that write one file for a step: actors, critics, targets, buffers."""

from __future__ import annotations

import base64
import copy
import json
import pickle

import numpy as np
import torch

from support.layouts import configs, networks, pointers, roles
from support.layouts.layout import layout
from support.layouts.step import Step
from support.layouts.trained import Trained, adam, counted, rmsprop, trained, update


def agent(step: Step, **outputs: int) -> dict[str, Trained]:
    """Networks of an agent by name, each with an optimizer of its own."""
    ones = {n: trained(networks.Perceptron(outputs=o), step.number, optimizer=adam) for n, o in outputs.items()}
    for name, one in ones.items():
        step.count(name, one.model)
    return ones


@layout("vwxyzjn/cleanrl td3", "file", "runs/a/td3_continuous_action.cleanrl_model")
def cleanrl_td3(step: Step) -> None:
    step.has(step=None)
    ones = agent(step, actor=3, qf1=1, qf2=1)
    states = tuple(roles.model(one.model.state_dict(), name) for name, one in ones.items())
    step.torch("runs/a/td3_continuous_action.cleanrl_model", states)


@layout("vwxyzjn/cleanrl c51", "file", "runs/a/c51.cleanrl_model")
def cleanrl_c51(step: Step) -> None:
    step.has(step=None)
    one = agent(step, q_network=12)["q_network"]
    state = {"model_weights": roles.model(one.model.state_dict()), "args": roles.config(configs.options(n_atoms=101))}
    step.torch("runs/a/c51.cleanrl_model", state)


@layout("DLR-RM/stable-baselines3", "file", "rl_model_{step}_steps.zip")
def stable_baselines3(step: Step) -> None:
    one = agent(step, policy=3)["policy"]
    schedule = base64.b64encode(pickle.dumps(configs.Hyperparameters())).decode()
    data = {
        "policy_class": {":type:": "<class 'abc.ABCMeta'>", ":serialized:": schedule},
        "num_timesteps": step.number,
        "_n_updates": step.number // 4,
        "learning_rate": 3e-4,
    }
    step.zip(
        f"rl_model_{step.number}_steps.zip",
        {
            "data": roles.progress(json.dumps(data)),
            "pytorch_variables.pth": roles.other(None),
            "policy.pth": roles.model(one.model.state_dict()),
            "policy.optimizer.pth": roles.optimizer(one.optimizer.state_dict()),
            "_stable_baselines3_version": roles.config("2.6.0"),
            "system_info.txt": roles.config("- OS: Linux\n"),
        },
    )


@layout("Eclectic-Sheep/sheeprl dreamer_v3", "file", "checkpoint/ckpt_{step}_0.ckpt")
def sheeprl(step: Step) -> None:
    ones = agent(step, world_model=8, actor=3, critic=1)
    target = ones["critic"].ema
    step.torch(
        f"checkpoint/ckpt_{step.number}_0.ckpt",
        world_model=roles.model(ones["world_model"].model.state_dict(), "world_model"),
        actor=roles.model(ones["actor"].model.state_dict(), "actor"),
        critic=roles.model(ones["critic"].model.state_dict(), "critic"),
        target_critic=roles.ema(target.state_dict(), "critic"),
        world_optimizer=roles.optimizer(ones["world_model"].optimizer.state_dict(), "world_model"),
        actor_optimizer=roles.optimizer(ones["actor"].optimizer.state_dict(), "actor"),
        critic_optimizer=roles.optimizer(ones["critic"].optimizer.state_dict(), "critic"),
        moments=roles.other({"low": torch.tensor(0.5), "high": torch.tensor(1.5)}),
        ratio=roles.other({"_ratio": 0.5, "_prev": step.number, "_pretrain_steps": 0}),
        iter_num=roles.progress(step.number),
        batch_size=roles.config(8),
        last_log=roles.progress(0),
        last_checkpoint=roles.progress(step.number),
        rb=roles.dataloader({"observations": np.zeros((10, 1, 5), np.float32), "pos": 7, "full": False}),
    )


@layout("leggedrobotics/rsl_rl", "file", "logs/model_{step}.pt")
def rsl_rl(step: Step) -> None:
    actor, critic = networks.Perceptron(), networks.Perceptron(outputs=1)
    actor.std_param = torch.nn.Parameter(torch.ones(3))
    actor.std_param.grad = torch.randn(3)
    chained = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    for one in (actor, critic):
        update(one, chained)
    counted(chained, step.number)
    step.count("actor", actor)
    step.count("critic", critic)
    step.torch(
        f"logs/model_{step.number}.pt",
        actor_state_dict=roles.model(actor.state_dict(), "actor"),
        critic_state_dict=roles.model(critic.state_dict(), "critic"),
        optimizer_state_dict=roles.optimizer(chained.state_dict()),
        iter=roles.progress(step.number),
        infos=roles.metrics(None),
    )


@layout("thu-ml/tianshou", "file", "log/policy.pth", pointers.beside("log/events.out.tfevents.1", b"\x18\0\0\0"))
def tianshou(step: Step) -> None:
    step.has(step=None)
    ones = agent(step, model=6)
    step.count("model", ones["model"].model, ones["model"].ema)
    state = {f"model.{n}": v for n, v in ones["model"].model.state_dict().items()}
    state |= {f"model_old.{n}": v for n, v in ones["model"].ema.state_dict().items()}
    step.torch("log/policy.pth", roles.model(state))


@layout("ikostrikov/pytorch-a2c-ppo-acktr-gail", "file", "trained_models/ppo/Hopper-v2.pt")
def acktr(step: Step) -> None:
    step.has(step=None)
    one = agent(step, actor_critic=4)["actor_critic"]
    statistics = configs.RunningMeanStd(np.zeros(5), np.ones(5), 12.5)
    step.torch("trained_models/ppo/Hopper-v2.pt", [roles.model(one.model), roles.other(statistics)])


@layout("xuxie1031/VRGymRLEnv, DQN with its replay", "file", "dqn.pth.tar")
def dqn(step: Step) -> None:
    step.has(step=None)
    network = networks.Perceptron(inputs=4, outputs=2, hidden=3)
    target = copy.deepcopy(network)
    optimizer = rmsprop(network.parameters())
    for _ in range(2):
        update(network, optimizer)
    counted(optimizer, step.number)
    step.count("network", network)
    step.torch(
        "dqn.pth.tar",
        network_dict=roles.model(network.state_dict(), "network"),
        target_network_dict=roles.ema(target.state_dict(), "network"),
        network_opt_dict=roles.optimizer(optimizer.state_dict(), "network"),
        replay=roles.dataloader([(torch.randn(4), i % 2, 0.5, torch.randn(4), False) for i in range(8)]),
        steps=roles.metrics([12, 7, 31]),
        rewards=roles.metrics([0.5, 1.5, 2.5]),
    )


@layout("own SAC script with a tensor buffer", "file", "sac_{step}.pth")
def sac(step: Step) -> None:
    ones = agent(step, actor=6, critic=1)
    temperature = torch.zeros(1, requires_grad=True)
    alpha = torch.optim.Adam([temperature])
    temperature.sum().backward()
    alpha.step()
    step.parameters["log_alpha"] = temperature.numel()
    buffer = {"obs": torch.randn(20, 5), "action": torch.randn(20, 3), "reward": torch.randn(20), "size": 20, "ptr": 7}
    step.torch(
        f"sac_{step.number}.pth",
        actor=roles.model(ones["actor"].model.state_dict(), "actor"),
        critic=roles.model(ones["critic"].model.state_dict(), "critic"),
        critic_target=roles.ema(ones["critic"].ema.state_dict(), "critic"),
        log_alpha=roles.model(temperature, "log_alpha"),
        actor_optimizer=roles.optimizer(ones["actor"].optimizer.state_dict(), "actor"),
        critic_optimizer=roles.optimizer(ones["critic"].optimizer.state_dict(), "critic"),
        alpha_optimizer=roles.optimizer(alpha.state_dict()),
        replay_buffer=roles.dataloader(buffer),
        total_steps=roles.progress(step.number),
    )
