"""The result of a comparison of two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from ckpttool.analysis.differences.elements import Comparison, Difference, Sums, add_figures, added, cosine
from ckpttool.analysis.result import Absent, Result
from ckpttool.catalogue.boxes import Ints
from ckpttool.errors import DIFFERS, DONE
from ckpttool.text import html_table, natural, plural

RELATIVE_DISTANCE = "relative L2 distance"
_SORTED_BY = {"l2": "relative_distance", "abs": "absolute", "rel": "relative", "ulp": "ulp", "differing": "differing"}


@dataclass(slots=True)
class Side:
    """One of the two checkpoints: `Side("run7/step-500", "dcp", 4, 67, 27, 12988)`."""

    path: str  #: path, as it was typed
    format: str = ""  #: its format
    world_size: int = 1  #: number of ranks that wrote it
    tensor_count: int = 0  #: tensors that are compared
    object_count: int = 0  #: objects that are compared
    payload_bytes: int = 0  #: bytes of values that are compared


@dataclass(slots=True)
class Only:
    """An entry that only one side has: `Only("model.extra", "model", "float32", (3,))`."""

    name: str  #: dotted name
    part: str  #: part
    dtype: str | None = None  #: dtype; null for an object
    shape: Ints | None = None  #: shape; null for an object


@dataclass(slots=True)
class TensorDifference:
    """A tensor that differs. Pairs are those of A and B."""

    name: str  #: name in A
    part: str  #: part
    kinds: list[str] = field(default_factory=list)  #: what differs: `dtype`, `shape`, `values`, `tie`, `sharding`
    dtypes: tuple[str, str] = ("", "")  #: pair
    shapes: tuple[Ints, Ints] = ((), ())  #: pair
    values: Difference | None = None  #: figures; null if the values were not compared
    index: list[int] | None = None  #: index of the first element that differs
    ties: tuple[str | None, str | None] | None = None  #: pair: the names whose bytes they share, or null
    sharding: tuple[str, str] | None = None  #: pair, for people
    why: str | None = None  #: reason why values of the same shape were not compared


@dataclass(slots=True)
class ObjectDifference:
    """A value that is not the same: `ObjectDifference("optim.param_groups.0.lr", "optimizer", "", 0.1, 0.2)`.

    `at` is where in the value: `["betas"][1]`. One that a side does not have there is `ABSENT`.
    """

    name: str  #: dotted name
    part: str  #: part
    at: str  #: position in the value, such as `["betas"][1]`
    a: Any | Absent  #: value in A; missing if A has none
    b: Any | Absent  #: value in B; missing if B has none


@dataclass(slots=True)
class Total:
    """The figures of a part, or of all: `Total("model", 19, 18, 1215, 4, None, 0.5, 0.01, 120, 0.999)`.

    `tensors` were compared by value, of which `equal` have the same ones; `elements` of all of them, of which
    `differing` have other bits. `absolute`, `relative`, `ulp` are the largest; `cosine` is over the tensors that
    differ.
    """

    part: str  #: part
    tensor_count: int = 0  #: tensors whose values were compared
    equal: int = 0  #: those that are equal
    numel: int = 0  #: elements of all of them
    differing: int = 0  #: elements with different bits
    beyond: int | None = None  #: elements outside of the tolerance; null without one
    absolute: float | None = None  #: largest absolute difference
    relative: float | None = None  #: largest relative difference
    ulp: int | None = None  #: largest difference in ULPs
    cosine: float | None = None  #: cosine similarity over the tensors that differ
    distance: float | None = None  #: norm of B minus A
    norm: float | None = None  #: norm of A, over the tensors that differ
    relative_distance: float | None = None  #: the one relative to the other
    _sums: Sums = (0.0, 0.0, 0.0)

    def count(self, numel: int, comparison: Comparison | None, differs: bool, *, is_counter: bool = False) -> None:
        """Add a tensor; `comparison` is None if its bytes are the same. A counter, such as the steps of a parameter, is
        in no figure: it would be larger than all moments."""
        self.tensor_count += 1
        self.equal += not differs
        self.numel += numel
        if comparison is None:
            return
        more = comparison.result()
        if is_counter:
            self.differing += more.differing
            self.beyond = self.beyond if more.beyond is None else (self.beyond or 0) + more.beyond
            return
        add_figures(self, more)
        if more.differing:
            self._sums = added(self._sums, comparison.sums)
            self.cosine = cosine(*self._sums)


@dataclass(slots=True)
class ModuleDifference:
    """The tensors of a layer, or of a module outside of the layers: `ModuleDifference("layers.3", "model", "")`.

    Of an optimizer's state it is those of one kind, of the parameters of the module. Figures are over the tensors that
    differ.
    """

    name: str  #: name of the layer or module
    part: str  #: part
    moment: str  #: of optimizer state, which: `exp_avg`, ...; else empty
    tensor_count: int = 0  #: tensors whose values were compared
    equal: int = 0  #: those that are equal
    differing: int = 0  #: elements with different bits
    beyond: int | None = None  #: elements outside of the tolerance; null without one
    absolute: float | None = None  #: largest absolute difference
    relative: float | None = None  #: largest relative difference
    ulp: int | None = None  #: largest difference in ULPs
    distance: float | None = None  #: norm of B minus A
    norm: float | None = None  #: norm of A
    relative_distance: float | None = None  #: the one relative to the other

    def count(self, values: Difference | None, differs: bool) -> None:
        """Add a tensor; `values` is None if its bytes are the same."""
        self.tensor_count += 1
        self.equal += not differs
        if values is not None:
            add_figures(self, values)


@dataclass(slots=True, repr=False)
class Diff(Result):
    """All differences between two checkpoints."""

    command: ClassVar[str] = "diff"

    a: Side  #: the first checkpoint
    b: Side  #: the second checkpoint
    within: str | None = None  #: tolerance, such as `rtol 1e-05`; null if bits are compared
    matched: int = 0  #: names on both sides
    payload_bytes: int = 0  #: bytes of values that were compared, tied ones counted once
    total: Total = field(default_factory=lambda: Total("total"))  #: figures of all parts
    parts: list[Total] = field(default_factory=list)  #: figures of each part
    modules: list[ModuleDifference] = field(default_factory=list)  #: figures of each layer and module
    only_a: list[Only] = field(default_factory=list)  #: names in A only
    only_b: list[Only] = field(default_factory=list)  #: names in B only
    kinds: list[str] = field(default_factory=list)  #: names of a tensor on one side and an object on the other
    tensors: list[TensorDifference] = field(default_factory=list)  #: tensors that differ
    objects: list[ObjectDifference] = field(default_factory=list)  #: objects that differ
    notes: list[str] = field(default_factory=list)  #: remarks on what was done, for people
    hint: str | None = None  #: how to make more names match, for people
    seconds: float = 0.0  #: duration

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_a or self.only_b or self.tensors or self.objects or self.kinds)

    @property
    def lines(self) -> Iterator[str]:
        """What `--quiet` prints: `- x` for a name only in A, `+ x` for one only in B, `! x` for one that differs."""
        yield from (f"- {entry.name}" for entry in self.only_a)
        yield from (f"+ {entry.name}" for entry in self.only_b)
        names = [*self.kinds, *(tensor.name for tensor in self.tensors), *(entry.name for entry in self.objects)]
        yield from (f"! {name}" for name in dict.fromkeys(names))

    @property
    def changed(self) -> str:
        """What differs of the names that both have: `29 of 201 tensors, all in the part optimizer; ...`; else empty."""
        names = {tensor.name for tensor in self.tensors}
        objects = {entry.name for entry in self.objects}
        changed = []
        if names:
            common = self.a.tensor_count - sum(entry.dtype is not None for entry in self.only_a)
            changed.append(f"{len(names):,} of {plural(common, 'tensor')}")
        if objects:
            common = self.a.object_count - sum(entry.dtype is None for entry in self.only_a)
            changed.append(f"{len(objects):,} of {plural(common, 'object')}")
        if not changed:
            return ""
        lists: list[list[Any]] = [self.tensors, self.objects, self.only_a, self.only_b]
        parts = {entry.part for entries in lists for entry in entries}
        text = " and ".join(changed) + (f", all in the part {parts.pop()}" if len(parts) == 1 else "")
        figures = [(tensor.name, tensor.values) for tensor in self.tensors if tensor.values is not None]
        if new_nans := sum(values.new_nans for _, values in figures):
            text += f"; {new_nans:,} new NaN in B"
        # What a model is changes less than its moments do, and is what is asked about.
        ranked = sorted(self.tensors, key=lambda tensor: (not tensor.part.startswith("model"), rank(tensor)[1:]))
        for tensor in ranked[:1]:
            if tensor.values is not None and (largest := tensor.values.relative_distance):
                is_all = all(one.part == tensor.part for one in self.tensors)
                where = "" if is_all else f"in the {tensor.part}, the "
                text += f"; {where}largest {RELATIVE_DISTANCE} {'' if is_all else 'is '}{largest:.3g} in {tensor.name}"
        return text

    def ranked(self, key: str = "l2", top: int | None = None) -> list[TensorDifference]:
        """Return the tensors whose values differ, those with new NaN first, and of them the `top`.

        `key` is what they are sorted by, the largest first: `l2` (the norm of B minus A relative to that of A), `abs`,
        `rel`, `ulp`, `differing`; or `cosine`, the smallest first; or `name`.
        """
        tensors = [tensor for tensor in self.tensors if "values" in tensor.kinds]
        return sorted(tensors, key=partial(rank, key=key))[:top]

    @property
    def verdict(self) -> str:
        """`same` or `differs`."""
        return "same" if self.same else "differs"

    @property
    def message(self) -> str:
        """The verdict in a sentence, with what changed."""
        changed = f": {self.changed}" if self.changed else ""
        return f"{self.a.path} and {self.b.path} {'are the same' if self.same else 'differ'}{changed}"

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = [
            (
                tensor.name,
                ", ".join(tensor.kinds),
                "" if tensor.values is None else tensor.values.relative_distance or "",
            )
            for tensor in self.tensors
        ]
        rows += [(entry.name + entry.at, "object", "") for entry in self.objects]
        for side, entries in (("A", self.only_a), ("B", self.only_b)):
            rows += [(entry.name, f"only in {side}", "") for entry in entries]
        return html_table(self.message, ("name", "differs", RELATIVE_DISTANCE), rows)

    @property
    def exit_code(self) -> int:
        """0 when nothing differs, else 1."""
        return DONE if self.same else DIFFERS


def rank(tensor: TensorDifference, key: str = "l2") -> tuple[bool, float, list[tuple[str, int]]]:
    """Return what tensors are sorted by: new NaN, the figure of a `key` of `Diff.ranked`, the name. Pure."""
    values = tensor.values
    figure = 0.0
    if values is not None and key == "cosine":
        figure = 2.0 if values.cosine is None else values.cosine
    elif values is not None and key in _SORTED_BY:
        found = getattr(values, _SORTED_BY[key])
        figure = 1.0 if found is None else -float(found)  # what is unknown comes last
    is_first = key != "name" and values is not None and values.new_nans > 0
    return not is_first, figure, natural(tensor.name)
