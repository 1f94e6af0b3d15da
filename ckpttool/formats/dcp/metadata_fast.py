"""Reads the regular part of a large index without the unpickler.

An index of 256 ranks has 750,000 chunks, each in it twice, and after the first few all are the same opcodes except for
a name and some numbers. In brackets: references to the memo; `\\x94` puts a value into it. A name may be a reference,
too.

    [ChunkStorageMetadata] NEW  [offsets] [Size] ints SIZE  [sizes] [Size] ints SIZE  ub
    [MetadataIndex] NEW  [fqn] text \\x94 [index] int [offset] [Size] ints SIZE  ub
    [_StorageInfo] NEW  [relative_path] [path] [offset] int [length] int  ub
    NEW = `)\\x81\\x94}\\x94(`   SIZE = `\\x94\\x85\\x94R\\x94`

So spell Python's picklers protocols 4 and 5. A regular expression takes such runs apart, into columns. In their place
the pickle gets one call, of `Run`, which compares the references, and as many entries for the memo, so that all numbers
in it stay right. A reference to something inside a run finds `SKIPPED`, which is of no type that a reader of the index
accepts: whatever fails here is read again, whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar, NoReturn

from ckpttool.catalogue.boxes import Ints
from ckpttool.errors import CorruptError

Row = tuple[Any, Any, Any, Any, Any, Any, Any]
Words = tuple[str | bytes, ...]

_INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6})"
_GET = rb"(?:h.|j....)"
_COLUMNS = {
    "text": rb"\x8c.[^\x94]*",
    "int": _INT,
    "ints": rb"\(?" + _INT + rb"+[\x85\x86\x87t]",
    "path": _GET,
    "name": _GET,
}
_NEW, _SIZE = b")\x81\x94}\x94(", b"\x94\x85\x94R\x94"
# Bytes as they are; columns; and in brackets what is referred to: our class, or the string itself.
_CHUNK = (
    "[ChunkStorageMetadata]", _NEW, "[offsets]", "[Size]", "ints", _SIZE, "[sizes]", "[Size]", "ints", _SIZE, b"ub",
)  # fmt: skip
_PLACED = (
    "[MetadataIndex]", _NEW, "[fqn]", "text", b"\x94", "[index]", "int", "[offset]", "[Size]", "ints", _SIZE, b"ub",
    "[_StorageInfo]", _NEW, "[relative_path]", "path", "[offset]", "int", "[length]", "int", b"ub",
)  # fmt: skip
_NAMED = tuple(word for word in _PLACED if word != b"\x94")  # by a reference
_NAMED = tuple("name" if word == "text" else word for word in _NAMED)
_LOOK = 1 << 20  # bytes to find the first regular entry in
_MODULE = "ckpttool index"
_TAKEN = _MODULE.encode() + b"\n"


class Irregular(Exception):
    """Raised if opcodes only look like a run."""


class _Skipped:
    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


SKIPPED = _Skipped()


class Run:
    """The columns of one run: of chunks `offsets` and `sizes`, of items `rows`. A column is as long as the run."""

    __slots__ = ("_expected", "_strings", "columns", "used")

    def __setstate__(self, state: Any) -> NoReturn:
        raise CorruptError("a pickle changes what stands for a run of the index")

    def __init__(self, columns: list[list[Any]], expected: tuple[tuple[Any, ...], ...]) -> None:
        self.columns = columns
        self._expected = expected
        self._strings: dict[bytes, Any] = {}
        self.used = False

    def resolve(self, found: list[Any]) -> Run:
        """Check the values of the references of the pattern, and set the names and paths. Raises CorruptError if they
        differ."""
        n = len(self._expected)
        if any(have not in wanted for have, wanted in zip(found, self._expected, strict=False)):
            raise CorruptError("a run of the index refers to something else")
        if len(self.columns) == 6:
            if not all(type(value) is str for value in found[n:]):
                raise CorruptError("a name or path is not a string")
            self._strings = dict(zip(self.references(), found[n:], strict=True))
        return self

    def references(self) -> list[bytes]:
        """Return the references to names and paths in a run of items, each once."""
        references = dict.fromkeys(self.columns[3])
        if type(self.columns[0][0]) is bytes:
            references |= dict.fromkeys(self.columns[0])
        return list(references)

    def use(self, count: int) -> list[list[Any]]:
        """Return this many columns. Raises CorruptError the second time."""
        if self.used or len(self.columns) != count:
            raise CorruptError("a run of the index comes twice, or is not where it belongs")
        self.used = True
        return self.columns

    def rows(self) -> Iterator[Row]:
        """Return for each item: fqn, offsets, hint, path, start, length and None for the transforms."""
        names, hints, offsets, paths, starts, lengths = self.use(6)
        found = self._strings.__getitem__
        known = map(found, names) if type(names[0]) is bytes else names
        return zip(known, offsets, hints, map(found, paths), starts, lengths, repeat(None))


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
        if token[1] != len(token) - 2:
            raise Irregular
        made = self[token] = str(token[2:], "utf-8", "surrogatepass")
        return made


def _pattern(words: Iterable[str | bytes], references: Iterator[bytes], *, take: bool) -> bytes:
    columns = {word: b"(%b)" % pattern if take else pattern for word, pattern in _COLUMNS.items()}
    return b"".join(
        re.escape(word) if isinstance(word, bytes) else columns[word] if word in columns else next(references)
        for word in words
    )


class Runs:
    """All runs of an index, `data` without them, and the values of the names in their places."""

    def __init__(
        self, data: bytes, middle: int, expected: Mapping[str, tuple[Any, ...]], seen: Callable[[float], None]
    ) -> None:
        self.all: list[Run] = []
        self.names = {(_MODULE, "skipped"): SKIPPED, (_MODULE, "run"): self._resolved}
        self._expected = expected
        self._seen = seen
        self._source, self._at = data, 0
        self._pieces: list[bytes] = []
        numbers = _Numbers()
        self._tables: dict[str, Any] = {"text": _Texts(), "int": numbers, "ints": _Tuples(numbers)}
        items = self._regular((_PLACED, _NAMED), middle, len(data))
        # Without those of items, these would not be worth while: items may refer to their parts.
        chunks = self._regular((_CHUNK,), 0, middle) if items is not None else None
        if chunks is not None:
            self._take_out(*chunks, 0, middle)
        if items is not None:
            self._take_out(*items, middle, len(data))
        self.data = b"".join([*self._pieces, data[self._at :]])
        self._source, self._pieces = b"", []

    def _regular(self, spellings: Sequence[Words], begin: int, end: int) -> tuple[Words, tuple[bytes, ...]] | None:
        """Return the most frequent of some spellings near the beginning, and its first references."""
        most: tuple[list[tuple[bytes, ...]], Words] = [], ()
        for spelling in spellings:
            learnt = re.compile(_pattern(spelling, repeat(b"(" + _GET + b")"), take=False), re.S)
            found = learnt.findall(self._source, begin, min(end, begin + _LOOK))
            most = max(most, (found, spelling), key=lambda m: len(m[0]))
        return (most[1], most[0][0]) if most[0] else None

    def _take_out(self, words: Words, first: tuple[bytes, ...], begin: int, end: int) -> None:
        data = self._source
        gets = list(map(re.escape, first))
        runs = re.compile(b"(?:" + _pattern(words, iter(gets), take=False) + b"){2,5000}", re.S)
        rows = re.compile(_pattern(words, iter(gets), take=True), re.S).findall
        names = [word[1:-1] for word in words if isinstance(word, str) and word.startswith("[")]
        expected = tuple(self._expected.get(name, (name,)) for name in names)
        tables = [self._tables.get(word) for word in words if isinstance(word, str) and word in _COLUMNS]
        memos = sum(word.count(b"\x94") for word in words if isinstance(word, bytes))
        for found in runs.finditer(data, begin, end):
            taken = zip(*rows(data, *found.span()), strict=True)
            columns = [
                list(map(table.__getitem__, column) if table is not None else column)
                for table, column in zip(tables, taken, strict=True)
            ]
            run = Run(columns, expected)
            given = b"".join((*first, *(run.references() if words is not _CHUNK else ())))
            self._pieces += (
                data[self._at : found.start()],
                b"c%bskipped\n%b0" % (_TAKEN, b"\x94" * (memos * len(columns[0]))),
                b"c%brun\n(J%b](%betR" % (_TAKEN, len(self.all).to_bytes(4, "little"), given),
                b"" if words is _CHUNK else b"N",
            )  # fmt: skip
            self._at = found.end()
            self.all.append(run)
            self._seen(self._at / len(data))

    def _resolved(self, number: int, found: list[Any]) -> Run:
        return self.all[number].resolve(found)


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
    except (Irregular, ValueError):
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
