"""What is looked for in a pickle before the machine runs it: tuples that are mentioned often."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import struct
from collections import Counter
from typing import Any

import pytest

from ckpttool.serialization import pickle_limits, unpickler
from ckpttool.serialization import pickle_opcodes as opcodes

FEW = 16
ROW = b"\x94" * 100
TEXT = b"\x8c\x01a"
TUPLE = b"K\x01K\x02\x86"


def shares(data: bytes) -> bool:
    code = opcodes._Code()
    assert opcodes._walk(data, len(data), code) == (len(data), True)
    return pickle_limits.shares_tuples(code.pieces, code.rows)


def mentioned(index: int, times: int) -> bytes:
    return (b"j" + struct.pack("<I", index) + b"0") * times


@pytest.mark.parametrize(
    "before", [b"", TEXT + b"\x940", TEXT + ROW + b"0", TEXT + b"\x940" + TEXT + ROW + TEXT + b"\x94"]
)
@pytest.mark.parametrize("row", [1, 3, 100])
def test_tuples_keep_their_numbers(before: bytes, row: int) -> None:
    first = before.count(b"\x94")
    made = b"\x80\x04" + before + TUPLE + b"\x94" * row + TEXT + b"\x940" + TEXT + ROW
    for index in {first, first + row - 1}:
        assert shares(made + mentioned(index, FEW) + b".")
        assert not shares(made + mentioned(index, FEW - 1) + b".")
    assert not shares(made + mentioned(first + row, 1000) + b".")
    assert not shares(made + mentioned(first + row + 1, 1000) + mentioned(first + row + 100, 1000) + b".")
    if before:
        assert not shares(made + mentioned(first - 1, 1000) + b".")


def test_numbers_spelt_in_two_ways_are_the_same() -> None:
    made = b"\x80\x02" + TUPLE + b"q\x05" + TEXT + b"q\x06"
    assert shares(made + mentioned(5, FEW) + b".")
    assert shares(b"\x80\x02" + TUPLE + b"r\x05\0\0\0" + b"h\x050" * FEW + b".")
    assert not shares(made + mentioned(6, 1000) + b".")
    assert shares(made + ROW + mentioned(6, FEW) + b".")  # numbered in both ways: anything may be a tuple


def test_nothing_that_is_shared_is_overlooked() -> None:
    """Whatever stands where a piece of it ends."""
    values = [
        TUPLE,
        TEXT,
        b"]",
        b")",
        b"\x85",
        b"N",
        b"K\x94",
        b"J\x94\x94\x94\x94",
        b"cos\nname\n",
        b"\x8c\x02\xc2\x94",
    ]
    for seed in range(8):
        chosen = random.Random(seed)
        made, tuples, number = b"\x80\x04N", set(), 0
        for _ in range(4000):
            value = chosen.choice(values)
            row = chosen.choice([0, 1, 1, 1, 2, 15, 16, 40])
            made += value + b"\x94" * row
            if value in (TUPLE, b"\x85"):
                tuples |= set(range(number, number + row))
            number += row
        assert sum(op.name == "MEMOIZE" for op, _, _ in pickletools.genops(made + b".")) == number
        index = chosen.choice(sorted(tuples))
        assert shares(made + mentioned(index, FEW) + b".")


class Place:
    """Pickled as the objects of an index are."""

    def __init__(self, chosen: random.Random, names: list[str], shared: list[tuple[Any, ...]]) -> None:
        self.name, self.size = (
            chosen.choice(names),
            tuple(chosen.choices([1, 300, 70_000, 2**33], k=chosen.choice([2, 2, 2, 3, 5]))),
        )
        self.pair = chosen.choice(shared) if chosen.random() < 0.05 else (chosen.randrange(256), 5)
        self.other = (self.size, self.name) if chosen.random() < 0.05 else 0x85868774


INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1")
ARITY = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_tuple_that_is_not_flat_is_asked_for(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opcodes, "_GUARDED", 0)
    chosen = random.Random(protocol)
    names = ["a" * 40, "\x85\x86", "t(K\x01t", "(((("]
    shared: list[tuple[Any, ...]] = [("a",), ((1, 2), (3, 4)), (1, "b", (5,))]
    data = pickle.dumps([Place(chosen, names, shared) for _ in range(3000)], protocol)
    assert opcodes._learn(data, 0)
    guarded = opcodes.guarded(data)
    assert guarded is not None
    insertion = opcodes.INSERTIONS[ord("u")]
    restored = b"".join(b"u" if piece is insertion else piece for piece in guarded.pieces)
    found = [(op.name, argument) for op, argument, _ in pickletools.genops(restored)]
    assert guarded.calls.count(b"t") == sum(name == "BINPERSID" for name, _ in found)
    assert guarded.calls.count(b"u") == sum(piece is insertion for piece in guarded.pieces) > 0
    told = [(op.name, argument) for op, argument, _ in pickletools.genops(data) if op.name != "FRAME"]
    assert [op for op in found if op[0] != "BINPERSID"] == told
    calm = asked = 0
    kinds = [name for name, _ in found if name not in ("MEMOIZE", "BINPUT", "LONG_BINPUT")]
    for at, name in enumerate(kinds):
        if name not in (*ARITY, "TUPLE"):
            continue
        if kinds[at + 1] == "BINPERSID":
            asked += 1
            continue
        calm += 1
        inside = ARITY.get(name)
        if inside is None:
            inside = kinds[:at][::-1].index("MARK")
        assert set(kinds[at - inside : at]) <= {*INTEGERS}, kinds[at - 10 : at + 1]
    assert calm > 5000 and asked > 100


def test_what_is_put_into_dicts_and_sets_is_asked_for() -> None:
    """Whatever a dict or a set gets, and a persistent id of the pickle's own; nothing else changes."""
    value: list[Any] = [{(n, n): n} for n in range(900)]
    value += [{n: str(n) for n in range(3000)}, {(n, "t\x90"): None for n in range(2)}, {1, 2}, frozenset((3, b"u"))]
    for protocol in (0, 1, 2, 4, 5):
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, protocol)
        pickler.persistent_id = lambda value: "own" if value == {1, 2} else None  # type: ignore[method-assign]
        pickler.dump(value)
        found = opcodes.answered(data := stream.getvalue())
        assert found is not None
        names = Counter(op.name for op, _, _ in pickletools.genops(b"".join(found.pieces)))
        told = Counter(op.name for op, _, _ in pickletools.genops(data))
        insertions = {"SETITEMS": "u", "SETITEM": "s", "DICT": "d", "ADDITEMS": "\x90", "FROZENSET": "\x91"}
        for name, code in insertions.items():
            assert names[name] == 0 and found.calls.count(code.encode("latin1")) == told[name]
        assert len(found.calls) == names["BINPERSID"] + names["PERSID"] and found.calls.count(b"Q") == 1
        read = unpickler.load(data, what="x", persistent=lambda pid: {1, 2})
        assert read == value and [*map(type, read)] == [*map(type, value)]
