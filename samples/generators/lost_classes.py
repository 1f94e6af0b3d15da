"""Classes of a package that is gone by the time its checkpoints are read.

`lost.py` loads this file as the module `lost_package.models`: readers cannot import that.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn


class Plain:
    """Rebuilt by `copyreg` with its `__dict__` as state."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slotted:
    """State is the pair (None, slots)."""

    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left = left
        self.right = right


class Reduced:
    """`__reduce__` with arguments, state, list items and dict items."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.items: list[Any] = []
        self.pairs: dict[Any, Any] = {}

    def append(self, item: Any) -> None:
        """Take a list item."""
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs[key] = value

    def __reduce__(self) -> tuple[Any, ...]:
        state = {key: value for key, value in vars(self).items() if key not in ("args", "items", "pairs")}
        return Reduced, self.args, state, iter(self.items), iter(self.pairs.items())


class WithState:
    """`__setstate__` takes something that is not a dict."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> tuple[str, torch.Tensor]:
        return ("state", self.tensor)

    def __setstate__(self, state: tuple[str, torch.Tensor]) -> None:
        _, self.tensor = state


class WithArguments:
    """`__getnewargs_ex__`: keyword arguments for `__new__`."""

    def __new__(cls, one: Any, *, two: Any) -> WithArguments:  # noqa: PYI034
        """Make an instance that knows its arguments."""
        made = super().__new__(cls)
        made.one, made.two = one, two
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[Any], dict[str, Any]]:
        return (self.one,), {"two": self.two}


class Single:
    """Pickled as the name of a global variable."""

    def __reduce__(self) -> str:
        return "SINGLE"


SINGLE = Single()


@dataclass
class Config:
    """A configuration as training scripts put in their checkpoints."""

    width: int = 7
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    scale: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    """Frozen and slotted: dataclasses give it a `__setstate__` over a list."""

    width: int = 13


class Mode(enum.Enum):
    """Pickled as a call of the class with the value."""

    TRAIN = "train"


class Level(enum.IntEnum):
    """An `int` that is not one."""

    HIGH = 3


class Flags(enum.Flag):
    """Two bits."""

    A = enum.auto()
    B = enum.auto()


Pair = namedtuple("Pair", ["first", "second"])  # noqa: PYI024


class Typed(NamedTuple):
    """A tuple with names and types."""

    tensor: torch.Tensor
    count: int


class Table(dict[str, Any]):
    """A dict with attributes."""


class Ordered(OrderedDict[str, Any]):
    """An ordered dict with attributes."""


class Row(list[Any]):
    """A list with attributes."""


class Name(str):
    """A string with attributes."""


class Count(int):
    """An integer with attributes."""


class Outer:
    """A class that holds a class."""

    class Inner(Plain):
        """Pickled by its qualified name."""


def warm_up(step: int, total: int = 10) -> float:
    """A function pickled by name, as the `lr_lambda` of a scheduler is."""
    return min(1.0, step / total)


class Scaled(torch.Tensor):
    """A tensor subclass with an attribute."""


class TinyNet(nn.Module):
    """A module that is saved whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Sequential(nn.ReLU(), nn.Linear(13, 7, bias=False))
        self.tied = nn.Linear(13, 7, bias=False)
        self.tied.weight = self.second[1].weight
        self.register_buffer("seen", torch.tensor(5))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both layers and the tied one."""
        hidden = self.first(x)
        return self.second(hidden) + self.tied(hidden)


class Inner(nn.Module):
    """Parameters one level down; no code of torch's own, whose paths would be in the script's debug records."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(35.0).reshape(5, 7))
        self.register_buffer("seen", torch.tensor(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A linear map."""
        return x @ self.weight.t()


class Scripted(nn.Module):
    """A module for TorchScript, with a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.tied = self.inner.weight
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """There and back."""
        return self.inner(x) @ self.tied
