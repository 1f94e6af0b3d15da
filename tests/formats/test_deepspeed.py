"""DeepSpeed's directories, against what DeepSpeed makes of them: `zero_to_fp32`, `ds_to_universal`, the live run.

`samples/checkpoints/deepspeed` are real runs, see `samples/generators/deepspeed_runs.py`.
"""

from __future__ import annotations

import enum
import functools
import gc
import importlib
import importlib.util
import json
import os
import pickle
import random
import re
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.cli import run
from support.paths import CHECKPOINTS, GENERATORS, ROOT

import ckpttool
from ckpttool.errors import CkptError, CorruptError, LossError, ReadError, UsageError
from ckpttool.serialization import torch_file

RUNS = CHECKPOINTS / "deepspeed"
NAMES = sorted(path.name for path in RUNS.iterdir() if not path.name.startswith(("zero0", "experts", "pipeline")))
# What DeepSpeed's own tools do not read has the moments of a run that trained the same.
SAME_RUN = {"zero1_elastic_w2": "zero1_w2", "zero2_round_robin_w3": "zero2_w3"}


def expected(name: str) -> Any:
    return torch.load(RUNS / name / "expected.pt", weights_only=False)


def converted(source: Path, folder: Path, **options: Any) -> Any:
    ckpttool.convert(source, folder / "out.pt", **options)
    return torch.load(folder / "out.pt", weights_only=False)


def require_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert found[name].equal(value), name


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_moments_are_those_of_deepspeed(name: str, tmp_path: Path) -> None:
    state, wanted = converted(RUNS / name / "saved", tmp_path), expected(name)
    if "weights" in wanted:
        require_same(state["model"], wanted["weights"])
        # ZeRO-1 has the frozen parameter in 16 bits alone, which `zero_to_fp32` leaves out.
        assert state["model"].keys() - wanted["weights"].keys() <= {"frozen"}
    moments = expected(SAME_RUN.get(name, name))["moments"]
    assert len(moments) >= 8
    for parameter, kinds in moments.items():
        one = state["optimizer"]["state"][parameter]
        assert float(one["step"]) == 2
        for kind, value in kinds.items():
            assert one[kind].equal(value.view(one[kind].shape)), (parameter, kind)
    assert sorted(n for g in state["optimizer"]["param_groups"] for n in g["params"]) == sorted(moments)
    tied = {"head.weight": "embed.weight", "lm_head.weight": "model.embed_tokens.weight"}
    for name, other in tied.items():
        if name in state["model"]:
            assert state["model"][name].data_ptr() == state["model"][other].data_ptr()
    assert state["global_steps"] == 2


def test_what_lies_beside(tmp_path: Path) -> None:
    state = converted(RUNS / "zero2_w3" / "saved", tmp_path)
    assert state["iteration"] == 2 and state["lr_scheduler"] == {"last_batch_iteration": 1}
    assert state["loss_scaler"]["cur_scale"] == 1.0 and state["ds_version"] == "0.19.8"


@pytest.mark.parametrize(
    ("name", "producer"), [("trainer_zero3_w2", "transformers Trainer"), ("accelerate_zero2_w2", "accelerate")]
)
def test_inside_the_directories_of_others(name: str, producer: str) -> None:
    catalogue = ckpttool.inspect(RUNS / name / "saved")
    assert catalogue.facts["producer"] == producer and not catalogue.faults
    assert {("rng", "rank0"), ("rng", "rank1")} <= {path[:2] for path in catalogue.entries}
    # The weights in 16 bits beside it are the same, rounded.
    left = [str(warning) for warning in catalogue.warnings if warning.kind == "superseded-file"]
    assert left == ["`model.safetensors` has the tensors of `model`, and is not read"] * (name == "trainer_zero3_w2")


def test_a_universal_checkpoint_is_the_run_that_it_was_made_of(tmp_path: Path) -> None:
    """Of ZeRO-2, whose files have shapes; `ds_to_universal` has float32 copies of buffers too."""
    made = converted(CHECKPOINTS / "other" / "deepspeed_zero2_w2", tmp_path)
    (tmp_path / "out.pt").unlink()
    universal = converted(CHECKPOINTS / "other" / "deepspeed_universal", tmp_path)
    require_same(universal["model"], made["model"])
    for name, one in made["optimizer"]["state"].items():
        require_same(universal["optimizer"]["state"][name], one)
    assert universal["optimizer"]["param_groups"] == made["optimizer"]["param_groups"]
    warnings = ckpttool.inspect(CHECKPOINTS / "other" / "deepspeed_universal").warnings
    assert any("are not read: `frozen`, `head.weight`, `seen`" in str(warning) for warning in warnings)


@pytest.mark.parametrize(
    ("remove", "text"),
    [
        ("up.weight/fp32.pt", "`zero/up.weight` has no `fp32.pt`"),
        ("up.weight/exp_avg.pt", "`zero/up.weight` has no `exp_avg.pt`"),
        ("optimizer_state.pt", "optimizer_state.pt` is missing, which has the learning rates"),
    ],
)
def test_a_universal_checkpoint_that_lacks_a_file(remove: str, text: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(RUNS / "universal_zero3_w3" / "saved", tmp_path / "saved"))
    (path / "global_step2_universal" / "zero" / remove).unlink()
    with pytest.raises(CorruptError, match=text) as caught:
        ckpttool.convert(path, tmp_path / "out.pt")
    assert caught.value.hint


def test_experts_have_the_numbers_that_they_have_among_all_ranks(tmp_path: Path) -> None:
    """Two of four experts on each rank, which calls its own 0 and 1; the files of experts have all four numbers."""
    state, path = converted(RUNS / "experts_zero2_w4" / "saved", tmp_path), copied("experts_zero2_w4", tmp_path)
    seen = set()
    for expert in range(4):
        for name, value in torch.load(path / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt").items():
            assert state["model"][name].bfloat16().equal(value)
            one = state["optimizer"]["state"][name]
            assert one["exp_avg"].shape == one["exp_avg_sq"].shape == value.shape
            seen.add(name)
    moved = {name: one["exp_avg"].abs().sum() > 0 for name, one in state["optimizer"]["state"].items()}
    assert len(seen) == 8 and any(moved[name] for name in seen)
    assert sorted(state["model"]) == sorted(n for g in state["optimizer"]["param_groups"] for n in g["params"])
    (path / "layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CorruptError, match="no file of an expert has"):
        ckpttool.convert(path, tmp_path / "b.pt")


WITHOUT_ZERO = ("global_step2", "mp_rank_00_model_states.pt")


def test_without_zero(tmp_path: Path) -> None:
    state = converted(RUNS / "zero0_fp32_w2" / "saved", tmp_path)
    saved = torch.load((RUNS / "zero0_fp32_w2" / "saved").joinpath(*WITHOUT_ZERO), weights_only=False)
    require_same(state["model"], saved["module"])
    for number, one in saved["optimizer"]["state"].items():
        require_same(state["optimizer"]["state"][number], one)


def test_weights_of_fp16_without_zero_have_the_names_of_the_model(tmp_path: Path) -> None:
    """Of one flat tensor for each group, and of one for each parameter; the weights in 16 bits prove which is which."""
    for name in ("zero0_fp16_fused_w2", "zero0_fp16_w2"):
        state = converted(RUNS / name / "saved", tmp_path / name)
        saved = torch.load((RUNS / name / "saved").joinpath(*WITHOUT_ZERO), weights_only=False)
        wanted = expected("zero0_fp16_fused_w2")  # by the live run; the other one has trained the same
        require_same(state["model"], wanted["weights"])
        for parameter, value in saved["module"].items():
            found = state["model"][parameter]
            assert found.to(value.dtype).equal(value) and (parameter != "frozen" or found.dtype == value.dtype)
        assert state["optimizer"]["state"].keys() == wanted["moments"].keys()
        for parameter, kinds in wanted["moments"].items():
            require_same(state["optimizer"]["state"][parameter], kinds)
        groups = [group["params"] for group in state["optimizer"]["param_groups"]]
        assert groups == [["embed.weight", "up.weight", "down.weight"], [*wanted["moments"]][3:]]
        assert state["loss_scaler"]["cur_scale"] == 16 and "fp32_groups" not in str(state.keys())


@pytest.mark.parametrize("of", ["all", "moments", "weights"])
def test_weights_of_fp16_in_another_order(of: str, tmp_path: Path) -> None:
    """As those of channels last, or `weight.T` as a parameter: they were called no tensors, or moments exchanged."""
    path = copied("zero0_fp16_w2", tmp_path)
    names = ["embed.weight", "up.weight", "down.weight"]
    turned = lambda value: value.detach().T.contiguous().T  # noqa: E731

    def by(tree: Any) -> None:
        own = tree["optimizer"]
        if of != "moments":
            own["fp32_groups"][0] = [turned(value) for value in own["fp32_groups"][0]]
        if of == "all":
            tree["module"] |= {name: turned(tree["module"][name]) for name in names}
        if of != "weights":
            for number in range(3):
                kinds = own["optimizer_state_dict"]["state"][number]
                kinds |= {kind: turned(value) for kind, value in kinds.items() if value.dim() == 2}

    change(path / WITHOUT_ZERO[1], by)
    state = converted(path, tmp_path)
    wanted = expected("zero0_fp16_fused_w2")
    for number, name in enumerate(names):
        is_named = of != "weights"
        found = state["optimizer"]["state"][name if is_named else number]
        require_same({k: v for k, v in found.items() if k != "fp32"}, wanted["moments"][name])
        assert (state["model"][name] if is_named else found["fp32"]).equal(wanted["weights"][name])


def test_a_frozen_parameter_is_no_piece_of_another_one(tmp_path: Path) -> None:
    """Of a norm's weight, which begins with as many ones; the names were said not to be proven."""
    path = copied("zero0_fp16_w2", tmp_path)

    def by(tree: Any) -> None:
        tree["module"]["scale"].copy_(tree["module"]["up.bias"][:1])
        tree["optimizer"]["fp32_groups"][1][0] = tree["optimizer"]["fp32_groups"][1][1].detach()[:1].clone()
        tree["module"]["frozen"].copy_(tree["module"]["up.bias"][:5])

    change(path / WITHOUT_ZERO[1], by)
    assert converted(path, tmp_path)["optimizer"]["state"].keys() == expected("zero0_fp16_fused_w2")["moments"].keys()
    sample = converted(RUNS.parent / "other" / "deepspeed_zero0_w2", tmp_path / "bf16")
    assert "norm.weight" in sample["optimizer"]["state"]


def test_weights_of_fp16_of_an_optimizer_without_state(tmp_path: Path) -> None:
    """SGD has none, and the float32 weights were left out where they prove no names."""
    path = copied("zero0_fp16_w2", tmp_path)

    def by(tree: Any) -> None:
        tree["optimizer"]["optimizer_state_dict"]["state"] = {}
        tree["module"]["frozen"].copy_(tree["module"]["down.bias"])

    change(path / WITHOUT_ZERO[1], by)
    saved = torch.load(path / WITHOUT_ZERO[1], weights_only=False)
    state = converted(path, tmp_path)
    for number, weight in enumerate(chain.from_iterable(saved["optimizer"]["fp32_groups"])):
        require_same(state["optimizer"]["state"][number], {"fp32": weight.detach()})


@pytest.mark.parametrize("name", ["zero0_fp16_fused_w2", "zero0_fp16_w2"])
@pytest.mark.parametrize("spoil", ["averages", "another", "twins"])
def test_weights_of_fp16_that_prove_no_names(name: str, spoil: str, tmp_path: Path) -> None:
    """All is there, under numbers; and a run of DeepSpeed is not made of what has weights twice."""
    path = copied(name, tmp_path)

    def by(tree: Any) -> None:
        if spoil == "averages":  # in place of the weights
            tree["module"] = {
                key: value * 0.875 if value.is_floating_point() else value for key, value in tree["module"].items()
            }
        elif spoil == "another":  # a parameter that is not frozen, and of which the optimizer has no weights
            tree["module"].pop("down.weight")
        else:  # nothing says which of the two is frozen
            tree["module"]["frozen"].copy_(tree["module"]["down.bias"])

    change(path / WITHOUT_ZERO[1], by)
    saved = torch.load(path / WITHOUT_ZERO[1], weights_only=False)
    warnings = [str(warning) for warning in ckpttool.inspect(path).warnings]
    assert any("they are `fp32` in its state" in text for text in warnings), warnings
    state = converted(path, tmp_path)
    require_same(state["model"], saved["module"])
    masters = saved["optimizer"].get("fp32_groups_flat") or [*chain.from_iterable(saved["optimizer"]["fp32_groups"])]
    for number, one in saved["optimizer"]["optimizer_state_dict"]["state"].items():
        require_same(state["optimizer"]["state"][number], {**one, "fp32": masters[number].detach()})
    with pytest.raises(CkptError, match=r"weights beside those of the model|the model has|the model does not have"):
        ckpttool.convert(path, tmp_path / "out", producer="deepspeed:zero3", to_world=2, drop=["scaler"])


def test_the_stages_of_a_pipeline_are_one_model(tmp_path: Path) -> None:
    """As the live modules and optimizers of the stages have it; tied weights are there in two."""
    wanted, path = expected("pipeline_zero1_w4"), copied("pipeline_zero1_w4", tmp_path)
    state = converted(RUNS / "pipeline_zero1_w4" / "saved", tmp_path)
    assert state["model"].keys() == wanted["module"].keys() and "tied_modules.embed.weight" in wanted["moments"]
    require_same(state["model"], {**wanted["module"], **wanted["weights"]})
    for name, kinds in wanted["moments"].items():
        require_same(state["optimizer"]["state"][name], kinds)
    (group,) = state["optimizer"]["param_groups"]
    assert sorted(group["params"]) == sorted(wanted["moments"]) and state["iteration"] == 2
    layout = ckpttool.inspect(path).facts["layout"]
    assert layout == "ZeRO-1, 2 data-parallel ranks x 2 pipeline stages"
    for gone, text in (
        ("layer_03-model_states.pt", "the file of layer 3 is missing"),
        ("mp_rank_01_model_states.pt", "the weights file of `rank 2` is missing: 4 ranks"),
        (f"{optim(1)[:-18]}01_optim_states.pt", "the optimizer file of `rank 3` is missing"),
    ):
        (path / gone).rename(tmp_path / gone)
        with pytest.raises(CorruptError, match=text):
            ckpttool.convert(path, tmp_path / "b.pt")
        (tmp_path / gone).rename(path / gone)
    for name in ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"):  # as files of before 2026
        change(path / name, lambda tree: tree.pop("checkpoint_parallel_dimensions"))
    assert ckpttool.inspect(path).facts["layout"] == layout
    for file in path.glob("*mp_rank_01_*"):
        file.unlink()
    with pytest.raises(CorruptError, match="the weights file of `rank 2` is missing: 4 ranks"):
        ckpttool.convert(path, tmp_path / "b.pt")
    shutil.copy(path / "layer_03-model_states.pt", path / "layer_03-model_01-model_states.pt")
    with pytest.raises(ReadError, match="layers of tensor parallelism"):
        ckpttool.convert(path, tmp_path / "b.pt")


def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    path = copied("zero2_w3", tmp_path)
    change(path / "mp_rank_00_model_states.pt", lambda t: t["checkpoint_parallel_dimensions"].update(tp_degree=2))
    with pytest.raises(ReadError, match="tensor parallelism of 2"):
        ckpttool.convert(path, tmp_path / "b.pt")
    shutil.copy(path / "mp_rank_00_model_states.pt", path / "mp_rank_01_model_states.pt")
    with pytest.raises(ReadError, match=r"`mp_rank_01_model_states\.pt` is of model-parallel rank 1"):
        ckpttool.convert(path, tmp_path / "b.pt")


def test_a_pipeline_without_zero_has_an_optimizer_of_each_stage(tmp_path: Path) -> None:
    source, wanted = RUNS / "pipeline_zero0_w2" / "saved", expected("pipeline_zero0_w2")["module"]
    assert any("has numbers for names" in str(warning) for warning in ckpttool.inspect(source).warnings)
    state = converted(source, tmp_path)
    # Nothing says that the weight of layer 0 is the tied one.
    require_same(state["model"], {n.replace("tied_modules.embed", "0"): value for n, value in wanted.items()})
    for stage in range(2):
        file = source / "global_step2" / f"mp_rank_{stage:02d}_model_states.pt"
        saved, own = torch.load(file, weights_only=False)["optimizer"], state["optimizer"][f"stage{stage}"]
        assert own["param_groups"] == saved["param_groups"] and own["state"].keys() == saved["state"].keys()
        for number, kinds in saved["state"].items():
            require_same(own["state"][number], kinds)
    with pytest.raises(CkptError, match=r"`optimizer\.stage0` has state for 2 parameters of shape"):
        ckpttool.convert(source, tmp_path / "b.pt", optim_keys="fqn")


def test_a_file_of_a_layer_that_is_not_there(tmp_path: Path) -> None:
    """A buffer of it is named elsewhere. Of other layers nothing is: a function has no file."""
    path = copied("pipeline_zero0_w2", tmp_path)
    (path / "layer_02-model_states.pt").unlink()
    notes = [str(warning) for warning in ckpttool.inspect(path).warnings]
    assert any("no file of `layer 2`: that is so of a function" in note for note in notes), notes
    (path / "layer_03-model_states.pt").unlink()
    with pytest.raises(CorruptError, match=r"no file of a layer has the buffer `3\.seen`"):
        ckpttool.convert(path, tmp_path / "b.pt", drop=["optimizer"])


def test_each_rank_keeps_what_is_its_own(tmp_path: Path) -> None:
    state = converted(RUNS / "zero3_w3" / "saved", tmp_path)
    first = state["rng"]["rank0"]
    assert all(state["rng"][f"rank{rank}"].equal(first + rank) for rank in range(3))


def test_a_world_changes_in_one_command(tmp_path: Path) -> None:
    """ZeRO-3 of 3 ranks to a DCP directory of 2, and to a model alone."""
    from torch.distributed.checkpoint import FileSystemReader, load

    source, wanted = RUNS / "zero3_w3" / "saved", expected("zero3_w3")
    ckpttool.reshard(source, tmp_path / "dcp", to_world=2)
    assert sorted(path.name for path in (tmp_path / "dcp").glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    found = {f"model.{n}": torch.zeros_like(v) for n, v in wanted["weights"].items()}
    moments = {f"{name}.{kind}": v for name, kinds in wanted["moments"].items() for kind, v in kinds.items()}
    found |= {f"optimizer.state.{name}": torch.zeros_like(value) for name, value in moments.items()}
    load(found, storage_reader=FileSystemReader(str(tmp_path / "dcp")), no_dist=True)
    require_same(found, {f"model.{name}": value for name, value in wanted["weights"].items()})
    require_same(found, {f"optimizer.state.{name}": value for name, value in moments.items()})
    ckpttool.convert(source, tmp_path / "m.safetensors", only=["model"])
    model = load_file(tmp_path / "m.safetensors")
    require_same(model, {name: value for name, value in wanted["weights"].items() if name in model})
    assert wanted["weights"].keys() - model.keys() == {"head.weight"}  # tied


def test_what_people_read() -> None:
    done = run("inspect", str(RUNS / "zero2_w3" / "saved"))
    assert done.exit_code == 0
    assert "deepspeed, ZeRO-2, 3 data-parallel ranks" in done.stdout
    wanted = "group 1: 8 elements on ranks 0-1, 7 elements and 1 of padding on rank 2"
    assert wanted in done.stdout
    assert run("verify", str(RUNS / "zero3_w3" / "saved")).exit_code == 0
    same = run("diff", "--json", str(RUNS / "zero2_w3" / "saved"), str(RUNS / "zero2_round_robin_w3" / "saved"))
    document = json.loads(same.stdout)  # what differs is `ds_config`
    assert document["verdict"] == "differs" and not document["tensors"] and document["total"]["equal"] == 36


def test_zero_3_of_three_ranks_beside_fsdp2_of_two(tmp_path: Path) -> None:
    """Equal, in other pieces; and torch's own save of the same state, with an element changed, differs there alone."""
    from torch.distributed.checkpoint import save

    source = RUNS / "zero3_w3" / "saved"
    ckpttool.reshard(source, tmp_path / "fsdp2", to_world=2)
    done = run("diff", "--json", str(source), str(tmp_path / "fsdp2"))
    document = json.loads(done.stdout)
    assert (done.exit_code, document["verdict"]) == (0, "same"), document
    state = converted(source, tmp_path)
    parts = {key: state[key] for key in ("model", "optimizer")}
    parts["optimizer"]["state"]["up.weight"]["exp_avg"][6, 4] += 1
    save(parts, checkpoint_id=tmp_path / "changed", no_dist=True)
    done = run("diff", "--json", "--only", "model", "--only", "optimizer", str(source), str(tmp_path / "changed"))
    # DCP has no ties.
    differing = [one["name"] for one in json.loads(done.stdout)["tensors"] if one["kinds"] != ["tie"]]
    assert (done.exit_code, differing) == (1, ["optimizer.state.up.weight.exp_avg"])


def test_verify_reads_the_partitions_and_does_not_judge_padding(tmp_path: Path) -> None:
    """ZeRO-3 leaves in its padding what was in the memory."""
    path = copied("zero3_w3", tmp_path)
    change(path / optim(2), lambda state: state["fp32_flat_groups"][1].data[-1:].fill_(float("nan")))
    done = run("verify", "--values", str(path))
    assert done.exit_code == 0 and "nan" not in done.stdout.lower(), done.stdout
    for spoil, text in ((_mixed, "state of group 0 is not the same"), (_overlapping, "does not go on from the end")):
        path = copied("zero2_w3", tmp_path / spoil.__name__)
        change(path / optim(1), spoil)
        done = run("verify", str(path))
        assert done.exit_code == CorruptError.exit_code and re.search(text, done.stdout + done.stderr), done.stdout


# What is not one whole save -------------------------------------------------------------------------------------------


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(RUNS / name / "saved" / "global_step2", folder / "global_step2"))


def change(file: Path, by: Callable[[Any], None], *, whole: bool = False) -> None:
    """Save a file again with another value in it, of the optimizer in its state unless `whole`; DeepSpeed's classes
    stay what they are called."""
    with mock.patch.dict(sys.modules):
        tree = torch.load(file, weights_only=False, pickle_module=Classes)
        by(tree["optimizer_state_dict"] if "optim" in file.name and not whole else tree)
        torch.save(tree, file)


class Classes:
    """Unpickles with a new class for each one of DeepSpeed, which is not installed."""

    load = pickle.load

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if not module.startswith("deepspeed"):
                return super().find_class(module, name)
            parts = module.split(".")
            for depth in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
            if not hasattr(sys.modules[module], name):
                stages = {"one": 1, "two": 2, "three": 3}
                plain = type(name, (), {"__module__": module})
                kind = enum.IntEnum(name, stages, module=module) if name == "ZeroStageEnum" else plain
                setattr(sys.modules[module], name, kind)
            return getattr(sys.modules[module], name)


def optim(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("name", "spoil", "expected"),
    [
        ("zero2_w3", lambda d: (d / optim(1)).unlink(), "the optimizer file of `rank 1` is missing: 3 ranks"),
        ("zero3_w3", lambda d: (d / optim(2)).unlink(), "the optimizer file of `rank 2` is missing: 3 ranks"),
        (
            "zero3_w3",
            lambda d: (d / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
            "the weights file of `rank 1` is missing",
        ),
        ("zero2_w3", lambda d: shutil.copy(d / optim(1), d / optim(3)), "of a save with more ranks than 3"),
        ("zero2_w3", lambda d: shutil.copy(d / optim(1), d / optim(1)[5:]), "are both of rank 1"),
    ],
)
def test_a_set_that_is_not_whole(name: str, spoil: Callable[[Path], Any], expected: str, tmp_path: Path) -> None:
    path = copied(name, tmp_path)
    spoil(path)
    assert run("inspect", str(path)).exit_code == 0
    for arguments in (["verify", str(path)], ["convert", str(path), str(tmp_path / "out.pt")]):
        done = run(*arguments)
        assert done.exit_code == CorruptError.exit_code, done.stdout
        assert expected in done.stdout + done.stderr
    assert not (tmp_path / "out.pt").exists()


def test_no_weights_of_the_first_rank(tmp_path: Path) -> None:
    path = copied("zero2_w3", tmp_path)
    (path / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CorruptError, match=r"no `mp_rank_00_model_states\.pt` beside"):
        ckpttool.inspect(path)


def _mixed(state: Any) -> None:
    state["base_optimizer_state"]["state"][0]["step"] += 1


def _longer(state: Any) -> None:
    state["base_optimizer_state"]["state"][0]["worker_error"] = torch.zeros(7)


def _overlapping(state: Any) -> None:
    next(iter(state["param_slice_mappings"][0].values())).start = 3


def _whole(state: Any) -> None:
    state["whole_param_optimizer_states"] = [{"up.weight": {"momentum_buffer": torch.zeros(7, 5)}}]


def _newer(state: Any) -> None:
    state["universal_checkpoint_info"] = {"affine_map": {"version": 2, "params": {}}}


def _uneven(state: Any) -> None:
    state["partition_count"][1] = 2


def _within(state: Any) -> None:
    state["partition_count"][1] = 1


def _offloaded(state: Any) -> None:
    state["fp32_flat_groups"][0] = torch.zeros(0)


def _swapped(state: Any) -> None:
    for group in state["optimizer_state_dict"]["state"].values():
        group["exp_avg"] = torch.zeros(0)


def _compressed(tree: Any) -> None:
    for state in tree["optimizer"]["state"].values():
        state.update(worker_error=torch.zeros(41), server_error=torch.zeros(9))


def _renamed(tree: Any) -> None:
    tree["param_shapes"][0]["another"] = tree["param_shapes"][0].pop("up.weight")


def _moved(tree: Any) -> None:
    for weight in tree.values():
        weight += 1


def _none(tree: Any) -> None:
    tree["module"] = None


@pytest.mark.parametrize(
    ("name", "file", "by", "error", "expected"),
    [
        ("zero2_w3", optim(1), _mixed, CorruptError, "state of group 0 is not the same on all ranks"),
        ("zero2_w3", optim(1), _longer, CorruptError, "`worker_error` has 7 elements, but rank 1 has 46 of weights"),
        (
            "zero0_fp32_w2",
            "mp_rank_00_model_states.pt",
            _compressed,
            CorruptError,
            "`worker_error` of a 1-bit optimizer",
        ),
        ("zero3_w3", optim(1), _swapped, ReadError, "`exp_avg` without elements: it was offloaded to NVMe"),
        ("zero2_w3", optim(1), _overlapping, CorruptError, "does not go on from the end of rank 0 at the beg"),
        ("zero2_w3", optim(1), _whole, ReadError, "`whole_param_optimizer_states`, optimizer state in a form"),
        ("zero2_w3", optim(1), _newer, ReadError, "`affine_map` of version 2, newer than 1"),
        ("zero2_w3", optim(1), _uneven, CorruptError, "partitions of .* ranks, of 3"),
        ("zero2_w3", optim(1), _within, CorruptError, "have partitioned group 1 by `1`, `3` ranks"),
        ("zero3_w3", optim(1), _offloaded, ReadError, "offloaded to NVMe"),
        ("zero2_w3", "mp_rank_00_model_states.pt", _none, ReadError, "has no `module`"),
        ("zero3_w3", "zero_pp_rank_1_mp_rank_00_model_states.pt", _renamed, CorruptError, "is of other parameters"),
        (
            "pipeline_zero1_w4",
            "layer_03-model_states.pt",
            _moved,
            CorruptError,
            r"`3.up.weight` in `layer_03-model_states.pt` is not that of `bf16_.*`, rounded",
        ),
    ],
)
def test_what_is_refused(
    name: str, file: str, by: Callable[[Any], None], error: type[CkptError], expected: str, tmp_path: Path
) -> None:
    path = copied(name, tmp_path)
    change(path / file, by)
    with pytest.raises(error, match=expected) as caught:
        ckpttool.convert(path, tmp_path / "out.pt")
    assert caught.value.hint


@pytest.mark.parametrize("name", ["zero2_w3", "zero2_fp16_w3", "zero1_bf16_optimizer_w3"])
def test_model_states_of_another_step(name: str, tmp_path: Path) -> None:
    """Other counters alone may be those of a run whose optimizer was not loaded; with other weights they are not."""
    path = copied(name, tmp_path)
    file = path / "mp_rank_00_model_states.pt"
    before = converted(path, tmp_path)
    (tmp_path / "out.pt").unlink()
    change(file, lambda tree: tree.update(global_steps=5))
    require_same(converted(path, tmp_path)["model"], before["model"])
    (tmp_path / "out.pt").unlink()
    change(file, lambda tree: tree["module"]["down.weight"].view(-1)[-1].mul_(1.125))
    with pytest.raises(CorruptError) as caught:
        ckpttool.convert(path, tmp_path / "out.pt")
    own = optim(2).removeprefix("bf16_" * ("fp16" in name))
    text = f"`down.weight` in `{file.name}` is not that of `{own}`, rounded"
    assert f"{text}: one is of step 5, the other of step 2" in str(caught.value)
    # And those of the same step of another run.
    change(file, lambda tree: tree.update(global_steps=2))
    with pytest.raises(CorruptError) as caught:
        ckpttool.convert(path, tmp_path / "out.pt")
    assert str(caught.value).splitlines()[0].endswith(text) and caught.value.hint


@pytest.mark.parametrize("name", ["zero1_w2", "zero2_w3", "zero2_fp16_w3", "zero2_fp32_w2", "trainer_zero3_w2"])
def test_weights_in_16_bits_are_those_of_the_optimizer_rounded(name: str, tmp_path: Path) -> None:
    """`--dtype` gives the bits that the run computed with: those of the model states, or of the Trainer's model."""
    saved = RUNS / name / "saved"
    files = [*saved.rglob("mp_rank_00_model_states.pt")]
    if files:
        wanted = torch.load(files[0], weights_only=False)["module"]
    else:
        wanted = load_file(next(saved.rglob("model.safetensors")))
    dtype = str(wanted[next(iter(wanted))].dtype).removeprefix("torch.")
    require_same(converted(saved, tmp_path, only=["model"], dtype=[dtype]), wanted)


def test_padding_between_parameters(tmp_path: Path) -> None:
    """DeepSpeed's alignment for grouped_mm (8277), emulated: each parameter begins at a multiple of 4 elements."""
    path, wanted = copied("zero2_w3", tmp_path), expected("zero2_w3")
    model = torch.load(path / "mp_rank_00_model_states.pt", weights_only=False)
    shapes = model["param_shapes"][1]
    between = [-shape.numel() % 4 for shape in shapes.values()]
    kinds_of = {k: {n: m[k] for n, m in wanted["moments"].items()} for k in ("exp_avg", "exp_avg_sq")}
    sources = {"fp32": wanted["weights"]} | kinds_of

    def aligned(kind: str, rank: int) -> torch.Tensor:
        pieces = [torch.cat([sources[kind][n].flatten(), torch.zeros(p)]) for n, p in zip(shapes, between, strict=True)]
        flat = torch.cat(pieces)
        size = -(-len(flat) // 3)
        return torch.cat([flat, torch.zeros(3 * size - len(flat))])[rank * size : (rank + 1) * size].clone()

    for rank in range(3):

        def by(state: Any, rank: int = rank) -> None:
            state["param_alignment_paddings"][1] = between
            state["single_partition_of_fp32_groups"][1] = aligned("fp32", rank)
            for kind in ("exp_avg", "exp_avg_sq"):
                state["base_optimizer_state"]["state"][1][kind] = aligned(kind, rank)
            state["group_paddings"][1] = 0
            size, begin, mapping = len(aligned("fp32", rank)), 0, {}
            address = type(next(iter(state["param_slice_mappings"][0].values())))
            for (name, shape), padding in zip(shapes.items(), between, strict=True):
                low, high = max(begin, rank * size), min(begin + shape.numel(), (rank + 1) * size)
                if low < high:
                    mapping[name] = address()
                    mapping[name].start, mapping[name].numel = low - rank * size, high - low
                begin += shape.numel() + padding
            state["param_slice_mappings"][1] = mapping

        change(path / optim(rank), by)
    state = converted(path, tmp_path)
    require_same(state["model"], wanted["weights"])
    for name, kinds in wanted["moments"].items():
        require_same(state["optimizer"]["state"][name], kinds)
    for rank in range(3):  # as files of before 2022-10
        change(path / optim(rank), lambda state: state.pop("param_slice_mappings"))
    (tmp_path / "out.pt").unlink()
    require_same(converted(path, tmp_path)["model"], wanted["weights"])


@pytest.mark.parametrize("name", ["zero2_w3", "zero3_w3", "universal_zero3_w3"])
def test_flips_are_found(name: str, tmp_path: Path) -> None:
    require_found(RUNS / name / "saved", tmp_path, range(6))


@pytest.mark.long
@pytest.mark.parametrize("name", ["zero1_w2", "zero2_w3", "zero3_w3", "universal_zero3_w3", "pipeline_zero1_w4"])
def test_many_flips_are_found(name: str, tmp_path: Path) -> None:
    require_found(RUNS / name / "saved", tmp_path, range(6, 106))


def require_found(source: Path, folder: Path, seeds: range) -> None:
    """A flipped bit is an error, or nothing that is converted has changed."""
    whole = converted(source, folder)
    for seed in seeds:
        path = Path(shutil.copytree(source, folder / str(seed) / source.name))
        files = sorted(path.rglob("*.pt"))
        data = bytearray(files[seed % len(files)].read_bytes())
        data[random.Random(seed).randrange(len(data))] ^= 1 << seed % 8
        files[seed % len(files)].write_bytes(data)
        try:
            state = converted(path, path.parent)
        except CkptError:
            continue
        require_same(parameters_of(state), parameters_of(whole))


def test_a_truncated_file(tmp_path: Path) -> None:
    path = copied("zero3_w3", tmp_path)
    data = (path / optim(1)).read_bytes()
    for size in (0, 3, len(data) // 2, len(data) - 1):
        (path / optim(1)).write_bytes(data[:size])
        with pytest.raises(CkptError):
            ckpttool.convert(path, tmp_path / "out.pt")


# Universal, out -------------------------------------------------------------------------------------------------------


def parameters_of(state: Any) -> dict[str, Any]:
    """The weights and the optimizer's state by name, of a state in one file."""
    moments = {f"{name}.{kind}": v for name, one in state["optimizer"]["state"].items() for kind, v in one.items()}
    return {**state["model"], **moments}


@pytest.mark.parametrize("name", ["zero3_w3", "zero2_fp16_w3"])
def test_a_universal_checkpoint_is_written(name: str, tmp_path: Path) -> None:
    """What DeepSpeed's own loader asks for is there: see `tests/upstream/test_deepspeed_goes_on.py`."""
    out = tmp_path / "global_step2_universal"
    ckpttool.convert(RUNS / name / "saved", out, producer="deepspeed:universal", check=True)
    wanted = expected(name)
    for parameter, kinds in wanted["moments"].items():
        folder = out / "zero" / parameter
        weight = torch.load(folder / "fp32.pt")["param"]
        assert weight.equal(wanted["weights"][parameter]) and float(torch.load(folder / "step.pt")) == 2
        for kind, value in kinds.items():
            assert torch.load(folder / f"{kind}.pt")["param"].equal(value.view(weight.shape))
    with mock.patch.dict(sys.modules):
        common = torch.load(out / "zero" / "optimizer_state.pt", weights_only=False, pickle_module=Classes)
    assert [(g["weight_decay"], g["params"]) for g in common["param_groups"]] == [(0.1, [0]), (0.0, [1])]
    assert common["optimizer_state_dict"]["state"][0]["step"] == 2 and common["ds_version"] == "0.19.8"
    assert vars(common["loss_scaler"])["cur_scale"] == (16.0 if "fp16" in name else 1.0)
    first, second = (out / f"{name}mp_rank_00_model_states.pt" for name in ("", "zero_pp_rank_0_"))
    states = torch.load(first, weights_only=False)
    assert first.read_bytes() == second.read_bytes()
    assert [*states["module"]] == [*converted(RUNS / name / "saved", tmp_path)["model"]]
    assert states["global_steps"] == 2 and states["shared_params"] == {"head.weight": "embed.weight"}
    assert sorted(n for g in states["param_shapes"] for n in g) == sorted(wanted["moments"])
    # And read again, it is what it was made of.
    before = torch.load(tmp_path / "out.pt", weights_only=False)
    (tmp_path / "out.pt").unlink()
    after = converted(out, tmp_path)
    require_same(parameters_of(after), parameters_of(before))
    assert [*after["model"]] == [*before["model"]] and after["lr_scheduler"] == before["lr_scheduler"]
    assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    assert after["loss_scaler"] == before["loss_scaler"] and after["iteration"] == 2


def require_content_of(theirs: Path, ours: Path) -> None:
    """What `ds_to_universal` has made of a checkpoint is in ours, file by file; its copies of tied weights are not, and
    those of buffers and frozen parameters, which DeepSpeed does not load, have their own dtype."""
    with mock.patch.dict(sys.modules):
        load = functools.partial(torch.load, weights_only=False, pickle_module=Classes)
        states = {file.name: load(file) for file in theirs.glob("*model_states.pt")}
        first = next(state for name, state in states.items() if not name.startswith("zero_pp_rank_") or "_0_mp" in name)
        trained = {name for group in first["param_shapes"] for name in group}
        names = {str(file.relative_to(theirs)) for file in theirs.rglob("zero/**/*.pt")}
        own = {str(file.relative_to(ours)) for file in ours.rglob("zero/**/*.pt")}
        assert names - own == {name for name in names if Path(name).parent.name in first["shared_params"]}
        # Of ZeRO-3 it has no steps, and no frozen parameters.
        assert {Path(name).stem for name in own - names} <= {"step", "fp32"}
        assert {Path(name).parent.name for name in own - names if Path(name).stem == "fp32"}.isdisjoint(trained)
        for name in sorted(names & own - {"zero/optimizer_state.pt"}):
            wanted, found = load(theirs / name), load(ours / name)
            if isinstance(wanted, dict):
                assert wanted.keys() == found.keys(), name
                assert all(found[key] == value for key, value in wanted.items() if key != "param")
            wanted = wanted["param"] if isinstance(wanted, dict) else wanted
            found = found["param"] if isinstance(found, dict) else found
            is_copy = Path(name).parent.name not in trained
            assert found.dtype == wanted.dtype or is_copy
            assert found.to(wanted.dtype).view(wanted.shape).equal(wanted), name
        wanted, found = load(theirs / "zero" / "optimizer_state.pt"), load(ours / "zero" / "optimizer_state.pt")
        of_ranks = {"zero_stage", "partition_count", "group_paddings", "param_alignment_paddings", "fp32_flat_groups"}
        assert wanted.keys() - found.keys() <= of_ranks
        assert found["param_groups"] == wanted["param_groups"]
        assert vars(found["loss_scaler"]) == vars(wanted["loss_scaler"])
        mine = load(ours / "mp_rank_00_model_states.pt")
        assert first.keys() - {"rng"} <= mine.keys() and [*first["module"]] == [*mine["module"]]
        for key in first.keys() & mine.keys() - {"module", "buffer_names", "rng"}:
            if not key.startswith(("frozen_", "universal_")):
                assert first[key] == mine[key], key


def test_a_universal_checkpoint_is_that_of_deepspeed(tmp_path: Path) -> None:
    """What `ds_to_universal` made of the same files lies beside them."""
    others = CHECKPOINTS / "other"
    for source, theirs in (
        (others / "deepspeed_zero2_w2", others / "deepspeed_universal" / "global_step2_universal"),
        (RUNS / "zero3_w3" / "saved", RUNS / "universal_zero3_w3" / "saved" / "global_step2_universal"),
    ):
        ckpttool.convert(source, tmp_path / source.parent.name, producer="deepspeed:universal")
        require_content_of(theirs, tmp_path / source.parent.name)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    "name", ["zero1_w2", "zero2_w3", "zero2_fp16_w3", "zero2_fp32_w2", "zero3_w3", "zero3_fp32_w2"]
)
def test_deepspeed_itself_makes_the_same_universal_checkpoint(name: str, tmp_path: Path) -> None:
    with mock.patch.object(sys, "path", [str(GENERATORS), *sys.path]):
        generator = importlib.import_module("deepspeed_runs")
    source = RUNS / name / "saved" / "global_step2"
    generator.convert_to_universal(source, tmp_path / "theirs")
    ckpttool.convert(source, tmp_path / "ours", producer="deepspeed:universal")
    require_content_of(tmp_path / "theirs", tmp_path / "ours")


def require_same_run(source: Path, out: Path, folder: Path) -> None:
    """Two checkpoints have the same parameters, and the same state of each."""
    ckpttool.convert(source, folder / "a.pt", optim_keys="fqn", overwrite=True)
    ckpttool.convert(out, folder / "b.pt", overwrite=True)
    before, after = (torch.load(folder / name, weights_only=False) for name in ("a.pt", "b.pt"))
    root = next(key for key in ("optim", "optimizer") if key in before)
    names = {f"{n}.{k}": v for n, one in before[root]["state"].items() for k, v in one.items()}
    require_same(parameters_of(after), {**before["model"], **names})


def test_a_run_of_fsdp_becomes_universal(tmp_path: Path) -> None:
    """FSDP2 in DCP, FSDP1 in rank files of flat parameters, and a file with ids for names."""
    for sample in ("dcp/fsdp2_w2", "rank/fsdp1_w2", "torch/full"):
        source = next((CHECKPOINTS / sample).glob("ckpt*"))
        out = tmp_path / sample.replace("/", "_") / "global_step7_universal"
        ckpttool.convert(source, out, producer="deepspeed:universal", check=True)
        require_same_run(source, out, tmp_path)


def test_what_cannot_become_universal(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": 1}, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="there is no optimizer"):
        ckpttool.convert(tmp_path / "model.pt", tmp_path / "out", producer="deepspeed:universal")
    # What the fp16 wrappers without ZeRO keep of their scale is none of ZeRO's.
    with pytest.raises(LossError, match=r"`loss_scaler.cur_scale`.*ZeRO has a loss scaler of its own"):
        ckpttool.convert(RUNS / "zero0_fp16_w2" / "saved", tmp_path / "out", producer="deepspeed:universal")


# In training, and by strangers ----------------------------------------------------------------------------------------


def test_load_in_training() -> None:
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.down = nn.Embedding(13, 5), nn.Linear(5, 7), nn.Linear(7, 5)
            self.norm, self.scale = nn.LayerNorm(5), nn.Parameter(torch.zeros(1))
            self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
            self.head = nn.Linear(5, 13, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    model, wanted = Model(), expected("zero3_w3")
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim <= 1]}]
    optimizer = torch.optim.AdamW(groups)
    ckpttool.load(RUNS / "zero3_w3" / "saved", model, optimizer)
    assert all(value.equal(wanted["weights"][name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert optimizer.state[parameter]["exp_avg"].equal(wanted["moments"][name]["exp_avg"].view(parameter.shape))


class _Command:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("file", [optim(1), "mp_rank_00_model_states.pt"])
def test_no_pickle_is_executed(file: str, tmp_path: Path) -> None:
    path, marker = copied("zero2_w3", tmp_path), tmp_path / "marker"
    change(path / file, lambda tree: tree.update(overflow=_Command(marker), iteration=_Command(marker)))
    warnings = [str(warning) for warning in ckpttool.inspect(path).warnings]
    assert any("os.system" in text or "posix.system" in text for text in warnings), warnings
    assert not marker.exists()


def test_no_optimizer_of_bfloat16_without_zero(tmp_path: Path) -> None:
    path = copied("zero0_fp32_w2", tmp_path)
    change(path / "mp_rank_00_model_states.pt", lambda tree: tree.update(optimizer=None))
    assert any("no optimizer state" in str(warning) for warning in ckpttool.inspect(path).warnings)


def test_no_file_of_the_optimizer_is_left(tmp_path: Path) -> None:
    path = copied("zero2_w3", tmp_path)
    for rank in range(3):
        (path / optim(rank)).unlink()
    assert any("the weights are those in 16 bits" in str(warning) for warning in ckpttool.inspect(path).warnings)
    wanted = torch.load(path / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    require_same(converted(path, tmp_path)["model"], wanted)


def test_what_a_script_calls_model_is_its_own(tmp_path: Path) -> None:
    path = copied("zero2_w3", tmp_path)
    change(path / "mp_rank_00_model_states.pt", lambda tree: tree.update(model={"up.weight": torch.ones(2)}, zero=3))
    state = converted(path, tmp_path)
    assert state["client_state"]["model"]["up.weight"].equal(torch.ones(2)) and state["client_state"]["zero"] == 3
    require_same(state["model"], expected("zero2_w3")["weights"])


def test_ties_that_no_file_names(tmp_path: Path) -> None:
    """As files of before 2023-04: tied placeholders of ZeRO-3 are of one storage."""
    load = torch_file.load

    def without(*arguments: Any) -> torch_file.TorchFile:
        loaded = load(*arguments)
        loaded.tree.pop("shared_params", None)
        return loaded

    with mock.patch.object(torch_file, "load", without):
        state = converted(RUNS / "zero3_w3" / "saved", tmp_path)
    require_same(state["model"], expected("zero3_w3")["weights"])


def test_pieces_of_many_ranks_take_a_few_bytes_each(tmp_path: Path) -> None:
    """Of 60 parameters on 32 ranks, in files as the bench writes them: those that are cut alike share their boxes."""
    with mock.patch.object(sys, "path", [str(ROOT / "samples" / "bench"), *sys.path]):
        bench = importlib.import_module("zero")
    shapes = {f"layers.{i}.weight": torch.Size(((37, 29), (5, 41))[i % 2]) for i in range(60)}
    with mock.patch.multiple(bench, RANKS=32, shapes=lambda: shapes):
        bench.write(tmp_path)
    ckpttool.inspect(tmp_path / "run")  # imports, and what is kept between calls
    gc.collect()
    tracemalloc.start()
    try:
        catalogue = ckpttool.inspect(tmp_path / "run")
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    chunks = sum(len(tensor.chunks) for tensor in catalogue.tensors)
    assert chunks > 9000 and taken < 64 * chunks, taken / chunks
