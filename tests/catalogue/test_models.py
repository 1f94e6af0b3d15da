"""Which model is an average of which, whose each optimizer is, and what the parameters are, of what torch saves."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from typing import Any

import pytest
import torch
from support import checkpoints
from torch import nn

from ckpttool.catalogue.models import Models, models
from ckpttool.catalogue.parts import assign


class Buffered(nn.Sequential):
    """A module with a buffer that nothing but its optimizer tells from a parameter."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.register_buffer("scale", torch.ones(5))


def net(width: int = 4) -> nn.Module:
    return Buffered(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def stepped(*nets: nn.Module, kind: Any = torch.optim.Adam, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(chain(*(one.parameters() for one in nets)), **options)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def found(**state: Any) -> Models:
    catalogue = checkpoints.state(state)
    assign(catalogue)
    return models(catalogue)


def averages(every: Models) -> dict[str, str | None]:
    """The averages, each with its model, by their keys."""
    return {
        ".".join(map(str, one.part.root)): ".".join(map(str, one.average_of.root)) if one.average_of else None
        for one in every.models
        if one.is_average
    }


def owners(every: Models) -> dict[str, list[str]]:
    return {
        ".".join(map(str, part.root)): [".".join(map(str, one.root)) for one in of]
        for part, of in every.optimizer_of.items()
    }


def counts(every: Models) -> list[int]:
    return [sum(tensor.numel for tensor in one.parameters()) for one in every.trained]


def test_the_parameters_are_those_that_the_optimizer_lists() -> None:
    model = net()
    every = found(model=model.state_dict(), optim=stepped(model).state_dict())
    assert counts(every) == [numel(model)]
    assert owners(every) == {"optim": ["model"]}


def test_frozen_weights_are_parameters() -> None:
    model = net()
    optimizer = stepped(model[0])
    assert counts(found(model=model.state_dict(), optim=optimizer.state_dict())) == [numel(model)]


@pytest.mark.parametrize("keys", [("fast", "slow"), ("max_pool_net", "average_pool_net")])
def test_what_optimizers_train_inside_one_state_is_no_average(keys: tuple[str, str]) -> None:
    """Beside a `fast.` of its shapes a `slow.` that an optimizer has, too, was taken for an average: half of the
    parameters were not counted, and the optimizer was of no model."""
    both = nn.ModuleDict({key: net() for key in keys})
    trained, other = (both[key] for key in keys)
    state = both.state_dict()
    every = found(model=state, optim=stepped(both).state_dict())
    assert counts(every) == [numel(both)] and owners(every) == {"optim": ["model"]}
    assert counts(found(model=state, a=stepped(trained).state_dict(), b=stepped(other).state_dict())) == [numel(both)]
    # One without state does not tell the buffers.
    assert counts(found(model=state, optim=stepped(both, kind=torch.optim.SGD).state_dict())) == [numel(both) + 2 * 5]
    every = found(model=state, optim=stepped(trained).state_dict())
    assert counts(every) == [numel(trained)] and owners(every) == {"optim": ["model"]}


def test_an_average_is_told_by_its_key() -> None:
    model = net()
    copy = {name: value.clone() for name, value in model.state_dict().items()}
    for key in ("ema", "model_avg", "teacher", "swa_model", "shadow", "polyak", "target_net", "momentum_encoder"):
        every = found(student=model.state_dict(), **{key: copy}, optim=stepped(model).state_dict())
        assert averages(every) == {key: "student"}, key
        assert counts(every) == [numel(model)], key
    double = {name: value.double() for name, value in model.state_dict().items()}
    assert averages(found(model=model.state_dict(), model_avg=double)) == {"model_avg": "model"}
    assert averages(found(model=model.state_dict(), ema={"decay": 0.9, "module": copy})) == {"ema": "model"}
    prefixed = {f"ema_model.{name}": value for name, value in copy.items()}
    assert averages(found(model=model.state_dict(), ema=prefixed)) == {"ema": "model"}
    assert averages(found(best=model.state_dict(), best_ema=copy)) == {"best_ema": "best"}


def test_the_model_beside_the_one_that_is_trained_is_its_average() -> None:
    """Lightning's `WeightAveraging` saves the average as `state_dict`: both counted."""
    model = net()
    state = {"state_dict": net().state_dict(), "current_model_state": model.state_dict()}
    every = found(**state, optimizer_states=[stepped(model).state_dict()], critic=nn.Linear(7, 9).state_dict())
    assert averages(every) == {"state_dict": "current_model_state"}
    assert counts(every) == [numel(model), 72]
    assert owners(every) == {"optimizer_states": ["current_model_state"]}


def test_what_is_current_has_no_average_beside_it() -> None:
    """The opponent of self-play is another model, and was called an average."""
    assert averages(found(current=net().state_dict(), opponent=net().state_dict())) == {}


def test_an_average_is_told_by_the_key_around_all_of_it() -> None:
    """Of `PostHocEMA`, which has the averages of two rates below its own key."""
    model = net()
    copies = {f"ema_models.{i}.{name}": value for i in (0, 1) for name, value in net().state_dict().items()}
    every = found(model=model.state_dict(), posthoc=copies, optim=stepped(model).state_dict())
    assert averages(every) == {"posthoc": None}
    assert counts(every) == [numel(model)]


def test_the_elements_of_quantised_weights_are_parameters() -> None:
    """Of torchao's tensors of 8-bit integers, beside a tensor of their zero points."""
    weight = {"qdata": torch.ones(8, 4, dtype=torch.int8), "zero_point": torch.ones(8, 1, dtype=torch.int8)}
    every = found(model={"0.weight.qdata": weight["qdata"], "0.weight.zero_point": weight["zero_point"]})
    assert counts(every) == [32]


def test_a_list_of_tensors_is_an_average_by_the_order_of_its_shapes() -> None:
    model = net()
    shadow = [parameter.detach().clone() for parameter in model.parameters()]
    ema = {"decay": 0.9, "num_updates": 3, "shadow_params": shadow, "collected_params": []}
    every = found(model=model.state_dict(), ema=ema, optimizer=stepped(model).state_dict())
    assert averages(every) == {"ema": "model"}
    every = found(net=model.state_dict(), shadow=shadow, optimizer=stepped(model).state_dict())
    assert averages(every) == {"shadow": "net"}


def test_equal_models_without_such_a_key_are_models() -> None:
    first, second = net(), net()
    every = found(qf1=first.state_dict(), qf2=second.state_dict(), q_optimizer=stepped(first).state_dict())
    assert averages(every) == {}
    assert [one.part.root for one in every.trained] == [("qf1",), ("qf2",)]
    assert owners(every) == {"q_optimizer": []}


def test_each_optimizer_has_its_model() -> None:
    g, d = net(5), net(6)
    every = found(
        G=g.state_dict(),
        D=d.state_dict(),
        G_ema=deepcopy(g).state_dict(),
        a=stepped(d).state_dict(),
        b=stepped(g, kind=torch.optim.SGD, lr=0.1, momentum=0.9).state_dict(),
    )
    assert owners(every) == {"a": ["D"], "b": ["G"]}
    assert averages(every) == {"G_ema": "G"}
    assert counts(every) == [numel(g), numel(d)]


def test_of_equal_models_the_keys_tell_whose_an_optimizer_is() -> None:
    nets = {name: net() for name in ("actor", "critic")}
    state = {f"{name}_optimizer": stepped(one).state_dict() for name, one in nets.items()}
    every = found(**{name: one.state_dict() for name, one in nets.items()}, **state)
    assert owners(every) == {"actor_optimizer": ["actor"], "critic_optimizer": ["critic"]}
    pair = {"netG": net().state_dict(), "netD": net().state_dict()}
    every = found(**pair, optG=stepped(net()).state_dict(), optD=stepped(net()).state_dict())
    assert owners(every) == {"optG": ["netG"], "optD": ["netD"]}
    target = {f"{name}_target": deepcopy(one).state_dict() for name, one in nets.items()}
    every = found(**{name: one.state_dict() for name, one in nets.items()}, **target)
    assert averages(every) == {"actor_target": "actor", "critic_target": "critic"}


def test_a_copy_without_a_name_is_not_the_owner_because_of_its_order() -> None:
    """A model that is sorted by name, as safetensors are, is as likely the one that the optimizer trains."""
    model = net()
    del model.scale
    by_name = dict(sorted(model.state_dict().items()))
    in_shards = dict(sorted(model.state_dict().items(), key=lambda item: (item[0].startswith("0"), item[0])))
    for weights in (by_name, in_shards):
        every = found(weights=weights, custom=deepcopy(model).state_dict(), optimizer=stepped(model).state_dict())
        assert owners(every) == {"optimizer": []}
    every = found(model=by_name, custom=deepcopy(model).state_dict(), optimizer=stepped(model).state_dict())
    assert owners(every) == {"optimizer": ["model"]}


def test_an_optimizer_of_several_models() -> None:
    encoder, decoder = net(5), net(6)
    for module in (encoder, decoder):
        del module.scale
    state = {"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}
    every = found(**state, opt=stepped(encoder, decoder).state_dict())
    assert owners(every) == {"opt": ["encoder", "decoder"]}
    assert counts(every) == [numel(encoder), numel(decoder)]


def test_an_optimizer_by_names() -> None:
    model = net()
    moments = {f"state.{name}.exp_avg": p.detach().clone() for name, p in model.named_parameters()}
    groups = {f"param_groups.{name}.lr": 0.1 for name, _ in model.named_parameters()}
    every = found(**model.state_dict(), optimizer={**moments, **groups})
    assert owners(every) == {"optimizer": [""]}
    assert counts(every) == [numel(model)]


def test_statistics_and_buffers_are_no_parameters() -> None:
    model = net()
    state = {**model.state_dict()}
    del state["scale"]
    rest = {"obs_rms": {"mean": torch.zeros(7), "var": torch.ones(7)}, "fixed_noise": torch.ones(6, 4)}
    replay = {"replay": {"obs": torch.zeros(9, 4), "actions": torch.zeros(9)}}
    every = found(actor=state, **rest, **replay)
    assert counts(every) == [numel(model)]


def counted(**nets: nn.Module | dict[str, Any]) -> list[str]:
    """The models whose parameters are in the headline."""
    every = found(**{key: value.state_dict() if isinstance(value, nn.Module) else value for key, value in nets.items()})
    return [".".join(map(str, one.part.root)) for one in every.counted]


def test_every_model_that_is_no_copy_counts() -> None:
    one, two, other = net(), net(), net(6)
    adam = stepped(one).state_dict()
    for twin in (two, other):  # of the same names and shapes, and of others
        assert counted(G=one, D=twin, optG=adam) == ["G", "D"]
        assert counted(actor=twin, critic=one, critic_opt=adam) == ["actor", "critic"]
        assert counted(model=one, vae=twin.requires_grad_(False), optimizer=adam) == ["model", "vae"]
        assert counted(model=one, ema=deepcopy(one), vae=twin, optimizer=adam) == ["model", "vae"]
        assert counted(policy=one, ref_policy=twin, optimizer=adam) == ["policy", "ref_policy"]
        assert counted(qf1=one, qf2=two, actor=twin, q_optimizer=stepped(one, two).state_dict()) == [
            "qf1",
            "qf2",
            "actor",
        ]
        assert counted(G=one, D=twin) == ["G", "D"]
    assert counted(model=one, ema=deepcopy(one), optimizer=adam) == ["model"]
    assert counted(actor=one, target_actor=two, critic=other, actor_opt=adam) == ["actor", "critic"]
    # The Trainer's file of an object of the script, such as an average: nothing but the optimizer tells it.
    assert counted(model=one, custom_checkpoint_0=deepcopy(one), optimizer=adam) == ["model"]
    assert counted(model=one, hf_ckpt=deepcopy(one), optimizer=adam) == ["model"]
