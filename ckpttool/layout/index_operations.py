"""The operations by which one model's tensors become another's: a small, closed set, each of which can be undone and
none of which computes a value. They are applied to assemblies: tensors made of pieces of others.

    stack(axis), unstack(axis)     experts of a layer, layers of a model: one tensor each, or one dimension more
    concat(axis), split(axis)      gate and up; query, key and value, also by groups of heads
    transpose(a, b)                the weights of a Conv1D
    rows("halves", head_dim)       the rows of rotary heads, pairs of neighbours or two halves; of some parts only
    trim(axis), pad(axis)          rows of a vocabulary

Pure. Renaming is what rules do: `layout.key_maps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar, TypeGuard

from ckpttool.catalogue.boxes import Ints
from ckpttool.errors import UsageError
from ckpttool.layout.assemblies import Assembly, concatenated, index, regrouped, stacked, take, transposed, zeros

Facts = Mapping[str, int]
"""Numbers of a model's config that operations name: `{"head_dim": 128, "num_key_value_heads": 8}`."""
Number = int | str
"""A number, or the name of one in the config."""
Row = dict[Ints, Assembly]
"""What one name of a rule stands for: by the numbers of its stacks, `(layer, expert)`; by `()` where it has none."""
Table = list[Row]
"""What operations are applied to: a row for each name of a rule."""


class Operation:
    """One of the operations; they are data, as `{"split": {"axis": 0, "parts": 3}}` in a map."""

    __slots__ = ()
    name: ClassVar[str]

    def apply(self, table: Table, facts: Facts, rows: int) -> Table:
        """Return the result, of `rows` rows if that is for the rule to say. Raises UsageError if it cannot be done."""
        raise NotImplementedError

    @property
    def inverse(self) -> Operation:
        """The operation that undoes this one. Raises UsageError if it does not say enough."""
        raise NotImplementedError

    def data(self) -> Any:
        """Return what a map has it as, behind its name."""
        raise NotImplementedError


def _each(table: Table, change: Callable[[Assembly], Assembly]) -> Table:
    return [{numbers: change(one) for numbers, one in row.items()} for row in table]


@dataclass(frozen=True, slots=True)
class _OfStack(Operation):
    """An operation on the last number of names and an axis."""

    axis: int = 0

    def data(self) -> Any:
        return self.axis


@dataclass(frozen=True, slots=True)
class Stack(_OfStack):
    """Make one tensor of several of one shape, with a new axis: of those that differ in the last number only."""

    name: ClassVar[str] = "stack"

    def apply(self, table: Table, facts: Facts, rows: int) -> Table:
        return [self._stacked(row) for row in table]

    def _stacked(self, row: Row) -> Row:
        groups: dict[Ints, list[Assembly]] = {}
        for numbers in sorted(row):
            groups.setdefault(numbers[:-1], []).append(row[numbers])
        for group in groups.values():
            shapes = dict.fromkeys(one.shape for one in group)
            _check(len(shapes) == 1, f"tensors of shapes {_listed(shapes)} cannot be stacked")
            _check_axis(self.axis, len(group[0].shape) + 1, group[0].shape)
        return {numbers: stacked(group, self.axis) for numbers, group in groups.items()}

    @property
    def inverse(self) -> Operation:
        return Unstack(self.axis)


@dataclass(frozen=True, slots=True)
class Unstack(_OfStack):
    """Make one tensor of each index of an axis, which becomes the last number of their names."""

    name: ClassVar[str] = "unstack"

    def apply(self, table: Table, facts: Facts, rows: int) -> Table:
        for row in table:
            for one in row.values():
                _check_axis(self.axis, len(one.shape), one.shape)
                fits = one.shape[self.axis] * len(row) <= _MAX_TENSORS
                _check(fits, f"a tensor of shape {_listed([one.shape])} is not a stack")
        return [
            {
                (*numbers, k): index(one, self.axis, k)
                for numbers, one in row.items()
                for k in range(one.shape[self.axis])
            }
            for row in table
        ]

    @property
    def inverse(self) -> Operation:
        return Stack(self.axis)


@dataclass(frozen=True, slots=True)
class _OfParts(Operation):
    """An operation on the parts of a tensor along an axis: equal ones, or in the ratio of `parts`; those of each of
    `groups` equal blocks."""

    axis: int = 0
    parts: tuple[Number, ...] = ()
    groups: Number = 1

    def data(self) -> Any:
        return _data(axis=self.axis, parts=[*self.parts], groups=self.groups)


@dataclass(frozen=True, slots=True)
class Concat(_OfParts):
    """Make one tensor of those of several names, one behind the other along an axis; with `groups`, of that many equal
    parts of each in turn."""

    name: ClassVar[str] = "concat"

    def apply(self, table: Table, facts: Facts, rows: int) -> Table:
        groups = _number(self.groups, facts)
        _check(len({frozenset(row) for row in table}) == 1, "the stacks of the names have different lengths")
        return [{numbers: self._joined([row[numbers] for row in table], groups, facts) for numbers in table[0]}]

    def _joined(self, row: Sequence[Assembly], groups: int, facts: Facts) -> Assembly:
        for one in row:
            _check_axis(self.axis, len(one.shape), one.shape)
        rest = {one.shape[: self.axis] + one.shape[self.axis + 1 :] for one in row}
        _check(len(rest) == 1, f"tensors of shapes {_listed(one.shape for one in row)} cannot be joined")
        sizes = [one.shape[self.axis] for one in row]
        ratio = _ratio(self.parts, facts) or (1,) * len(row)
        unit = sizes[0] // ratio[0]
        fits = len(ratio) == len(row) and sizes == [unit * part for part in ratio]
        of = f"{_listed(one.shape for one in row)} are not {':'.join(map(str, ratio))} along axis {self.axis}"
        _check(fits, of, hint='say their ratio: `"parts": [4, 1, 1]`')
        _check(not any(size % groups for size in sizes), f"{_listed(one.shape for one in row)}: no {groups} groups")
        cuts = [
            take(one, self.axis, group * (size // groups), size // groups)
            for group in range(groups)
            for one, size in zip(row, sizes, strict=True)
        ]
        return concatenated(cuts if groups > 1 else row, self.axis)

    @property
    def inverse(self) -> Operation:
        return Split(self.axis, self.parts, self.groups)


@dataclass(frozen=True, slots=True)
class Split(_OfParts):
    """Make a tensor for each of several names of parts of one along an axis; with `groups`, of the parts of that many
    equal blocks."""

    name: ClassVar[str] = "split"

    def apply(self, table: Table, facts: Facts, rows: int) -> Table:
        _check(len(table) == 1, "`split` makes several tensors of one, and there are several")
        groups, ratio = _number(self.groups, facts), _ratio(self.parts, facts) or (1,) * rows
        _check(len(ratio) == rows, f"`split` into {len(ratio)} parts for {rows} names")
        result: Table = [{} for _ in ratio]
        for numbers, one in table[0].items():
            _check_axis(self.axis, len(one.shape), one.shape)
            size = one.shape[self.axis]
            what = f"{groups} groups of " if groups > 1 else ""
            fits = size % (groups * sum(ratio)) == 0
            ways = ":".join(map(str, ratio))
            _check(fits, f"a tensor of shape {[*one.shape]} cannot be split into {what}{ways} along axis {self.axis}")
            block, unit, low = size // groups, size // groups // sum(ratio), 0
            for part, into in zip(ratio, result, strict=True):
                cuts = [take(one, self.axis, group * block + low, part * unit) for group in range(groups)]
                into[numbers] = concatenated(cuts, self.axis) if groups > 1 else cuts[0]
                low += part * unit
        return result

    @property
    def inverse(self) -> Operation:
        return Concat(self.axis, self.parts, self.groups)


@dataclass(frozen=True, slots=True)
class Transpose(Operation):
    """Exchange two axes."""

    name: ClassVar[str] = "transpose"
    a: int = 0
    b: int = 1

    def apply(self, table: Table, facts: Facts, rows: int) -> Table:
        for one in (one for row in table for one in row.values()):
            _check_axis(max(self.a, self.b), len(one.shape), one.shape)
        return _each(table, lambda one: transposed(one, self.a, self.b))

    @property
    def inverse(self) -> Operation:
        return self

    def data(self) -> Any:
        return [self.a, self.b]


@dataclass(frozen=True, slots=True)
class Rows(Operation):
    """Permute the rows of each head: pairs of neighbours become two `halves`, as transformers' rotary embedding has
    them, or two halves `neighbours`. A head has `head_dim` of them, or the axis `heads` heads; of several names, those
    of `parts` only."""

    name: ClassVar[str] = "rows"
    to: str = "halves"
    head_dim: Number = "head_dim"
    axis: int = 0
    heads: Number | None = None
    parts: Ints = ()

    def apply(self, table: Table, facts: Facts, rows: int) -> Table:
        fits = not self.parts or max(self.parts) < len(table)
        _check(fits, f"there is no part {max(self.parts, default=0)} of {len(table)}, whose rows are permuted")
        return [
            row if self.parts and part not in self.parts else _each([row], lambda one: self._permuted(one, facts))[0]
            for part, row in enumerate(table)
        ]

    def _permuted(self, one: Assembly, facts: Facts) -> Assembly:
        _check_axis(self.axis, len(one.shape), one.shape)
        size = one.shape[self.axis]
        heads = None if self.heads is None else _number(self.heads, facts)
        head = size // heads if heads else _number(self.head_dim, facts)
        fits = head > 1 and head % 2 == 0 and size % (heads or head) == 0
        where = "the rows" if self.axis == 0 else f"those of axis {self.axis}"
        _check(
            fits,
            f"{where} of a tensor of shape {[*one.shape]} are not a multiple of {head}, those of a head"
            if not heads
            else f"{where} of a tensor of shape {[*one.shape]} are not those of {heads} heads of two halves",
            hint="the config is not this model's" + ("" if heads else ", or pass another `--head-dim`"),
        )
        pairs = (head // 2, 2) if self.to == "halves" else (2, head // 2)
        return regrouped(one, self.axis, (size // head, *pairs))

    @property
    def inverse(self) -> Operation:
        return replace(self, to="neighbours" if self.to == "halves" else "halves")

    def data(self) -> Any:
        values: dict[str, Any] = {"head_dim": self.head_dim} if self.heads is None else {"heads": self.heads}
        values |= {"axis": self.axis, "parts": [*self.parts]}
        values = {name: value for name, value in values.items() if value not in (0, [], "head_dim")}
        return {"to": self.to, **values} if values else self.to


@dataclass(frozen=True, slots=True)
class Resize(Operation):
    """Trim an axis to `size`, or pad it with zeros; `before` is what it was."""

    axis: int = 0
    size: Number = 0
    before: Number | None = None

    def data(self) -> Any:
        before = {} if self.before is None else {"from": self.before}
        return {"axis": self.axis, "size": self.size, **before}

    def _sizes(self, one: Assembly, facts: Facts) -> tuple[int, int]:
        _check_axis(self.axis, len(one.shape), one.shape)
        size, before = _number(self.size, facts), one.shape[self.axis]
        expected = before if self.before is None else _number(self.before, facts)
        _check(before == expected, f"a tensor of shape {[*one.shape]} has {before} on axis {self.axis}, not {expected}")
        return size, before

    def _before(self) -> Number:
        if self.before is None:
            raise UsageError(f"`{self.name}` cannot be undone", hint=f'say what the size was: `"from": {50304}`')
        return self.before


@dataclass(frozen=True, slots=True)
class Trim(Resize):
    """Leave out the end of an axis."""

    name: ClassVar[str] = "trim"

    def apply(self, table: Table, facts: Facts, rows: int) -> Table:
        def trimmed(one: Assembly) -> Assembly:
            size, before = self._sizes(one, facts)
            _check(size <= before, f"a tensor of shape {[*one.shape]} cannot be trimmed to {size}")
            return take(one, self.axis, 0, size)

        return _each(table, trimmed)

    @property
    def inverse(self) -> Operation:
        return Pad(self.axis, self._before(), self.size)


@dataclass(frozen=True, slots=True)
class Pad(Resize):
    """Add zeros at the end of an axis."""

    name: ClassVar[str] = "pad"

    def apply(self, table: Table, facts: Facts, rows: int) -> Table:
        def padded(one: Assembly) -> Assembly:
            size, before = self._sizes(one, facts)
            _check(size >= before, f"a tensor of shape {[*one.shape]} cannot be padded to {size}")
            more = zeros((*one.shape[: self.axis], size - before, *one.shape[self.axis + 1 :]))
            return concatenated((one, more), self.axis) if size > before else one

        return _each(table, padded)

    @property
    def inverse(self) -> Operation:
        return Trim(self.axis, self._before(), self.size)


_MAX_TENSORS = 1 << 18  # tensors that one is unstacked to


def parse_operation(data: Any) -> Operation | None:
    """Return the operation that a map has as `data`; None if it is none."""
    if not isinstance(data, Mapping) or len(data) != 1:
        return None
    match next(iter(data.items())):
        case ("stack" | "unstack" as name, int() as axis) if _is_axis(axis):
            return (Stack if name == "stack" else Unstack)(axis)
        case ("transpose", [int() as a, int() as b]) if _is_axis(a) and _is_axis(b) and a != b:
            return Transpose(a, b)
        case ("rows", "halves" | "neighbours" as to):
            return Rows(to)
        case ("rows", {"to": "halves" | "neighbours" as to, **rest}) if not {"head_dim", "heads"} <= rest.keys():
            head, heads = rest.pop("head_dim", "head_dim"), rest.pop("heads", None)
            along: Any = rest.pop("axis", 0)
            of: Any = rest.pop("parts", [])
            fits = _is_axis(along) and isinstance(of, list) and all(map(_is_axis, of)) and not rest
            if fits and _is_number(head) and (heads is None or _is_number(heads)):
                return Rows(to, head, along, heads, tuple(of))
        case ("concat" | "split" as name, int() as axis) if _is_axis(axis):
            return (Concat if name == "concat" else Split)(axis)
        case ("concat" | "split" as name, {"axis": int() as axis, **rest}) if _is_axis(axis):
            parts, groups = rest.pop("parts", []), rest.pop("groups", 1)
            parts = [1] * parts if type(parts) is int and 0 < parts <= _MAX_TENSORS else parts
            if isinstance(parts, list) and all(map(_is_number, parts)) and _is_number(groups) and not rest:
                return (Concat if name == "concat" else Split)(axis, tuple(parts), groups)
        case ("trim" | "pad" as name, {"axis": int() as axis, "size": size, **rest}) if _is_axis(axis):
            before = rest.pop("from", None)
            if _is_number(size) and (before is None or _is_number(before)) and not rest:
                return (Trim if name == "trim" else Pad)(axis, size, before)
    return None


def _data(**values: Any) -> Any:
    values = {name: value for name, value in values.items() if name == "axis" or value not in ([], 1)}
    return values if len(values) > 1 else values["axis"]


def _is_axis(value: Any) -> bool:
    return type(value) is int and 0 <= value < 16


def _is_number(value: Any) -> TypeGuard[Number]:
    """Return whether it is a number, or may be the name of one: `vision_config.num_attention_heads`."""
    is_name = isinstance(value, str) and all(map(str.isidentifier, value.split(".")))
    return (type(value) is int and value > 0) or is_name


def _number(value: Number, facts: Facts) -> int:
    if isinstance(value, int):
        return value
    if value not in facts:
        raise UsageError(
            f"`{value}` of the model is unknown",
            hint="pass `--assets` with the model's `config.json`"
            + (", or `--head-dim 128`" if value == "head_dim" else ", or write the number into the map"),
            unknown=value,
        )
    return facts[value]


def _ratio(parts: Sequence[Number], facts: Facts) -> tuple[int, ...]:
    numbers = [_number(part, facts) for part in parts]
    common = gcd(*numbers) if numbers else 1
    return tuple(number // common for number in numbers)


def _check(holds: bool, message: str, hint: str | None = None) -> None:
    if not holds:
        raise UsageError(message, hint=hint)


def _check_axis(axis: int, dims: int, shape: Ints) -> None:
    _check(axis < dims, f"a tensor of shape {[*shape]} has no axis {axis}")


def _listed(shapes: Iterable[Ints]) -> str:
    return " and ".join(str([*shape]) for shape in shapes)
