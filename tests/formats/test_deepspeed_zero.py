"""ZeRO 1, 2 and 3 as they are written, against what DeepSpeed itself has saved: the samples of real runs.

That DeepSpeed loads them, and what its next step is: `tests/upstream/test_deepspeed_goes_on.py`.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from formats.test_deepspeed import (
    RUNS,
    Classes,
    change,
    converted,
    expected,
    parameters_of,
    require_found,
    require_same,
    require_same_run,
)
from support.cli import run
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import CkptError, CorruptError, LossError, UsageError


def saved(name: str) -> Path:
    return RUNS / name / "saved"


def written(source: Path, out: Path, stage: object, world: int | None = None, **options: Any) -> Path:
    """The directory of the tag."""
    ckpttool.convert(source, out, producer=f"deepspeed:zero{stage}", to_world=world, check=True, **options)
    return out / (out / "latest").read_text() if (out / "latest").exists() else out


def tree_of(file: Path) -> Any:
    with mock.patch.dict(sys.modules):
        return torch.load(file, weights_only=False, pickle_module=Classes)


def require_alike(found: Any, real: Any, where: str) -> None:
    """The same keys in the same places, and the same values; the weights in 16 bits are those of float32, rounded."""
    if isinstance(real, torch.Tensor):
        assert found.shape == real.shape, where
        if ":module:" not in where:
            assert found.dtype == real.dtype, where
        same = found.to(real.dtype) == real
        if ":fp32_flat_groups:" in where or "_fragments:" in where:
            same |= found == 0  # DeepSpeed's padding is what was in memory
        assert same.all(), where
    elif isinstance(real, dict):
        assert type(found) is type(real) and sorted(map(str, found)) == sorted(map(str, real)), where
        for key, value in real.items():
            require_alike(found[key], value, f"{where}:{key}:")
    elif isinstance(real, list):
        assert len(found) == len(real), where
        for i, value in enumerate(real):
            require_alike(found[i], value, f"{where}:{i}:")
    elif type(real).__module__.startswith("deepspeed") and not isinstance(real, int):
        assert type(found).__qualname__ == type(real).__qualname__ and vars(found) == vars(real), where
    else:
        assert found == real and type(found).__name__ == type(real).__name__, where


@pytest.mark.parametrize(
    "name",
    ["zero1_w2", "zero2_w3", "zero2_fp32_w2", "zero2_fp16_w3", "zero2_round_robin_w3", "zero3_w3", "zero3_fp16_w2"],
)
def test_what_is_written_is_what_deepspeed_has_saved(name: str, tmp_path: Path) -> None:
    """File by file, object by object."""
    found, real = written(saved(name), tmp_path / "out", name[4]), saved(name) / "global_step2"
    assert found.name == (saved(name) / "latest").read_text()
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in real.iterdir())
    for file in real.iterdir():
        assert zipfile.ZipFile(found / file.name).testzip() is None  # the checksums
        one, other = tree_of(found / file.name), tree_of(file)
        if "round_robin" in name and "optim" in file.name:  # those that DeepSpeed has are of another order
            for tree in (one, other):
                del tree["optimizer_state_dict"]["param_slice_mappings"]
        require_alike(one, other, file.name)
    same = run("diff", str(saved(name)), str(tmp_path / "out"))
    assert same.exit_code == 0 and "are the same" in same.stdout


WORLDS = [("zero2_fp32_w2", 3, 3), ("zero3_w3", 2, 2), ("zero3_w3", 1, 4), ("zero1_bf16_optimizer_w3", 3, 1)]


@pytest.mark.parametrize(("name", "stage", "world"), [*WORLDS, ("zero2_round_robin_w3", 1, 2)])
def test_another_world_and_another_stage(name: str, stage: int, world: int, tmp_path: Path) -> None:
    """In one command, the whole training state, weights and moments as DeepSpeed's own tools give them."""
    before = converted(saved(name), tmp_path)
    out = written(saved(name), tmp_path / "out", stage, world, drop=["rng"])
    assert len([*out.glob("*_optim_states.pt")]) == world
    assert len([*out.glob("*_model_states.pt")]) == (world if stage == 3 else 1)
    (tmp_path / "out.pt").unlink()
    after = converted(tmp_path / "out", tmp_path)
    require_same(parameters_of(after), parameters_of(before))
    wanted = expected(name if name in ("zero3_w3", "zero2_fp32_w2") else "zero2_w3")
    if "zero1" not in name:
        require_same(after["model"], wanted["weights"])
        moments = {f"{n}.{k}": v for n, kinds in wanted["moments"].items() for k, v in kinds.items()}
        found = {name: value.flatten() for name, value in parameters_of(after).items()}
        require_same(found, {name: value.flatten() for name, value in moments.items()})
    assert [*after["model"]] == [*before["model"]]
    own = {"dp_world_size", "checkpoint_parallel_dimensions", "model", "optimizer", "rng", "zero", "loss_scaler"}
    assert {k: v for k, v in after.items() if k not in own} == {k: v for k, v in before.items() if k not in own}
    assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    assert after["dp_world_size"] == world and after["model"]["head.weight"].equal(after["model"]["embed.weight"])


def test_round_robin_is_an_order_of_the_files_alone(tmp_path: Path) -> None:
    """The optimizer has the same order as that of a run without; that of the files is DeepSpeed's, by their ranks."""
    states = [converted(saved(name), tmp_path, overwrite=True) for name in ("zero2_w3", "zero2_round_robin_w3")]
    (_, of_plain), (_, of_reordered) = (state["optimizer"]["param_groups"] for state in states)
    names = of_plain["params"]
    assert of_reordered["params"] == names == ["scale", "up.bias", "down.bias", "norm.weight", "norm.bias"]
    out = written(saved("zero2_round_robin_w3"), tmp_path / "out", 2, 2)
    _, shapes = tree_of(out / "mp_rank_00_model_states.pt")["param_shapes"]
    assert [*shapes] == [names[i] for i in (0, 2, 4, 1, 3)]
    assert [
        *tree_of(saved("zero2_round_robin_w3") / "global_step2" / "mp_rank_00_model_states.pt")["param_shapes"][1]
    ] == [names[i] for i in (0, 3, 1, 4, 2)]


def test_a_run_of_fsdp_becomes_zero(tmp_path: Path) -> None:
    """FSDP2 in DCP, FSDP1 in rank files of flat parameters, and a file with ids for names."""
    for number, sample in enumerate(("dcp/fsdp2_w2", "rank/fsdp1_w2", "torch/full"), 1):
        source = next((CHECKPOINTS / sample).glob("ckpt*"))
        out = written(source, tmp_path / sample.replace("/", "_") / "global_step7", number, 3)
        require_same_run(source, out, tmp_path)


def test_sub_groups_are_those_of_the_configuration(tmp_path: Path) -> None:
    """`sub_group_size` of 10: DeepSpeed begins another when a rank has so many elements of one."""
    path = Path(shutil.copytree(saved("zero3_w3"), tmp_path / "saved")) / "global_step2"
    for file in path.glob("*.pt"):
        change(file, lambda tree: tree["ds_config"]["zero_optimization"].update(sub_group_size=1e1), whole=True)
    out = written(path, tmp_path / "out", 3, 2, drop=["rng"])
    state = tree_of(out / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert [len(line) for line in state["fp32_flat_groups"]] == [33, 18, 18, 11, 3]
    inner = state["optimizer_state_dict"]
    assert [group["params"] for group in inner["param_groups"]] == [[0, 1, 2], [3, 4]]
    assert [*inner["state"]] == [0, 1, 2, 3, 4]
    require_same(converted(out, tmp_path)["model"], expected("zero3_w3")["weights"])


def test_each_rank_gets_what_is_its_own(tmp_path: Path) -> None:
    """RNG states of ranks: in their files; refused where a rank has none, and said where one gets none."""
    out = written(saved("zero3_w3"), tmp_path / "three", 3)
    states = [tree_of(out / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")["rng"] for rank in range(3)]
    assert all(state.equal(states[0] + rank) for rank, state in enumerate(states))
    with pytest.raises(LossError, match="belongs to rank 2, and 2 ranks have no file for it"):
        written(saved("zero3_w3"), tmp_path / "two", 3, 2)
    assert not (tmp_path / "two").exists()
    done = ckpttool.convert(saved("zero3_w3"), tmp_path / "four", producer="deepspeed:zero3", to_world=4)
    assert any("the files of rank 3 have no `rng`" in note for note in done.notes)
    # Of the Trainer both have the same: they are read as one.
    written(saved("trainer_zero3_w2"), tmp_path / "alike", 3)
    two = tree_of(written(saved("zero3_w3"), tmp_path / "flat", 2, 2) / "mp_rank_00_model_states.pt")
    assert [*two["rng"]] == ["rank0", "rank1", "rank2"]  # ZeRO 2 has one file of them


def test_files_are_called_as_the_run_looks_for_them(tmp_path: Path) -> None:
    """By `bf16` of its configuration, or as the user says; DST is the tag, or what has it in it."""
    source = next((CHECKPOINTS / "dcp" / "fsdp2_w2").glob("ckpt*"))
    plain = written(source, tmp_path / "global_step5", 2, drop=["rng"])
    assert (plain / "zero_pp_rank_1_mp_rank_00_optim_states.pt").exists() and not (plain / "latest").exists()
    named = written(source, tmp_path / "named", "2-bf16", drop=["rng"])
    assert named.parent == tmp_path / "named" and (named / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").exists()
    written(source, tmp_path / "named", 3, drop=["rng"], overwrite=True)
    assert (named / "zero_pp_rank_1_mp_rank_00_model_states.pt").exists()
    notes = ckpttool.convert(source, tmp_path / "c", producer="deepspeed:zero3", drop=["rng"]).notes
    assert any("take `--producer deepspeed:zeroN-bf16`" in note for note in notes)
    assert any("have to be those of the checkpoint, in the same order" in note for note in notes)


def test_parameters_of_one_name_are_one(tmp_path: Path) -> None:
    """Of tied names, the optimizer may know the second; what it has no state of is frozen, and no group is empty."""
    weight = torch.arange(6.0).view(2, 3)
    moments = {"exp_avg": weight + 1, "step": torch.tensor(4.0)}
    groups: Any = [{"lr": 0.3, "params": []}, {"lr": 0.1, "params": ["b", "cold"]}]
    optimizer = {"state": {"b": moments}, "param_groups": groups}
    model = {"a": weight, "b": weight, "cold": torch.ones(3), "seen": torch.tensor([7])}
    torch.save({"model": model, "optimizer": optimizer, "step": 4}, tmp_path / "a.pt")
    done = ckpttool.convert(tmp_path / "a.pt", tmp_path / "one", producer="deepspeed:zero2", to_world=2, check=True)
    assert any("group 0 of the optimizer has no parameters, and is left out" in note for note in done.notes)
    assert any("no optimizer state of `cold`: written as frozen" in note for note in done.notes)
    tree = tree_of(tmp_path / "one" / "global_step4" / "mp_rank_00_model_states.pt")
    assert tree["shared_params"] == {"a": "b"} and [[*shapes] for shapes in tree["param_shapes"]] == [["b"]]
    assert [*tree["frozen_param_shapes"]] == ["cold"] and tree["buffer_names"] == ["seen"]
    after = converted(tmp_path / "one", tmp_path)
    require_same(after["model"], model)
    require_same(after["optimizer"]["state"]["b"], moments)
    assert after["optimizer"]["param_groups"] == [{"lr": 0.1, "params": ["b"]}]
    notes = ckpttool.convert(tmp_path / "a.pt", tmp_path / "three", producer="deepspeed:zero3", to_world=2).notes
    assert any("`cold`: taken for buffers" in note and "--shard NAME" in note for note in notes)


# What has no place ----------------------------------------------------------------------------------------------------


def _steps(state: Any) -> None:
    state["optimizer"]["state"]["b"]["step"] += 1


def _lacking(state: Any) -> None:
    del state["optimizer"]["state"]["b"]["exp_avg"]


def _factored(state: Any) -> None:
    for one in state["optimizer"]["state"].values():
        one["exp_avg_row"] = torch.zeros(2)


def _wrapped(state: Any) -> None:
    for one in state["optimizer"]["state"].values():
        one["exp_avg"] = (one["exp_avg"], 1)


def _mixed(state: Any) -> None:
    state["model"]["b"] = state["model"]["b"].bfloat16()


def _moment(state: Any) -> None:
    state["optimizer"]["state"]["b"]["exp_avg"] = torch.zeros(2, 3, dtype=torch.bfloat16)


def _unknown(state: Any) -> None:
    state["optimizer"]["param_groups"][0]["params"].append("c")


def _rate(state: Any) -> None:
    state["optimizer"]["param_groups"][0]["lr"] = torch.tensor(0.1)


def _experts(state: Any) -> None:
    for name in ("a", "b"):
        expert = f"moe.deepspeed_experts.{name}"
        state["model"][expert] = state["model"].pop(name)
        state["optimizer"]["state"][expert] = state["optimizer"]["state"].pop(name)
    state["optimizer"]["param_groups"][0]["params"] = [*state["model"]]


def _taken(state: Any) -> None:
    state["module"] = {"w": 3}


def _second(state: Any) -> None:
    state["optimizer_2"] = state["optimizer"]


def _no_step(state: Any) -> None:
    del state["step"]
    for one in state["optimizer"]["state"].values():
        del one["step"]


@pytest.mark.parametrize(
    ("by", "error", "expected"),
    [
        (_steps, LossError, "`step` of group 0 is one number with ZeRO, and those of `a` and `b` differ"),
        (_lacking, LossError, "`b` of group 0 has no `exp_avg`, which others of the group have"),
        (_factored, LossError, "`exp_avg_row` of `a` is neither of each element nor one integer"),
        (_mixed, LossError, "weights of group 0 have one dtype with ZeRO, and `a` has float32, `b` bfloat16"),
        (_moment, LossError, "`exp_avg` of group 0 have one dtype with ZeRO, and `a` has float32, `b` bfloat16"),
        (_unknown, LossError, "the optimizer trains `c`, which the model does not have"),
        (_rate, LossError, r"`optimizer.param_groups.0.lr` is a tensor, and DeepSpeed has numbers there"),
        (_experts, LossError, "experts have files and groups of ranks of their own"),
        (_taken, LossError, r"`module.w`.*DeepSpeed has another value of that name"),
        (_second, LossError, "another optimizer than `optimizer_2`, and no second one"),
        (_no_step, UsageError, "DeepSpeed reads the step from `global_steps`"),
        (lambda state: state.pop("optimizer"), UsageError, "and there is no optimizer"),
        (lambda state: state.update(loss_scaler={"scale": 2.0}), LossError, "those of a loss scaler of its own"),
        (_wrapped, LossError, "`exp_avg` of `a` is neither of each element nor one integer"),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_refused(
    by: Callable[[Any], None], error: type[CkptError], expected: str, stage: int, tmp_path: Path
) -> None:
    weights = {"a": torch.ones(2, 3), "b": torch.zeros(2, 3)}
    state = {name: {"exp_avg": w + 1, "step": torch.tensor(4.0)} for name, w in weights.items()}
    groups = [{"lr": 0.1, "params": ["a", "b"]}]
    whole: Any = {"model": weights, "optimizer": {"state": state, "param_groups": groups}, "step": 4}
    by(whole)
    torch.save(whole, tmp_path / "a.pt")
    with pytest.raises(error, match=expected) as caught:
        written(tmp_path / "a.pt", tmp_path / "out", stage, 2)
    assert caught.value.hint and not (tmp_path / "out").exists()


def test_nothing_is_left_of_a_source_that_is_damaged(tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved("zero3_w3"), tmp_path / "saved"))
    file = path / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    flat = tree_of(file)["optimizer_state_dict"]["fp32_flat_groups"][0].detach().numpy().tobytes()
    data = bytearray(file.read_bytes())
    data[data.index(flat) + 5] ^= 4
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="but the writer recorded"):
        ckpttool.convert(path, tmp_path / "out", producer="deepspeed:zero2", to_world=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", [2, 3])
def test_flips_in_what_was_written_are_found(stage: int, tmp_path: Path) -> None:
    """Elements and padding are under checksums: a flip is an error, or changes nothing that is read."""
    require_found(written(saved("zero2_fp32_w2"), tmp_path / "out", stage, 3), tmp_path, range(12))


def test_the_step_is_that_of_deepspeed_where_nothing_else_counts(tmp_path: Path) -> None:
    """accelerate's directory has no number in its name, and the script counts nothing."""
    source, wanted = saved("accelerate_zero2_w2"), expected("accelerate_zero2_w2")
    out = written(source, tmp_path / "out", 3, world=3)
    assert tree_of(next(out.rglob("zero_pp_rank_1_mp_rank_00_model_states.pt")))["global_steps"] == 2
    require_same(converted(out, tmp_path)["model"], wanted["weights"])
