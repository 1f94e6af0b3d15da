"""Real DeepSpeed loads what is written here, and takes the next step that PyTorch takes; and back.

Run with the Python of an environment that has DeepSpeed: `DS_BUILD_OPS=0 pip install deepspeed==0.19.8`.
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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(SCRIPT), *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(str(arguments[2]), weights_only=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A run of PyTorch: its state after two steps in a DCP directory, its weights then, and after the next step."""
    sys.path[:0] = [str(GENERATORS), str(SCRIPT.parent)]
    from deepspeed_runs import groups_of, model_class  # type: ignore[import-not-found]
    from deepspeed_step import loss_of  # type: ignore[import-not-found]
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    model = model_class()()
    optimizer = torch.optim.AdamW(groups_of(model))

    def train(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()

    for number in range(2):
        train(number)
    names, state = get_state_dict(model, optimizer)
    path = tmp_path_factory.mktemp("run") / "step-2"
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
