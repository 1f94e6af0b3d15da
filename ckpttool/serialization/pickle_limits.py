"""Limits on the memory and the time that one pickle may take.

before it runs   counted in its opcodes: containers to make, and tuples to hash as keys or to call with
while it runs    `catalogue.work_limit`: what our functions copy of values that the pickle has already made, and keys
                 that have the same hash (`catalogue.key_hashes`)
after it ran     `check_depths`: tuples nested so deep that hashing them again would overflow the stack

A byte of a pickle can ask for 72 bytes of memory (`]`), and 60 tuples that each hold the one before twice, 300 bytes of
pickle, take CPython centuries to hash as a key, in C and not to be interrupted. CPython's machine calls no Python code
for either, so both are counted before it runs. Source: `Modules/_pickle.c`, `Objects/tupleobject.c` of Python 3.10 to
3.14.
"""

from __future__ import annotations

import pickletools
import re
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

from ckpttool.catalogue.key_hashes import inner_first
from ckpttool.catalogue.values import MAX_LEVELS, KnownName, Stub, StubType
from ckpttool.errors import CorruptError

MAX_OBJECTS = 1_000_000  # and one for every `BYTES_PER_OBJECT` of the pickle; the indexes of DCP have one for seven
BYTES_PER_OBJECT = 4
MAX_HASHED = 1_000_000  # and one for every byte: elements of all tuples that are keys, once for each time they are
_FEW = 16  # that few mentions of tuples cannot be worth much

# What makes a list, a dict, a tuple or an object; a set is as large as four of them.
_MAKING = (b"]", b"}", b"l", b"d", b"t", b"\x85", b"\x86", b"\x87", b"R", b"\x81", b"\x92", b"o", b"i")
_MAKING_LIGHT = [code for code in _MAKING if code not in (b"l", b"d", b"t", b"o", b"i")]
_SET = b"\x8f"
_TUPLES = (b"t", b"\x85", b"\x86", b"\x87")
_GETS = (b"h", b"j", b"g")


def is_heavy(data: bytes) -> bool:
    """Return whether a pickle could make more than it may: counted in all its bytes, strings too."""
    return len(data) > MAX_OBJECTS and _objects(data) > MAX_OBJECTS + len(data) // BYTES_PER_OBJECT


def is_light(data: bytes) -> bool:
    """Return whether a pickle without the opcodes `l`, `d`, `o` and `i` makes no more than it may. A tuple of `t` has a
    mark; text has fewer of those."""
    return sum(map(data.count, (*_MAKING_LIGHT, b"("))) <= MAX_OBJECTS + len(data) // BYTES_PER_OBJECT


def check_objects(code: bytes, size: int) -> None:
    """Raise CorruptError when the opcodes of a pickle of `size` bytes make more than those of a writer would."""
    count, most = _objects(code), MAX_OBJECTS + size // BYTES_PER_OBJECT
    if count > most:
        message = f"it makes up to {count} lists, dicts and other containers in {size} bytes"
        raise CorruptError(message, found=count, expected=most)


def _objects(data: bytes) -> int:
    return sum(map(data.count, _MAKING)) + 4 * data.count(_SET)


def may_share(data: bytes) -> bool:
    """Return whether there are tuples, and enough mentions of what was memoized that they could be costly as keys."""
    return any(code in data for code in _TUPLES) and sum(map(data.count, _GETS)) >= _FEW


def count_tuples(data: bytes, end: int) -> int:
    """Return the most tuples that a pickle which ends there can make."""
    return sum(data.count(code, 0, end) for code in _TUPLES)


# What may leave a tuple on top of the stack: behind anything else, something else is memoized.
_TUPLE_ON_TOP = {bytes((code,)) for code in b"\x85\x86\x87thjqr\x94\x80\x9501asueb\x90"} | {b""}


def fixed_length(codes: Iterable[int]) -> dict[int, bytes]:
    """Return patterns for an opcode of `codes` whose argument has a fixed length, by that length."""
    by_length: dict[int, bytes] = {}
    for op in sorted(pickletools.opcodes, key=lambda op: op.code):
        n = 0 if op.arg is None else op.arg.n
        if n >= 0 and ord(op.code) in codes:
            by_length[n] = by_length.get(n, b"") + re.escape(op.code.encode("latin1"))
    return {n: b"[" + codes + b"]" + b"." * n for n, codes in by_length.items()}


def _tokens(without: bytes) -> bytes:
    return b"|".join(fixed_length(frozenset(range(256)).difference(without)).values())


_get = re.compile(rb"(?:" + _tokens(b"hj") + rb")*(h.|j.{4})", re.S).findall
_is_numbered = re.compile(rb"(?:" + _tokens(b"qr") + rb")*[qr]", re.S).match
_MANY_NUMBERS = 64


def _puts(numbers: Collection[int]) -> re.Pattern[bytes]:
    """Return a pattern of what puts a value into the memo under one of these numbers, or under any if they are many.
    The first group holds the opcode before."""
    one, four, others = rb"q(.)", rb"r(.{4})", _tokens(b"qr")
    if len(numbers) <= _MANY_NUMBERS:
        short = b"".join(re.escape(bytes((n,))) for n in numbers if n < 256)
        long = b"|".join(re.escape(n.to_bytes(4, "little")) for n in numbers)
        one, four = rb"q([%b])" % short, rb"r(%b)" % long
        others += rb"|q[^%b]|r(?!%b).{4}" % (short, long)
    return re.compile(rb"(%b)*(?:%b|%b)" % (others, one, four), re.S)


# Several in a row give a number each to the same value.
_memoize = re.compile(rb"(" + _tokens(b"\x94") + rb")*(\x94+)", re.S).findall


def shares_tuples(pieces: list[bytearray], rows: list[int]) -> bool:
    """Return whether a pickle mentions tuples often enough to look closer. `pieces` are its opcodes, each piece
    beginning and ending with a whole one; `N` stands for those with text. Behind each piece, `rows` says how many
    MEMOIZE of no tuple are left out."""
    mentions: Counter[bytes] = Counter()
    for piece in pieces:
        # The search is to end at the end; else it would begin anew between opcodes.
        mentions.update(_get(piece + b"h\0"))
        mentions[b"h\0"] -= 1
    mentioned: Counter[int] = Counter()
    for get, count in mentions.items():
        mentioned[int.from_bytes(get[1:], "little")] += count
    if sum(mentioned.values()) < _FEW:
        return False
    if not any(map(_is_numbered, pieces)):
        return _tuples_mentioned(pieces, rows, mentioned) >= _FEW
    if any(rows) or any(b"\x94" in piece and any(map(itemgetter(1), _memoized(piece))) for piece in pieces):
        return True  # no writer numbers in both ways
    find = _puts(mentioned.keys() | {0}).findall  # with what ends each piece
    puts = [put for piece in pieces for put in find(piece + b"q\0")[:-1]]
    tuples = {int.from_bytes(one or four, "little") for before, one, four in puts if before[:1] in _TUPLE_ON_TOP}
    return sum(mentioned[index] for index in tuples) >= _FEW


def _memoized(piece: bytearray) -> list[tuple[bytes, bytes]]:
    """Yield for each row of MEMOIZE the opcode before, or nothing at the beginning, and the row itself."""
    rows: list[tuple[bytes, bytes]] = _memoize(piece + b"\x94")
    before, row = rows[-1]
    rows[-1] = before, row[1:]
    return rows


def _tuples_mentioned(pieces: list[bytearray], rows: list[int], mentioned: dict[int, int]) -> int:
    """Return how often those are mentioned that MEMOIZE numbers and that may be tuples."""
    count = number = 0
    indexes = sorted(mentioned)
    for piece, left_out in zip(pieces, rows, strict=True):
        memoized = _memoized(piece)
        # How many are numbered at the end of each row.
        ends = list(accumulate((len(row) for _, row in memoized), initial=number))
        for index in indexes[bisect_left(indexes, number) : bisect_left(indexes, ends[-1])]:
            before, _ = memoized[bisect_right(ends, index) - 1]
            if before[:1] in _TUPLE_ON_TOP:
                count += mentioned[index]
        number = ends[-1] + left_out
    return count


# The machine in numbers: a tuple is what its hash costs, everything else is 1 -----------------------------------------

Skip = Callable[[bytes, int], int]
_MARKED = -1  # all down to the mark
_ALL, _KEYS, _REST = slice(None), slice(0, None, 2), slice(1, None)

# For each opcode how many values it takes, which of them become keys or are copied, and how many values it makes.
_EFFECTS: dict[int, tuple[int, slice | None, int]] = {
    **dict.fromkeys(b"N\x88\x89])}\x8fIFLSTUVXJKM\x8a\x8bG\x8c\x8d\x8eBC\x96cP", (0, None, 1)),
    **dict.fromkeys(b"1e", (_MARKED, None, 0)),
    **dict.fromkeys(b"loi", (_MARKED, None, 1)),
    **dict.fromkeys(b"ab", (1, None, 0)),
    **dict.fromkeys(b"R\x81", (2, _REST, 1)),  # the arguments of a call are copied
    ord("d"): (_MARKED, _KEYS, 1),
    ord("u"): (_MARKED, _KEYS, 0),
    ord("s"): (2, slice(1), 0),
    ord("Q"): (1, None, 1),
    0x90: (_MARKED, _ALL, 0),
    0x91: (_MARKED, _ALL, 1),
    0x92: (3, _REST, 1),
    0x93: (2, None, 1),
}
_TUPLE_SIZES = {0x85: 1, 0x86: 2, 0x87: 3, ord("t"): _MARKED}
_MARK, _POP = b"(0"
_PUT, _BINPUT, _LONG_BINPUT, _MEMOIZE = b"pqr\x94"
_GET, _BINGET, _LONG_BINGET = b"ghj"


class _Underflow(Exception):
    """The machine will say so itself."""


class _Costs:
    """The machine's stack, with the cost of its values in their place."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo: dict[int, int] = {}
        self.used = 0

    def pop(self, count: int) -> list[int]:
        if count == _MARKED:
            if not self.marks:
                raise _Underflow
            count = len(self.stack) - self.marks.pop()
        at = len(self.stack) - count
        if at < (self.marks[-1] if self.marks else 0):
            raise _Underflow
        taken = self.stack[at:]
        del self.stack[at:]
        return taken

    def use(self, costs: list[int]) -> None:
        """Note that these values are keys, or are copied."""
        self.used += sum(costs) - len(costs)
        if self.used > self._most:
            raise CorruptError(
                "its tuples are shared so often that hashing them as keys, or calling with them, would cost more than "
                f"{self._most} elements",
                expected=self._most,
            )

    def run(self, code: int, argument: bytes) -> None:
        if code in _EFFECTS:
            count, keys, results = _EFFECTS[code]
            taken = self.pop(count)
            if keys is not None:
                self.use(taken[keys])
            self.stack += [1] * results
        elif code in _TUPLE_SIZES:
            self.stack.append(1 + sum(self.pop(_TUPLE_SIZES[code])))
        elif code == _MARK:
            self.marks.append(len(self.stack))
        elif code == _POP:
            self.pop(_MARKED if self.marks and self.marks[-1] == len(self.stack) else 1)
        elif code == _MEMOIZE:
            self.memo[len(self.memo)] = self.stack[-1]
        elif code in (_PUT, _BINPUT, _LONG_BINPUT):
            self.memo[_index(code, argument)] = self.stack[-1]
        elif code in (_GET, _BINGET, _LONG_BINGET):
            self.stack.append(self.memo[_index(code, argument)])


def _index(code: int, argument: bytes) -> int:
    return int(argument) if code in (_PUT, _GET) else int.from_bytes(argument, "little")


def check_keys(data: bytes, end: int, skip: Skip) -> None:
    """Raise CorruptError when hashing the keys that a pickle makes would cost far more than the pickle is long.
    `skip(data, at)` is where the opcode after the one at `at` is."""
    machine = _Costs(MAX_HASHED + end)
    at = 0
    try:
        while at < end:
            after = skip(data, at)
            machine.run(data[at], data[at + 1 : after])
            at = after
    except (_Underflow, LookupError, ValueError, struct.error):
        return


# After it ran --------------------------------------------------------------------------------------------------------

# Python's hash of a tuple calls itself for each tuple in it, in C and with nothing to stop it, until the stack is full:
# a SIGSEGV at 100,000 or so.
MAX_NESTED = MAX_LEVELS
_LEAVES = frozenset({str, int, float, bool, type(None), bytes, StubType, KnownName})


def check_depths(tree: Any) -> None:
    """Raise CorruptError for tuples nested so deep that their hash would end the process: as a key, it was computed on
    the stack above, but whoever puts it into another dict computes it again."""
    seen: set[int] = set()
    depths: dict[int, int] = {}
    todo = [tree]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, tuple):
            below: Iterable[Any] = _inside(node, depths)
        elif isinstance(node, dict):
            below = chain(node.values(), node, getattr(node, "__dict__", {}).values())
        elif isinstance(node, Stub):
            parts = (node.target, node.args or None, node.kwargs or None)
            below = chain(parts, node.state, node.values, *node.pairs)
        elif isinstance(node, (list, set, frozenset)):
            below = node
        else:
            continue
        todo += [value for value in below if type(value) not in _LEAVES]


def _inside(top: tuple[Any, ...], depths: dict[int, int]) -> list[Any]:
    """Return what is in a tuple and in the tuples in it; `depths` remembers how deep each is."""
    below: list[Any] = []
    for node in inner_first(top, depths):
        depth = depths[id(node)] = 1 + max((depths[id(item)] for item in node if isinstance(item, tuple)), default=0)
        if depth > MAX_NESTED:
            raise CorruptError(f"tuples are nested more than {MAX_NESTED} deep")
        below += [item for item in node if not isinstance(item, tuple)]
    return below
