"""Index operations and maps of them against numpy: what they make of numbered elements, and how they are undone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise, product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.catalogue.boxes import Ints, row_major
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Extent, File, Part, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import UsageError
from ckpttool.layout import key_maps
from ckpttool.layout.assemblies import Assembly
from ckpttool.layout.index_operations import (
    Concat,
    Operation,
    Pad,
    Rows,
    Split,
    Stack,
    Transpose,
    Trim,
    Unstack,
    parse_operation,
)
from ckpttool.layout.views import Viewed
from ckpttool.storage.files import Pool
from ckpttool.transfer import read

Array = np.ndarray[Any, np.dtype[Any]]


def evaluated(one: Assembly, sources: list[Array]) -> Array:
    """The elements that an assembly says, each of which must come from one piece."""
    assert tuple(int(np.prod(sizes)) for sizes in one.fold) == one.shape
    found = np.full([size for sizes in one.fold for size in sizes], -7)
    for place, part in one.pieces:
        for at in np.ndindex(*part.sizes):
            target = tuple(o + i for o, i in zip(part.offsets, at, strict=True))
            assert found[target] == -7
            index = list(part.start)
            for i, dim, step in zip(at, part.dims, part.steps, strict=True):
                if dim >= 0:
                    index[dim] += i * step
            found[target] = 0 if place < 0 else sources[place][tuple(index)]
    assert (found != -7).all()
    return found.reshape(one.shape)


def numbered(shapes: list[Ints]) -> list[Array]:
    """Arrays of which no two elements are the same."""
    starts = np.cumsum([1, *(int(np.prod(shape)) for shape in shapes)])
    return [np.arange(a, a + int(np.prod(s))).reshape(s) for a, s in zip(starts, shapes, strict=False)]


Row = dict[Ints, Array]
"""The arrays of a name by the numbers that it has."""


def permuted(one: Array, to: str, head: int, axis: int) -> Array:
    pairs = (head // 2, 2) if to == "halves" else (2, head // 2)
    before, after = one.shape[:axis], one.shape[axis + 1 :]
    heads = one.reshape(*before, one.shape[axis] // head, *pairs, *after)
    return heads.swapaxes(axis + 1, axis + 2).reshape(one.shape)


def by_numpy(operation: Operation, table: list[Row], rows: int) -> list[Row]:
    match operation:
        case Stack(axis):
            return [
                {
                    at: np.stack([one for numbers, one in sorted(row.items()) if numbers[:-1] == at], axis)
                    for at in dict.fromkeys(numbers[:-1] for numbers in row)
                }
                for row in table
            ]
        case Unstack(axis):
            return [
                {(*at, k): np.take(one, k, axis) for at, one in row.items() for k in range(one.shape[axis])}
                for row in table
            ]
        case Concat(axis, _, int() as groups):
            joined = {}
            for at in table[0]:
                parts = zip(*(np.split(row[at], groups, axis) for row in table), strict=True)
                joined[at] = np.concatenate([part for group in parts for part in group], axis)
            return [joined]
        case Split(axis, parts, int() as groups):
            result: list[Row] = [{} for _ in range(rows)]
            ratio = [int(part) for part in parts] or [1] * rows
            for at, one in table[0].items():
                blocks = []
                for block in np.split(one, groups, axis):
                    unit = block.shape[axis] // sum(ratio)
                    blocks.append(np.split(block, np.cumsum(ratio)[:-1] * unit, axis))
                for into, pieces in zip(result, zip(*blocks, strict=True), strict=True):
                    into[at] = np.concatenate(pieces, axis)
            return result
    changed = [{at: changed_by_numpy(operation, one) for at, one in row.items()} for row in table]
    if isinstance(operation, Rows) and operation.parts:
        return [
            new if part in operation.parts else old for part, (old, new) in enumerate(zip(table, changed, strict=True))
        ]
    return changed


def changed_by_numpy(operation: Operation, one: Array) -> Array:
    match operation:
        case Transpose(a, b):
            return np.swapaxes(one, a, b)
        case Rows(to, int() as head, axis, None):
            return permuted(one, to, head, axis)
        case Rows(to, _, axis, int() as heads):
            return permuted(one, to, one.shape[axis] // heads, axis)
        case Trim(axis, int() as size, _):
            return np.take(one, range(size), axis)
        case Pad(axis, int() as size, _):
            return np.pad(one, [(0, size - n if d == axis else 0) for d, n in enumerate(one.shape)])
    raise AssertionError(operation)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[dict[Ints, Ints]], list[tuple[Operation, int]]]:
    """The shapes of a table of tensors, and operations that fit one after the other."""
    head = 2 * draw(st.integers(1, 4))  # from 6 on, the two orders of rows are not the same permutation
    shape = (head * draw(st.integers(1, 2)), *draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    stacks = draw(st.lists(st.integers(1, 3), max_size=2))
    names = draw(st.integers(1, 3))
    shapes = [dict.fromkeys(np.ndindex(*stacks), shape) for _ in range(names)]
    table = [{at: np.zeros(one) for at, one in row.items()} for row in shapes]
    operations: list[tuple[Operation, int]] = []

    def do(operation: Operation, rows: int) -> None:
        operations.append((operation, rows))
        table[:] = by_numpy(operation, table, rows)

    def maybe_rows() -> None:
        axes = [axis for axis, n in enumerate(size()) if n % head == 0]
        if draw(st.booleans()) and axes:
            parts = tuple(draw(st.sets(st.integers(0, len(table) - 1))))
            heads, order = draw(st.sampled_from([None, 1])), draw(st.sampled_from(["halves", "neighbours"]))
            do(
                Rows(order, head if heads is None else "head_dim", draw(st.sampled_from(axes)), heads, parts),
                len(table),
            )

    def size() -> Ints:
        return next(iter(table[0].values())).shape

    maybe_rows()
    for _ in stacks:
        do(Stack(draw(st.integers(0, len(size())))), names)
    if names > 1:
        axis = draw(st.integers(0, len(size()) - 1))
        do(Concat(axis, (), draw(st.sampled_from([n for n in (1, 2, 3) if size()[axis] % n == 0]))), 1)
    for _ in range(draw(st.integers(0, 3))):
        a, b = (*draw(st.permutations(range(len(size())))), 0)[:2]
        choices: list[Operation] = [Transpose(a, b)] if len(size()) > 1 else []
        choices += [Pad(0, size()[0] + 2, size()[0])]
        choices += [Trim(0, size()[0], size()[0])]
        do(draw(st.sampled_from(choices)), 1)
        maybe_rows()
    ways = [(axis, n, g) for axis, s in enumerate(size()) for n in (2, 3) for g in (1, 2) if s % (n * g) == 0]
    if draw(st.booleans()) and ways:
        axis, n, groups = draw(st.sampled_from(ways))
        do(Split(axis, (1,) * n, groups), n)
        maybe_rows()
    for _ in range(draw(st.integers(0, min(2, len(size()) - 1)))):
        do(Unstack(draw(st.integers(0, len(size()) - 1))), len(table))
    return shapes, operations


@settings(max_examples=150)
@given(steps())
def test_operations_are_those_of_numpy_and_their_inverses_undo_them(made: Any) -> None:
    shapes, operations = made
    arrays = numbered([shape for row in shapes for shape in row.values()])
    numbers = iter(range(len(arrays)))
    start = [{at: Assembly.of(next(numbers), shape) for at, shape in row.items()} for row in shapes]
    table, expected = start, [{at: arrays[one.pieces[0].tensor] for at, one in row.items()} for row in start]
    rows_before = []
    for operation, rows in operations:
        rows_before.append(len(table))
        table, expected = operation.apply(table, {}, rows), by_numpy(operation, expected, rows)
    for row, expected_row in zip(table, expected, strict=True):
        assert [*row] == [*expected_row]
        for at, one in row.items():
            assert one.shape == expected_row[at].shape and np.array_equal(evaluated(one, arrays), expected_row[at])
    for (operation, _), rows in zip(reversed(operations), reversed(rows_before), strict=True):
        table = operation.inverse.apply(table, {}, rows)
    assert len(table) == len(start)
    for row, before in zip(table, start, strict=True):
        assert [*row] == [*before]
        for at, one in row.items():
            assert np.array_equal(evaluated(one, arrays), arrays[before[at].pieces[0].tensor])


@pytest.mark.parametrize(
    "data",
    [
        {"stack": 0}, {"unstack": 1}, {"transpose": [0, 2]}, {"rows": "halves"}, {"rows": "neighbours"},
        {"rows": {"to": "halves", "head_dim": 64}}, {"concat": 1}, {"split": 0},
        {"split": {"axis": 0, "parts": [4, 1, 1], "groups": "num_key_value_heads"}},
        {"concat": {"axis": 1, "parts": [1, 1]}}, {"trim": {"axis": 0, "size": 50257, "from": 50304}},
        {"pad": {"axis": 0, "size": 50304}}, {"rows": {"to": "neighbours", "axis": 1, "parts": [0, 1]}},
        {"rows": {"to": "halves", "heads": "vision_config.num_attention_heads"}},
    ],
)  # fmt: skip
def test_an_operation_is_written_as_it_is_read(data: Any) -> None:
    operation = parse_operation(data)
    assert operation is not None and json.loads(json.dumps({operation.name: operation.data()})) == data


@pytest.mark.parametrize(
    "data",
    [
        {"stack": -1}, {"stack": True}, {"transpose": [0, 0]}, {"transpose": 1}, {"rows": "thirds"}, {"split": "0"},
        {"split": {"axis": 0, "parts": [0]}}, {"split": {"axis": 0, "more": 1}}, {"trim": {"axis": 0}}, {}, [], "rows",
        {"stack": 0, "unstack": 0}, {"scale": 2}, {"rows": {"to": "halves", "head_dim": "a b"}},
        {"rows": {"to": "halves", "head_dim": 2, "heads": 2}}, {"rows": {"to": "halves", "parts": [-1]}},
        {"rows": {"to": "halves", "heads": "a..b"}}, {"rows": {"to": "halves", "parts": 1}},
    ],
)  # fmt: skip
def test_what_is_no_operation(data: Any) -> None:
    assert parse_operation(data) is None


# Maps -----------------------------------------------------------------------------------------------------------------


class Sharded(Source):
    """A source of tensors in memory, each cut into a grid of shards at places of chance."""

    def __init__(self, arrays: Mapping[str, Array], seed: int) -> None:
        self.catalogue = Catalogue("dcp", [File("/x", "x", 1 << 20)])
        self.memory: dict[int, int] = {}
        place, random = 0, Random(seed)
        for name, array in arrays.items():
            chunks = []
            ranges = []
            for size in array.shape:
                cuts = sorted(random.sample(range(1, size), min(random.randrange(3), size - 1)) if size > 1 else [])
                ranges.append([*pairwise([0, *cuts, size])])
            for box in product(*ranges):
                part = array[tuple(slice(*one) for one in box)]
                offsets = tuple(low for low, _ in box)
                chunks.append(Chunk(offsets, part.shape, Extent(0, place, part.size * 4)))
                self.memory |= {place + 4 * i: int(value) for i, value in enumerate(part.reshape(-1))}
                place += part.size * 4
            path = (name,)
            self.catalogue.entries[path] = Tensor(
                path, DTYPES["float32"], array.shape, Chunks.of(chunks), part=Part("model", ())
            )

    def close(self) -> None:
        """Nothing is open."""

    def read(self, viewed: Viewed, tensor: Tensor) -> Array:
        """The elements of a view, by where its chunks lie in the shards."""
        origin = tensor.origin or tensor
        found = np.full(tensor.shape, -7)
        for chunk in origin.chunks:
            extent = viewed.resolve(origin, chunk)
            self.fill(found[tuple(slice(o, o + n) for o, n in zip(*chunk[:2], strict=True))], extent)
        assert (found != -7).all()
        return found

    def fill(self, target: Array, extent: Extent) -> None:
        """Fill a view of an array with what lies at an extent."""
        assert (target == -7).all()
        if extent.weave is not None:
            folded = target.reshape([size for sizes in extent.weave.fold for size in sizes])
            assert np.shares_memory(folded, target)
            for (offsets, sizes), part in extent.weave.parts:
                self.fill(folded[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))], part)
            return
        strides = extent.strides or row_major(target.shape)
        for at in np.ndindex(*target.shape):
            place = extent.offset + 4 * sum(i * s for i, s in zip(at, strides, strict=True))
            target[at] = 0 if "zero" in extent.codec else self.memory[place]


class Shards(Pool):
    """The shards as a file."""

    def __init__(self, source: Sharded) -> None:
        super().__init__()
        values = [source.memory[place] for place in range(0, 4 * len(source.memory), 4)]
        self.data = np.array(values, np.uint32).tobytes()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        assert offset >= 0 and offset + len(buffer) <= len(self.data)
        buffer[:] = self.data[offset : offset + len(buffer)]


@settings(max_examples=60)
@given(steps(), st.integers(0, 99), st.data())
def test_any_box_of_a_view_is_read_from_shards(made: Any, seed: int, data: st.DataObject) -> None:
    shapes, operations = made
    arrays = numbered([shape for row in shapes for shape in row.values()])
    source = Sharded({str(number): array for number, array in enumerate(arrays)}, seed)
    viewed, pool, tensors = Viewed(source), Shards(source), [*source.catalogue.tensors]
    numbers = iter(range(len(arrays)))
    table = [{at: Assembly.of(next(numbers), shape) for at, shape in row.items()} for row in shapes]
    expected = [{at: arrays[one.pieces[0].tensor] for at, one in row.items()} for row in table]
    for operation, rows in operations:
        table, expected = operation.apply(table, {}, rows), by_numpy(operation, expected, rows)
    which = data.draw(st.integers(0, len(table) - 1))
    at = data.draw(st.sampled_from([*table[which]]))
    one, wanted = table[which][at], expected[which][at]
    seen = viewed.view(tensors, ("seen",), one.shape, one.pieces, one.fold)
    for _ in range(3):
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in one.shape)
        sizes = tuple(data.draw(st.integers(1, size - low)) for size, low in zip(one.shape, offsets, strict=True))
        found = read.read_box((offsets, sizes), seen, viewed, pool)
        within = tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
        assert np.array_equal(found, wanted[within])


RULES = [
    {"from": "h.{n}.up", "to": "l.{n}.w1"},
    {"from": "h.{n}.moe.{e}.gate", "to": "l.{n}.gates"},
    {"from": ["h.{n}.x.{e}.a", "h.{n}.x.{e}.b"], "to": "l.{n}.ab"},
    {"from": "h.{n}.qkv", "to": ["l.{n}.q", "l.{n}.k", "l.{n}.v"],
     "operations": [{"split": {"axis": 0, "parts": ["heads", "kv", "kv"], "groups": "kv"}}]},
    {"from": "h.{n}.rot", "to": "l.{n}.rot", "operations": [{"transpose": [0, 1]}, {"rows": "halves"}]},
    {"from": "all", "to": "l.{n}.one", "operations": [{"unstack": 1}]},
    {"from": "emb", "to": "embed", "operations": [{"pad": {"axis": 0, "size": 9, "from": 7}}]},
    {"from": "layers.{l}.experts.{e}.down", "to": "experts.down", "operations": [{"stack": 0}, {"stack": 0}]},
    {"from": "layers.{l}.experts.{e}.up", "to": "experts.up", "operations": [{"stack": 0}, {"stack": 1}]},
    {"from": ["layers.{l}.x.{e}.a", "layers.{l}.x.{e}.b"], "to": "x"},
    {"from": "stacked", "to": "of.{e}.layer.{l}", "operations": [{"unstack": 2}, {"unstack": 0}]},
    {"from": "group.{n}.linear_qkv", "to": ["l.{n}.q_proj", "l.{n}.k_proj", "l.{n}.v_proj"],
     "operations": [{"split": {"axis": 0, "parts": ["heads", "kv", "kv"], "groups": "kv"}},
                    {"rows": {"to": "halves", "parts": [0, 1]}}]},
    {"from": "p.{n}.qkv", "to": "l.{n}.query_key_value",
     "operations": [{"split": {"axis": 0, "parts": ["heads", "kv", "kv"]}},
                    {"rows": {"to": "halves", "parts": [0, 1]}},
                    {"concat": {"axis": 0, "parts": ["heads", "kv", "kv"], "groups": "kv"}}]},
    {"from": "p.{n}.gates", "to": "l.{n}.interleaved",
     "operations": [{"split": 1}, {"concat": {"axis": 1, "parts": 2, "groups": 3}}]},
    {"from": "top.{rest*}", "to": "{rest*}"},
]  # fmt: skip
FACTS = {"heads": 4, "kv": 2, "head_dim": 8}


def model() -> dict[str, Array]:
    shapes: dict[str, Ints] = {"emb": (7, 3), "all": (3, 2, 2), "stacked": (2, 4, 3), "top.a.{": (2, 2)}
    for n in range(2):
        shapes |= {f"h.{n}.up": (5, 2), f"h.{n}.qkv": (16, 3), f"h.{n}.rot": (3, 8)}
        for e in range(3):
            shapes |= {f"h.{n}.moe.{e}.gate": (2, 4), f"h.{n}.x.{e}.a": (2, 3), f"h.{n}.x.{e}.b": (2, 3)}
        shapes |= {f"group.{n}.linear_qkv": (64, 3), f"p.{n}.qkv": (64, 3), f"p.{n}.gates": (2, 6)}
        for e in range(3):
            shapes |= {f"layers.{n}.experts.{e}.down": (2, 4), f"layers.{n}.experts.{e}.up": (4, 2)}
            shapes |= {f"layers.{n}.x.{e}.a": (2, 3), f"layers.{n}.x.{e}.b": (2, 3)}
    return dict(zip(shapes, numbered([*shapes.values()]), strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_a_map_and_its_inverse(seed: int) -> None:
    keymap = key_maps.parse({"format": 2, "name": "x", "rules": RULES}, "x")
    assert key_maps.parse(json.loads(json.dumps(keymap.data())), "x") == keymap
    arrays = model()
    source = Sharded(arrays, seed)
    viewed = Viewed(source)
    mapped, unknown = key_maps.apply(keymap, source.catalogue, viewed, FACTS)
    found = {tensor.name: source.read(viewed, tensor) for tensor in mapped.tensors}
    assert not unknown
    for n in range(2):
        assert np.array_equal(found[f"l.{n}.w1"], arrays[f"h.{n}.up"])
        assert np.array_equal(found[f"l.{n}.gates"], np.stack([arrays[f"h.{n}.moe.{e}.gate"] for e in range(3)]))
        both = [np.concatenate([arrays[f"h.{n}.x.{e}.{which}"] for which in "ab"]) for e in range(3)]
        assert np.array_equal(found[f"l.{n}.ab"], np.stack(both))
        blocks = arrays[f"h.{n}.qkv"].reshape(2, 4, 2, 3)
        assert np.array_equal(found[f"l.{n}.q"], blocks[:, :2].reshape(8, 3))
        assert np.array_equal(found[f"l.{n}.v"], blocks[:, 3].reshape(4, 3))
        halves = arrays[f"h.{n}.rot"].T.reshape(1, 4, 2, 3).swapaxes(1, 2).reshape(8, 3)
        assert np.array_equal(found[f"l.{n}.rot"], halves)
        assert np.array_equal(found[f"l.{n}.one"], arrays["all"][:, n])
    pairs = [*product(range(2), range(3))]
    for name in ("down", "up"):
        experts = np.array([[arrays[f"layers.{n}.experts.{e}.{name}"] for e in range(3)] for n in range(2)])
        assert np.array_equal(found[f"experts.{name}"], experts if name == "down" else experts.swapaxes(0, 1))
    parts = [np.concatenate([arrays[f"layers.{n}.x.{e}.{which}"] for which in "ab"]) for n, e in pairs]
    assert np.array_equal(found["x"], np.array(parts).reshape(2, 3, 4, 3))
    assert all(np.array_equal(found[f"of.{e}.layer.{n}"], arrays["stacked"][n, :, e]) for n, e in pairs)
    for n in range(2):
        heads = arrays[f"group.{n}.linear_qkv"].reshape(2, 4, 8, 3)
        q, k = (permuted(heads[:, at].reshape(-1, 3), "halves", 8, 0) for at in (slice(0, 2), 2))
        assert np.array_equal(found[f"l.{n}.q_proj"], q) and np.array_equal(found[f"l.{n}.k_proj"], k)
        assert np.array_equal(found[f"l.{n}.v_proj"], heads[:, 3].reshape(-1, 3))
        q, k, v = np.split(arrays[f"p.{n}.qkv"], [32, 48])
        parts = (permuted(q, "halves", 8, 0), permuted(k, "halves", 8, 0), v)
        heads = np.concatenate([part.reshape(2, -1, 3) for part in parts], 1)
        assert np.array_equal(found[f"l.{n}.query_key_value"], heads.reshape(64, 3))
        assert np.array_equal(found[f"l.{n}.interleaved"], arrays[f"p.{n}.gates"][:, [0, 3, 1, 4, 2, 5]])
    assert np.array_equal(found["embed"], np.pad(arrays["emb"], ((0, 2), (0, 0)))) and "a.{" in found
    back = Sharded(found, seed + 100)
    again = Viewed(back)
    restored, unknown = key_maps.apply(keymap.inverse, back.catalogue, again, FACTS)
    assert {tensor.name for tensor in restored.tensors} == arrays.keys() and not unknown
    assert all(np.array_equal(back.read(again, tensor), arrays[tensor.name]) for tensor in restored.tensors)


@pytest.mark.parametrize(
    ("rule", "without", "why"),
    [
        (RULES[1], ["h.1.moe.1.gate"], "there is no `h.1.moe.1.gate`, from which `l.{n}.gates` is made"),
        (RULES[2], ["h.0.x.2.b"], "there is no `h.0.x.2.b`"),
        (RULES[7], ["layers.1.experts.1.down"], "there is no `layers.1.experts.1.down`"),
        (
            {"from": "h.{n}.up", "to": "a.{n}", "operations": [{"rows": {"to": "halves", "parts": [1]}}]},
            [],
            "no part 1 of 1",
        ),
        ({"from": "emb", "to": "a", "operations": [{"rows": {"to": "halves", "heads": 2}}]}, [], "of 2 heads"),
        ({"from": "emb", "to": "a", "operations": [{"rows": {"to": "halves", "axis": 1}}]}, [], "those of axis 1 of a"),
        ({"from": "emb", "to": ["a", "b"]}, [], r"`emb` \[7, 3\] to `a`: a tensor of shape \[7, 3\] cannot be split"),
        ({"from": ["emb", "h.0.up"], "to": "a"}, [], r"tensors of shapes \[7, 3\] and \[5, 2\] cannot be joined"),
        ({"from": "h.0.up", "to": "a", "operations": [{"rows": "halves"}]}, [], "not a multiple of 8, those of a head"),
        ({"from": "emb", "to": "a", "operations": [{"rows": {"to": "halves", "head_dim": "dim"}}]}, [], "`dim` of the"),
        ({"from": "emb", "to": "a", "operations": [{"transpose": [0, 2]}]}, [], "has no axis 2"),
        ({"from": "emb", "to": "a", "operations": [{"trim": {"axis": 0, "size": 9}}]}, [], "cannot be trimmed to 9"),
        ({"from": "emb", "to": "a", "operations": [{"pad": {"axis": 0, "size": 9, "from": 8}}]}, [], "not 8"),
        ({"from": "emb", "to": "h.0.up"}, [], "would both be called `h.0.up`"),
    ],
)
def test_what_does_not_fit_is_said(rule: Any, without: list[str], why: str) -> None:
    keymap = key_maps.parse({"name": "x", "rules": [rule]}, "x")
    source = Sharded({name: array for name, array in model().items() if name not in without}, 2)
    with pytest.raises(UsageError, match=why):
        key_maps.apply(keymap, source.catalogue, Viewed(source), FACTS)


@pytest.mark.parametrize(
    ("targets", "steps"),
    [
        ("b", [{"split": 0}, {"concat": 0}]),
        (["b", "c"], [{"split": {"axis": 0, "parts": 2}}, {"concat": 0}]),
        ("b", [{"split": {"axis": 0, "parts": 2}}, {"concat": 0}, {"stack": 0}]),
    ],
)
def test_parts_that_are_joined_again_are_counted(targets: Any, steps: list[Any]) -> None:
    """Nothing says how many the first are, and one tensor has no two names."""
    with pytest.raises(UsageError, match="is not a rule"):
        key_maps.parse({"name": "x", "rules": [{"from": "a", "to": targets, "operations": steps}]}, "x")


@pytest.mark.parametrize(
    "rule", [{"from": "a", "to": None}, {"from": "a", "to": "b", "operations": [{"trim": {"axis": 0, "size": 2}}]}]
)
def test_what_cannot_be_undone(rule: Any) -> None:
    with pytest.raises(UsageError, match="cannot be undone"):
        _ = key_maps.parse({"name": "x", "rules": [rule]}, "x").inverse


def test_tensors_of_two_dtypes_are_not_joined() -> None:
    source = Sharded(model(), 1)
    path = ("h.0.x.1.b",)
    tensor = source.catalogue.tensor(path)
    source.catalogue.entries[path] = Tensor(path, DTYPES["int32"], tensor.shape, tensor.chunks, part=tensor.part)
    keymap = key_maps.parse({"name": "x", "rules": [RULES[2]]}, "x")
    with pytest.raises(UsageError, match="cannot be built from tensors of float32 and int32"):
        key_maps.apply(keymap, source.catalogue, Viewed(source), FACTS)
