"""What the hook records where a step begins, and the causes that are told from it."""

from __future__ import annotations

import base64
import copy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import warm_python

from ckpttool.analysis import generators
from ckpttool.resume import observe as inject
from ckpttool.resume import states
from ckpttool.resume.causes import Causes
from ckpttool.resume.observe.site import state
from ckpttool.resume.observe.site.state import rng, words
from ckpttool.resume.states import RunState

SCRIPT = Path(__file__).with_name("states_begun.py")

# The whole of what is said of each fault: what comes of it is not a cause.
TOLD = {
    "none": [],
    "weight": ["weights of the model were not restored (`model.norm.weight`): 1 of 4 tensors differ when step 3 began"],
    "elements swapped": ["1 buffer of the model was not restored: `model.fixed`"],
    "buffer": ["1 buffer of the model was not restored: `model.norm.num_batches_tracked`"],
    "average": [
        "weights of modules that no optimizer trains were not restored (`Average.shadow.0`): they are zero when step 3 "
        "began"
    ],
    "optimizer": ["the optimizer was not loaded: it has no state when step 3 began"],
    "one state": ["the optimizer was loaded in part: `norm.bias` has no state when step 3 began"],
    "counters": [
        "the step counters of the optimizer were not restored, its moments were: 0.0 and not 2.0 when step 3 began"
    ],
    "second moments": ["the moments of the optimizer were not restored (exp_avg_sq): they are zero when step 3 began"],
    "moments of a group": [
        "the moments of `norm.weight` were not restored (exp_avg, exp_avg_sq): they differ when step 3 began"
    ],
    "moments swapped": ["the moments of `key.weight` and `query.weight` are swapped (exp_avg, exp_avg_sq)"],
    "lr": ["the learning rate of parameter group 1 was not restored: 0.5 and not 0.1 when step 3 began"],
    "betas": ["`betas` of parameter group 0 was not restored: [0.5, 0.9] and not [0.9, 0.999] when step 3 began"],
    "scheduler": ["the scheduler was not restored: `scheduler.last_epoch` was 0 and not 2 when step 3 began"],
    "scaler": ["the grad scaler was not restored: `scaler.scale` was 8.0 and not 65536.0 when step 3 began"],
    "rng": ["the RNG state of rank 0 was not restored (torch)"],
    "rng drawn": [
        "the RNG state of rank 0 differs (torch): torch's is that of run A when step 3 began, 1 draw of 64 bits "
        "further: something drew from it after it was restored, such as `iter(DataLoader)`"
    ],
    "undrawn rng": [],
    "data restarted": ["the data restarted: the batch of step 3 is that of step 1 of A"],
    "data": ["the batch of rank 0 in step 3 is another: the data, or what the script makes of them, was not restored"],
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    subprocess.run([*warm_python.python(), str(SCRIPT), str(folder)], check=True, timeout=300)
    return folder


def begun(folder: Path, step: int = 3) -> RunState:
    return inject.read(str(folder)).states[step]


def told(*arguments: Any, **options: Any) -> list[str]:
    return [finding.message for finding in Causes(*arguments, **options)]


def test_each_fault_is_told_alone(recorded: Path) -> None:
    before, start = begun(recorded / "none"), begun(recorded / "none", 1)
    assert {name: told(before, begun(recorded / name), 3, start=start) for name in TOLD} == TOLD


def test_what_a_repetition_does_not_repeat_is_no_cause(recorded: Path) -> None:
    before, lr = begun(recorded / "none"), begun(recorded / "lr")
    assert [*Causes(before, lr, 3, again=lr)] == []
    # Of weights that come out differently, which ones it is depends on chance.
    assert [*Causes(before, begun(recorded / "moments swapped"), 3, again=begun(recorded / "weight"))] == []


def test_weights_as_they_were_built_are_called_so(recorded: Path) -> None:
    before, start = begun(recorded / "none"), begun(recorded / "none", 1)
    found = told(before, start, 3, start=start)
    assert found[0] == "the weights of the model were not restored: they are as they were built"
    assert "the optimizer was not loaded: it has no state when step 3 began" in found


def test_a_generator_is_told_by_how_far_it_was_drawn() -> None:
    def words(generator: np.random.MT19937) -> list[Any]:
        state = generator.state["state"]
        return [int(state["pos"]), base64.b64encode(state["key"].astype("<u4").tobytes()).decode()]

    generator = np.random.MT19937(7)
    states = [words(generator)]
    for count in (1, 622, 1, 5000):
        generator.random_raw(count)
        states.append(words(generator))
    expected = [0, 1, 623, 624, 5624]
    assert [generators.numbers_between(states[0], one) for one in states] == expected
    assert [generators.numbers_between(one, states[0]) for one in states] == [-one for one in expected]
    assert generators.numbers_between(states[0], words(np.random.MT19937(8))) is None
    assert generators.numbers_between([4, "MTIz"], [12, "MTIz"]) == 8 and not generators.origin("cuda", None, {})
    told = generators.origin("python", states[0], {"run A when step 9 began": states[2]})
    assert told == (
        "Python's is that of run A when step 9 began, 623 draws of 32 bits before: run A drew from it what run B did "
        "not"
    )


def test_a_generator_that_was_restored_from_another_save_is_told_so(recorded: Path) -> None:
    before, start = begun(recorded / "none"), begun(recorded / "none", 1)
    anew = copy.deepcopy(before.ranks)
    anew[0]["rng"] = {**anew[0]["rng"], "torch": "another"}
    anew[0]["forward"] |= {one: start.ranks[0]["forward"][one] for one in ("rng", "words")}
    [found] = told(before, RunState(anew), 3, start=start, others=[before, start])
    assert found == "the RNG state of rank 0 differs (torch): torch's is that of run A when step 1 began"


def test_what_was_rounded_is_known_by_what_rounding_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "CHUNK", 64)
    tensor = torch.randn(5, 23, generator=torch.Generator().manual_seed(0))
    before = state.digest(torch, tensor, rounded=True)
    assert before["exact"] == [] == [*state.digest(torch, tensor, rounded=False)["rounded"]]
    for name in ("bfloat16", "float16"):
        after = state.digest(torch, tensor.to(getattr(torch, name)).float(), rounded=False)
        # Those of bfloat16 that are neither large nor small are in float16, too.
        assert after["exact"][0] == name and after["rounded"][name] == before["rounded"][name]
        assert after["sha256"] != before["sha256"]
    late = torch.zeros(5000).index_fill_(0, torch.tensor(4999), 1.001)
    assert state.digest(torch, late, rounded=False)["exact"] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool])
def test_a_digest_depends_on_every_element_its_place_its_dtype_and_the_shape(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "CHUNK", 64)
    tensor = torch.randint(2, (5, 23), generator=torch.Generator().manual_seed(0)).to(dtype)
    digest = state.digest(torch, tensor)
    assert state.digest(torch, tensor.t().contiguous().t()) == digest and not digest["zero"]
    others = [tensor.reshape(23, 5), tensor.flip(0), tensor.roll(1, 1), tensor.clone(), tensor.view(torch.uint8)]
    others[3][4, 22] = not bool(tensor[4, 22])
    if dtype.is_floating_point:
        others += [tensor.clone().index_put_((torch.tensor(2), torch.tensor(3)), torch.tensor(-1.0, dtype=dtype))]
    digests = [state.digest(torch, one)["sha256"] for one in others]
    assert len({*digests, digest["sha256"]}) == len(others) + 1
    assert state.digest(torch, torch.zeros(3, 4, dtype=dtype))["zero"]
    # In order, the bytes of two elements that changed places are what they were.
    pair = torch.tensor([0.5, -0.5] * 100)
    assert state.digest(torch, pair)["sha256"] != state.digest(torch, -pair)["sha256"]
    assert state.digest(torch, torch.tensor(7, dtype=torch.int32))["value"] == 7


def test_what_cannot_be_read_is_named_and_not_compared() -> None:
    assert "unseen" in state.digest(torch, torch.empty(3, device="meta"))
    one = {
        "rank": 0,
        "step": 3,
        "kinds": {"model.w": "weight"},
        "values": {},
        "rng": {},
        "forward": None,
        "batches": [],
    }
    tensors = [{"model.w": {"unseen": "NotImplementedError"}}, {"model.w": {"sha256": "aa"}}]
    before, after = (RunState([one | {"tensors": own}]) for own in tensors)
    assert [*Causes(before, after, 3)] == [] and before.unseen == {"model.w", "batch"}


@pytest.mark.parametrize("numel", [4, 4_000])
def test_elements_that_are_gone_are_not_read(numel: int) -> None:
    freed = torch.ones(numel)
    freed.untyped_storage().resize_(0)  # as FSDP does with what it has gathered
    with torch._subclasses.FakeTensorMode():  # type: ignore[attr-defined]
        fake = torch.ones(numel)
    for one in (freed, fake):
        assert "unseen" in state.digest(torch, one)
        with pytest.raises(ValueError, match="without elements"):
            state.spelt(torch, one)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_digest_of_a_checkpoint_is_that_of_the_hook(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large tensors the hook takes another one on a device: none of them was known again."""
    monkeypatch.setattr(state, "_is_on_cpu", lambda tensor: on_cpu or tensor.nbytes <= state.SMALL)
    monkeypatch.setattr(state, "CHUNK", 1 << 18)
    small = (torch.arange(12.0).view(3, 4), torch.tensor(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(0))
    large = (torch.randn(300, 301), torch.randn(40_001).half(), torch.arange(70_001, dtype=torch.uint8))
    for tensor in (*small, *large):
        dtype = str(tensor.dtype).removeprefix("torch.")
        elements = tensor.view(torch.uint8).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
        found = states.digests(dtype, tensor.shape, elements)
        assert state.digest(torch, tensor)["sha256"] in found and len(found) == 1 + (elements.nbytes > state.SMALL)


class WithDevices:
    """torch, as it is where the process sees two devices of a kind."""

    def __init__(self, *offsets: int) -> None:
        self.states = [torch.tensor([7, one]).view(torch.uint8) for one in offsets]
        self.accelerator = SimpleNamespace(current_accelerator=lambda: torch.device("cuda"))
        self.device = SimpleNamespace(is_initialized=lambda: True, get_rng_state_all=lambda: self.states)
        self.get_device_module = lambda device: self.device

    def __getattr__(self, name: str) -> Any:
        if name == "accelerator":  # which was taken away
            raise AttributeError(name)
        return getattr(torch, name)


def test_the_generator_of_each_device_is_recorded_once_it_is_initialized() -> None:
    one, other = WithDevices(0, 4), WithDevices(0, 12)
    changed = {kind for kind, digest in rng(one).items() if rng(other)[kind] != digest}
    assert rng(one).keys() >= {"torch", "cuda:0", "cuda:1"} and changed == {"cuda:1"}
    told = generators.origin("cuda:1", words(other)["cuda:1"], {"run A when step 9 began": words(one)["cuda:1"]})
    assert "cuda:1's is that of run A when step 9 began, 8 numbers further" in told
    one.device.is_initialized = lambda: False
    assert "cuda:0" not in rng(one)
    del other.accelerator  # as before torch 2.6
    other.cuda = other.device
    assert rng(other).keys() >= {"torch", "cuda:0", "cuda:1"}


class Shard:
    """What a rank has of a tensor of one element that lies on another."""

    def to_local(self) -> torch.Tensor:
        return torch.zeros(0)

    def numel(self) -> int:
        return 1

    def item(self) -> float:
        raise RuntimeError("a collective")


def test_a_number_that_lies_on_another_rank_is_not_asked_for() -> None:
    assert state.plain([Shard(), 2.5]) == ["Tensor", 2.5]
