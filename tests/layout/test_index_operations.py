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
from ckpttool.errors import UsageError
from ckpttool.layout import key_maps
from ckpttool.layout.index_operations import (
    Assembly,
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

Array = np.ndarray[Any, np.dtype[Any]]


def evaluated(one: Assembly, sources: list[Array]) -> Array:
    """The elements that an assembly says, each of which must come from one piece."""
    found = np.full(one.shape, -7)
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
    return found


def numbered(shapes: list[Ints]) -> list[Array]:
    """Arrays of which no two elements are the same."""
    starts = np.cumsum([1, *(int(np.prod(shape)) for shape in shapes)])
    return [np.arange(a, a + int(np.prod(s))).reshape(s) for a, s in zip(starts, shapes, strict=False)]


def by_numpy(operation: Operation, table: list[list[Array]], rows: int) -> list[list[Array]]:
    match operation:
        case Stack(axis):
            return [[np.stack(row, axis)] for row in table]
        case Unstack(axis):
            return [[np.take(row[0], k, axis) for k in range(row[0].shape[axis])] for row in table]
        case Transpose(a, b):
            return [[np.swapaxes(one, a, b) for one in row] for row in table]
        case Concat(axis, _, int() as groups):
            columns = [[np.split(one, groups, axis) for one in column] for column in zip(*table, strict=True)]
            return [[np.concatenate([part for g in zip(*c, strict=True) for part in g], axis) for c in columns]]
        case Split(axis, parts, int() as groups):
            result: list[list[Array]] = [[] for _ in range(rows)]
            ratio = [int(part) for part in parts] or [1] * rows
            for one in table[0]:
                blocks = []
                for block in np.split(one, groups, axis):
                    unit = block.shape[axis] // sum(ratio)
                    blocks.append(np.split(block, np.cumsum(ratio)[:-1] * unit, axis))
                for into, pieces in zip(result, zip(*blocks, strict=True), strict=True):
                    into.append(np.concatenate(pieces, axis))
            return result
        case Rows(to, int() as head):

            def permuted(one: Array) -> Array:
                pairs = (head // 2, 2) if to == "halves" else (2, head // 2)
                return one.reshape(-1, *pairs, *one.shape[1:]).swapaxes(1, 2).reshape(one.shape)

            return [[permuted(one) for one in row] for row in table]
        case Trim(axis, int() as size, _):
            return [[np.take(one, range(size), axis) for one in row] for row in table]
        case Pad(axis, int() as size, _):
            widths = [
                [(0, size - n if d == axis else 0) for d, n in enumerate(one.shape)] for row in table for one in row
            ]
            return [[np.pad(one, widths[0]) for one in row] for row in table]
    raise AssertionError(operation)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[Ints]], list[tuple[Operation, int]]]:
    """The shapes of a table of tensors, and up to five operations that fit one after the other."""
    head = 2 * draw(st.integers(1, 4))  # from 6 on, the two orders of rows are not the same permutation
    shape = (head * draw(st.integers(1, 2)), *draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    stack = draw(st.integers(0, 3))
    names = draw(st.integers(1, 3))
    shapes = [[shape] * max(stack, 1) for _ in range(names)]
    table = [[np.zeros(one) for one in row] for row in shapes]
    operations: list[tuple[Operation, int]] = []
    if stack:
        operations.append((Stack(draw(st.integers(0, len(shape)))), names))
    if names > 1:
        axis = draw(st.integers(0, len(shape)))
        width = [*by_numpy(operations[0][0], table, 1)[0][0].shape] if stack else [*shape]
        axis = min(axis, len(width) - 1)
        groups = draw(st.sampled_from([n for n in (1, 2, 3) if width[axis] % n == 0]))
        operations.append((Concat(axis, (), groups), 1))
    for operation, rows in operations:
        table = by_numpy(operation, table, rows)
    for _ in range(draw(st.integers(0, 3))):
        size = table[0][0].shape
        axes = draw(st.permutations(range(len(size))))[:2]
        choices: list[Operation] = [Transpose(axes[0], axes[1])] if len(size) > 1 else []
        choices += [Rows(draw(st.sampled_from(["halves", "neighbours"])), head)] if size[0] % head == 0 else []
        choices += [Pad(0, size[0] + 2, size[0])]
        choices += [Trim(0, size[0], size[0])]
        operation = draw(st.sampled_from(choices))
        operations.append((operation, 1))
        table = by_numpy(operation, table, 1)
    size = table[0][0].shape
    ways = [(axis, n, g) for axis, s in enumerate(size) for n in (2, 3) for g in (1, 2) if s % (n * g) == 0]
    if ways and draw(st.booleans()):
        axis, n, groups = draw(st.sampled_from(ways))
        operations.append((Split(axis, (1,) * n, groups), n))
        table = by_numpy(operations[-1][0], table, n)
    if len(size) > 1 and draw(st.booleans()):
        operations.append((Unstack(draw(st.integers(0, len(size) - 1))), len(table)))
    return shapes, operations


@settings(deadline=None, max_examples=150)
@given(steps())
def test_operations_are_those_of_numpy_and_their_inverses_undo_them(made: Any) -> None:
    shapes, operations = made
    flat = [shape for row in shapes for shape in row]
    arrays = numbered(flat)
    numbers = iter(range(len(flat)))
    start = [[Assembly.of(next(numbers), shape) for shape in row] for row in shapes]
    table, expected = start, [[arrays[one.pieces[0].tensor] for one in row] for row in start]
    rows_before = []
    for operation, rows in operations:
        rows_before.append(len(table))
        table, expected = operation.apply(table, {}, rows), by_numpy(operation, expected, rows)
    for row, expected_row in zip(table, expected, strict=True):
        for one, array in zip(row, expected_row, strict=True):
            assert one.shape == array.shape and np.array_equal(evaluated(one, arrays), array)
    for (operation, _), rows in zip(reversed(operations), reversed(rows_before), strict=True):
        table = operation.inverse.apply(table, {}, rows)
    assert len(table) == len(start)
    for row, before in zip(table, start, strict=True):
        for one, first in zip(row, before, strict=True):
            assert np.array_equal(evaluated(one, arrays), arrays[first.pieces[0].tensor])


@pytest.mark.parametrize(
    "data",
    [
        {"stack": 0}, {"unstack": 1}, {"transpose": [0, 2]}, {"rows": "halves"}, {"rows": "neighbours"},
        {"rows": {"to": "halves", "head_dim": 64}}, {"concat": 1}, {"split": 0},
        {"split": {"axis": 0, "parts": [4, 1, 1], "groups": "num_key_value_heads"}},
        {"concat": {"axis": 1, "parts": [1, 1]}}, {"trim": {"axis": 0, "size": 50257, "from": 50304}},
        {"pad": {"axis": 0, "size": 50304}},
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
    ],
)  # fmt: skip
def test_what_is_no_operation(data: Any) -> None:
    assert parse_operation(data) is None


# Maps -----------------------------------------------------------------------------------------------------------------


class Sharded:
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

    def resolve(self, tensor: Tensor, chunk: Chunk) -> Extent:
        return chunk.extent

    def close(self) -> None:
        """Nothing is open."""

    def read(self, viewed: Viewed, tensor: Tensor) -> Array:
        """The elements of a view, by where its chunks lie in the shards."""
        origin = tensor.origin or tensor
        found = np.full(tensor.shape, -7)
        for chunk in origin.chunks:
            extent = viewed.resolve(origin, chunk)
            strides = extent.strides or row_major(chunk.sizes)
            for at in np.ndindex(*chunk.sizes):
                target = tuple(o + i for o, i in zip(chunk.offsets, at, strict=True))
                assert found[target] == -7
                place = extent.offset + 4 * sum(i * s for i, s in zip(at, strides, strict=True))
                found[target] = 0 if "zero" in extent.codec else self.memory[place]
        assert (found != -7).all()
        return found


RULES = [
    {"from": "h.{n}.up", "to": "l.{n}.w1"},
    {"from": "h.{n}.moe.{e}.gate", "to": "l.{n}.gates"},
    {"from": ["h.{n}.x.{e}.a", "h.{n}.x.{e}.b"], "to": "l.{n}.ab"},
    {"from": "h.{n}.qkv", "to": ["l.{n}.q", "l.{n}.k", "l.{n}.v"],
     "operations": [{"split": {"axis": 0, "parts": ["heads", "kv", "kv"], "groups": "kv"}}]},
    {"from": "h.{n}.rot", "to": "l.{n}.rot", "operations": [{"transpose": [0, 1]}, {"rows": "halves"}]},
    {"from": "all", "to": "l.{n}.one", "operations": [{"unstack": 1}]},
    {"from": "emb", "to": "embed", "operations": [{"pad": {"axis": 0, "size": 9, "from": 7}}]},
    {"from": "top.{rest*}", "to": "{rest*}"},
]  # fmt: skip
FACTS = {"heads": 4, "kv": 2, "head_dim": 8}


def model() -> dict[str, Array]:
    shapes: dict[str, Ints] = {"emb": (7, 3), "all": (3, 2, 2), "top.a.{": (2, 2)}
    for n in range(2):
        shapes |= {f"h.{n}.up": (5, 2), f"h.{n}.qkv": (16, 3), f"h.{n}.rot": (3, 8)}
        for e in range(3):
            shapes |= {f"h.{n}.moe.{e}.gate": (2, 4), f"h.{n}.x.{e}.a": (2, 3), f"h.{n}.x.{e}.b": (2, 3)}
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
    assert np.array_equal(found["embed"], np.pad(arrays["emb"], ((0, 2), (0, 0)))) and "a.{" in found
    back = Sharded(found, seed + 100)
    again = Viewed(back)
    restored, unknown = key_maps.apply(keymap.inverse, back.catalogue, again, FACTS)
    assert {tensor.name for tensor in restored.tensors} == arrays.keys() and not unknown
    assert all(np.array_equal(back.read(again, tensor), arrays[tensor.name]) for tensor in restored.tensors)


@pytest.mark.parametrize(
    ("rule", "without", "why"),
    [
        (RULES[1], ["h.1.moe.1.gate"], "there is no `h.1.moe.1.gate`, of which `l.{n}.gates` is made"),
        (RULES[2], ["h.0.x.2.b"], "there is no `h.0.x.2.b`"),
        ({"from": "emb", "to": ["a", "b"]}, [], r"`emb` \[7, 3\] to `a`: a tensor of shape \[7, 3\] cannot be split"),
        ({"from": ["emb", "h.0.up"], "to": "a"}, [], r"tensors of shapes \[7, 3\] and \[5, 2\] cannot be joined"),
        ({"from": "h.0.up", "to": "a", "operations": [{"rows": "halves"}]}, [], "no multiple of 8, those of a head"),
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
    with pytest.raises(UsageError, match="cannot be made of tensors of float32 and int32"):
        key_maps.apply(keymap, source.catalogue, Viewed(source), FACTS)
