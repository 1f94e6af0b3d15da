"""Which part is what, in the shapes that training code really saves."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support import checkpoints
from support.upstream_samples import NAMES, opened

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Object, Part, Path, dotted
from ckpttool.catalogue.parts import _PATTERNS, assign, kind_of_key, matcher
from ckpttool.catalogue.values import stub_type
from ckpttool.errors import UsageError

W, ONE = torch.zeros(2, 2), torch.tensor(1.0)

MODEL = {"embed.weight": W, "layers.0.weight": W.clone(), "layers.0.bias": torch.zeros(2)}
ADAM = {
    "state": {0: {"step": ONE, "exp_avg": W, "exp_avg_sq": W}, 1: {"step": ONE, "exp_avg": W}},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
}
SGD_BEFORE_THE_FIRST_STEP = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
STEP_LR = {"step_size": 3, "base_lrs": [0.1], "last_epoch": 4, "_step_count": 5}
SCALER = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
RNG = {"python": (3, (1, 2), None), "torch": torch.zeros(16, dtype=torch.uint8)}
NAMESPACE = stub_type("argparse", "Namespace")()

# What was saved, and for some of its paths the part: (kind, root).
Expected = dict[Path, tuple[str, Path]]
STATES: dict[str, tuple[dict[Any, Any], Expected]] = {
    "state dict": (MODEL, {(key,): ("model", ()) for key in MODEL}),
    "state dict with telling buffers": (
        {**MODEL, "scaler": ONE, "step": ONE, "tokens_seen": ONE, "rng": ONE, "optimizer": ONE, "model": ONE},
        {(key,): ("model", ()) for key in (*MODEL, "scaler", "step", "tokens_seen", "rng", "optimizer", "model")},
    ),
    "state dict with extra state": (
        {**MODEL, "layers.0._extra_state": None},
        {("embed.weight",): ("model", ()), ("layers.0._extra_state",): ("model", ())},
    ),
    "telling buffers below a model": (
        {"model": {**MODEL, "scaler": ONE, "step": ONE}, "step": ONE, "scaler": SCALER},
        {
            ("model", "scaler"): ("model", ("model",)),
            ("model", "step"): ("model", ("model",)),
            ("step",): ("progress", ("step",)),
            ("scaler", "scale"): ("scaler", ("scaler",)),
        },
    ),
    "modules that are called like parts": (
        {"model": {"net": {"weight": W}, "module": {"weight": W}, "optimizer": {"embed": W}}, "step": 3},
        {("model", "net", "weight"): ("model", ("model",)), ("model", "optimizer", "embed"): ("model", ("model",))},
    ),
    "DCP tutorial": (
        {"app": {"model": MODEL, "optim": ADAM}},
        {
            ("app", "model", "embed.weight"): ("model", ("app", "model")),
            ("app", "optim", "state", 0, "exp_avg"): ("optimizer", ("app", "optim")),
            ("app", "optim", "param_groups", 0, "lr"): ("optimizer", ("app", "optim")),
        },
    ),
    "torchtitan": (
        {
            **MODEL,
            "optimizer": {"state.embed.weight.exp_avg": W, "param_groups.embed.weight.lr": 0.1},
            "lr_scheduler": STEP_LR,
            "dataloader": {"dp_rank_0": b"x", "world_size": 2},
            "train_state": {"step": ONE, "ntokens_seen": ONE},
        },
        {
            **{(key,): ("model", ()) for key in MODEL},
            ("optimizer", "state.embed.weight.exp_avg"): ("optimizer", ("optimizer",)),
            ("lr_scheduler", "last_epoch"): ("scheduler", ("lr_scheduler",)),
            ("dataloader", "dp_rank_0"): ("dataloader", ("dataloader",)),
            ("train_state", "step"): ("progress", ("train_state",)),
        },
    ),
    "a model's name beside its parameters": (
        {**MODEL, "model": "llama", "params": {"layers": 2}, "optimizer": ADAM},
        {
            **{(key,): ("model", ()) for key in MODEL},
            ("model",): ("other", ()),
            ("params", "layers"): ("other", ()),
        },
    ),
    "accelerate, the model's directory": ({"model": MODEL}, {("model", "embed.weight"): ("model", ("model",))}),
    "accelerate, the optimizer's directory": (
        {"optimizer": ADAM},
        {
            ("optimizer", "state", 0, "exp_avg"): ("optimizer", ("optimizer",)),
            ("optimizer", "param_groups", 0, "params"): ("optimizer", ("optimizer",)),
        },
    ),
    "Lightning": (
        {
            "epoch": 3,
            "global_step": 40,
            "pytorch-lightning_version": "2.5.0",
            "state_dict": MODEL,
            "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 3}}}},
            "callbacks": {"ModelCheckpoint": {"best_model_score": ONE, "monitor": "loss"}},
            "optimizer_states": [ADAM],
            "lr_schedulers": [STEP_LR],
            "hyper_parameters": {"lr": 0.1},
        },
        {
            ("epoch",): ("progress", ("epoch",)),
            ("global_step",): ("progress", ("global_step",)),
            ("state_dict", "embed.weight"): ("model", ("state_dict",)),
            ("loops", "fit_loop", "epoch_progress", "total", "ready"): ("progress", ("loops",)),
            ("callbacks", "ModelCheckpoint", "best_model_score"): ("other", ()),
            ("optimizer_states", 0, "state", 0, "exp_avg"): ("optimizer", ("optimizer_states",)),
            ("lr_schedulers", 0, "last_epoch"): ("scheduler", ("lr_schedulers",)),
            ("hyper_parameters", "lr"): ("other", ()),
            ("pytorch-lightning_version",): ("other", ()),
        },
    ),
    "model and ema": (
        {"model": MODEL, "ema": MODEL, "optimizer": SGD_BEFORE_THE_FIRST_STEP, "epoch": 3},
        {
            ("model", "embed.weight"): ("model", ("model",)),
            ("ema", "embed.weight"): ("model", ("ema",)),
            ("optimizer", "param_groups", 0, "lr"): ("optimizer", ("optimizer",)),
        },
    ),
    "timm": (
        {"arch": "vit", "state_dict": MODEL, "state_dict_ema": MODEL, "optimizer": ADAM, "amp_scaler": SCALER},
        {
            ("state_dict", "embed.weight"): ("model", ("state_dict",)),
            ("state_dict_ema", "embed.weight"): ("model", ("state_dict_ema",)),
            ("amp_scaler", "scale"): ("scaler", ("amp_scaler",)),
            ("arch",): ("other", ()),
        },
    ),
    "two optimizers, one model": (
        {"generator": MODEL, "optimizer_g": ADAM, "optimizer_d": ADAM},
        {
            ("generator", "embed.weight"): ("model", ("generator",)),
            ("optimizer_g", "state", 0, "exp_avg"): ("optimizer", ("optimizer_g",)),
            ("optimizer_d", "state", 0, "exp_avg"): ("optimizer", ("optimizer_d",)),
        },
    ),
    "an optimizer under any name": (
        {"model": MODEL, "muon": ADAM, "warmup": STEP_LR},
        {
            ("muon", "state", 0, "exp_avg"): ("optimizer", ("muon",)),
            ("warmup", "last_epoch"): ("scheduler", ("warmup",)),
        },
    ),
    "Megatron": (
        {"args": {"lr": 1}, "iteration": 3, "model": MODEL, "optimizer": ADAM, "opt_param_scheduler": {"num_steps": 3},
         "rng_state": [RNG]},
        {
            ("args", "lr"): ("other", ()),
            ("iteration",): ("progress", ("iteration",)),
            ("opt_param_scheduler", "num_steps"): ("scheduler", ("opt_param_scheduler",)),
            ("rng_state", 0, "torch"): ("rng", ("rng_state",)),
        },
    ),
    "DeepSpeed": (
        {"module": MODEL, "buffer_names": ["b"], "optimizer": ADAM, "lr_scheduler": None, "global_steps": 3},
        {
            ("module", "embed.weight"): ("model", ("module",)),
            ("buffer_names",): ("other", ()),
            ("global_steps",): ("progress", ("global_steps",)),
        },
    ),
    "nanoGPT": (
        {"model": MODEL, "optimizer": ADAM, "model_args": {"n_layer": 2}, "iter_num": 3, "best_val_loss": ONE},
        {
            ("model_args", "n_layer"): ("other", ()),
            ("iter_num",): ("progress", ("iter_num",)),
            # A tensor of such a name may as well be a buffer.
            ("best_val_loss",): ("other", ()),
        },
    ),
    "an optimizer alone": (
        ADAM,
        {("state", 0, "exp_avg"): ("optimizer", ()), ("param_groups", 0, "lr"): ("optimizer", ())},
    ),
    "a generator and a discriminator": (
        {"G": MODEL, "D": MODEL, "optG": ADAM, "optD": ADAM, "noise": W},
        {
            ("G", "embed.weight"): ("model", ("G",)),
            ("D", "embed.weight"): ("model", ("D",)),
            ("optG", "state", 0, "exp_avg"): ("optimizer", ("optG",)),
            ("optD", "param_groups", 0, "lr"): ("optimizer", ("optD",)),
            ("noise",): ("other", ()),
        },
    ),
    "several optimizers in a list and in a dict": (
        {"net": MODEL, "optimizers": [ADAM, ADAM], "opts": {"actor": ADAM, "critic": ADAM}, "sched": [STEP_LR]},
        {
            ("optimizers", 1, "state", 0, "exp_avg"): ("optimizer", ("optimizers", 1)),
            ("opts", "critic", "state", 0, "exp_avg"): ("optimizer", ("opts", "critic")),
            ("sched", 0, "last_epoch"): ("scheduler", ("sched",)),
        },
    ),
    "an actor with its statistics and its buffer": (
        {"actor": MODEL, "log_alpha": ONE, "obs_rms": {"mean": W, "var": W}, "replay": {"obs": W, "rew": W}},
        {
            ("actor", "embed.weight"): ("model", ("actor",)),
            ("log_alpha",): ("other", ()),
            ("obs_rms", "mean"): ("other", ()),
            ("replay", "obs"): ("dataloader", ("replay",)),
        },
    ),
    "models deep in a best state and around": (
        {"best_state": {"model": MODEL, "ema": MODEL}, "models": {"g": {"params": MODEL}, "d": {"params": MODEL}}},
        {
            ("best_state", "model", "embed.weight"): ("model", ("best_state", "model")),
            ("best_state", "ema", "embed.weight"): ("model", ("best_state", "ema")),
            ("models", "g", "params", "embed.weight"): ("model", ("models", "g", "params")),
        },
    ),
    "arguments called opt, a state dict of scalars": (
        {"model": MODEL, "opt": NAMESPACE, "state_dict": {"itr": 3}},
        {("opt",): ("other", ()), ("state_dict", "itr"): ("progress", ("state_dict",))},
    ),
    "settings beside a state dict": (
        {"weights": {"state_dict": MODEL, "metadata": {"width": 6}}, "net": {"module": MODEL, "updates": 3}},
        {
            ("weights", "state_dict", "embed.weight"): ("model", ("weights",)),
            ("weights", "metadata", "width"): ("other", ("weights", "metadata")),
            ("net", "updates"): ("model", ("net",)),
        },
    ),
    "extra state of a module": (
        {"model": {"a": MODEL, "b": {"_extra_state": 3}}},
        {("model", "b", "_extra_state"): ("model", ("model",))},
    ),
    "counters around an optimizer": (
        {"optim": {"training_step": 100, "decay_step": 7, "optimizer": ADAM}, "model": MODEL},
        {
            ("optim", "training_step"): ("progress", ("optim", "training_step")),
            ("optim", "decay_step"): ("progress", ("optim", "decay_step")),
            ("optim", "optimizer", "state", 0, "exp_avg"): ("optimizer", ("optim",)),
        },
    ),
    "counters of an optimizer of one's own": (
        {"optimizer": {"m": {"w": W}, "v": {"w": W}, "step": 3}, "model": MODEL},
        {("optimizer", "step"): ("optimizer", ("optimizer",))},
    ),
    "an optimizer and its scheduler in a file called optimizer": (
        {"optimizer": {"optimizer": ADAM, "scheduler": STEP_LR, "step": 3, "opt": NAMESPACE}, "model": MODEL},
        {
            ("optimizer", "optimizer", "state", 0, "exp_avg"): ("optimizer", ("optimizer", "optimizer")),
            ("optimizer", "scheduler", "last_epoch"): ("scheduler", ("optimizer", "scheduler")),
            ("optimizer", "step"): ("progress", ("optimizer", "step")),
        },
    ),
    "the best weights in a dict of one's own": (
        {"model": MODEL, "best_state": dict(MODEL), "best_loss": 0.5, "optimizer": ADAM},
        {("best_state", "embed.weight"): ("model", ("best_state",)), ("best_loss",): ("progress", ("best_loss",))},
    ),
    "a normaliser that is a module": (
        {"policy": MODEL, "norm": {"running_mean": W, "running_variance": W, "current_count": ONE}, "optimizer": ADAM},
        {("norm", "running_mean"): ("other", ("norm",)), ("policy", "embed.weight"): ("model", ("policy",))},
    ),
    "arguments and a history that are not optimizers": (
        {"model": MODEL, "opt": {"lr": 0.1, "batch": 8}, "optimizer_history": [{"num_updates": 3, "best": {"a": 1}}]},
        {
            ("opt", "lr"): ("other", ()),
            ("optimizer_history", 0, "num_updates"): ("progress", ("optimizer_history",)),
        },
    ),
    "an optimizer without state": (
        {"model": MODEL, "optimizer": {"param_groups": [{"lr": 0.1}]}, "opts": {"a": SGD_BEFORE_THE_FIRST_STEP}},
        {
            ("optimizer", "param_groups", 0, "lr"): ("optimizer", ("optimizer",)),
            ("opts", "a", "param_groups", 0, "lr"): ("optimizer", ("opts", "a")),
        },
    ),
    "loaders of ranks": (
        {"model": MODEL, "loader_state_0": {"it": 7, "reader": 0}},
        {("loader_state_0", "it"): ("dataloader", ("loader_state_0",))},
    ),
    "generators alone": (
        {"torch": torch.get_rng_state(), "python": random.getstate(), "cuda": []},
        {("torch",): ("rng", ()), ("python",): ("rng", ()), ("cuda",): ("rng", ())},
    ),
    "generators under any name": (
        {"model": MODEL, "extra": {"seeds": [torch.get_rng_state()], "np": np.random.get_state()}, "last": 3},
        {("extra", "seeds", 0): ("rng", ("extra",)), ("extra", "np"): ("rng", ("extra",))},
    ),
    "a flat optimizer": (
        {"state.0.exp_avg": W, "state.0.step": ONE, "state.1.exp_avg": W},
        {("state.0.exp_avg",): ("optimizer", ()), ("state.0.step",): ("optimizer", ())},
    ),
    "the state of an optimizer alone": (ADAM["state"], {(0, "exp_avg"): ("optimizer", ())}),
    "a plateau and a sequence": (
        {
            "model": MODEL,
            "a": {"best": 1.0, "patience": 3, "num_bad_epochs": 0},
            "b": {"_schedulers": [STEP_LR], "last_epoch": 4},
        },
        {("a", "patience"): ("scheduler", ("a",)), ("b", "last_epoch"): ("scheduler", ("b",))},
    ),
    "a model of any names beside a generator": (
        {"splats": {"means": W, "quats": W}, "g": torch.get_rng_state()},
        {("splats", "means"): ("model", ("splats",)), ("g",): ("rng", ("g",))},
    ),
    "parameters of any names beside a counter": (
        {"theta": W, "step": 3},
        {("theta",): ("model", ()), ("step",): ("progress", ("step",))},
    ),
    "experience beside a counter": (
        {"obs": W, "actions": W, "memory": {"a": W}, "step": 3},
        {("obs",): ("other", ()), ("memory", "a"): ("dataloader", ("memory",))},
    ),
    "integers beside a generator": (
        {"order": torch.arange(3), "g": torch.get_rng_state()},
        {("order",): ("other", ())},
    ),
    "a tensor inside an object": (
        {"lost": {"pair": (W, "second")}, "g": torch.get_rng_state()},
        {("lost", "pair"): ("other", ())},
    ),
    "what SpeechBrain anneals": (
        {"a": {"hyperparam_value": 0.1, "metric_values": [1.0], "current_patient": 0}, "model": MODEL},
        {("a", "metric_values"): ("scheduler", ("a",))},
    ),
    "a memory of skrl": ({"states": W, "actions": W}, {("states",): ("dataloader", ())}),
    "integers alone": ({"order": torch.arange(3)}, {("order",): ("other", ())}),
    "a scheduler alone": (STEP_LR, {("last_epoch",): ("scheduler", ())}),
    "values alone": ({"a": 1, "b": {"c": 2}}, {("a",): ("other", ()), ("b", "c"): ("other", ())}),
    "nothing": ({}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("state", "expected"), STATES.values(), ids=STATES)
def test_shapes_that_training_code_saves(state: dict[Any, Any], expected: Expected) -> None:
    catalogue = checkpoints.state(state)
    assign(catalogue)
    found = {path: catalogue.entries[path].part for path in expected}
    assert found == {path: Part(*part) for path, part in expected.items()}


@pytest.mark.parametrize("state", [s for s, _ in STATES.values()], ids=STATES)
def test_a_part_holds_what_is_below_its_root_and_every_entry_has_one(state: dict[Any, Any]) -> None:
    catalogue = checkpoints.state(state)
    assign(catalogue)
    for path, entry in catalogue.entries.items():
        assert path[: len(entry.part.root)] == entry.part.root
    found = parts.parts(catalogue)
    assert len(set(found)) == len(found)
    kinds = [part.kind for part in found]
    assert kinds == sorted(kinds, key=parts.KINDS.index)


ROOTS = {"model": "model", "optim": "optimizer", "optimizer": "optimizer", "scheduler": "scheduler", "rng": "rng"}


@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str) -> None:
    with opened(name) as source:
        assign(source.catalogue)
        trained = any(path[:1] and path[0] in ROOTS and len(path) > 1 for path in source.catalogue.entries)
        for path, entry in source.catalogue.entries.items():
            if not trained:
                # What is not training state is a model as a whole, if there is a tensor in it.
                assert entry.part.root == () or isinstance(entry, Object) or entry.part.kind == "rng"
            elif path[0] in ROOTS:
                assert entry.part == Part(ROOTS[str(path[0])], path[:1])
            elif path == ("step",):
                assert entry.part.kind == "progress"


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("optim_state_dict", "optimizer"), ("optimizer_0", "optimizer"), ("opt", "optimizer"), ("adamw", None),
        ("lr_scheduler", "scheduler"), ("noise_schedule", None), ("rng_states", "rng"), ("cuda_rng_state", "rng"),
        ("train_dataloader", "dataloader"), ("sampler", "dataloader"), ("grad_scaler", "scaler"), ("epoch", "progress"),
        ("consumed_train_samples", "progress"), ("stepper", None), ("Model", "model"), ("ema_model", "model"),
        ("model_args", None), ("remodel", None), ("config", None), ("", None), (0, None), (("model",), None),
    ],
)  # fmt: skip
def test_keys(key: object, kind: str | None) -> None:
    assert kind_of_key(key) == kind


# What `--only` and `--drop` mean --------------------------------------------------------------------------------------


def named(*names: str, state: Any = None) -> list[str]:
    catalogue = checkpoints.state(STATES["model and ema"][0] if state is None else state)
    assign(catalogue)
    wanted = matcher(names, catalogue)
    return [dotted(p.root) for p in parts.parts(catalogue) if wanted(p)]


def test_a_part_is_named_by_its_root_or_by_its_kind() -> None:
    assert named("model") == ["model"]
    assert named("ema") == ["ema"]
    assert named("ema", "optimizer") == ["ema", "optimizer"]
    assert named("optimizer", state={"a": {"model": MODEL, "optim": ADAM}}) == ["a.optim"]
    assert named("a.optim", state={"a": {"model": MODEL, "optim": ADAM}}) == ["a.optim"]
    assert named("model", state=MODEL) == [""]
    assert named("optimizer", state=STATES["two optimizers, one model"][0]) == ["optimizer_g", "optimizer_d"]


def test_a_part_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="there is no part `rng`") as caught:
        named("rng")
    assert caught.value.hint == "the parts are `model`, `ema`, `optimizer`, `epoch`"


def test_a_key_with_dots_is_what_all_patterns_say() -> None:
    """Of such keys, only what is behind the last dot is looked at."""
    words = ["optim", "opt", "lr", "rng", "model", "state", "step", "scheduler", "train", "data", "", "1"]
    pairs = ["_".join(pair) for pair in product(words, words)]
    for key in (above + last for last in pairs for above in ("a.", "a.b_", "optim.x_", "\n.", "rng_1.\n_", ".")):
        expected = next((kind for kind, pattern in _PATTERNS if pattern.fullmatch(key)), None)
        assert kind_of_key(key) == expected, key


def test_what_lies_in_a_list_is_named_by_its_place() -> None:
    catalogue = checkpoints.state([MODEL, ADAM, 3])  # type: ignore[arg-type]
    assign(catalogue)
    chosen = matcher(["0"], catalogue)
    assert {part.kind for part in parts.parts(catalogue) if chosen(part)} == {"model"}
