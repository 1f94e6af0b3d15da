"""Every way of sharding through every format: bit for bit on the same mesh, and on another one as torch alone has it.

The trials of one world are done inside one launch of torchrun; those that need another world start their own ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import json_schemas
from support.torchrun import forked
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpttool.errors import UsageError
from ckpttool.resume.trial import trial

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "recipe_kinds.py"
KINDS = ["fsdp2", "fsdp1", "fsdp1-sharded", "fsdp1-grad", "ddp", "hsdp", "tp"]
ROUTES = ["", "safetensors", "torch", "fsdp1", "dcp", "safetensors,fsdp1,torch"]
LAUNCH = 3_000


def case(kind: str, via: str, to_mesh: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "via": via, "to_mesh": to_mesh}


# One of each format, and of each kind that `test_trial.py` has not.
SHORT = [
    case("fsdp2", "safetensors,fsdp1,torch"), case("fsdp1", "fsdp1"), case("hsdp", "dcp"),
    case("tp", "torch", "shard=2"),
]  # fmt: skip
ALL = {
    2: [case(kind, route) for kind in KINDS for route in ROUTES],
    4: [
        *(case(kind, route) for kind in [*KINDS, "fsdp1-hybrid"] for route in ROUTES),
        *(case("fsdp2", route, "replicate=2,shard=2") for route in ROUTES),
        *(case(kind, route, "shard=4") for kind in ("tp", "hsdp") for route in ROUTES),
        case("fsdp2", "reshard:2,reshard:8"), case("tp", "reshard:shard=2+tp=4"),
    ],
}  # fmt: skip


def tried(folder: Path, world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    told, found = folder / "cases.json", folder / "found.json"
    told.write_text(json.dumps(cases))
    output = forked(world, HERE / "save_on_ranks.py", told, found, within=LAUNCH)
    reports: list[dict[str, Any]] = json.loads(found.read_text()) if found.exists() else []
    assert len(reports) == len(cases), output
    return reports


def check(cases: list[dict[str, Any]], reports: list[dict[str, Any]]) -> None:
    wrong = [
        (one, report["message"]) for one, report in zip(cases, reports, strict=True) if report["verdict"] != "same"
    ]
    assert wrong == []
    for one, report in zip(cases, reports, strict=True):
        assert report["rule"] == ("bitwise" if one["to_mesh"] is None else "control")
        assert {run["started"] for run in report["runs"]} == {"fresh processes"}
        # Nothing passes because it was not looked at.
        judged = {row["what"]: row for row in report["compared"]}
        assert {"model", "optimizer", "scheduler", "rng", "dataloader", "progress", "end"} <= judged.keys()
        assert {"next batch", "loss", "gradient norm", "parameters"} <= judged.keys()
        assert all(row["equal"] and row["count"] for row in judged.values()), (one, judged)
        assert all(check["passed"] for check in report["checks"] if check["what"] != "gradients reduced"), one


FORGETFUL = f"""
import sys
sys.path.append({str(HERE)!r})

import recipe_kinds
from recipe_kinds import build, mesh

def step(state, i):
    if i == 1:
        recipe_kinds.HIDDEN.append(i)
    for group in state["optimizer"].param_groups:
        group["weight_decay"] = 0.1 * len(recipe_kinds.HIDDEN)
    return recipe_kinds.step(state, i)
"""


def test_each_kind_and_each_format(tmp_path: Path) -> None:
    """And what a module keeps and no state has: B has none of it, although A trained under the same torchrun. And
    replicas that drift apart: FSDP1 over two of one rank each adds no gradients up (torch 2.13). DCP saves the two
    names of a tied weight from one replica each, and they are not the same numbers any more."""
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    forgetful = case("fsdp2", "") | {"recipe": str(tmp_path / "forgetful.py")}
    apart = case("fsdp2", "") | {"apart": True}
    *reports, forgets, elsewhere, drifts = tried(tmp_path, 2, [*SHORT, forgetful, apart, case("fsdp1-hybrid", "")])
    check(SHORT, reports)
    assert (forgets["verdict"], [run["name"] for run in forgets["runs"]]) == ("differs", ["A", "B", "A2"])
    assert elsewhere["message"].startswith("StorageError: rank 1 does not see `/nowhere` as rank 0 does"), elsewhere
    assert drifts["verdict"] == "error"
    assert "`embed.weight` and `head.weight` are different tensors there" in drifts["message"]


@pytest.mark.long
@pytest.mark.parametrize("world", ALL)
def test_every_kind_through_every_format(tmp_path: Path, world: int) -> None:
    check(ALL[world], tried(tmp_path, world, ALL[world]))


@pytest.mark.long
def test_it_does_not_cry_wolf(tmp_path: Path) -> None:
    """Twenty times the same is twenty times the same."""
    cases = [case(kind, "safetensors") for kind in ("fsdp2", "fsdp1", "ddp", "hsdp", "tp")] * 4
    check(cases, tried(tmp_path, 2, cases))


MOVES = [(4, 2, ""), (2, 8, "safetensors"), (4, 8, "reshard:2,reshard:8"), (4, 1, "torch"), (1, 2, "")]


@pytest.mark.long
@pytest.mark.parametrize(("world", "to_world", "via"), MOVES)
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp", "hsdp", "tp"])
def test_another_world_is_as_torch_alone_has_it(
    kind: str, world: int, to_world: int, via: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIND", kind)
    report = trial(RECIPE, world=world, to_world=to_world, via=via, steps=3, more=3)
    assert (report.verdict, report.rule) == ("same", "control"), report.message
    assert {row.against for row in report.compared} == {"A", "control"}
    assert all(row.equal for row in report.compared), report.compared
    assert [run.name for run in report.runs] == ["A", "B", "control"]
    assert all(check.passed for check in report.checks if check.count), report.checks
    assert len(report.drifts) == 1 and report.drifts[0].loss > 0


@pytest.mark.long
@pytest.mark.parametrize(("kind", "to_world"), [("fsdp2", 4), ("fsdp1", 2), ("ddp", 2)])
def test_a_second_model_and_milestones(kind: str, to_world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moving average beside the model, under a name that says nothing, and a scheduler with numbers for keys."""
    monkeypatch.setenv("KIND", kind)
    monkeypatch.setenv("EMA", "teacher")
    monkeypatch.setenv("MILESTONES", "1")
    report = trial(RECIPE, world=2, to_world=to_world, via="safetensors,dcp", steps=3, more=3, gradients=False)
    assert report.verdict == "same", report.message
    counts = {row.what: row.count for row in report.compared}
    assert counts["model"] == 2 * 22 and counts["scheduler"] >= 10


@pytest.mark.long
def test_a_second_model_that_is_not_as_it_was_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMA", "teacher")

    def zeroed(source: str, to: str) -> None:
        path = tmp_path / "state.pt"
        dcp_to_torch_save(source, path)
        state = torch.load(path, weights_only=False)  # written a moment ago
        state["teacher_model"]["layers.1.up.weight"].zero_()
        torch.save(state, to)

    report = trial(RECIPE, via=[zeroed], steps=2, more=1, gradients=False)
    assert [(one.kind, one.name) for one in report.findings][:1] == [
        ("module not restored", "teacher.layers.1.up.weight")
    ]


@pytest.mark.long
def test_a_recipe_that_does_not_train_shows_nothing(tmp_path: Path) -> None:
    idle = tmp_path / "idle.py"
    idle.write_text("from recipe_kinds import build, mesh\n\n\ndef step(state, i):\n    return 1.0\n")
    for name in ("recipe_kinds.py",):
        text = (
            (HERE / name).read_text().replace("Path(__file__).resolve().parents[2]", f"Path({str(HERE.parents[1])!r})")
        )
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match="no step of 3 changed a parameter"):
        trial(idle, steps=2, more=1, gradients=False)


@pytest.mark.long
def test_the_command_inside_processes_of_torchrun(tmp_path: Path) -> None:
    """One rank speaks, once; the route is gone by one of them."""
    words = ["verify-resume", "trial", "--recipe", str(RECIPE), "--via", "safetensors", "--steps", "2", "--more", "2"]
    launch = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", "2", "-m", "ckpttool"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, *words, "--json", "--device", "cpu"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = json_schemas.check(done.stdout)
    assert (said["verdict"], said["rule"]) == ("same", "bitwise")
    assert [run["started"] for run in said["runs"]] == ["fresh processes"] * 2
    assert all(check["passed"] for check in said["checks"]), said["checks"]
    other = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, *words, "--to-world", "4"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert other.returncode != 0
    assert other.stderr.count("`--to-world` asks for 4 ranks, and torchrun started 2") == 1, other.stderr
