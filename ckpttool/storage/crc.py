"""CRC-32 of bytes, as zip archives have it: by ISA-L where that is installed (50 GB/s), else by zlib (3 GB/s)."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import lru_cache

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32

__all__ = ["combine", "crc32", "crc_of", "end_vectors", "with_zeros"]

_BLOCK = 1 << 20  # stays in the processor's cache between read and checksum


def crc_of(
    read_into: Callable[[int, memoryview], object],
    offset: int,
    nbytes: int,
    buffer: memoryview | None = None,
    note: Callable[[int], object] | None = None,
) -> int:
    """Return the CRC of `nbytes` at `offset`, read by `read_into(offset, buffer)`; `note` is called with the size of
    each block."""
    crc, buffer = 0, buffer or memoryview(bytearray(min(_BLOCK, nbytes)))
    for at in range(0, nbytes, len(buffer) or 1):
        block = buffer[: min(len(buffer), nbytes - at)]
        read_into(offset + at, block)
        crc = crc32(block, crc)
        if note is not None:
            note(len(block))
    return crc


_ZEROS = bytes(4096)


def end_vectors() -> None:
    """Clear the upper halves of the vector registers, in which ISA-L leaves something: SHA-256, which has instructions
    of its own, takes a third longer until they are cleared. The search for a byte does that, in 0.1 microseconds."""
    _ZEROS.find(b"x")


_POLYNOMIAL = 0xEDB88320


def _multiply(a: int, b: int) -> int:
    """Return a * b modulo the CRC polynomial, bits reflected."""
    product = 0
    bit = 1 << 31
    while bit:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                break
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


class _Shift:
    """What appending so many zero bytes makes of a CRC: it multiplies it by x to the power of 8 * nbytes."""

    __slots__ = ("_left", "_power", "_tables")

    def __init__(self, nbytes: int) -> None:
        power, self._power = 1 << 23, 1 << 31  # x**8 and 1
        while nbytes:
            if nbytes & 1:
                self._power = _multiply(power, self._power)
            power = _multiply(power, power)
            nbytes >>= 1
        self._left = 40  # uses until tables, which take as long to make, are worth it
        self._tables: list[array[int]] = []  # as lists they take ten times as much, and there may be 4,096

    def of(self, crc: int) -> int:
        """Return what becomes of `crc`."""
        if not self._tables:
            self._left -= 1
            if self._left > 0:
                return _multiply(self._power, crc)
            self._tables = [self._table(shift) for shift in (0, 8, 16, 24)]
        first, second, third, fourth = self._tables
        return first[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ fourth[crc >> 24]

    def _table(self, shift: int) -> array[int]:
        """Return the products of all bytes in the place `shift` of a CRC, which are sums of those of their bits."""
        table = [0]
        for bit in range(8):
            product = _multiply(self._power, 1 << (shift + bit))
            table += [product ^ other for other in table]
        return array("I", table)


_shift = lru_cache(maxsize=4096)(_Shift)


def combine(first: int, second: int, nbytes: int) -> int:
    """Return the CRC of two runs of bytes behind each other; `nbytes` is the length of the second. Pure.

    Method: zlib's `crc32_combine` (Mark Adler).
    """
    return _shift(nbytes).of(first) ^ second if first else second


_ZEROS = bytes(64 << 10)
_ONES = 0xFFFFFFFF


@lru_cache
def _zeros(nbytes: int) -> memoryview:
    return memoryview(_ZEROS)[:nbytes]


def with_zeros(crc: int, nbytes: int) -> int:
    """Return the CRC of the bytes that have this CRC and so many zero bytes behind them. Pure."""
    if nbytes <= len(_ZEROS):
        return crc32(_zeros(nbytes), crc)  # called for each row of a shard by columns
    return _shift(nbytes).of(crc ^ _ONES) ^ _ONES
