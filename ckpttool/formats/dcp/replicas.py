"""What several ranks have stored under one name: read once where it is alike, kept for each rank where it is not."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import replace
from typing import Any

from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError
from ckpttool.formats.dcp import items as dcpitems
from ckpttool.formats.dcp.index import Copy, Index
from ckpttool.formats.dcp.items import Items
from ckpttool.formats.dcp.metadata import Item, StoredTensor
from ckpttool.serialization import pickler as picklewriter
from ckpttool.text import some


def settle(index: Index, items: Items, *, is_safetensors: bool) -> list[Warning]:
    """Give entries of `index` that differ from rank to rank a name for each. What a person should know of them."""
    return _Copies(index, items, is_safetensors).settle()


class _Copies:
    def __init__(self, index: Index, items: Items, is_safetensors: bool) -> None:
        self._index, self._items, self._is_safetensors = index, items, is_safetensors

    def settle(self) -> list[Warning]:
        by_name: dict[str, list[Copy]] = defaultdict(list)
        for copy in self._index.copies:
            by_name[copy.name].append(copy)
        apart: list[str] = []
        unlike: list[str] = []
        unknown: list[str] = []
        twice = 0
        for name, copies in by_name.items():
            same = [self._is_same(copy) for copy in copies]
            if False in same:
                entry = self._index.entries[name]
                whole = isinstance(entry, Item) or entry.sizes == [entry.shape]
                (apart if whole else unlike).append(name)
            elif None in same:
                unknown.append(name)
            else:
                twice += 1
        for name in apart:
            self._keep_apart(name, by_name[name])
        warnings: list[Warning] = []
        if twice:
            text = f"{twice} entries are stored by several ranks, alike; one copy is read"
            warnings.append(Warning("replicated", text))
        if apart:
            text = f"{len(apart)} entries differ from rank to rank and are kept for each: {some(apart)}"
            warnings.append(Warning("per-rank", text))
        if unlike:
            text = f"{len(unlike)} tensors have replicas that differ; the first is read: {some(unlike)}"
            warnings.append(Warning("differing-replicas", text))
        if unknown:
            text = f"{len(unknown)} entries are stored by several ranks and were not compared: {some(unknown)}"
            warnings.append(Warning("not-compared", text))
        return warnings

    def _is_same(self, copy: Copy) -> bool | None:
        try:
            return self._is_same_tensor(copy) if copy.chunk is not None else self._is_same_object(copy)
        except CkptError:
            return None

    def _is_same_tensor(self, copy: Copy) -> bool | None:
        found: list[object] = []
        for item in (copy.first, copy.again):
            if self._is_safetensors:
                entry = self._items.blob(item).tensors[copy.name]
                found.append(self._items.crc(item.file, entry.begin, entry.end))
                continue
            archive = self._items.archive(item, copy.name)
            record = archive.records.get("data/0")
            if record is None or not archive.has_crcs:
                return None
            found.append((record.nbytes, record.crc))
        return found[0] == found[1]

    def _is_same_object(self, copy: Copy) -> bool | None:
        if copy.first.length == copy.again.length and copy.first.length <= dcpitems.SMALL:
            one, other = (self._items.bytes_of(i, copy.name) for i in (copy.first, copy.again))
            if one == other:
                return True
        trees = [self._items.tree(i, copy.name) for i in (copy.first, copy.again)]
        if any(archive is not None for _, archive in trees):
            return None if copy.first.length == copy.again.length else False
        spelt = [picklewriter.dump(tree) for tree, _ in trees]
        return spelt[0] == spelt[1]

    def _keep_apart(self, name: str, copies: list[Copy]) -> None:
        index = self._index
        first = index.entries[name]
        path = (index.paths or {}).get(name, (name,))
        rank = index.files[copies[0].first.file].rank or 0
        made: dict[str, StoredTensor | Item] = {f"{name}.rank_{rank}": first}
        paths = {f"{name}.rank_{rank}": (*path, f"rank_{rank}")}
        for copy in copies:
            key = f"{name}.rank_{copy.rank}"
            paths[key] = (*path, f"rank_{copy.rank}")
            made[key] = copy.again if isinstance(first, Item) else _again(first, copy.again)
        index.entries = _with_in_place(index.entries, name, made)
        if index.paths is not None:
            index.paths = _with_in_place(index.paths, name, paths)


def _with_in_place(table: dict[str, Any], name: str, made: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in table.items():
        changed.update(made if key == name else {key: value})
    return changed


def _again(tensor: StoredTensor, item: Item) -> StoredTensor:
    """The same tensor, whole, in another item."""
    transforms = {0: item.transforms} if item.transforms else {}
    return replace(
        tensor, files=array("l", [item.file]), starts=array("q", [item.offset]), lengths=array("q", [item.length]),
        transforms=transforms,
    )  # fmt: skip
