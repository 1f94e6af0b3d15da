"""What is wrong with a state that a trial recorded is named as what it is, and nothing is said of one that is whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.recorded_states import State

from ckpttool.resume.compare import compare_states
from ckpttool.resume.results import RunDifference, TrialReport

SHAPES = {"embed.weight": (8, 4), "up.weight": (4, 4), "down.weight": (4, 4), "norm.weight": (4,)}
WHEN = "when step 3 began"


def state(seed: int, steps: int = 3) -> State:
    """A run of two ranks after a few steps; another seed for one that was newly built."""
    random = torch.Generator().manual_seed(seed)
    made = State(kinds={"optimizer": "group 0", "model.seen": "buffer", "ema": "apart"})
    made.parts = {"sched": "scheduler", "loader": "dataloader", "scaler": "scaler", "mine": "other"}
    for name, shape in SHAPES.items():
        made.tensors[f"model.{name}"] = torch.randn(shape, generator=random)
        if steps:
            for moment in ("exp_avg", "exp_avg_sq"):
                made.tensors[f"optimizer.state.{name}.{moment}"] = torch.rand(shape, generator=random)
            made.tensors[f"optimizer.state.{name}.step"] = torch.tensor(float(steps))
    made.tensors["model.seen"] = torch.tensor(steps * 10)
    made.tensors["ema.up.weight"] = torch.randn(4, 4, generator=random)
    made.tensors["model.head.weight"] = made.tensors["model.embed.weight"]
    made.ties = [["model.embed.weight", "model.head.weight"]]
    run = {
        "optimizer.param_groups.0.lr": 0.01 / (1 + steps),
        "optimizer.param_groups.0.betas": [0.9, 0.95],
        "sched.last_epoch": steps,
        "sched._last_lr": [0.01],
        "scaler.scale": 1024.0 * (1 + steps),
        "mine.n": steps,
    }
    made.values = [{"loader.position": steps * 2 + rank, "loader.epoch": 0} for rank in (0, 1)]
    made.values[0] |= run
    made.rng = [{kind: f"{kind} {seed} {rank}" for kind in ("numpy", "python", "torch")} for rank in (0, 1)]
    return made


def seen(change: Callable[[State], object], built: State | None = None) -> list[RunDifference]:
    """What is said after `change` was done to the state that came back."""
    after, report = state(1), TrialReport(recipe="recipe.py", rule="bitwise", rule_message="")
    change(after)
    start = (built or state(2, steps=0)).recorded(0)
    found = compare_states(report, state(1).recorded(), after.recorded(), start, "B", "A")
    assert {finding.part for finding in found} == {row.what for row in report.compared if not row.equal}
    return found


def put(after: State, name: str, value: torch.Tensor) -> None:
    assert name in after.tensors
    after.tensors[name] = value


def round_moments(after: State, dtype: torch.dtype) -> None:
    for name in after.tensors:
        if name.startswith("optimizer.state.up.weight.exp"):
            after.tensors[name] = after.tensors[name].to(dtype).float()


def swap(after: State) -> None:
    tensors = after.tensors
    for moment in ("exp_avg", "exp_avg_sq"):
        one, other = (f"optimizer.state.{name}.weight.{moment}" for name in ("up", "down"))
        tensors[one], tensors[other] = tensors[other], tensors[one]


def flip(after: State) -> None:
    tensor = after.tensors["model.up.weight"].clone()
    tensor.view(torch.int32)[1, 2] ^= 8
    after.tensors["model.up.weight"] = tensor


def untie(after: State) -> None:
    after.ties = []
    put(after, "model.head.weight", torch.ones(8, 4))


def take_wrong_shard(after: State) -> None:
    put(after, "model.down.weight", after.tensors["model.down.weight"][:2].repeat(2, 1))


def take_generators(after: State) -> None:
    after.rng[1] = after.rng[0]


def shift_counters(after: State) -> None:
    for name in SHAPES:
        put(after, f"optimizer.state.{name}.step", torch.tensor(4.0))


FAULTS: dict[str, tuple[Callable[[State], object], str]] = {
    "nothing": (lambda s: None, ""),
    "bit": (flip, f"weights of the model were not restored (`model.up.weight`): 1 of 5 tensors differ {WHEN}"),
    "zero": (
        lambda s: put(s, "optimizer.state.up.weight.exp_avg_sq", torch.zeros(4, 4)),
        f"the moments of `up.weight` were not restored (exp_avg_sq): they are zero {WHEN}",
    ),
    "counters": (
        shift_counters,
        f"the step counters of the optimizer were not restored, its moments were: 4.0 and not 3.0 {WHEN}"
    ),
    "swapped": (swap, "the moments of `down.weight` and `up.weight` are swapped (exp_avg, exp_avg_sq)"),
    "bfloat16": (
        lambda s: round_moments(s, torch.bfloat16),
        "the moments of `up.weight` were not restored (exp_avg, exp_avg_sq): they were rounded to bfloat16",
    ),
    "float16": (
        lambda s: round_moments(s, torch.float16),
        "the moments of `up.weight` were not restored (exp_avg, exp_avg_sq): they were rounded to float16",
    ),
    "wrong shard": (
        take_wrong_shard,
        "weights of the model were not restored (`model.down.weight`): rank 1 has the shard of rank 0",
    ),
    "dtype": (
        lambda s: put(s, "model.norm.weight", torch.zeros(4, dtype=torch.float64)),
        "weights of the model were not restored (`model.norm.weight`): float64 [4] and not float32 [4]",
    ),
    "as built": (
        lambda s: put(s, "model.up.weight", state(2, 0).tensors["model.up.weight"]),
        "weights of the model were not restored (`model.up.weight`): they are as they were built",
    ),
    "untied": (untie, "`model.head.weight` was tied with `model.embed.weight` and is a tensor of its own"),
    "average": (
        lambda s: put(s, "ema.up.weight", torch.ones(4, 4)),
        f"weights of modules that no optimizer trains were not restored (`ema.up.weight`): it differs {WHEN}",
    ),
    "buffer": (
        lambda s: put(s, "model.seen", torch.tensor(0)), "1 buffer of the model was not restored: `model.seen`"
    ),
    "missing": (lambda s: s.tensors.pop("model.norm.weight"), "`model.norm.weight` of the model differs"),
    "lr": (
        lambda s: s.values[0].update({"optimizer.param_groups.0.lr": 0.02}),
        f"the learning rate of parameter group 0 was not restored: 0.02 and not 0.0025 {WHEN}",
    ),
    "betas lost": (
        lambda s: s.values[0].pop("optimizer.param_groups.0.betas"),
        f"`betas` of parameter group 0 was not restored: missing and not [0.9, 0.95] {WHEN}",
    ),
    "scheduler": (
        lambda s: s.values[0].update({"sched.last_epoch": 0}),
        f"the scheduler was not restored: `sched.last_epoch` was 0 and not 3 {WHEN}",
    ),
    "scaler": (
        lambda s: s.values[0].update({"scaler.scale": 1024.0}),
        f"the grad scaler was not restored: `scaler.scale` was 1024.0 and not 4096.0 {WHEN}",
    ),
    "other": (
        lambda s: s.values[0].update({"mine.n": 0}), f"`mine` was not restored: `mine.n` was 0 and not 3 {WHEN}"
    ),
    "loader": (
        lambda s: s.values[1].update({"loader.position": 0}),
        f"the data loader of rank 1 was not restored: `loader.position` was 0 and not 7 {WHEN}",
    ),
    "loader of a rank": (
        lambda s: s.values[1].update({"loader.position": 6}),
        "the data loader of rank 1 was not restored: rank 1 has the data loader of rank 0",
    ),
    "generator": (
        lambda s: s.rng[1].update({"torch": "another"}), "the RNG state of rank 1 was not restored (torch)"
    ),
    "generators of a rank": (
        take_generators,
        "the RNG state of rank 1 was not restored (numpy, python, torch): rank 1 has the RNG state of rank 0",
    ),
    "generators": (
        lambda s: s.rng.reverse(),
        "the RNG state of rank 0, 1 was not restored (numpy, python, torch): those of ranks 0 and 1 are swapped",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_alone(name: str) -> None:
    change, says = FAULTS[name]
    assert [finding.message for finding in seen(change)] == ([says] if says else [])


def test_values_of_ranks_that_are_not_there_are_left_out() -> None:
    after, report = state(1), TrialReport(recipe="recipe.py", rule="control", rule_message="")
    after.values, after.rng = after.values[:1], after.rng[:1]
    assert compare_states(report, state(1).recorded(), after.recorded(), None, "B", "A") == []
    assert all(row.equal for row in report.compared) and "5 rank-local values of A or B alone" in report.notes[0]
