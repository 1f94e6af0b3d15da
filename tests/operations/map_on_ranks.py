"""Two models that differ in how their parameters are stored, and their training under FSDP2.

    python -m torch.distributed.run --nproc-per-node 2 map_on_ranks.py train|resume SEPARATE [FUSED]

`train` trains the separate model, and saves model and optimizer at SEPARATE by DCP. `resume` loads FUSED, which was
made of it, into the fused model under FSDP2, compares it with what torch fuses, and takes one more step with both.
Nothing of ckpttool is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

LAYERS, EXPERTS, WIDTH = 2, 3, 8
HEADS = ("q", "k", "v")
Join = Callable[[list[torch.Tensor]], torch.Tensor]


class Separate(nn.Module):
    """Query, key and value of each layer, and each expert, have weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in HEADS})
            layer["experts"] = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(EXPERTS))
            layer["down"] = nn.Linear(4, WIDTH, bias=False)
            self.layers.append(layer)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            q, k, v = (layer[name](x) for name in HEADS)
            x = x + torch.softmax(q @ k.mT, -1) @ v
            x = x + layer["down"](sum(expert(x).tanh() for expert in layer["experts"]))
        return x


class Fused(nn.Module):
    """The same with one weight for query, key and value, stacked experts, a transposed `down`, other names."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(16, WIDTH))
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            block = nn.Module()
            block.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            block.experts = nn.Parameter(torch.zeros(EXPERTS, 4, WIDTH))
            block.down = nn.Parameter(torch.zeros(4, WIDTH))
            self.blocks.append(block)


RULES: list[dict[str, Any]] = [
    {"from": "embed.weight", "to": "tokens"},
    {"from": [f"layers.{{n}}.{name}.weight" for name in HEADS], "to": "blocks.{n}.qkv.weight"},
    {"from": [f"layers.{{n}}.{name}.bias" for name in HEADS], "to": "blocks.{n}.qkv.bias"},
    {"from": "layers.{n}.experts.{e}.weight", "to": "blocks.{n}.experts"},
    {"from": "layers.{n}.down.weight", "to": "blocks.{n}.down", "operations": [{"transpose": [0, 1]}]},
]


def sources() -> dict[str, tuple[list[str], Join]]:
    """How torch makes each parameter of the fused model: of which, and by what."""
    made: dict[str, tuple[list[str], Join]] = {"tokens": (["embed.weight"], lambda own: own[0])}
    for n in range(LAYERS):
        for kind in ("weight", "bias"):
            made[f"blocks.{n}.qkv.{kind}"] = [f"layers.{n}.{name}.{kind}" for name in HEADS], torch.cat
        made[f"blocks.{n}.experts"] = [f"layers.{n}.experts.{e}.weight" for e in range(EXPERTS)], torch.stack
        made[f"blocks.{n}.down"] = [f"layers.{n}.down.weight"], lambda own: own[0].T.contiguous()
    return made


def fused(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch makes of tensors of the separate model."""
    return {new: join([named[name] for name in names]) for new, (names, join) in sources().items()}


def grouped(model: nn.Module) -> torch.optim.AdamW:
    """AdamW without weight decay for what has one dimension."""
    named = [*model.named_parameters()]
    flat = [parameter for name, parameter in named if name.endswith("bias")]
    rest = [parameter for name, parameter in named if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=1e-2)


def backward(model: nn.Module, step: int) -> None:
    model(torch.arange(12).reshape(2, 6).roll(step) % 16).square().mean().backward()


def trained(shard: bool) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Separate()
    if shard:
        fully_shard(model)
    optimizer = grouped(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model, optimizer


def main(mode: str, separate: str, other: str = "") -> None:
    dist.init_process_group("gloo")
    if mode == "train":
        model_state, optimizer_state = get_state_dict(*trained(shard=True))
        torch_dcp.save({"model": model_state, "optim": optimizer_state, "step": 3}, checkpoint_id=separate)
    else:
        resume(separate, other)
    dist.destroy_process_group()


def loaded(model: nn.Module, path: str) -> tuple[nn.Module, torch.optim.AdamW]:
    fully_shard(model)
    optimizer = grouped(model)
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optim": states[1]}
    torch_dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return model, optimizer


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def resume(separate: str, other: str) -> None:
    one, of_one = loaded(Separate(), separate)
    two, of_two = loaded(Fused(), other)
    compare(gathered(one, of_one), gathered(two, of_two))
    of_one.zero_grad()
    backward(one, 3)
    grads = fused({name: parameter.grad.full_tensor() for name, parameter in one.named_parameters()})
    for name, parameter in two.named_parameters():
        whole = torch.distributed.tensor.distribute_tensor(grads[name], parameter.device_mesh, parameter.placements)
        parameter.grad = whole
    of_one.step()
    of_two.step()
    compare(gathered(one, of_one), gathered(two, of_two))
    print(f"rank {dist.get_rank()}: alike")


def compare(one: tuple[Any, Any], two: tuple[Any, Any]) -> None:
    """Whether the second is what torch fuses of the first, bit for bit."""
    if dist.is_initialized() and dist.get_rank():
        return
    expected = fused(one[0])
    assert two[0].keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in two[0].items())
    for key in ("exp_avg", "exp_avg_sq"):
        expected = fused({name: state[key] for name, state in one[1]["state"].items()})
        assert all(
            expected[name].any() and torch.equal(two[1]["state"][name][key], expected[name]) for name in expected
        )
    for new, (names, _) in sources().items():
        steps = {float(one[1]["state"][name]["step"]) for name in names}
        assert steps == {float(two[1]["state"][new]["step"])}
    for before, after in zip(one[1]["param_groups"], two[1]["param_groups"], strict=True):
        rest = {name: value for name, value in before.items() if name != "params"}
        assert rest == {name: value for name, value in after.items() if name != "params"}
        listed = {new for new, (names, _) in sources().items() if names[0] in before["params"]}
        assert set(after["params"]) == listed


if __name__ == "__main__":
    main(*sys.argv[1:])
