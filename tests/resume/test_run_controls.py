"""Controls of `verify-resume run`: resumes that leave one part out, which the comparison must notice."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from support import forked_command

from ckpttool.cli.junit import junit_xml
from ckpttool.resume import controls
from ckpttool.resume import observe as inject
from ckpttool.resume.observe.site.control import Perturbation
from ckpttool.resume.results import Control as Outcome
from ckpttool.resume.results import RunReport
from ckpttool.resume.runs import run

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN = """
import sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
out, options = sys.argv[1], sys.argv[2:]
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(12, 3)
step = 0
if "--resume" in options:
    state = torch.load(options[-1])
    model.load_state_dict(state["model"])
    step = state["step"]
batches = iter(torch.utils.data.DataLoader(data[step * 2:], batch_size=2))
while step < 4:
    loss = model(next(batches)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if "--vain" in options:  # what is saved does not come from training
        torch.save({"model": {name: torch.full_like(one, step) for name, one in model.state_dict().items()},
                    "step": step}, f"{out}/step-{step}.pt")
        print("step", step, "loss", 1 / step)
        continue
    print("step", step, "loss", loss.item())
    torch.save({"model": model.state_dict(), "step": step}, f"{out}/step-{step}.pt")
"""


def plain(folder: Path, *more: str, **options: Any) -> RunReport:
    given: dict[str, Any] = {"at": 2, "until": 4, "checkpoints": "OUT/step-{step}.pt", "control": True, **options}
    script = folder / "plain.py"
    script.write_text(PLAIN)
    with forked_command.forked(str(folder)):
        return run([sys.executable, str(script), "OUT", *more], resume_with="... --resume {checkpoint}", **given)


def noticed(report: RunReport) -> dict[str, bool | None]:
    return {one.name: one.noticed for one in report.controls}


def test_what_a_run_does_not_depend_on_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    report = plain(tmp_path, tell=told.append, keep=tmp_path / "kept")
    assert (report.verdict, report.exit_code) == ("same", 0), report.message
    # It draws no number, its optimizer has no state, and it has no scheduler.
    found = {"weights": True, "moments": None, "rng": False, "scheduler": None, "loader": True}
    assert noticed(report) == found, report.controls
    by_name = {one.name: one for one in report.controls}
    assert [by_name[name].step for name in ("weights", "loader")] == [3, 3]
    assert "batch" in (by_name["loader"].what or "")
    assert by_name["moments"].message == "none: the optimizers have no moments"
    assert by_name["rng"].message == "not proven: this run does not depend on its RNG state"
    clause = "; controls noticed: weights, loader; not proven: this run does not depend on its RNG state"
    assert report.message.endswith(clause)
    # What they cost is said before they run, and they go no further than the first save after the resume.
    assert (report.cost.runs, report.cost.steps) == (6, 10)
    assert any(line.startswith("3 controls: starts of the command, to step 3") for line in told)
    # The runs that are compared are those that leave nothing out, each as it was.
    assert [one.name for one in report.runs] == ["A", "B", "B2"] and not report.findings and not report.notes
    assert sorted(os.listdir(report.runs[0].folder)) == [f"step-{step}.pt" for step in range(1, 5)]


@pytest.mark.long
def test_a_comparison_that_notices_no_control_proves_nothing(tmp_path: Path) -> None:
    report = plain(tmp_path, "--vain", observe=False)
    assert (report.verdict, report.exit_code) == ("unproven", 9), report.message
    assert report.message.startswith("not proven: no control is noticed")


@pytest.mark.long
def test_a_script_with_everything_notices_each_control() -> None:
    command = [sys.executable, str(SCRIPTS / "train_single.py"), "--out", "OUT", "--steps", "8"]
    report = run(
        command, at=4, until=6, checkpoints="OUT/ckpt-{step}.pt", resume_with="... --resume {checkpoint}", control=True
    )
    assert report.verdict == "same", report.message
    found = {"weights": True, "moments": True, "rng": True, "scheduler": True, "loader": None}
    assert noticed(report) == found, report.controls


@pytest.mark.long
def test_a_run_that_was_stopped_has_controls_too(tmp_path: Path) -> None:
    report = plain(tmp_path, stop="sigkill")
    assert report.verdict == "same", report.message
    assert noticed(report)["weights"] and noticed(report)["loader"], report.controls


@pytest.mark.long
def test_each_rank_leaves_out_its_shards() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(SCRIPTS / "train_fsdp2.py"), "--out", "OUT", "--steps", "8"]
    report = run(
        command, at=4, until=6, checkpoints="OUT/step-{step}", resume_with="... --resume {checkpoint}", control=True
    )
    assert report.verdict == "same", report.message
    found = {"weights": True, "moments": True, "rng": True, "scheduler": True, "loader": None}
    assert noticed(report) == found, report.controls


# What is changed ------------------------------------------------------------------------------------------------------


def control(what: str, folder: Path) -> Perturbation:
    return Perturbation(what, str(folder), torch)


def count(folder: Path) -> int:
    return inject.read(str(folder)).controlled


def stepped(optimizer_class: Any, **options: Any) -> tuple[torch.nn.Module, Any, Any]:
    """A model, its optimizer after one step, and a closure."""
    model = torch.nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, optimizer, closure


def test_moments_are_zero_and_counters_stay(tmp_path: Path) -> None:
    _, optimizer, _ = stepped(torch.optim.AdamW)
    one = control("moments", tmp_path)
    one.control_step(optimizer)
    states = [*optimizer.state.values()]
    assert not any(state[name].any() for state in states for name in ("exp_avg", "exp_avg_sq"))
    assert [float(state["step"]) for state in states] == [1.0, 1.0] and count(tmp_path) == 4
    # The second step is left alone, and so is an optimizer without moments.
    states[0]["exp_avg"].fill_(1.0)
    one.control_step(optimizer)
    assert states[0]["exp_avg"].all()
    _, optimizer, _ = stepped(torch.optim.SGD, lr=0.1)
    one.control_step(optimizer)
    assert count(tmp_path) == 4


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "NAdam", "Rprop", "Adadelta", "ASGD", "RMSprop"])
def test_an_optimizer_goes_on_without_its_moments(name: str, tmp_path: Path) -> None:
    model, optimizer, closure = stepped(getattr(torch.optim, name))
    for _ in range(2):
        optimizer.step(closure)
    control("moments", tmp_path).control_step(optimizer)
    optimizer.step(closure)
    assert count(tmp_path) and next(model.parameters()).shape == (2, 3)


def test_a_scheduler_is_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer, _ = stepped(torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    monkeypatch.setattr("ckpttool.resume.observe.site.control.living", lambda kind: [[scheduler]])
    control("scheduler", tmp_path).control_step(optimizer)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"], count(tmp_path)) == (0, 0.1, 1)


def test_one_weight_is_another(tmp_path: Path) -> None:
    model, optimizer, _ = stepped(torch.optim.SGD, lr=0.1)
    before = [one.clone() for one in model.parameters()]
    control("weights", tmp_path).control_step(optimizer)
    differing = [int((one != other).sum()) for one, other in zip(before, model.parameters(), strict=True)]
    assert differing == [1, 0] and count(tmp_path) == 1


def test_generators_are_seeded_until_the_first_step(tmp_path: Path) -> None:
    _, optimizer, _ = stepped(torch.optim.SGD, lr=0.1)
    one = control("rng", tmp_path)
    kept = random.getstate(), torch.get_rng_state()
    try:
        states = [random.getstate()]
        for act in (one.control_forward, one.control_forward, lambda: one.control_step(optimizer)):
            act()
            states.append(random.getstate())
        # A forward pass before the restore is not the last word.
        assert len({repr(state) for state in states}) == 4
        one.control_forward()
        assert random.getstate() == states[-1]
    finally:
        random.setstate(kept[0])
        torch.set_rng_state(kept[1])


# What is said of it ---------------------------------------------------------------------------------------------------


def judged(*outcomes: Outcome) -> RunReport:
    report = RunReport(words=[], rule="bitwise", rule_message="", at=1, until=2, stop="copy", message="exact resume")
    report.controls = [*outcomes]
    controls.judge(report)
    return report


def test_a_verdict_says_what_the_controls_prove() -> None:
    seen, unseen = Outcome("weights", True, "noticed", 3, "a difference"), Outcome("rng", False, "not proven: it")
    failed = Outcome("moments", None, "not possible: run control-moments ended with exit code 1", possible=False)
    assert judged().message == "exact resume"
    assert judged(failed).message == "exact resume; no control was possible"
    report = judged(seen, unseen, failed)
    assert report.message == (
        "exact resume; controls noticed: weights; not proven: this run does not depend on its RNG state; "
        "controls not possible: moments"
    )
    assert report.verdict == "same" and judged(unseen, failed).verdict == "unproven"
    suite = ElementTree.fromstring(junit_xml(report))[0]
    cases = {case.get("name"): [one.tag for one in case] for case in suite if "control" in str(case.get("classname"))}
    assert cases == {"weights": ["system-out"], "rng": ["skipped"], "moments": ["skipped"]}
    assert (suite.get("tests"), suite.get("skipped")) == ("4", "2")
