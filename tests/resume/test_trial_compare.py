"""What is compared and checked, on runs made by hand: each check sees what it is for, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from support.recorded_states import State
from support.simulated_ranks import as_rank, mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpttool.catalogue.identity import same
from ckpttool.errors import UsageError
from ckpttool.fleet import route
from ckpttool.layout.mesh import parse_mesh
from ckpttool.resume import checks, compare
from ckpttool.resume.compare import judge
from ckpttool.resume.job import Seen
from ckpttool.resume.results import Compared, RankCheck, Run, RunDifference, Step, TrialReport
from ckpttool.resume.states import RunState
from ckpttool.resume.steps import TITLES, compare_steps, of_ranks
from ckpttool.resume.worker.gradients import _joined
from ckpttool.resume.worker.observe import shape_of_shard
from ckpttool.resume.worker.record import plain


def report() -> TrialReport:
    return TrialReport(recipe="recipe.py", rule="bitwise", rule_message="")


def step(number: int, *losses: float, **changed: Any) -> Step:
    made = Step(number, [*losses], 0.5, "all", ["batch"] * len(losses), 0.1, ["digest"] * len(losses))
    return dataclasses.replace(made, **changed)


def steps_compared(made: TrialReport, other: list[Step], before: int = 3, **options: Any) -> list[RunDifference]:
    sides = (of_ranks(steps) for steps in (RUN[:before], other))
    found = compare_steps(made, *sides, "B", "A", titles=TITLES[:-1], **options)  # type: ignore[misc]
    return [found] if found is not None else []


RUN = [step(4, 2.5, 2.25), step(5, 2.0, 1.75), step(6, 1.5, 1.25)]


def test_equal_steps_are_equal() -> None:
    made = report()
    assert not steps_compared(made, [*RUN])
    assert made.findings == [] and {row.what: row.count for row in made.compared} == {
        "next batch": 3, "loss": 3, "gradient norm": 3, "learning rate": 3, "parameters": 3,
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
    [found] = steps_compared(made, other)
    assert (found.kind, found.rank, found.step, found.run) == (kind, rank, 5, "B")
    if changed.get("losses") == [2.0, 1.75 + 2**-52]:
        assert (found.expected, found.found, found.ulp) == (1.75, 1.75 + 2**-52, 1)


def test_a_digest_is_shown_in_the_loss_that_follows_from_it() -> None:
    made = report()
    other = [RUN[0], dataclasses.replace(RUN[1], digests=["other", "digest"]), step(6, 1.5, 1.5, digests=["x", "y"])]
    [found] = steps_compared(made, other)
    assert (found.kind, found.expected, found.found, found.absolute) == ("parameters differ", 1.375, 1.5, 0.125)
    assert found.message.endswith("in step 5; the loss in step 6 is 1.5 and not 1.375")
    [found] = steps_compared(report(), other[:2], 2)
    assert (found.expected, found.found) == (None, None), "two digests say nothing"


def test_what_is_not_judged_is_no_finding() -> None:
    made = report()
    assert not steps_compared(made, [step(4, 0.0, 0.0)], why_not="the reference run does not have A's state")
    assert {row.equal for row in made.compared} == {None}
    made = report()
    assert not steps_compared(made, [step(4, 0.0, 0.0)], excused={"loss": 4})
    assert {row.what: row.equal for row in made.compared}["loss"] is None


@pytest.mark.parametrize("why_not", ["", "the reference run does not have A's state", None])
def test_nothing_is_proven_without_a_reference_run(why_not: str | None) -> None:
    """On another mesh: torch resumed there, not exactly, or not at all."""
    trial = dataclasses.replace(report(), rule="control", steps_after=1)
    trial.runs = [Run("A", "shard=2", 2), Run("B", "shard=4", 4, resumed_at=3)]
    if why_not is not None:
        sides = (of_ranks(RUN[:1]), of_ranks(RUN[:1]))
        assert compare_steps(trial, *sides, "B", "control", titles=TITLES[:-1], why_not=why_not) is None
    judge(trial)
    is_proven = why_not == ""
    assert (trial.verdict, trial.exit_code) == (("same", 0) if is_proven else ("unproven", 9))
    assert trial.message.startswith("exact resume: " if is_proven else "not proven: state on 4 ranks is bit-identical")


def seen(rank: int, **changed: Any) -> Seen:
    memory = {"parameters": 8, "parameters_expected": 8, "optimizer": 16, "optimizer_expected": 16}
    made = Seen(rank, parameters=3, memory=memory, shared={"scheduler": "s"})
    made.steps = [{"number": 4, "loss": 2.5 + rank}]
    return dataclasses.replace(made, **changed)


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
    checks.check_sharding(made, "B", [seen(0, **same), seen(1, **same)])
    assert made.findings == [] and all(check.passed for check in made.checks)
    made = report()
    checks.check_sharding(made, "B", [seen(0, **same), seen(1, **{**same, **changed})])
    [found] = made.findings
    assert found.kind == kind and says in found.message


def test_losses_of_ranks_with_batches_of_their_own_are_not_judged() -> None:
    made = report()
    checks.check_sharding(made, "A", [seen(0), seen(1, replica=1)])
    [check] = [check for check in made.checks if check.what == "losses agree"]
    assert check.passed is None and made.findings == []


def checked(*rows: list[float] | None) -> tuple[bool | None, str, list[RunDifference]]:
    """What is said of gradients by their distance from those of one rank, the norm of these, and the projection."""
    made = report()
    checks.check_gradients(made, "A", {"compute": "float32", "rows": {str(n): r for n, r in enumerate(rows)}})
    [check] = made.checks
    return check.passed, check.message, made.findings


def test_gradients_that_are_reduced_wrongly_are_seen() -> None:
    same = [2e-6, 2.0, 4.0]
    assert checked(same, same)[0] is True and checked(same, [0.0, 0.0, 0.0])[0] is True
    passed, says, found = checked(same, [2.0, 4.0, 8.0])
    assert passed is False and "`1` is 0.5 of its norm" in says and found[0].kind == "gradients reduced"
    twice = (None, "all are 2 times those of one rank: `step` scales them otherwise than by a mean")
    assert checked([2.0, 2.0, 8.0], [3.0, 3.0, 18.0])[:2] == twice
    # A gradient that only one of them has.
    assert checked(same, None)[0] is False and checked(same, [1.0, 0.0, 0.0])[0] is False
    assert checked()[0] is False


def test_batches_of_ranks_are_joined_with_their_masks() -> None:
    """What each row of a batch has is joined, what all ranks share is not; where both may be, nothing is checked."""
    batches = [[torch.full((3, 5), rank), torch.ones(3, 5), torch.ones(5, 5).tril(), True] for rank in range(2)]
    why, joined = _joined(batches)
    assert why == "" and [one if one is True else tuple(one.shape) for one in joined] == [(6, 5), (6, 5), (5, 5), True]
    assert joined[0][:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    square = [[torch.full((5, 5), rank), torch.ones(5, 5).tril()] for rank in range(2)]
    assert "may be part of the batch" in _joined(square)[0]
    other = [[torch.zeros(3, 5), torch.full((7,), rank)] for rank in range(2)]
    assert "different inputs" in _joined(other)[0]


class Marks(Enum):
    ONE = 1


class Bare:
    __slots__ = ()


def test_values_are_told_apart_and_alike_in_every_process() -> None:
    """Long arrays, keys that are numbers, sets and objects: nothing is left out, and no address is in it."""
    long = np.arange(5_000)
    other = long.copy()
    other[2_500] += 1
    assert repr(long) == repr(other) and plain(long) != plain(other)
    assert plain({"order": deque([torch.zeros(9_000)])}) != plain({"order": deque([torch.ones(9_000)])})
    assert plain({5: 1}) != plain({"5": 1})
    assert plain({"b", "a", "c"}) == plain({"c", "b", "a"}) == {"set": ["a", "b", "c"]}
    assert plain(Bare()) == plain(Bare()) and plain(Marks.ONE) == "Marks.ONE" and plain(Marks) == plain(Marks)
    assert plain(np.float64(0.5)) == 0.5 and plain(np.array([1, 2])) != plain(np.array([1.0, 2.0]))
    one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    assert plain(one) != plain(two) and plain(one) == plain(torch.Generator().manual_seed(1))
    assert json.loads(json.dumps(plain([Marks.ONE, int, long, {1}, Bare(), len]))) is not None
    assert same(float("nan"), float("nan")) and not same(0.0, -0.0) and not same(1, 1.0) and not same(1, True)


def state(*weights: float) -> RunState:
    return State({"model.w": torch.tensor(weights)}, values=[{"scheduler.last_epoch": 3}]).recorded()


def test_a_learning_rate_that_differs_is_named_before_what_comes_of_it() -> None:
    other = [step(4, 2.5, 2.25, learning_rates=[0.2], digests=["x", "y"]), *RUN[1:]]
    [found] = steps_compared(report(), other)
    assert found.message.startswith("the learning rate differs from that of A in step 4: [0.2] and not []")


def test_the_end_and_the_step_it_went_on_at_are_compared() -> None:
    made = report()
    assert compare.compare_progress(made, 4, 4, "B", "A")
    compare.compare_ends(made, state(1.0, 2.0), state(1.0, 2.0), "B", "A")
    assert made.findings == [] and [(row.what, row.equal, row.count) for row in made.compared] == [
        ("progress", True, 1), ("end", True, 2),
    ]  # fmt: skip
    assert not compare.compare_progress(made, 4, 5, "B", "A")
    # A buffer that no step shows.
    compare.compare_ends(made, state(1.0, 2.0), state(1.0, 2.3), "B", "A")
    assert [found.kind for found in made.findings] == ["progress", "model differs"]
    assert made.findings[0].message == "training resumed at step 5, and was saved at step 4"
    assert made.findings[1].message == "at the end, 1 of 1 value of the model differ: `model.w`"
    assert [row.equal for row in made.compared[2:]] == [False, False]


def test_nothing_passes_for_want_of_words() -> None:
    made = report()
    made.compared.append(Compared("model", "B", "A", 3, 1, equal=False))
    judge(made)
    assert (made.verdict, made.message) == ("differs", "resume is not exact: model of B: not as it was")
    made = report()
    made.checks.append(RankCheck("memory", "B", 3, passed=False))
    judge(made)
    assert made.verdict == "differs"


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
    ("via", "onto", "other", "says"),
    [
        ("", "shard=2", False, []),
        ("", "shard=4", True, ["reshard --to-world 4"]),
        ("safetensors,dcp", "shard=4", True, ["convert --to safetensors", "convert --to dcp --to-world 4"]),
        ("dcp", "shard=2,tp=2", True, ["convert --to dcp --to-world 4", "reshard --to-mesh shard=2,tp=2"]),
        ("torch", "shard=4", True, ["convert --to torch"]),
        ("reshard:2,reshard:shard=2+tp=2", "shard=8", 1, ["reshard --to-world 2", "reshard --to-mesh shard=2,tp=2"]),
    ],
)  # fmt: skip
def test_routes(via: str, onto: str, other: bool, says: list[str]) -> None:
    assert [stage.message for stage in route.parse_route(via, parse_mesh(onto), other_mesh=other)] == says


@pytest.mark.parametrize("via", ["zip", "dcp:4", "reshard", "reshard:shard=0"])
def test_stages_that_are_none(via: str) -> None:
    with pytest.raises(UsageError):
        route.parse_route(via, parse_mesh("shard=2"), other_mesh=False)


def test_the_report_is_json() -> None:
    made = report()
    made.findings += steps_compared(made, [step(4, float("inf"), 2.25)])
    said = made.as_dict()
    assert json.loads(json.dumps(said))["schema"] == "ckpttool/trial/2"
