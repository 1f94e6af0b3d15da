"""Looks through a pickle before the machine runs it: where it ends, and whether it asks for too much.

CPython's machine makes room for the highest memo index that a pickle names: nine bytes, `80 02 4e 72 ff ff ff 7f 2e`,
take 32 GiB. And an extension code can stand for a class that this process has loaded, past `find_class`.
Source: `pickletools` and `Modules/_pickle.c` of Python 3.10 to 3.14.
"""

from __future__ import annotations

import pickletools
import re
import struct
from functools import lru_cache

from ckpttool.errors import CorruptError

_STOP, _BINPUT, _PUT, _PAIR = ord("."), ord("r"), ord("p"), frozenset(b"ci")
_REFUSED = frozenset(b"\x82\x83\x84\x97\x98")  # EXT1, EXT2, EXT4; NEXT_BUFFER, READONLY_BUFFER

# Bytes of argument behind each opcode, or of the length before it (negative: see `_LENGTHS`), or None: up to a newline.
_ARGUMENT: list[int | None] = [0] * 256
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: "<B", pickletools.TAKEN_FROM_ARGUMENT4: "<i",
    pickletools.TAKEN_FROM_ARGUMENT4U: "<I", pickletools.TAKEN_FROM_ARGUMENT8U: "<Q",
}  # fmt: skip
for _op in pickletools.opcodes:
    _n = 0 if _op.arg is None else _op.arg.n
    _ARGUMENT[ord(_op.code)] = None if _n == pickletools.UP_TO_NEWLINE else _n
_CODES = frozenset(ord(op.code) for op in pickletools.opcodes)


_SHORT_TEXT = b"\x8c(?:" + b"|".join(re.escape(bytes((n,))) + b".{%d}" % n for n in range(256)) + b")"


@lru_cache
def _run(top: int) -> re.Pattern[bytes]:
    """Matches many opcodes in a row whose arguments have a fixed length; memo indexes below `(top + 1) << 16`."""
    by_length: dict[int, bytes] = {}
    for code in sorted(_CODES - _REFUSED - {_STOP, _BINPUT}):
        n = _ARGUMENT[code]
        if n is not None and n >= 0:
            by_length[n] = by_length.get(n, b"") + re.escape(bytes((code,)))
    bare = b"[" + by_length.pop(0) + b"]*"
    fixed = [b"[" + codes + b"]" + b"." * n for n, codes in by_length.items()]
    fixed.append(b"r..[\\x00-" + re.escape(bytes((top,))) + b"]\\x00")
    if top > 15:
        # SHORT_BINUNICODE too, where compiling that pays: an index of a million names has little else of variable
        # length (1.4 s -> 0.6 s).
        fixed.append(_SHORT_TEXT)
    return re.compile(b"(?:" + bare + b"(?:" + b"|".join(fixed) + b")){0,5000}" + bare, re.S)


# Tuples in tuples: Python's hash of a tuple calls itself for each, in C and with nothing to stop it, until the stack is
# full: a SIGSEGV at 100,000 or so. Up to _HARMLESS of these opcodes do no harm in any order; where there are more, the
# machine is followed, and no nesting deeper than MAX_NESTED let through.
MAX_NESTED, _HARMLESS = 2000, 20_000
_TUPLES = b"\x85\x86\x87t"


def _check_nested(data: bytes, start: int, end: int) -> None:
    if sum(data.count(code, start, end) for code in _TUPLES) >= _HARMLESS and _may_nest(data, start, end):
        _Depths(data).follow(start, end)


@lru_cache(maxsize=1)
def _shallow() -> re.Pattern[bytes]:
    """Matches opcodes in a row, tuples only of numbers that stand before them, and a tuple around one of these: the
    millions of `torch.Size` in an index."""
    number = b"(?:K.|M..|J.{4}|G.{8})"
    closed = b"%b(?:\x85|%b(?:\x86|%b\x87))|\\((?:%b{1,16}t)?" % ((number,) * 4)
    around = b"(?:(?:\x94|q.|r.{4})*\x85)?"
    by_length: dict[int, bytes] = {}
    for code in sorted(_CODES - {_STOP, *_TUPLES, *b"(KMJG"}):
        n = _ARGUMENT[code]
        if n is not None and n >= 0:
            by_length[n] = by_length.get(n, b"") + re.escape(bytes((code,)))
    bare = b"[" + by_length.pop(0) + b"]*"
    # What is frequent and quickly told comes first.
    other = b"|".join([*(b"[" + codes + b"]" + b"." * n for n, codes in by_length.items()), _SHORT_TEXT])
    return re.compile(
        b"(?:" + bare + b"(?:" + other + b"|(?:" + closed + b")" + around + b"|" + number + b")){0,5000}" + bare, re.S
    )  # fmt: skip


def _may_nest(data: bytes, at: int, end: int) -> bool:
    """Whether more tuples than are harmless could have a tuple in them. Each level of a nesting takes one of these."""
    shallow, count = _shallow().match, 0
    while at < end:
        matched = shallow(data, at)
        assert matched is not None
        at = matched.end()
        if data[at] in _TUPLES:
            count += 1
            if count >= _HARMLESS:
                return True
        at = _memoized(data, _after(data, at, data[at], len(data))).end()  # type: ignore[union-attr]
    return False


# What opcodes do to the stack: how many values they take (None: all down to the mark) and leave. Those in the second
# table leave what they fill or change as it is; the third is for results that may hold, or be, what was taken.
_TAKES: dict[int, tuple[int | None, int]] = {}
for _op in pickletools.opcodes:
    _before = _op.stack_before
    _down = pickletools.stackslice in _before or pickletools.markobject in _before
    _TAKES[ord(_op.code)] = (None if _down else len(_before), len(_op.stack_after))
_FILLS: dict[int, int | None] = {ord("b"): 1, ord("s"): 2, ord("a"): 1, ord("u"): None, ord("e"): None, 0x90: None}
_CALLS = frozenset(b"R\x81\x92QoiP")


class _Depths:
    """Follows the machine with the depth of nested tuples in place of each value."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}

    def follow(self, at: int, end: int) -> None:
        """Raises CorruptError for tuples nested too deep. The machine itself stops at what is impossible, and so what
        comes after that does not matter."""
        data, stack, memo = self._data, self._stack, self._memo
        try:
            while at < end:
                code = data[at]
                after = _after(data, at, code, end)
                if code == 0x94:
                    memo[len(memo)] = stack[-1]
                elif code in b"qrp":
                    memo[self._index(at, after)] = stack[-1]
                elif code in b"hjg":
                    stack.append(memo[self._index(at, after)])
                elif code == ord("("):
                    self._marks.append(len(stack))
                elif code == ord("2"):
                    stack.append(stack[-1])
                elif code == ord("0") and self._marks and self._marks[-1] == len(stack):
                    self._marks.pop()
                elif code in _FILLS:
                    self._taken(_FILLS[code])
                else:
                    takes, leaves = _TAKES[code]
                    taken = self._taken(takes)
                    if leaves:
                        stack.append(self._depth(code, taken, at))
                at = after
        except (LookupError, ValueError):
            return

    def _index(self, at: int, after: int) -> int:
        argument = self._data[at + 1 : after]
        return int(argument) if self._data[at] in b"gp" else int.from_bytes(argument, "little")

    def _taken(self, count: int | None) -> list[int]:
        stack = self._stack
        first = self._marks.pop() if count is None else len(stack) - count
        if first < 0:
            raise IndexError
        taken = stack[first:]
        del stack[first:]
        return taken

    def _depth(self, code: int, taken: list[int], at: int) -> int:
        if code in _CALLS:
            return max(taken, default=0)
        if code not in _TUPLES:
            return 0
        depth = 1 + max(taken, default=0)
        if depth > MAX_NESTED:
            raise CorruptError(f"tuples nested more than {MAX_NESTED} deep at byte {at}")
        return depth


_memoized = re.compile(b"\\x94*").match


def end_of(data: bytes, start: int = 0, *, limit: int | None = None) -> int | None:
    """Where the pickle at `start` ends; None when `data` ends first.

    Raises CorruptError for what no pickle of its size needs: a memo index or a length past `limit` (the length of
    `data`), an extension code, an opcode that there is not, tuples nested without end.
    """
    limit = len(data) if limit is None else limit
    run = _run(min(limit >> 16, 255)).match
    at = start
    try:
        while True:
            matched = run(data, at)
            assert matched is not None
            at = matched.end()
            code = data[at]
            if code == _STOP:
                _check_nested(data, start, at + 1)
                return at + 1
            # The reader of a large DCP index leaves thousands of MEMOIZE behind a name (0.2 s -> 0.0 s).
            at = _memoized(data, _after(data, at, code, limit)).end()  # type: ignore[union-attr]
    except (IndexError, struct.error, ValueError):
        return None


def _after(data: bytes, at: int, code: int, limit: int) -> int:
    """Where the opcode after this one is. Raises IndexError, struct.error or ValueError when `data` ends before."""
    if code not in _CODES or code in _REFUSED:
        raise CorruptError(f"opcode {code:#04x} at byte {at} is not one that a checkpoint needs")
    n = _ARGUMENT[code]
    if n is None:
        end = data.index(b"\n", at)
        if code in _PAIR:
            end = data.index(b"\n", end + 1)
        if code == _PUT:
            _check_memo(data[at + 1 : end], limit)
        return end + 1
    if n >= 0:
        if code == _BINPUT:
            _check_memo(struct.unpack_from("<I", data, at + 1)[0], limit)
        return at + 1 + n
    spelt = _LENGTHS[n]
    length = struct.unpack_from(spelt, data, at + 1)[0]
    if not 0 <= length <= limit:
        raise CorruptError(f"a value of {length} bytes at byte {at}, in a pickle of at most {limit}")
    return at + 1 + struct.calcsize(spelt) + int(length)


def _check_memo(index: int | bytes, limit: int) -> None:
    if isinstance(index, bytes):
        digits = index.strip()
        index = int(digits) if digits.isdigit() and len(digits) < 20 else limit + 1
    if index > limit:
        raise CorruptError(f"memo index {index} in a pickle of {limit} bytes")
