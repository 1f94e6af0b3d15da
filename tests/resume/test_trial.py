"""A trial in fresh processes, as it is typed: what it says, when a rank hangs or fails, and where it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support import cli, json_schemas

from ckpttool.cli.junit import junit_xml
from ckpttool.errors import CkptError, OverwriteError, UsageError
from ckpttool.layout.mesh import parse_mesh
from ckpttool.resume import job as jobs
from ckpttool.resume.job import Job
from ckpttool.resume.launch import _ended
from ckpttool.resume.observe.site.state import digest
from ckpttool.resume.trial import trial

HERE = Path(__file__).resolve().parent
RECIPE = str(HERE / "recipe_kinds.py")
PROGRAM = Path(sysconfig.get_path("scripts")) / "ckpttool"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *words],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "NO_COLOR": "1", **environment},
    )


def test_resumed_on_another_world(tmp_path: Path) -> None:
    """On 3 ranks what 2 saved, in fresh processes: the report, its page, and what is kept."""
    page, kept = tmp_path / "trial.html", tmp_path / "kept"
    done = cli.run(
        "verify-resume", "trial", "--recipe", RECIPE, "--world", "2", "--to-world", "3", "--via", "safetensors",
        "--steps", "2", "--more", "2", "--device", "cpu", "--time-limit", "200", "--html", str(page), "--junit",
        str(tmp_path / "trial.xml"), "--keep",
        str(kept), "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    said = json_schemas.check(done.stdout)
    assert (said["schema"], said["verdict"], said["rule"]) == ("ckpttool/trial/2", "same", "control")
    assert [(one["name"], one["world_size"], one["started"]) for one in said["runs"]] == [
        ("A", 2, "fresh processes"), ("B", 3, "fresh processes"), ("control", 3, "fresh processes"),
    ]  # fmt: skip
    assert [leg["message"] for leg in said["route"]] == ["convert --to safetensors"]
    assert all(row["equal"] for row in said["compared"]) and all(check["passed"] for check in said["checks"])
    gradients = next(check for check in said["checks"] if check["what"] == "gradients reduced")
    assert gradients["count"] == 20 and gradients["passed"]
    suite = ElementTree.parse(tmp_path / "trial.xml").getroot()[0]
    assert (suite.get("failures"), suite[0].get("name")) == ("0", "resume")
    # Uneven pieces, and of one element over three ranks two empty ones.
    shapes = next(c["message"] for c in said["checks"] if (c["what"], c["run"]) == ("local shapes", "B"))
    assert int(shapes.split()[0]) > 3
    memory = next(one["memory"] for one in said["runs"] if one["name"] == "B")
    assert {one["parameters"] for one in memory} == {one["parameters_expected"] for one in memory}
    assert page.read_text().startswith("<!doctype html>") or page.read_text().startswith("<!DOCTYPE html>")
    assert {"A", "B", "control", "alone", "saved", "native", "route"} <= {one.name for one in kept.iterdir()}
    assert {"rank0.log", "rank1.log"} <= {one.name for one in (kept / "A").iterdir()}
    # What is loaded is what the file has, read by nobody of ours.
    import torch
    from safetensors.torch import load_file

    record = json.loads((kept / "B" / "resumed" / "state.2.0.json").read_text())["tensors"]["model.layers.0.up.weight"]
    theirs = load_file(kept / "route" / "1-safetensors" / "model.safetensors")["layers.0.up.weight"]
    assert record["sha256"] == digest(torch, theirs)["sha256"] and record["shape"] == [30, 18]
    # A kept folder is not written over.
    with pytest.raises(OverwriteError):
        trial(RECIPE, keep=kept)


def test_a_rank_that_hangs_fails_the_trial_and_says_where() -> None:
    done = cli.run(
        "verify-resume", "trial", "--recipe", RECIPE, "--mesh", "shard=2", "--to-mesh", "shard=2", "--steps", "3",
        "--no-gradients", "--no-deterministic", "--time-limit", "6", "-v", env={"FAULT": "hang"},
    )  # fmt: skip
    assert done.exit_code == 1, done.output
    first = done.stdout.splitlines()[0]
    assert "run A: rank 1 was still in step 2 after 6 s, at recipe_kinds.py:" in first and "in step" in first
    assert "rank 0: step 2" in done.stdout and "distributed_c10d.py" in done.stdout


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted by Linux")
def test_ranks_are_forked_from_a_process_without_threads(tmp_path: Path) -> None:
    """A lock that another thread holds is held for ever in a fork: one launch in sixty hung."""
    job = Job(str(tmp_path / "A"), RECIPE, parse_mesh("shard=2"))
    (tmp_path / "A").mkdir()
    jobs.write(dataclasses.asdict(job), str(tmp_path / "A" / jobs.FILE))
    code = (
        "import os, sys; from ckpttool.resume.worker import run\n"
        "run.start_processes = lambda *_, **how: sys.exit(len(os.listdir('/proc/self/task')))\n"
        "run.serve(sys.argv[1], '0')"
    )
    environment = {**os.environ, **jobs.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, timeout=200, check=False)
    assert done.returncode == 1


@pytest.mark.parametrize("header", ["Timeout (0:00:15)!\nThread", "Current thread"])
def test_the_rank_that_the_others_wait_for_is_named_though_another_is_late_first(tmp_path: Path, header: str) -> None:
    """The other began the step a moment later, and is ended with the first, as the launcher ends all ranks."""
    job = Job(str(tmp_path), RECIPE, parse_mesh("shard=2"), limit=15.0)
    waits = 'File "torch/distributed/distributed_c10d.py", line 9 in all_reduce'
    hangs = f'File "{RECIPE}", line 7 in step'
    for rank, (first, frame) in enumerate([("Timeout (0:00:15)!\nThread", waits), (header, hangs)]):
        (tmp_path / f"rank{rank}.stack").write_text(f"{first} 0x1 (most recent call first):\n  {frame}\n")
        (tmp_path / f"rank{rank}.phase").write_text("step 2")
    failure = _ended(job, "A", {0: 1}).failure
    assert failure.message == "run A: rank 1 was still in step 2 after 15 s, at recipe_kinds.py:7 in step"


@pytest.mark.parametrize("seconds", [-5, 5])
def test_an_error_after_the_time_of_another_rank_was_up_is_no_failure(tmp_path: Path, seconds: int) -> None:
    """The one that waits sees the connection closed. An error before is why the other one waited."""
    job = Job(str(tmp_path), RECIPE, parse_mesh("shard=2"), limit=15.0)
    stack = tmp_path / "rank1.stack"
    stack.write_text(f'Timeout (0:00:15)!\nThread 0x1 (most recent call first):\n  File "{RECIPE}", line 7 in step\n')
    at = stack.stat().st_mtime + seconds
    waits = ["torch/distributed/distributed_c10d.py:9 in all_reduce"]
    error = {"at": at, "ours": False, "type": "RuntimeError", "message": "closed", "where": None, "stack": waits}
    jobs.write(error, str(tmp_path / "rank0.error.json"))
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.phase").write_text("step 2")
    ended = _ended(job, "A", {0: 1})
    if seconds < 0:
        assert ended.raised and ended.failure.message == "run A: rank 0 failed in step 2: RuntimeError: closed"
    else:
        assert not ended.raised and ended.failure.ranks[0].stack == waits
        assert ended.failure.message == "run A: rank 1 was still in step 2 after 15 s, at recipe_kinds.py:7 in step"


@pytest.mark.parametrize(
    ("fault", "verdict", "words"),
    [
        (
            "chance",
            "nondeterministic",
            "state on 1 rank is bit-identical; not judged, as the script differs from itself",
        ),
        ("hidden", "differs", "resume is not exact"),
    ],
)
def test_what_a_repeated_run_does_not_repeat_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, fault: str, verdict: str, words: str
) -> None:
    """A script that draws from the system's entropy, and one that keeps a number outside its state."""
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("KIND", "ddp")
    report = trial(RECIPE, world=1, steps=2, more=2)
    assert (report.verdict, [run.name for run in report.runs]) == (verdict, ["A", "B", "A2"]), report.message
    assert words in report.message
    if fault == "chance":
        suite = ElementTree.fromstring(junit_xml(report))[0]
        assert report.exit_code == 3 and [case.get("name") for case in suite if case.find("failure") is not None] == [
            "resume"
        ]
        unjudged = ["loss", "gradient norm", "parameters"]
        assert report.unrepeated == [*unjudged, "model", "optimizer"]
        rows = {row.what: row.equal for row in report.compared if row.run == "B"}
        assert rows["next batch"] is True and rows["model"] is True and [rows[what] for what in unjudged] == [None] * 3
    else:
        assert not report.unrepeated and any("repeated bit for bit" in note for note in report.notes)


FORGETFUL = """
import recipe_kinds
from recipe_kinds import mesh

def build(mesh):
    global scheduler
    state = recipe_kinds.build(mesh)
    scheduler = state.pop("scheduler")
    return state

def step(state, i):
    return recipe_kinds.step(state | {"scheduler": scheduler}, i)
"""


@pytest.mark.long
def test_a_scheduler_that_is_no_part_of_the_state_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.py").write_text(FORGETFUL)
    monkeypatch.setenv("KIND", "ddp")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    report = trial(tmp_path / "recipe.py", world=1, steps=3, more=4)
    assert report.verdict == "differs"
    first = report.findings[0]
    # In step 3 it is that of the checkpoint; then the scheduler of `build` sets it.
    assert (first.kind, first.step) == ("learning rate differs", 4) and first.found != first.expected
    assert (first.hint or "").startswith("`build` returns no learning-rate scheduler")


TEMPORARY = """
import os, tempfile
import recipe_kinds
from recipe_kinds import build, mesh

def step(state, i):
    path = os.path.join(tempfile.gettempdir(), "begun-by-a-recipe")
    if i == 1:
        open(path, "w").close()
    for group in state["optimizer"].param_groups:
        group["weight_decay"] = 0.1 * os.path.exists(path)
    return recipe_kinds.step(state, i)
"""
LISTED = """
import os
import recipe_kinds
from recipe_kinds import build, mesh

ORDER = [int(name) for _, _, names in os.walk(os.path.join(os.path.dirname(__file__), "data")) for name in names]

def step(state, i):
    for group in state["optimizer"].param_groups:
        group["weight_decay"] = 0.01 * ORDER[i]
    return recipe_kinds.step(state, i)
"""


@pytest.mark.parametrize("text", [TEMPORARY, LISTED], ids=["temporary files", "listing"])
def test_what_helps_by_chance_is_not_the_same_when_a_run_resumes(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.py").write_text(text)
    (tmp_path / "data").mkdir()
    for number in range(8):
        (tmp_path / "data" / str(number)).touch()
    monkeypatch.setenv("KIND", "ddp")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr("tempfile.tempdir", None)
    report = trial(tmp_path / "recipe.py", world=1, steps=2, more=2)
    assert (report.verdict, report.unrepeated) == ("differs", []), report.message
    assert not os.path.exists("/tmp/begun-by-a-recipe")


SET = """
import recipe_kinds
from recipe_kinds import build, mesh

ORDER = [int(one) for one in {str(number) for number in range(50)}]

def step(state, i):
    for group in state["optimizer"].param_groups:
        group["weight_decay"] = 0.01 * ORDER[i]
    return recipe_kinds.step(state, i)
"""


@pytest.mark.long
def test_the_order_of_a_set_is_not_the_same_when_a_run_resumes(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(SET)
    words = [
        "verify-resume",
        "trial",
        "--recipe",
        str(tmp_path / "recipe.py"),
        "--world",
        "1",
        "--steps",
        "2",
        "--json",
    ]
    unset = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    for seed, verdict in ({}, "differs"), ({"PYTHONHASHSEED": "1"}, "same"):
        environment = {**unset, "PYTHONPATH": str(HERE), "KIND": "ddp", **seed}
        done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=400, env=environment)
        assert json.loads(done.stdout)["verdict"] == verdict, done.stdout + done.stderr


@pytest.mark.long
def test_a_mistake_of_the_recipe_is_its_own() -> None:
    done = run("verify-resume", "trial", "--recipe", RECIPE, "-q", FAULT="raise")
    assert done.returncode == 2
    assert "rank 1 failed in step 2 (recipe_kinds.py:" in done.stderr
    assert "ValueError: a mistake of the recipe" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_checkpoints_are_compared_with_the_first(tmp_path: Path) -> None:
    """One that was converted is the same; one saved a step later is not, and is told to be elsewhere."""
    kept = tmp_path / "kept"
    assert trial(RECIPE, steps=2, more=1, via="safetensors", keep=kept, gradients=False).verdict == "same"
    done = run(
        "verify-resume", "trial", "--recipe", RECIPE, str(kept / "saved"), str(kept / "route" / "1-safetensors"),
        "--more", "2", "--first-step", "2", "--json",
    )  # fmt: skip
    said = json_schemas.check(done.stdout)
    assert (done.returncode, said["rule"], said["verdict"]) == (0, "checkpoints", "same"), said["message"]
    assert [one["name"] for one in said["runs"]] == ["1", "2"]
    later = tmp_path / "later"
    trial(RECIPE, steps=3, more=1, keep=later, gradients=False)
    report = trial(RECIPE, [kept / "saved", later / "saved"], more=1)
    kinds = {found.kind for found in report.findings}
    assert report.verdict == "differs" and {
        "weights not restored", "step counters not restored", "scheduler not restored", "dataloader not restored"
    } <= kinds  # fmt: skip


@pytest.mark.long
def test_what_is_done_to_the_checkpoint_on_its_way_is_seen(tmp_path: Path) -> None:
    """A stage of the route may be a function: here one that flips a bit of a weight."""

    def flipped(source: str, to: str) -> None:
        import torch
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

        whole = tmp_path / "whole.pt"
        dcp_to_torch_save(source, whole)
        state = torch.load(whole, weights_only=False)
        state["model"]["layers.0.up.weight"].view(torch.int32)[0, 1] ^= 4
        torch.save(state, whole)
        torch_save_to_dcp(whole, to)

    report = trial(RECIPE, via=[flipped], steps=2, more=1, gradients=False)
    assert report.verdict == "differs"
    first, in_checkpoint, *_ = report.findings
    assert (first.kind, first.name) == ("weights not restored", "model.layers.0.up.weight")
    assert (in_checkpoint.name, in_checkpoint.index, in_checkpoint.ulp) == (first.name, [0, 1], 4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"world": 2, "mesh": "shard=2"}, "`--world` and `--mesh` exclude each other"),
        ({"mesh": "4"}, "`--mesh 4`: `4` is not a dimension and its size"),
        ({"to_world": 2, "to_mesh": "shard=2"}, "`--to-world` and `--to-mesh` exclude each other"),
        ({"via": "safetensor"}, "`--via safetensor`: there is no such stage"),
        ({"via": "reshard:x=2"}, "there is no mesh dimension `x`"),
        ({"more": 0}, "at least one step"),
        ({"device": "tpu"}, "`--device tpu` is unknown"),
        ({"world": 0}, "a world is a number of ranks from 1"),
        ({"checkpoints": ["a"], "via": "dcp"}, "`--to-mesh` cannot be used with checkpoints"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        trial(RECIPE, **options)
    assert says in caught.value.message


def test_a_recipe_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CkptError) as caught:
        trial(tmp_path / "nowhere.py")
    assert "no such recipe" in caught.value.message


DRAWN = """
import os
import random
import torch
from torch.nn.parallel import DistributedDataParallel


def build(mesh):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return {{
        "model": DistributedDataParallel(model),
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-2),
        "scale": Scale({scale}),
    }}


class Scale:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {{"steps": 0}}

    def load_state_dict(self, state):
        pass


def step(state, i):
    batch = torch.full((3, 4), 0.1 * i)
    loss = (state["model"](batch) * state["scale"].value - 1).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    return loss.item()
"""


def test_what_a_new_rank_alone_draws_before_it_resumes_is_found(tmp_path: Path) -> None:
    (path := tmp_path / "recipe.py").write_text(DRAWN.format(scale="random.random() if mesh.get_rank() else 2.0"))
    report = trial(path, world=1, to_world=2, steps=2, more=2, gradients=False)
    assert report.verdict == "differs" and "rank 1" in report.message, report.message


@pytest.mark.long
@pytest.mark.parametrize("worlds", [(2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("scale", "verdict"),
    [("2.0", "same"), ("random.random()", "differs"), ("1 + os.listdir({folder!r}).index('a')", "differs")],
)
def test_on_another_mesh_the_reference_run_has_other_seeds_and_lists_in_another_order(
    scale: str, verdict: str, worlds: tuple[int, int], tmp_path: Path
) -> None:
    """What neither it nor B restores must not come out the same, but on ranks that A did not have."""
    (files := tmp_path / "files").mkdir()
    for name in "abc":
        (files / name).touch()
    (path := tmp_path / "recipe.py").write_text(DRAWN.format(scale=scale.format(folder=str(files))))
    order = os.listdir(files)
    if "listdir" in scale and order.index("a") == 1:  # in the middle from both ends
        (files / "d").touch()
    report = trial(path, world=worlds[0], to_world=worlds[1], steps=2, more=2, gradients=False)
    assert report.verdict == verdict, report.message
