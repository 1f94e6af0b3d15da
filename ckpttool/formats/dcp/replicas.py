"""Replicated entries: equal copies of several ranks are read once, different ones are kept for each rank."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpttool.catalogue.warning import Kind, Warning
from ckpttool.errors import CkptError
from ckpttool.formats.dcp.index import Copy, Index
from ckpttool.formats.dcp.items import SMALL, Items
from ckpttool.serialization import pickler
from ckpttool.serialization.dcp.metadata import IndexItem, StoredTensor
from ckpttool.text import some


class Replicas:
    """The copies of several ranks of the entries of an index, in their items."""

    def __init__(self, index: Index, items: Items, *, is_safetensors: bool) -> None:
        self._index, self._items, self._is_safetensors = index, items, is_safetensors

    def settle(self) -> list[Warning]:
        """Give entries that differ from rank to rank a name for each rank, and return warnings about them."""
        by_name: dict[str, list[Copy]] = defaultdict(list)
        for copy in self._index.copies:
            by_name[copy.name].append(copy)
        per_rank: list[str] = []
        differing: list[str] = []
        unknown: list[str] = []
        equal = 0
        for name, copies in by_name.items():
            results = [self._is_same(copy) for copy in copies]
            if False in results:
                entry = self._index.entries[name]
                is_whole = isinstance(entry, IndexItem) or entry.sizes == [entry.shape]
                (per_rank if is_whole else differing).append(name)
            elif None in results:
                unknown.append(name)
            else:
                equal += 1
        for name in per_rank:
            self._keep_apart(name, by_name[name])
        warnings: list[Warning] = []
        if equal:
            text = f"{equal} entries are stored by several ranks, alike; one copy is read"
            warnings.append(Warning("replicated", text))
        kinds: tuple[tuple[Kind, list[str], str], ...] = (
            ("per-rank", per_rank, "entries differ from rank to rank and are kept for each"),
            ("differing-replicas", differing, "tensors have replicas that differ; the first is read"),
            ("not-compared", unknown, "entries are stored by several ranks and were not compared"),
        )
        for kind, names, text in kinds:
            if names:
                warnings.append(Warning(kind, f"{len(names)} {text}: {some(names)}"))
        return warnings

    def _is_same(self, copy: Copy) -> bool | None:
        try:
            return self._is_same_tensor(copy) if copy.chunk is not None else self._is_same_object(copy)
        except CkptError:
            return None

    def _is_same_tensor(self, copy: Copy) -> bool | None:
        checksums: list[object] = []
        for item in (copy.first, copy.again):
            if self._is_safetensors:
                entry = self._items.blob(item).tensors[copy.name]
                checksums.append(self._items.crc(item.file, entry.begin, entry.end))
                continue
            archive = self._items.archive(item, copy.name)
            record = archive.records.get("data/0")
            if record is None or not archive.has_crcs:
                return None
            checksums.append((record.nbytes, record.crc))
        return checksums[0] == checksums[1]

    def _is_same_object(self, copy: Copy) -> bool | None:
        if copy.first.length == copy.again.length and copy.first.length <= SMALL:
            one, other = (self._items.bytes_of(i, copy.name) for i in (copy.first, copy.again))
            if one == other:
                return True
        trees = [self._items.tree(i, copy.name) for i in (copy.first, copy.again)]
        if any(archive is not None for _, archive in trees):
            return None if copy.first.length == copy.again.length else False
        return pickler.dump(trees[0][0]) == pickler.dump(trees[1][0])

    def _keep_apart(self, name: str, copies: list[Copy]) -> None:
        index = self._index
        first = index.entries[name]
        path = (index.paths or {}).get(name, (name,))
        rank = index.files[copies[0].first.file].rank or 0
        entries = {f"rank_{rank}": first}
        for copy in copies:
            entries[f"rank_{copy.rank}"] = copy.again if isinstance(first, IndexItem) else _again(first, copy.again)
        index.entries = _with_in_place(index.entries, name, {f"{name}.{key}": entries[key] for key in entries})
        if index.paths is not None:
            index.paths = _with_in_place(index.paths, name, {f"{name}.{key}": (*path, key) for key in entries})


def _with_in_place(table: dict[str, Any], name: str, replacement: dict[str, Any]) -> dict[str, Any]:
    changes = (replacement if key == name else {key: value} for key, value in table.items())
    return dict(chain.from_iterable(change.items() for change in changes))


def _again(tensor: StoredTensor, item: IndexItem) -> StoredTensor:
    """Return the same tensor, whole, in another item."""
    files, starts, lengths = array("l", [item.file]), array("q", [item.offset]), array("q", [item.length])
    transforms = {0: item.transforms} if item.transforms else {}
    return replace(tensor, files=files, starts=starts, lengths=lengths, transforms=transforms)
