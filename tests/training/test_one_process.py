"""The loader in one process without a process group: what it returns, what it refuses, and what it reads."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from support import damage
from support.torchrun import torchrun
from support.upstream_readers import expected_of, path_of
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import ckpttool
from ckpttool.errors import CorruptError
from ckpttool.training import broadcast as sending
from ckpttool.training import load as loader
from ckpttool.training.read import empty
from ckpttool.transfer.plan import tiles

Adam = torch.optim.AdamW


def net(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def stepped(
    model: nn.Module, kind: Callable[..., torch.optim.Optimizer] = Adam, **options: Any
) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), **options)

    def loss(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.arange(6.0).reshape(2, 3) + step).square().sum()
        value.backward()
        return value

    for step in range(2):
        optimizer.step(partial(loss, step))
    return optimizer


def test_the_library_is_imported_without_torch() -> None:
    looked = "print('torch' in sys.modules)"
    code = f"import sys, ckpttool; ckpttool.open; {looked}; ckpttool.load; {looked}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_what_else_the_checkpoint_holds() -> None:
    expected = expected_of("torch/full")
    rest = ckpttool.load(path_of("torch/full"), None).rest
    assert rest["step"] == expected["step"] and rest["scheduler"] == expected["scheduler"]
    assert torch.equal(rest["rng"]["torch"], expected["rng"]["torch"])
    assert rest["rng"]["python"] == expected["rng"]["python"]
    assert rest["rng"]["numpy"][0] == "MT19937" and np.array_equal(rest["rng"]["numpy"][1], expected["rng"]["numpy"][1])
    assert rest["extra"]["tuple"] == (1, 2.5, "three", (4,)) and rest["extra"]["int_keys"][-1] == "minus one"
    assert "model" not in rest and "optim" not in rest


def test_a_generator_goes_on(tmp_path: Path) -> None:
    np.random.seed(7)
    torch.save({"model": net().state_dict(), "rng": {"numpy": np.random.get_state()}}, tmp_path / "a.pt")
    expected = np.random.rand(3)
    np.random.seed(8)
    np.random.set_state(ckpttool.load(tmp_path / "a.pt", net()).rest["rng"]["numpy"])
    assert np.array_equal(np.random.rand(3), expected)


def test_an_optimizer_alone_goes_by_its_numbers(tmp_path: Path) -> None:
    """A model of a bare state dict beside an `optimizer.state_dict()`, as most scripts save them."""
    saved = net()
    optimizer = stepped(saved, lr=0.25, betas=(0.5, 0.75))
    torch.save({"net": saved.state_dict(), "opt": optimizer.state_dict(), "epoch": 4}, tmp_path / "a.pt")
    model = net()
    ours = Adam(model.parameters())
    loaded = ckpttool.load(tmp_path / "a.pt", model, ours)
    assert loaded.rest == {"epoch": 4}
    assert all(torch.equal(a, b) for a, b in zip(saved.state_dict().values(), model.state_dict().values(), strict=True))
    theirs = Adam(saved.parameters())
    theirs.load_state_dict(optimizer.state_dict())
    mine, wanted = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == wanted["param_groups"]
    for number, state in wanted["state"].items():
        assert all(torch.equal(mine["state"][number][key], value) for key, value in state.items())


def test_frozen_parameters_and_unused_ones(tmp_path: Path) -> None:
    saved = net()
    saved[0].requires_grad_(False)
    optimizer = stepped(saved)
    torch.save({"model": saved.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a.pt")
    model = net()
    model[0].requires_grad_(False)
    ours = Adam(model.parameters())
    ckpttool.load(tmp_path / "a.pt", model, ours)
    assert len(ours.state) == 4 and not ours.state_dict()["state"].keys() & {0, 1}
    assert not model[0].weight.requires_grad and model[2].weight.requires_grad


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": Adam,
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": partial(torch.optim.LBFGS, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("keys", ["numbers", "names"])
def test_a_trained_parameter_without_moments(tmp_path: Path, name: str, keys: str) -> None:
    """By default refused, unless the optimizer has no state of any parameter, or keeps all of it at the first."""
    saved = net()
    optimizer = stepped(saved, OPTIMIZERS[name])
    state = get_optimizer_state_dict(saved, optimizer) if keys == "names" else optimizer.state_dict()

    def load(**options: Any) -> ckpttool.Loaded:
        torch.save({"model": saved.state_dict(), "optim": state}, tmp_path / "a.pt")
        model = net()
        return ckpttool.load(tmp_path / "a.pt", model, OPTIMIZERS[name](model.parameters()), **options)

    if name == "LBFGS" and keys == "names":
        pytest.skip("torch names no parameters of an LBFGS")
    assert load().without_state == []
    lost = [[*state["state"]][i] for i in (2, 3)] if name not in ("SGD", "LBFGS") else []
    for key in lost:
        del state["state"][key]
    if not lost:
        assert load().without_state == []
        return
    with pytest.raises(ckpttool.CkptError, match=r"no state of `1\.weight`, `1\.bias`, which") as no:
        load()
    assert "`strict=False`" in (no.value.hint or "") and no.value.facts == {"without_state": ["1.weight", "1.bias"]}
    assert load(strict=False).without_state == ["1.weight", "1.bias"]
    state["state"].clear()
    assert load().without_state == [], "an optimizer that never stepped"


def test_lists_of_tensors(tmp_path: Path) -> None:
    """LBFGS keeps its history in lists, some of None; with them it goes on as it was."""
    saved, model = net(), net()
    optimizer = stepped(saved, OPTIMIZERS["LBFGS"])
    torch.save({"model": saved.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a.pt")
    ours = OPTIMIZERS["LBFGS"](model.parameters())
    ckpttool.load(tmp_path / "a.pt", model, ours)
    (mine,), (theirs,) = ours.state.values(), optimizer.state.values()
    assert mine.keys() == theirs.keys() and len(theirs["old_dirs"]) > 2 and None in theirs["al"]
    for key, value in theirs.items():
        pairs = zip(mine[key], value, strict=True) if isinstance(value, list) else [(mine[key], value)]
        same = [torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b for a, b in pairs]
        assert type(mine[key]) is type(value) and all(same), key


def test_a_group_that_keeps_no_state(tmp_path: Path) -> None:
    """SGD with momentum for one group only; a group of AdamW whose state is lost is no such."""

    def groups(model: nn.Module, **options: float) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [{"params": parameters[:4], **options}, {"params": parameters[4:]}]

    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (Adam, {"lr": 0.1})):
        saved, model = net(), net()
        optimizer = stepped(saved, lambda _, kind=kind, model=saved, options=options: kind(groups(model, **options)))
        lost = ["2.weight", "2.bias"] if kind is Adam else []
        for parameter in saved[2].parameters():
            optimizer.state.pop(parameter, None)
        torch.save({"model": saved.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a.pt")
        loaded = ckpttool.load(tmp_path / "a.pt", model, kind(groups(model, **options)), strict=False)
        assert loaded.without_state == lost and len(optimizer.state) == 4


class Recipe:
    """A class that no checkpoint makes an object of."""


class Scaled(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (Scaled({"recipe": [Recipe()]}), "`0._extra_state` has an object of the class test_one_process.Recipe"),
        (nn.Identity(), "missing key: `0._extra_state`"),
    ],
)
def test_extra_state_that_cannot_be_loaded(tmp_path: Path, saved: nn.Module, words: str) -> None:
    torch.save(nn.Sequential(saved, nn.Linear(3, 2)).state_dict(), tmp_path / "a.pt")
    model = nn.Sequential(Scaled("own"), nn.Linear(3, 2))
    with pytest.raises(ckpttool.CkptError, match=re.escape(words)) as refused:
        ckpttool.load(tmp_path / "a.pt", model)
    assert "`strict=False`" in (refused.value.hint or "")
    assert ckpttool.load(tmp_path / "a.pt", model, strict=False).missing == ["0._extra_state"]
    assert model[0].state == "own"


@pytest.mark.parametrize("to", ["torch", "dcp", "safetensors"])
def test_extra_state_that_is_a_dict_of_numbers_is_of_the_model(tmp_path: Path, to: str) -> None:
    model = nn.Sequential(Scaled({"steps": 3, "names": ["a"]}), nn.Linear(3, 2))
    torch.save({"model": model.state_dict(), "step": 1}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "b", to=to, only="model")
    own = nn.Sequential(Scaled("own"), nn.Linear(3, 2))
    ckpttool.load(tmp_path / "b", own)
    assert own[0].state == {"steps": 3, "names": ["a"]}


def test_what_is_not_compared(tmp_path: Path) -> None:
    """A part of a large storage has no checksum of its own, and safetensors has none at all."""
    model = nn.Linear(8, 4, bias=False)
    torch.save({"weight": torch.randn(1 << 18)[:32].view(4, 8)}, tmp_path / "part.pt")
    damage.save_safetensors(tmp_path / "a.safetensors", {"weight": torch.randn(4, 8)})
    for name, why in (("part.pt", "read in part"), ("a.safetensors", "no checksum there")):
        loaded = ckpttool.load(tmp_path / name, model)
        assert (loaded.bytes_checked, loaded.unchecked) == (0, {why: 128})


@pytest.mark.parametrize("shared", [False, True], ids=["transposed", "beside another"])
def test_a_flipped_bit_beside_what_gives_a_checksum(tmp_path: Path, shared: bool) -> None:
    """Of elements in another order, and of a small rest of the storage that is not used, the bytes are read for it."""
    storage = torch.randn(4 * 8 + 8 * shared)
    torch.save({"weight": storage[:32].view(4, 8) if shared else storage.view(8, 4).t()}, tmp_path / "a.pt")
    model = nn.Linear(8, 4, bias=False)
    loaded = ckpttool.load(tmp_path / "a.pt", model)
    assert (loaded.bytes_checked, loaded.unchecked) == (128, {})
    assert torch.equal(model.weight, torch.load(tmp_path / "a.pt")["weight"])
    _pickle, *storages = damage.payload_of_torch(tmp_path / "a.pt")
    damage.flip(tmp_path / "a.pt", max(storages, key=len).stop - 1)
    with pytest.raises(CorruptError, match=r"`weight`: bytes .* have CRC"):
        ckpttool.load(tmp_path / "a.pt", model)
    assert ckpttool.load(tmp_path / "a.pt", model, check=False).unchecked == {"check=False": 128}


@pytest.mark.parametrize(
    ("key", "dtype"),
    [("0.weight", torch.int64), ("0.weight", torch.complex64), ("1.num_batches_tracked", torch.float32)],
)
def test_a_dtype_of_another_kind(tmp_path: Path, key: str, dtype: torch.dtype) -> None:
    """A float weight that is int64 in the file, a complex one, and a counter that is a float there."""
    state = net().state_dict()
    state[key] = (state[key] * 100).to(dtype)
    torch.save(state, tmp_path / "a.pt")
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found, expected = (str(one).removeprefix("torch.") for one in (dtype, before[key].dtype))
    with pytest.raises(ckpttool.CkptError) as refused:
        ckpttool.load(tmp_path / "a.pt", model)
    assert f"`{key}` is {found} in the checkpoint, {expected} in the model" in refused.value.message
    assert refused.value.facts == {"tensor": key, "found": found, "expected": expected}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert ckpttool.load(tmp_path / "a.pt", model, strict=False).other_dtype == [key]
    assert torch.equal(model.state_dict()[key], state[key].to(before[key].dtype))
    assert ckpttool.load_into(tmp_path / "a.pt", {"model": net()}, strict=False).other_dtype == [key]


@pytest.mark.parametrize("saved", [torch.tensor(0.999), [torch.tensor(0.999)]], ids=["tensor", "list"])
def test_an_own_tensor_of_another_kind(tmp_path: Path, saved: Any) -> None:
    torch.save({"model": net().state_dict(), "decay": saved}, tmp_path / "a.pt")
    own = torch.tensor(7)
    state = {"model": net(), "decay": [own] if isinstance(saved, list) else own}
    name = "decay.0" if isinstance(saved, list) else "decay"
    with pytest.raises(ckpttool.CkptError, match=f"`{name}` is float32 in the checkpoint, int64 here"):
        ckpttool.load_into(tmp_path / "a.pt", state)
    assert own == 7
    assert ckpttool.load_into(tmp_path / "a.pt", state, strict=False).other_dtype == [name]
    assert own == 0


def test_the_hint_for_a_missing_scheduler_is_a_scheduler(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    torch.save({"model": net().state_dict(), "scheduler_g": scheduler.state_dict()}, tmp_path / "a.pt")
    state = {"model": net(), "scheduler_g": scheduler, "scheduler_d": scheduler}
    with pytest.raises(ckpttool.CkptError, match="does not hold `scheduler_d`") as refused:
        ckpttool.load_into(tmp_path / "a.pt", state)
    assert refused.value.hint == "did you mean `scheduler_g`?"


KINDS_OF_TORCH = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "plain SGD": torch.optim.SGD,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize(
    ("saved", "own"), [(a, b) for a in KINDS_OF_TORCH for b in KINDS_OF_TORCH if {a, b} & {"AdamW"}]
)
def test_an_optimizer_of_another_kind(tmp_path: Path, saved: str, own: str) -> None:
    """torch's own `load_state_dict` takes each, and the moments begin anew or `step` fails."""
    model = net()
    optimizer = KINDS_OF_TORCH[saved](model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)  # which adds `initial_lr`
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    other = KINDS_OF_TORCH[own](model.parameters(), lr=0.5)
    if saved == own:
        ckpttool.load(tmp_path / "a.pt", model, other)
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        return
    with pytest.raises(ckpttool.CkptError, match="it is of another kind"):
        ckpttool.load(tmp_path / "a.pt", model, other)
    assert other.param_groups[0]["lr"] == 0.5


def test_float_dtypes_are_cast_without_a_word(tmp_path: Path) -> None:
    torch.save(net().bfloat16().state_dict(), tmp_path / "a.pt")
    assert not ckpttool.load(tmp_path / "a.pt", net().double()).other_dtype


def test_of_several_models_the_one_that_is_no_average(tmp_path: Path) -> None:
    one, average = net(), net()
    torch.save({"ema": average.state_dict(), "model": one.state_dict()}, tmp_path / "a.pt")
    model = net()
    loaded = ckpttool.load(tmp_path / "a.pt", model)
    assert torch.equal(model[0].weight, one[0].weight) and loaded.left == ["model (ema)"]
    ckpttool.load(tmp_path / "a.pt", model, model_key="ema")
    assert torch.equal(model[0].weight, average[0].weight)
    state = {"model": net(), "ema": net()}
    ckpttool.load_into(tmp_path / "a.pt", state)
    assert torch.equal(state["ema"][0].weight, average[0].weight) and torch.equal(
        state["model"][0].weight, one[0].weight
    )
    with pytest.raises(ckpttool.CkptError, match="has no model under `emma`") as failed:
        ckpttool.load(tmp_path / "a.pt", model, model_key="emma")
    assert failed.value.hint == "did you mean `ema`?"


def test_a_prefix_is_seen_and_taken_off(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"inner": net()})
    torch.save(saved.state_dict(), tmp_path / "a.pt")
    model = net()
    with pytest.raises(ckpttool.CkptError, match=r"missing keys: .* unexpected keys: `inner") as failed:
        ckpttool.load(tmp_path / "a.pt", model)
    assert failed.value.hint and "strip_prefix='inner'" in failed.value.hint
    ckpttool.load(tmp_path / "a.pt", model, strip_prefix="inner")
    assert torch.equal(model[0].weight, saved["inner"][0].weight)


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_state_dicts_that_torch_has_patched(tmp_path: Path, format: str) -> None:
    """With them a model and an optimizer go into `dcp.save` themselves; they take other keywords, and other keys."""

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        optimizer = stepped(model)
        _patch_model_state_dict(model)
        _patch_optimizer_state_dict(model, optimizers=optimizer)
        return model, optimizer

    (model, optimizer), (again, other) = fresh(), fresh()
    if format == "dcp":
        torch_dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "saved", no_dist=True)
    else:
        ckpttool.save(tmp_path / "saved", model, optimizer, format=format)
    ckpttool.load_into(tmp_path / "saved", {"model": again, "optim": other})
    for one, loaded in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, loaded)
        assert torch.equal(optimizer.state[one]["exp_avg"], other.state[loaded]["exp_avg"])


def test_what_is_not_there_to_load_into(tmp_path: Path) -> None:
    torch.save({"model": net().state_dict(), "lr_scheduler": {"last_epoch": 3, "base_lrs": [1.0]}}, tmp_path / "a.pt")
    state: dict[str, Any] = {"model": net(), "nested": {"steps": 1}}
    before = state["model"][0].weight.clone()
    with pytest.raises(ckpttool.CkptError, match=r"does not hold `nested\.steps`"):
        ckpttool.load_into(tmp_path / "a.pt", state)
    assert torch.equal(state["model"][0].weight, before), "it was changed before it was refused"
    assert ckpttool.load_into(tmp_path / "a.pt", state, strict=False).missing == ["nested.steps"]
    assert state["nested"] == {"steps": 1} and not torch.equal(state["model"][0].weight, before)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda path: ckpttool.load(path, net(), strategy="fastest"), "there is no strategy `fastest`"),
        (lambda path: ckpttool.load(path, None, Adam(net().parameters())), "an optimizer is loaded with its model"),
        (lambda path: ckpttool.load(path, net(), Adam(net().parameters())), "that the model does not have"),
        (lambda path: ckpttool.load(path + "x", net()), "no such file"),
        (lambda path: ckpttool.save(path, net()), "exists"),
        (lambda path: ckpttool.save(path + "y", net(), format="zip"), "there is no format `zip`"),
        (lambda path: ckpttool.save(path + "y", net(), format="fsdp1"), "not wrapped by FSDP1"),
        (lambda path: ckpttool.save(path + "y", net(), optim=3), "`optim` is what the model or its optimizer"),
    ],
)
def test_refused(tmp_path: Path, call: Any, words: str) -> None:
    model = net()
    torch.save({"model": model.state_dict(), "optim": stepped(model).state_dict()}, tmp_path / "a.pt")
    with pytest.raises(ckpttool.CkptError, match=words):
        call(str(tmp_path / "a.pt"))
    assert os.listdir(tmp_path) == ["a.pt"]


def test_auto_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ckpttool"):
        ckpttool.load(path_of("torch/full"), None)
    assert "by `parallel`: there is one process" in caplog.text
    monkeypatch.setattr(loader.collectives, "is_distributed", lambda: True)
    for seen, strategy, why in (
        ([(True, "ext4"), (True, "lustre")], "parallel", "ext4"),
        ([(True, "ext4"), (True, "nfs4")], "broadcast", "rank 1 sees it on nfs4"),
        ([(True, "ext4"), (False, "ext4")], "broadcast", "rank 1 does not see the path"),
        ([(True, "fuse.s3fs"), (True, "fuse.s3fs")], "broadcast", "fuse.s3fs"),
    ):
        monkeypatch.setattr(loader.collectives, "all_gather_of", lambda _, seen=seen: seen)
        chosen = loader.choose("/somewhere", "auto")
        assert chosen[0] == strategy and why in chosen[1]


def test_tiles_cover_a_box_once() -> None:
    box = ((2, 0, 5), (7, 3, 11))
    seen = np.zeros((9, 3, 16), int)
    for offsets, sizes in tiles(box, 100 // 4):
        assert np.prod(sizes) * 4 <= 100
        seen[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    assert seen[2:, :, 5:].all() and seen.sum() == 7 * 3 * 11 and seen.max() == 1


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "float8_e4m3fn", "uint16", "float32", "bool"])
def test_memory_for_any_dtype_in_a_script_that_is_deterministic(dtype: str) -> None:
    """torch fills memory then, and cannot fill that of 4-bit floats."""
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip(f"this torch has no {dtype}")
    torch.use_deterministic_algorithms(True)
    try:
        for sizes in ((), (0, 3), (2, 3)):
            made = empty(sizes, kind)
            assert (tuple(made.shape), made.dtype, made.device.type) == (sizes, kind, "cpu")
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_to_send_from_is_used_again_for_modules_of_torch() -> None:
    """Those of FSDP2 have hooks that look at parameters; hooks of others may keep what is loaded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))))
        assert all(map(sending._copies, model.modules()))
        model[2].register_load_state_dict_pre_hook(lambda *_: None)
        model[0].register_load_state_dict_post_hook(lambda *_: None)
        assert [sending._copies(module) for module in model] == [False, True, False]
    finally:
        dist.destroy_process_group()


DYING = """
import os, sys, torch, torch.distributed as dist, ckpttool
from ckpttool.training.read import Reader
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    Reader.read = lambda *_: os._exit(9)
ckpttool.load(sys.argv[1], torch.nn.Linear(3, 2), strategy=sys.argv[2])
print("went on")
"""


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parallel", "broadcast"])
def test_a_rank_that_dies_takes_the_others_along(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "a.pt")
    said = torchrun(3, tmp_path / "dying.py", tmp_path / "a.pt", strategy)
    assert "exitcode  : 9" in said and "went on" not in said


def test_a_damaged_optimizer_does_not_stop_a_load_of_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(path_of("run/accelerate_fsdp1_sharded_w2"), tmp_path / "run")
    (tmp_path / "run" / "optimizer_0" / ".metadata").write_bytes(b"no index")
    model = runs.Tiny()
    loaded = ckpttool.load(tmp_path / "run", model)
    assert not loaded.missing and "scheduler" in loaded.rest
    expected = expected_of("run/accelerate_fsdp1_sharded_w2")["model"]
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert "not asked for, and damaged: `optimizer_0`" in caplog.text
    with pytest.raises(ckpttool.CkptError, match="`optimizer_0`"):
        ckpttool.load(tmp_path / "run", model, Adam(model.parameters()))


def test_bytes_that_are_gone_matter_to_those_who_want_them(tmp_path: Path) -> None:
    model = net()
    state = {"model": model.state_dict(), "optim": {"state": {"0.weight": {"exp_avg": torch.ones(4000)}}}}
    torch_dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    data = tmp_path / "dcp" / "__0_0.distcp"
    # DCP writes the largest tensor last.
    os.truncate(data, data.stat().st_size - 8000)
    other = net()
    ckpttool.load(tmp_path / "dcp", other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    for wanted in ((other, Adam(other.parameters())), (other, None)):
        if wanted[1] is None:
            os.truncate(data, 500)
        with pytest.raises(ckpttool.CkptError, match="are outside the file"):
            ckpttool.load(tmp_path / "dcp", *wanted)


def groups(*sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose first parameters are in groups of these sizes."""
    model, made, low = net(), [], 0
    for i, count in enumerate(sizes):
        made.append({"params": list(model.parameters())[low : low + count], "lr": 0.1 * (i + 1)})
        low += count
    return model, Adam(made)


@pytest.mark.parametrize(
    ("saved", "ours", "words"),
    [
        ((6,), (3, 3), "one group of parameters where the optimizer has several"),
        ((3, 3), (6,), "group 0 .* differently .* in 2 groups"),
        ((6,), (4,), "group 0 has parameters that the optimizer does not have"),
        ((4,), (6,), "group 0 .* differently .* no group has"),
    ],
)
def test_groups_that_are_not_the_same(tmp_path: Path, saved: Any, ours: Any, words: str) -> None:
    model, optimizer = groups(*saved)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    there = optimizer.state_dict()
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    there["state"] = {order[number]: state for number, state in there["state"].items()}
    for group in there["param_groups"]:
        group["params"] = [order[number] for number in group["params"]]
    torch.save({"model": model.state_dict(), "optim": there}, tmp_path / "a.pt")
    model, optimizer = groups(*ours)
    before = model[0].weight.clone()
    with pytest.raises(ckpttool.CkptError, match=words):
        ckpttool.load(tmp_path / "a.pt", model, optimizer)
    assert torch.equal(model[0].weight, before) and not optimizer.state


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_one_rank_saves_what_is_its_own_as_that(tmp_path: Path, format: str) -> None:
    """Many ranks that resume from it must not all draw the numbers that it would."""
    mine = {"torch": torch.get_rng_state()}
    ckpttool.save(tmp_path / "saved", net(), format=format, rng=mine, step=3)
    with ckpttool.open(tmp_path / "saved") as checkpoint:
        assert ("rng", "rank0", "torch") in checkpoint.catalogue.entries
    assert torch.equal(ckpttool.load(tmp_path / "saved", None).rest["rng"]["torch"], mine["torch"])


@pytest.mark.parametrize("kind", [Adam, torch.optim.Rprop, torch.optim.SGD])
@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_a_save_before_the_first_step_changes_nothing(
    tmp_path: Path, format: str, kind: type[torch.optim.Optimizer]
) -> None:
    """For torch's functions an optimizer without state is stepped, without gradients."""

    def training(save: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = net()
        optimizer = kind(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if save:
            ckpttool.save(tmp_path / "saved", model, optimizer, format=format)
            assert not optimizer.state
            model, torch_state = net(), torch.get_rng_state()
            optimizer = stepped(model, kind)
            ckpttool.load(tmp_path / "saved", model, optimizer)
            torch.set_rng_state(torch_state)
            assert not optimizer.state
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
            optimizer.step()
        assert schedule.last_epoch == 0
        return [*model.state_dict().values()]

    assert all(map(torch.equal, training(save=True), training(save=False)))


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_keys_of_a_scheduler_stay_numbers(tmp_path: Path, format: str) -> None:
    """DCP makes strings of them, and torch's own reader is content with what we note beside."""
    model = net()
    optimizer = stepped(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    odd = {7: [torch.ones(2), {5: 1}], "seven": {-1: "minus one"}}
    ckpttool.save(tmp_path / "saved", model, optimizer, format=format, scheduler=scheduler, odd=odd)
    rest = ckpttool.load(tmp_path / "saved", model, optimizer).rest
    assert rest["scheduler"]["milestones"] == {1: 1, 3: 1} and rest["odd"]["seven"] == {-1: "minus one"}
    assert torch.equal(rest["odd"][7][0], torch.ones(2))
    again = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9])
    again.load_state_dict(rest["scheduler"])
    before = optimizer.param_groups[0]["lr"]
    again.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(before / 10)
    if format == "dcp":
        dcp_to_torch_save(tmp_path / "saved", tmp_path / "theirs.pt")
        theirs = torch.load(tmp_path / "theirs.pt", weights_only=False)
        assert theirs["scheduler"]["last_epoch"] == scheduler.last_epoch


def test_a_second_model_is_saved_beside_the_first(tmp_path: Path) -> None:
    model, mean = net(), net()
    ckpttool.save(tmp_path / "saved", model, ema=mean)
    found, other = net(), net()
    ckpttool.load(tmp_path / "saved", found, model_key="model")
    ckpttool.load(tmp_path / "saved", other, model_key="ema")
    for one, saved in ((found, model), (other, mean)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), saved.parameters(), strict=True))


class Master(torch.optim.Optimizer):
    """Keeps a float32 copy of what it trains."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("master", parameter.detach().float())
                state["master"].add_(parameter.grad.float(), alpha=-group["lr"])
                parameter.data.copy_(state["master"])


def trained(dtype: torch.dtype, made: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net().to(dtype)
    optimizer = made(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_a_float32_copy_of_a_bfloat16_parameter_is_not_cast(tmp_path: Path, format: str) -> None:
    """torch's own `load_state_dict` would, and the run would go on from other weights."""
    model, optimizer = trained(torch.bfloat16, Master)
    ckpttool.save(tmp_path / "saved", model, optimizer, format=format)
    again = net().bfloat16()
    fresh = Master(again.parameters())
    ckpttool.load(tmp_path / "saved", again, fresh)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        kept, found = optimizer.state[one]["master"], fresh.state[other]["master"]
        assert found.dtype == torch.float32 and torch.equal(kept, found)
    # Into another dtype than the checkpoint's, moments follow, as AdamW needs it.
    model, optimizer = trained(torch.float32, torch.optim.AdamW)
    ckpttool.save(tmp_path / "float32", model, optimizer, format=format)
    again = net().bfloat16()
    fresh = torch.optim.AdamW(again.parameters())
    ckpttool.load(tmp_path / "float32", again, fresh)
    assert {state["exp_avg"].dtype for state in fresh.state.values()} == {torch.bfloat16}


def test_state_of_another_kind_of_optimizer(tmp_path: Path) -> None:
    """Whose hyper-parameters do not say so: NAdam has all of AdamW's."""
    model, optimizer = trained(torch.float32, torch.optim.AdamW)
    ckpttool.save(tmp_path / "saved", model, optimizer)
    other, words = net(), r"the state there \(exp_avg, exp_avg_sq, step\) is not of an NAdam"
    with pytest.raises(ckpttool.CkptError, match=words) as caught:
        ckpttool.load(tmp_path / "saved", other, torch.optim.NAdam(other.parameters()))
    assert "load the model alone" in str(caught.value.hint)


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_what_cannot_be_pickled_is_a_mistake_of_the_script(tmp_path: Path, format: str) -> None:
    with pytest.raises(ckpttool.CkptError, match=r"`step` cannot be pickled: .*lambda") as caught:
        ckpttool.save(tmp_path / "saved", net(), format=format, step=lambda: 3)
    assert caught.value.exit_code == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("key, flat", [("sum", False), ("state1", True)])
def test_state_of_an_optimizer_of_ones_own_may_have_any_shape(tmp_path: Path, key: str, flat: bool) -> None:
    """Under a key that other optimizers use for state of the shape of the parameter; torch loads it, too."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {key: torch.full((parameter.numel(),) if flat else (), float(i))}
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "own.pt")
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpttool.load(tmp_path / "own.pt", model, fresh)
    assert [float(fresh.state[p][key].mean()) for p in model.parameters()] == [0.0, 1.0, 2.0, 3.0]
