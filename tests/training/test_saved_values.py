"""Values of a script, saved and loaded into another state: equal and of the same class, in each format. What is
expected is what was given, and for DCP what torch's own `dcp.load` reads."""

from __future__ import annotations

import copy
import datetime
import decimal
import fractions
import logging
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn

import ckpttool
from ckpttool.training import rank_values

VALUES: dict[str, Any] = {
    "numbers": [3, 2.5, True, None, 1 + 2j, 1 << 80, float("inf")],
    "texts": ("x", b"xx", bytearray(b"12"), ""),
    "milestones": {4: 1, 8: 1},
    "sequential": {"_schedulers": [{"milestones": Counter({4: 1, 8: 1})}, {"milestones": Counter()}, {}]},
    "keys": {(1, 2): 3, None: 4, 1.5: 5, True: 6, "1": 7, "": 8},
    "number_and_text": {1: 1, "a": {2: {3: 4}}},
    "dots": {"a.b": 1, "a": {"c": 2}},
    "empty": {},
    "empty_list": [],
    "empty_tuple": (),
    "list_of_empty": [{}],
    "lists_of_empty": [[{}], {"a": [{}], "b": {}}],
    "empty_below": {"a": {"b": {}}, "c": {}},
    "ordered": OrderedDict(b=1, a=OrderedDict(d=torch.ones(1), c=2)),
    "defaults": defaultdict(list, {"a": [1], 2: [3]}),
    "tuple": (1, (2, torch.arange(3)), [torch.ones(2)]),
    "sets": [{1, 2}, frozenset({1})],
    "library": [range(3), slice(1, 2), deque([1, 2], 3), decimal.Decimal("1.5"), fractions.Fraction(1, 3)],
    "times": [
        datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone.utc),
        datetime.timedelta(3),
        pathlib.PurePosixPath("/x"),
    ],
    "torch": [torch.Size([2, 3]), torch.device("cpu"), torch.bfloat16],
    "numpy": [np.float64(2.5), np.int64(3), np.arange(4).reshape(2, 2), np.arange(3, dtype=">i4")],
    "tensor": torch.arange(3.0),
    "tensors": [torch.ones(2), 3, [torch.zeros(0, 3)], {1: torch.tensor(7)}],
}


def difference(expected: Any, found: Any, where: str = "") -> str | None:
    """Where two values differ in class, keys, order or elements."""
    if type(expected) is not type(found):
        return f"{where}: {type(found)} for {type(expected)}"
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        equal = torch.equal if isinstance(expected, torch.Tensor) else np.array_equal
        return None if expected.dtype == found.dtype and equal(expected, found) else f"{where}: {found}"
    if isinstance(expected, (dict, list, tuple)):
        keys = [*expected] if isinstance(expected, dict) else [*range(len(expected))]
        others = [*found] if isinstance(found, dict) else [*range(len(found))]
        if keys != others or [*map(type, keys)] != [*map(type, others)]:
            return f"{where}: {others} for {keys}"
        below = (difference(expected[key], found[key], f"{where}.{key}") for key in keys)
        return next((one for one in below if one), None)
    return None if expected == found else f"{where}: {found!r} for {expected!r}"


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_what_is_saved_comes_back(tmp_path: Path, format: str) -> None:
    given = copy.deepcopy(VALUES)
    ckpttool.save(tmp_path / "saved", nn.Linear(1, 1), format=format, **VALUES)
    state: dict[str, Any] = dict.fromkeys(VALUES, "nothing yet")
    ckpttool.load_into(tmp_path / "saved", state)
    assert [difference(given[name], state[name], name) for name in VALUES] == [None] * len(VALUES)


def test_dcp_reads_what_is_noted_beside(tmp_path: Path) -> None:
    """Into a state of the same keys, as `dcp.load` of a directory that `dcp.save` wrote."""
    names = [name for name in VALUES if name not in ("dots", "keys", "number_and_text")]
    ckpttool.save(tmp_path / "ours", nn.Linear(1, 1), format="dcp", **{name: VALUES[name] for name in names})
    torch_dcp.save({name: VALUES[name] for name in names}, checkpoint_id=tmp_path / "theirs", no_dist=True)

    def blank(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value)
        if isinstance(value, dict):
            return {key: blank(below) for key, below in value.items()}
        return [blank(below) for below in value] if isinstance(value, list) else 0

    for name in names:
        states = []
        for folder in ("ours", "theirs"):
            states.append({name: blank(VALUES[name])})
            torch_dcp.load(states[-1], checkpoint_id=tmp_path / folder, no_dist=True)
        assert difference(states[1], states[0], name) is None


def test_schedulers_in_a_scheduler_go_on(tmp_path: Path) -> None:
    def fresh() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.SequentialLR]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        kind = torch.optim.lr_scheduler
        parts = [kind.ConstantLR(optimizer, 0.5, 2), kind.MultiStepLR(optimizer, [4, 8])]
        return optimizer, kind.SequentialLR(optimizer, parts, [2])

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
        result = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            result.append(optimizer.param_groups[0]["lr"])
        return result

    optimizer, scheduler = fresh()
    rates(optimizer, scheduler, 3)
    for format in ("dcp", "torch"):
        ckpttool.save(tmp_path / format, nn.Linear(1, 1), format=format, scheduler=scheduler)
    expected = rates(optimizer, scheduler, 10)
    assert len(set(expected)) == 3
    for format in ("dcp", "torch"):
        optimizer, again = fresh()
        optimizer.param_groups[0]["lr"] = 1.0
        ckpttool.load_into(tmp_path / format, {"scheduler": again})
        assert rates(optimizer, again, 10) == pytest.approx(expected)


@pytest.mark.parametrize("target", ["torch", "dcp"])
def test_a_counter_is_converted(tmp_path: Path, target: str) -> None:
    """From DCP, where it is several entries, to one object of a pickle, and on."""
    milestones = {"milestones": Counter({4: 1, 8: 2}), "rates": defaultdict(list, {"a": [1]})}
    ckpttool.save(tmp_path / "saved", nn.Linear(1, 1), scheduler=milestones)
    ckpttool.convert(tmp_path / "saved", tmp_path / "converted", to=target)
    state = {"scheduler": None}
    ckpttool.load_into(tmp_path / "converted", state)
    assert difference(milestones, state["scheduler"]) is None
    if target == "torch":
        theirs = torch.load(tmp_path / "converted", weights_only=False)["scheduler"]
        assert difference(milestones, theirs) is None


def test_classes_that_dcp_does_not_keep_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Config(dict[str, Any]):
        pass

    with caplog.at_level(logging.WARNING, logger="ckpttool"):
        ckpttool.save(tmp_path / "saved", nn.Linear(1, 1), config=Config(a=1))
    assert "`config` is a Config, which DCP keeps as a dict" in caplog.text


def test_two_values_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ckpttool.CkptError, match="have the same name in DCP") as refused:
        ckpttool.save(tmp_path / "saved", nn.Linear(1, 1), value={"a.b": 1, "a": {"b": 2}})
    assert refused.value.exit_code == 2 and not [*tmp_path.iterdir()]


def test_tensors_of_every_kind_are_compared(tmp_path: Path) -> None:
    """On several ranks by their elements, which not all have; none of them stops the save."""
    values = torch.arange(4.0)
    odd = {
        "meta": torch.ones(2, device="meta"),
        "conjugate": torch.view_as_complex(torch.ones(2, 2)).conj(),
        "negative": torch.view_as_complex(torch.ones(2, 2)).conj().imag,
        "expanded": torch.ones(1).expand(3),
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(3),
        "float8": values.to(torch.float8_e4m3fn),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(values, 0.1, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "in a list": [torch.ones(2), (torch.zeros(1), {"a": torch.ones(1)})],
    }
    # One process has nothing to compare with.
    assert rank_values._fingerprint(odd) == rank_values._fingerprint(copy.copy(odd))
    ckpttool.save(tmp_path / "a.pt", torch.nn.Linear(1, 1), format="torch", odd=odd)
    saved = torch.load(tmp_path / "a.pt", weights_only=False)["odd"]
    assert saved.keys() == odd.keys() and torch.equal(saved["negative"], odd["negative"].resolve_neg())
