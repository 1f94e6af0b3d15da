"""What is looked for in a pickle before the machine runs it: tuples that are mentioned often."""

from __future__ import annotations

import pickletools
import random
import struct

import pytest

from ckpttool.serialization import pickle_limits
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
