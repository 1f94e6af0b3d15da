"""Two checkpoints are equal in content or not, whatever the formats: and each difference is told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import damage
from support.paths import CHECKPOINTS

from ckpttool import convert
from ckpttool.errors import CorruptError
from ckpttool.operations.reshard import reshard
from ckpttool.operations.verify import verify


@pytest.mark.parametrize("to", ["torch", "safetensors", "fsdp1", "dcp"])
def test_what_was_made_of_it_is_equal(to: str, tmp_path: Path) -> None:
    """Four ranks of FSDP2 with an optimizer, in every format; by both sides."""
    src = CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"
    out = tmp_path / ("out.pt" if to == "torch" else "out")
    reshard(src, out, to_world=2) if to == "dcp" else convert(src, out, to=to)
    for one, other in ((src, out), (out, src)):
        report = verify(one, against=other)
        assert [f.message for f in report.findings if f.gravity != "note"] == [] and report.exit_code == 0


def changed(change: str) -> Any:
    state = copy.deepcopy(damage.state())
    model = state["model"]
    if change == "a value":
        model["embed.weight"][5, 7] += 1
        model["embed.weight"][60, 1] += 1
    elif change == "a dtype":
        model["steps"] = model["steps"].int()
    elif change == "a shape":
        model["layers.0.weight"] = model["layers.0.weight"].t().contiguous()
    elif change == "an object":
        state["optim"]["lr"] = 0.25
    elif change == "a name":
        model["other"] = model.pop("steps")
    elif change == "a tie":
        model["head"] = model["embed.weight"]
    elif change == "a copy":
        model["head"] = model["embed.weight"].clone()
    elif change == "a zero's sign":
        model["steps"] = torch.zeros(3)
    return state


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ("a value", "values", "2 of 2,013 elements differ, the first at [5, 7]"),
        ("a dtype", "layout", "is int64 [6], but int32 [6] in the other"),
        ("a shape", "layout", "[33, 17], but float32 [17, 33]"),
        ("an object", "object", "0.125 here, 0.25 there"),
        ("a name", "only here", "is not in the other"),
    ],
)
@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_each_difference(change: str, kind: str, says: str, format: str, tmp_path: Path) -> None:
    here = damage.save_dcp(tmp_path / "here")
    there = tmp_path / "there"
    getattr(damage, f"save_{format}")(there, changed(change))
    report = verify(here, against=there)
    found = [f for f in report.findings if f.gravity == "difference"]
    assert {f.kind for f in found} == ({kind, "only there"} if change == "a name" else {kind})
    assert says in next(f.message for f in found if f.kind == kind) and report.exit_code == 1 and report.whole


def test_a_tie_is_content(tmp_path: Path) -> None:
    one, two = (damage.save_torch(tmp_path / name, changed(f"a {name}")) for name in ("tie", "copy"))
    report = verify(one, against=two)
    assert [(f.kind, f.tensor) for f in report.findings if f.gravity == "difference"] == [("tie", "model.head")]
    assert "is tied to `model.embed.weight` here" in report.findings[0].message
    assert verify(one, against=one).exit_code == 0


def test_bytes_are_compared_and_not_numbers(tmp_path: Path) -> None:
    """NaN is equal to itself; 0.0 is not -0.0."""
    nan = torch.tensor([float("nan"), 0.0])
    paths = [damage.save_torch(tmp_path / f"{i}.pt", {"w": w}) for i, w in enumerate((nan, nan.clone(), -nan))]
    assert verify(paths[0], against=paths[1]).exit_code == 0
    report = verify(paths[0], against=paths[2])
    assert report.exit_code == 1 and "2 of 2 elements differ" in report.findings[0].message


def test_what_is_damaged_is_not_compared(tmp_path: Path) -> None:
    here, there = damage.save_dcp(tmp_path / "here"), damage.save_torch(tmp_path / "there.pt")
    file = here / "__0_0.distcp"
    damage.flip(file, max(damage.payload_of_dcp(file), key=len).start + 9)
    report = verify(here, against=there)
    assert [f.kind for f in report.findings] == ["checksum"] and report.exit_code == 4
    file.unlink()
    with pytest.raises(CorruptError):
        verify(there, against=here)
