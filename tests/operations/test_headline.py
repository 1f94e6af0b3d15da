"""The headline of inspect: parameters, dtypes, class, layers, optimizers, compared with what torch counts and has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from support.cli import run
from support.hang import no_hang
from support.paths import CHECKPOINTS
from torch import nn

import ckpttool
from ckpttool.analysis.describe.headline import Headline, parameters
from ckpttool.analysis.describe.optimizers import OptimizerSummary
from ckpttool.analysis.describe.summary import head
from ckpttool.catalogue.models import models

CLASSES = {
    name: c for name, c in vars(torch.optim).items() if isinstance(c, type) and name not in ("Optimizer", "LBFGS")
}


def headline(path: Path | str) -> Headline:
    return head(ckpttool.inspect(path), None)[0]


def saved(path: Path, **tree: Any) -> Path:
    torch.save(tree, path)
    return path


def stepped(kind: Any, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **options)
    for parameter in model.parameters():
        dense = torch.ones_like(parameter)
        parameter.grad = dense.to_sparse() if kind is torch.optim.SparseAdam else dense
    optimizer.step()
    return optimizer


class Vision(nn.Module):
    """Parameters of two dtypes, buffers of all kinds and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(11))
        self.head = nn.Linear(8, 8).bfloat16()
        self.tied = nn.Linear(8, 8).bfloat16()
        self.tied.weight = self.head.weight
        self.register_buffer("inv_freq", torch.ones(4))
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool))
        self.register_buffer("position_ids", torch.arange(64))


def test_parameters_are_those_of_torch(tmp_path: Path) -> None:
    model = Vision()
    optimizer = stepped(torch.optim.AdamW, model)
    averaged = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    tree = {"model": model.state_dict(), "ema_model": averaged, "optim": optimizer.state_dict(), "rng": rng, "step": 7}
    path = saved(tmp_path / "a.pt", **tree)
    found = headline(path)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (found.layers, found.step, found.architecture) == (11, 7, None)
    count = found.parameters
    assert (
        str(found) == f"{count:,} parameters, float32 and bfloat16, 11 layers, AdamW state float32 and bfloat16, step 7"
    )
    document = json.loads(run("inspect", str(path), "--json").stdout)
    assert {key: document[key] for key in ("parameters", "dtypes", "layers", "architecture", "step")} == {
        "parameters": count,
        "dtypes": ["float32", "bfloat16"],
        "layers": 11,
        "architecture": None,
        "step": 7,
    }
    assert [part["part"] for part in document["parts"]] == ["model", "model", "optimizer", "rng", "progress"]
    (one,) = document["optimizers"]
    assert one["name"] == "AdamW"
    moments = sum(state["exp_avg"].nbytes for state in optimizer.state.values())
    assert sum(state["payload_bytes"] for state in one["state"] if state["kind"] == "exp_avg") == moments


@pytest.mark.parametrize("name", ["hf/llama", "hf/gpt2"])
def test_the_class_is_that_of_the_config(name: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name / "ckpt")
    model.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        found = headline(path)
        assert found.parameters == sum(p.numel() for p in model.parameters())
        assert (found.architecture, found.layers) == (type(model).__name__, model.config.num_hidden_layers)
    dtype = str(model.dtype).removeprefix("torch.")
    line = f"  {found.parameters:,} parameters, {dtype}, {type(model).__name__}, {found.layers} layers"
    assert line in run("inspect", str(tmp_path)).stdout.splitlines()


def test_a_rank_checkpoint_says_how_many_ranks() -> None:
    assert str(headline(CHECKPOINTS / "dcp" / "hsdp_w4" / "ckpt")).endswith("AdamW state float32, 4 ranks, step 3")


@pytest.mark.parametrize("name", ["dcp/hsdp_w4", "dcp/fsdp2_w4", "run/torchtitan_w2"])
def test_a_tied_weight_that_dcp_stores_twice_is_counted_once(name: str, tmp_path: Path) -> None:
    """The optimizer has moments of each parameter once; a copy that differs is a weight of its own."""
    path = CHECKPOINTS / name / "ckpt"
    catalogue = ckpttool.inspect(path)
    (moments,) = (o for o in headline(path).optimizers)
    assert headline(path).parameters == next(s.numel for s in moments.state if s.kind == "exp_avg")
    assert [w.tensor.rpartition(".")[0][-7:] for w in catalogue.warnings if w.tensor] == ["lm_head"]
    assert sum("stored twice" in line for line in run("inspect", str(path)).stdout.splitlines()) == 1
    ckpttool.convert(path, tmp_path / "a.pt")
    state = torch.load(tmp_path / "a.pt", weights_only=False)
    model = state.get("model", state)
    model["lm_head.weight"] = model["lm_head.weight"] + 1
    torch.save(state, tmp_path / "b.pt")
    ckpttool.convert(tmp_path / "b.pt", tmp_path / "changed", to="dcp")
    found = headline(tmp_path / "changed")
    # It is not a parameter of the optimizer, which lists the others.
    assert found.parameters == headline(path).parameters


@pytest.mark.parametrize("drop", ["", "optimizer"])
def test_the_same_weights_are_counted_alike_in_every_form(drop: str, tmp_path: Path) -> None:
    """With and without the optimizer, whose parameters torch counts; the tied weight is stored twice in all of them."""
    sample = CHECKPOINTS / "dcp/fsdp2_w4"
    state = torch.load(sample / "reference.pt", weights_only=False)["optim"]["state"].values()
    expected = sum(one["exp_avg"].numel() for one in state)
    forms = {"dcp": "dcp", "torch": "a.pt", "safetensors": "files", "fsdp1": "ranks"}
    for form, name in forms.items():
        ckpttool.convert(sample / "ckpt", tmp_path / name, to=form, drop=[drop] if drop else [])
        assert headline(tmp_path / name).parameters == expected, form


@pytest.mark.parametrize("name", ["hf/llama", "hf/gpt2"])
def test_both_names_of_a_tied_weight_in_a_file_without_checksums(name: str, tmp_path: Path) -> None:
    """As safetensors itself writes them; the model counts its parameters."""
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name / "ckpt")
    with torch.no_grad():
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
        expected = sum(p.numel() for p in model.parameters())
        state = {name: value.clone() for name, value in model.state_dict().items()}
        head = next(name for name in state if name.endswith("lm_head.weight"))
        safetensors.torch.save_file(state, tmp_path / "a.safetensors")
        assert headline(tmp_path / "a.safetensors").parameters == expected
        state[head][-1, -1] += 1
        safetensors.torch.save_file(state, tmp_path / "b.safetensors")
        assert headline(tmp_path / "b.safetensors").parameters == expected + state[head].numel()
        # Zeros are alike in all tensors that begin with them.
        safetensors.torch.save_file(
            {key: torch.zeros_like(one) for key, one in state.items()}, tmp_path / "c.safetensors"
        )
        assert headline(tmp_path / "c.safetensors").parameters == expected + state[head].numel()


def test_a_head_with_other_bytes_is_not_tied(tmp_path: Path) -> None:
    weight = torch.randn(9, 4)
    names = ("embed.weight", "lm_head.weight")
    tied = saved(tmp_path / "tied.pt", **dict(zip(names, (weight, weight.clone()), strict=True)))
    apart = saved(tmp_path / "apart.pt", **dict(zip(names, (weight, weight + 1), strict=True)))
    alike = saved(
        tmp_path / "alike.pt", **dict(zip(("up.weight", "down.weight"), (weight, weight.clone()), strict=True))
    )
    assert [headline(path).parameters for path in (tied, apart, alike)] == [36, 72, 72]


def test_what_is_unknown_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2, 3, dtype=torch.float16)}, path)
    assert str(headline(path)) == "6 parameters, float16"
    (tmp_path / "config.json").write_text('{"architectures": [3], "num_hidden_layers": "many"}')
    assert str(headline(path)) == "6 parameters, float16"
    safetensors.torch.save_file({f"layers.{i}.w": torch.ones(2) for i in (0, 1, 3)}, path)
    assert headline(path).layers is None
    assert str(headline(saved(tmp_path / "rng.pt", rng=torch.get_rng_state()))) == ""


def test_a_model_that_lies_in_two_files_is_counted_once(tmp_path: Path) -> None:
    first, second = Vision(), Vision()
    own = sum(parameter.numel() for parameter in first.parameters())
    for name, state in (("a", first.state_dict()), ("b", {"state_dict": first.state_dict()})):
        torch.save(state, tmp_path / f"{name}.pth")
    assert headline(tmp_path).parameters == own  # without an optimizer the checksums tell
    torch.save(second.state_dict(), tmp_path / "b.pth")
    assert headline(tmp_path).parameters == 2 * own
    torch.save(stepped(torch.optim.Adam, second).state_dict(), tmp_path / "optimizer.pth")
    assert headline(tmp_path).parameters == 2 * own  # it fits both


def test_two_models_of_the_same_bytes_with_an_optimizer_each_are_two(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    state = {name: {key: torch.zeros_like(value) for key, value in model.state_dict().items()} for name in ("G", "D")}
    adam = stepped(torch.optim.Adam, model).state_dict()
    assert headline(saved(tmp_path / "a.pt", **state, optG=adam, optD=adam)).parameters == 18


def test_what_accelerate_saves_beside_the_model_is_not_counted(tmp_path: Path) -> None:
    model, other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(other.state_dict(), tmp_path / "custom_checkpoint_0.pkl")
    torch.save(stepped(torch.optim.AdamW, model).state_dict(), tmp_path / "optimizer.bin")
    torch.save({"last_epoch": 1, "_step_count": 2, "base_lrs": [0.1]}, tmp_path / "scheduler.bin")
    found, parts = head(ckpttool.inspect(tmp_path), None)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert [one for part in parts for one in part.optimizer_of] == ["model"]


def test_the_step_is_told_by_the_names_that_scripts_have_for_it(tmp_path: Path) -> None:
    for name in ("iter_num", "iterations", "training_step", "trained_steps", "num_updates", "update", "ite", "it"):
        path = saved(tmp_path / "a.pt", model=nn.Linear(2, 3).state_dict(), **{name: 400})
        assert headline(path).step == 400, name
    directory = tmp_path / "step_100"
    directory.mkdir()
    saved(directory / "model.pt", **nn.Linear(2, 3).state_dict())
    saved(directory / "state.pt", iter_num=400)
    assert headline(directory).step == 100  # of micro-batches, there may be several in a step


def test_weights_of_integers_are_parameters(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {"a.weight": torch.ones(4, 4, dtype=torch.int8), "mask": torch.ones(9, dtype=torch.uint8)}
    safetensors.torch.save_file(tensors, path)
    assert [t.name for t in parameters(models(ckpttool.inspect(path)))] == ["a.weight"]


def test_long_names_take_no_time(tmp_path: Path) -> None:
    names = ["weight_" * 60_000 + ".", "layers" * 60_000 + ".x", "_inv_freq" * 40_000 + "!"]
    safetensors.torch.save_file({name: torch.ones(2, dtype=torch.int8) for name in names}, tmp_path / "m.safetensors")
    with no_hang():
        assert headline(tmp_path / "m.safetensors").layers is None


@pytest.mark.parametrize("name", CLASSES)
def test_optimizers_of_torch_are_recognised(name: str, tmp_path: Path) -> None:
    model = nn.Linear(5, 3, bias=False)
    state = stepped(CLASSES[name], model, lr=0.25).state_dict()
    (found,) = headline(saved(tmp_path / "a.pt", model=model.state_dict(), optim=state)).optimizers
    kinds = [key for key, value in state["state"].get(0, {}).items() if isinstance(value, torch.Tensor)]
    assert [s.kind for s in found.state] == kinds
    if name == "SparseAdam":  # which has the state of Adam, and no key of its own
        assert (found.name, str(found)) == (None, "Adam state (exp_avg, exp_avg_sq) float32")
    else:
        assert found.name == name
    left = {*state["param_groups"][0]} - {"lr", "weight_decay", "params"}
    assert {*found.defaults} == left, "every hyper-parameter but these has the default of its class"


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "NAdam"])
def test_what_is_no_default_is_not_called_one(name: str, tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    optimizer = stepped(CLASSES[name], model, weight_decay=0.5)
    for key, value in optimizer.param_groups[0].items():
        if key not in ("params", "decoupled_weight_decay"):
            optimizer.param_groups[0][key] = 0.123 if value is not None else True
    (found,) = headline(saved(tmp_path / "a.pt", model=model.state_dict(), optim=optimizer.state_dict())).optimizers
    assert {*found.defaults} <= {"decoupled_weight_decay"}


def test_groups_of_one_class_need_not_be_alike(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    groups = [{"params": [model.weight], "eps": 1e-4}, {"params": [model.bias], "maximize": True}]
    optimizer = torch.optim.Adam(groups)
    (found,) = headline(saved(tmp_path / "a.pt", optim=optimizer.state_dict())).optimizers
    assert str(found) == "Adam without state"
    assert not {"eps", "maximize"} & {*found.defaults}
    assert {"betas", "amsgrad", "fused"} <= {*found.defaults}


def test_an_optimizer_of_muon_and_adam_is_none_of_both(tmp_path: Path) -> None:
    """As scripts join them: it was called Adam."""
    adam = stepped(torch.optim.Adam, nn.Linear(5, 3)).state_dict()
    muon = {"params": [2], "use_muon": True, "momentum": 0.95}
    state = {**adam["state"], 2: {"momentum_buffer": torch.ones(3, 5)}}
    optimizer = {"state": state, "param_groups": [*adam["param_groups"], muon]}
    (found,) = headline(saved(tmp_path / "a.pt", optim=optimizer)).optimizers
    assert str(found) == "optimizer state (exp_avg, exp_avg_sq, momentum_buffer) float32"


def test_classes_before_torch_27_do_not_tell_adam_from_adamw(tmp_path: Path) -> None:
    state = stepped(torch.optim.AdamW, nn.Linear(5, 3)).state_dict()
    del state["param_groups"][0]["decoupled_weight_decay"]
    (found,) = headline(saved(tmp_path / "a.pt", optim=state)).optimizers
    assert isinstance(found, OptimizerSummary)
    assert str(found) == "Adam state (exp_avg, exp_avg_sq) float32"
    assert {"betas", "eps", "amsgrad"} <= {*found.defaults}


@pytest.mark.parametrize(("sample", "count"), [("fsdp1_flat_w2", 1_008), ("fsdp1_local_w2", None)])
def test_flat_parameters_are_counted_once_or_not_at_all(sample: str, count: int | None) -> None:
    """With `use_orig_params` one rank's views of them lie beside, and both hold padding."""
    assert headline(CHECKPOINTS / "rank" / sample / "ckpt").parameters == count


@pytest.mark.parametrize("trained_rows", [0, 20])
def test_a_model_that_ties_no_words_has_a_head_of_its_own(trained_rows: int, tmp_path: Path) -> None:
    """A head that began as a copy, and of which a few rows were trained, or none yet: transformers counts both."""
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / "hf/llama/ckpt", tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        model.lm_head.weight[40 : 40 + trained_rows] += 0.1
    model.save_pretrained(tmp_path)
    assert headline(tmp_path).parameters == sum(p.numel() for p in model.parameters())
    assert "stored twice" not in run("inspect", str(tmp_path)).stdout


def test_a_weight_that_is_stored_twice_is_said_once(tmp_path: Path) -> None:
    words = torch.randn(40, 8)
    torch.save({"model.embed_tokens.weight": words, "lm_head.weight": words.clone()}, tmp_path / "a.pt")
    said = [
        line
        for line in run("inspect", str(tmp_path / "a.pt")).stdout.splitlines()
        if "stored" in line and line[0] == "!"
    ]
    assert len(said) == 1 and said[0].startswith("! `lm_head.weight` is `model.embed_tokens.weight`, stored twice"), (
        said
    )
    assert headline(tmp_path / "a.pt").parameters == words.numel()
