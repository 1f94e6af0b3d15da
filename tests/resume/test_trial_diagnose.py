"""What is wrong with a state is named as what it is, and nothing is said of one that is whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.recorded_states import State

from ckpttool.resume.diagnose import diagnose as diagnose_recorded
from ckpttool.resume.results import Finding

SHAPES = {"embed.weight": (8, 4), "up.weight": (4, 4), "down.weight": (4, 4), "norm.weight": (4,), "one.bias": (1,)}


def state(seed: int, steps: int = 3) -> State:
    """A run of two ranks after a few steps; another seed for one that was newly built."""
    random = np.random.default_rng(seed)
    made = State(kinds={"sched": "scheduler", "loader": "dataloader", "gen": "rng"}, world=2)
    for name, shape in SHAPES.items():
        made.tensors[f"model.{name}"] = random.standard_normal(shape, np.float32)
        if steps:
            made.tensors[f"optimizer.state.{name}.exp_avg"] = random.standard_normal(shape, np.float32)
            made.tensors[f"optimizer.state.{name}.exp_avg_sq"] = random.random(shape, np.float32)
            made.tensors[f"optimizer.state.{name}.step"] = np.array(float(steps), np.float32)
    made.tensors["model.seen"] = np.array(steps * 10)
    made.tensors["model.head.weight"] = made.tensors["model.embed.weight"]
    made.ties = [("model.embed.weight", "model.head.weight")]
    made.buffers = frozenset({"model.seen"})
    made.objects = {
        "optimizer.param_groups.0.lr": 0.01 / (1 + steps), "optimizer.param_groups.0.betas": [0.9, 0.95],
        "optimizer.param_groups.1.lr": 0.02, "sched.last_epoch": steps, "sched._last_lr": [0.01 / (1 + steps)],
        "scaler.scale": 1024.0 * (1 + steps),
    }  # fmt: skip
    for rank in (0, 1):
        made.objects |= {f"rng.rank{rank}.{kind}": f"{kind} {seed} {rank}" for kind in ("python", "numpy", "torch")}
        made.objects |= {f"loader.rank{rank}.position": steps * 2 + rank * bool(steps), f"loader.rank{rank}.epoch": 0}
    for name in ("model.embed.weight", "optimizer.state.embed.weight.exp_avg"):
        made.boxes[name] = [((0, 0), (4, 4)), ((4, 0), (4, 4))]
    return made


def numbers(made: State, name: str) -> Any:
    """The elements of a tensor, as a copy that can be changed."""
    return made.tensors[name].copy()


def put(made: State, name: str, values: Any) -> None:
    made.tensors[name] = np.asarray(values, np.float32)


def diagnose(before: State, after: State, fresh: State | None = None) -> list[Finding]:
    return diagnose_recorded(before.recorded(), after.recorded(), fresh.recorded() if fresh is not None else None)


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def seen(change: Any) -> list[Finding]:
    """What is said after `change` was done to the state that came back."""
    after = state(1)
    change(after)
    return diagnose(state(1), after, state(2, steps=0))


def test_an_intact_state_says_nothing() -> None:
    assert seen(lambda after: None) == []
    assert diagnose(state(1), state(1)) == []


def test_a_flipped_bit() -> None:
    def flip(after: State) -> None:
        values = numbers(after, "model.up.weight")
        values.view(np.uint32).reshape(-1)[6] ^= 1 << 3
        put(after, "model.up.weight", values)

    found = only(seen(flip))
    assert (found.kind, found.name, found.index) == ("flipped bit", "model.up.weight", [1, 2])
    assert (found.ulp, found.differing, found.of) == (8, 1, 16)
    assert found.expected == numbers(state(1), "model.up.weight")[1, 2]
    assert found.expected != found.found and "bit 3 of `model.up.weight`[1, 2]" in found.message


def test_a_second_moment_zeroed() -> None:
    found = only(seen(lambda after: put(after, "optimizer.state.up.weight.exp_avg_sq", np.zeros((4, 4)))))
    assert (found.kind, found.message) == ("zeroed", "the second moment of `up.weight` is all zeros")


@pytest.mark.parametrize("names", [["up.weight"], [*SHAPES]])
def test_the_step_off_by_one(names: list[str]) -> None:
    def shift(after: State) -> None:
        for name in names:
            put(after, f"optimizer.state.{name}.step", 4.0)

    found = only(seen(shift))
    assert found.kind == "step" and "off by +1: 4 and not 3" in found.message
    assert ("5 parameters" in found.message) == (len(names) == 5)


def test_moments_swapped() -> None:
    def swap(after: State) -> None:
        for kind in ("exp_avg", "exp_avg_sq"):
            one, two = (f"optimizer.state.{name}.weight.{kind}" for name in ("up", "down"))
            after.tensors[one], after.tensors[two] = after.tensors[two], after.tensors[one]

    found = only(seen(swap))
    assert found.kind == "swapped"
    assert found.message == "the moments (exp_avg, exp_avg_sq) of `down.weight` and `up.weight` are swapped"


def test_what_another_tensor_held() -> None:
    def take(after: State) -> None:
        after.tensors["model.up.weight"] = after.tensors["model.down.weight"]
        put(after, "model.down.weight", np.full((4, 4), 7.0))

    kinds = {found.name: found.kind for found in seen(take)}
    assert kinds == {"model.up.weight": "taken from another", "model.down.weight": "values differ"}


@pytest.mark.parametrize("key", ["lr", "betas"])
@pytest.mark.parametrize("lost", [True, False])
def test_a_hyper_parameter_lost(key: str, lost: bool) -> None:
    def lose(after: State) -> None:
        name = f"optimizer.param_groups.0.{key}"
        value = after.objects.pop(name)
        if not lost:
            after.objects[name] = [0.9, 0.999] if key == "betas" else value * 2

    found = only(seen(lose))
    assert found.kind == ("hyper-parameter lost" if lost else "hyper-parameter")
    assert f"`{key}` of parameter group 0" in found.message


def from_fresh(after: State, *prefixes: str) -> None:
    fresh = state(2, steps=0)
    for name in fresh.objects:
        if name.startswith(prefixes):
            after.objects[name] = fresh.objects[name]


@pytest.mark.parametrize(
    ("prefix", "kind", "says"),
    [
        ("sched.", "scheduler not restored", "the scheduler `sched` was not restored: last_epoch 0 and not 3"),
        ("scaler.", "scaler not restored", "the grad scaler `scaler` was not restored: scale 1024.0 and not 4096.0"),
        ("rng.rank1.", "rng not restored", "the RNG of rank 1 was not restored (python, numpy, torch)"),
        ("rng.rank0.torch", "rng not restored", "the RNG of rank 0 was not restored (torch)"),
        ("loader.rank0.", "dataloader restarted", "the data loader of rank 0 was restarted (position)"),
    ],
)
def test_what_was_not_restored(prefix: str, kind: str, says: str) -> None:
    found = only(seen(lambda after: from_fresh(after, prefix)))
    assert found.kind == kind and found.message.startswith(says)


def test_a_scheduler_that_is_only_elsewhere() -> None:
    found = only(seen(lambda after: after.objects.update({"sched.last_epoch": 4})))
    assert (found.kind, found.expected, found.found) == ("scheduler differs", 3, 4)


@pytest.mark.parametrize("root", ["rng", "loader"])
def test_ranks_swapped(root: str) -> None:
    def swap(after: State) -> None:
        before = dict(after.objects)
        for name in before:
            if name.startswith(f"{root}.rank0."):
                other = name.replace("rank0", "rank1")
                after.objects[name], after.objects[other] = before[other], before[name]

    found = only(seen(swap))
    assert found.kind == ("rng swapped" if root == "rng" else "dataloader swapped")
    assert "ranks 0 and 1 are swapped" in found.message


def test_the_state_of_another_rank() -> None:
    def copy(after: State) -> None:
        for kind in ("python", "numpy", "torch"):
            after.objects[f"rng.rank1.{kind}"] = after.objects[f"rng.rank0.{kind}"]

    found = only(seen(copy))
    assert (found.kind, found.rank) == ("rng of another rank", 1)


def test_a_buffer_not_restored() -> None:
    found = only(seen(lambda after: after.tensors.update({"model.seen": state(2, 0).tensors["model.seen"]})))
    assert (found.kind, found.expected, found.found) == ("buffer not restored", 30, 0)


def test_a_tied_weight_untied() -> None:
    def untie(after: State) -> None:
        after.ties = []
        after.tensors["model.head.weight"] = state(2).tensors["model.embed.weight"]

    found = only(seen(untie))
    assert found.kind == "untied" and "`model.head.weight` was tied with `model.embed.weight`" in found.message


@pytest.mark.parametrize("through", ["bfloat16", "float16"])
def test_moments_rounded(through: str) -> None:
    def rounded(after: State) -> None:
        for name in [*after.tensors]:
            if name.rpartition(".")[2].startswith("exp_avg"):
                values = torch.from_numpy(numbers(after, name)).to(getattr(torch, through)).float()
                put(after, name, values.numpy())

    found = only(seen(rounded))
    assert found.kind == "rounded" and f"(exp_avg, exp_avg_sq) were rounded to {through}" in found.message


@pytest.mark.parametrize("name", ["model.embed.weight", "optimizer.state.embed.weight.exp_avg"])
def test_a_shard_of_the_wrong_rank(name: str) -> None:
    def wrong(after: State) -> None:
        values = numbers(after, name)
        values[4:] = values[:4]
        put(after, name, values)
        if name in after.ties[0]:
            after.tensors["model.head.weight"] = after.tensors[name]

    found = next(one for one in seen(wrong) if one.name == name)
    assert (found.kind, found.rank) == ("wrong shard", 1)
    assert found.message == f"the shard of rank 1 of `{name}` is that of rank 0"


def test_what_has_no_name_of_its_own() -> None:
    def change(after: State) -> None:
        values = numbers(after, "model.up.weight")
        values[1, 1:] += 1
        put(after, "model.up.weight", values)

    found = only(seen(change))
    assert (found.kind, found.index, found.differing, found.of) == ("values differ", [1, 1], 3, 16)
    assert found.absolute == pytest.approx(1.0)


def test_what_is_missing_or_of_another_kind() -> None:
    def change(after: State) -> None:
        del after.tensors["model.norm.weight"]
        after.tensors["model.one.bias"] = np.zeros((1,), np.float64)
        after.tensors["model.more"] = np.zeros((1,), np.float64)

    kinds = {found.name: found.kind for found in seen(change)}
    assert kinds == {
        "model.norm.weight": "tensor missing", "model.more": "tensor unexpected", "model.one.bias": "dtype differs",
    }  # fmt: skip


def test_values_of_ranks_that_are_not_there_are_left_out() -> None:
    after = state(1)
    after.world = 1
    after.objects = {name: value for name, value in after.objects.items() if "rank1" not in name}
    assert diagnose(state(1), after) == []
