"""Compares what the ranks saved: copies of a tensor or a value, and counters that prove that files are of two saves.

Copies are the same by the checksums of their records where those prove it, else by reading. Every rank counts steps and
epochs, and steps schedulers and optimizers, like all others; random number generators, data loaders, tokens seen and
losses are each rank's own, and prove nothing.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from ckpttool.catalogue import boxes, identity, parts
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Entry, Extent, File, Object, Path, Tensor, dotted
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.errors import CorruptError, ReadError
from ckpttool.formats.rankfiles.rank_file import RankFile
from ckpttool.serialization.dtensor import RankShard
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.storage.files import Pool
from ckpttool.text import rank_ranges, some

_TILE = 1 << 20
_MAX_READ = 1 << 30  # bytes of all comparisons together
_MAX_GATHERED = 1 << 22  # elements of a tensor that is not row-major
_COUNTERS = {
    "progress": re.compile(
        r"((global|current|total|train|num|last|completed)_)*(step|steps|epoch|epochs|iteration|iterations|iter|iters)"
        r"(_num|_count|_idx)?",
        re.IGNORECASE,
    ),
    "scheduler": re.compile(r"last_epoch|_?step_count|num_steps"),
    "optimizer": re.compile(r"(.*\.)?(step|lr|initial_lr)"),
}
_MINOR = ("scheduler", "rng", "dataloader", "scaler", "progress")
_SHOWN = 6  # sets of rank files, and keys of one, in a message
_STRUCT_CODES = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


class CopyComparer:
    """Compares elements in the files of a catalogue. It reads up to a limit: opening a checkpoint is not reading it."""

    def __init__(self, pool: Pool, files: list[File]) -> None:
        self._pool, self._files, self._left = pool, files, _MAX_READ

    def same(self, itemsize: int, sizes: Ints, a: Extent, b: Extent) -> bool | None:
        """Return whether two copies of a box have the same elements; None if that would take too much reading."""
        if a == b or 0 in sizes:
            return True
        same_layout = a.strides == b.strides and a.codec == b.codec and a.nbytes == b.nbytes
        if same_layout and a.record is not None and b.record is not None and a.record.crc is not None:
            within = a.offset - a.record.offset, b.offset - b.record.offset
            if (a.record.crc, a.record.nbytes, within[0]) == (b.record.crc, b.record.nbytes, within[1]):
                return True
            if b.record.crc is not None and a.record.nbytes == b.record.nbytes == a.nbytes and a.strides is None:
                return False
        if a.codec != b.codec or a.nbytes + b.nbytes > self._left:
            return None
        self._left -= a.nbytes + b.nbytes
        if a.strides is None and b.strides is None:
            return all(self.read(a, at, _TILE) == self.read(b, at, _TILE) for at in range(0, a.nbytes, _TILE))
        if max(a.nbytes, b.nbytes) > _MAX_GATHERED * itemsize:
            return None
        return self._elements(itemsize, sizes, a) == self._elements(itemsize, sizes, b)

    def read(self, extent: Extent, at: int = 0, most: int = _MAX_READ) -> bytes:
        """Return up to `most` bytes of an extent, from `at` on, as they lie in the file."""
        nbytes = min(most, extent.nbytes - at)
        return self._pool.read(self._files[extent.file].location, extent.offset + at, nbytes)

    def _elements(self, itemsize: int, sizes: Ints, extent: Extent) -> list[bytes]:
        data = self.read(extent)
        at = [0]
        for size, stride in zip(sizes, extent.strides or boxes.row_major(sizes), strict=True):
            at = [start + i * stride for start in at for i in range(size)]
        return [data[i * itemsize : (i + 1) * itemsize] for i in at]


def same_value(a: Object, b: Object) -> bool:
    """Return whether two objects have the same value."""
    x, y = a.value, b.value
    if type(x) is type(y) and (x is None or isinstance(x, (bool, int, str, bytes))):
        return bool(x == y)
    return identity.same(x, y)


Counters = dict[str, dict[Path, dict[int, Entry]]]  # that differ from the catalogue's: kind -> path -> rank -> entry


def is_counter(kind: str, path: Path, entry: Entry) -> bool:
    """Return whether an entry of a part of this kind is a counter that all ranks of a save have alike."""
    # A counter that is a list of one for each optimizer ends in an index.
    key = next((key for key in reversed(path) if not isinstance(key, int)), "")
    if kind not in _COUNTERS or not _COUNTERS[kind].fullmatch(str(key)):
        return False
    if isinstance(entry, Tensor):
        return entry.numel == 1
    return isinstance(entry.value, (int, float)) and not isinstance(entry.value, bool)


def two_saves(
    counters: Counters,
    catalogue: Catalogue,
    comparer: CopyComparer,
    names: Mapping[int, str],
    absent: Mapping[Path, Collection[int]],
    stages: bool,
) -> CorruptError | None:
    """Return the error that proves two saves by the plainest counter that differs; None if none does. With pipeline
    `stages` the groups of one number have other parameters on each, and may have another learning rate."""
    kinds = [*_COUNTERS][: 2 if stages else 3]
    differing = {path: of_ranks for kind in kinds for path, of_ranks in counters.get(kind, {}).items()}
    # One at the top that the ranks have alike proves one save, whatever those of its name below it count.
    alike = catalogue.entries.keys() - differing.keys()
    proofs = {path: of_ranks for path, of_ranks in differing.items() if path[-1:] not in alike}
    if not proofs:
        return None
    path, *further = proofs
    ranks_by_value: dict[str, list[int]] = defaultdict(list)
    for rank in names:
        if rank in proofs[path] or rank not in absent.get(path, ()):
            ranks_by_value[_value(proofs[path].get(rank, catalogue.entries[path]), comparer)].append(rank)
    shown = [
        f"{value} on {rank_ranges(ranks)} ({some([names[rank].strip('`') for rank in ranks])})"
        for value, ranks in ranks_by_value.items()
    ]
    more = f"; so {'does' if len(further) == 1 else 'do'} {some([*map(dotted, further)])}" if further else ""
    many = "two" if len(ranks_by_value) < 3 else str(len(ranks_by_value))
    return CorruptError(
        f"the files are of {many} saves: `{dotted(path)}` differs between ranks: {' and '.join(shown[:4])}{more}",
        hint="take all files from one save: a mixture of several is a model that never existed",
        ranks=sorted(proofs[path]),
        found=dict(ranks_by_value),
        entries=[*map(dotted, [*proofs][:100])],
    )


def check_parts(patterns: Mapping[str, str], loaded: Mapping[Path, RankFile]) -> None:
    """Raise ReadError if the files of one part are whole training states and those of another have weights, too: these
    are two runs in a directory. `patterns` are the names of the files of each part."""
    whole, weights = [], []
    for (part, *_), file in loaded.items():
        kinds = _kinds_in(file.tree)
        if {"model", "optimizer"} <= kinds:
            whole.append(patterns[str(part)])
        elif kinds & {"model", "optimizer"} and parts.kind_of_key(part) not in _MINOR:
            weights.append(patterns[str(part)])
    if whole and len(whole) + len(weights) > 1:
        held = {patterns[str(part)]: _holds(file.tree) for (part, *_), file in loaded.items()}
        ordered = {pattern: held[pattern] for pattern in dict.fromkeys([*whole, *weights, *held])}
        sets = [f"`{pattern.rpartition('/')[2]}` ({content})" for pattern, content in ordered.items()]
        names = ", ".join(sets[:_SHOWN]) + (f" and {len(sets) - _SHOWN} more" if len(sets) > _SHOWN else "")
        commands = " or ".join([f"`ckpttool inspect '{pattern}'`" for pattern in [*ordered][:_SHOWN]])
        hint = f"name one, here and in other commands: {commands}"
        raise ReadError(f"several sets of rank files, each a checkpoint: {names}", hint=hint, found=[*ordered])


def _holds(tree: Any) -> str:
    """Return what a file has, for a message: `model, optim, step`."""
    if not isinstance(tree, dict):
        return "one value"
    if {"state", "param_groups"} <= tree.keys():
        return "optimizer"
    return ", ".join(map(spelt, tree)) if len(tree) <= _SHOWN else f"{len(tree):,} entries"


def _kinds_in(tree: Any) -> set[str]:
    """Return the kinds of parts that a file has at its root: `{"model", "optimizer"}`; a bare state dict is a model."""
    if not isinstance(tree, dict):
        return set()
    if {"state", "param_groups"} <= tree.keys():
        return {"optimizer"}
    kinds = {kind for key, value in tree.items() if isinstance(value, dict) and (kind := parts.kind_of_key(key))}
    return kinds or {"model" for value in tree.values() if isinstance(value, (TensorRef, RankShard))}


def _value(entry: Entry, comparer: CopyComparer) -> str:
    if isinstance(entry, Object):
        return shown(entry.value)
    code = _STRUCT_CODES.get(entry.dtype.name)
    if code is None or not len(entry.chunks):
        return "another value"
    return f"{struct.unpack(code, comparer.read(entry.chunks[0].extent))[0]:g}"
