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

from ckpttool.resume.trial import trial

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "recipe_kinds.py"
KINDS = ["fsdp2", "fsdp1", "fsdp1-sharded", "fsdp1-grad", "ddp", "hsdp", "tp"]
ROUTES = ["", "safetensors", "torch", "fsdp1", "dcp", "safetensors,fsdp1,torch"]
LAUNCH = 3_000


def case(kind: str, via: str, to_mesh: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "via": via, "to_mesh": to_mesh}


# One of each kind and of each format.
SHORT = [
    case("fsdp2", "safetensors,fsdp1,torch"), case("fsdp1", "fsdp1"), case("ddp", "safetensors"), case("hsdp", "dcp"),
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
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(HERE / "on_ranks.py"), str(told), str(found)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LAUNCH
    )
    reports: list[dict[str, Any]] = json.loads(found.read_text()) if found.exists() else []
    assert len(reports) == len(cases), done.stdout[-2000:] + done.stderr[-4000:]
    return reports


def check(cases: list[dict[str, Any]], reports: list[dict[str, Any]]) -> None:
    wrong = [(one, report["says"]) for one, report in zip(cases, reports, strict=True) if report["verdict"] != "same"]
    assert wrong == []
    for one, report in zip(cases, reports, strict=True):
        assert report["rule"] == ("bitwise" if one["to_mesh"] is None else "control")
        assert {run["started"] for run in report["runs"]} == {"the processes that torchrun started"}
        # Nothing passes because it was not looked at.
        judged = {row["what"]: row for row in report["compared"]}
        assert {"model", "optimizer", "scheduler", "rng", "dataloader", "next batch", "loss"} <= judged.keys()
        assert all(row["equal"] and row["count"] for row in judged.values()), (one, judged)
        assert all(check["passed"] for check in report["checks"] if check["what"] != "gradients reduced"), one


def test_each_kind_and_each_format(tmp_path: Path) -> None:
    check(SHORT, tried(tmp_path, 2, SHORT))


@pytest.mark.long
@pytest.mark.parametrize("world", ALL)
def test_every_kind_through_every_format(tmp_path: Path, world: int) -> None:
    check(ALL[world], tried(tmp_path, world, ALL[world]))


@pytest.mark.long
def test_it_does_not_cry_wolf(tmp_path: Path) -> None:
    """Twenty times the same is twenty times the same."""
    cases = [case("fsdp2", "safetensors")] * 20
    check(cases, tried(tmp_path, 2, cases))


MOVES = [(4, 2, ""), (2, 8, "safetensors"), (4, 8, "reshard:2,reshard:8"), (4, 1, "torch"), (1, 2, "")]


@pytest.mark.long
@pytest.mark.parametrize(("world", "to_world", "via"), MOVES)
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp"])
def test_another_world_is_as_torch_alone_has_it(
    kind: str, world: int, to_world: int, via: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIND", kind)
    report = trial(RECIPE, world=world, to_world=to_world, via=via, steps=3, more=3)
    assert (report.verdict, report.rule) == ("same", "control"), report.says
    assert {row.against for row in report.compared} == {"A", "control"}
    assert all(row.equal for row in report.compared), report.compared
    assert [run.name for run in report.runs] == ["A", "B", "control"]
    assert all(check.passed for check in report.checks if check.count), report.checks
    assert len(report.drifts) == 1 and report.drifts[0].loss > 0


def test_replicas_that_drift_apart_are_seen(tmp_path: Path) -> None:
    """FSDP1 over two replicas of one rank each adds no gradients up (torch 2.13): run A itself is told to be wrong."""
    [report] = tried(tmp_path, 2, [case("fsdp1-hybrid", "")])
    assert report["verdict"] == "differs"
    found = next(one for one in report["findings"] if one["kind"] == "replicas agree")
    assert found["run"] == "A" and "`model.embed.weight`" in found["says"]
