"""What scripts of many kinds write, each in a few lines: what a person expects to see, and no tensor is lost.

The files are written by torch, pickle and numpy, and read again by them; see `support.layouts` for whole projects.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import shutil
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.layouts import reading
from torch import nn
from torch.utils._pytree import tree_leaves

import ckpttool
from ckpttool.analysis.describe.summary import summarise
from ckpttool.errors import ReadError


@dataclass
class Expected:
    """What a person expects of a script's files: the number of parameters, the step, and words at the top."""

    parameters: int
    step: int | None = 2  # that of the optimizer, where nothing else says it
    said: str = ""


SCRIPTS: dict[str, Callable[[Path], Expected]] = {}


def script(write: Callable[[Path], Expected]) -> Callable[[Path], Expected]:
    """Add a script to the table."""
    SCRIPTS[write.__name__] = write
    return write


def net(inputs: int = 16, hidden: int = 24, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def trained(*models: nn.Module, by: Any = torch.optim.AdamW, listed: Any = None, **options: Any) -> dict[str, Any]:
    """Train models for two steps, and return the state of the optimizer."""
    parameters = [one for model in models for one in model.parameters()]
    optimizer = by(listed or parameters, lr=0.001, **options)
    for _ in range(2):
        for one in parameters:
            one.grad = torch.randn_like(one)
        optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    return state


def count(*models: nn.Module) -> int:
    return sum(one.numel() for model in models for one in model.parameters())


def save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def dump(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json.dumps(value).encode() if path.suffix == ".json" else pickle.dumps(value))


@script
def ranks_of_ddp(run: Path) -> Expected:
    model = net()
    state = trained(model)
    for rank in range(3):
        own = {"rng": torch.randint(255, (5056,), dtype=torch.uint8), "python": random.Random(rank).getstate()}
        save({"model": model.state_dict(), "optimizer": state, "step": 100, **own}, run / f"ckpt_rank{rank}.pt")
    return Expected(count(model), 100)


@script
def ranks_of_ddp_beside_a_model(run: Path) -> Expected:
    """The model of each rank was one of its own."""
    expected, vae = ranks_of_ddp(run), net(16, 8, 2)
    save(vae.state_dict(), run / "vae.pt")
    said = "ckpt.model 508, vae 154, AdamW of ckpt.model, RNG of 3 ranks, step 100"
    return Expected(expected.parameters + count(vae), 100, said)


@script
def numbers_of_numpy(run: Path) -> Expected:
    """The step was that of the optimizer."""
    model = net()
    state = {"net": model.state_dict(), "opt": trained(model), "step": np.int64(100), "loss": np.float32(0.5)}
    save(state | {"meta": {"epoch": np.int64(3)}}, run / "last.pt")
    return Expected(count(model), 100)


@script
def a_slow_copy_inside_a_model(run: Path) -> Expected:
    """A model of DreamerV3: the target of its value was counted, too."""
    world, actor, value = net(), net(16, 8, 2), net(16, 8, 1)
    behavior = nn.ModuleDict({"actor": actor, "value": value, "_slow_value": copy.deepcopy(value)})
    agent = nn.ModuleDict({"_wm": world, "_task_behavior": behavior})
    optimizers = {name: trained(one) for name, one in (("model", world), ("actor", actor), ("value", value))}
    save({"agent_state_dict": agent.state_dict(), "optims_state_dict": optimizers}, run / "latest.pt")
    return Expected(count(world, actor, value))


@script
def one_number_that_is_trained(run: Path) -> Expected:
    """NeuS: a network of a single number, called `variance`, was taken for statistics."""
    field, deviation = net(), nn.Module()
    deviation.variance = nn.Parameter(torch.tensor(0.3))
    state = {"sdf_network_fine": field.state_dict(), "variance_network_fine": deviation.state_dict()}
    save(state | {"optimizer": trained(field, deviation), "iter_step": 300_000}, run / "ckpt_300000.pth")
    said = "variance_network_fine 1, AdamW of sdf_network_fine and variance_network_fine"
    return Expected(count(field, deviation), 300_000, said)


@script
def a_queue_beside_two_encoders(run: Path) -> Expected:
    """MoCo: all parameters are listed, half of them have no state, and the queue is none."""
    moco = nn.ModuleDict({"encoder_q": net(), "encoder_k": net()})
    moco.register_buffer("queue", torch.randn(4, 64))
    state = trained(moco["encoder_q"], by=torch.optim.SGD, momentum=0.9, listed=list(moco.parameters()))
    names = OrderedDict((f"module.{key}", tensor) for key, tensor in moco.state_dict().items())
    save({"epoch": 3, "arch": "resnet50", "state_dict": names, "optimizer": state}, run / "checkpoint.pth.tar")
    return Expected(count(moco), None)


@script
def pickles_of_a_learner(run: Path) -> Expected:
    """RLlib's new stack: the optimizer, below a key of its own, was of no model."""
    module, learner = net(), run / "learner_group" / "learner"
    state = {"optimizer": {"default_optimizer": trained(module)}, "weights_seq_no": 3}
    dump({key: one.numpy() for key, one in module.state_dict().items()}, learner / "rl_module" / "module_state.pkl")
    dump(state, learner / "state.pkl")
    dump({"class_and_ctor_args_file": "class_and_ctor_args.pkl"}, run / "metadata.json")
    return Expected(count(module), said="its AdamW")


@script
def one_temperature_that_is_trained(run: Path) -> Expected:
    """SAC: its optimizer was of the critic, which has a bias of that shape."""
    actor, critic, temperature = net(16, 8, 4), net(20, 8, 1), nn.Parameter(torch.zeros(1))
    state = {"actor": actor, "critic": critic, "critic_target": copy.deepcopy(critic)}
    optimizers = {"actor_optimizer": trained(actor), "critic_optimizer": trained(critic)}
    alpha = trained(nn.ParameterList([temperature]), by=torch.optim.Adam)
    own = {"log_alpha": temperature.detach(), "log_alpha_optimizer": alpha, "center": torch.zeros(4)}
    save({key: one.state_dict() for key, one in state.items()} | optimizers | own | {"step": 9}, run / "agent.pt")
    return Expected(count(actor, critic) + 1, 9, "AdamW of actor, AdamW of critic, Adam of log_alpha, other: `center`")


@script
def best_of_each_fold(run: Path) -> Expected:
    """Nothing said which is the newest: they are models of their own."""
    for fold in range(5):
        model = net()
        save({"model": model.state_dict(), "optimizer": trained(model), "epoch": fold}, run / f"fold{fold}_best.pt")
    return Expected(5 * count(model), said="fold4_best.model 508, AdamW of each")


@script
def an_optimizer_whose_class_is_beside_it(run: Path) -> Expected:
    """MLX's names."""
    model = net()
    moments = {f"{key}.{kind}": torch.rand_like(one) for key, one in model.state_dict().items() for kind in "mv"}
    run.mkdir()
    save_file(dict(model.state_dict()), run / "model.safetensors")
    save_file(moments | {"step": torch.tensor(7)}, run / "optimizer.safetensors")
    dump({"class": "AdamW", "betas": [0.9, 0.999]}, run / "optimizer.json")
    return Expected(count(model), 7, "model 508, AdamW")


@script
def an_array_for_each_tensor(run: Path) -> Expected:
    """The layers of their names were steps."""
    model = net()
    (run / "weights").mkdir(parents=True)
    for key, tensor in model.state_dict().items():
        np.save(run / "weights" / f"{key}.npy", tensor.numpy())
    dump({"step": 100}, run / "state.json")
    return Expected(count(model), 100)


def moments_of(model: nn.Module, by: Any = torch.optim.AdamW, **options: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The state of an optimizer under the names of the parameters: `{"exp_avg": {"0.weight": ...}}`."""
    state = trained(model, by=by, **options)["state"].values()
    named = dict(zip(dict(model.named_parameters()), state, strict=True))
    kinds = [kind for kind in next(iter(named.values())) if kind != "step"]
    return {kind: {name: one[kind] for name, one in named.items()} for kind in kinds}


@script
def moments_beside_a_model(run: Path) -> Expected:
    """Each was a model of its own, with its parameters."""
    model = net()
    first, second = moments_of(model).values()
    save(model.state_dict(), run / "model.pt")
    save(first, run / "adam_m.pt")
    save(second, run / "adam_v.pt")
    dump({"step": 50}, run / "state.json")
    return Expected(count(model), 50, "model 508, optimizer, optimizer, step 50")


@script
def moments_of_optax(run: Path) -> Expected:
    model = net()
    first, second = moments_of(model).values()
    save({"params": model.state_dict(), "mu": first, "nu": second, "step": 50}, run / "state.pt")
    return Expected(count(model), 50, "params 508, optimizer, optimizer, step 50")


@script
def moments_by_their_names(run: Path) -> Expected:
    """`exp_avg` was an average of the model."""
    model = net()
    save({"model": model.state_dict(), **moments_of(model), "step": 50}, run / "state.pt")
    return Expected(count(model), 50, "model 508, optimizer, optimizer, step 50")


@script
def momentum_of_a_model(run: Path) -> Expected:
    """It was an encoder that follows the model."""
    model = net()
    momentum = moments_of(model, torch.optim.SGD, momentum=0.9)["momentum_buffer"]
    save({"model": model.state_dict(), "momentum": momentum, "step": 50}, run / "state.pt")
    return Expected(count(model), 50, "model 508, optimizer, step 50")


@script
def moments_of_a_transformer(run: Path) -> Expected:
    """The first one was an average, as biases are what the last updates made of zeros."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(10):
        optimizer.zero_grad()
        (model(inputs := torch.randn(8, 4, 32)) - inputs.roll(1, 0)).square().mean().backward()
        optimizer.step()
    save(model.state_dict(), run / "model.pt")
    for kind in ("exp_avg", "exp_avg_sq"):
        state = {name: optimizer.state[one][kind] for name, one in model.named_parameters()}
        save(state, run / f"{'m' if kind == 'exp_avg' else 'v'}.pt")
    return Expected(count(model), None, "model 8,544, optimizer, optimizer")


@script
def new_heads(run: Path) -> Expected:
    """Weights of zeros and of ones were squares of something, and no models."""
    model = nn.Linear(64, 64)
    heads = {f"value{n}": {key: torch.full_like(one, n) for key, one in model.state_dict().items()} for n in (0, 1)}
    save({"policy": model.state_dict(), **heads}, run / "heads.pt")
    return Expected(3 * count(model), None, "policy 4,160, value0 4,160, value1 4,160")


@script
def weights_like_their_gradients(run: Path) -> Expected:
    """The model was a moment, too: its weights are large where its gradients are, and nothing was left as the model."""
    torch.manual_seed(0)
    model = nn.Embedding(64, 16)
    rows = torch.logspace(-2, 0, 64)[:, None]
    weights, first = (torch.randn(64, 16).clamp(-2, 2) * rows for _ in range(2))
    for name, values in (("model", weights), ("m", first), ("v", first.square() + weights.square())):
        save({"weight": values}, run / f"{name}.pt")
    return Expected(3 * count(model), None, "m 1,024, model 1,024, v 1,024")


@script
def models_of_which_one_is_positive(run: Path) -> Expected:
    """The other two were moments, whose squares are below the third."""
    torch.manual_seed(0)
    first, second, third = (nn.Linear(64, 64).state_dict() for _ in range(3))
    third = {key: one.abs() for key, one in third.items()}
    save({"first": first, "second": second, "third": third}, run / "models.pt")
    return Expected(3 * 4160, None, "first 4,160, second 4,160, third 4,160")


@script
def an_encoder_that_follows_another(run: Path) -> Expected:
    """It was the momentum of SGD before it was like the other."""
    online, other = net(), net()
    save({"encoder": online.state_dict(), "momentum_encoder": other.state_dict()}, run / "byol.pt")
    return Expected(count(online), None, "encoder 508, its momentum_encoder")


@script
def squares_of_an_average(run: Path) -> Expected:
    """SWAG: the mean of the weights and of their squares."""
    model = net()
    mean = {key: one * 0.99 for key, one in model.state_dict().items()}
    squares = {key: one.square() * 1.1 for key, one in model.state_dict().items()}
    save({"state_dict": model.state_dict(), "avg": mean, "sq_mean": squares, "epoch": 3}, run / "swag.pt")
    return Expected(count(model), None, "its avg, other: `sq_mean`")


@script
def importance_of_weights(run: Path) -> Expected:
    """EWC: Fisher's information was a model."""
    model = net()
    fisher = {key: torch.rand_like(one) ** 4 for key, one in model.state_dict().items()}
    save({"model": model.state_dict(), "fisher": fisher, "optimizer": trained(model)}, run / "task_1.pt")
    return Expected(count(model), 2, "model 508, its AdamW, other: `fisher`")


@script
def agents_of_which_one_is_frozen(run: Path) -> Expected:
    """Their epochs made them steps of a run, of which the last was opened; and the last was a copy."""
    for agent in range(3):
        model = net()
        optimizer = {"optimizer": trained(model)} if agent < 2 else {}
        save({"model": model.state_dict(), "epoch": agent + 3, **optimizer}, run / f"{agent}.pt")
    return Expected(3 * count(model), 2, "0.model 508, 1.model 508, 2.model 508, AdamW of 0.model, AdamW of 1.model")


@script
def statistics_of_observations(run: Path) -> Expected:
    """rsl_rl: what a normaliser has seen is called a state dict, and was a model."""
    actor = net()
    seen = {"_mean": torch.randn(1, 16), "_var": torch.rand(1, 16), "_std": torch.rand(1, 16), "count": torch.tensor(9)}
    state = {"model_state_dict": actor.state_dict(), "optimizer_state_dict": trained(actor), "iter": 100}
    save(state | {"obs_norm_state_dict": seen, "infos": None}, run / "model_100.pt")
    return Expected(count(actor), 100, "model_state_dict 508, its AdamW, other: `obs_norm_state_dict`")


@script
def a_counter_around_a_model(run: Path) -> Expected:
    """The step inside `model.pt` was of the model, and there was none."""
    model = net()
    save({"model": model.state_dict(), "step": 5}, run / "model.pt")
    save(torch.randn(4), run / "noise.pt")
    return Expected(count(model), 5, "model 508, other: `noise`, step 5")


def tensors_below(path: Path) -> Counter[str]:
    """The tensors of files, as the libraries read them that wrote them."""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    loaded = (
        [reading.load(path)]
        if (path / ".metadata").exists()
        else (np.load(one) if one.suffix == ".npy" else reading.load(one) for one in files)
    )
    leaves = (leaf for value in loaded for leaf in tree_leaves(value) if isinstance(leaf, (torch.Tensor, np.ndarray)))
    return Counter(reading.digest(torch.as_tensor(one)) for one in leaves)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_wrote(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected, run = SCRIPTS[name](tmp_path / "run"), tmp_path / "run"
    found = summarise(ckpttool.inspect(run))
    assert found.headline.parameters == expected.parameters
    assert found.headline.step == expected.step
    assert expected.said in found.holds
    written = tensors_below(run)
    with ckpttool.open(run) as checkpoint:
        assert {reading.digest(one.torch()) for one in checkpoint.tensors()} == {*written}
    for to, path in (("torch", tmp_path / "one.pt"), ("dcp", tmp_path / "dcp")):
        ckpttool.convert(run, path, to=to, check=True)
        assert {*tensors_below(path)} == {*written}, to
    ckpttool.convert(run, tmp_path / "same", producer="same", check=True)
    assert tensors_below(tmp_path / "same") == written
    names = {one.relative_to(run) for one in run.rglob("*")}
    if (tmp_path / "same").is_dir():  # not of a run of files, of which one is written
        assert names == {one.relative_to(tmp_path / "same") for one in (tmp_path / "same").rglob("*")}


def test_an_optimizer_that_is_an_object(tmp_path: Path) -> None:
    """Its state was said to be `<tensor>`, and `cur_itrs` was no counter."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(trained(model))
    save({"model": model.state_dict(), "optimizer": optimizer, "cur_itrs": 70}, tmp_path / "last.pth")
    assert "508 parameters, float32, AdamW state float32, step 70" in str(
        summarise(ckpttool.inspect(tmp_path)).headline
    )


@dataclass
class TrainState:
    """A whole state as an object."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    step: int


@pytest.mark.parametrize("kind", [TrainState, Namespace])
def test_the_step_of_a_state_that_is_an_object(kind: Any, tmp_path: Path) -> None:
    """It was that of the optimizer."""
    model = net()
    torch.save(kind(model=model.state_dict(), optimizer=trained(model), step=100), tmp_path / "state.pt")
    found = summarise(ckpttool.inspect(tmp_path / "state.pt")).headline
    assert (found.parameters, found.step) == (count(model), 100)


def test_layers_that_are_folders(tmp_path: Path) -> None:
    """Of nanotron, `decoder/0`, `decoder/1` and `final_layer_norm` were checkpoints of a run inside; below another name
    they may be."""
    for step in (50, 100):
        for layer in range(2):
            (folder := tmp_path / "run" / str(step) / "model" / "decoder" / str(layer) / "norm").mkdir(parents=True)
            save_file({"data": torch.rand(8)}, folder / "model_weight.safetensors")
        (last := folder.parents[2] / "final_layer_norm").mkdir()
        save_file({"data": torch.rand(8)}, last / "model_weight.safetensors")
        save({"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, folder.parents[3] / "optimizer" / "o.pt")
        dump({"metas": {"last_train_step": step}}, folder.parents[3] / "checkpoint_metadata.json")
    found = ckpttool.inspect(tmp_path / "run")
    assert (summarise(found).headline.parameters, summarise(found).headline.step) == (24, 100)
    with ckpttool.open(tmp_path / "run") as checkpoint:
        shown = Counter(reading.digest(one.torch()) for one in checkpoint.tensors())
    assert shown == tensors_below(tmp_path / "run" / "100")
    (tmp_path / "run" / "100").rename(tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "model" / "final_layer_norm")
    with pytest.raises(ReadError, match=r"found 2 inside: `model/decoder/1`"):
        ckpttool.inspect(tmp_path / "other")


def test_steps_of_weights_are_no_layers(tmp_path: Path) -> None:
    """`100.weight.pt` and `200.weight.pt` were two models of one checkpoint."""
    model = net()
    for step in (100, 200):
        save({key: one + step / 1e4 for key, one in model.state_dict().items()}, tmp_path / f"{step}.weight.pt")
    found = summarise(ckpttool.inspect(tmp_path)).headline
    assert (found.parameters, found.step) == (count(model), 200)
    with ckpttool.open(tmp_path) as checkpoint:
        assert {reading.digest(one.torch()) for one in checkpoint.tensors()} == {
            *tensors_below(tmp_path / "200.weight.pt")
        }


def test_a_folder_of_steps_beside_a_run(tmp_path: Path) -> None:
    """so-vits-svc: both steps of its diffusion model were read with the newest of the others."""
    run = tmp_path / "run"
    for step in (0, 1000):
        for name, model in (("G", net()), ("D", net(8, 8, 1))):
            save({"model": model.state_dict(), "iteration": step}, run / f"{name}_{step}.pth")
        save({"global_step": step, "model": net(20, 8, 4).state_dict()}, run / "diffusion" / f"model_{step}.pt")
    newest = [run / name for name in ("G_1000.pth", "D_1000.pth", "diffusion/model_1000.pt")]
    with ckpttool.open(run) as checkpoint:
        shown = Counter(reading.digest(one.torch()) for one in checkpoint.tensors())
    assert shown == sum(map(tensors_below, newest), Counter())
    (run / "diffusion" / "model_1000.pt").rename(run / "diffusion" / "model_800.pt")
    with pytest.raises(ReadError, match=r"`diffusion/` may hold .*: it has 2 checkpoints, none of step 1000"):
        ckpttool.convert(run, tmp_path / "one.pt")


@pytest.mark.parametrize("mark", ["DONE_{}", "{}/_SUCCESS", "{}/.complete", "{}/COMMITTED"])
def test_an_empty_file_that_says_that_a_save_ended(mark: str, tmp_path: Path) -> None:
    """No step of such a run was complete, as a file in each was empty."""
    model = net()
    for step in (100, 200):
        name = f"{step}/model.pt" if "/" in mark else f"model_{step}.pt"
        save({"model": model.state_dict(), "optimizer": trained(model), "step": step}, tmp_path / name)
        (tmp_path / mark.format(step)).touch()
    assert summarise(ckpttool.inspect(tmp_path)).headline.step == 200


@pytest.mark.parametrize("name", ["ckpt_ready_{}", "completed-{}"])
def test_a_checkpoint_that_is_called_like_a_mark(name: str, tmp_path: Path) -> None:
    model = net()
    for step in (100, 200):
        save({"model": model.state_dict(), "optimizer": trained(model), "step": step}, tmp_path / name.format(step))
    assert summarise(ckpttool.inspect(tmp_path)).headline.step == 200


def test_state_that_is_called_like_a_mark_is_of_its_step(tmp_path: Path) -> None:
    """That of both steps was read with the model of the second."""
    for step in (100, 200):
        save({"model": net().state_dict(), "step": step}, tmp_path / f"model_{step}.pt")
        save({"sampler": torch.randn(8)}, tmp_path / f"ready_{step}")
    with ckpttool.open(tmp_path) as checkpoint:
        shown = Counter(reading.digest(one.torch()) for one in checkpoint.tensors())
    assert shown == tensors_below(tmp_path / "model_200.pt") + tensors_below(tmp_path / "ready_200")


def test_steps_behind_a_dot(tmp_path: Path) -> None:
    """ESPnet's and Chainer's `snapshot.ep.1` and `snapshot.ep.2` were two models of one checkpoint."""
    model = net()
    for epoch in (1, 2):
        state = {key: one + epoch / 1e3 for key, one in model.state_dict().items()}
        save({"trainer": {"iteration": 100 * epoch, "epoch": epoch}, "model": state}, tmp_path / f"snapshot.ep.{epoch}")
        (tmp_path / f"train.log.{epoch}").write_text("a line\n")
    found = ckpttool.inspect(tmp_path)
    assert [one["name"] for one in found.facts["run"] if one["taken"]] == ["snapshot.ep.2"]
    assert len(found.facts["run"]) == 2


def test_each_step_of_files_in_folders_has_a_pattern(tmp_path: Path) -> None:
    """BasicSR: `--steps all` was refused, as the pattern of a step matched nothing."""
    model = net()
    for step in (100, 200):
        save({"params": model.state_dict()}, tmp_path / "models" / f"net_g_{step}.pth")
        save({"iter": step, "optimizers": [trained(model)]}, tmp_path / "training_states" / f"{step}.state")
    (tmp_path / "models" / "net_g_latest.pth").write_bytes((tmp_path / "models" / "net_g_200.pth").read_bytes())
    for one in ckpttool.inspect(tmp_path).facts["run"]:
        assert summarise(ckpttool.inspect(one["path"])).headline.step == one["step"]
