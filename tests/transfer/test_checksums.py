"""CRCs of pieces, put together, against zlib's CRC of the whole."""

from __future__ import annotations

import random
import threading
import tracemalloc
from array import array
from itertools import pairwise
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.catalogue.entries import Record
from ckpttool.storage.crc import combine, with_zeros
from ckpttool.transfer import checksums
from ckpttool.transfer.checksums import Pieces, RecordPiece, WrittenCrcs

quick = settings(max_examples=100)


@quick
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_runs_are_the_run_of_both(first: bytes, second: bytes) -> None:
    assert combine(crc32(first), crc32(second), len(second)) == crc32(first + second)


@pytest.mark.parametrize("length", [0, 1, 7, 4096])
def test_many_runs_of_one_length(length: int) -> None:
    # After some, tables are used.
    for first in (bytes((i,)) * i for i in range(1, 200)):
        assert combine(crc32(first), crc32(bytes(length)), length) == crc32(first + bytes(length))


@pytest.mark.parametrize("length", [1, 255, 1 << 16, (1 << 24) + 7])
def test_long_runs(length: int) -> None:
    assert combine(crc32(b"abc"), crc32(bytes(length)), length) == crc32(b"abc" + bytes(length))


def test_runs_longer_than_memory() -> None:
    # Zero bytes appended one after the other or all at once: 2**40 of them, a terabyte.
    step, length = crc32(bytes(1 << 20)), 1 << 20
    crc = crc32(b"abc")
    doubled, n = step, length
    for _ in range(20):
        doubled, n = combine(doubled, doubled, n), n * 2
    in_two = combine(combine(crc, doubled, n), step, length)
    assert in_two == combine(crc, combine(doubled, step, length), n + length)


@st.composite
def splits(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    data = draw(st.binary(max_size=400))
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=8))})
    return data, draw(st.permutations([(a, b - a) for a, b in pairwise(cuts)]))


@quick
@given(splits(), st.integers(0, 1000))
def test_pieces_in_any_order_are_the_record(split: tuple[bytes, list[tuple[int, int]]], start: int) -> None:
    data, parts = split
    record, pieces = Record(0, start, len(data), None), Pieces()
    for at, n in parts:
        pieces.add(record, start + at, n, crc32(data[at : at + n]))
    assert pieces.crc(record) == crc32(data)
    assert pieces.gaps(record) == []
    assert pieces.used(record) == len(data)


@quick
@given(splits(), st.data())
def test_gaps_are_asked_for_and_nothing_else(split: tuple[bytes, list[tuple[int, int]]], data: st.DataObject) -> None:
    content, parts = split
    record, pieces = Record(3, 50, len(content), None), Pieces()
    missing = set()
    for at, n in parts:
        if data.draw(st.booleans()):
            missing |= set(range(at, at + n))
            pieces.add(record, 0, n, None)
        else:
            pieces.add(record, 50 + at, n, crc32(content[at : at + n]))
    asked: list[int] = []

    def read(offset: int, nbytes: int) -> int:
        asked.extend(range(offset - 50, offset - 50 + nbytes))
        return crc32(content[offset - 50 : offset - 50 + nbytes])

    assert pieces.crc(record, read) == crc32(content)
    assert asked == sorted(missing)
    assert sum(n for _, n in pieces.gaps(record)) == len(missing)
    assert pieces.used(record) == len(content)


@quick
@given(st.binary(min_size=1, max_size=100), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=6))
def test_pieces_that_overlap(data: bytes, spans: list[tuple[int, int]]) -> None:
    # Two views of one storage: what one adds beyond the other is read once more.
    record, pieces = Record(0, 0, len(data), None), Pieces()
    for at, n in spans:
        pieces.add(record, min(at, len(data)), len(data[at : at + n]), crc32(data[at : at + n]))
    assert pieces.crc(record, lambda offset, n: crc32(data[offset : offset + n])) == crc32(data)


def test_records_are_told_apart_by_file_and_offset() -> None:
    pieces = Pieces()
    records = [Record(0, 0, 4, 1), Record(0, 4, 4, 2), Record(1, 0, 4, 3)]
    for i, record in enumerate(records):
        pieces.add(record, record.offset, 4, crc32(bytes([i] * 4)))
    assert pieces.records() == records
    assert [pieces.crc(r) for r in records] == [crc32(bytes([i] * 4)) for i in range(3)]


def test_threads_may_add_at_once() -> None:
    data = random.Random(1).randbytes(4096)
    record, pieces = Record(0, 0, len(data), None), Pieces()

    def add(first: int) -> None:
        for at in range(first, len(data), 8):
            pieces.add(record, at, 1, crc32(data[at : at + 1]))

    threads = [threading.Thread(target=add, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pieces.crc(record) == crc32(data)


def test_buffers_behind_each_other() -> None:
    assert checksums.of([b"ab", memoryview(b"c"), b""]) == crc32(b"abc")
    assert checksums.of([]) == 0


@quick
@given(st.data())
def test_columns_are_put_together(data: st.DataObject) -> None:
    """Each rank knows the bytes of its own columns; some of the rows may belong to others again."""
    rows, widths = data.draw(st.integers(1, 5)), data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    stride, start = sum(widths), 40
    content = data.draw(st.binary(min_size=rows * stride, max_size=rows * stride))
    cut = data.draw(st.integers(0, rows))
    record, pieces = Record(2, start, len(content), crc32(content)), Pieces()
    absent = data.draw(st.sampled_from([None, *range(len(widths))]))
    for first, last in ((0, cut), (cut, rows)):
        for i, width in enumerate(widths):
            at = first * stride + sum(widths[:i])
            mine = bytearray()
            for row in range(first, last):
                mine += content[row * stride :][at % stride : at % stride + width].ljust(stride, b"\0")
            span = bytes(mine)[: (last - first - 1) * stride + width]
            if first < last and i != absent:
                for _ in range(data.draw(st.integers(1, 2))):  # replicas
                    pieces.add(record, start + at, width, crc32(span), stride=stride, rows=last - first)
    told = Pieces()
    told.unpack(array("q", pieces.packed()))
    assert told.crc(record, lambda at, n: crc32(content[at - start :][:n])) == record.crc
    assert bool(told.gaps(record)) == (absent is not None)
    assert told.unread(record) >= (widths[absent] * rows if absent is not None else 0)


@pytest.mark.parametrize("length", [0, 1, 65536, 65537, 3 << 20])
def test_zeros_behind(length: int) -> None:
    assert with_zeros(crc32(b"abc"), length) == crc32(b"abc" + bytes(length))


@quick
@given(st.binary(min_size=1, max_size=60), st.data())
def test_bytes_read_twice_in_other_pieces_are_compared(content: bytes, data: st.DataObject) -> None:
    """What is read in its order is one run; if the second reading gave other bytes, or the first, that is seen."""
    record, pieces = Record(0, 9, len(content), crc32(content)), Pieces()
    wrong = data.draw(st.sampled_from([0, 1, None]))
    flipped = data.draw(st.integers(0, len(content) - 1))
    for reading in range(2):
        own = bytearray(content)
        own[flipped] ^= reading == wrong
        cuts = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content)), max_size=5))})
        for at, end in pairwise(cuts):
            pieces.add(record, 9 + at, end - at, crc32(own[at:end]))
        assert reading or len(pieces.packed()) == 8 * (6 + 5)
    crc = pieces.crc(record, lambda at, n: crc32(content[at - 9 :][:n]))
    assert (crc == record.crc) == (wrong is None)


@quick
@given(st.data())
def test_pieces_read_several_times_in_any_order_are_compared(data: st.DataObject) -> None:
    """By two processes, which read neither the same nor in one order. Bytes of pieces that were read once alone are
    read again, right, for the comparison."""
    count = data.draw(st.integers(2, 6))
    content = bytes(range(4 * count))
    record, of_processes = Record(0, 9, len(content), crc32(content)), [Pieces(), Pieces()]
    several = st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, 1)), max_size=12)
    readings = data.draw(st.permutations([(n, 0) for n in range(count)] + data.draw(several)))
    wrong = data.draw(st.none() | st.integers(0, len(readings) - 1))
    for i, (n, process) in enumerate(readings):
        own = bytearray(content[4 * n : 4 * n + 4])
        own[i % 4] ^= i == wrong
        of_processes[process].add(record, 9 + 4 * n, 4, crc32(own))
    told = array("q")
    told.frombytes(of_processes[1].packed())
    of_processes[0].unpack(told)
    crc = of_processes[0].crc(record, lambda at, n: crc32(content[at - 9 :][:n]))
    assert (crc == record.crc) == (wrong is None)
    if all(process == readings[0][1] for _, process in readings):
        of_processes[readings[0][1]].crc(record)  # reads nothing


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_replicas_that_differ(wrong: int) -> None:
    """One of three ranks has read other bytes than the writer wrote."""
    record, pieces = Record(0, 0, 6, crc32(b"abcdef")), Pieces()
    for rank in range(3):
        pieces.add(record, 0, 3, crc32(b"abC" if rank == wrong else b"abc"))
        pieces.add(record, 3, 3, crc32(b"def"))
    assert pieces.crc(record) == crc32(b"abCdef")


def test_what_was_used_without_a_checksum_is_read() -> None:
    record, pieces = Record(0, 0, 100, 1), Pieces()
    pieces.add(record, 0, 40, 7)
    pieces.add(record, 40, 50, None)
    assert pieces.unread(record) == 10 and pieces.gaps(record) == [(40, 60)]


def test_checksums_of_what_was_written_are_those_of_a_dict() -> None:
    """In any order, the one that was added last counts; and a few bytes each."""
    rng = random.Random(0)
    places = [(rng.randrange(3), 64 * rng.randrange(5000)) for _ in range(9000)]
    wanted, found = dict[tuple[int, int], int](), WrittenCrcs()
    for number, place in enumerate(places):
        wanted[place] = (1 << 32) - 1 - number
        found.add(*place, wanted[place])
        if number == 4000:
            assert dict(found) == wanted  # what is added later is found, too
    assert dict(found.items()) == wanted and len(found) == len(wanted)
    assert found.get((0, 1)) is None and (3, 0) not in found
    tracemalloc.start()
    try:
        found, pieces = WrittenCrcs(), Pieces()
        for number in range(10_000):
            found.add(0, 64 * number, number)
            pieces.add(Record(0, 0, 640_000, 1), 64 * number, 64, number)
        assert tracemalloc.get_traced_memory()[0] < 40 * 10_000
    finally:
        tracemalloc.stop()
    assert found[0, 64 * 9999] == 9999


def test_pieces_of_any_size_are_packed() -> None:
    record = Record(0, 0, 1 << 40, 1)
    pieces, others = Pieces(), Pieces()
    for offset, nbytes, crc in ((0, 64, (1 << 32) - 1), (64, (1 << 31) - 1, 0), (1 << 33, 1 << 31, 7)):
        pieces.add(record, offset, nbytes, crc)
    pieces.add(record, 1 << 35, 8, 9, stride=64, rows=3)
    others.unpack(array("q", pieces.packed()))
    assert others._of(record) == pieces._of(record)
    assert sorted(pieces._of(record)) == [
        RecordPiece(0, 64, 0, 1, (1 << 32) - 1),
        RecordPiece(64, (1 << 31) - 1, 0, 1, 0),
        RecordPiece(1 << 33, 1 << 31, 0, 1, 7),
        RecordPiece(1 << 35, 8, 64, 3, 9),
    ]
