"""Moves entries to other key paths, with the links in their values; copies of entries and catalogues. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Container, Entry, Object, Part, Path, Tensor, above, dotted
from ckpttool.catalogue.flatten import replaced
from ckpttool.catalogue.values import Link
from ckpttool.errors import UsageError


def move(catalogue: Catalogue, moved: dict[Path, Path]) -> Catalogue:
    """Return entries, containers, aliases, links and part roots under their new paths; what `moved` does not have
    stays.

    Raises UsageError when two entries would have the same name, or one would stand where another needs a dict.
    """
    owners = embedded_owners(catalogue)
    moved = moved | {path: moved.get(owner, owner) + path[len(owner) :] for path, owner in owners.items()}
    result = rebuilt(catalogue, (), {})
    taken: dict[Path, Path] = {}
    names: dict[str, Path] = {}
    root_of = cache(partial(moved_root, moved=moved))
    linking = set(owners.values())
    for path, entry in catalogue.entries.items():
        new = moved.get(path, path)
        clash = taken.get(new, names.get(dotted(new)))
        # Two names that only look the same may stay: `("a.b",)` and `("a", "b")`.
        if clash is not None and (new in taken or new != path or moved.get(clash, clash) != clash):
            message = f"`{dotted(clash)}` and `{dotted(path)}` would both be called `{dotted(new)}`"
            hint = "leave one of them out with `--exclude`, or give it another name with `--rename`"
            raise UsageError(message, hint=hint)
        taken[new] = names[dotted(new)] = path
        part = Part(entry.part.kind, root_of(entry.part.root))
        if isinstance(entry, Tensor):
            alias = moved.get(entry.alias, entry.alias) if entry.alias is not None else None
            result.entries[new] = derived(entry, path=new, part=part, alias=alias)
        else:
            change = partial(relinked, moved=moved) if path in linking else None
            result.entries[new] = entry.at(new, part=part, change=change)
    for new, entry in result.entries.items():
        leaf = next((p for p in above(new) if p in taken), None)
        if leaf is not None and not entry.embedded:
            needs = f"but `{dotted(taken[new])}` needs a dict of that name"
            hint = "give it another name with `--rename`, or leave one of them out with `--exclude`"
            raise UsageError(f"`{dotted(taken[leaf])}` would be called `{dotted(leaf)}`, {needs}", hint=hint)
    result.containers = {moved_root(path, moved): container for path, container in catalogue.containers.items()}
    return result


def relinked(value: Any, moved: Mapping[Path, Path]) -> Any:
    """Return an object's value with its links to tensors under their new paths."""
    return replaced(value, Link, lambda link, _: Link(moved.get(link.path, link.path), link.storage))


def moved_root(root: Path, moved: dict[Path, Path]) -> Path:
    """Return where a dict went, seen from what went with it: the prefix that everything below `root` got."""
    if not root:
        return root
    for path, new in moved.items():
        if path[: len(root)] == root and len(path) > len(root):
            tail = path[len(root) :]
            if new[-len(tail) :] == tail:
                return new[: len(new) - len(tail)]
            return new[: len(root)] if len(new) > len(root) else new[:-1]
    return root


def derived(tensor: Tensor, **changes: Any) -> Tensor:
    """Return a copy of a tensor with other attributes and its origin."""
    # `dataclasses.replace` takes as long again, and a large model has every tensor changed several times.
    changed = Tensor(
        tensor.path,
        tensor.dtype,
        tensor.shape,
        tensor.chunks,
        tensor.part,
        tensor.embedded,
        tensor.origin or tensor,
        tensor.alias,
    )
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def rebuilt(catalogue: Catalogue, entries: Iterable[Entry], containers: dict[Path, Container]) -> Catalogue:
    """Return a copy of a catalogue with other entries and containers."""
    by_path = {entry.path: entry for entry in entries}
    return Catalogue(catalogue.format, [], by_path, containers, catalogue.facts, catalogue.warnings)


def retied(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Return the entries, in which one of those that share their bytes and dtype keeps them, the one that did or the
    first, and the others are its aliases. Before, `alias` may be any path that they have in common."""
    entries = list(entries)
    tensors = [entry for entry in entries if isinstance(entry, Tensor)]
    firsts = {(tensor.path, tensor.dtype): tensor.path for tensor in tensors if tensor.alias is None}
    for entry in entries:
        if isinstance(entry, Tensor):
            first = firsts.setdefault((entry.alias or entry.path, entry.dtype), entry.path)
            alias = None if first == entry.path else first
            entry = entry if alias == entry.alias else derived(entry, alias=alias)
        yield entry


def close_gaps(catalogue: Catalogue) -> Catalogue:
    """Return what is left of each list under the indexes that it has in a list without gaps, as it will be written."""
    places: dict[Path, dict[Hashable, int]] = {p: {} for p, c in catalogue.containers.items() if c.kind == "list"}
    moved: dict[Path, Path] = {}
    for path, entry in catalogue.entries.items() if places else ():
        if not entry.embedded:
            around = zip(path, map(places.get, above(path)), strict=True)
            moved[path] = tuple(key if of is None else of.setdefault(key, len(of)) for key, of in around)
    return move(catalogue, moved) if any(new != path for path, new in moved.items()) else catalogue


def embedded_owners(catalogue: Catalogue) -> dict[Path, Path]:
    """Return for each embedded tensor the object that links to it, with which its path begins."""
    entries = catalogue.entries
    return {
        tensor.path: next(path for path in above(tensor.path) if isinstance(entries.get(path), Object))
        for tensor in catalogue.tensors
        if tensor.embedded
    }
