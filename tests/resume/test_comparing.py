"""What is compared and checked, on runs made by hand: each check sees what it is for, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakeranks import as_rank, mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpttool.errors import UsageError
from ckpttool.resume import comparing, routes
from ckpttool.resume.jobs import Job, Seen
from ckpttool.resume.results import Finding, Report, Step
from ckpttool.resume.worker.recording import Writer
from ckpttool.resume.worker.shardings import shape_of_shard


def report() -> Report:
    return Report("recipe.py", "bitwise", "")


def step(number: int, *losses: float, **changed: Any) -> Step:
    made = Step(number, [*losses], 0.5, "all", ["batch"] * len(losses), 0.1, ["digest"] * len(losses))
    return dataclasses.replace(made, **changed)


RUN = [step(4, 2.5, 2.25), step(5, 2.0, 1.75), step(6, 1.5, 1.25)]


def test_equal_steps_are_equal() -> None:
    made = report()
    assert comparing.steps_of(made, RUN, [*RUN], "B", "A")
    assert made.findings == [] and {row.what: row.count for row in made.compared} == {
        "next batch": 3, "loss": 3, "gradient norm": 3, "parameters": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "kind", "rank"),
    [
        ({"batches": ["batch", "other"]}, "next batch differs", 1),
        ({"losses": [2.0, 1.75 + 2**-52]}, "loss differs", 1),
        ({"gradient_norm": 0.25}, "gradient norm differs", None),
        ({"digests": ["other", "digest"]}, "parameters differ", 0),
        ({"losses": [float("nan"), 1.75]}, "loss differs", 0),
    ],
)
def test_the_first_difference_is_named(changed: dict[str, Any], kind: str, rank: int | None) -> None:
    made = report()
    other = [RUN[0], dataclasses.replace(RUN[1], **changed), step(6, 9.0, 9.0, digests=["x", "y"])]
    assert not comparing.steps_of(made, RUN, other, "B", "A")
    [found] = made.findings
    assert (found.kind, found.rank, found.step, found.run) == (kind, rank, 5, "B")
    if changed.get("losses") == [2.0, 1.75 + 2**-52]:
        assert (found.expected, found.found, found.ulp) == (1.75, 1.75 + 2**-52, 1)


def test_what_is_not_judged_is_no_finding() -> None:
    made = report()
    assert not comparing.steps_of(made, RUN, [step(4, 0.0, 0.0)], "B", "control", judged=False)
    assert made.findings == [] and {row.equal for row in made.compared} == {None}


def seen(rank: int, **changed: Any) -> Seen:
    memory = {"parameters": 8, "parameters_expected": 8, "optimizer": 16, "optimizer_expected": 16}
    made = Seen(rank, [0, rank], parameters=3, memory=memory, shared={"scheduler": "s"})
    made.steps = [{"number": 4, "loss": 2.5 + rank}]
    return dataclasses.replace(made, **changed)


JOB = Job("folder", "recipe.py", {"shard": 1, "tp": 2})


@pytest.mark.parametrize(
    ("changed", "kind", "says"),
    [
        ({"shapes": ["`w`: [3] and not [4]"]}, "local shapes", "rank 1: `w`: [3] and not [4]"),
        ({"memory": {"parameters": 9, "parameters_expected": 8, "optimizer": 1, "optimizer_expected": 1}}, "memory",
         "rank 1: parameters 9 B and not 8"),
        ({"shared": {"scheduler": "t"}}, "values of the run", "different values of `scheduler`"),
        ({"steps": [{"number": 4, "loss": 2.0}]}, "losses agree", "rank 0: 2.5, rank 1: 2.0"),
    ],
)  # fmt: skip
def test_each_check_sees_what_it_is_for(changed: dict[str, Any], kind: str, says: str) -> None:
    same = {"steps": [{"number": 4, "loss": 2.5}]}
    made = report()
    comparing.sharding(made, "B", JOB, [seen(0, **same), seen(1, **same)])
    assert made.findings == [] and all(check.passed for check in made.checks)
    made = report()
    comparing.sharding(made, "B", JOB, [seen(0, **same), seen(1, **{**same, **changed})])
    [found] = made.findings
    assert found.kind == kind and says in found.says


def test_losses_of_ranks_with_batches_of_their_own_are_not_judged() -> None:
    made = report()
    comparing.sharding(made, "A", Job("folder", "recipe.py", {"replicate": 1, "shard": 2}), [seen(0), seen(1)])
    [check] = [check for check in made.checks if check.what == "losses agree"]
    assert check.passed is None and made.findings == []


def gradients(folder: Path, name: str, *values: torch.Tensor) -> str:
    place = folder / name
    place.mkdir()
    writer = Writer(str(place))
    for number, value in enumerate(values):
        writer.add(f"gradient.{number}", value)
    writer.close({"compute": "float32", "leaves": [], "spec": ""})
    return str(place)


def checked(
    folder: Path, ours: list[torch.Tensor], alone: list[torch.Tensor]
) -> tuple[bool | None, str, list[Finding]]:
    made = report()
    comparing.gradients(made, "A", gradients(folder, "ours", *ours), gradients(folder, "alone", *alone))
    [check] = made.checks
    return check.passed, check.says, made.findings


def test_gradients_that_are_reduced_wrongly_are_seen(tmp_path: Path) -> None:
    one, two = torch.randn(50), torch.randn(4, 4)
    for name in "abcd":
        (tmp_path / name).mkdir()
    assert checked(tmp_path / "a", [one, two], [one * (1 + 1e-6), two])[0] is True
    passed, says, found = checked(tmp_path / "b", [one, two * 0.5], [one, two])
    assert passed is False and "`1` is 0.5 of its norm" in says and found[0].kind == "gradients reduced"
    assert checked(tmp_path / "c", [one * 2, two * 2], [one, two])[:2] == (
        None, "all are 2 times those of one rank: `step` scales them otherwise than by a mean",
    )  # fmt: skip
    assert checked(tmp_path / "d", [one, torch.zeros(4, 4)], [one, two])[0] is False


@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (4, 9), (2, 0)])
@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(0)], [_StridedShard(0, split_factor=3), Shard(0)]],
)
def test_shapes_of_shards_are_torchs(shape: tuple[int, ...], placements: list[Any]) -> None:
    for rank in range(6):
        with as_rank(rank, 6):
            grid = mesh(2, 3)
            theirs, _ = compute_local_shape_and_global_offset(shape, grid, placements)
            ours = shape_of_shard(shape, (2, 3), grid.get_coordinate() or [], placements)
            assert ours == tuple(theirs) or (0 in ours and 0 in theirs)


@pytest.mark.parametrize(
    ("via", "dims", "other", "says"),
    [
        ("", {"shard": 2}, False, []),
        ("", {"shard": 4}, True, ["reshard --to-world 4"]),
        ("safetensors,dcp", {"shard": 4}, True, ["convert --to safetensors", "convert --to dcp --to-world 4"]),
        ("dcp", {"shard": 2, "tp": 2}, True, ["convert --to dcp --to-world 4", "reshard --to-mesh shard=2,tp=2"]),
        ("torch", {"shard": 4}, True, ["convert --to torch"]),
        ("reshard:2,reshard:shard=2+tp=2", {"shard": 8}, 1, ["reshard --to-world 2", "reshard --to-mesh shard=2,tp=2"]),
    ],
)  # fmt: skip
def test_routes(via: str, dims: dict[str, int], other: bool, says: list[str]) -> None:
    assert [stage.says for stage in routes.parse(via, dims, other_mesh=other)] == says


@pytest.mark.parametrize("via", ["zip", "dcp:4", "reshard", "reshard:shard=0"])
def test_stages_that_are_none(via: str) -> None:
    with pytest.raises(UsageError):
        routes.parse(via, {"shard": 2}, other_mesh=False)


def test_the_report_is_json(tmp_path: Path) -> None:
    made = report()
    comparing.steps_of(made, RUN, [step(4, float("inf"), 2.25)], "B", "A")
    said = made.as_dict()
    assert json.loads(json.dumps(said))["schema"] == "ckpttool/trial/1"
