"""The catalogue: chunks in columns, lazy objects, tied tensors, and every way in which an index can lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import (
    Catalogue,
    Chunk,
    Chunks,
    Extent,
    File,
    Object,
    Part,
    Record,
    Tensor,
    Weave,
    dotted,
)
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CorruptError

numbers = st.integers(0, 1 << 62)
ints = st.lists(st.integers(0, 100), max_size=3).map(tuple)
records = st.builds(Record, st.integers(0, 9), numbers, numbers, st.none() | st.integers(0, 0xFFFFFFFF))
extents = st.builds(
    Extent, st.integers(0, 9), numbers, numbers, st.none() | ints,
    st.lists(st.sampled_from(["swap", "conj", "neg"])).map(tuple), st.none() | records, st.just(False),
    st.just(False), st.none(), st.none(),
)  # fmt: skip


@settings(max_examples=100)
@given(st.lists(st.builds(Chunk, ints, ints, extents), max_size=6))
def test_chunks_give_back_what_they_were_given(chunks: list[Chunk]) -> None:
    held = Chunks.of(chunks)
    assert list(held) == chunks == [held[i] for i in range(len(held))] == held[:]
    assert held[1:] == chunks[1:]
    assert not chunks or held[-1] == chunks[-1]
    for outside in (len(chunks), -len(chunks) - 1):
        with pytest.raises(IndexError):
            held[outside]


def test_chunks_hold_no_extents_that_are_made_of_others() -> None:
    woven = Extent(0, 0, 0, weave=Weave(((2,),), ((((0,), (2,)), Extent(0, 0, 8)),)))
    with pytest.raises(AssertionError, match="made of others"):
        Chunks.of([Chunk((0,), (2,), woven)])


def test_one_unopened_item_makes_them_all_items() -> None:
    held = Chunks.of([Chunk((0,), (4,), Extent(0, 0, 700, item=True))])
    assert held.item and held[0].extent.item and not held[0].extent.plain


@pytest.mark.parametrize(
    ("extent", "plain"),
    [
        (Extent(0, 0, 4), True),
        (Extent(0, 0, 4, record=Record(0, 0, 8, 1)), True),
        (Extent(0, 0, 4, strides=(1,)), False),
        (Extent(0, 0, 4, codec=("swap",)), False),
        (Extent(0, 0, 4, item=True), False),
    ],
)
def test_plain_extents(extent: Extent, plain: bool) -> None:
    assert extent.plain is plain


def test_names_for_people() -> None:
    assert dotted(("optim", "state", 0, "exp_avg")) == "optim.state.0.exp_avg"
    assert str(Part("model")) == str(Part("model", ("model",))) == "model"
    assert str(Part("model", ("app", "ema"))) == "model (app.ema)"


def test_an_object_is_read_once_and_only_when_asked_for() -> None:
    reads: list[int] = []
    held = Object(("a", 0), read=lambda: reads.append(1) or [1, 2])
    moved = held.at(("b",), part=Part("model"), change=lambda value: [*value, 3])
    assert not reads
    assert (moved.value, held.value, moved.value) == ([1, 2, 3], [1, 2], [1, 2, 3])
    assert len(reads) == 1
    assert (moved.path, moved.origin, moved.part, held.path) == (("b",), ("a", 0), Part("model"), ("a", 0))
    assert moved.at(("c",)).origin == ("a", 0)


def test_a_value_that_was_read_is_read_under_another_path_too() -> None:
    held = Object(("opt",), 3)
    assert held.at(("a", "opt")).is_read
    changed = held.at(("a", "opt"), change=str)
    assert (changed.is_read, changed.value) == (False, "3")


def test_two_entries_cannot_have_one_path() -> None:
    held = checkpoints.state({"w": torch.zeros(2)})
    with pytest.raises(CorruptError, match="two entries are called `w`"):
        held.add(Object(("w",), 1))


def test_world_size_counts_ranks() -> None:
    assert Catalogue("x").world_size == 1
    assert Catalogue("x", [File("f", "f", 0)]).world_size == 1
    assert Catalogue("x", [File("f", "f", 3, rank=3), File("g", "g", 4, rank=0)]).world_size == 4
    assert Catalogue("x", [File("f", "f", 3), File("g", "g", 4)]).nbytes() == 7


# Tied tensors ---------------------------------------------------------------------------------------------------------


def test_tied_weights_are_found_and_views_of_them_are_not() -> None:
    embed = torch.zeros(4, 4)
    tree = {"embed": embed, "other": torch.zeros(4, 4), "head": embed, "third": embed, "flat": embed.view(16)}
    assert find_aliases(checkpoints.state(tree).tensors) == {("head",): ("embed",), ("third",): ("embed",)}


@pytest.mark.parametrize(
    "change", [{"dtype": dtype("int32")}, {"strides": (1, 4)}, {"codec": ("conj",)}, {"offset": 4}, {"file": 1}]
)
def test_another_reading_of_the_same_bytes_is_another_tensor(change: dict[str, Any]) -> None:
    kind = change.pop("dtype", dtype("float32"))
    first = Tensor(("a",), dtype("float32"), (4, 4), Chunks.single((4, 4), Extent(0, 0, 64)))
    second = Tensor(("b",), kind, (4, 4), Chunks.single((4, 4), Extent(0, 0, 64)._replace(**change)))
    assert find_aliases([first, second]) == {}


def test_tensors_without_elements_share_nothing() -> None:
    empty = [Tensor((name,), dtype("float32"), (0,), Chunks.single((0,), Extent(0, 0, 0))) for name in "ab"]
    assert find_aliases(empty) == {}


def test_sharded_tensors_are_tied_when_all_their_chunks_are() -> None:
    def sharded(name: str, second: int) -> Tensor:
        chunks = [Chunk((0,), (2,), Extent(0, 0, 8)), Chunk((2,), (2,), Extent(1, second, 8))]
        return Tensor((name,), dtype("float32"), (4,), Chunks.of(chunks))

    assert find_aliases([sharded("a", 0), sharded("b", 0), sharded("c", 8)]) == {("b",): ("a",)}


def test_the_same_bytes_at_other_places_of_the_tensor_are_no_tie() -> None:
    upper, lower = Extent(0, 0, 8), Extent(0, 8, 8)
    one = Chunks.of([Chunk((0,), (2,), upper), Chunk((2,), (2,), lower)])
    swapped = Chunks.of([Chunk((2,), (2,), upper), Chunk((0,), (2,), lower)])
    tensors = [Tensor((name,), dtype("float32"), (4,), c) for name, c in (("a", one), ("b", swapped), ("c", one))]
    assert find_aliases(tensors) == {("c",): ("a",)}


# Validation -----------------------------------------------------------------------------------------------------------


def holding(*chunks: Chunk, shape: tuple[int, ...] = (4, 3), kind: str = "float32") -> Catalogue:
    held = Catalogue("x", [File("/f/a.bin", "a.bin", 100), File("/f/b.bin", "b.bin", 24)])
    held.add(Tensor(("m", "w"), dtype(kind), shape, Chunks.of(chunks)))
    return held


WHOLE = Chunk((0, 0), (4, 3), Extent(0, 0, 48))
UPPER, LOWER = Chunk((0, 0), (2, 3), Extent(0, 76, 24)), Chunk((2, 0), (2, 3), Extent(1, 0, 24))

RIGHT: dict[str, tuple[Chunk, ...]] = {
    "one chunk": (WHOLE,),
    "ends with its file": (UPPER, LOWER),
    "an empty chunk beside": (UPPER, LOWER, Chunk((4, 0), (0, 3), Extent(1, 24, 0))),
    "strides that span": (WHOLE._replace(extent=Extent(0, 0, 48, strides=(1, 4))),),
    "strides with gaps": (WHOLE._replace(extent=Extent(0, 0, 4 * (3 * 6 + 2 * 2 + 1), strides=(6, 2))),),
    "a row told four times": (WHOLE._replace(extent=Extent(0, 0, 12, strides=(0, 1))),),
    "an unopened item of any size": (WHOLE._replace(extent=Extent(0, 0, 99, item=True)),),
}


@pytest.mark.parametrize("chunks", RIGHT.values(), ids=RIGHT)
def test_what_is_right(chunks: tuple[Chunk, ...]) -> None:
    validate(holding(*chunks))


WRONG: dict[str, tuple[tuple[Chunk, ...], str]] = {
    "nothing": ((), "`m.w` [4, 3] is not covered exactly: 12 of 12 elements are in no chunk"),
    "a hole": ((UPPER,), "6 of 12 elements are in no chunk"),
    "an overlap": ((WHOLE, LOWER), "chunks at [0, 0] and [2, 0] overlap"),
    "outside the tensor": ((UPPER, LOWER._replace(offsets=(3, 0))), "reaches outside [4, 3]"),
    "a whole one that begins elsewhere": ((WHOLE._replace(offsets=(5, 0)),), "reaches outside [4, 3]"),
    "another shape": ((Chunk((0,), (12,), Extent(0, 0, 48)),), "1 dimensions where the tensor has 2"),
    "outside the file": ((UPPER, LOWER._replace(extent=Extent(1, 4, 24))), "`b.bin`: tensor `m.w`: bytes 4..28 are"),
    "before the file": ((WHOLE._replace(extent=Extent(0, -8, 48)),), "bytes -8..40 are outside the file"),
    "a negative size": ((WHOLE._replace(extent=Extent(0, 60, -48)),), "are outside the file"),
    "too few bytes": ((WHOLE._replace(extent=Extent(0, 0, 44)),), "44 bytes at 0..44, but float32 [4, 3] needs 48"),
    "too many bytes": ((WHOLE._replace(extent=Extent(0, 0, 52)),), "52 bytes at 0..52, but float32 [4, 3] needs 48"),
    "strides too far": ((WHOLE._replace(extent=Extent(0, 0, 48, strides=(6, 2))),), "needs 92"),
    "an item outside": ((WHOLE._replace(extent=Extent(0, 90, 48, item=True)),), "bytes 90..138 are outside the file"),
}


@pytest.mark.parametrize(("chunks", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_by_name(chunks: tuple[Chunk, ...], words: str) -> None:
    with pytest.raises(CorruptError) as caught:
        validate(holding(*chunks))
    assert words in str(caught.value)
    assert caught.value.facts["tensor"] == "m.w"


@pytest.mark.parametrize(
    ("chunk", "fine"),
    [
        (Chunk((0, 0), (0, 3), Extent(0, 100, 0)), True),
        (Chunk((0, 0), (0, 3), Extent(0, 0, 4)), False),
        (Chunk((0, 0), (0, 3), Extent(0, 101, 0)), False),
        (Chunk((0, 0), (0, 3), Extent(0, 0, 0, strides=(3, 1))), True),
    ],
)
def test_tensors_without_elements(chunk: Chunk, fine: bool) -> None:
    held = holding(chunk, shape=(0, 3))
    if fine:
        validate(held)
    else:
        with pytest.raises(CorruptError):
            validate(held)


@pytest.mark.parametrize(
    "extent",
    [
        Extent(1, 2, 24),
        Extent(1, 2, 24, (1, 2), ("swap",), Record(1, 0, 30, 5)),
        Extent(1, 2, 24, record=Record(1, 2, 24)),
        Extent(1, 2, 24, item=True),
    ],
)
def test_a_chunk_alone_is_as_one_of_many(extent: Extent) -> None:
    alone = Chunks.single((2, 3), extent)
    assert list(alone) == list(Chunks.of([Chunk((0, 0), (2, 3), extent)])) and alone.item == extent.item
    assert list(alone.all_records()) == ([extent.record] if extent.record is not None else [])
    # Its columns are those of other tensors too: nothing is added to them, and others do not get what it has.
    with pytest.raises(AssertionError):
        alone.add((0, 0), (2, 3), Extent(0, 0, 1, (1, 2), ("swap",), Record(0, 0, 1)))
    for other in (Chunks(), Chunks.single((), Extent(0, 0, 4)), Chunks.placed([(((0,), (4,)), 3)])):
        assert not other.strides and not other.codecs and not other.records
    assert list(Chunks.placed([(((0,), (4,)), 3)])) == [Chunk((0,), (4,), Extent(3, 0, 0))]
