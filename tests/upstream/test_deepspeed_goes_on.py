"""Real DeepSpeed loads what is written here, and takes the next step that PyTorch takes; and back.

`make test-all` has DeepSpeed: `DS_BUILD_OPS=0 pip install deepspeed==0.19.8`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import CHECKPOINTS, GENERATORS, ROOT

import ckpttool

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
SCRIPT = ROOT / "tests" / "support" / "deepspeed_step.py"


def step(world: int, *arguments: object) -> Any:
    """What DeepSpeed has after a step; the third argument is where it puts it."""
    launch(world, SCRIPT, *arguments)
    return torch.load(str(arguments[2]), weights_only=False)


def launch(world: int, *command: object) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    run(*launcher, *command)


def run(*arguments: object) -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    return run_of_pytorch(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """One whose buffer and frozen parameter are not those that the script begins with, sharded as FSDP2 shards them."""
    folder = tmp_path_factory.mktemp("moved")
    path, before, after = run_of_pytorch(folder, by=1)
    ckpttool.reshard(path, folder / "sharded", to_world=2, shard=["*frozen"])
    return folder / "sharded", before, after


def run_of_pytorch(folder: Path, by: float = 0) -> tuple[Path, Any, Any]:
    """A run of PyTorch: its state after two steps in a DCP directory, its weights then, and after the next step."""
    sys.path[:0] = [str(GENERATORS), str(SCRIPT.parent)]
    from deepspeed_runs import groups_of, model_class  # type: ignore[import-not-found]
    from deepspeed_step import loss_of  # type: ignore[import-not-found]
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    model = model_class()()
    model.frozen.data.add_(by)
    model.seen.add_(int(by))
    optimizer = torch.optim.AdamW(groups_of(model))

    def train(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()

    for number in range(2):
        train(number)
    names, state = get_state_dict(model, optimizer)
    path = folder / "step-2"
    save({"model": names, "optimizer": state, "global_step": 2, "epoch": 1}, checkpoint_id=path, no_dist=True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    train(2)
    return path, before, {name: value.detach().clone() for name, value in model.named_parameters()}


def require_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same step, to the rounding of gradients that were averaged over ranks."""
    assert len(found) == 8  # trained; those tied and frozen are not asked for
    for name, value in ((name, value) for name, value in found.items() if name in wanted):
        # The loss does not depend on `scale`, before a norm: its gradient is rounding alone, which Adam scales up.
        tolerance = 2e-3 if name == "scale" else 1e-6
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 2)])
def test_a_run_of_pytorch_goes_on_under_deepspeed(
    stage: int, world: int, trained: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    source, before, wanted = trained
    universal = tmp_path / "global_step2_universal"
    ckpttool.convert(source, universal, producer="deepspeed:universal")
    after = step(world, stage, universal, tmp_path / "after.pt", "--universal", "--save", tmp_path / "saved")
    assert all(value.equal(before[name]) for name, value in after["loaded"].items())
    # ZeRO 3 of DeepSpeed takes the hyper-parameters of the first group, of matrices, for all.
    require_close(after["weights"], {n: v for n, v in wanted.items() if stage < 3 or v.ndim > 1})
    assert (after["steps"], after["epoch"]) == (3, 1)
    # And back: what DeepSpeed has saved is the same in the catalogue.
    ckpttool.convert(tmp_path / "saved", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=False)
    assert all(back["model"][name].equal(value) for name, value in after["weights"].items())
    # Its ZeRO 3 has one tensor for the step of all groups, after a universal checkpoint, and counts it for each.
    steps = {float(one["step"]) for one in back["optimizer"]["state"].values()}
    assert steps == ({4.0} if stage == 3 else {3.0})
    decays = [group["weight_decay"] for group in back["optimizer"]["param_groups"]]
    assert decays == ([0.1, 0.1] if stage == 3 else [0.1, 0.0])


def test_a_run_of_deepspeed_goes_on_with_other_ranks_and_another_stage(tmp_path: Path) -> None:
    """ZeRO-3 of 2 as DeepSpeed itself goes on, and by a universal checkpoint as ZeRO-1 of 3."""
    saved = CHECKPOINTS / "deepspeed" / "zero3_fp32_w2" / "saved" / "global_step2"
    wanted = step(2, 3, saved, tmp_path / "native.pt")
    universal = tmp_path / "global_step2_universal"
    ckpttool.convert(saved, universal, producer="deepspeed:universal")
    found = step(3, 1, universal, tmp_path / "universal.pt", "--universal")
    assert all(value.equal(wanted["loaded"][name]) for name, value in found["loaded"].items())
    require_close(found["weights"], wanted["weights"])
    assert found["steps"] == wanted["steps"] == 3


# ZeRO as it is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 2), (3, 3)])
def test_zero_is_loaded_as_deepspeed_loads_its_own(
    stage: int, world: int, moved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    """`load_checkpoint` and nothing else: the weights are the same bits, and so are frozen parameters and buffers; the
    next step is that of PyTorch, with the learning rate and the weight decay of each group."""
    source, before, wanted = moved
    ckpttool.convert(source, tmp_path / "run", producer=f"deepspeed:zero{stage}", to_world=world, check=True)
    out = tmp_path / "run" / "global_step2"
    after = step(world, stage, out, tmp_path / "after.pt", "--save", tmp_path / "saved")
    assert all(value.equal(before[name]) for name, value in after["loaded"].items())
    assert after["others"]["frozen"].equal(before["frozen"]) and after["others"]["seen"].tolist() == [4, 5]
    require_close(after["weights"], wanted)
    assert (after["steps"], after["epoch"]) == (3, 1)
    # `zero_to_fp32` reads it, too; of ZeRO 1 without what is frozen, as of DeepSpeed's own.
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # type: ignore[import-not-found]

    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "run"))
    assert before.keys() - found.keys() == ({"frozen"} if stage == 1 else set())
    assert all(value.equal(before[name]) for name, value in found.items() if name in before)
    assert found["seen"].tolist() == [4, 5]
    # And back.
    ckpttool.convert(tmp_path / "saved", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=False)
    assert all(back["model"][name].equal(value) for name, value in after["weights"].items())
    assert {float(one["step"]) for one in back["optimizer"]["state"].values()} == {3.0}
    assert [group["weight_decay"] for group in back["optimizer"]["param_groups"]] == [0.1, 0.0]


def test_zero_2_of_2_goes_on_as_zero_3_of_3(tmp_path: Path) -> None:
    saved = CHECKPOINTS / "deepspeed" / "zero2_fp32_w2" / "saved"
    clipping = ["--config", '{"gradient_clipping": 1.0}']  # which ZeRO 2 takes from the checkpoint, and ZeRO 3 does not
    wanted = step(2, 2, saved / "global_step2", tmp_path / "native.pt", *clipping)
    ckpttool.convert(saved, tmp_path / "run", producer="deepspeed:zero3", to_world=3)
    found = step(3, 3, tmp_path / "run" / "global_step2", tmp_path / "found.pt", *clipping)
    assert all(value.equal(wanted["loaded"][name]) for name, value in found["loaded"].items())
    require_close(found["weights"], wanted["weights"])
    assert found["steps"] == wanted["steps"] == 3


def test_round_robin_groups_of_another_world(tmp_path: Path) -> None:
    """What those of 16 bits become in a step is right only if the float32 ones are in the order of DeepSpeed."""
    config = ["--config", '{"bf16": {"enabled": true}, "zero_optimization": {"round_robin_gradients": true}}']
    saved = CHECKPOINTS / "deepspeed" / "zero2_round_robin_w3" / "saved"
    wanted = step(3, 2, saved / "global_step2", tmp_path / "native.pt", *config)
    ckpttool.convert(saved, tmp_path / "run", producer="deepspeed:zero2", to_world=2)
    found = step(2, 2, tmp_path / "run" / "global_step2", tmp_path / "found.pt", *config)
    for name, value in wanted["module"].items():
        tolerance = 1e-2 if name == "scale" else 2**-8 * float(value.abs().max())
        torch.testing.assert_close(found["module"][name], value, rtol=0, atol=tolerance)


def test_a_run_of_fsdp1_goes_on_as_universal_and_as_zero_1_of_2(tmp_path: Path) -> None:
    """Rank files of flat parameters become a universal checkpoint, and that one of ZeRO 1 of two ranks."""
    launch(2, SCRIPT.with_name("fsdp1_steps.py"), tmp_path / "ranks", tmp_path / "weights.pt")
    before, wanted = torch.load(tmp_path / "weights.pt")
    universal = tmp_path / "global_step2_universal"
    ckpttool.convert(tmp_path / "ranks", universal, producer="deepspeed:universal", check=True)
    ckpttool.convert(universal, tmp_path / "run", producer="deepspeed:zero1", to_world=2, check=True)
    for source, options in ((universal, ["--universal"]), (tmp_path / "run" / "global_step2", [])):
        after = step(2, 1, source, tmp_path / "after.pt", "--one-group", *options)
        assert all(value.equal(before[name]) for name, value in after["loaded"].items())
        require_close(after["weights"], wanted)
        assert (after["steps"], after["epoch"]) == (3, 1)


@pytest.mark.parametrize("name", ["zero2_w3", "zero3_w3"])
def test_what_was_written_becomes_universal_by_deepspeed(name: str, tmp_path: Path) -> None:
    """`ds_to_universal` makes of another world what it makes of the one that was saved."""
    sys.path.insert(0, str(GENERATORS))
    from deepspeed_runs import convert_to_universal

    saved = CHECKPOINTS / "deepspeed" / name / "saved"
    ckpttool.convert(saved, tmp_path / "run", producer=f"deepspeed:{name[:5]}", to_world=2, drop=["rng"])
    for source, out in ((saved, "real"), (tmp_path / "run", "own")):
        convert_to_universal(source / "global_step2", tmp_path / out)
    files = sorted((tmp_path / "real" / "zero").glob("*/*.pt"))
    assert len(files) > 20
    for file in files:
        other = tmp_path / "own" / file.relative_to(tmp_path / "real")
        real, own = (torch.load(path, weights_only=False) for path in (file, other))
        if isinstance(real, dict):
            real, own = real["param"], own["param"]
        assert torch.as_tensor(real).equal(torch.as_tensor(own)), file


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("fault", [[], ["--without-optimizer"]], ids=["right", "without optimizer"])
def test_a_resume_of_deepspeed_is_verified(stage: int, fault: list[str], tmp_path: Path) -> None:
    """Of a script as people write it, without an option of ours."""
    script = SCRIPT.with_name("deepspeed_train.py")
    training = ["--nproc-per-node", "2", "--standalone", script, "--out", tmp_path / "out", "--stage", stage, *fault]
    command = [sys.executable, "-m", "ckpttool", "verify-resume", "run", "--", "torchrun", *map(str, training)]
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": places}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = "the optimizer was not loaded" if fault else "PASS  exact resume"
    assert said in done.stdout and done.returncode == len(fault), done.stdout + done.stderr
