"""Scans the opcodes of a pickle before it runs: finds its end and enforces limits; `pickle_limits` counts the others.

CPython's machine makes room for the highest memo index that a pickle names: nine bytes, `80 02 4e 72 ff ff ff 7f 2e`,
take 32 GiB. And an extension code can stand for a class that this process has loaded, past `find_class`.
Source: `pickletools` and `Modules/_pickle.c` of Python 3.10 to 3.14.
"""

from __future__ import annotations

import pickletools
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from ckpttool.catalogue.key_hashes import MANY
from ckpttool.errors import CorruptError
from ckpttool.serialization import pickle_limits

MAX_PICKLE = 1 << 31  # bytes
MAX_INTEGER = 1700  # bytes: 4,094 digits
_LONG = 0x8B
_LARGE = _GUARDED = 1 << 20  # bytes
_TEXTLESS = 15
_PIECE = 1 << 13  # bytes of opcodes that are looked through at once
_LONG_ROW = 16
_WINDOW = 1 << 16
_MAX_LINE = 1 << 26  # bytes; the text of protocol 0 ends where its line does
_TUPLE, _OWN_ID = ord("t"), ord("Q")
_STOP, _MARK, _BINPUT, _PUT, _PAIR = ord("."), ord("("), ord("r"), ord("p"), frozenset(b"ci")
# EXT1, EXT2, EXT4; NEXT_BUFFER, READONLY_BUFFER; and DUP, which no pickler writes: 50 of them make a tuple of tuples
# whose hash takes years.
REFUSED = frozenset(b"\x82\x83\x84\x97\x982")

# Bytes of argument behind each opcode; negative: up to a newline, or as many as a length says.
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: "<B",
    pickletools.TAKEN_FROM_ARGUMENT4: "<i",
    pickletools.TAKEN_FROM_ARGUMENT4U: "<I",
    pickletools.TAKEN_FROM_ARGUMENT8U: "<Q",
}
_ARGUMENT = {ord(op.code): 0 if op.arg is None else op.arg.n for op in pickletools.opcodes}
_CODES = frozenset(_ARGUMENT)
_FIXED = frozenset(code for code, n in _ARGUMENT.items() if n >= 0)
_PUTS = (b"p", b"q", b"r", b"\x94")


def _texts(opcode: bytes, length: str) -> bytes:
    """Return a pattern of an opcode with a text of at most 255 bytes."""
    return opcode + b"(?:" + b"|".join(re.escape(struct.pack(length, n)) + b".{%d}" % n for n in range(256)) + b")"


_SHORT_TEXT = _texts(b"\x8c", "<B")


@lru_cache
def _run(top: int) -> re.Pattern[bytes]:
    """Return a pattern of opcodes whose arguments have a fixed length; memo indexes below `(top + 1) << 16`."""
    by_length = pickle_limits.fixed_length(_CODES - REFUSED - {_STOP, _BINPUT})
    bare = by_length.pop(0) + b"*"
    fixed = [*by_length.values(), b"r..[\\x00-" + re.escape(bytes((top,))) + b"]\\x00"]
    if top > _TEXTLESS:
        # SHORT_BINUNICODE too, where compiling that pays: an index of a million names has little else of variable
        # length (1.4 s -> 0.6 s).
        fixed.append(_SHORT_TEXT)
    return re.compile(b"(?:" + bare + b"(?:" + b"|".join(fixed) + b")){0,5000}" + bare, re.S)


# A tuple of at most 16 integers, and a tuple of that: nothing in them is shared.
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x04.{4}|\x05.{5}|\x06.{6}))"
_FLAT = rb"(?:%b(?:\x85|%b(?:\x86|%b\x87))|\(%b{4,16}t)" % (_INT, _INT, _INT, _INT)
FLAT_COST = 18  # elements of what that matches
_TUPLES, _FRAME = frozenset(b"\x85\x86\x87t"), 0x95
# What a guarded pickle may not have: containers with other limits, sets of keys, and persistent ids of its own.
_UNGUARDED = frozenset(b"ldoiQP\x8f\x90\x91")

# What puts keys into a dict or a set (SETITEMS, SETITEM, DICT, ADDITEMS, FROZENSET), and in the place of each a tuple
# of what it takes from the stack, which is a persistent id. What answers that puts it back there, with its keys.
INSERTIONS = {ord("u"): b"t\x86Q", ord("s"): b"\x87Q", ord("d"): b"tQ", 0x90: b"t\x86Q", 0x91: b"tQ"}
# In the same way calls whose result is taken off the stack again (REDUCE, POP), and objects of a class that may be
# one that the pickle makes itself (NEWOBJ, NEWOBJ_EX).
_DROPPED, _OBJECTS = b"R0", b"\x81\x92"
_CALLS = {ord("R"): b"\x86Q", 0x81: b"\x86Q", 0x92: b"\x87Q"}
_IN_PLACE = {**INSERTIONS, **_CALLS, _OWN_ID: b"Q"}
_OWN_IDS = frozenset(b"QP")
# What makes values whose hash a file can choose; of a file that has fewer, each byte counted, the keys are few.
_CHOSEN = (b"t", b"\x85", b"\x86", b"\x87", b"\x8a", b"\x8b", b"I", b"L", b"\x91")


_GET = rb"(?:h.|j.{4})"
_TEXT = b"(?:%b|%b)" % (_SHORT_TEXT, _texts(b"X", "<I"))
_OBJECT = re.compile(rb"%b\)\x81(?:\x94|q.|r.{4})?}(?:\x94|q.|r.{4})?\(" % _GET, re.S)  # its beginning
_SAMPLES = 32
_LEARNT = 6
_TELL = 1 << 17  # bytes between two looks at how far it is


def _light(top: int, learnt: Iterable[bytes] = ()) -> re.Pattern[bytes]:
    """Return a pattern of opcodes as `_run` does, but no tuple except a flat one; those of `learnt` at once."""
    codes = _CODES - REFUSED - _UNGUARDED - _TUPLES - INSERTIONS.keys() - {_STOP, _BINPUT, _FRAME, _MARK}
    by_length = pickle_limits.fixed_length(codes)
    bare = by_length.pop(0) + b"*"
    others = [*learnt, _flat(top), rb"\(", *by_length.values(), _put(top), _INT, _TEXT]
    return re.compile(b"(?:" + bare + b"(?:" + b"|".join(others) + b")){0,5000}" + bare, re.S)


def _put(top: int) -> bytes:
    return b"r..[\\x00-" + re.escape(bytes((top,))) + b"]\\x00"


def _flat(top: int) -> bytes:
    return b"(?:%b(?:\x94|q.|%b)?\x85?|\\)\x85)" % (_FLAT, _put(top))


def _learn(data: bytes, top: int) -> list[bytes]:
    """Return patterns for the most frequent objects in samples of a pickle, of nothing that `_light` would not match
    without them: a pattern that names most of what it looks for is three times as fast."""
    kinds = [_flat(top), b"(?:q.|%b)" % _put(top), _INT, _TEXT]
    parts = [*kinds, _GET, rb"[)}(NRub\x81\x88\x89\x94]"]
    word = re.compile(b"|".join(b"(%b)" % part for part in parts), re.S).match
    samples: dict[tuple[bytes, ...], list[list[bytes]]] = {}
    for n in range(_SAMPLES):
        begin = len(data) * n // _SAMPLES
        found = _OBJECT.search(data, begin, begin + _WINDOW)
        shape: list[bytes] = []
        gets: list[bytes] = []
        token = word(data, found.start()) if found else None
        while token and len(shape) < 64:
            part = parts[(token.lastindex or 0) - 1]
            if part is _GET:
                gets.append(token[0])
            shape.append(re.escape(token[0]) if part is parts[-1] else part)
            if token[0] == b"b":
                # The state of an object: one dict, of a few fields, that nothing else has.
                if shape[-2:] == [b"u", b"b"] and [shape.count(n) for n in (b"u", rb"\(", rb"\}")] == [1, 1, 1]:
                    samples.setdefault(tuple(shape), []).append(gets)
                break
            token = word(data, token.end())
    patterns = []
    for words, seen in sorted(samples.items(), key=lambda sample: -len(sample[1]))[:_LEARNT]:
        named = iter([re.escape(get[0]) if len({*get}) == 1 else _GET for get in zip(*seen, strict=True)])
        patterns.append(b"".join(next(named) if part is _GET else part for part in words))
    return patterns


_row: Callable[[bytes, int], re.Match[bytes]] = re.compile(b"\\x94*").match  # type: ignore[assignment]


def end_of(data: bytes) -> int | None:
    """Return where the pickle at the beginning of `data` ends; None when `data` ends first. Raises CorruptError for
    what no pickle of its size needs: a memo index or a length past that of `data`, an extension code, an opcode that
    there is not."""
    end, is_whole = _walk(data, len(data))
    return end if is_whole else None


def is_whole(data: bytes, size: int) -> bool:
    """Return whether `data`, a part of a pickle of `size` bytes, has only whole opcodes."""
    return _walk(data, size, memo=size) == (len(data), False)


def find_end(read: Callable[[int, int], bytes], size: int) -> int | None:
    """Return where the pickle that begins `size` bytes ends; None when they end first. Reads windows of them, and never
    a text that is longer: a text of a tebibyte in a hole costs nothing.

    `read(offset, nbytes)` gives bytes of it. Raises CorruptError as `end_of` does.
    """
    at, window = 0, _WINDOW
    while at < size and window <= _MAX_LINE:
        data = read(at, min(window, size - at))
        end, is_whole = _walk(data, size, memo=size)
        if is_whole:
            return at + end
        if end == 0 and len(data) < window:
            return None
        window = _WINDOW if end else window * 4
        at += end
    return None


def check(data: bytes) -> int | None:
    """Return `end_of(data)`, once it is known that the machine can run this pickle without taking all the memory or all
    the time that there is. Raises CorruptError when it cannot."""
    heavy, shared = pickle_limits.is_heavy(data), pickle_limits.may_share(data)
    if not (heavy or shared):
        return end_of(data)
    code = _Code()
    end, is_whole = _walk(data, len(data), code)
    if not is_whole:
        return None
    if heavy:
        pickle_limits.check_objects(b"".join(code.pieces), end)
    if shared and (code.has_lines or pickle_limits.shares_tuples(code.pieces, code.rows)):
        pickle_limits.check_keys(data, end, lambda data, at: _after(data, at, data[at], len(data), len(data)))
    return end


class PicklePieces:
    """Pieces of a pickle, and behind some of them opcodes in the place of one of its own. They are made as they come:
    300,000 of them would take three times the memory of the pickle."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._bounds, self._then = array("q"), bytearray()

    def add(self, begin: int, end: int, then: int = 0) -> None:
        """Add the bytes from `begin` to `end`, and what stands in the place of the opcode `then`, unless that is 0."""
        self._bounds.extend((begin, end))
        self._then.append(then)

    def __iter__(self) -> Iterator[bytes]:
        for begin, end, then in zip(self._bounds[::2], self._bounds[1::2], self._then, strict=True):
            yield self._data[begin:end]
            if then:
                yield _IN_PLACE[then]


class Answered(NamedTuple):
    """A pickle in pieces, some opcodes of which are persistent ids now; `calls` has for each, in order, the opcode in
    whose place it is: `Q` for one of its own, `t` for a tuple, one of `INSERTIONS` or of those that call."""

    pieces: PicklePieces
    calls: bytearray


def guarded(data: bytes, seen: Callable[[float], None] = lambda share: None) -> Answered | None:
    """Return the large pickle `data`, without its frames, so that each tuple in it that may hold another, and what is
    put into dicts, is first a persistent id. None for one that is better checked as a whole. `seen` is told the share
    that has been looked through."""
    if len(data) < _GUARDED or not pickle_limits.is_light(data):
        return None
    # Twice what an index of DCP has; counting takes 0.3 s. The reader of such an index leaves rows of MEMOIZE.
    memo = (len(data) >> 2) + data.count(b"\x94")
    top = min(memo >> 16, 255)
    try:
        return _answered(data, _light(top, _learn(data, top)), memo, _TUPLES, _UNGUARDED, seen)
    except (_Unguarded, CorruptError, IndexError, struct.error, ValueError):
        return None


def answered(data: bytes, *, objects: bool = False) -> Answered | None:
    """Return the whole pickle `data`, without its frames, so that what is put into dicts and sets is first a persistent
    id, and so are calls whose result is dropped and, with `objects`, the making of objects; None where that is not
    worth looking at."""
    calls = (b"R" if _DROPPED in data else b"") + (_OBJECTS if objects else b"")
    if not calls and sum(map(data.count, _CHOSEN)) <= MANY:
        return None
    return _answered(data, _inserting(len(data) > _LARGE, calls), len(data), frozenset(), frozenset())


class _Unguarded(Exception):
    """Raised for an opcode that a guarded pickle may not have."""


def _answered(
    data: bytes,
    pattern: re.Pattern[bytes],
    memo: int,
    tuples: frozenset[int],
    refused: frozenset[int],
    seen: Callable[[float], None] = lambda share: None,
) -> Answered:
    run = pattern.match
    pieces = PicklePieces(data)
    calls = bytearray()
    begin = at = told = 0
    while True:
        at = run(data, at).end()  # type: ignore[union-attr]
        if at - told > _TELL:
            seen(at / len(data))
            told = at
        opcode = data[at]
        if opcode == _STOP:
            if at + 1 != len(data):
                raise _Unguarded
            pieces.add(begin, at + 1)
            return Answered(pieces, calls)
        if opcode in refused:
            raise _Unguarded
        if opcode in tuples:
            at += 1
            pieces.add(begin, at, _OWN_ID)
            calls.append(_TUPLE)
            begin = at
            continue
        if opcode in INSERTIONS:
            pieces.add(begin, at, opcode)
            calls.append(opcode)
            begin = at = at + 1
            continue
        if opcode in _CALLS and (opcode in _OBJECTS or data.startswith(_DROPPED, at)):
            pieces.add(begin, at, opcode)
            calls.append(opcode)
            begin = at = at + 1
            continue
        if opcode in _OWN_IDS:
            calls.append(_OWN_ID)
        after = _after(data, at, opcode, len(data), memo)
        if opcode == _FRAME:
            pieces.add(begin, at)
            begin = after
        # As in `_walk`.
        at = _row(data, after).end()


@lru_cache
def _inserting(has_texts: bool, calls: bytes) -> re.Pattern[bytes]:
    """Return a pattern of opcodes that put nothing into dicts and sets, and are none of `calls`."""
    codes = _CODES - REFUSED - INSERTIONS.keys() - _OWN_IDS - {_STOP, _FRAME, *calls}
    by_length = pickle_limits.fixed_length(codes)
    bare = by_length.pop(0) + b"*"
    others = [*by_length.values(), *([_TEXT] if has_texts else [])]
    return re.compile(b"(?:" + bare + b"(?:" + b"|".join(others) + b")){0,5000}" + bare, re.S)


def check_beginning(window: bytes, size: int) -> None:
    """Raise CorruptError when a pickle of `size` bytes that begins like this cannot be one, before all of it is read:
    a file may be a hole of any length."""
    if size > MAX_PICKLE:
        message = f"a pickle of {size} bytes is more than the {MAX_PICKLE} that we read"
        raise CorruptError(message, found=size, expected=MAX_PICKLE)
    _walk(window, size)


class _Code:
    """The opcodes of a pickle without their text: pieces of whole ones, `N` in the place of each that has text. `rows`
    has for each piece how many MEMOIZE behind it were left out; they number what has text."""

    def __init__(self) -> None:
        self.pieces: list[bytearray] = []
        self.rows: list[int] = []
        self.has_lines = False  # numbers what it memoizes in text, as protocol 0 does
        self._before = b""

    def add(self, data: bytes, begin: int, at: int, after: int) -> int:
        """Add those at `begin..at`, of a fixed length, and the one at `at..after`. Returns where the next begins."""
        if not self.pieces or self.rows[-1] or len(self.pieces[-1]) > _PIECE:
            self.pieces.append(bytearray(self._before))
            self.rows.append(0)
        piece = self.pieces[-1]
        if data[at] in _FIXED:
            piece += data[begin:after]
            self._before = b""
            return after
        piece += data[begin:at]
        piece += b"N"
        self._before = b"N"
        self.has_lines |= data[at] in b"pg"
        row = _row(data, after).end() - after
        if row < _LONG_ROW:
            return after
        self.rows[-1] = row
        return after + row


def _walk(data: bytes, limit: int, code: _Code | None = None, memo: int | None = None) -> tuple[int, bool]:
    """Return where the last whole opcode ends, and whether it ends the pickle; `code` gets the opcodes."""
    if memo is None:
        # Each index is given to something. In a file that is mostly a hole, hardly anything is.
        memo = min(limit, sum(map(data.count, _PUTS))) if limit > _LARGE else limit
    top = min(memo >> 16, 255)
    run = _run(top if code is None else min(top, _TEXTLESS)).match
    begin = at = 0
    try:
        while True:
            at = run(data, begin).end()  # type: ignore[union-attr]
            opcode = data[at]
            after = at + 1 if opcode == _STOP else _after(data, at, opcode, limit, memo)
            # The reader of a large DCP index leaves thousands of MEMOIZE behind a name (0.2 s -> 0.0 s).
            begin = code.add(data, begin, at, after) if code else max(after, _row(data, after).end())
            if opcode == _STOP:
                return after, True
    except (IndexError, struct.error, ValueError):
        return max(begin, at), False


def after(data: bytes, at: int, code: int, limit: int) -> int:
    """Return where the opcode behind the one at `at`, of a pickle of `limit` bytes, is; past `data` if the text of that
    one is longer. Raises IndexError, struct.error or ValueError if `data` ends before that can be told."""
    return _after(data, at, code, limit, limit)


def _after(data: bytes, at: int, code: int, limit: int, memo: int) -> int:
    """Return where the next opcode is. Raises IndexError, struct.error or ValueError if `data` ends before."""
    if code not in _CODES or code in REFUSED:
        raise CorruptError(f"opcode {code:#04x} at byte {at} is not one that a checkpoint needs")
    n = _ARGUMENT[code]
    if n == pickletools.UP_TO_NEWLINE:
        end = data.index(b"\n", at)
        if code in _PAIR:
            end = data.index(b"\n", end + 1)
        if code == _PUT:
            _check_memo(data[at + 1 : end], memo)
        return end + 1
    if n >= 0:
        if code == _BINPUT:
            _check_memo(struct.unpack_from("<I", data, at + 1)[0], memo)
        return at + 1 + n
    length_format = _LENGTHS[n]
    length = struct.unpack_from(length_format, data, at + 1)[0]
    if code == _LONG and length > MAX_INTEGER:
        message = f"an integer of {length} bytes at byte {at}: Python itself prints none of more than {MAX_INTEGER}"
        raise CorruptError(message, found=length, expected=MAX_INTEGER)
    if not 0 <= length <= limit:
        raise CorruptError(f"a value of {length} bytes at byte {at}, in a pickle of at most {limit}")
    return at + 1 + struct.calcsize(length_format) + int(length)


def _check_memo(index: int | bytes, limit: int) -> None:
    if isinstance(index, bytes):
        digits = index.strip()
        index = int(digits) if digits.isdigit() and len(digits) < 20 else limit + 1
    if index > limit:
        raise CorruptError(f"memo index {index} in a pickle that has room for {limit}")
