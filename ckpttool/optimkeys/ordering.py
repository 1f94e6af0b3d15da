"""The parameters of each group in the order of the model, as `AdamW(model.parameters())` has them. Pure.

    param_groups [{params: [norm.w, layers.0.w]}]    model layers.0.w, norm.w    ->    [{params: [layers.0.w, norm.w]}]

FSDP1 with flat parameters has them unit by unit, the root's first. Where the next optimizer is known to be made of the
model's parameters as they come, and numbers them, the ids have to be given in that order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool import layout, optimkeys
from ckpttool.catalogue import Catalogue, Entry, Object, Path, Tensor, dotted
from ckpttool.optimkeys import found

_LISTS = ("params", "param_names")


def numbered(catalogue: Catalogue, source: Catalogue) -> Catalogue:
    """The optimizers spelt by ids in the order of the model in `source`. Those that have ids already, and those of a
    model whose order is not known, keep their own."""
    if all(optimizer.spelling == "id" for optimizer in found.optimizers(catalogue)):
        return catalogue
    named = optimkeys.respell(catalogue, "fqn", source)
    places: dict[str, int] = {}
    for root, paths in layout.models(source)[:1]:
        if not any(_is_sorted(source, path) for path in paths):
            places = {dotted(path[len(root) :]): place for place, path in enumerate(paths)}
    entries = [_ordered(entry, places) if _lists_names(entry) else entry for entry in named.entries.values()]
    return optimkeys.respell(layout.rebuilt(named, entries, named.containers), "id", source)


def _is_sorted(source: Catalogue, path: Path) -> bool:
    """A safetensors file is sorted by name."""
    entry = source.entries[path]
    if not isinstance(entry, Tensor) or not len(entry.chunks) or not source.files:
        return False
    return source.files[entry.chunks.file[0]].name.endswith(".safetensors")


def _lists_names(entry: Entry) -> bool:
    below = entry.path[len(entry.part.root) :]
    return entry.part.kind == "optimizer" and len(below) == 3 and below[0] == "param_groups" and below[2] in _LISTS


def _ordered(entry: Entry, places: dict[str, int]) -> Entry:
    names = entry.value if isinstance(entry, Object) else None
    if (
        not isinstance(entry, Object)
        or not isinstance(names, list)
        or not all(isinstance(name, str) and name in places for name in names)
    ):
        return entry
    ordered: Sequence[str] = sorted(names, key=places.__getitem__)
    return entry if ordered == names else entry.at(entry.path, change=lambda value: list(ordered))
