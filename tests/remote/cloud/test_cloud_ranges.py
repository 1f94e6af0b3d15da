"""Ranges in memory: the right bytes whoever reads, within the bound, and ahead of who reads in order."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("obstore")

from ckpttool.remote.cloud.ranges import GAP, HEAD, PART, Ranges


class Server:
    """A file of pseudo-random bytes, and what was asked for."""

    def __init__(self, size: int) -> None:
        self.data = random.Random(7).randbytes(size)
        self.asked: list[tuple[int, int]] = []
        self._pool = ThreadPoolExecutor(8)

    def fetch(self, name: str, start: int, end: int) -> Any:
        self.asked.append((start, end))
        return self._pool.submit(lambda: memoryview(self.data)[start:end])

    def read(self, ranges: Ranges, offset: int, nbytes: int) -> bytes:
        buffer, done = bytearray(nbytes), 0
        while done < nbytes:
            n = ranges.read_into("x", len(self.data), offset + done, memoryview(buffer)[done:])
            if not n:
                break
            done += n
        return bytes(buffer[:done])

    @property
    def sent(self) -> int:
        return sum(end - start for start, end in self.asked)


def test_a_header_is_one_request() -> None:
    server = Server(40 << 20)
    ranges = Ranges(server.fetch)
    assert server.read(ranges, 0, 8) + server.read(ranges, 8, 5000) == server.data[:5008]
    assert server.read(ranges, len(server.data) - 22, 22) == server.data[-22:]
    assert server.read(ranges, len(server.data) - 4000, 900) == server.data[-4000:-3100]
    assert server.asked == [(0, HEAD), (len(server.data) - HEAD, len(server.data))]


def test_who_reads_in_order_waits_for_few_requests() -> None:
    server = Server(64 << 20)
    ranges = Ranges(server.fetch)
    step = 1 << 20
    for at in range(0, len(server.data), step):
        # A tensor that is left out now and then.
        assert server.read(ranges, at, step - 1000) == server.data[at : at + step - 1000]
    assert len(server.asked) < 16 and server.sent >= len(server.data) - 1000
    assert max(end - start for start, end in server.asked) == PART


def test_what_is_expected_is_asked_for_once() -> None:
    server = Server(64 << 20)
    ranges = Ranges(server.fetch, 3 * PART)
    pieces = [(at, at + (2 << 20) - 5000) for at in range(0, len(server.data), 2 << 20)]
    with ThreadPoolExecutor(2) as pool:

        def read(piece: tuple[int, int]) -> bool:
            start, end = piece
            tail = server.read(ranges, end - 500, 500) == server.data[end - 500 : end]
            return tail and server.read(ranges, start, end - start) == server.data[start:end]

        for at in range(0, len(pieces), 8):
            ranges.expect("x", pieces[at : at + 8])
        assert all(pool.map(read, pieces))
    assert sum(end - start for start, end in server.asked) <= len(server.data)
    assert len(server.asked) <= 10 and ranges._held <= HEAD


def test_little_is_read_that_nobody_wants() -> None:
    server = Server(64 << 20)
    ranges = Ranges(server.fetch)
    for at in range(0, len(server.data), 4 * GAP):
        assert server.read(ranges, at, 1000) == server.data[at : at + 1000]
    assert server.sent == 16 * HEAD


@pytest.mark.parametrize("seed", range(3))
def test_threads_within_the_bound(seed: int) -> None:
    server = Server(48 << 20)
    ranges = Ranges(server.fetch, 2 * PART)
    most = [0]

    def work(number: int) -> None:
        rng = random.Random(100 * seed + number)
        for _ in range(6):
            start = rng.randrange(len(server.data))
            for _ in range(rng.randrange(1, 12)):
                nbytes = rng.choice([1, 300, 70_000, 1 << 20, 5 << 20])
                assert server.read(ranges, start, nbytes) == server.data[start : start + nbytes]
                start += nbytes + rng.choice([0, 0, 64, 500_000])
                most[0] = max(most[0], ranges._held)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    # What somebody waits for is held in any case.
    assert most[0] <= 2 * PART + 4 * PART


def test_a_failure_is_of_one_read() -> None:
    def fetch(name: str, start: int, end: int) -> Future[memoryview]:
        failures.append(start)
        future: Future[memoryview] = Future()
        if len(failures) == 1:
            future.set_exception(OSError("lost"))
        else:
            future.set_result(memoryview(bytes(end - start)))
        return future

    failures: list[int] = []
    ranges = Ranges(fetch)
    with pytest.raises(OSError, match="lost"):
        ranges.read_into("x", 100, 0, memoryview(bytearray(10)))
    assert ranges.read_into("x", 100, 0, memoryview(bytearray(10))) == 10
