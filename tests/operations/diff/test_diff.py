"""Two checkpoints of any formats and worlds: what is the same, and each thing that is not."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support import damage
from support.paths import CHECKPOINTS

from ckpttool import convert
from ckpttool.analysis.differences.results import Diff
from ckpttool.analysis.result import ABSENT
from ckpttool.errors import CorruptError, ReadError, UsageError
from ckpttool.operations.diff import diff
from ckpttool.operations.reshard import reshard

FSDP2 = CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"
FULL = CHECKPOINTS / "torch/full" / "ckpt.pt"


def state() -> dict[str, Any]:
    notes = {"seen": [1, 2, 3], "name": "run7", "nan": math.nan}
    return {"model": damage.state()["model"], "lr": 0.125, "betas": (0.9, 0.95), "notes": notes}


def saved(path: Path, what: dict[str, Any]) -> Path:
    if path.suffix == ".pt":
        torch.save(what, path)
    elif path.suffix == ".safetensors":
        save_file(what["model"], path)
    else:
        dcp.save(what, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def names(made: Diff) -> dict[str, list[str]]:
    return {one.name: one.kinds for one in made.tensors}


# The same -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["torch", "safetensors", "fsdp1", "dcp"])
def test_what_was_made_of_it_is_the_same(to: str, tmp_path: Path) -> None:
    out = tmp_path / ("out.pt" if to == "torch" else "out")
    reshard(FSDP2, out, to_world=2) if to == "dcp" else convert(FSDP2, out, to=to)
    for pair in ((FSDP2, out), (out, FSDP2)):
        made = diff(*pair)
        assert made.same and made.exit_code == 0, (made.tensors, made.objects, made.only_a, made.only_b)
        assert (
            made.matched == made.a.tensor_count + made.a.object_count
            and made.total.tensor_count == made.total.equal > 60
        )


@pytest.mark.parametrize("keys", ["id", "flat"])
def test_optimizers_are_compared_by_the_names_of_parameters(keys: str, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    convert(FSDP2, out, to="torch", optim_keys=keys)
    made = diff(FSDP2, out)
    assert made.same and "optimizer (optim)" in {part.part for part in made.parts}
    assert bool(made.notes) == (keys == "flat")  # flat keys have no groups
    numbered = torch.load(out, weights_only=False)
    if keys == "id":
        numbered["optim"]["state"][3]["exp_avg"].view(-1)[0] += 1
        torch.save(numbered, out)
        (name,) = names(diff(FSDP2, out))
        assert name.startswith("optim.state.layers.0.") and name.endswith(".exp_avg")


def test_optimizers_that_cannot_be_named_are_compared_by_what_they_have(tmp_path: Path) -> None:
    optim = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    one = saved(tmp_path / "a.pt", {"optim": optim})
    named = {"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    made = diff(one, saved(tmp_path / "b.pt", {"optim": named}))
    assert [o.name for o in made.only_a] == ["optim.state.0.exp_avg"]
    assert any("compared by their own keys" in note for note in made.notes)


# Each difference ------------------------------------------------------------------------------------------------------


def changed(change: str) -> dict[str, Any]:
    made = copy.deepcopy(state())
    model = made["model"]
    if change == "values":
        model["embed.weight"][5, 7] += 1
        model["embed.weight"][60, 1] += 2
    elif change == "dtype":
        model["layers.0.weight"] = model["layers.0.weight"].bfloat16()
    elif change == "shape":
        model["layers.0.weight"] = model["layers.0.weight"].t().contiguous()
    elif change == "tie":
        model["head"] = model["embed.weight"]
    elif change == "copy":
        model["head"] = model["embed.weight"].clone()
    elif change == "kind":
        model["steps"] = [0, 1, 2, 3, 4, 5]
    return made


@pytest.mark.parametrize("suffix", ["pt", "dcp"])
def test_values(suffix: str, tmp_path: Path) -> None:
    made = diff(saved(tmp_path / "a.dcp", state()), saved(tmp_path / f"b.{suffix}", changed("values")))
    assert names(made) == {"model.embed.weight": ["values"]} and made.exit_code == 1
    a, b = state()["model"]["embed.weight"], changed("values")["model"]["embed.weight"]
    found = made.tensors[0].values
    assert found is not None and made.tensors[0].index == [5, 7] and (found.differing, found.numel) == (2, 61 * 33)
    assert found.values == (a[5, 7].item(), b[5, 7].item())
    assert found.absolute == (a.double() - b.double()).abs().max().item()
    cosine = torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()
    assert found.cosine == pytest.approx(cosine, rel=1e-12)
    total = made.total
    assert (total.tensor_count, total.equal, total.differing, total.absolute) == (4, 3, 2, found.absolute)
    assert (total.numel, total.cosine) == (61 * 33 + 33 * 17 + 33 + 6, found.cosine)
    assert [part.part for part in made.parts] == ["model"]


def test_another_dtype_is_compared_in_the_wider_one(tmp_path: Path) -> None:
    paths = saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", changed("dtype"))
    made = diff(*paths)
    assert names(made) == {"model.layers.0.weight": ["dtype", "values"]}
    found = made.tensors[0].values
    a = state()["model"]["layers.0.weight"]
    assert found is not None and (found.dtype, found.differing) == ("float32", int((a != a.bfloat16().float()).sum()))
    assert names(diff(*paths, rtol=2**-8)) == {"model.layers.0.weight": ["dtype"]}
    assert diff(*paths, rtol=2**-8, ignore_dtype=True).same
    assert names(diff(*paths, ignore_dtype=True)) == {"model.layers.0.weight": ["values"]}
    # The other way round, as equal values: a bfloat16 in a wider dtype.
    wide = copy.deepcopy(state())
    wide["model"]["layers.0.bias"] = wide["model"]["layers.0.bias"].double()
    assert diff(paths[0], saved(tmp_path / "c.pt", wide), ignore_dtype=True).same


def test_dtypes_that_do_not_meet_are_said_so(tmp_path: Path) -> None:
    other = state()
    other["model"]["steps"] = other["model"]["steps"].float()
    paths = saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", other)
    for ignored in (False, True):
        made = diff(*paths, ignore_dtype=ignored)
        assert names(made) == {"model.steps": ["dtype"]} and made.tensors[0].why is not None
        assert made.tensors[0].values is None and made.total.tensor_count == 3


def test_shapes_kinds_and_ties(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.pt", state())
    made = diff(a, saved(tmp_path / "shape.pt", changed("shape")))
    assert names(made) == {"model.layers.0.weight": ["shape"]} and made.tensors[0].shapes == ((33, 17), (17, 33))
    assert diff(a, saved(tmp_path / "kind.pt", changed("kind"))).hint is None
    tie, two = saved(tmp_path / "tie.pt", changed("tie")), saved(tmp_path / "copy.pt", changed("copy"))
    made = diff(tie, two)
    assert names(made) == {"model.head": ["tie"]} and made.tensors[0].ties == ("model.embed.weight", None)
    assert diff(two, tie).tensors[0].ties == (None, "model.embed.weight")
    assert diff(tie, tie).same and diff(two, two).same
    assert [one.name for one in diff(tie, a).only_a] == ["model.head"]


def test_a_tensor_here_is_an_object_there(tmp_path: Path) -> None:
    one, other = {"lr": torch.tensor(0.5), "w": torch.ones(2)}, {"lr": 0.5, "w": torch.ones(2)}
    made = diff(saved(tmp_path / "a.pt", one), saved(tmp_path / "b.pt", other))
    assert made.kinds == ["lr"] and made.exit_code == 1 and not made.only_a and not made.only_b


@pytest.mark.parametrize(
    ("key", "value", "at", "there"),
    [
        ("lr", 0.25, "", 0.25),
        ("lr", 1, "", 1),
        ("betas", (0.9, 0.99), "[1]", 0.99),
        ("betas", [0.9, 0.95], "", [0.9, 0.95]),
        ("notes", {"seen": [1, 2], "name": "run7", "nan": math.nan}, "[2]", ABSENT),
        ("notes", {"seen": [1, 2, True], "name": "run7", "nan": math.nan}, "[2]", True),
        ("notes", {"seen": [1, 2, 3], "name": "run8", "nan": math.nan}, "", "run8"),
    ],
)
def test_objects(key: str, value: Any, at: str, there: Any, tmp_path: Path) -> None:
    other = state() | {key: value}
    made = diff(saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", other))
    found = [(one.name.partition(".")[0], one.at, one.b) for one in made.objects]
    flat = [(name, at, b) for name, at, b in found if b == there or b is there]
    assert flat == [(key, at, there)] or any(one.name == f"{key}.seen" for one in made.objects + made.only_a)
    assert not made.same and not made.tensors


def test_objects_are_equal_in_value(tmp_path: Path) -> None:
    """NaN is itself, dicts have no order; OrderedDicts have, and stubs are compared by what they were made of."""
    one = {"w": torch.ones(1), "args": {"x": math.nan, "y": {1, 2}}, "o": OrderedDict(a=1, b=2), "big": 2**70}
    other = {"w": torch.ones(1), "args": {"y": {2, 1}, "x": math.nan}, "o": OrderedDict(a=1, b=2), "big": 2**70}
    assert diff(saved(tmp_path / "a.pt", one), saved(tmp_path / "b.pt", other)).same
    assert diff(FULL, FULL).same and diff(FULL, FULL).a.object_count > 20


class Split(Enum):
    TRAIN = 1
    TEST = 2


def test_keys_that_are_objects(tmp_path: Path) -> None:
    """A member of an enum, a number of numpy and a dtype are keys like any other: those of two files are the same."""
    one = {
        "seen": {
            Split.TRAIN: 10,
            Split.TEST: torch.ones(2),
            torch.float16: [1],
            numpy.int64(3): "x",
            (Split.TEST, 1): 5,
        }
    }
    other = {"seen": {**one["seen"], Split.TRAIN: 11}}
    a, b = saved(tmp_path / "a.pt", one), saved(tmp_path / "b.pt", other)
    assert diff(a, a).same and diff(a, saved(tmp_path / "same.pt", copy.deepcopy(one))).same
    assert [(found.a, found.b) for found in diff(a, b).objects] == [(10, 11)]
    del other["seen"][Split.TRAIN]
    assert [(found.a, found.b) for found in diff(a, saved(tmp_path / "c.pt", other)).objects] == [(10, ABSENT)]


def test_only_in_one(tmp_path: Path) -> None:
    other = state()
    other["model"]["extra"] = torch.zeros(2, 3)
    other["more"] = "text"
    made = diff(saved(tmp_path / "a.dcp", state()), saved(tmp_path / "b.pt", other))
    assert not made.only_a and [(o.name, o.part, o.dtype, o.shape) for o in made.only_b] == [
        ("model.extra", "model", "float32", (2, 3)), ("more", "other", None, None),
    ]  # fmt: skip


# Tolerances -----------------------------------------------------------------------------------------------------------


def test_tolerances(tmp_path: Path) -> None:
    near = copy.deepcopy(state())
    weight = near["model"]["layers.0.weight"]
    weight.copy_(weight * (1 + 1e-6))
    near["lr"] = 0.125 * (1 + 1e-7)
    paths = saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.dcp", near)
    made = diff(*paths)
    assert names(made) == {"model.layers.0.weight": ["values"]} and [o.name for o in made.objects] == ["lr"]
    assert diff(*paths, rtol=1e-5).same and diff(*paths, rtol=1e-5).within == "rtol 1e-05"
    for tolerance in ({"rtol": 5e-7}, {"atol": 1e-7}, {"ulp": 4}):
        made = diff(*paths, **tolerance)  # type: ignore[arg-type]
        a, b = state()["model"]["layers.0.weight"].double(), weight.double()
        found = made.tensors[0].values
        assert found is not None
        if "ulp" not in tolerance:
            close = torch.isclose(a, b, rtol=tolerance.get("rtol", 0), atol=tolerance.get("atol", 0))
            assert found.beyond == int((~close).sum()) > 0
        assert made.total.beyond == found.beyond and found.differing >= (found.beyond or 0) > 0
        assert made.total.equal == made.total.tensor_count - 1
    with pytest.raises(UsageError, match="not a distance"):
        diff(*paths, rtol=-1.0)
    with pytest.raises(UsageError, match="not a distance"):
        diff(*paths, atol=math.nan)


# Names ----------------------------------------------------------------------------------------------------------------


def test_one_part_is_compared_without_its_key(tmp_path: Path) -> None:
    bare = saved(tmp_path / "bare.safetensors", state())
    full = saved(tmp_path / "full.pt", state())
    made = diff(full, bare)
    assert made.hint is not None and "`--only model`" in made.hint and not made.same
    assert diff(full, bare, only="model").same and diff(bare, full, only="model").same
    assert diff(full, bare, only="model").matched == 4


def test_prefixes_and_rules(tmp_path: Path) -> None:
    model = state()["model"]
    one = saved(tmp_path / "a.safetensors", {"model": model})
    wrapped = saved(tmp_path / "b.pt", {f"module._orig_mod.{name}": tensor for name, tensor in model.items()})
    made = diff(one, wrapped)
    assert made.hint is not None and "`--strip-wrappers`" in made.hint and made.matched == 0
    assert diff(one, wrapped, strip_wrappers=True).same
    prefixed = saved(tmp_path / "c.pt", {f"backbone.{name}": tensor for name, tensor in model.items()})
    assert diff(one, prefixed, strip_prefix="backbone").same
    renamed = {name.replace("layers", "blocks"): tensor for name, tensor in model.items()}
    other = saved(tmp_path / "d.pt", renamed)
    assert diff(one, other, rename="layers=blocks").same and not diff(one, other).same
    with pytest.raises(UsageError, match="changes no name"):
        diff(other, one, rename="layers=blocks")
    with pytest.raises(UsageError, match="no tensor of a model"):
        diff(one, other, strip_prefix="backbone")


def test_another_key_of_the_optimizer(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(FSDP2, out, to="dcp", optim_root="optimizer")
    made = diff(FSDP2, out)
    assert made.hint is not None and "`--rename optim=optimizer`" in made.hint
    assert diff(FSDP2, out, rename="optim=optimizer").same
    assert diff(FSDP2, out, only="optimizer").same
    assert diff(FSDP2, out, drop="optimizer").same


def test_patterns(tmp_path: Path) -> None:
    paths = saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", changed("values"))
    assert diff(*paths, exclude="*embed*").same
    assert diff(*paths, tensors="*layers*").same and diff(*paths, tensors="*layers*").a.tensor_count == 2
    assert not diff(*paths, tensors=["*layers*", "re:.*embed.*"]).same
    for wrong in ({"tensors": "*nope*"}, {"exclude": "*nope*"}, {"only": "optimizer"}, {"drop": "rng"}):
        with pytest.raises(UsageError):
            diff(*paths, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing is left"):
        diff(*paths, exclude="*")


def test_a_part_of_one_side(tmp_path: Path) -> None:
    made = diff(FSDP2, saved(tmp_path / "b.pt", {"model": state()["model"]}), only="optimizer")
    assert made.only_a and not made.only_b and made.b.tensor_count == 0


# Sharding -------------------------------------------------------------------------------------------------------------


def test_sharding(tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard(FSDP2, out, to_world=2)
    assert diff(FSDP2, out).same and diff(FSDP2, FSDP2, sharded=True).same
    made = diff(FSDP2, out, sharded=True)
    cuts = {one.name: one.sharding for one in made.tensors}
    assert made.exit_code == 1 and {kind for kinds in names(made).values() for kind in kinds} == {"sharding"}
    assert cuts["model.embed.weight"] == ("4 along dimension 0, ranks 0-3", "2 along dimension 0, ranks 0-1")
    read = dcp.FileSystemReader(FSDP2).read_metadata().state_dict_metadata["model.embed.weight"]
    assert len(read.chunks) == 4
    grid = diff(CHECKPOINTS / "dcp/grid_w4" / "ckpt", CHECKPOINTS / "dcp/grid_w4" / "ckpt", sharded=True)
    assert grid.same


# What is wrong --------------------------------------------------------------------------------------------------------


def test_a_file_that_is_damaged_or_missing(tmp_path: Path) -> None:
    one, other = saved(tmp_path / "a.safetensors", state()), saved(tmp_path / "b.dcp", state())
    with pytest.raises(ReadError):
        diff(one, tmp_path / "nothing")
    os.truncate(other / "__0_0.distcp", 9000)
    with pytest.raises(CorruptError) as caught:
        diff(one, other, only="model")
    assert str(other) in caught.value.message


def test_a_change_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = saved(tmp_path / "a.safetensors", state())
    other = saved(tmp_path / "b.safetensors", state())
    from ckpttool.analysis.differences import tensors as walking

    before = walking.compare

    def touched(*words: Any, **named: Any) -> Any:
        found = before(*words, **named)
        os.utime(other, (1, 1))
        return found

    monkeypatch.setattr(walking, "compare", touched)
    with pytest.raises(ReadError, match="changed"):
        diff(one, other)


MEMORY = r"""
import re, sys
from ckpttool.operations.diff import diff
made = diff(sys.argv[1], sys.argv[2], threads=2)
# What a parent had counts in `ru_maxrss`, and not here.
peak = int(re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1])
print(peak >> 10, made.total.differing, "torch" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory it was at most")
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """Half a gigabyte in one tensor, mostly a hole; equal, and with elements that differ."""
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    header = b'{"w":{"dtype":"F32","shape":[8192,16384],"data_offsets":[0,536870912]}}     '
    for path in paths:
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + (512 << 20))
    with paths[2].open("r+b") as stream:
        for at in (5, 300 << 20):
            stream.seek(8 + len(header) + at)
            stream.write(b"\x41")
    for other, differing in ((paths[1], 0), (paths[2], 2)):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, paths[0], other], capture_output=True, text=True, check=True, timeout=300
        )
        peak, found, torch_there = done.stdout.split()
        assert (int(found), torch_there) == (differing, "False") and int(peak) < 160
