"""What a comparison of two checkpoints has found, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.errors import DIFFERS, DONE
from ckpttool.operations.diff.elements import Comparison, Difference, cosine, larger


@dataclass(slots=True)
class Side:
    """One of the two: `Side("run7/step-500", "dcp", 4, 67, 27, 12988)`: world size, tensors, objects, bytes of values,
    of what is compared."""

    path: str
    format: str = ""
    world_size: int = 1
    tensors: int = 0
    objects: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Only:
    """What one side has alone: `Only("model.extra", "model", "float32", (3,))`; an object has no dtype and shape."""

    name: str
    part: str
    dtype: str | None = None
    shape: Ints | None = None


@dataclass(slots=True)
class TensorDifference:
    """A tensor that is not the same: `TensorDifference("model.w", "model", ["values"], ...)`.

    `kinds` are what differs: `dtype`, `shape`, `values`, `tie`, `sharding`. `dtypes`, `shapes`, `ties` and `sharding`
    are those of A and of B; a tie is the name whose bytes the tensor shares, or None. `values` are figures of the
    elements, in the dtype in which they were compared; None when they were not (`why` says so, or the shapes differ).
    `index` is where the first difference lies.
    """

    name: str
    part: str
    kinds: list[str] = field(default_factory=list)
    dtypes: tuple[str, str] = ("", "")
    shapes: tuple[Ints, Ints] = ((), ())
    values: Difference | None = None
    index: list[int] | None = None
    ties: tuple[str | None, str | None] | None = None
    sharding: tuple[str, str] | None = None
    why: str | None = None


class Absent:
    """Stands for a value that one side does not have."""

    def __repr__(self) -> str:
        return "-"


ABSENT = Absent()


@dataclass(slots=True)
class ObjectDifference:
    """A value that is not the same: `ObjectDifference("optim.param_groups.0.lr", "optimizer", "", 0.1, 0.2)`.

    `at` is where in the value: `["betas"][1]`. One that a side does not have there is `ABSENT`.
    """

    name: str
    part: str
    at: str
    a: Any
    b: Any


@dataclass(slots=True)
class Total:
    """The figures of a part, or of all: `Total("model", 19, 18, 1215, 4, None, 0.5, 0.01, 120, 0.999)`.

    `tensors` were compared by value, of which `equal` have the same ones; `elements` of all of them, of which
    `differing` have other bits. `absolute`, `relative`, `ulp` are the largest; `cosine` is over the tensors that
    differ.
    """

    part: str
    tensors: int = 0
    equal: int = 0
    elements: int = 0
    differing: int = 0
    beyond: int | None = None
    absolute: float | None = None
    relative: float | None = None
    ulp: int | None = None
    cosine: float | None = None
    sums: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def count(self, numel: int, found: Comparison | None, differs: bool) -> None:
        """Add a tensor; `found` is None when its bytes are the same."""
        self.tensors += 1
        self.equal += not differs
        self.elements += numel
        if found is None:
            return
        made = found.result()
        self.differing += made.differing
        if made.beyond is not None:
            self.beyond = (self.beyond or 0) + made.beyond
        self.absolute = larger(self.absolute, made.absolute)
        self.relative = larger(self.relative, made.relative)
        self.ulp = larger(self.ulp, made.ulp)
        if made.differing:
            self.sums = tuple(x + y for x, y in zip(self.sums, found.sums, strict=True))  # type: ignore[assignment]
            self.cosine = cosine(*self.sums)


@dataclass(slots=True)
class Diff:
    """How two checkpoints differ. `within` is in words what passes for equal: `rtol 1e-05`, or None for equal bits.

    `matched` names are on both sides; `bytes` of values were compared. `notes` are sentences for people, `hint` what to
    type when the names do not fit together.
    """

    a: Side
    b: Side
    within: str | None = None
    matched: int = 0
    bytes: int = 0
    only_a: list[Only] = field(default_factory=list)
    only_b: list[Only] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    objects: list[ObjectDifference] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    parts: list[Total] = field(default_factory=list)
    total: Total = field(default_factory=lambda: Total("total"))
    notes: list[str] = field(default_factory=list)
    hint: str | None = None
    seconds: float = 0.0

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_a or self.only_b or self.tensors or self.objects or self.kinds)

    @property
    def exit_code(self) -> int:
        """0 when nothing differs, else 1."""
        return DONE if self.same else DIFFERS
