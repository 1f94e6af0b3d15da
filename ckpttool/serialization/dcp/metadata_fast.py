"""Reads the regular part of a large index without the unpickler.

An index of 256 ranks has 750,000 chunks, each in it twice, and after the first few all are the same opcodes except for
names and numbers. In brackets: references to the memo; `PUT` puts a value into it.

    chunk    [ChunkStorageMetadata] NEW  [offsets] VALUE  [sizes] VALUE  ub
    item     [MetadataIndex] NEW  [fqn] VALUE  ...  ub  [_StorageInfo] NEW  [relative_path] VALUE  ...  ub
    NEW      `)\\x81` PUT `}` PUT `(`
    VALUE    an integer | [Size] integers PUT `\\x85` PUT `R` PUT | text PUT | None, True, False | [another]
    PUT      `\\x94`, or in protocols 2 and 3 `r` and a number; nothing, where ckpttool wrote it

Which fields there are, and how their values are spelt, is learnt from samples. A regular expression takes runs of such
entries apart, into columns. In their place the pickle gets one call, of `RunColumns`, which compares the references,
and as many entries for the memo, so that all numbers in it stay right. A reference to something inside a run finds a
`Skipped`, which is of no type that a reader of the index accepts: whatever fails here is read again, whole.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress, islice, pairwise, repeat
from typing import Any, ClassVar, NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.errors import CkptError, CorruptError
from ckpttool.serialization import pickle_opcodes
from ckpttool.serialization.dcp.metadata_tensors import GET as _GET
from ckpttool.serialization.dcp.metadata_tensors import INT as _INT
from ckpttool.serialization.dcp.metadata_tensors import Described, Descriptions, IndexRun, TensorRun

Words = tuple[tuple[str, bytes], ...]

_INTS = rb"\(?" + _INT + rb"+[\x85\x86\x87t]"
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_VALUES = ("int", "ints", "text", "ref")
_FIXED = ("class", "field", "size")  # references that are the same in all entries
_LOOK = 1 << 17  # bytes to find a sample in
_SAMPLES = 32
_TRIES = 64  # in each sample
_LEAST = 8  # entries of a run; fewer are sooner unpickled
_BLOCK = 1 << 17  # bytes that are taken apart at once
_MODULE = "ckpttool index"
_TAKEN = _MODULE.encode() + b"\n"


class Irregular(Exception):
    """Raised if opcodes only look like a run."""


class Skipped:
    """Stands for what is inside a run."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


_SKIPPED = Skipped()


class RunColumns(IndexRun):
    """The columns of one run: for each object of an entry, its fields. A column is as long as the run."""

    __slots__ = ("_columns", "_expected", "_references", "_tables", "count", "marker")

    def __init__(self, columns: list[list[Any]], expected: Sequence[tuple[Any, ...] | None]) -> None:
        super().__init__()
        self.count = len(columns[0])
        self.marker: Skipped | None = None
        self._columns, self._expected = columns, expected
        self._references = list(dict.fromkeys(chain.from_iterable(c for c in columns if isinstance(c[0], bytes))))
        self._tables: list[dict[str, list[Any]]] = []

    @property
    def references(self) -> list[bytes]:
        """The references in columns, each once."""
        return self._references

    def refer(self, found: list[Any]) -> RunColumns:
        """Check the values of the references of the pattern, and set those in columns. Raises CorruptError if they
        differ."""
        values = iter(found)
        if self.marker is not None and [next(values), next(values)] != [self.marker] * 2:
            raise CorruptError("a run of the index has other numbers in the memo")
        columns = iter(self._columns)
        fixed = list(zip(self._expected, values, strict=False))
        strings = dict(zip(self._references, found[len(found) - len(self._references) :], strict=True))
        for wanted, value in fixed:
            if wanted is None:
                if type(value) is not str or value in self._tables[-1]:
                    raise CorruptError("a field of the index has no name of its own")
                column = next(columns)
                is_resolved = not isinstance(column[0], bytes)
                self._tables[-1][value] = column if is_resolved else list(map(strings.__getitem__, column))
                continue
            kind, *allowed = wanted
            if not any(value is one for one in allowed):
                raise CorruptError("a run of the index refers to something else")
            if kind == "class":
                self._tables.append({})
        self._columns, self._references = [], []
        return self

    def use(self, objects: int) -> list[dict[str, list[Any]]]:
        """Return the columns of so many objects, by field. Raises CorruptError the second time."""
        self._take(is_right=len(self._tables) == objects)
        return self._tables


class _Numbers(dict[bytes, int]):
    def __missing__(self, token: bytes) -> int:
        skipped = 2 if token[0] == 0x8A else 1
        number = self[token] = int.from_bytes(token[skipped:], "little", signed=token[0] in b"J\x8a")
        return number


class _Tuples(dict[bytes, Ints]):
    _ints = re.compile(_INT, re.S).findall
    _closed: ClassVar = {b"\x85": 1, b"\x86": 2, b"\x87": 3}

    def __init__(self, numbers: _Numbers) -> None:
        self._numbers = numbers

    def __missing__(self, token: bytes) -> Ints:
        marked = token[:1] == b"("
        made = tuple(map(self._numbers.__getitem__, self._ints(token[marked:-1])))
        if marked != (token[-1:] == b"t") or self._closed.get(token[-1:], len(made)) != len(made):
            raise Irregular
        self[token] = made
        return made


class _Texts(dict[bytes, str]):
    def __missing__(self, token: bytes) -> str:
        made = self[token] = _text(token)
        return made


def _text(token: bytes) -> str:
    begin = 2 if token[0] == 0x8C else 5
    if int.from_bytes(token[1:begin], "little") != len(token) - begin:
        raise Irregular
    return str(token[begin:], "utf-8", "surrogatepass")


# PUT ------------------------------------------------------------------------------------------------------------------

_BEFORE = {"new": (b"", b"}"), "ints": (b"", rb"\x85", b"R"), "text": (b"",)}  # each
_MAX_PUTS = 1 << 16
_HALVES = struct.pack("<65536H", *range(1 << 16)) * 2  # the lower halves of consecutive numbers


class _Put(NamedTuple):
    """Patterns of an opcode that puts a value into the memo, and of a text in front of it."""

    opcode: bytes
    text: bytes
    is_numbered: bool

    def behind(self, kind: str) -> bytes:
        """Return the pattern of what is between a value, or the beginning of an object, and the next."""
        pattern = b"".join(before + self.opcode for before in _BEFORE.get(kind, ()))
        return b"(%b)" % pattern if pattern and self.is_numbered else pattern

    def pattern(self, words: Words) -> bytes:
        """Return the pattern of an entry; a group for each value, and for each row of numbered PUTs."""
        values = {"int": _INT, "ints": _INTS, "text": self.text, "ref": _GET}
        parts = []
        for kind, literal in words:
            if kind == "new":
                parts.append(rb"\)\x81%b\(" % self.behind(kind))
            elif kind in values:
                parts.append(b"(%b)%b" % (values[kind], self.behind(kind)))
            else:
                parts.append(re.escape(literal))
        return b"".join(parts)

    def learn(self, data: bytes, at: int, objects: int) -> Words | None:
        """Return how the entry at this position is spelt."""
        plain = self._replace(is_numbered=False)
        beginning = re.compile(rb"(%b)\)\x81%b\(" % (_GET, plain.behind("new")), re.S)
        field = re.compile(
            b"(?P<field>%b)(?:(?P<int>%b)|(?P<size>%b)(?P<ints>%b)%b|(?P<text>%b)%b|(?P<constant>[N\x88\x89])|(?P<ref>%b))"
            % (_GET, _INT, _GET, _INTS, plain.behind("ints"), self.text, plain.behind("text"), _GET),
            re.S,
        )
        words: list[tuple[str, bytes]] = []
        for _ in range(objects):
            match = beginning.match(data, at)
            if match is None:
                return None
            words += ("class", match[1]), ("new", b"")
            while match := field.match(data, at := match.end()):
                words += ((kind, token) for kind, token in match.groupdict().items() if token is not None)
            if not data.startswith(b"ub", at) or len(words) > 99:
                return None
            words.append(("end", b"ub"))
            at += 2
        if not any(kind in _VALUES for kind, _ in words):
            return None
        return tuple((kind, b"" if kind in _VALUES else token) for kind, token in words)


_MEMOIZE = _Put(rb"\x94", rb"(?:\x8c.|X..\0\0)[^\x94]*", is_numbered=False)
# A text has no zero bytes, and most numbers end with one.
_PLAIN = _Put(b"", rb"(?!)", is_numbered=False)  # all texts are references
_BINPUT = _Put(rb"r...[\0-\3]", rb"X..\0\0[^\0]*", is_numbered=True)


def _half(number: int) -> bytes:
    return number.to_bytes(2, "little")


def _first_number(kinds: Sequence[str], columns: Sequence[Sequence[bytes]], memos: int) -> int:
    """Return the first number of the PUTs in a run. Raises Irregular if those after it are not consecutive."""
    first = number = int.from_bytes(columns[0][0][1:5], "little")
    count = len(columns[0])
    for kind, column in zip(kinds, columns, strict=True):
        tokens, length, at = b"".join(column), len(column[0]), 1
        for _ in _BEFORE[kind]:
            low, high = number & 0xFFFF, number >> 16
            before = min(-(-(0x10000 - low) // memos), count)  # those with the same upper half
            upper = [
                bytes((a,)) * before + bytes((b,)) * (count - before)
                for a, b in zip(_half(high), _half(high + 1), strict=True)
            ]
            lower = [_HALVES[2 * low + n : 2 * (low + count * memos) : 2 * memos] for n in range(2)]
            if [tokens[at + n :: length] for n in range(4)] != lower + upper:
                raise Irregular
            number += 1
            at += 6
    return first


# Runs -----------------------------------------------------------------------------------------------------------------


class Runs:
    """All runs of an index, `data` without them, and the values of the names in their places."""

    def __init__(
        self, data: bytes, middle: int, expected: Mapping[str, tuple[Any, ...]], seen: Callable[[float], None]
    ) -> None:
        self.all: list[RunColumns | TensorRun] = []
        self.names: dict[tuple[str, str], Any] = {(_MODULE, "run"): self._resolved}
        self._expected = expected
        self._seen = seen
        self._source = data
        self._pieces: list[bytes] = []
        self._rest: list[bytes] = []  # since the last run
        numbers = _Numbers()
        self._tables: dict[str, Any] = {"text": _Texts(), "int": numbers, "ints": _Tuples(numbers)}
        # The first class that is referred to is that of the second item.
        found = re.compile(_GET + rb"\)\x81", re.S).search(data, middle)
        self._put = _MEMOIZE if data[1] > 3 else _BINPUT
        if found is not None and data.startswith(b"}", found.end()):
            self._put = _PLAIN
        items = self._learn(re.escape(found[0]), middle, len(data), 2) if found else None
        # Without those of items, these would not be worth while: items may refer to their parts.
        chunks = self._learn(_GET + rb"\)\x81", 0, middle, 1) if items is not None else None
        if chunks is not None and items is not None and self._has_runs(chunks, middle):
            self._take_out(chunks, 0, middle, ("ChunkStorageMetadata",), keeps="ints" not in dict(items))
        elif items is not None and "ints" in dict(items) and not self._put.is_numbered:
            # Items do not refer to the offsets of chunks.
            for piece in Descriptions(data, middle, is_memoized=self.are_memoized):
                if isinstance(piece, Described):
                    self._add_tensors(piece)
                else:
                    self._rest.append(piece)
        else:
            self._rest.append(data[:middle])
        if items is not None:
            self._take_out(items, middle, len(data), ("MetadataIndex", "_StorageInfo"))
        self.data = b"".join([*self._pieces, *self._rest])
        self._source, self._pieces = b"", []

    @property
    def are_memoized(self) -> bool:
        """Whether something outside may refer to what is in a run."""
        return self._put is not _PLAIN

    def _learn(self, beginning: bytes, begin: int, end: int, objects: int) -> Words | None:
        """Return the most frequent spelling of entries of so many objects, in samples. Of chunks all values are
        sizes."""
        samples: Counter[Words] = Counter()
        find = re.compile(beginning, re.S).finditer
        for n in range(_SAMPLES):
            at = begin + (end - begin) * n // _SAMPLES
            for match in islice(find(self._source, at, min(at + _LOOK, end)), _TRIES):
                words = self._put.learn(self._source, match.start(), objects)
                if words is not None and (objects > 1 or not {"int", "text", "constant", "ref"} & {*dict(words)}):
                    samples[words] += 1
                    break
        return samples.most_common(1)[0][0] if samples else None

    def _has_runs(self, words: Words, end: int) -> bool:
        """Return whether samples have runs of an entry: where each tensor has one chunk, there are none."""
        run = re.compile(b"(?:%b){%d}" % (self._put.pattern(words), _LEAST), re.S)
        places = (end * n // _SAMPLES for n in range(_SAMPLES))
        # Samples of a small index would have the same bytes many times.
        look = min(_LOOK, max(2 * end // _SAMPLES, _LOOK >> 3))
        return any(run.search(self._source, at, min(at + look, end)) for at in places)

    def _take_out(self, words: Words, begin: int, end: int, names: Sequence[str], *, keeps: bool = False) -> None:
        put = self._put
        if keeps and put.is_numbered:
            raise Irregular
        spelling = self._spelling(words, names)
        pattern = re.compile(put.pattern(words), re.S)
        step = pattern.groups + 1
        text = self._text(pattern, begin, end)
        behind = b"\x940" + b"\x94" * (spelling.memos - 5)
        for at in range(begin, end, _BLOCK):
            parts = pattern.split(self._source[at : min(at + _BLOCK, end)])
            between, count = parts[::step], len(parts) // step
            groups = (parts[n::step] for n in range(1, step))
            columns: list[list[Any]] = []
            tokens: list[list[bytes]] = []
            numbers: list[list[bytes]] = []
            for kind, literal in words:
                if kind in _VALUES:
                    tokens.append(next(groups))
                    table = self._tables.get(kind)
                    columns.append(tokens[-1] if table is None else list(map(table.__getitem__, tokens[-1])))
                elif kind == "constant":
                    columns.append([_CONSTANTS[literal]] * count)
                if put.is_numbered and kind in _BEFORE:
                    numbers.append(next(groups))
            bounds = [0]
            for n in (*compress(range(1, count), between[1:count]), *([count] if count else ())):
                bounds += (*range(bounds[-1] + spelling.most, n, spelling.most), n)
            for first, last in pairwise(bounds):
                self._rest.append(between[first])
                if last - first < _LEAST:
                    self._rest += (text % (*parts[n + 1 : n + step],) for n in range(first * step, last * step, step))
                    continue
                memo = b""
                if keeps:
                    # The object, its fields, and what the first `Size` is made of; then that.
                    one = zip(repeat(b"\x94" * 4), tokens[0][first:last], repeat(behind), strict=False)
                    memo = b"".join(chain.from_iterable(one))
                parts_of = [column[first:last] for column in numbers]
                number = _first_number(spelling.numbered, parts_of, spelling.memos) if parts_of else None
                self._add(
                    RunColumns([column[first:last] for column in columns], spelling.expected), spelling, number, memo
                )
            self._rest.append(between[count])
            self._seen(min(at + _BLOCK, end) / len(self._source))

    def _text(self, pattern: re.Pattern[bytes], begin: int, end: int) -> bytes:
        """Return what an entry is spelt like, with `%b` for each group."""
        entry = pattern.search(self._source, begin, end)
        if entry is None:
            return b""
        spans = chain.from_iterable(map(entry.span, range(1, 1 + pattern.groups)))
        bounds = (entry.start(), *spans, entry.end())
        literals = (self._source[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True))
        return b"%b".join(literal.replace(b"%", b"%%") for literal in literals)

    def _spelling(self, words: Words, names: Sequence[str]) -> _Spelling:
        left = iter(names)
        expected: list[tuple[Any, ...] | None] = []
        for kind, _ in words:
            if kind == "field":
                expected.append(None)
            elif kind in _FIXED:
                name = next(left) if kind == "class" else "Size"
                expected.append((kind, *self._expected.get(name, (name,))))
        numbered = [kind for kind, _ in words if kind in _BEFORE]
        gets = b"".join(token for kind, token in words if kind in _FIXED)
        memos = sum(len(_BEFORE[kind]) for kind in numbered) if self.are_memoized else 0
        return _Spelling(expected, gets, numbered, memos, len(names) > 1)

    def _add(self, run: RunColumns, spelling: _Spelling, number: int | None, memo: bytes) -> None:
        """Put a call of `RunColumns` in the place of entries, and as many into the memo as these."""
        puts, marks = spelling.memos * run.count, b""
        if number is not None:
            # Only if what is put next gets this number.
            marks = struct.pack("<sIsI", b"j", number, b"j", number + puts - 1)
            run.marker = Skipped()
        given = b"".join((marks, spelling.gets, *run.references))
        self._call(run, memo or b"\x94" * puts, given)
        self._rest = [b"N" if spelling.is_item else b""]

    def _add_tensors(self, run: Described) -> None:
        # A name has its entry in the memo, and what is in a description has that of what was skipped.
        skipped = [b"0" + b"\x94" * count for count in run.memos]
        memo = b"".join(chain.from_iterable((name, put, skipped[number]) for name, put, number in run.entries))
        names = [_text(name) for name, _, _ in run.entries]
        self._call(TensorRun(names, [number for *_, number in run.entries]), memo, b"".join(run.descriptions))
        self._rest = [b"N", run.then]

    def _call(self, run: RunColumns | TensorRun, memo: bytes, given: bytes) -> None:
        """Put a call of a run behind the rest, with what is `given` to it, and what there is to be in the memo."""
        rest = b"".join(self._rest)
        if not pickle_opcodes.is_whole(rest, len(self._source)):
            raise Irregular
        name = f"skipped {len(self.all)}"
        self.names[_MODULE, name] = getattr(run, "marker", None) or _SKIPPED
        self._pieces += (
            rest,
            b"c%b%b\n%b0" % (_TAKEN, name.encode(), memo),
            b"c%brun\n(J%b](%betR" % (_TAKEN, len(self.all).to_bytes(4, "little"), given),
        )
        self.all.append(run)

    def _resolved(self, number: int, found: list[Any]) -> RunColumns | TensorRun:
        return self.all[number].refer(found)


class _Spelling(NamedTuple):
    """What is the same in all entries of a kind."""

    expected: list[tuple[Any, ...] | None]  # what each reference may be, None for the name of a field
    gets: bytes  # these references
    numbered: list[str]  # behind which words values are put into the memo
    memos: int  # how many
    is_item: bool

    @property
    def most(self) -> int:
        """How many entries a run may have."""
        return _MAX_PUTS // max(self.memos, 1)


def find(
    data: bytes, expected: Mapping[str, tuple[Any, ...]], seen: Callable[[float], None] = lambda share: None
) -> Runs | None:
    """Return the runs of the pickled index `data`, or None. `expected` has the values for the name of each class;
    `seen` is told the share that has been looked through."""
    try:
        whole = _unframed(data)
        middle = whole.find(b"storage_data")
        if middle < 0 or not whole.endswith(b".") or _MODULE.encode() in whole:
            return None
        runs = Runs(whole, middle, expected, seen)
        return runs if runs.all else None
    except (Irregular, CkptError, ValueError):
        return None


def _unframed(data: bytes) -> bytes:
    """Return the pickle without its frames, which begin every 64 KiB, even inside a run."""
    if data[2:3] != b"\x95":
        return data
    pieces, at = [data[:2]], 2
    while at < len(data):
        if data[at] != 0x95:
            raise Irregular
        start = at + 9
        at = start + int.from_bytes(data[at + 1 : start], "little")
        pieces.append(data[start:at])
    return b"".join(pieces)
