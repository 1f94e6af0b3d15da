"""Reads each kind of tensor in an index once: 100,000 tensors differ in their names, and have few shapes.

In an index that torch wrote, or ckpttool, all that is said of a tensor is the same bytes for each of a kind, as long as
it has its own memo entries or none. In brackets: references to the memo; `PUT` puts a value into it, or is nothing.

    entry    name PUT DESCRIPTION
    DESCRIPTION  [TensorStorageMetadata] NEW `(` ([field] VALUE)* `ub`
    VALUE    SIZE | PROPERTIES | CHUNKS | an integer | None, True, False | [another]
    SIZE     [Size] integers PUT `\\x85` PUT `R` PUT
    PROPERTIES  [TensorProperties] `)\\x81` PUT (`(` plain values `t` PUT | [another]) `b`
    CHUNKS   `]` PUT, and one [ChunkStorageMetadata] NEW `(` ([field] SIZE)* `ub` and `a`, or `(`, several and `e`

A description takes nothing from the stack but what it has put there, changes nothing but what it has made, and leaves
one value. So a run of entries becomes one: the names, and descriptions that the unpickler makes once for the run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple, NoReturn

from ckpttool.errors import CorruptError

INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x08.{8})"
GET = rb"(?:h.|j....)"
_INTS = rb"(?:%b(?:\x85|%b(?:\x86|%b\x87))|\(%b{4,}t)" % (INT, INT, INT, INT)
_BLOCK = 1 << 17  # bytes that are taken apart at once
_LEAST = 8  # entries of a run
_LONGEST = 1000  # bytes of a name: from each byte that looks like the opcode of a text, so many are searched
_NUMBERED = rb"(?:q.|r....)"


def _description(put: bytes) -> bytes:
    new, end = rb"\)\x81%b\}%b\(" % (put, put), b"ub"
    plain = rb"(?:%b|%b|[N\x88\x89])" % (INT, GET)
    size = rb"%b(?:%b%b|\))\x85%bR%b" % (GET, _INTS, put, put, put)
    properties = rb"%b\)\x81%b(?:\(%b*t%b|%b)b" % (GET, put, plain, put, GET)
    chunk = b"%b%b(?:%b%b)*%b" % (GET, new, GET, size, end)
    chunks = rb"\]%b(?:%ba|\((?:%b)+e)" % (put, chunk, chunk)
    return b"%b%b(?:%b(?:%b|%b|%b|%b))+%b" % (GET, new, GET, size, properties, chunks, plain, end)


class IndexRun:
    """Entries of an index one after the other, for which one object stands in the pickle."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = False

    def __setstate__(self, state: Any) -> NoReturn:
        raise CorruptError("a pickle changes what stands for a run of the index")

    def _take(self, *, is_right: bool) -> None:
        """Note that it was used. Raises CorruptError the second time, and unless it `is_right`."""
        if self.used or not is_right:
            raise CorruptError("a run of the index comes twice, or is not where it belongs")
        self.used = True


class TensorRun(IndexRun):
    """Tensors one after the other: their `names`, and which of the `descriptions` each has."""

    __slots__ = ("descriptions", "names", "numbers")

    def __init__(self, names: list[str], numbers: list[int]) -> None:
        super().__init__()
        self.names, self.numbers = names, numbers
        self.descriptions: list[Any] = []

    def refer(self, descriptions: list[Any]) -> TensorRun:
        """Set what the pickle has made of the descriptions."""
        self.descriptions = descriptions
        return self

    def use(self) -> TensorRun:
        """Return the run itself. Raises CorruptError the second time."""
        self._take(is_right=bool(self.descriptions))
        return self


class Described(NamedTuple):
    """A run of entries: each with what puts its name on the stack and into the memo, and the number of its description.
    The descriptions put nothing into the memo; in the index, each put as many values there as `memos` says. `then` is
    what is behind the last."""

    entries: list[tuple[bytes, bytes, int]]
    descriptions: list[bytes]
    memos: list[int]
    then: bytes


class _Kind(NamedTuple):
    description: bytes
    memos: int
    read: frozenset[int]  # the numbers in the memo that it refers to
    then: bytes


class Descriptions:
    """The runs of tensors in an index up to `end`. If it `is_memoized`, all values have memo entries, else only names
    have, each with its number."""

    def __init__(self, source: bytes, end: int, *, is_memoized: bool) -> None:
        put = rb"\x94" if is_memoized else b""
        name = (
            rb"(\x8c.[^\x94]{0,255}|X..\0\0[^\x94]{0,%d})(\x94)" % _LONGEST
            if is_memoized
            else rb"(X..\0\0[^\0]*?)(%b)" % _NUMBERED
        )
        self._source, self._end = source, end
        self._entry = re.compile(rb"%b(?=%b\)\x81%b\}%b\(%b)" % (name, GET, put, put, GET), re.S)
        self._whole = re.compile(rb"(%b)(u\(|)" % _description(put), re.S)
        self._token = re.compile(rb"(%b)|(%b)|(\x94)" % (INT, GET), re.S)
        self._kinds: dict[bytes, _Kind | None] = {}

    def __iter__(self) -> Iterator[bytes | Described]:
        """Yield runs, and the bytes between them as they are."""
        at = 0
        while at < self._end:
            block = self._source[at : min(at + _BLOCK, self._end)]
            at += len(block)
            parts = self._entry.split(block)
            if at < self._end and len(parts) > 4:
                # The end of the last entry is in the next block.
                at -= sum(map(len, parts[-3:]))
                del parts[-3:]
            yield parts[0]
            for text, count in Counter(parts[3::3]).items():
                # Where each tensor has a shape of its own, to look at them takes longer than to unpickle them.
                if count >= _LEAST and text not in self._kinds:
                    self._kinds[text] = self._kind(text)
            run: list[tuple[bytes, bytes, bytes]] = []
            for entry in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
                if self._kinds.get(entry[2]) is not None:
                    run.append(entry)
                else:
                    yield self._run(run)
                    yield b"".join(entry)
                    run = []
            yield self._run(run)

    def _kind(self, text: bytes) -> _Kind | None:
        whole = self._whole.fullmatch(text)
        if whole is None:
            return None
        tokens = self._token.findall(whole[1])
        read = frozenset(int.from_bytes(get[1:], "little") for _, get, _ in tokens if get)
        return _Kind(self._token.sub(rb"\1\2", whole[1]), sum(put != b"" for *_, put in tokens), read, whole[2])

    def _run(self, run: list[tuple[bytes, bytes, bytes]]) -> bytes | Described:
        numbers: dict[bytes, int] = {}
        entries = [(name, put, numbers.setdefault(text, len(numbers))) for name, put, text in run]
        kinds = [kind for text in numbers if (kind := self._kinds[text]) is not None]
        puts = {int.from_bytes(put[1:], "little") for _, put, _ in run if put[1:]}
        # Of many kinds, each is sooner unpickled where it is. No name may get a number that descriptions refer to.
        if len(run) < _LEAST * max(len(kinds), 1) or not all(puts.isdisjoint(kind.read) for kind in kinds):
            return b"".join(chain.from_iterable(run))
        then = kinds[numbers[run[-1][2]]].then
        return Described(entries, [kind.description for kind in kinds], [kind.memos for kind in kinds], then)
