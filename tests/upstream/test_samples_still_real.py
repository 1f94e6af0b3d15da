"""The samples of run directories hold what their references say, as torch and safetensors read them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.paths import CHECKPOINTS, samples_of
from support.upstream_readers import assert_same, dcp_whole, expected_of, trusted

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

RUNS = samples_of("run")
MOMENTS = ("exp_avg", "exp_avg_sq")


def ckpt(sample: str) -> Path:
    """The root of a run."""
    return CHECKPOINTS / sample / "ckpt"


def by_rank(sample: str, pattern: str) -> list[Any]:
    """The files of all ranks, in the order of the ranks."""
    paths = sorted(ckpt(sample).glob(pattern))
    assert len(paths) == int(sample[-1]), paths
    return [trusted(path) for path in paths]


def joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The pieces of the ranks one after the other along their first dimension, or the one that all have."""
    if not hasattr(pieces[0], "_local_tensor"):
        return pieces[0]
    return torch.cat([piece._local_tensor for piece in pieces])


def require_flat(pieces: list[torch.Tensor], whole: torch.Tensor) -> None:
    """Pieces of one dimension that are the whole in a row."""
    assert torch.equal(torch.cat([piece.flatten() for piece in pieces]), whole.flatten())


@pytest.mark.parametrize("sample", RUNS)
def test_a_reference_has_model_notes_and_moments(sample: str) -> None:
    whole = expected_of(sample)
    assert whole["model"] and set(whole["notes"]) & {"model"}
    for name, state in whole.get("optim", {"state": {}})["state"].items():
        assert name in whole["model"]
        if "exp_avg" in state:
            assert state["exp_avg"].shape == whole["model"][name].shape
            assert not torch.equal(state["exp_avg"], state["exp_avg_sq"])


@pytest.mark.parametrize(
    ("sample", "part", "prefix", "optimizer"),
    [
        ("run/lightning_w2", "checkpoints/epoch=0-step=3.ckpt", "model.model.", "optimizer_0.state.model."),
        ("run/fabric_w2", "", "net.", "adam.state."),
        ("run/composer_w2", "ep0-ba3", "state.model.", "state.optimizers.AdamW.state."),
        ("run/torchtitan_w2", "step-3", "", "optimizer.state."),
        ("run/accelerate_fsdp1_local_w2", "optimizer_0", None, "optimizer.state."),
        ("run/accelerate_fsdp1_sharded_w2", "optimizer_0", None, "optimizer.state."),
        ("run/accelerate_fsdp2_sharded_w2", "optimizer_0", None, "optimizer.state."),
        ("run/accelerate_fsdp1_sharded_w2", "pytorch_model_fsdp_0", "model.", None),
        ("run/accelerate_fsdp2_sharded_w2", "pytorch_model_fsdp_0", "model.", None),
        ("run/trainer_fsdp2_w2", "checkpoint-4/pytorch_model_fsdp_0", "model.", None),
        ("run/trainer_fsdp2_w2", "checkpoint-4/optimizer_0", None, "optimizer.state."),
    ],
)
def test_dcp_parts(sample: str, part: str, prefix: str | None, optimizer: str | None) -> None:
    found = dict(leaves(dcp_whole(ckpt(sample) / part)))
    whole = expected_of(sample)
    if prefix is not None:
        for name, value in whole["model"].items():
            assert_same(found[prefix + name], value)
    if optimizer is not None:
        for name, state in whole["optim"]["state"].items():
            for key, value in state.items():
                assert_same(found[f"{optimizer}{name}.{key}"], value)


def leaves(tree: Any, at: str = "") -> Any:
    """The tensors of a tree, by dotted names."""
    if isinstance(tree, torch.Tensor):
        yield at, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{at}.{key}" if at else str(key))


@pytest.mark.parametrize(
    ("sample", "model", "optimizer"),
    [
        ("run/accelerate_fsdp2_rankfiles_w4", "pytorch_model_fsdp_0_rank*.bin", "optimizer_0_rank*.bin"),
        ("run/torch_checkpointing_w2", "step-3/model_*.pt", "step-3/optimizer_*.pt"),
        ("run/verl_fsdp2_w2", "global_step_3/actor/model_*.pt", "global_step_3/actor/optim_*.pt"),
        ("run/verl_fsdp1_w2", "global_step_3/actor/model_*.pt", None),
    ],
)
def test_rank_files_of_dtensors(sample: str, model: str, optimizer: str | None) -> None:
    whole, models = expected_of(sample), by_rank(sample, model)
    for name, value in whole["model"].items():
        assert_same(joined([one[name] for one in models]), value)
    if optimizer is None:
        return
    files = by_rank(sample, optimizer)
    names = [name for group in whole["optim"]["param_groups"] for name in group["params"]]
    for number, name in enumerate(names):
        for key in MOMENTS:
            if "state" not in files[0]:
                pieces = [one[f"state.{name}.{key}"] for one in files]
            else:
                states = [one["state"] for one in files]
                pieces = [state[name if name in state else number][key] for state in states]
            assert_same(joined(pieces), whole["optim"]["state"][name][key])


@pytest.mark.parametrize(
    ("sample", "pattern", "key"),
    [
        ("run/dinov2_w2", "model_0000003.rank_*.pth", "model"),
        ("run/accelerate_fsdp1_local_w2", "pytorch_model_fsdp_rank*.bin", None),
    ],
)
def test_local_pieces(sample: str, pattern: str, key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    # Its pieces are of no use here, and it wants a process group as large as the one that saved it.
    monkeypatch.setattr(ShardedTensor, "__setstate__", lambda self, state: None)
    files = [one[key] if key else one for one in by_rank(sample, pattern)]
    for name, value in expected_of(sample)["model"].items():
        if value.is_floating_point():
            require_flat([one[name] for one in files], value)


@pytest.mark.parametrize(
    ("sample", "model", "optimizer"),
    [
        ("run/accelerate_ddp_w2", "model.safetensors", "optimizer.bin"),
        (
            "run/accelerate_named",
            "checkpoints/checkpoint_1/pytorch_model.bin",
            "checkpoints/checkpoint_1/optimizer.bin",
        ),
        ("run/trainer", "checkpoint-4/model.safetensors", "checkpoint-4/optimizer.pt"),
        ("run/trainer_w2", "checkpoint-4/model.safetensors", "checkpoint-4/optimizer.pt"),
    ],
)
def test_whole_files(sample: str, model: str, optimizer: str) -> None:
    whole, path = expected_of(sample), ckpt(sample) / model
    found = load_file(path) if path.suffix == ".safetensors" else trusted(path)
    plain = {name.removeprefix("module."): value for name, value in found.items()}
    assert whole["model"].keys() - plain.keys() <= {"lm_head.weight"}
    for name, value in plain.items():
        assert_same(value, whole["model"][name])
    state = trusted(ckpt(sample) / optimizer)["state"]
    names = [name for group in whole["optim"]["param_groups"] for name in group["params"]]
    for number, name in enumerate(names):
        assert_same(state[number], whole["optim"]["state"][name])


def test_generators_by_rank() -> None:
    for sample in (name for name in RUNS if name.startswith("run/accelerate")):
        for rank, expected in enumerate(expected_of(sample)["rng_by_rank"]):
            path = next(iter(sorted(ckpt(sample).rglob(f"random_states_{rank}.pkl"), reverse=True)))
            found = trusted(path)
            assert_same(found["random_state"], expected["python"])
            assert_same(found["numpy_random_seed"], expected["numpy"])
            assert_same(found["torch_manual_seed"], expected["torch"])


def test_olmo_core_is_read_once_its_class_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from torch.distributed.checkpoint import filesystem

    home = "olmo_core.distributed.checkpoint.filesystem"
    for cut in range(4):
        monkeypatch.setitem(sys.modules, home.rsplit(".", cut)[0] if cut else home, filesystem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dict(leaves(dcp_whole(ckpt("run/olmo_core_w2") / "step3/model_and_optim")))
    whole = expected_of("run/olmo_core_w2")
    for name, value in whole["model"].items():
        assert_same(found[f"model.{name}"], value)
    for name, state in whole["optim"]["state"].items():
        for key, value in state.items():
            assert_same(found[f"optim.state.{name}.{key}"], value)


def test_raw_optimizer_of_dinov2(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    monkeypatch.setattr(ShardedTensor, "__setstate__", lambda self, state: None)
    states = [one["optimizer"]["state"] for one in by_rank("run/dinov2_w2", "model_0000003.rank_*.pth")]
    optim = expected_of("run/dinov2_w2")["optim"]
    # Ids go by the groups of the run, which rank 0 and the reference have in the same order.
    names = [name for group in optim["param_groups"] for name in group["params"]]
    for number, name in enumerate(names):
        for key in MOMENTS:
            pieces = [state[number][key] for state in states if number in state]
            require_flat(pieces, optim["state"][name][key])


def test_sharded_tensors_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    monkeypatch.setattr(ShardedTensor, "__setstate__", lambda self, state: setattr(self, "_local_shards", state[0]))
    sample = "run/accelerate_fsdp1_rankfiles_w2"
    whole = expected_of(sample)
    models, optims = by_rank(sample, "pytorch_model_fsdp_0_rank*.bin"), by_rank(sample, "optimizer_0_rank*.bin")
    for name, value in whole["optim"]["state"].items():
        require_flat([shard.tensor for one in models for shard in one[name]._local_shards], whole["model"][name])
        for key in MOMENTS:
            shards = [shard.tensor for one in optims for shard in one["state"][name][key]._local_shards]
            require_flat(shards, value[key])
