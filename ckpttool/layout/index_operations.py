"""The operations by which one model's tensors become another's: a small, closed set, each of which can be undone and
none of which computes a value. They are arithmetic on indexes, applied to assemblies: tensors made of pieces of others.

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
from itertools import product
from math import gcd, prod
from typing import Any, ClassVar, TypeGuard, TypeVar

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.errors import UsageError
from ckpttool.layout.views import NOWHERE, Fold, Slice, ViewPiece, plain, whole

_T = TypeVar("_T")

Facts = Mapping[str, int]
"""Numbers of a model's config that operations name: `{"head_dim": 128, "num_key_value_heads": 8}`."""
Number = int | str
"""A number, or the name of one in the config."""
ZEROS = -1


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor of a shape that is made of pieces: `ViewPiece(0, slice)` is of the first source, `ViewPiece(ZEROS, ...)`
    of none. The boxes of the pieces tile it.

    With a `fold`, they tile a tensor of more dimensions with the same elements in the same order: rows in another order
    are `((heads, 2, half), (columns,))`, of which two dimensions of the source have changed places.
    """

    shape: Ints
    pieces: tuple[ViewPiece, ...]
    fold: Fold

    @classmethod
    def of(cls, source: int, shape: Ints) -> Assembly:
        """Return the whole of a source."""
        return cls(shape, (ViewPiece(source, whole(shape)),), plain(shape))


# Arithmetic -----------------------------------------------------------------------------------------------------------


def take(one: Assembly, axis: int, low: int, count: int) -> Assembly:
    """Return `count` indexes of an axis from `low`."""
    if (low, count) == (0, one.shape[axis]):
        return one
    inner = one.fold[axis][1:]
    unit = prod(inner)
    if low % unit or count % unit:
        return take(unfolded(one, axis), axis, low, count)
    dim, begin, end = _dim(one, axis), low // unit, (low + count) // unit
    pieces = []
    for place, part in one.pieces:
        offset = part.offsets[dim]
        start, stop = max(begin, offset), min(end, offset + part.sizes[dim])
        if start < stop:
            moved = _moved(part, dim, start - offset)
            cut = replace(
                moved, offsets=_put(part.offsets, dim, start - begin), sizes=_put(part.sizes, dim, stop - start)
            )
            pieces.append(ViewPiece(place, cut))
    return Assembly(_put(one.shape, axis, count), tuple(pieces), _put(one.fold, axis, (end - begin, *inner)))


def concatenated(parts: Sequence[Assembly], axis: int) -> Assembly:
    """Return assemblies one behind the other along an axis."""
    parts = _alike(parts, [axis])
    first = parts[0]
    dim, inner = _dim(first, axis), first.fold[axis][1:]
    pieces: list[ViewPiece] = []
    end = 0
    for part in parts:
        pieces += (
            ViewPiece(place, replace(one, offsets=_put(one.offsets, dim, one.offsets[dim] + end)))
            for place, one in part.pieces
        )
        end += part.fold[axis][0]
    return Assembly(_put(first.shape, axis, end * prod(inner)), tuple(pieces), _put(first.fold, axis, (end, *inner)))


def stacked(parts: Sequence[Assembly], axis: int) -> Assembly:
    """Return assemblies of one shape with a new axis."""
    parts = _alike(parts)
    first = parts[0]
    dim = _dim(first, axis)
    pieces = []
    for number, part in enumerate(parts):
        for place, one in part.pieces:
            inserted = Slice(
                _insert(one.offsets, dim, number),
                _insert(one.sizes, dim, 1),
                one.start,
                _insert(one.dims, dim, NOWHERE),
                _insert(one.steps, dim, 1),
            )
            pieces.append(ViewPiece(place, inserted))
    return Assembly(_insert(first.shape, axis, len(parts)), tuple(pieces), _insert(first.fold, axis, (len(parts),)))


def index(one: Assembly, axis: int, number: int) -> Assembly:
    """Return what is at one index of an axis, without the axis."""
    part = take(unfolded(one, axis), axis, number, 1)
    dim = _dim(part, axis)
    pieces = tuple(
        ViewPiece(
            place, Slice(_drop(s.offsets, dim), _drop(s.sizes, dim), s.start, _drop(s.dims, dim), _drop(s.steps, dim))
        )
        for place, s in part.pieces
    )
    return Assembly(_drop(part.shape, axis), pieces, _drop(part.fold, axis))


def transposed(one: Assembly, a: int, b: int) -> Assembly:
    """Return the assembly with two axes in each other's place."""
    axes = _exchanged([*range(len(one.shape))], a, b)
    dims = [_dim(one, axis) + k for axis in axes for k in range(len(one.fold[axis]))]
    shape, fold = tuple(one.shape[axis] for axis in axes), tuple(one.fold[axis] for axis in axes)
    return Assembly(shape, _ordered(one.pieces, dims), fold)


def zeros(shape: Ints) -> Assembly:
    """Return an assembly of zeros."""
    empty: Ints = ()
    part = Slice((0,) * len(shape), shape, empty, (NOWHERE,) * len(shape), (1,) * len(shape))
    return Assembly(shape, (ViewPiece(ZEROS, part),), plain(shape))


# Folding --------------------------------------------------------------------------------------------------------------


def folded(one: Assembly, axis: int, sizes: Ints) -> Assembly:
    """Return the same assembly with several dimensions in place of an axis."""
    one = unfolded(one, axis)
    dim, inner = _dim(one, axis), boxes.row_major(sizes)
    pieces = []
    for place, part in one.pieces:
        low, step = part.offsets[dim], part.steps[dim]
        for box, at in boxes.flat_range(sizes, low, low + part.sizes[dim]):
            moved = _moved(part, dim, at)
            cut = Slice(
                (*part.offsets[:dim], *box[0], *part.offsets[dim + 1 :]),
                (*part.sizes[:dim], *box[1], *part.sizes[dim + 1 :]),
                moved.start,
                (*part.dims[:dim], *(part.dims[dim],) * len(sizes), *part.dims[dim + 1 :]),
                (*part.steps[:dim], *(step * stride for stride in inner), *part.steps[dim + 1 :]),
            )
            pieces.append(ViewPiece(place, cut))
    return Assembly(one.shape, tuple(pieces), _put(one.fold, axis, sizes))


def unfolded(one: Assembly, axis: int) -> Assembly:
    """Return the same assembly with one dimension for an axis, and as many more pieces."""
    sizes = one.fold[axis]
    if len(sizes) == 1:
        return one
    dim, inner = _dim(one, axis), boxes.row_major(sizes)
    last = dim + len(sizes) - 1
    pieces = []
    for place, part in one.pieces:
        for at in product(*map(range, part.sizes[dim:last])):
            start = part.start
            for k, number in enumerate(at):
                start = _moved(replace(part, start=start), dim + k, number).start
            where = sum((o + i) * s for o, i, s in zip(part.offsets[dim:last], at, inner, strict=False))
            cut = Slice(
                (*part.offsets[:dim], where + part.offsets[last], *part.offsets[last + 1 :]),
                (*part.sizes[:dim], *part.sizes[last:]),
                start,
                (*part.dims[:dim], *part.dims[last:]),
                (*part.steps[:dim], *part.steps[last:]),
            )
            pieces.append(ViewPiece(place, cut))
    return Assembly(one.shape, tuple(pieces), _put(one.fold, axis, (one.shape[axis],)))


def _alike(parts: Sequence[Assembly], joined: Sequence[int] = ()) -> Sequence[Assembly]:
    """Return assemblies with the same fold, the outermost dimension of the axes `joined` aside."""
    for axis in range(len(parts[0].shape)):
        outer = 1 if axis in joined else 0
        inner = {part.fold[axis][outer:] for part in parts}
        if len(inner) > 1:
            # One of them only folds, and the others may as well: the value beside query and key.
            ways = [way for way in inner if len(way) > 1 - outer]
            size = prod(ways[0])
            if len(ways) == 1 and not any(part.shape[axis] % size for part in parts):
                parts = [
                    part
                    if part.fold[axis][outer:] == ways[0]
                    else folded(part, axis, (*(part.shape[axis] // size,) * outer, *ways[0]))
                    for part in parts
                ]
            else:
                parts = [unfolded(part, axis) for part in parts]
    return parts


def _dim(one: Assembly, axis: int) -> int:
    """Return the first dimension of the pieces for an axis."""
    return sum(map(len, one.fold[:axis]))


def _moved(part: Slice, dim: int, by: int) -> Slice:
    """Return a slice that starts some indexes later along a dimension of its box."""
    of = part.dims[dim]
    if of == NOWHERE or not by:
        return part
    return replace(part, start=_put(part.start, of, part.start[of] + by * part.steps[dim]))


def _ordered(pieces: Iterable[ViewPiece], dims: Sequence[int]) -> tuple[ViewPiece, ...]:
    """Return pieces with their dimensions in another order."""

    def put(values: Ints) -> Ints:
        return tuple(values[dim] for dim in dims)

    return tuple(
        ViewPiece(place, Slice(put(s.offsets), put(s.sizes), s.start, put(s.dims), put(s.steps))) for place, s in pieces
    )


def _exchanged(values: list[_T], a: int, b: int) -> list[_T]:
    values[a], values[b] = values[b], values[a]
    return values


def _put(values: tuple[_T, ...], axis: int, value: _T) -> tuple[_T, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _insert(values: tuple[_T, ...], axis: int, value: _T) -> tuple[_T, ...]:
    return (*values[:axis], value, *values[axis:])


def _drop(values: tuple[_T, ...], axis: int) -> tuple[_T, ...]:
    return (*values[:axis], *values[axis + 1 :])


# Operations -----------------------------------------------------------------------------------------------------------

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
        rest = {_drop(one.shape, self.axis) for one in row}
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
        one = folded(one, self.axis, (size // head, *pairs))
        dim = sum(map(len, one.fold[: self.axis])) + 1
        dims = _exchanged([*range(sum(map(len, one.fold)))], dim, dim + 1)
        return Assembly(one.shape, _ordered(one.pieces, dims), _put(one.fold, self.axis, (size // head, *pairs[::-1])))

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
            more = zeros(_put(one.shape, self.axis, size - before))
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
