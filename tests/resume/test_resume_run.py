"""`verify-resume run` with real processes: scripts that resume exactly, that forget something, hang, crash or fork.

The scripts save with safetensors or torch alone, and the faults are in them: nothing of ckpttool is in their processes.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from support import forked_command
from support.cli import run as run_command
from support.script_faults import FAULTS, ScriptFault

from ckpttool.cli.junit import junit_xml
from ckpttool.errors import OverwriteError, StorageError, UsageError
from ckpttool.reports.resumed import blocks, page
from ckpttool.reports.terminal import Terminal
from ckpttool.resume import checkpoints, compare, starts
from ckpttool.resume.observe.site import keep
from ckpttool.resume.results import Compared, Loss, RunDifference, RunReport, Saved, ScriptRun
from ckpttool.resume.runs import run
from ckpttool.resume.starts import _failure

SCRIPTS = Path(__file__).parent / "scripts"
FAST = [sys.executable, str(SCRIPTS / "train_numpy.py"), "--out", "OUT"]
RESUME = "... --resume {checkpoint}"


FROZEN = """
import sys, numpy
from safetensors.numpy import save_file
for step in range(1, 6):
    save_file({"weight": numpy.ones(3)}, f"{sys.argv[1]}/step-{step}.safetensors")
"""
# What torchrun writes when a rank has failed.
LAUNCHER = """
W1129 04:24:17.575000 27718 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 28127 closing signal
E1129 04:24:17.607000 27718 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2) local_rank: 1
Traceback (most recent call last):
  File "torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
====
Root Cause (first observed failure):
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def runs(*more: str, command: list[str] | None = None, **options: Any) -> RunReport:
    """The report of the fast script, resumed after step 3 of 5."""
    given = {"at": 3, "until": 5, "checkpoints": "OUT/step-{step}.safetensors"}
    given |= {"resume_with": RESUME, "timeout": 60.0, **options}
    return run([*(command or FAST), "--steps", "5", *more], **given)  # type: ignore[arg-type]


def test_a_script_that_resumes_exactly_is_the_same(tmp_path: Path) -> None:
    report = runs(keep=tmp_path / "kept")
    assert (report.verdict, report.exit_code, report.findings) == ("same", 0, []), report.message
    # Two starts: A is not repeated, as B differs in nothing.
    assert [run.name for run in report.runs] == ["A", "B"] and report.runs[1].resumed_at == 3
    assert not report.notes and (report.cost.runs, report.cost.steps) == (2, 7)
    assert {row.what for row in report.compared if row.equal} >= {"step 4: model", "step 5: optimizer", "loss"}
    # Each run has written to a directory of its own.
    assert len({run.folder for run in report.runs}) == 2
    assert sorted(os.listdir(tmp_path / "kept" / "A" / "out")) == [f"step-{step}.safetensors" for step in range(1, 6)]


@pytest.mark.parametrize(("fault", "named"), [("optimizer", "optimizer"), ("data", "data"), ("swapped", "exp_avg")])
def test_a_fault_is_found_at_its_step(fault: str, named: str) -> None:
    report = runs("--fault", fault)
    assert (report.verdict, report.exit_code, report.first_step) == ("differs", 1, 4), report.message
    assert named in f"{report.message} {[finding.message for finding in report.findings]}"
    assert not report.nondeterministic
    # It knows no torch, so that the hook sees no step: of moments alone, nothing says how they came to differ.
    if fault == "swapped":
        why = "not determined: the hook did not see the state of run B when step 4 began"
        assert report.cause == why
        assert report.message.startswith("resume is not exact: in the checkpoint of step 4, 4 of 5 elements")


def test_a_script_that_trains_from_its_start_again_has_not_resumed() -> None:
    # Its seeds are its own, so that every later step is that of A.
    report = runs("--fault", "ignored")
    assert (report.verdict, report.findings[0].kind) == ("differs", "not resumed"), report.message
    assert "did not resume: run B trained step 1 again after it was resumed from step 3" in report.message
    # A script that prints nothing has saved its steps again.
    report = runs("--fault", "ignored", loss="silent (.)")
    assert (report.verdict, report.findings[0].kind) == ("differs", "not resumed"), report.message


SPARSE = """
import argparse, os
import numpy as np
from safetensors.numpy import load_file, save_file
parser = argparse.ArgumentParser()
for name in ("--out", "--resume", "--fault", "--print"):
    parser.add_argument(name)
parser.add_argument("--steps", type=int)
parser.add_argument("--every", type=int, default=2)
args = parser.parse_args()
rng = np.random.default_rng(0)
weight, step = rng.normal(size=5), 0
if args.resume and args.fault != "ignored":
    saved = load_file(args.resume)
    weight, step = saved.get("model.weight", weight), int(saved["global_step"])
    for _ in range(step):
        rng.normal(size=5)
while step < args.steps:
    weight, step = 0.9 * weight + rng.normal(size=5), step + 1
    if args.print:
        print(args.print.format(step=step, loss=weight.sum()))
    if step % args.every == 0:
        state = {"global_step": np.array(step)} | ({"model.weight": weight} if args.fault != "step alone" else {})
        save_file(state, f"{args.out}/step-{step}.safetensors")
"""


def sparse(*more: str, **options: Any) -> RunReport:
    return runs(*more, command=[sys.executable, "-c", SPARSE, "--out", "OUT"], **options)


@pytest.mark.parametrize("fault", ["", "ignored"])
def test_a_command_that_nothing_shows_to_resume_is_no_pass(fault: str) -> None:
    # It saves at the stop and at the end, prints nothing, and has no optimizer that the hook counts.
    told: list[str] = []
    with pytest.raises(UsageError, match="run A prints and saves no step before step 2") as raised:
        sparse("--fault", fault, at=2, until=4, tell=told.append)
    assert "print a loss of each step" in (raised.value.hint or "")
    assert [line for line in told if line.startswith("run ")] == ["run A: trains 4 steps"]
    # What finds its checkpoint by itself could resume from a later one.
    words = f"{sys.executable} -c {shlex.quote(SPARSE)} --out OUT --steps 5 --resume OUT/step-2.safetensors"
    with pytest.raises(UsageError, match="run B ends as run A does, but nothing shows that it resumed"):
        sparse("--fault", fault, at=2, until=4, resume_with=f"{words} --fault={fault}")


HIDDEN = """
import sys, torch
class Warm(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self):
        raise NotImplementedError("it follows from the step")
torch.manual_seed(0)
model, data, step = torch.nn.Linear(4, 1), torch.randn(40, 4), 0
optimizer = torch.optim.AdamW(model.parameters())
if len(sys.argv) > 2:
    state = torch.load(sys.argv[2])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
schedule = Warm(optimizer, lambda epoch: 1.0)
while step < 6:
    loss = model(data[4 * step : 4 * step + 4]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 2 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{sys.argv[1]}/step_{step}.pt")
"""


def test_a_state_that_the_hook_could_not_record_is_not_proven(tmp_path: Path) -> None:
    (tmp_path / "hidden.py").write_text(HIDDEN)
    with forked_command.forked(str(tmp_path)):
        report = run(
            [sys.executable, str(tmp_path / "hidden.py"), "OUT"],
            at=2, until=6, checkpoints="OUT/step_{step}.pt", resume_with="... {checkpoint}",
        )  # fmt: skip
    assert (report.verdict, report.exit_code) == ("unproven", 9), report.message
    assert "run B: the hook could not do everything: begin step: NotImplementedError" in report.message


BEFORE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10):
    for (x,) in DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4):
        model(x).sum().backward()
        optimizer.step()
"""
AFTER = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model, data, step = torch.nn.Linear(4, 1), torch.randn(40, 4), 0
optimizer = torch.optim.AdamW(model.parameters())
if len(sys.argv) > 2:
    state = torch.load(sys.argv[2])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
first, skipped = divmod(step, 10)
for epoch in range(first, 3):
    order = torch.Generator().manual_seed(epoch)
    for at, (x,) in enumerate(DataLoader(TensorDataset(data), batch_size=4, shuffle=True, generator=order)):
        if epoch > first or at >= skipped:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            time.sleep(0.05)
            print(f"step {step}: loss {loss.item():.6f}")
            if step % 3 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, f"{sys.argv[1]}/step_{step}.pt")
"""


@pytest.mark.long
@pytest.mark.parametrize("given", [{}, {"at": 6, "until": 15}])
def test_a_program_before_that_takes_more_steps_is_not_what_is_verified(given: dict[str, int], tmp_path: Path) -> None:
    """Its epochs end, and its steps are counted, too: neither is of the training that saves."""
    for name, text in (("before.py", BEFORE), ("after.py", AFTER)):
        (tmp_path / name).write_text(text)
    first, second = (shlex.join([sys.executable, str(tmp_path / name)]) for name in ("before.py", "after.py"))
    script = f'{first}; exec {second} "$@"'
    report = run(
        ["sh", "-c", script, "sh", "OUT"], checkpoints="OUT/step_{step}.pt", resume_with="... {checkpoint}", **given
    )
    assert (report.verdict, "epoch" in report.crossed) == ("same", True), report.message
    assert "hook did not see" not in str(report.notes) and report.until <= 30


def test_what_is_printed_or_saved_before_the_stop_shows_the_resume() -> None:
    assert sparse("--print", "step {step}: loss {loss}", at=2, until=4).verdict == "same"
    # Losses without a step are counted from the resume on, and are not those of the first steps.
    bare = sparse("--every", "1", "--print", "loss {loss}", loss=r"loss (\S+)", at=2)
    assert bare.verdict == "same", bare.message


def test_a_checkpoint_of_a_step_alone_shows_nothing() -> None:
    with pytest.raises(UsageError, match="has neither weights nor an optimizer"):
        sparse("--every", "1", "--fault", "step alone")


SILENT = """
import argparse, torch
parser = argparse.ArgumentParser()
for name in ("--out", "--resume"):
    parser.add_argument(name)
parser.add_argument("--steps", type=int)
args = parser.parse_args()
torch.manual_seed(1)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
step = 0
if args.resume and {loads}:
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < args.steps:
    model(torch.full((2, 3), float(step))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
saved = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}}
torch.save(saved, f"{{args.out}}/step-{{step}}.pt")
"""


@pytest.mark.long
@pytest.mark.parametrize("loads", [True, False])
def test_a_silent_script_is_told_by_the_number_of_its_steps(loads: bool, tmp_path: Path) -> None:
    # It prints nothing, and saves at its end only: what it has saved after the resume is that of A in both cases.
    script = tmp_path / "train.py"
    script.write_text(SILENT.format(loads=loads))
    command = [sys.executable, str(script), "--out", "OUT"]
    report = runs(command=command, checkpoints="OUT/step-{step}.pt", stop="max-steps=--steps")
    if loads:
        assert (report.verdict, report.findings) == ("same", []), report.message
    else:
        assert (report.verdict, report.findings[0].kind) == ("differs", "not resumed"), report.message
        assert "took 5 optimizer steps after it was resumed from step 3, as many as run A in all" in report.message


BUDGET = """
import sys, torch
out, steps, weight, step, budget = sys.argv[1], int(sys.argv[3]), torch.zeros(2), 0, 100
if len(sys.argv) > 4:
    saved = torch.load(sys.argv[5])
    weight, step = saved["model"]["weight"], saved["step"]
while step < steps:
    weight, step, budget = weight + step + 1, step + 1, budget - 3
    print(f"step {step}: loss {weight[0]}")
    state = {"model": {"weight": weight}, "step": step, "budget": budget, "arguments": sys.argv}
    torch.save(state, f"{out}/step-{step}.pt")
"""


def test_a_value_that_training_changes_is_judged_whatever_it_is_called() -> None:
    report = runs(command=[sys.executable, "-c", BUDGET, "OUT"], checkpoints="OUT/step-{step}.pt")
    assert (report.verdict, report.exit_code) == ("differs", 1), report.message
    assert [finding.name for finding in report.findings] == ["other.budget"] and report.unproven == []


def test_arguments_beside_a_number_of_steps_are_not_judged(tmp_path: Path) -> None:
    """`vars(args)` has the checkpoint that was resumed from, and `--steps`."""
    report, pair = RunReport(words=[], rule="bitwise", rule_message="", at=3, until=4, stop="sigkill"), []
    words = {"A": ["python", "train.py"], "B": ["python", "train.py", "--resume=step-3.pt"]}
    for name, resume, counted in (("A", None, 4), ("B", "step-3.pt", 5)):
        path = tmp_path / f"{name}.pt"
        weights = {"w": torch.ones(3)}
        config = {"steps": 6, "resume": resume, "noise": False}
        torch.save({"model": weights, "iter_num": counted, "config": config}, path)
        pair.append(ScriptRun(name, words[name], "", "", checkpoints=[Saved(4, str(path), 1)], resumed_at=3))
    first = compare.compare_runs(report, pair[0], pair[1], compare.Unrepeated())
    assert (report.unjudged, report.unproven) == (["config.resume"], [])
    assert first is not None and first.names == {"iter_num"}


def test_a_difference_that_nothing_explains_is_not_proven(tmp_path: Path) -> None:
    """A never changes it, so that it may be configuration; the command that resumed does not say why it is another."""
    report, pair = RunReport(words=[], rule="bitwise", rule_message="", at=3, until=4, stop="sigkill"), []
    for name, patience, words in (("A", 5, ["train.py"]), ("B", 7, ["train.py", "--resume", "step-3.pt"])):
        path = tmp_path / f"{name}.pt"
        torch.save({"model": {"w": torch.ones(3)}, "config": {"patience": patience}}, path)
        pair.append(ScriptRun(name, words, "", "", checkpoints=[Saved(4, str(path), 1)], resumed_at=3))
    assert compare.compare_runs(report, pair[0], pair[1], compare.Unrepeated()) is None
    compare.judge(report, compare.Unrepeated())
    assert (report.verdict, report.exit_code, report.unproven) == ("unproven", 9, ["other.config.patience"])
    assert "not proven: `other.config.patience` differs in run B" in report.message
    suite = ElementTree.fromstring(junit_xml(report))[0]
    [(name, failed)] = [(case.get("name"), one) for case in suite for one in case if one.tag == "failure"]
    assert (name, (failed.text or "").split()) == ("unproven", ["other.config.patience"])


def test_what_is_not_judged_is_named_with_its_reason_everywhere(tmp_path: Path) -> None:
    report = RunReport(words=[], rule="bitwise", rule_message="", at=3, until=4, stop="copy")
    report.runs = [ScriptRun(name, [name], "", "", resumed_at=3) for name in ("A", "B", "A2")]
    for number, run_ in enumerate(report.runs):
        path = tmp_path / f"{run_.name}.pt"
        config = {"resume": run_.name if run_.name == "B" else None}
        noted = {"saved_at": time.time() + number, "port": number}
        torch.save({"model": {"w": torch.ones(3)}, "config": config, "noted": noted}, path)
        run_.checkpoints = [Saved(4, str(path), 1)]
    excused = compare.unrepeated(report.runs[0], report.runs[2])
    compare.compare_runs(report, report.runs[0], report.runs[1], excused)
    compare.judge(report, excused)
    reasons = {
        "other.noted.port": "run A2 does not repeat it",
        "other.noted.saved_at": "a time",
        "other.config.resume": "follows from the command that resumed",
    }
    assert (report.verdict, report.reasons, set(report.unjudged)) == ("same", reasons, {*reasons}), report.message
    assert "`other.noted.port` (run A2 does not repeat it), `other.noted.saved_at` (a time)" in report.message
    shown = io.StringIO()
    Terminal(shown).blocks(blocks(report.as_dict()))
    suite = ElementTree.fromstring(junit_xml(report))[0]
    [skipped] = [case[0] for case in suite if case.get("name") == "not judged"]
    for text in (shown.getvalue(), page(report.as_dict()), skipped.text or "", str(report.as_dict())):
        assert all(name in text and reason in text for name, reason in reasons.items()), text


def test_a_report_fails_once_for_each_cause() -> None:
    report = RunReport(words=[], rule="bitwise", rule_message="", at=3, until=4, stop="copy")
    report.causes = [f"the part {number} was not restored: zero" for number in range(5)]
    report.findings = [RunDifference("values differ", f"`w{number}` differs", step=4) for number in range(9)]
    report.compared = [Compared("step 4: model", "B", "A", 9, 9, "", equal=False), Compared("loss", "B", "A", 1, 0)]
    compare.judge(report, compare.Unrepeated())
    assert report.cause == "; ".join(report.causes[:4]) + "; and 1 more"
    suite = ElementTree.fromstring(junit_xml(report))[0]
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == [f"the part {number} was not restored" for number in range(5)]
    assert len((suite[0][0].text or "").splitlines()) == 9 and suite[5].get("name") == "loss" and not len(suite[5])


def test_a_step_counter_is_steps_away_and_not_ulp() -> None:
    report = RunReport(words=[], rule="bitwise", rule_message="", at=3, until=4, stop="copy")
    name = "optimizer.state.w.step"
    report.findings = [RunDifference("values differ", "", name=name, step=4, expected=4.0, found=1.0, ulp=16777216)]
    compare.judge(report, compare.Unrepeated())
    assert "3 steps" in page(report.as_dict()) and "ULP" not in page(report.as_dict())


AVERAGE = """
import json, sys, time, torch
out, steps, weight, average, step = sys.argv[1], int(sys.argv[3]), torch.zeros(2), torch.zeros(2), 0
if len(sys.argv) > 4:
    saved = torch.load(sys.argv[5])
    weight, step = saved["model"]["weight"], saved["step"]
    average = average if {forgets} else torch.load(f"{{out}}/average_{{step}}.pt")["weight"]
while step < steps:
    weight, step = weight + step + 1, step + 1
    average = 0.5 * average + 0.5 * weight
    print(f"step {{step}}: loss {{weight[0]}}")
    torch.save({{"model": {{"weight": weight}}, "step": step}}, f"{{out}}/step_{{step}}.pt")
    torch.save({{"weight": average}}, f"{{out}}/average_{{step}}.pt")
    json.dump({{"time": time.time(), "best": float(average.sum())}}, open(f"{{out}}/state.json", "w"))
time.sleep(0.3 * (len(sys.argv) > 4))  # only what resumes is looked at once more from outside
"""


@pytest.mark.parametrize("forgets", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_file_beside_the_checkpoint_is_judged_by_what_it_holds(forgets: bool, tmp_path: Path) -> None:
    script = tmp_path / "average.py"
    script.write_text(AVERAGE.format(forgets=forgets))
    with forked_command.forked(str(tmp_path)):
        report = runs(command=[sys.executable, str(script), "OUT"], checkpoints="OUT/step_{step}.pt")
    assert report.verdict == ("differs" if forgets else "same"), report.message
    # The time of day is not that of A2 either.
    assert [run.name for run in report.runs] == ["A", "A2", "B"]
    if forgets:
        files = {finding.name: finding.message for finding in report.findings}
        assert {"average_5.pt", "state.json"} <= files.keys() and "best" in files["state.json"]
        assert "`average_5.pt` of step 5 differs: `model.weight`" in files["average_5.pt"]
    else:
        assert report.unjudged == ["other.arguments", "state.json"] or report.unjudged == ["state.json"]


@pytest.mark.parametrize("stop", ["sigkill", pytest.param("sigterm", marks=pytest.mark.long)])
def test_a_run_is_stopped_once_its_checkpoint_is_complete(stop: str) -> None:
    report = runs("--pause", "0.2", stop=stop)
    assert report.verdict == "same" and stop.upper() in (report.runs[1].stopped or ""), report.message


def test_a_python_without_the_hook_is_told_once() -> None:
    report = runs(command=[FAST[0], "-I", *FAST[1:]], observe=True)
    assert report.verdict == "same" and [note.partition(":")[0] for note in report.notes] == ["run A"]
    assert "the hook did not run" in report.notes[0]
    # Only the command that resumes is without it.
    report = runs(resume_with=f"{sys.executable} -E {FAST[1]} --out OUT --steps 5 --resume {{checkpoint}}")
    assert [note.partition(":")[0] for note in report.notes] == ["run B"]


def test_a_hook_that_was_turned_off_is_not_told() -> None:
    assert not runs(command=[FAST[0], "-E", *FAST[1:]], inject_switches=False).notes


def test_what_a_killed_run_did_not_print_is_repeated() -> None:
    # It is killed between two lines of step 3, which are all that A says of its loss.
    report = runs("--pause", "0.15", "--evaluate", stop="sigkill")
    assert report.verdict == "same" and not report.nondeterministic, report.message


def test_what_a2_does_not_repeat_is_not_blamed_on_the_resume() -> None:
    report = runs("--noise")
    assert (report.verdict, report.exit_code) == ("nondeterministic", 3), report.message
    assert "model" in report.message and not report.findings
    assert any("the losses of A2 are up to" in note for note in report.notes)


@pytest.mark.long
def test_counters_are_judged_where_weights_are_not() -> None:
    report = runs("--noise", "--fault", "optimizer")
    assert report.verdict == "differs" and "step" in report.findings[0].message


def test_the_command_writes_every_form_of_the_report(tmp_path: Path) -> None:
    page, xml = str(tmp_path / "r.html"), str(tmp_path / "r.xml")
    given = ["verify-resume", "run", "--at", "2", "--until", "3", "--stop", "max-steps=--steps", "--world", "1"]
    words = ["verify-resume", "run", "--checkpoints", "RUN/step-{step}.safetensors", "--out", "RUN", "--timeout", "60"]
    words += given[2:]
    command = ["--", sys.executable, FAST[1], "--out", "RUN", "--steps", "3", "--fault", "optimizer"]
    planned = run_command("verify-resume", "run", *words[2:], "--dry-run", *command)
    assert planned.exit_code == 0 and "PLAN" in planned.stdout and "3 starts, 6 steps" in planned.stdout
    assert "FOLDER/out" in planned.stdout and not list(tmp_path.iterdir())
    more = [
        "verify-resume",
        "run",
        "--control",
        "--loss",
        r"step (\d+): loss (\S+)",
        "--resume-with",
        RESUME,
        "--max-disk",
        "1GB",
    ][2:]
    written = ["verify-resume", "run", "--keep", str(tmp_path / "k"), "--html", page, "--junit", xml, "--verbose"]
    done = run_command(*written, *words[2:], *more, *command)
    assert done.exit_code == 1, done.stderr
    assert "FAIL" in done.stdout and "step 3" in done.stdout and "wrote" in done.stderr
    assert "Resume is not exact" in Path(page).read_text()
    suite = ElementTree.parse(xml).getroot()[0]
    # One failure for one fault, with all that differs in it.
    [failed] = suite.findall("testcase/failure")
    assert suite.get("failures") == "1" and "the checkpoint of step 3" in (failed.text or "")
    assert suite[0].get("name") == "resume" and "not determined" in (failed.get("message") or "")
    # `run_command` checks the document of `--json` against its schema.
    told = json.loads(run_command("verify-resume", "run", "--json", *words[2:], *more, *command).stdout)
    assert (told["verdict"], told["exit_code"], told["runs"][-1]["resumed_at"]) == ("differs", 1, 2)
    quiet = run_command("verify-resume", "run", "--quiet", "--dry-run", *words[2:], *command)
    assert quiet.stdout == "planned\n"


@pytest.mark.parametrize("words", [["run", "--at", "2"], ["trial", "--recipe", "none.py"]])
def test_only_a_page_is_replaced(words: list[str], tmp_path: Path) -> None:
    """And before anything is run."""
    (tmp_path / "mine.html").write_text("mine")
    done = run_command(
        "verify-resume", *words, "--html", str(tmp_path / "mine.html"), *(["--", "false"] * (words[0] == "run"))
    )
    assert done.exit_code == 6 and "is not a page of ckpttool's" in done.stderr
    assert (tmp_path / "mine.html").read_text() == "mine"


def test_a_second_resume_shows_what_only_a_resumed_run_leaves() -> None:
    report = runs("--fault", "twice")
    assert report.verdict == "same" and report.reasons == {"resumed.json": "run A did not write it"}, report.message
    report = runs("--fault", "twice", control=True)
    assert report.verdict == "differs" and [run.name for run in report.runs] == ["A", "B", "B2"]
    assert report.message.startswith("resume is not exact: after a second resume, from step 4,"), report.message
    assert not report.controls


def test_the_plan_has_every_start_of_the_command() -> None:
    words = [
        "verify-resume",
        "run",
        "--via",
        "dcp",
        "--to-world",
        "4",
        "--no-inject",
        "--observe",
        "--seed-env",
        "S=3",
        "--no-control",
        "--cross",
        "epoch",
    ]
    words += ["--at", "2", "--until", "3", "--resume-with", RESUME, "--world", "2", "--dry-run", "--json"]
    planned = json.loads(run_command(*words, "--", "torchrun", "--nproc-per-node", "{world}", "t.py", "OUT").stdout)
    assert (planned["verdict"], planned["rule"], planned["cost"]["runs"]) == ("planned", "control", 3)
    assert planned["runs"][0]["command"][2] == "2" and planned["runs"][1]["command"][-2] == "--resume"
    # A command that has a number of ranks of its own may resume by one that takes it.
    resume = "torchrun --nproc-per-node {world} t.py {checkpoint}"
    words = ["--world", "2", "--at", "2", "--until", "3", "--resume-with", resume, "--dry-run", "--json", "--"]
    planned = json.loads(run_command("verify-resume", "run", *words, "sh", "two-ranks.sh", "OUT").stdout)
    assert planned["runs"][1]["command"][2] == "2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": []}, "no command"),
        ({"command": ["python", "t.py", "--out", "mine"]}, "output directory"),
        ({"stop": "pause"}, '`stop="pause"` is unknown'),
        ({"stop": "max-steps=--epochs"}, '`stop="max-steps=--epochs"`: the command has no such option'),
        ({"at": 5}, "`at=5, until=5`"),
        ({"loss": "loss ("}, "not a regular expression"),
        ({"resume_with": "python t.py"}, "neither"),
        ({"resume_with": "...", "via": "dcp"}, "the path to resume from"),
        ({"to_world": 2}, "{world}"),
        ({"resume_with": "sh -c '... --resume {checkpoint}'"}, "stands for the command only as a word of its own"),
        ({"via": "onnx"}, "there is no such stage"),
        ({"command": ["no-such-program", "OUT", "--steps", "5"]}, "cannot be started"),
        ({"command": [sys.executable, "-c", "raise KeyError(3)", "OUT", "--steps", "5"]}, "KeyError: 3"),
        ({"command": [sys.executable, "-c", FROZEN, "OUT", "--steps", "5"]}, "no weight changes between step 3 and"),
        ({"checkpoints": "/tmp/step-{step}.pt"}, "names the same files for every run"),
        ({"checkpoints": "OUT/ckpt-{step}.pt"}, "no complete checkpoint of step 3"),
        ({"stop": "max-steps=--steps", "checkpoints": "OUT/c-{step}.pt"}, "no complete checkpoint after step 3 and up"),
    ],
)
def test_what_cannot_be_run_is_one_error(options: dict[str, Any], message: str) -> None:
    command = options.pop("command", None)
    with pytest.raises(UsageError, match=re.escape(message)):
        if command is None:
            runs(**options)
        else:
            run(command, at=3, until=5, stop="max-steps=--steps", timeout=300.0)


def test_a_run_that_crashes_or_hangs_after_the_resume_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = runs("--fault", "crash")
    assert (report.verdict, report.exit_code) == ("failed", 1)
    assert report.failure is not None and report.failure.run == "B" and "KeyError: 'optimizer'" in report.message
    assert report.runs[-1].name == "B" and "--resume" in report.runs[-1].command
    told: list[str] = []
    monkeypatch.setattr(starts, "_PROGRESS", 0.5)
    report = runs("--hang", timeout=4, tell=told.append)
    assert any(line.startswith("run B: step 3 is saved, after ") for line in told)
    assert report.verdict == "failed" and "run B was still running after 4.00 s" in report.message


@pytest.mark.parametrize(
    ("resume_with", "message"),
    [("python t.py {checkpoint}", "no such option to change"), ("... {world} {checkpoint}", "no value for `{world}`")],
)
def test_what_resumes_is_checked_before_anything_runs(resume_with: str, message: str, tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(UsageError, match=re.escape(message)):
        runs(resume_with=resume_with, stop="max-steps=--steps", tell=told.append)
    assert not [line for line in told if line.startswith("run ")]


def test_a_plan_leaves_no_folder_and_a_report_needs_one(tmp_path: Path) -> None:
    assert runs(dry_run=True, keep=tmp_path / "kept").folder == str(tmp_path / "kept")
    words = ["--at", "1", "--until", "2", "--junit", str(tmp_path / "absent" / "r.xml"), "--", "no-such-program", "OUT"]
    done = run_command("verify-resume", "run", *words)
    assert done.exit_code == 2 and "there is no folder" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_flag_that_changes_the_training_is_not_blamed_on_a2() -> None:
    a, a2, b = (ScriptRun(name, [], "", "") for name in ("A", "A2", "B"))
    a.steps, a2.steps, b.steps = ([Loss(1, 3.0), Loss(2, last)] for last in (2.0, 2.0, 2.5))
    excused = compare.unrepeated(a, a2)
    excused.join(compare.unrepeated(a, b))
    report = RunReport(words=[], rule="bitwise", rule_message="", at=2, until=5, stop="max-steps=--steps")
    report.runs = [a, a2, b]
    compare.judge(report, excused)
    assert report.verdict == "nondeterministic" and "`loss` of run B differ from those of run A" in report.message
    assert any("with `--steps 2` than with `--steps 5`" in note for note in report.notes)
    assert compare.unrepeated(a, b).run == "B" and not compare.unrepeated(a, a2).run


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("Traceback ...\nAssertionError\nsubprocess.CalledProcessError: Command died", "AssertionError"),
        (
            "[rank1]: KeyError: 'w'\n[rank0]: RuntimeError: Connection closed by peer\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\ntr.py FAILED\n"
            + "more\n"
            * 30,
            "[rank1]: KeyError: 'w'",
        ),
        (
            f"usage: tr.py [-h]\ntr.py: error: unrecognized arguments: --out X\n{LAUNCHER}",
            "tr.py: error: unrecognized arguments: --out X",
        ),
        (f"no data at /data\n{LAUNCHER}", "no data at /data"),
        ("nothing to resume\n", "nothing to resume"),
        ("", ""),
    ],
)
def test_the_error_is_that_of_the_script_and_not_of_its_launcher(lines: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(lines)
    failure = _failure(ScriptRun("B", [], "", str(tmp_path / "log")), 1)
    assert failure.message == "run B ended with exit code 1" + (f": {told}" if told else "")
    assert failure.output[-1:] == ([told] if told else [])


@pytest.mark.long
def test_a_script_finds_its_checkpoint_by_itself() -> None:
    report = runs("--auto", resume_with=None)
    assert report.verdict == "same" and report.runs[1].resumed_at == 3, report.message


def test_a_checkpoint_that_is_written_again_and_again_is_kept() -> None:
    report = runs("--one-file", "--pause", "0.15", checkpoints="OUT/model.safetensors", at=2, until=3)
    assert report.verdict == "same", report.message
    assert {saved.step for saved in report.runs[0].checkpoints} >= {1, 2, 3}


def test_no_version_of_a_checkpoint_that_is_written_again_is_missed() -> None:
    # A step takes less than a millisecond, and the looks at the file are a tenth of a second apart.
    report = runs("--one-file", checkpoints="OUT/model.safetensors", at=2)
    assert report.verdict == "same" and not report.notes, report.message
    assert [saved.step for saved in report.runs[0].checkpoints] == [1, 2, 3, 4, 5]
    assert sum(row.what.startswith("step 3: ") for row in report.compared) > 1


def test_a_version_that_was_missed_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that follow each other fast, the looks at the file of run B miss some."""
    look, missed, run_of = keep.Keeper.keep, {4}, "/B/"

    def seldom(self: keep.Keeper, step: int | None = None) -> int:
        path, folder = os.path.join(self._out, "model.safetensors"), Path(self._folder or "")
        if run_of not in str(folder):
            return look(self, step)
        if os.path.exists(path) and checkpoints.step_of(path) in missed:
            return 0
        kept = look(self, step)
        for snapshot in (folder / "snapshots").glob("*.json"):  # the file may have been written in between
            version, *_ = json.loads(snapshot.read_text())["files"].get("model.safetensors", [None])
            if version is not None and checkpoints.step_of(str(folder / "versions" / version)) in missed:
                snapshot.unlink()
                kept = 0
        return kept

    monkeypatch.setattr(keep.Keeper, "keep", seldom)
    slow = ["--one-file", "--pause", "0.2"]
    given: dict[str, Any] = {"checkpoints": "OUT/model.safetensors", "inject_switches": False}
    report = runs(*slow, **given)
    assert report.verdict == "same", report.message
    assert "step 4 of run B was overwritten before it was kept, and is not compared" in report.notes
    run_of, missed = "/A/", {3}
    with pytest.raises(UsageError, match="no complete checkpoint of step 3 and of a later one"):
        runs(*slow, **given)


@pytest.mark.parametrize(("fault", "verdict"), [("", "same"), ("swapped", "differs")])
def test_a_script_that_saves_at_its_end_names_it_by_the_time_of_day(fault: str, verdict: str) -> None:
    report = runs("--at-end", "--fault", fault, checkpoints="OUT/*.safetensors", stop="max-steps=--steps")
    assert report.verdict == verdict, report.message
    assert [[saved.step for saved in run.checkpoints] for run in report.runs if run.name != "A2"] == [[5], [3, 5]]


def test_the_disk_and_the_folder_of_the_user_are_kept(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="more than `max_disk="):
        runs(max_disk="2kB")
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OverwriteError):
        runs(keep=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


LAUNCHER = """
import os, subprocess, sys, time
# As a launcher does: a worker in a session of its own, and one whose parent is gone.
code = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], start_new_session=True)
subprocess.run(["sh", "-c", f"'{sys.executable}' -c '{code}' {sys.argv[1]} &"])
open(sys.argv[1] + "/started", "w").close()
time.sleep(600)
"""


def workers(folder: str) -> list[str]:
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if folder in line and "sleep(600)" in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_running(tmp_path: Path, number: signal.Signals) -> None:
    words = ["--at", "1", "--until", "2", "--keep", str(tmp_path), "--", sys.executable, "-c", LAUNCHER, "OUT"]
    with subprocess.Popen([sys.executable, "-m", "ckpttool", "verify-resume", "run", *words]) as process:
        started = tmp_path / "out" / "started"
        while not started.exists() and process.poll() is None:
            time.sleep(0.02)
        assert len(workers(str(tmp_path))) >= 2
        process.send_signal(number)
        assert process.wait(300) == 128 + number
    assert workers(str(tmp_path)) == []


# torch ----------------------------------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "{world}"]


def trained(script: Path, **options: Any) -> RunReport:
    """The report of a script of torch, stopped after step 4 of 6 by its own flag."""
    on_ranks = script.name == "train_fsdp2.py"
    given = {"at": 4, "until": 6, "resume_with": RESUME, "world": 2, "timeout": 300.0}
    given["checkpoints"] = "OUT/step-{step}" if on_ranks else "OUT/ckpt-{step}.pt"
    start = TORCHRUN if on_ranks else [sys.executable]
    return run([*start, str(script), "--out", "OUT", "--steps", "6"], **{**given, **options})  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.script}: {fault.name}")
def test_a_planted_fault_is_found_and_named(fault: ScriptFault, observe: bool, tmp_path: Path) -> None:
    script = tmp_path / fault.script
    script.write_text(fault.planted((SCRIPTS / fault.script).read_text()))
    report = trained(script, observe=observe)
    assert (report.verdict, report.first_step) == ("differs", 5), report.message
    assert re.search(fault.named, report.cause or ""), report.cause


@pytest.mark.long
@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("script", ["train_single.py", "train_fsdp2.py"])
def test_a_correct_script_is_the_same_ten_times(script: str, observe: bool) -> None:
    for _ in range(5):
        report = trained(SCRIPTS / script, observe=observe)
        assert report.verdict == "same", report.message


@pytest.mark.long
def test_a_converted_checkpoint_resumes_alike() -> None:
    report = trained(SCRIPTS / "train_single.py", via="dcp,torch")
    assert report.verdict == "same" and [leg.format for leg in report.route] == ["dcp", "torch"], report.message
    assert any(row.what == "converted state" and row.equal for row in report.compared)


@pytest.mark.long
@pytest.mark.parametrize("to_world", [1, 3])
def test_another_number_of_ranks_is_compared_with_what_torch_reshards(to_world: int) -> None:
    report = trained(SCRIPTS / "train_fsdp2.py", to_world=to_world)
    assert report.verdict == "same", report.message
    assert [run.name for run in report.runs] == ["A", "control", "B"] and report.route
    assert report.drifts[0].loss_relative > 0


@pytest.mark.long
@pytest.mark.parametrize("stop", ["sigkill", "sigterm"])
def test_a_launcher_is_stopped_with_its_workers(stop: str) -> None:
    report = trained(SCRIPTS / "train_fsdp2.py", stop=stop)
    assert report.verdict == "same", report.message


ON_RANKS = """
import argparse, torch

parser = argparse.ArgumentParser()
for name in ("--out", "--resume", "--ranks"):
    parser.add_argument(name)
args = parser.parse_args()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
step = 0
if args.resume:
    saved = torch.load(args.resume)
    step = saved["step"]
    for name, part in parts.items():
        if name != "FAULT":
            part.load_state_dict(saved[name])
while step < 6:
    generator = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(3, 4, generator=generator)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    step += 1
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "step": step}, f"{args.out}/step-{step}.pt")
"""


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("fault", "verdict", "words"),
    [
        ("", "same", "no epoch's end was seen; the data go on as in run A"),
        ("model", "differs", "weights"),  # which have another seed in each run
        ("optimizer", "differs", "the optimizer was not loaded"),
        ("scheduler", "differs", "the scheduler was not restored: `scheduler.last_epoch` was 0 and not 3"),
    ],
)
def test_what_a_command_and_its_reference_lack_alike_is_found_on_another_number_of_ranks(
    fault: str, verdict: str, words: str
) -> None:
    """Both run the same code, so that their steps are the same whatever is not loaded."""
    command = [sys.executable, "-c", ON_RANKS.replace("FAULT", fault), "--out", "OUT", "--ranks", "{world}"]
    given = {"at": 3, "until": 5, "checkpoints": "OUT/step-{step}.pt", "resume_with": RESUME, "timeout": 60.0}
    report = run(command, world=1, to_world=2, **given)  # type: ignore[arg-type]
    assert report.verdict == verdict and words in report.message, report.message


@pytest.mark.long
@pytest.mark.parametrize("to_world", [1, 3])
def test_moments_that_are_lost_on_another_number_of_ranks_are_found(to_world: int, tmp_path: Path) -> None:
    """The shards of each rank are compared with the checkpoint."""
    text, loads = (SCRIPTS / "train_fsdp2.py").read_text(), '    scheduler.load_state_dict(state["scheduler"])\n'
    assert loads in text
    lost = '    for one in optimizer.state.values():\n        one["exp_avg"].zero_()\n'
    script = tmp_path / "train_fsdp2.py"
    script.write_text(text.replace(loads, loads + lost))
    report = trained(script, to_world=to_world)
    assert report.verdict == "differs" and "moments of the optimizer" in (report.cause or ""), report.message


SHUFFLED = """
import argparse, torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--resume")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
done = 0
if args.resume:
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    torch.set_rng_state(saved["rng"]["torch"])
    done = saved["step"]
# An epoch draws its order when it begins: after a resume, from numbers that follow the last step.
for step, (x, y) in enumerate(DataLoader(data, batch_size=2, shuffle=True), 1):
    if step > done:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        rng = {"torch": torch.get_rng_state()}
        torch.save({"model": model.state_dict(), "rng": rng, "step": step}, f"{args.out}/step-{step}.pt")
"""


@pytest.mark.long
def test_the_cause_is_what_was_seen_to_differ_first() -> None:
    command = [sys.executable, "-c", SHUFFLED, "--out", "OUT"]
    given = {"at": 3, "until": 5, "checkpoints": "OUT/step-{step}.pt", "resume_with": RESUME, "timeout": 60.0}
    report = run(command, observe=True, **given)  # type: ignore[arg-type]
    assert report.verdict == "differs" and report.findings[0].kind == "next batch differs"
    cause = "the data, or the RNG state of rank 0 (torch), was not restored: the batch of rank 0 in step 4 is another"
    assert report.cause == cause and cause in report.message
    assert run(command, **given).cause == cause  # type: ignore[arg-type]
    report = run(command, inject_switches=False, **given)  # type: ignore[arg-type]
    assert (report.cause or "").startswith("not determined: the hook did not see")
