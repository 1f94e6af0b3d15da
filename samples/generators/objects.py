"""Samples of files that hold objects and programs."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from operator import attrgetter
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import torch
from lost import package, shown
from sample import sample
from torch import nn
from torchsave import TORCH, load
from training import detached, seed


@sample(
    "torch/unknown_classes",
    what="objects of a package that cannot be imported, and of the standard library and NumPy",
    trap="each way in which a pickle calls, builds and fills an object; classes must not be needed to read the tensors",
    writer=TORCH,
    load=lambda folder: shown(load(folder)),
)
def torch_unknown_classes(folder: Path) -> Any:
    """The reference shows lost objects as `{"class": name, ...}`."""
    lost = package()
    table, row, ordered = lost.Table(a=torch.ones(2), b=2), lost.Row([torch.zeros(1), "x"]), lost.Ordered(k=1)
    table.note, row.note, ordered.note = "table", "row", "ordered"
    name, count = lost.Name("seven"), lost.Count(7)
    name.note, count.note = "name", "count"
    reduced = lost.Reduced(1, torch.full((3,), 4.0))
    reduced.append(torch.full((2,), 5.0))
    reduced["key"] = "value"
    reduced.state = torch.full((1,), 6.0)
    default = defaultdict(list, a=[1])
    default_of_lost = defaultdict(lost.Plain)
    state = {
        "lost": {
            "plain": lost.Plain(tensor=torch.arange(3.0), child=lost.Plain(x=1), text="y"),
            "without_state": lost.Plain(),
            "slotted": lost.Slotted(1, torch.ones(2)),
            "reduced": reduced,
            "with_state": lost.WithState(torch.arange(4)),
            "with_arguments": lost.WithArguments(1, two=torch.ones(1)),
            "single": lost.SINGLE,
            "config": lost.Config(scale=torch.tensor(2.5)),
            "frozen": lost.Frozen(),
            "mode": lost.Mode.TRAIN,
            "level": lost.Level.HIGH,
            "flags": lost.Flags.A | lost.Flags.B,
            "pair": lost.Pair(torch.arange(2), "second"),
            "typed": lost.Typed(torch.arange(2), 9),
            "table": table,
            "ordered": ordered,
            "row": row,
            "name": name,
            "count": count,
            "inner": lost.Outer.Inner(z=1),
            "class": lost.Config,
            "function": lost.warm_up,
            "partial": partial(lost.warm_up, total=20),
            "default_dict_factory": default_of_lost.default_factory,
        },
        "standard": {
            "ordered_dict": OrderedDict(a=1, b=torch.ones(1)),
            "default_dict": default,
            "counter": Counter("hello"),
            "deque": deque([1, 2, 3], maxlen=5),
            "set": {1, 2},
            "frozen_set": frozenset({"a"}),
            "partial": partial(int, base=2),
            "builtin": len,
            "time": datetime(2024, 2, 29, 12, 30, tzinfo=timezone.utc),
            "day": date(2024, 2, 29),
            "span": timedelta(days=1, seconds=2),
            "path": PurePosixPath("runs/7"),
            "fraction": Fraction(1, 3),
            "decimal": Decimal("1.10"),
            "uuid": UUID(int=7),
            "slice": slice(1, None, 2),
            "range": range(0, 10, 3),
            "complex": 1 + 2j,
            "bytes": b"\x00\xffbytes",
            "byte_array": bytearray(b"array"),
            "ellipsis": ...,
            "not_implemented": NotImplemented,
            "type": dict,
            "namespace": SimpleNamespace(a=1),
            "pattern": re.compile(r"layers\.(\d+)"),
            "operator": attrgetter("weight"),
            "error": KeyError("gone"),
        },
        "torch": {
            "size": torch.Size([2, 3]),
            "device": torch.device("cpu"),
            "cuda_device": torch.device("cuda", 3),
            "dtype": torch.bfloat16,
            "layout": torch.sparse_coo,
            "memory_format": "torch.memory_format cannot be pickled",
            "generator": torch.Generator().manual_seed(7).get_state(),
        },
        "numpy": {
            "array": np.arange(6, dtype=np.float32).reshape(2, 3),
            "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
            "big_endian": np.arange(3, dtype=">i4"),
            "structured": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
            "strings": np.array(["a", "bcd"]),
            "objects": np.array([None, {"a": 1}], dtype=object),
            "empty": np.empty((0, 3)),
            "scalar": np.float64(1.5),
            "bool": np.bool_(True),
            "integer": np.int64(7),
            "dtype": np.dtype("float16"),
        },
    }
    torch.save(state, folder / "ckpt.pt")
    return shown(state)


@sample(
    "torch/module",
    what="a whole `nn.Module` of a class that cannot be imported",
    trap="weights inside `_parameters` of unknown objects; a tied parameter; a buffer that is not persistent",
    writer=TORCH,
    load=lambda folder: detached(load(folder).state_dict()),
)
def torch_module(folder: Path) -> Any:
    """The reference is the module's state dict."""
    module = lost_module()
    torch.save(module, folder / "ckpt.pt")
    return detached(module.state_dict())


def lost_module() -> nn.Module:
    """A small module of the lost package."""
    seed()
    return package().TinyNet()


@sample(
    "torch/script",
    what="`torch.jit.save` of a scripted module",
    trap="a zip with `constants.pkl` and compressed `code/`: not a torch.save file, though `data.pkl` has the tensors",
    writer="torch 2.13 `torch.jit.save`",
    load=lambda folder: detached(torch.jit.load(folder / "ckpt.pt").state_dict()),
)
def torch_script(folder: Path) -> Any:
    """The reference is the module's state dict; a script keeps the buffer that is not persistent too."""
    module = package().Scripted()
    torch.jit.save(torch.jit.script(module), folder / "ckpt.pt")
    return detached({**module.state_dict(), "scratch": module.scratch})


@sample(
    "torch/pt2",
    what="`torch.export.save`",
    trap="a zip without `data.pkl`: weights are raw records, described by JSON",
    writer="torch 2.13 `torch.export.save`",
    load=lambda folder: detached(torch.export.load(folder / "ckpt.pt2").state_dict),
)
def torch_pt2(folder: Path) -> Any:
    """The reference is the exported program's state dict."""
    program = torch.export.export(lost_module(), (torch.ones(2, 7),))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names files of this machine
    torch.export.save(program, folder / "ckpt.pt2")
    return detached(program.state_dict)
