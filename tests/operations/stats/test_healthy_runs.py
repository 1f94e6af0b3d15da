"""What stands out of young runs that train as they should: nothing. And of the same runs with a fault: the fault.

Models are trained here, by torch and transformers, for a few steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import ckpttool

State = dict[str, Any]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT = {"vocab_size": 64, "max_position_embeddings": 64}


def tokens(generator: torch.Generator) -> State:
    ids = torch.randint(1, 64, (4, 24), generator=generator)
    return {"input_ids": ids, "labels": ids}


def images(generator: torch.Generator) -> State:
    pixels = torch.randn(8, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": (pixels.mean((1, 2, 3)) * 50).long().clamp(0, 9)}


class Lora(nn.Module):
    """A linear layer that stays as it is, and two small matrices beside it, the second of which begins with zeros."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(4, base.in_features) / 4)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T  # type: ignore[no-any-return]


def llama(layers: int = 6) -> nn.Module:
    config = transformers.LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, **SIZES, **TEXT)
    return transformers.LlamaForCausalLM(config)


def lora() -> nn.Module:
    model: Any = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Lora(layer.self_attn.q_proj), Lora(layer.self_attn.v_proj)
    return model  # type: ignore[no-any-return]


def experts() -> nn.Module:
    config = transformers.MixtralConfig(
        num_hidden_layers=5, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, **SIZES, **TEXT
    )
    return transformers.MixtralForCausalLM(config)


def vision() -> nn.Module:
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_hidden_layers=6, num_labels=10, **SIZES)
    return transformers.ViTForImageClassification(config)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=6, n_head=4))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=6, **SIZES, **TEXT))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], State]]] = {
    "llama": (llama, tokens),
    "lora": (lora, tokens),
    "experts": (experts, tokens),
    "vision": (vision, images),
    "gpt2": (gpt2, tokens),
    "bert": (bert, tokens),
}


def trained(name: str, steps: tuple[int, ...], rate: float = 1e-2, seed: int = 0) -> Iterator[State]:
    """Yield what a script saves after these steps, the optimizer's state by names."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, batch = MODELS[name][0](), MODELS[name][1]
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [model.get_parameter(name) for name in names]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1)
    for step in range(1, max(steps) + 1):
        model(**batch(generator)).loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            state = {names[i]: moments for i, moments in optimizer.state_dict()["state"].items()}
            yield {"model": copy.deepcopy(model.state_dict()), "optimizer": {"state": copy.deepcopy(state)}}


def adversaries(steps: tuple[int, ...]) -> Iterator[State]:
    """Yield a generator and a discriminator, whose gradients differ most between layers."""

    def net(first: int, last: int) -> nn.Sequential:
        hidden = [nn.Sequential(nn.Linear(32, 32), nn.LeakyReLU(0.2)) for _ in range(5)]
        return nn.Sequential(nn.Linear(first, 32), *hidden, nn.Linear(32, last))

    torch.manual_seed(0)
    models = net(8, 16), net(16, 1)
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for model in models]
    loss = nn.BCEWithLogitsLoss()
    for step in range(1, max(steps) + 1):
        fake = models[0](torch.randn(32, 8))
        of_real, of_fake = models[1](torch.randn(32, 16) * 0.5 + 1), models[1](fake.detach())
        optimizers[1].zero_grad()
        (loss(of_real, torch.ones(32, 1)) + loss(of_fake, torch.zeros(32, 1))).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss(models[1](fake), torch.ones(32, 1)).backward()
        optimizers[0].step()
        if step in steps:
            parts = zip("GD", models, optimizers, strict=True)
            saved = {f"opt{key}": copy.deepcopy(optimizer.state_dict()) for key, _, optimizer in parts}
            yield {key: copy.deepcopy(model.state_dict()) for key, model in zip("GD", models, strict=True)} | saved


def found(state: State, path: Path) -> list[str]:
    torch.save(state, path)
    return [finding.message for finding in ckpttool.stats(path, cache=False).findings]


@pytest.mark.parametrize("name", ["llama", "lora"])
def test_nothing_stands_out_of_a_healthy_run(name: str, tmp_path: Path) -> None:
    for state in trained(name, (1, 10, 40)):
        assert found(state, tmp_path / "a.pt") == []


def test_nothing_stands_out_of_layers_that_have_numbers_alone(tmp_path: Path) -> None:
    """The biases of norms, which begin with zeros, beside those of convolutions: `*.bias`."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8)]
    model = nn.Sequential(*layers, nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(x := torch.randn(4, 3, 8, 8)).sub(x).square().mean().backward()
        optimizer.step()
        assert found({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt") == []


def test_nothing_stands_out_of_adversaries(tmp_path: Path) -> None:
    for state in adversaries((1, 10, 40)):
        assert found(state, tmp_path / "a.pt") == []


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rate", [1e-3, 1e-2])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_stands_out_of_many_healthy_runs(name: str, rate: float, seed: int, tmp_path: Path) -> None:
    for state in trained(name, (1, 10, 100), rate, seed):
        assert found(state, tmp_path / "a.pt") == []


# Faults ---------------------------------------------------------------------------------------------------------------

ONE = "model.layers.3.mlp.up_proj.weight"


def weight(state: State) -> torch.Tensor:
    return state["model"][ONE]  # type: ignore[no-any-return]


def moment(state: State, name: str) -> torch.Tensor:
    return state["optimizer"]["state"][ONE][name]  # type: ignore[no-any-return]


def layer(state: State, number: int) -> list[torch.Tensor]:
    return [tensor for name, tensor in state["model"].items() if f".layers.{number}." in name]


def untrained(state: State) -> None:
    for name, moments in state["optimizer"]["state"].items():
        if ".layers.1." in name:
            moments["exp_avg"].zero_()
            moments["exp_avg_sq"].zero_()


def embedding(state: State) -> torch.Tensor:
    return state["model"]["model.embed_tokens.weight"]  # type: ignore[no-any-return]


def no_moments(state: State) -> None:
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg"].zero_()
        moments["exp_avg_sq"].zero_()


FAULTS: dict[str, tuple[Callable[[State], Any], str]] = {
    "a NaN": (lambda state: weight(state)[2, 1].fill_(math.nan), f"`model.{ONE}`: 1 of 1,536 elements is NaN"),
    "an infinity": (lambda state: weight(state)[2, 1].fill_(math.inf), f"`model.{ONE}`: 1 of 1,536 elements is inf"),
    "a NaN moment": (lambda state: moment(state, "exp_avg")[1, 1].fill_(math.nan), f"{ONE}.exp_avg`: 1 of"),
    "an exploded layer": (lambda state: [tensor.mul_(1000) for tensor in layer(state, 2)], "layers.2."),
    "another scale": (lambda state: weight(state).mul_(1000), f"`model.{ONE}`: the largest magnitude is"),
    "a dead layer": (lambda state: [tensor.zero_() for tensor in layer(state, 4)], "layers.4."),
    "a dead weight": (lambda state: weight(state).mul_(1e-5), f"`model.{ONE}`: the rms is"),
    "a head of zeros": (lambda state: state["model"]["lm_head.weight"].zero_(), "lm_head.weight`: all 2,048"),
    "a moment of zeros": (lambda state: moment(state, "exp_avg").zero_(), "`exp_avg` of 1 of 57 parameters is zero"),
    "second moments of zeros": (lambda state: moment(state, "exp_avg_sq").zero_(), f"{ONE}.exp_avg` does not fit"),
    "a moment x 1000": (lambda state: moment(state, "exp_avg").mul_(1000), f"{ONE}.exp_avg` does not fit"),
    "second moments x 1000": (lambda state: moment(state, "exp_avg_sq").mul_(1000), f"{ONE}.exp_avg` does not fit"),
    "a layer that was not trained": (untrained, "`exp_avg` of 9 of 57 parameters is zero everywhere"),
    "dead rows": (lambda state: weight(state)[::2].zero_(), f"`model.{ONE}`: 768 of 1,536 elements are zero, and of"),
    "a dead row": (lambda state: weight(state)[5].zero_(), f"`model.{ONE}`: 32 of 1,536 elements are zero"),
    "a dead column": (lambda state: weight(state)[:, 5].zero_(), f"`model.{ONE}`: 48 of 1,536 elements are zero"),
    "a constant": (lambda state: weight(state).fill_(0.01), f"`model.{ONE}`: all 1,536 elements are 0.01"),
    "a constant embedding": (lambda state: embedding(state).fill_(0.02), "embed_tokens.weight`: all 2,048 elements"),
    "a row of NaN": (lambda state: embedding(state)[3].fill_(math.nan), "32 of 2,048 elements are NaN"),
    "fp16 that was too small": (
        lambda state: weight(state).copy_((weight(state) * 3e6).half().float()),
        f"`model.{ONE}`: 1,130 of 1,536 elements are infinite",
    ),
    "a bit of an exponent": (lambda state: weight(state).view(torch.int32)[3, 3].bitwise_xor_(1 << 30), "magnitude is"),
    "a last norm x 1e5": (
        lambda state: state["model"]["model.norm.weight"].mul_(1e5),
        "model.norm.weight`: the largest",
    ),
    "a negative square": (
        lambda state: moment(state, "exp_avg_sq")[0, 0].fill_(-1e-6),
        "no mean of squares is negative",
    ),
    "moments of no step": (lambda state: moment(state, "step").zero_(), f"{ONE}.step` is 0, but"),
    "all moments of zeros": (no_moments, "`exp_avg_sq` of 57 of 57 parameters is zero everywhere"),
    "a weight twice": (
        lambda state: weight(state).copy_(state["model"][ONE.replace("up_proj", "gate_proj")]),
        f"`model.{ONE}` has the values of `model.{ONE.replace('up_proj', 'gate_proj')}`",
    ),
    "one layer, six times": (
        lambda state: [a.copy_(b) for i in range(1, 6) for a, b in zip(layer(state, i), layer(state, 0), strict=True)],
        "`model.layers.5` has the values of `model.layers.0`: 7 tensors",
    ),
    "a layer twice": (
        lambda state: [one.copy_(other) for one, other in zip(layer(state, 5), layer(state, 4), strict=True)],
        "`model.layers.5` has the values of `model.layers.4`: 9 tensors",
    ),
}


def test_faults_stand_out(tmp_path: Path) -> None:
    (healthy,) = trained("llama", (20,))
    for fault, (damage, message) in FAULTS.items():
        state = copy.deepcopy(healthy)
        damage(state)
        messages = found(state, tmp_path / "a.pt")
        assert any(message in one for one in messages), (fault, messages)


def test_a_dead_expert_of_stacked_ones_and_a_dead_router(tmp_path: Path) -> None:
    (healthy,) = trained("experts", (10,))
    for name, at in (("experts.down_proj", 3), ("mlp.gate.weight", slice(None))):
        state = copy.deepcopy(healthy)
        tensor = next(one for key, one in state["model"].items() if ".layers.2." in key and key.endswith(name))
        tensor[at].zero_()
        assert any(f"model.layers.2.mlp.{name.removeprefix('mlp.')}`" in one for one in found(state, tmp_path / "a.pt"))


def test_the_gradient_of_a_vector_may_be_noise(tmp_path: Path) -> None:
    """As of a bias of the queries in a healthy Swin, whose update was 33 times smaller than those of other layers."""
    (healthy,) = trained("llama", (10,))
    for name, is_found in (("model.layers.3.input_layernorm.weight", False), (ONE, True)):
        state = copy.deepcopy(healthy)
        state["optimizer"]["state"][name]["exp_avg"].div_(40)
        assert any(f"{name}.exp_avg` does not fit" in one for one in found(state, tmp_path / "a.pt")) is is_found


def test_what_all_layers_have_alike_is_no_copy(tmp_path: Path) -> None:
    """Frequencies of rotary embeddings in each layer, and norms that are all ones."""
    state = {f"layers.{i}.w": torch.randn(8, 8) for i in range(4)}
    state |= {f"layers.{i}.inv_freq": torch.arange(1.0, 33.0).reciprocal() for i in range(4)}
    state |= {f"layers.{i}.norm": torch.ones(32) for i in range(4)}
    assert found(state, tmp_path / "a.pt") == []
