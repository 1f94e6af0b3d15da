"""SHA-256 of files, and of the values of tensors however they are stored. A byte that is part of both is read once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from graphlib import CycleError, TopologicalSorter
from hashlib import sha256
from itertools import pairwise
from math import prod
from operator import itemgetter
from threading import Condition
from typing import Any, NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.storage import files
from ckpttool.storage.crc import crc32, end_vectors
from ckpttool.storage.stores import Location
from ckpttool.transfer.read import read_tiles
from ckpttool.transfer.threads import Work, on_threads

_BUFFER = 1 << 20
_PATIENCE = 0.1  # seconds after which a thread that waits looks whether another has failed


def of_files(
    root: Location, names: Iterable[str], threads: int, work: Work, values: ValuesInFiles | None = None
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the SHA-256 of each file, in hexadecimal, and the CRC-32 of each. The tensors of `values`, which was made
    for these names, get their digests, too."""
    hashes = dict.fromkeys(names, "")
    crcs = dict.fromkeys(hashes, 0)
    buffer = files.ThreadBuffer(_BUFFER)
    values = values or ValuesInFiles({}, [], [])
    # A thread more for each file, as both digests of a block take the same time. None waits for one of another file.
    helpers = ThreadPoolExecutor(len(values.runs)) if 0 < len(values.runs) <= threads // 2 else None

    def hash_one(name: str) -> None:
        digest, crc, at = sha256(), 0, 0
        runs = iter(values.runs.get(name, ()))
        run = next(runs, None)
        for block in _blocks(root / name, buffer.view[:_BUFFER]):
            end, parts = at + len(block), list[tuple[_Run, memoryview]]()
            while run is not None and run.begin < end:
                parts.append((run, block[max(run.begin - at, 0) : run.end - at]))
                if run.end > end:
                    break
                run = next(runs, None)
            also = helpers.submit(values.update, parts, end, work) if helpers is not None and parts else None
            digest.update(block)
            crc = crc32(block, crc)
            end_vectors()
            if also is not None:
                also.result()
            else:
                values.update(parts, end, work)
            work.note(len(block) + sum(len(part) for _, part in parts))
            at = end
        hashes[name], crcs[name] = digest.hexdigest(), crc

    try:
        on_threads(iter(values.in_order(hashes)), hash_one, threads, work)
    finally:
        if helpers is not None:
            helpers.shutdown()
    return hashes, crcs


def _blocks(location: Location, buffer: memoryview) -> Iterator[memoryview]:
    """Yield a whole file block by block, in one buffer."""
    with location.open() as stream:
        while count := stream.readinto(buffer):  # type: ignore[attr-defined]  # as all that are opened can
            yield buffer[:count]


def of_tensors(source: Source, tensors: Sequence[Tensor], threads: int, work: Work) -> dict[Path, str]:
    """Return the SHA-256 of the values of each tensor. Tied tensors are read once."""
    aliases = find_aliases(tensors)
    hashes: dict[Path, str] = {}

    def hash_one(tensor: Tensor) -> None:
        digest = sha256()
        for _, bits in read_tiles(tensor, source, pool, _BUFFER):
            digest.update(bits.reshape(-1).view("u1").data)
            work.note(bits.nbytes)
        hashes[tensor.path] = digest.hexdigest()

    with closing(files.Pool()) as pool:
        on_threads((t for t in tensors if t.path not in aliases), hash_one, threads, work)
    return hashes | {path: hashes[kept] for path, kept in aliases.items()}


class _Run(NamedTuple):
    """The bytes `begin..end` of a file, which follow those of `number - 1` other runs in the values of a tensor."""

    begin: int
    end: int
    tensor: int
    number: int


class ValuesInFiles:
    """The runs of bytes in files that are the values of tensors, one after another, and their digests so far.

    A file is read from its beginning, as is a tensor: a thread that comes to a run waits for those before it, which lie
    in files that are read before, or at the same time by other threads. So none waits for one that waits for it.
    """

    def __init__(self, runs: Mapping[str, Sequence[_Run]], paths: Sequence[Path], counts: Sequence[int]) -> None:
        self.runs, self.hashes = runs, dict[Path, str]()
        self._paths, self._counts = paths, counts
        self._digests: dict[int, Any] = {}
        self._done = [0] * len(paths)
        self._changed = Condition()

    def in_order(self, names: Iterable[str]) -> Iterable[str]:
        """Return the names in the order in which the files are to be read: those with runs first."""
        return dict.fromkeys((*self.runs, *names))

    def update(self, parts: Iterable[tuple[_Run, memoryview]], end: int, work: Work) -> None:
        """Add parts of runs to the digests of their tensors; `end` is where in the file they end. Raises Stopped."""
        for run, part in parts:
            tensor = run.tensor
            if self._done[tensor] != run.number:
                self._wait(run, work)
            digest = self._digests.get(tensor)
            if digest is None:
                digest = self._digests[tensor] = sha256()
            digest.update(part)
            if run.end > end:
                continue
            if run.number + 1 == self._counts[tensor]:
                self.hashes[self._paths[tensor]] = self._digests.pop(tensor).hexdigest()
            else:
                with self._changed:
                    self._done[tensor] += 1
                    self._changed.notify_all()

    def _wait(self, run: _Run, work: Work) -> None:
        with self._changed:
            while self._done[run.tensor] != run.number:
                work.note(0)
                self._changed.wait(_PATIENCE)


def values_in_files(root: Location, names: Sequence[str], source: Source, tensors: Iterable[Tensor]) -> ValuesInFiles:
    """Return where in these files below `root` the values of tensors lie one run after another, so that one reading of
    the files is enough for both. Left out are tensors whose elements lie in another order, or in files whose order
    others contradict, and all but one of those that overlap. Raises CorruptError."""
    called = {(root / name).real(): name for name in names}
    own = ((number, file) for number, file in enumerate(source.catalogue.files) if not file.scratch)
    numbers = {number: name for number, file in own if (name := called.get(file.location.real())) is not None}
    paths: list[Path] = []
    counts: list[int] = []
    runs: defaultdict[str, list[_Run]] = defaultdict(list)
    after: defaultdict[str, set[str]] = defaultdict(set)
    for tensor in tensors:
        pieces = _in_order(tensor, source, numbers) if tensor.numel else None
        if pieces:
            for number, (name, begin, end) in enumerate(pieces):
                runs[name].append(_Run(begin, end, len(paths), number))
            for (one, _, _), (other, _, _) in pairwise(pieces):
                if one != other:
                    after[other].add(one)
            paths.append(tensor.path)
            counts.append(len(pieces))
    ordered = {name: sorted(runs[name], key=itemgetter(0, 1)) for name in _sorted(runs, after)}
    apart = _possible(ordered.values(), len(paths))
    return ValuesInFiles({n: [r for r in of if r.tensor in apart] for n, of in ordered.items()}, paths, counts)


def _in_order(tensor: Tensor, source: Source, names: Mapping[int, str]) -> list[tuple[str, int, int]] | None:
    """Return the file, the first byte and the end of each run that is a tensor's values, or None."""
    strides, chunks = boxes.row_major(tensor.shape), tensor.chunks
    found: list[tuple[int, int]] = []
    for index, (offsets, sizes) in enumerate(zip(chunks.offsets, chunks.sizes, strict=True)):
        count = prod(sizes)
        if count and (chunks.file[index] not in names or boxes.run_length(sizes, tensor.shape) != count):
            return None
        if count:
            found.append((sum(map(int.__mul__, offsets, strides)), index))
    pieces: list[tuple[str, int, int]] = []
    at = 0
    for start, index in sorted(found):
        chunk = chunks.at(index)
        extent, nbytes = source.resolve(tensor, chunk), prod(chunk.sizes) * tensor.dtype.itemsize
        name = names.get(extent.file)
        if start != at or name is None or not extent.plain or extent.nbytes != nbytes:
            return None
        pieces.append((name, extent.offset, extent.offset + nbytes))
        at += prod(chunk.sizes)
    return pieces if at == tensor.numel else None


def _sorted(names: Iterable[str], after: Mapping[str, set[str]]) -> list[str]:
    """Return files in an order in which each is `after` others; as they are if these contradict each other."""
    try:
        return [*TopologicalSorter({name: after.get(name, set()) for name in names}).static_order()]
    except CycleError:
        return sorted(names)


def _possible(runs: Iterable[Sequence[_Run]], count: int) -> set[int]:
    """Return the tensors all of whose runs follow each other, file by file, and overlap with no other's."""
    left, expected = set(range(count)), [0] * count
    for of_file in runs:
        end = 0
        for run in of_file:
            if run.begin < end or run.number != expected[run.tensor]:
                left.discard(run.tensor)
            else:
                end = run.end
            expected[run.tensor] += 1
    return left
